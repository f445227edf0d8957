"""LongCat-Flash: ids past the last routed expert name "zero experts", which return their input."""

from __future__ import annotations

from torch import Tensor
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashExperts

from tmoe.nn.lora import read_adapted
from tmoe.ops import fused_experts

from ..activations import gated_by
from ..quantized import scheme_of


class TmoeLongcatFlashExperts(LongcatFlashExperts):
    """`gate_up_proj` has rows for zero experts too, which nothing reads; `down_proj` has none.
    Quantised, both have none."""

    cannot_divide = "some of its experts return their input, at each token's own rank"
    weight_names = ("gate_up_proj", "down_proj")

    def why_not(self) -> str | None:
        if self.num_routed_experts == 0:
            return "it has zero experts only"
        if gated_by(self.act_fn) is None:
            return f"the activation {type(self.act_fn).__name__} is not one of tmoe's"
        return None

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """(T, H) to (T, H); ids and weights are (T, K). The fused call skips zero experts' ids."""
        gate_up_proj, gate_up_lora = read_adapted(self, "gate_up_proj")
        down_proj, down_lora = read_adapted(self, "down_proj")
        E, activation = down_proj.shape[0], gated_by(self.act_fn)
        assert activation is not None  # why_not
        routed = fused_experts(
            hidden_states.to(gate_up_proj.dtype),
            gate_up_proj[:E],
            down_proj,
            top_k_weights,
            top_k_index,
            activation=activation,
            gate_up_lora=None if gate_up_lora is None else gate_up_lora.of_experts(E),
            down_lora=down_lora,
            **scheme_of(self).of_layer(),
        )
        kept = top_k_weights.float().masked_fill(top_k_index < E, 0.0).sum(1, keepdim=True)
        return (routed.float() + hidden_states.float() * kept).to(hidden_states.dtype)
