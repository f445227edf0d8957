"""Weight gradient: ragged experts, every way to read and write, and what nobody may read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.checking import assert_matches
from tests.layouts import STRIDED
from tmoe.kernels.backward_tiles import GradientTile
from tmoe.kernels.weight_gradient import weight_gradient, weight_gradient_ref

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAN = float("nan")
SMALL = GradientTile(16, 32, 16, 4, 2)
TILES = {
    "copies": SMALL,
    "copies, out too": replace(SMALL, copies_out=True),
    "one row of tiles at a time": replace(SMALL, group_n=1),
    "a tile for all": GradientTile(64, 64, 64, 4, 2),
}
COUNTS = (5, 0, 16, 37, 0)  # less than a step, none, one step, two and a rest


def make(dtype=torch.float32, *, counts=COUNTS, N=24, D=40, tail=4, device) -> tuple[Tensor, ...]:
    """left, right and offsets; rows of no expert are NaN."""
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    left, right = (torch.randn(sum(counts) + tail, columns).to(dtype) for columns in (N, D))
    left[sum(counts) :] = right[sum(counts) :] = NAN
    return left.to(device), right.to(device), offsets.to(device)


def check(out: Tensor, left: Tensor, right: Tensor, offsets: Tensor, tile=SMALL) -> Tensor:
    assert weight_gradient(out, left, right, offsets, tile) is out
    truth = weight_gradient_ref(left.double(), right.double(), offsets)
    wide = weight_gradient_ref(left.float(), right.float(), offsets)
    assert_matches(out, truth, wide.to(left.dtype).to(out.dtype))
    assert not out[offsets[1:] == offsets[:-1]].any()  # PD08: zero, neither garbage nor NaN
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
def test_every_kind_of_tile(tile, dtype, device):
    left, right, offsets = make(dtype, device=device)
    check(left.new_empty(5, 24, 40), left, right, offsets, tile)


@pytest.mark.parametrize(
    "counts", [(0, 0), (1,), (15, 17), (0, 64), (64, 0), (3, 0, 0, 3)], ids=str
)
def test_every_kind_of_load(counts, device):
    left, right, offsets = make(counts=counts, device=device)
    check(left.new_empty(len(counts), 24, 40), left, right, offsets)


@pytest.mark.parametrize("N, D", [(1, 1), (16, 32), (17, 33), (8, 72)])
def test_sizes_that_are_no_multiple_of_a_tile(N, D, device):
    left, right, offsets = make(N=N, D=D, device=device)
    for tile in TILES.values():
        check(left.new_empty(5, N, D), left, right, offsets, tile)


@pytest.mark.parametrize("layout", STRIDED)
def test_strided_memory(layout, device):
    """WL03: gpt-oss stores (E, D, N), and its gradient is stored like that."""
    left, right, offsets = make(torch.bfloat16, device=device)
    want = check(left.new_empty(5, 24, 40), left, right, offsets)
    for tile in (SMALL, TILES["copies, out too"]):
        out = STRIDED[layout](left.new_zeros(5, 24, 40))
        check(out, left, right, offsets, tile)
        torch.testing.assert_close(out, want)
        check(left.new_empty(5, 24, 40), STRIDED[layout](left), STRIDED[layout](right), offsets)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tile", [SMALL, TILES["copies, out too"]], ids=["pointers", "copies"])
def test_accumulate(tile, dtype, transposed, device):
    """Added to what is there, rounded once; what an expert without rows holds stays."""
    left, right, offsets = make(torch.bfloat16, device=device)
    held = torch.randn(5, 24, 40, device=device).to(dtype)
    out = held.transpose(1, 2).contiguous().transpose(1, 2) if transposed else held.clone()
    for _ in range(2):
        before = out.clone()
        weight_gradient(out, left, right, offsets, tile, accumulate=True)
        truth = before.double() + weight_gradient_ref(left.double(), right.double(), offsets)
        naive = before + weight_gradient_ref(left.float(), right.float(), offsets)
        assert_matches(out, truth, naive.to(dtype))
    empty = offsets[1:] == offsets[:-1]
    assert torch.equal(out[empty], held[empty])


def test_sums_are_fp32(device):
    """256 + 1 + 1 in bf16: the ones would be lost."""
    left = torch.ones(3, 16, device=device, dtype=torch.bfloat16)
    right = torch.tensor([[256.0], [1.0], [1.0]], device=device).expand(3, 16).bfloat16()
    offsets = torch.tensor([0, 3], dtype=torch.int32, device=device)
    assert weight_gradient(left.new_empty(1, 16, 16), left, right, offsets, SMALL)[0, 0, 0] == 258


def test_an_expert_does_not_depend_on_the_others(device):
    """DT02, and a NaN of one expert stays with it."""
    left, right, offsets = make(torch.bfloat16, device=device)
    want = check(left.new_empty(5, 24, 40), left, right, offsets)
    left[5:21] = NAN  # the third expert's
    got = weight_gradient(left.new_empty(5, 24, 40), left, right, offsets, SMALL)
    assert got[2].isnan().all()
    others = [0, 1, 3, 4]
    assert torch.equal(got[others], want[others])
