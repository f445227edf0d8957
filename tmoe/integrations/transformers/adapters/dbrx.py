"""DBRX: gate, up and down projections are three flat (E·I, H) parameters."""

from __future__ import annotations

from torch import Tensor
from transformers.models.dbrx.modeling_dbrx import DbrxExperts

from tmoe.ops import grouped_gemm

from ..sorted_rows import through_experts
from ..wrapped import read_weight, unwrapped


class TmoeDbrxExperts(DbrxExperts):
    """Three grouped GEMMs on views: one (E, 2I, H) tensor would be a second copy."""

    cannot_divide = "its gate and up projections are separate parameters, flat over the experts"
    cannot_quantize = "its gate and up projections are separate parameters, flat over the experts"

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """(B, S, H) to (B, S, H); ids and weights are (B·S, K)."""
        E, I, H = self.num_experts, self.ffn_hidden_size, self.hidden_size
        mlp = self.mlp
        gate_proj, up_proj, down_proj = (
            read_weight(mlp, name).view(E, I, H) for name in ("w1", "v1", "w2")
        )

        def expert(rows: Tensor, expert_offsets: Tensor) -> Tensor:
            gate = grouped_gemm(rows, gate_proj, expert_offsets)
            up = grouped_gemm(rows, up_proj, expert_offsets)
            hidden = unwrapped(mlp).activation_fn(gate) * up
            return grouped_gemm(hidden, down_proj.transpose(1, 2), expert_offsets)

        x = hidden_states.reshape(-1, H).to(gate_proj.dtype)
        out = through_experts(x, top_k_index, top_k_weights, E, expert)
        return out.view(hidden_states.shape).to(hidden_states.dtype)
