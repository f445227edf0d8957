"""FlashInfer's expert layers as backends: trtllm-gen's kernels, and cutlass's.

They run a layer only after its weights were brought into their layout, inside `tmoe.prepare` or
`tmoe.autotune`, and after a result was compared with ours.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ...activation import Activation
from ...dispatch import prepared, verify
from ...dispatch.backend import NO_SCALES
from ...dispatch.prepared import ExpertWeights
from ...dispatch.problem import ExpertsSpec, ExpertTensors, Problem, StaticScales
from ...options import current
from . import cutlass_weights, installed, support, trtllm_weights
from .calls import Ready, call_experts
from .support import STATIC, USES
from .weight_parts import Prepared as Weights

_TAKE_OUTPUT_DTYPE = ("cutlass_fp8_per_tensor", "cutlass_nvfp4", "cutlass_mxfp4")


class FlashInferBackend:
    """See `tmoe.dispatch.backend.Backend`. `name` is a key of `support.USES`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def why_not(self, problem: Problem) -> str | None:
        reason = self._known_reason(problem)
        if reason is not None or self.name in problem.prepared:
            return reason
        return "its weights aren't prepared: run the layer inside tmoe.prepare() once"

    def form(self, problem: Problem) -> str:
        if verify.is_known(self.name, problem):
            return "agrees with Triton"
        return "compared with Triton when it is prepared" if current().verify else "not compared"

    def why_not_prepare(self, problem: Problem) -> str | None:
        """Why weights can't be prepared for `problem` here, or None. Imports FlashInfer."""
        reason = self._known_reason(problem)
        if reason is not None:
            return reason
        use = USES[self.name][problem.scheme or "bf16"]
        keywords = support.keywords_of(use, problem.activation or Activation("swiglu"))
        complaint = installed.why_not(use.entry.name, keywords)
        if complaint is not None:
            verify.remember(self.name, problem, complaint)
        return complaint

    def _known_reason(self, problem: Problem) -> str | None:
        found = verify.refusal(self.name, problem) if current().verify else None
        return support.why_not(self.name, problem) or found

    def prepare(self, experts: ExpertWeights, problem: Problem) -> None:
        """Bring the weights into the layout of this backend, in new memory.

        Raises ``ValueError`` for weights whose values the entry point can't express.
        """
        use = USES[self.name][problem.scheme or "bf16"]
        recipe: Callable[..., Weights] = getattr(trtllm_weights, use.recipe, None) or getattr(
            cutlass_weights, use.recipe
        )
        takes_dtype = use.recipe in _TAKE_OUTPUT_DTYPE
        weights = recipe(experts, problem.dtype) if takes_dtype else recipe(experts)
        scale = None
        if problem.scheme in STATIC:
            device = experts.down_proj.device
            scale = torch.as_tensor(experts.input_scale, dtype=torch.float32, device=device)
            scale = scale.flatten()[0].clone()  # the recipe has made sure that all are the same
        packs = support.packs_ids(use, problem.machine.flashinfer_version or "")
        activation, num_local = Activation.of(experts.activation), len(experts.down_proj)
        ready = Ready.of(use.entry.name, weights, activation, num_local, scale, packs)
        prepared.hold(self.name, problem, experts, ready, ready.tensors())

    def fused_experts(
        self,
        tensors: ExpertTensors,
        spec: ExpertsSpec,
        out: Tensor | None = None,
        scales: StaticScales = NO_SCALES,
    ) -> Tensor:
        x, gate_up_proj, down_proj, topk_weights, topk_ids, *_ = tensors
        ready: Ready = prepared.find(self.name, ExpertWeights(gate_up_proj, down_proj))
        y = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
        deterministic = current().deterministic
        return call_experts(ready, x, topk_weights, topk_ids, spec, y, deterministic=deterministic)


trtllm = partial(FlashInferBackend, "flashinfer_trtllm")
cutlass = partial(FlashInferBackend, "flashinfer_cutlass")
