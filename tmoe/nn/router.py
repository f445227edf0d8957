"""Router: which experts a token goes to, and with what weight.

logits = x @ weightᵀ (+ bias)                                              (T, E)
topk_weights, topk_ids = route(logits, routing, bias=e_score_correction_bias)     (T, K)

Where the router weighs shared experts, S of them, E and K above are E + S and K + S.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from ..checks import expect, expect_tensor, expect_type
from ..ops import router
from ..routing import Routing
from .arguments import expect_flags, expect_parameter_dtype, expect_sizes


class Router(nn.Module):
    """Scores every expert for every token and selects `routing.top_k` of them.

    Parameters and buffers, named as in transformers:

    * ``weight`` (E, H). While it is fp32 the matmul runs in fp32, whatever the dtype of the input
      and under autocast too, as DeepSeek-V3 has it; ``moe.gate.float()`` does that to a 16-bit
      layer.
    * ``bias`` (E,), with ``bias=True``: added to the logits (gpt-oss).
    * ``e_score_correction_bias`` (E,) fp32 buffer, for methods with a selection bias: it decides
      which experts are chosen and never enters their weights. It stays fp32 through ``.to()``,
      ``.half()`` and loading, since 16 bits cannot hold the small differences that it exists for.
      No gradient reaches it; load balancing updates it in place.
    * ``per_expert_scale`` (E,), for methods that scale the weights of each expert (Gemma 4).

    With ``top_k=1``, a method that divides the weights by their sum gives the constant 1, and the
    router's gradient is zero: a forward pass that trains warns (not inside `torch.compile`).

    Source: the router classes of transformers, for example ``Qwen3MoeTopKRouter``.
    """

    e_score_correction_bias: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        routing: Routing,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`routing` is the recipe; `dtype` is that of ``weight`` and ``bias``."""
        super().__init__()
        expect_type(routing, Routing, "Router", "routing")
        expect_sizes("Router", hidden_size=hidden_size)
        expect_flags("Router", bias=bias)
        expect_parameter_dtype("Router", dtype)
        self.hidden_size = hidden_size
        self.routing = routing
        E, rows = routing.num_experts, routing.num_logits
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty(rows, hidden_size, **where))
        self.bias = nn.Parameter(torch.empty(rows, **where)) if bias else None
        scales = routing.rule.takes_expert_scale
        self.per_expert_scale = nn.Parameter(torch.empty(E, **where)) if scales else None
        selection_bias = None
        if routing.takes_bias:
            selection_bias = torch.empty(E, device=device, dtype=torch.float32)
        self.register_buffer("e_score_correction_bias", selection_bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise as `nn.Linear` does; the correction bias to zero."""
        bound = 1 / math.sqrt(self.hidden_size)
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)
        if self.e_score_correction_bias is not None:
            nn.init.zeros_(self.e_score_correction_bias)
        if self.per_expert_scale is not None:
            nn.init.ones_(self.per_expert_scale)

    def forward(self, x: Tensor, topk_ids: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """x (..., H) -> logits (T, E), topk_weights (T, K) fp32, topk_ids (T, K) int32.

        T is the product of the leading sizes. The logits have the dtype of the matmul. With
        `topk_ids` (T, K), of an earlier run or of a table, nothing is selected.
        """
        expect_tensor(x, "Router", "x")
        H = self.hidden_size
        ok = x.ndim > 0 and x.shape[-1] == H
        expect(ok, "Router", "x", f"of shape (..., {H})", tuple(x.shape))
        if self.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._warn_if_it_cannot_learn()
        return router(
            x.reshape(-1, H),
            self.weight,
            self.routing,
            linear_bias=self.bias,
            bias=self.e_score_correction_bias if topk_ids is None else None,
            expert_scale=self.per_expert_scale,
            topk_ids=topk_ids,
        )

    def _warn_if_it_cannot_learn(self) -> None:
        if self.routing.top_k == 1 and self.routing.renormalizes:
            warnings.warn(
                f"Router: top_k is 1 and {self.routing.name} divides the weights by their "
                "sum, so every weight is the same and the router gets no gradient; choose a method "
                "that keeps the score",
                stacklevel=3,
            )

    def _apply(self, fn: Any, recurse: bool = True) -> Router:
        before = self.e_score_correction_bias
        super()._apply(fn, recurse)
        after = self.e_score_correction_bias
        if before is not None and after is not None and after.dtype != torch.float32:
            # From the original: casting back would not restore the bits.
            self.e_score_correction_bias = before.to(after.device)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        name = prefix + "e_score_correction_bias"
        if self.e_score_correction_bias is not None and name in state_dict:
            # load_state_dict(assign=True) keeps the tensor that it is given.
            state_dict[name] = state_dict[name].float()
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        has_bias = self.bias is not None
        return f"hidden_size={self.hidden_size}, routing={self.routing}, bias={has_bias}"
