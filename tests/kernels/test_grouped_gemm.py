"""The grouped GEMM itself: every kind of tile, memory layout and epilogue, against fp64."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from tests.checking import assert_matches
from tests.layouts import STRIDED
from tmoe.activation import GATED, UNGATED, Activation
from tmoe.kernels.grouped_gemm import grouped_gemm, grouped_gemm_ref
from tmoe.kernels.sort import SortedTokens, sort_tokens
from tmoe.kernels.tiles import Tile

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAN = float("nan")
SMALL = Tile(16, 16, 32, 4, 2)
TILES = {
    "8-rows": Tile(8, 32, 64, 4, 2),
    "small": SMALL,
    "one-row-tile-after-the-other": replace(SMALL, group_m=1),
    "32-rows": Tile(32, 32, 16, 4, 2),
    "64-rows": Tile(64, 16, 64, 4, 3),
    "128-rows, halved tails": Tile(128, 32, 32, 4, 2, group_m=2),
    "128-rows, persistent": Tile(128, 32, 32, 8, 3, persistent=True),
    "64-rows, persistent": Tile(64, 32, 32, 4, 3, group_m=1, persistent=True),
}


@dataclass(frozen=True)
class Layer:
    """One projection. `counts`: tokens of each expert; one more expert has none."""

    counts: tuple[int, ...] = (5, 0, 18)
    N: int = 24
    D: int = 40
    activation: Activation = Activation("identity")
    interleaved: bool = False
    bias: bool = False
    gather: bool = False  # with two slots per token, the second of which isn't local every time
    row_weight: str = "none"
    dtype: torch.dtype = torch.float32

    @property
    def E(self) -> int:
        return len(self.counts) + 1


@dataclass
class Problem:
    """What the kernel is given. Rows of a that no expert owns hold NaN."""

    layer: Layer
    a: Tensor
    w: Tensor
    bias: Tensor | None
    row_weight: Tensor | None
    order: SortedTokens

    def run(self, tile: Tile) -> Tensor:
        layer = self.layer
        out = self.a.new_empty(self.order.row_to_slot.numel(), layer.N)
        return grouped_gemm(
            out, self.a, self.w, self.order, tile, bias=self.bias, row_weight=self.row_weight,
            weight_on_input=layer.row_weight == "input", gather=layer.gather,
            activation=layer.activation.name, gated=layer.activation.gated,
            interleaved=layer.interleaved, alpha=layer.activation.alpha,
            limit=layer.activation.limit,
        )  # fmt: skip

    def reference(self, dtype: torch.dtype) -> Tensor:
        """(rows, N): the rows that some expert owns."""
        layer, order = self.layer, self.order
        slots = order.row_to_slot[: int(order.expert_offsets[-1])].long()
        a = self.a[slots // order.top_k] if layer.gather else self.a[: len(slots)]
        a, weight = a.to(dtype), 1.0
        if self.row_weight is not None:
            weight = self.row_weight[slots].to(dtype)[:, None]
        y = grouped_gemm_ref(
            weight * a if layer.row_weight == "input" else a,
            self.w.to(dtype), order.expert_offsets, bias=self.bias,
            activation=layer.activation.name, gated=layer.activation.gated,
            interleaved=layer.interleaved, alpha=layer.activation.alpha,
            limit=layer.activation.limit,
        )  # fmt: skip
        return weight * y if layer.row_weight == "output" else y

    def check(self, tile: Tile = SMALL) -> Tensor:
        """Run it and compare with fp64, allowing twice what fp32 and one rounding lose."""
        got, truth = self.run(tile), self.reference(torch.float64)
        assert_matches(got[: len(truth)], truth, self.reference(torch.float32).to(got.dtype))
        assert got[len(truth) :].isnan().all(), "rows of no expert were written"
        return got[: len(truth)]


def make(layer: Layer, device, *, block_m: int = 16) -> Problem:
    counts = torch.tensor(layer.counts)
    chosen = torch.repeat_interleave(torch.arange(len(counts)), counts)
    ids = chosen[torch.randperm(len(chosen))][:, None]
    ids = torch.cat([ids, torch.full_like(ids, -1)], 1)  # every second slot has no expert
    order = sort_tokens(ids.int().to(device), num_experts=layer.E, block_m=block_m)
    columns = layer.N * (2 if layer.activation.gated else 1)

    def randn(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(shape)).to(device, layer.dtype)

    T = len(chosen)
    a = randn(T if layer.gather else 2 * T, layer.D)
    if not layer.gather:
        a[T:] = NAN
    return Problem(
        layer,
        a,
        randn(layer.E, columns, layer.D, scale=layer.D**-0.5),
        randn(layer.E, columns) if layer.bias else None,
        None if layer.row_weight == "none" else torch.rand(2 * T).to(device),
        order,
    )


SIZES = [(16, 32), (24, 40), (33, 31), (7, 8), (1, 1), (90, 96), (64, 130)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("N, D", SIZES)
def test_every_size(N, D, dtype, device):
    """SH05, SH12, PD10: less than a tile, tiles and a rest; D below BLOCK_D; with descriptors and
    without."""
    make(Layer(N=N, D=D, dtype=dtype), device).check()


@pytest.mark.parametrize("N, D", [(16, 32), (33, 31), (24, 40)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_every_size_gated(N, D, interleaved, device):
    """WL01, WL02: both orders of the rows, with halves that are not whole tiles."""
    for dtype in DTYPES:
        swiglu = Activation("swiglu")
        layer = Layer(N=N, D=D, activation=swiglu, interleaved=interleaved, bias=True, dtype=dtype)
        make(layer, device).check()


@pytest.mark.parametrize("kind", ["plain", "gated", "interleaved", "gathered"])
@pytest.mark.parametrize("name", TILES)
def test_every_tile(name, kind, device):
    """Experts with one row, a half tile, half a tile and a row, two tiles and a row."""
    tile = TILES[name]
    half = tile.block_m // 2
    counts = (1, half, 0, half + 1, 2 * tile.block_m + 1)
    gated = {"activation": Activation("swiglu"), "interleaved": kind == "interleaved"}
    options = {"plain": {}, "gathered": {"gather": True}}.get(kind, gated)
    layer = Layer(counts, N=40, D=48, bias=True, dtype=torch.bfloat16, **options)
    make(layer, device, block_m=tile.block_m).check(tile)


@pytest.mark.parametrize("counts", [(0, 0, 0), (4, 0), (0, 4), (0, 0, 4, 0), (1, 8, 16, 32, 63)])
@pytest.mark.parametrize("gather", [False, True])
def test_empty_and_short_experts(counts, gather, device):
    """EM06, EM09"""
    make(Layer(counts, gather=gather), device).check()


ACTIVATIONS = [
    *(Activation.of(name) for name in (*GATED, *UNGATED) if name != "swiglu_step"),
    Activation.swiglu_step(limit=0.3),
    Activation.swiglu(limit=0.5),
    Activation.swiglu_oai(alpha=0.7, limit=math.inf),
]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_every_activation(activation, device):
    """WL05, WL06: after the bias, before the routing weight."""
    for dtype in DTYPES:
        layer = Layer(activation=activation, bias=True, row_weight="output", dtype=dtype)
        make(layer, device).check()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("where", ["input", "output"])
def test_the_routing_weight(where, gather, dtype, device):
    """SC07: on the input it goes through bias and activation; its dtype may be another one."""
    layer = Layer(
        activation=Activation("swiglu"), bias=True, gather=gather, row_weight=where, dtype=dtype
    )
    problem = make(layer, device)
    problem.check()
    problem.row_weight = problem.row_weight.to(torch.bfloat16)
    problem.check()


def test_weighted_before_it_is_rounded(device):
    """QN19: an output of 70000 passes fp16's range; half of it doesn't."""
    problem = make(Layer((3,), row_weight="output", dtype=torch.float16), device)
    problem.a[:3], problem.w[0] = 70.0, 25.0  # 70 · 25 · 40 = 70000
    problem.row_weight[:] = 0.5
    assert (problem.check() == 35000).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["a", "w", "bias"])
@pytest.mark.parametrize("how", STRIDED)
def test_any_strides(how, name, dtype, device):
    """NC02, WL03, WL10"""
    for activation in (Activation("identity"), Activation("swiglu")):
        problem = make(Layer(N=16, bias=True, activation=activation, dtype=dtype), device)
        setattr(problem, name, STRIDED[how](getattr(problem, name)))
        problem.check()


def test_expanded_operands(device):
    """A stride of 0: one row for all, one expert for all, one bias for all."""
    problem = make(Layer(bias=True, gather=True), device)
    problem.a = problem.a[:1].expand_as(problem.a)
    problem.w = problem.w[:1].expand_as(problem.w)
    problem.bias = problem.bias[:1].expand_as(problem.bias)
    problem.check()


def test_out_may_be_a_slice(device):
    problem = make(Layer(), device)
    memory = torch.zeros(2 * 23 + 2, 40, device=device)
    out = memory[1:-1, 5:29]
    grouped_gemm(out, problem.a, problem.w, problem.order, SMALL)
    assert torch.equal(out[:23], problem.check())
    out[:23] = 0
    assert (memory == 0).all(), "wrote beside the output"


@pytest.mark.parametrize("name", ["small", "128-rows, halved tails", "64-rows, persistent"])
@pytest.mark.parametrize("gather", [False, True])
def test_what_belongs_to_others_may_be_nan(name, gather, device):
    """PD01: the rows that stand behind an expert's own in its tile, and the other experts'
    weights."""
    tile = TILES[name]
    layer = Layer(
        (3, 4, 5), N=20, activation=Activation("swiglu"), bias=True, gather=gather,
        row_weight="output",
    )  # fmt: skip
    problem = make(layer, device, block_m=tile.block_m)
    want = problem.check(tile)
    offsets, row_to_slot = problem.order.expert_offsets, problem.order.row_to_slot
    for expert in range(3):
        rows = slice(int(offsets[expert]), int(offsets[expert + 1]))
        poisoned = replace(problem)
        poisoned.w = torch.full_like(problem.w, NAN)
        poisoned.w[expert] = problem.w[expert]
        poisoned.bias = torch.full_like(problem.bias, NAN)
        poisoned.bias[expert] = problem.bias[expert]
        slots = row_to_slot[rows].long()
        own = slots // 2 if gather else rows
        poisoned.a = torch.full_like(problem.a, NAN)
        poisoned.a[own] = problem.a[own]
        poisoned.row_weight = torch.full_like(problem.row_weight, NAN)
        poisoned.row_weight[slots] = problem.row_weight[slots]
        assert torch.equal(poisoned.run(tile)[rows], want[rows])


def test_a_nan_stays_in_its_row(device):
    problem = make(Layer(activation=Activation.swiglu_oai()), device)
    want = problem.check()
    problem.a[2, 3] = NAN
    got = problem.run(SMALL)[: len(want)]
    assert got[2].isnan().all()
    others = torch.arange(len(want), device=device) != 2
    assert torch.equal(got[others], want[others])


def test_no_column_and_no_row(device):
    problem = make(Layer((0, 0)), device)
    assert problem.run(SMALL).shape == (0, 24)
