"""The GEMM of specialised warps against its operands taken apart, in fp64."""

from __future__ import annotations

import math

import pytest
import torch

import tmoe
from tests.checking import assert_matches
from tmoe.kernels.activation_ref import activate_ref
from tmoe.kernels.grouped_gemm import grouped_gemm
from tmoe.kernels.launch import specializes_warps
from tmoe.kernels.quantize_fp8 import quantize_fp8
from tmoe.kernels.sort import sort_tokens
from tmoe.kernels.tiles import Tile
from tmoe.kernels.weight_codes import Scales

COUNTS = [0, 1, 63, 64, 65, 200, 0, 385, 130]  # rows of each expert; the last expert's aren't local
BLOCKS = (128, 128)


@pytest.fixture(autouse=True)
def hopper(device):
    if not specializes_warps(device):
        pytest.skip("needs a Hopper GPU and a Triton whose Gluon is known")


def specialized(block_m: int, gated: bool) -> Tile:
    stages = 4 if block_m == 192 else 5
    return Tile(block_m, 64 if gated else 128, 128, 4, stages, specialized=True)


@pytest.mark.parametrize("block_m", [128, 192])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "N, D, activation, interleaved",
    [
        (256, 512, "identity", False),
        (72, 48, "relu2", False),
        (200, 1104, "identity", False),
        (192, 512, "swiglu", False),
        (64, 1104, "swiglu_oai", False),
        (200, 144, "geglu", True),
        (2048, 7168, "swiglu", False),
        (7168, 2048, "identity", False),
    ],
)
def test_fp8_blocks(N, D, activation, interleaved, bias, block_m, device):
    """Ragged and empty experts, rows past the last one's, sizes that no tile divides."""
    gated = activation in ("swiglu", "swiglu_oai", "geglu")
    E, width = len(COUNTS) - 1, N * (2 if gated else 1)
    ids = torch.arange(len(COUNTS), device=device).repeat_interleave(
        torch.tensor(COUNTS, device=device)
    )
    ids = ids[torch.randperm(len(ids), device=device)].unsqueeze(1)
    S = len(ids)
    order = sort_tokens(ids, num_experts=E, block_m=block_m)
    steps = 2.0 ** (torch.arange(D, device=device) // 128 % 5)  # every block has its own scale
    x = torch.randn(S, D, device=device) * steps
    a, a_scale = quantize_fp8(x, block=(1, 128), scales_by_column=True)
    a.view(torch.uint8)[order.expert_offsets[-1] :] = 0x7F  # NaN
    w = tmoe.quantize(
        torch.randn(E, width, D, device=device) / steps, "fp8_block", block_shape=BLOCKS
    )
    scales = Scales(w.scale, *BLOCKS, rows=a_scale)
    given = {
        "bias": torch.randn(E, width, device=device) if bias else None,
        "row_weight": None if gated else torch.rand(S, device=device),
        "activation": activation, "gated": gated, "interleaved": interleaved,
        "alpha": 1.7, "limit": 7.0 if activation == "swiglu_oai" else math.inf,
    }  # fmt: skip
    out = torch.full((S, N), math.nan, device=device, dtype=torch.bfloat16)
    tile = specialized(block_m, gated)
    grouped_gemm(out, a, w.data, order, tile, scales=scales, **given)

    local = order.expert_offsets[-1]
    assert out[:local].isfinite().all() and out[local:].isnan().all()
    values = a.float() * a_scale.repeat_interleave(128, 1)[:, :D]
    truth, naive = (
        reference(values.to(dtype), w.dequantize().to(dtype), order, **given)[:local]
        for dtype in (torch.float64, torch.bfloat16)
    )
    assert_matches(out[:local], truth, naive)


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
