"""Llama 4: transformers runs every expert on every token; here each token meets its own.

Both modules change: the block now hands ids and weights to the experts, which it goes on calling
as a module.
"""

from __future__ import annotations

from torch import Tensor
from transformers.integrations.moe import _default_apply_gate
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts, Llama4TextMoe

from ..experts import run_experts


class TmoeLlama4TextExperts(Llama4TextExperts):
    """Stored transposed, (E, H, 2I) and (E, I, H); the routing weight scales the input."""

    has_gate, has_bias, stored_transposed, is_concatenated = True, False, True, True
    _apply_gate = _default_apply_gate

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        """(T, H) to (T, H); ids and weights are (T, K)."""
        return run_experts(self, hidden_states, top_k_index, top_k_weights, weight_on_input=True)


class TmoeLlama4TextMoe(Llama4TextMoe):
    """The router's (T, E) scores are 0 outside the top k: their top k are the ids and weights."""

    parts = {"experts": TmoeLlama4TextExperts}

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """(B, S, H) to ((T, H), router logits (T, E))."""
        x = hidden_states.reshape(-1, self.hidden_dim)
        router_scores, router_logits = self.router(x)
        weights, ids = router_scores.topk(self.top_k, dim=1)
        return self.shared_expert(x) + self.experts(x, ids, weights), router_logits
