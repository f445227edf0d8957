"""The function behind ``experts_implementation="tmoe"``."""

from __future__ import annotations

from torch import Tensor

from tmoe.low_rank import LowRank
from tmoe.nn.lora import read_adapted
from tmoe.ops import fused_experts, grouped_gemm

from .activations import ExpertsModule, activation_of
from .quantized import is_transposed, scheme_of
from .record_inputs import RECORDER
from .sorted_rows import through_experts


def experts_forward(
    self: ExpertsModule, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Run an experts module of transformers on tmoe.

    Args:
        self: a module that ``use_experts_implementation`` decorates. Shapes come from its weights,
            never from its config or its size attributes, which tensor parallelism makes wrong.
        hidden_states: (T, H), cast to the weights' dtype (autocast leaves the two different).
        top_k_index: (T, K) int64. Ids outside [0, number of local experts) contribute exactly zero.
        top_k_weights: (T, K), any float dtype.

    Returns:
        (T, H), a new contiguous tensor in `hidden_states`' dtype.
    """
    return run_experts(self, hidden_states, top_k_index, top_k_weights)


def run_experts(
    experts: ExpertsModule,
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    weight_on_input: bool = False,
) -> Tensor:
    """`experts_forward`, with the routing weight on the expert's input on request (Llama 4).

    Weights that `hold_quantized` put there run in their scheme.
    """
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    transposed = is_transposed(experts)
    gate_up_proj, gate_up_lora = read_adapted(experts, first, transposed=transposed)
    down_proj, down_lora = read_adapted(experts, "down_proj", transposed=transposed)
    gate_up_bias = getattr(experts, f"{first}_bias") if experts.has_bias else None
    down_bias = experts.down_proj_bias if experts.has_bias else None
    if transposed:
        gate_up_proj, down_proj = gate_up_proj.transpose(1, 2), down_proj.transpose(1, 2)
    rows = x if x.dtype == gate_up_proj.dtype else x.to(gate_up_proj.dtype)
    scheme = scheme_of(experts)

    # What a module lacks is looked up in its dictionary: nn.Module's own search takes longer.
    has_norm = experts.__dict__.get("has_post_expert_norm", False)
    norm = experts.post_expert_norm if has_norm else None
    activation, recorder = activation_of(experts), experts.__dict__.get(RECORDER)
    if activation is not None and norm is None and recorder is None:
        out = fused_experts(
            rows,
            gate_up_proj,
            down_proj,
            topk_weights,
            topk_ids,
            activation=activation,
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
            interleaved=not experts.is_concatenated,
            weight_on_input=weight_on_input,
            gate_up_lora=gate_up_lora,
            down_lora=down_lora,
            **scheme.of_layer(),
        )
        return out if out.dtype == x.dtype else out.to(x.dtype)

    def expert(rows: Tensor, expert_offsets: Tensor) -> Tensor:
        if recorder is not None:
            recorder.see("input", rows, expert_offsets)
        hidden = grouped_gemm(
            rows,
            gate_up_proj,
            expert_offsets,
            bias=gate_up_bias,
            **scheme.of_gemm("input_scale"),
        )
        hidden = _add_low_rank(hidden, rows, gate_up_lora, expert_offsets)
        hidden = experts._apply_gate(hidden) if experts.has_gate else experts.act_fn(hidden)
        if recorder is not None:
            recorder.see("hidden", hidden, expert_offsets)
        out = grouped_gemm(
            hidden, down_proj, expert_offsets, bias=down_bias, **scheme.of_gemm("hidden_scale")
        )
        out = _add_low_rank(out, hidden, down_lora, expert_offsets)
        return out if norm is None else norm(out)

    num_experts = down_proj.shape[0]
    out = through_experts(
        rows, topk_ids, topk_weights, num_experts, expert, weight_on_input=weight_on_input
    )
    return out.to(x.dtype)


def _add_low_rank(y: Tensor, rows: Tensor, lora: LowRank | None, expert_offsets: Tensor) -> Tensor:
    """Where only the module can compute what stands between the projections."""
    if lora is None:
        return y
    low = grouped_gemm(rows, lora.a.to(rows.dtype), expert_offsets)
    return y + grouped_gemm(low, (lora.b * lora.scaling).to(rows.dtype), expert_offsets)
