"""The down projection by specialised warps: the bits of `grouped_gemm`, and the truth in fp64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.checking import assert_matches
from tmoe.kernels.grouped_gemm import grouped_gemm, grouped_gemm_ref
from tmoe.kernels.launch import on_launch, specializes_warps
from tmoe.kernels.sort import SortedTokens, sort_tokens
from tmoe.kernels.tiles import Tile

pytestmark = pytest.mark.gpu
TILE = Tile(128, 256, 64, 8, 3, persistent=True)
SPECIALIZED = replace(TILE, specialized=True)
COUNTS = [0, 1, 63, 64, 65, 200, 0, 385, 130]  # rows of each expert; the last expert's aren't local
E = len(COUNTS) - 1


@pytest.fixture(autouse=True)
def hopper(device):
    if not specializes_warps(device):
        pytest.skip("needs a Hopper GPU and a Triton whose Gluon is known")


def make_order(counts: list[int], device: torch.device) -> SortedTokens:
    """Rows of experts in an order that tokens didn't have."""
    ids = torch.arange(len(counts), device=device).repeat_interleave(
        torch.tensor(counts, device=device)
    )
    ids = ids[torch.randperm(len(ids), device=device)].unsqueeze(1)
    return sort_tokens(ids, num_experts=len(counts) - 1, block_m=128)


def kernels_of(run) -> list[str]:
    seen = []
    with on_launch(lambda launched: seen.append(launched.compiled.name)):
        run()
    return seen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias, weighted", [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize(
    "N, D", [(256, 64), (64, 64), (448, 128), (2048, 768), (1344, 1000), (512, 4096)]
)
def test_same_bits_and_the_truth(N, D, bias, weighted, dtype, device):
    """One step of the depth, fewer than slots, and many; columns and depths that fill no tile;
    experts without rows, and with 1 to 385; the rows of no expert are not written."""
    order = make_order(COUNTS, device)
    S, end = sum(COUNTS), sum(COUNTS[:-1])
    a = torch.randn(S, D, device=device).to(dtype)
    a[end:] = float("nan")
    w = (torch.randn(E, N, D, device=device) * D**-0.5).to(dtype)
    given = {
        "bias": torch.randn(E, N, device=device).to(dtype) if bias else None,
        "row_weight": torch.rand(S, device=device) if weighted else None,
    }
    got, other = (torch.full((S, N), 7.0, device=device, dtype=dtype) for _ in range(2))
    names = kernels_of(lambda: grouped_gemm(got, a, w, order, SPECIALIZED, **given))
    assert names == ["_specialized_gemm_kernel"] and order.taken.item() == 0
    grouped_gemm(got, a, w, order, SPECIALIZED, **given)  # its counter begins anew
    grouped_gemm(other, a, w, order, TILE, **given)
    assert torch.equal(got, other) and (got[end:] == 7).all()

    def reference(number: torch.dtype) -> torch.Tensor:
        b = None if given["bias"] is None else given["bias"].to(number)
        y = grouped_gemm_ref(a[:end].to(number), w.to(number), order.expert_offsets, bias=b)
        return y * given["row_weight"][order.row_to_slot[:end].long(), None] if weighted else y

    assert_matches(got[:end], reference(torch.float64), reference(dtype).to(dtype))


def test_more_tiles_than_programs(device):
    order = make_order([1000, 0, 2500, 129, 4000, 0], device)
    a = torch.randn(7629, 512, device=device).bfloat16()
    w = torch.randn(5, 2880, 512, device=device).bfloat16()
    got, other = (torch.full((7629, 2880), 7.0, device=device).bfloat16() for _ in range(2))
    for group_m in (1, 3, 16):
        grouped_gemm(got, a, w, order, replace(SPECIALIZED, group_m=group_m))
        grouped_gemm(other, a, w, order, TILE)
        assert torch.equal(got, other) and order.taken.item() == 0


@pytest.mark.parametrize("what", ["columns", "a part", "activation", "rows apart", "misaligned"])
def test_what_it_does_not_take_is_computed_all_the_same(what, device):
    """Weights that no matrix of rows holds, an activation, rows that the TMA can't read."""
    order = make_order(COUNTS, device)
    S, N, D = sum(COUNTS), 256, 128
    a = torch.randn(S, D, device=device).bfloat16()
    w = torch.randn(E, N, D, device=device).bfloat16()
    given = {}
    if what == "columns":
        w = w.transpose(1, 2).contiguous().transpose(1, 2)
    elif what == "a part":
        w = torch.randn(E, N + 8, D, device=device).bfloat16()[:, :N]
    elif what == "activation":
        given = {"activation": "relu2"}
    elif what == "rows apart":
        a = torch.randn(S, 2 * D, device=device).bfloat16()[:, ::2]
    else:
        a = torch.randn(S, D + 1, device=device).bfloat16()[:, 1:]
    got, other = (torch.full((S, N), 7.0, device=device).bfloat16() for _ in range(2))
    names = kernels_of(lambda: grouped_gemm(got, a, w, order, SPECIALIZED, **given))
    grouped_gemm(other, a, w, order, TILE, **given)
    assert names == ["_grouped_gemm_kernel"] and torch.equal(got, other)
