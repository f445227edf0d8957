"""Aria before transformers 5.18: its experts select for themselves and aren't on the interface.

Later versions have `AriaExperts` on the interface, and `families.py` leaves them to it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.aria.modeling_aria import AriaExperts

from tmoe.activation import Activation
from tmoe.ops import fused_experts, route
from tmoe.routing import Routing

from ..quantized import is_transposed, scheme_of
from ..wrapped import read_weight


class TmoeAriaExperts(AriaExperts):
    """Stored transposed, (E, H, 2I) and (E, I, H), in two modules that are not called here."""

    cannot_divide = "its projections are modules of their own, and it routes for itself"
    selects = True
    weight_names = ("fc1.weight", "fc2.weight")
    stored_transposed = True  # quantised weights are not: `hold_quantized` says so on the instance

    def why_not(self: Any) -> str | None:
        if self.fc1.weight.is_meta or self.fc2.weight.is_meta:
            return "its weights are offloaded, or not loaded yet"
        return None

    def forward(  # type: ignore[override]
        self: Any, hidden_states: Tensor, router_logits: Tensor
    ) -> Tensor:
        """(T, H) and logits (T, E) to (T, H)."""
        gate_up_proj, down_proj = read_weight(self.fc1), read_weight(self.fc2)
        if is_transposed(self):
            gate_up_proj, down_proj = gate_up_proj.transpose(1, 2), down_proj.transpose(1, 2)
        routing = Routing(down_proj.shape[0], self.config.moe_topk, "Renormalize")
        weights, ids = route(router_logits, routing)
        out = fused_experts(
            hidden_states.to(gate_up_proj.dtype),
            gate_up_proj,
            down_proj,
            weights.to(router_logits.dtype),
            ids,
            activation=Activation.swiglu(),
            **scheme_of(self).of_layer(),
        )
        return out.to(hidden_states.dtype)
