"""The function behind ``experts_implementation="tmoe"``."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tmoe.activation import Activation
from tmoe.formats import QuantizedTensor
from tmoe.low_rank import LowRank
from tmoe.nn.lora import read_adapted
from tmoe.ops import fused_experts, grouped_gemm

from .activations import ExpertsModule, activation_of
from .quantized import PARALLEL, is_transposed, scheme_of
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

    Weights that `hold_quantized` put there run in their scheme. Where `tmoe.parallel` divided them,
    ids are global, and all ranks call it.
    """
    weights = _Weights.of(experts)
    dtype = weights.gate_up_proj.dtype
    rows = x if x.dtype == dtype else x.to(dtype)
    parallel = experts.__dict__.get(PARALLEL)
    if parallel is None:
        out = _run(experts, weights, rows, topk_ids, topk_weights, weight_on_input)
        return out if out.dtype == x.dtype else out.to(x.dtype)
    weights = weights.divided(parallel)

    def local_experts(here: Any, out_dtype: torch.dtype) -> Tensor:
        return _run(
            experts, weights, here.x, here.slots, here.weights, weight_on_input,
            first_expert=here.first, num_experts=here.num_slots, out_dtype=out_dtype,
        )  # fmt: skip

    scheme, codes = scheme_of(experts), None
    adapted = weights.gate_up_lora is not None or weights.down_lora is not None
    if not adapted and _fused_activation(experts) is not None:
        codes = parallel.codes(scheme.name, scheme.of_layer().get("input_scale"), weight_on_input)
    trained = any(parameter.requires_grad for parameter in experts.parameters())
    y, _ = parallel.run(
        rows, topk_weights, topk_ids, local_experts, codes=codes, trained=trained
    )  # fmt: skip
    return y.to(x.dtype)


def _fused_activation(experts: ExpertsModule) -> Activation | None:
    """The activation, where `tmoe.fused_experts` does all of it; else None. What a module lacks is
    looked up in its dictionary: nn.Module's own search takes longer."""
    own = experts.__dict__
    if own.get("has_post_expert_norm", False) or own.get(RECORDER) is not None:
        return None
    return activation_of(experts)


class _Weights(NamedTuple):
    """A module's weights, (E, 2I, H) and (E, H, I), and biases."""

    gate_up_proj: Tensor
    down_proj: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    gate_up_lora: LowRank | None
    down_lora: LowRank | None

    @classmethod
    def of(cls, experts: ExpertsModule) -> _Weights:
        """One read each: under PEFT every read of a parametrised weight rebuilds it for all."""
        first = "gate_up_proj" if experts.has_gate else "up_proj"
        transposed = is_transposed(experts)
        gate_up_proj, gate_up_lora = read_adapted(experts, first, transposed=transposed)
        down_proj, down_lora = read_adapted(experts, "down_proj", transposed=transposed)
        gate_up_bias = getattr(experts, f"{first}_bias") if experts.has_bias else None
        down_bias = experts.down_proj_bias if experts.has_bias else None
        if transposed:
            gate_up_proj, down_proj = gate_up_proj.transpose(1, 2), down_proj.transpose(1, 2)
        return cls(gate_up_proj, down_proj, gate_up_bias, down_bias, gate_up_lora, down_lora)

    def divided(self, parallel: Any) -> _Weights:
        """Those of a rank, so that gradients and sums over ranks come out right."""
        return self._replace(
            gate_up_proj=parallel.weight(self.gate_up_proj),
            down_proj=parallel.weight(self.down_proj),
            gate_up_bias=parallel.bias(self.gate_up_bias),
            down_bias=parallel.bias_once(self.down_bias),
            gate_up_lora=parallel.adapter(self.gate_up_lora, first=True),
            down_lora=parallel.adapter(self.down_lora, first=False),
        )


def _run(
    experts: ExpertsModule,
    weights: _Weights,
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    weight_on_input: bool,
    *,
    first_expert: int = 0,
    num_experts: int | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """x (T, H) in the weights' dtype -> (T, H) in `out_dtype`. Of ids outside the window that
    begins with `first_expert` nothing is computed."""
    activation, scales = _fused_activation(experts), scheme_of(experts).of_layer()
    if activation is not None:
        if isinstance(x, QuantizedTensor):
            scales["input_scale"] = None  # it came as codes
        return fused_experts(
            x,
            weights.gate_up_proj,
            weights.down_proj,
            topk_weights,
            topk_ids,
            activation=activation,
            gate_up_bias=weights.gate_up_bias,
            down_bias=weights.down_bias,
            interleaved=not experts.is_concatenated,
            weight_on_input=weight_on_input,
            gate_up_lora=weights.gate_up_lora,
            down_lora=weights.down_lora,
            first_expert=first_expert,
            num_experts=num_experts,
            out_dtype=out_dtype,
            **scales,
        )
    ids = topk_ids - first_expert if first_expert else topk_ids
    y = _by_module(experts, weights, x, ids, topk_weights, weight_on_input)
    return y.to(out_dtype or x.dtype)


def _by_module(
    experts: ExpertsModule,
    weights: _Weights,
    x: Tensor,
    ids: Tensor,
    topk_weights: Tensor,
    weight_on_input: bool,
) -> Tensor:
    """The same where only the module can compute what stands between the projections; `ids` count
    from the first of the experts that are here."""
    scheme = scheme_of(experts)
    has_norm = experts.__dict__.get("has_post_expert_norm", False)
    norm = experts.post_expert_norm if has_norm else None
    recorder = experts.__dict__.get(RECORDER)

    def expert(rows: Tensor, expert_offsets: Tensor) -> Tensor:
        if recorder is not None:
            recorder.see("input", rows, expert_offsets)
        hidden = grouped_gemm(
            rows,
            weights.gate_up_proj,
            expert_offsets,
            bias=weights.gate_up_bias,
            **scheme.of_gemm("input_scale"),
        )
        hidden = _add_low_rank(hidden, rows, weights.gate_up_lora, expert_offsets)
        hidden = experts._apply_gate(hidden) if experts.has_gate else experts.act_fn(hidden)
        if recorder is not None:
            recorder.see("hidden", hidden, expert_offsets)
        out = grouped_gemm(
            hidden,
            weights.down_proj,
            expert_offsets,
            bias=weights.down_bias,
            **scheme.of_gemm("hidden_scale"),
        )
        out = _add_low_rank(out, hidden, weights.down_lora, expert_offsets)
        return out if norm is None else norm(out)

    held = weights.down_proj.shape[0]
    return through_experts(x, ids, topk_weights, held, expert, weight_on_input=weight_on_input)


def _add_low_rank(y: Tensor, rows: Tensor, lora: LowRank | None, expert_offsets: Tensor) -> Tensor:
    """Where only the module can compute what stands between the projections."""
    if lora is None:
        return y
    low = grouped_gemm(rows, lora.a.to(rows.dtype), expert_offsets)
    return y + grouped_gemm(low, (lora.b * lora.scaling).to(rows.dtype), expert_offsets)
