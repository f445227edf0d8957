"""What a backend is: any class with these methods. `tmoe.registry.register` makes it known."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from ..formats.recipe import Recipe
from ..routing import Routing
from .problem import (
    Adapters,
    ExpertGradients,
    ExpertsSpec,
    ExpertTensors,
    FrozenGradients,
    GemmGradients,
    Problem,
    Routed,
    RouteInputs,
    StaticScales,
)

NO_SCALES = StaticScales()
NO_ADAPTERS = Adapters()


class Recording(Protocol):
    """How a call was computed, for calls with tensors of the same kinds."""

    def fits(self) -> bool:
        """Whether it can be repeated now."""

    def replay(self, inputs: list[Tensor]) -> tuple[Tensor, ...] | None:
        """The results for other inputs; None if it can't be repeated after all."""


class Replayed(NamedTuple):
    """The results of a call, how they were computed if that can be repeated, and its tensors."""

    results: tuple[Tensor, ...]
    recording: Recording | None
    inputs: list[Tensor]


class Backend(Protocol):
    """One provider of the operations.

    The caller has checked the tensors. They may have any strides; `out`, when given, is contiguous
    and is what is returned.

    Optional: `is_compared`, True if results are compared with Triton's before the first use, of
    which `why_not` then says `tmoe.dispatch.verify.refusal`; `why_not_prepare` and `prepare` of one
    that has a layout of its own (`tmoe.dispatch.prepared`); `variants` and `tuned` of one that has
    tiles to tune (`tmoe.dispatch.tuned`); `repeat(compute, arguments) -> Replayed` of one that
    computes compute(itself, *arguments) as it did for tensors of the same kinds, if it did;
    `route_backward(d_weights, d_probs or None, logits, routing, expert_scale, topk_ids)` of one
    that finds the gradient of the logits (T, E) without torch's autograd;
    `frozen_gemm_backward(dy, b, expert_offsets, bias, wanted) -> GemmGradients` of one that finds
    `grouped_gemm`'s through a quantised b, straight through the rounding of a.
    `train_experts` and the backwards are called only for problems that need gradients and that
    `why_not` takes.
    """

    name: str

    def why_not(self, problem: Problem) -> str | None:
        """None when the backend can do `problem`; else one sentence, with numbers, why it can't."""

    def form(self, problem: Problem) -> str:
        """How it would do a problem that it takes, if there is a choice; else "". Optional."""

    def route(self, logits: Tensor, routing: Routing, inputs: RouteInputs) -> Routed:
        """(T, E) logits -> fp32 weights (T, K), int32 ids (T, K), and what else is wanted."""

    def router(
        self, x: Tensor, weight: Tensor, linear_bias: Tensor | None, routing: Routing,
        inputs: RouteInputs,
    ) -> tuple[Tensor, Routed]:  # fmt: skip
        """x (T, H), weight (E, H) -> logits x @ weight.T + linear_bias (T, E), and `route`'s."""

    def quantize(
        self, x: Tensor, recipe: Recipe, scale: Tensor | None, global_scale: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """(..., K) -> codes, scales and global scale, as `tmoe.formats` describes them."""

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
        """Rows (S, D) sorted by expert, b (E, N, D), bias (E, N) -> (S, N).

        Rows past the last offset are 0. A quantised b comes with its scheme and perhaps a static
        scale of the rows.
        """

    def fused_experts(
        self,
        tensors: ExpertTensors,
        spec: ExpertsSpec,
        out: Tensor | None = None,
        scales: StaticScales = NO_SCALES,
    ) -> Tensor:
        """x (T, H) -> (T, H); ids outside the local experts contribute nothing.

        With a scheme, the weights are `QuantizedTensor`s and `scales` may hold static ones. For a
        problem with `has_lora` there is one more keyword, `adapters`, in x's dtype; they multiply
        what reaches a projection before it is quantised.
        """

    def train_experts(
        self,
        tensors: ExpertTensors,
        spec: ExpertsSpec,
    ) -> tuple[Tensor, Tensor]:
        """`fused_experts`, and what its activation was applied to: (T·K, 2I) or, without a gate,
        (T·K, I) in x's dtype; rows in expert order, those of one expert in the order of the slots
        t·K + k, columns in that of gate_up_proj's rows. Rows of experts that aren't here come last
        and may hold anything."""

    def experts_backward(
        self,
        dy: Tensor,
        tensors: ExpertTensors,
        spec: ExpertsSpec,
        kept: Tensor | None,
        wanted: ExpertGradients,
        may_write_kept: bool,
        sums: ExpertGradients,
    ) -> ExpertGradients:
        """The wanted gradients, each of its input's shape and dtype. `kept` is `train_experts`'
        second result; None: it wasn't kept. A weight's gradient that `sums` has a tensor for is
        added to that and not returned."""

    def train_frozen(
        self,
        tensors: ExpertTensors,
        spec: ExpertsSpec,
        scales: StaticScales,
        adapters: Adapters,
    ) -> tuple[Tensor, Tensor]:
        """`train_experts` of weights that are frozen, perhaps quantised and with adapters."""

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
        """The wanted gradients; through the rounding of inputs they go straight."""

    def grouped_gemm_backward(
        self, dy: Tensor, a: Tensor, b: Tensor, expert_offsets: Tensor, bias: Tensor | None,
        wanted: GemmGradients, sums: GemmGradients,
    ) -> GemmGradients:  # fmt: skip
        """The wanted gradients, from dy (S, N), whose rows past the last offset count for nothing;
        those rows of a's gradient are 0. `sums` as above, for b."""
