"""The GEMM of specialised warps against its operands taken apart, in fp64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import tmoe
from tests.checking import assert_matches
from tmoe.kernels.activation_ref import activate_ref
from tmoe.kernels.grouped_gemm import grouped_gemm
from tmoe.kernels.launch import cdiv, specializes_warps
from tmoe.kernels.quantize_fp8 import quantize_fp8
from tmoe.kernels.sort import SortedTokens, sort_tokens
from tmoe.kernels.tiles import Tile
from tmoe.kernels.weight_codes import Scales

COUNTS = [0, 1, 63, 64, 65, 200, 0, 385, 130]  # rows of each expert; the last expert's aren't local
BLOCKS = (128, 128)
UNTOUCHED = 0x55  # a code


@pytest.fixture(autouse=True)
def hopper(device):
    if not specializes_warps(device):
        pytest.skip("needs a Hopper GPU and a Triton whose Gluon is known")


@dataclass(frozen=True)
class Problem:
    """Ragged and empty experts, rows past the last one's, and what `grouped_gemm` is given."""

    a: Tensor
    w: tmoe.QuantizedTensor
    order: SortedTokens
    scales: Scales
    given: dict

    @staticmethod
    def of(N, D, activation, interleaved, bias, device) -> Problem:
        gated = activation in ("swiglu", "swiglu_oai", "geglu")
        E, width = len(COUNTS) - 1, N * (2 if gated else 1)
        ids = torch.arange(len(COUNTS), device=device).repeat_interleave(
            torch.tensor(COUNTS, device=device)
        )
        ids = ids[torch.randperm(len(ids), device=device)].unsqueeze(1)
        order = sort_tokens(ids, num_experts=E, block_m=128)
        steps = 2.0 ** (torch.arange(D, device=device) // 128 % 5)  # every block has its own scale
        x = torch.randn(len(ids), D, device=device) * steps
        a, a_scale = quantize_fp8(x, block=(1, 128), scales_by_column=True)
        a.view(torch.uint8)[order.expert_offsets[-1] :] = 0x7F  # NaN
        w = torch.randn(E, width, D, device=device) / steps
        w *= 2.0 ** (torch.arange(width, device=device) // 64 % 3)[:, None]
        w = tmoe.quantize(w, "fp8_block", block_shape=BLOCKS)
        given = {
            "bias": torch.randn(E, width, device=device) if bias else None,
            "row_weight": None if activation != "identity" else torch.rand(len(ids), device=device),
            "activation": activation, "gated": gated, "interleaved": interleaved,
            "alpha": 1.7, "limit": 7.0 if activation == "swiglu_oai" else math.inf,
        }  # fmt: skip
        return Problem(a, w, order, Scales(w.scale, *BLOCKS, rows=a_scale), given)

    def run(self, out: Tensor, out_blocks: Tensor | None = None, num_stages: int = 4) -> Tensor:
        tile = Tile(128, 128, 128, 4, num_stages, specialized=True)
        scales = Scales(self.w.scale, *BLOCKS, rows=self.scales.rows, out_blocks=out_blocks)
        grouped_gemm(out, self.a, self.w.data, self.order, tile, scales=scales, **self.given)
        assert self.order.taken.item() == 0  # for the next GEMM
        return out

    def truth(self, dtype: torch.dtype) -> Tensor:
        D = self.a.shape[1]
        values = self.a.float() * self.scales.rows.repeat_interleave(128, 1)[:, :D]
        w = self.w.dequantize().to(dtype)
        return reference(values.to(dtype), w, self.order, **self.given)


SIZES = [
    (256, 512, "identity", False),
    (72, 48, "relu2", False),
    (200, 1104, "identity", False),
    (192, 512, "swiglu", False),
    (64, 1104, "swiglu_oai", False),
    (320, 144, "swiglu", False),
    (200, 144, "geglu", True),
    (2048, 7168, "swiglu", False),
    (7168, 2048, "identity", False),
]
each_size = pytest.mark.parametrize("N, D, activation, interleaved", SIZES)


@pytest.mark.parametrize("bias", [False, True])
@each_size
def test_fp8_blocks(N, D, activation, interleaved, bias, device):
    problem = Problem.of(N, D, activation, interleaved, bias, device)
    out = torch.full((len(problem.a), N), math.nan, device=device, dtype=torch.bfloat16)
    problem.run(out)
    local = problem.order.expert_offsets[-1]
    assert out[:local].isfinite().all() and out[local:].isnan().all()
    truth, naive = (problem.truth(dtype)[:local] for dtype in (torch.float64, torch.bfloat16))
    assert_matches(out[:local], truth, naive)


@each_size
def test_quantised_result(N, D, activation, interleaved, device):
    """The codes and scales that `quantize_fp8` makes of the same result in fp32, bit for bit; also
    of a row with a NaN, and of zeros. Nothing else is written."""
    problem = Problem.of(N, D, activation, interleaved, False, device)
    S, local = len(problem.a), int(problem.order.expert_offsets[-1])
    problem.a.view(torch.uint8)[3] = 0x7F
    problem.a.view(torch.uint8)[5] = 0
    y = torch.full((S, N), math.nan, device=device)
    problem.run(y, num_stages=3)
    truth = problem.truth(torch.float64)[:local]
    assert (y[:local] - truth).norm(dim=1).nan_to_num(0).max() < 1e-2 * truth[6:].norm(dim=1).max()

    blocks = torch.full((cdiv(N, 128), S), 0.123, device=device).T
    codes = torch.full((S, N), UNTOUCHED, device=device, dtype=torch.uint8)
    problem.run(codes.view(torch.float8_e4m3fn), blocks)
    want_codes, want_blocks = quantize_fp8(y[:local], block=(1, 128))
    assert torch.equal(codes[local:], torch.full_like(codes[local:], UNTOUCHED))
    assert blocks[local:].eq(0.123).all()
    got_nan, want_nan = (
        c.float().isnan() for c in (codes[:local].view(torch.float8_e4m3fn), want_codes)
    )
    assert torch.equal(got_nan, want_nan) and got_nan[3].all()
    same = codes[:local] == want_codes.view(torch.uint8)
    assert (same | got_nan).all()
    torch.testing.assert_close(blocks[:local], want_blocks, rtol=0, atol=0, equal_nan=True)


def reference(a, w, order, *, bias, row_weight, activation, gated, interleaved, alpha, limit):
    expert = torch.searchsorted(
        order.expert_offsets[1:].long(), torch.arange(len(a), device=a.device), right=True
    ).clamp(max=len(w) - 1)
    y = torch.cat([a[expert == e] @ w[e].T for e in range(len(w))])
    if bias is not None:
        y = y + bias.to(y.dtype)[expert]
    if gated:
        gate, up = (y[:, ::2], y[:, 1::2]) if interleaved else y.chunk(2, -1)
    else:
        gate, up = y, None
    y = activate_ref(gate, up, name=activation, alpha=alpha, limit=limit)
    if row_weight is None:
        return y
    local = order.expert_offsets[-1]
    y[:local] *= row_weight.to(y.dtype)[order.row_to_slot[:local].long(), None]
    return y
