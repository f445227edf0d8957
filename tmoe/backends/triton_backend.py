"""The experts as Triton kernels: sort, gate_up with its activation, down with its weights, combine.

Four launches, nothing between them: no permuted copy of the input, no host sync, no allocation that
depends on data. A single token isn't sorted, so its launches are three. A call allocates the (S, I)
intermediate, the (S, H) rows and some index arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from tmoe.kernels.clear_tail import clear_tail
from tmoe.kernels.combine import combine
from tmoe.kernels.grouped_gemm import grouped_gemm
from tmoe.kernels.replay import Replays
from tmoe.kernels.sort import tile_rows
from tmoe.kernels.tiles import LayerTiles

from ..dispatch.backend import NO_ADAPTERS, NO_SCALES, Replayed
from ..dispatch.problem import (
    Adapters,
    ExpertsSpec,
    ExpertTensors,
    FrozenGradients,
    Problem,
    Routed,
    RouteInputs,
    StaticScales,
    result_dtype,
)
from ..dispatch.tuned import Run, Variants
from ..formats import QuantizedTensor
from ..formats.compute import quantize_parts
from ..formats.recipe import Recipe
from ..options import current
from ..routing import Routing
from .triton_candidates import candidates
from .triton_frozen import frozen_backward, frozen_gemm_backward
from .triton_inputs import order_tokens
from .triton_low_rank import low_rank_rows
from .triton_quantized import (
    form,
    quantized_experts,
    quantized_grouped_gemm,
    why_not_scales,
)
from .triton_router import run_route, run_route_backward, run_router
from .triton_tiles import TABLE, Probe, Tiles, fastest, tiles_name
from .triton_training import experts_backward, grouped_gemm_backward

OLDEST_TRITON = Version("3.6.0")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class TritonBackend:
    """See `tmoe.dispatch.backend.Backend`, and `tmoe.dispatch.tuned.Tunable`, for what the methods
    take and return."""

    name = "triton"

    def __init__(self, tiles: Tiles | None = None) -> None:
        """With tuned tiles, an instance is for one problem."""
        self._tiles = tiles or Tiles()
        self._replays = Replays()

    def why_not(self, problem: Problem) -> str | None:
        machine = problem.machine
        if machine.triton_version is None:
            return "Triton isn't installed"
        if Version(machine.triton_version) < OLDEST_TRITON:
            return f"needs Triton {OLDEST_TRITON} or newer, got {machine.triton_version}"
        if machine.device_type != "cuda" and not machine.interpreted:
            return (
                f"needs a GPU, got tensors on {machine.device_type} (to interpret the kernels on a "
                "CPU, set TRITON_INTERPRET=1 before Triton is imported)"
            )
        if machine.capability is not None and machine.capability < (8, 0):
            return "needs compute capability 8.0 or newer, got {}.{}".format(*machine.capability)
        if problem.needs_grad and problem.coded:
            return "an input that is quantised already has no backward, and gradients are needed"
        if problem.needs_grad and problem.op not in ("grouped_gemm", "fused_experts", "route"):
            return f"the kernels of {problem.op} have no backward, and gradients are needed"
        if problem.dtype not in DTYPES:
            return (
                f"multiplies fp32, fp16 and bf16, got {str(problem.dtype).removeprefix('torch.')}"
            )
        if problem.scheme is not None and problem.op in ("grouped_gemm", "fused_experts"):
            if problem.dtype == torch.float16:
                return f"fp16 has no room for {problem.scheme} weights times their scales"
            return why_not_scales(problem.scheme)
        return None

    def form(self, problem: Problem) -> str:
        return "forward and backward" if problem.needs_grad else form(problem)

    def variants(self, problem: Problem, run: Run) -> tuple[Variants, Variants]:
        if problem.op not in ("fused_experts", "grouped_gemm"):
            return {}, {}
        probe = Probe()
        with suppress(Exception):  # it can't run the call at all, and `measure` will say so
            run(TritonBackend(probe))
        way = probe.way
        if way is None:
            return {}, {}

        def named(candidates: list[LayerTiles]) -> dict[str, TritonBackend]:
            return {
                f"{way.name}: {tiles_name(tiles)}": TritonBackend(Tiles({way.name: tiles}))
                for tiles in candidates
            }

        rows, more = candidates(problem, way, probe.device)
        return {f"{way.name}: {TABLE}": TritonBackend(), **named(rows)}, named(more)

    def tuned(self, problem: Problem, times: Mapping[str, float]) -> TritonBackend:
        best = fastest(problem, times)
        return TritonBackend(Tiles(best)) if best else self

    @property
    def settings(self) -> str:
        tuned = self._tiles.tuned.items()
        return "; ".join(f"tiles {tiles_name(tiles)} tuned for {way}" for way, tiles in tuned)

    def repeat(
        self, compute: Callable[..., tuple[Tensor, ...]], arguments: tuple[Any, ...]
    ) -> Replayed:
        return Replayed(*self._replays.run(compute, (self, *arguments), current().batch_invariant))

    def route(self, logits: Tensor, routing: Routing, inputs: RouteInputs) -> Routed:
        return run_route(logits, routing, inputs)

    router = staticmethod(run_router)
    route_backward = staticmethod(run_route_backward)

    def quantize(
        self, x: Tensor, recipe: Recipe, scale: Tensor | None, global_scale: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        return quantize_parts(x, recipe, scale, global_scale, "triton")

    def grouped_gemm(
        self,
        a: Tensor,
        b: Tensor,
        expert_offsets: Tensor,
        bias: Tensor | None,
        out: Tensor | None = None,
        scheme: str | None = None,
        scale: Tensor | None = None,
    ) -> Tensor:
        if isinstance(b, QuantizedTensor) and scheme is not None:
            return quantized_grouped_gemm(
                a, b, expert_offsets, bias, out, scheme, scale, self._tiles
            )
        S, (E, N, _) = a.shape[0], b.shape
        y = a.new_empty(S, N) if out is None else out
        tile = self._tiles.choose(a, (b,), rows_per_expert=S / E, intermediate=N).down
        expert_offsets = expert_offsets.contiguous()
        rows = tile_rows(expert_offsets, S, block_m=tile.block_m)
        grouped_gemm(y, a, b, rows, tile, bias=bias)
        return clear_tail(y, expert_offsets)

    def fused_experts(
        self,
        tensors: ExpertTensors,
        spec: ExpertsSpec,
        out: Tensor | None = None,
        scales: StaticScales = NO_SCALES,
        adapters: Adapters = NO_ADAPTERS,
    ) -> Tensor:
        if isinstance(tensors.gate_up_proj, QuantizedTensor):
            return quantized_experts(tensors, spec, out, scales, self._tiles, adapters)
        return self._experts(tensors, spec, out, adapters=adapters)

    def train_experts(
        self,
        tensors: ExpertTensors,
        spec: ExpertsSpec,
    ) -> tuple[Tensor, Tensor]:
        kept = _room_for_kept(tensors)
        return self._experts(tensors, spec, None, kept), kept

    def train_frozen(
        self,
        tensors: ExpertTensors,
        spec: ExpertsSpec,
        scales: StaticScales,
        adapters: Adapters,
    ) -> tuple[Tensor, Tensor]:
        kept = _room_for_kept(tensors)
        if isinstance(tensors.gate_up_proj, QuantizedTensor):
            y = quantized_experts(tensors, spec, None, scales, self._tiles, adapters, kept)
        else:
            y = self._experts(tensors, spec, None, kept, adapters)
        return y, kept

    def frozen_backward(
        self,
        dy: Tensor,
        tensors: ExpertTensors,
        spec: ExpertsSpec,
        scales: StaticScales,
        adapters: Adapters,
        kept: Tensor | None,
        wanted: FrozenGradients,
        may_write_kept: bool,
    ) -> FrozenGradients:
        if kept is None:
            _, kept = self.train_frozen(tensors, spec, scales, adapters)
            may_write_kept = True
        return frozen_backward(dy, tensors, spec, adapters, kept, wanted, may_write_kept)

    experts_backward = staticmethod(experts_backward)
    grouped_gemm_backward = staticmethod(grouped_gemm_backward)
    frozen_gemm_backward = staticmethod(frozen_gemm_backward)

    def _experts(
        self,
        tensors: ExpertTensors,
        spec: ExpertsSpec,
        out: Tensor | None,
        before: Tensor | None = None,
        adapters: Adapters = NO_ADAPTERS,
    ) -> Tensor:
        """`before` receives what is activated, if it is given."""
        x, gate_up_proj, down_proj, topk_weights, topk_ids, gate_up_bias, down_bias = tensors
        (T, K), (E, H, I) = topk_ids.shape, down_proj.shape
        S, activation = T * K, spec.activation
        tiles = self._tiles.choose(
            x,
            (gate_up_proj, down_proj),
            rows_per_expert=S / spec.num_experts,
            intermediate=I,
            interleaved=spec.interleaved,
        )
        adapted = any(factor is not None for factor in adapters)
        order = order_tokens(topk_ids, spec, E, tiles, by_expert=adapted or before is not None)
        weights = topk_weights.contiguous()
        on_input, on_output = (weights, None) if spec.weight_on_input else (None, weights)
        adapter = low_rank_rows(x, adapters.gate_up_a, adapters.gate_up_b, order, gather=True)
        hidden = grouped_gemm(
            x.new_empty(S, I), x, gate_up_proj, order, tiles.gate_up, gather=True, before=before,
            adapter=adapter,
            bias=gate_up_bias, row_weight=on_input, weight_on_input=True,
            activation=activation.name, gated=activation.gated, interleaved=spec.interleaved,
            alpha=activation.alpha, limit=activation.limit,
        )  # fmt: skip
        adapter = low_rank_rows(hidden, adapters.down_a, adapters.down_b, order)
        rows = grouped_gemm(
            x.new_empty(S, H), hidden, down_proj, order, tiles.down, adapter=adapter,
            bias=down_bias, row_weight=on_output,
        )  # fmt: skip
        if out is None:
            out = x.new_empty(T, H, dtype=result_dtype(x, spec.wide))
        return combine(rows, order.slot_to_row, out)


def _room_for_kept(tensors: ExpertTensors) -> Tensor:
    return tensors.x.new_empty(tensors.topk_ids.numel(), tensors.gate_up_proj.shape[1])
