"""JetMoE's MLP experts. Its attention experts (JetMoeMoA) stay as they are."""

from __future__ import annotations

from torch import Tensor
from transformers.models.jetmoe.modeling_jetmoe import JetMoeMoE

from tmoe.ops import fused_experts, route
from tmoe.routing import Routing

from ..activations import gated_by
from ..quantized import scheme_of
from ..wrapped import read_weight


class TmoeJetMoeMoE(JetMoeMoE):
    """The router's own result is sorted on the host, so its logits are routed again."""

    cannot_divide = "its projections are modules of their own, and it routes for itself"
    selects = True

    weight_names = ("input_linear.weight", "output_linear.weight")

    def why_not(self) -> str | None:
        """The projections' forward, where offloaded weights would arrive, is not called here."""
        if gated_by(self.activation) is None:
            return f"the activation {type(self.activation).__name__} is not one of tmoe's"
        if self.input_linear.weight.is_meta or self.output_linear.weight.is_meta:
            return "its weights are offloaded, or not loaded yet"
        return None

    def forward(self, layer_input: Tensor) -> Tensor:
        """(B, S, H) to (B, S, H)."""
        x = layer_input.reshape(-1, layer_input.shape[-1])
        *_, router_logits = self.router(x)
        routing = Routing(router_logits.shape[1], self.router.top_k, "Renormalize")
        topk_weights, topk_ids = route(router_logits, routing)
        gate_up_proj, activation = read_weight(self.input_linear), gated_by(self.activation)
        assert activation is not None  # why_not
        out = fused_experts(
            x.to(gate_up_proj.dtype),
            gate_up_proj,
            read_weight(self.output_linear),
            topk_weights.type_as(x),
            topk_ids,
            activation=activation,
            **scheme_of(self).of_layer(),
        )
        return out.to(x.dtype).view(layer_input.shape) + self.bias
