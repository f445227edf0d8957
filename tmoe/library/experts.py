"""torch.ops.tmoe.grouped_gemm and torch.ops.tmoe.fused_experts, both of quantised weights too; and
torch.ops.tmoe.coded_experts, of an input that is quantised already."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from ..activation import Activation
from ..checks import expect
from ..dispatch import prepared
from ..dispatch.backend import Backend
from ..dispatch.prepared import ExpertWeights
from ..dispatch.problem import (
    ExpertGradients,
    ExpertsSpec,
    GemmGradients,
    StaticScales,
    result_dtype,
    token_bucket,
)
from ..formats import QuantizedTensor
from ..formats.format import FORMATS
from ..formats.scheme import SCHEMES
from .operation import Facts, Operation
from .prepare import prepare_weights
from .training import Training

# grouped_gemm -------------------------------------------------------------------------------------


def _gemm_facts(a: Tensor, b: Tensor, expert_offsets: Tensor, bias: Tensor | None) -> Facts:
    E, N, D = b.shape
    rows, has_bias = token_bucket(a.shape[0]), bias is not None
    return Facts("grouped_gemm", rows, D, N, E, 1, a.dtype, has_bias=has_bias)


def _gemm(backend: Backend, a: Tensor, b: Tensor, expert_offsets: Tensor, *rest: Any) -> Tensor:
    _expect_offsets(expert_offsets, a.shape[0])
    return backend.grouped_gemm(a, b, expert_offsets, *rest)


def _expect_offsets(expert_offsets: Tensor, S: int) -> None:
    """Raise on a CPU for offsets that aren't any. On a GPU that would mean waiting for it."""
    if expert_offsets.device.type == "cpu":
        offsets = expert_offsets.tolist()
        ok = offsets[0] == 0 and offsets == sorted(offsets) and offsets[-1] <= S
        wanted = f"from 0, never decreasing, to at most S = {S}"
        expect(ok, "grouped_gemm", "expert_offsets", wanted, offsets)


def _gemm_backward(
    backend: Backend, grad: Tensor, a: Tensor, b: Tensor, expert_offsets: Tensor, *rest: Any
) -> list[Tensor]:
    bias, _, wanted, _, sums = rest
    gradients = backend.grouped_gemm_backward(
        grad, a, b, expert_offsets, bias, GemmGradients(*wanted), GemmGradients(*sums)
    )
    return [gradient for gradient in gradients if gradient is not None]


_GEMM = Operation(
    "grouped_gemm",
    "Tensor a, Tensor b, Tensor expert_offsets, Tensor? bias",
    "Tensor",
    facts=_gemm_facts,
    compute=_gemm,
    fake=lambda a, b, *rest: a.new_empty(a.shape[0], b.shape[1]),
    differentiable=(0, 1, 3),
).define(has_backward=False)
Training(_GEMM, _gemm_backward, weights=(1,)).define()


# fused_experts ------------------------------------------------------------------------------------


def _experts_facts(*arguments: Any) -> Facts:
    x, gate_up, down_proj, _, topk_ids, gate_up_bias, down_bias, *rest = arguments
    name, alpha, limit, interleaved, weight_on_input, first, num_experts, wide = rest
    activation = _activation(name, alpha, limit)
    (T, K), (local, H, I) = topk_ids.shape, down_proj.shape
    return Facts(
        "fused_experts",
        token_bucket(T),
        H,
        I,
        num_experts,
        K,
        x.dtype,
        activation=activation,
        has_bias=gate_up_bias is not None or down_bias is not None,
        weight_on_input=weight_on_input,
        window=None if local == num_experts else (first, local),
        wide=wide,
        prepared=()
        if prepared.is_empty()
        else prepared.backends_of(
            (gate_up,), (down_proj,), (gate_up_bias, down_bias), activation, interleaved
        ),
    )


def _plain_weights(*arguments: Any) -> ExpertWeights:
    _, gate_up, down, _, _, gate_up_bias, down_bias, name, alpha, limit, interleaved, *_ = arguments
    activation = _activation(name, alpha, limit)
    return ExpertWeights(gate_up, down, activation, interleaved, gate_up_bias, down_bias)


def _experts(backend: Backend, *rest: Any) -> Tensor:
    *arguments, out = rest
    y: Tensor = backend.fused_experts(*_with_spec(arguments, out))
    return y


def _with_spec(arguments: Any, *more: Any) -> Any:
    """The tensors, the rest as an `ExpertsSpec`, and `more`."""
    *tensors, name, alpha, limit, interleaved, weight_on_input, first, num_experts, wide = arguments
    activation = _activation(name, alpha, limit)
    spec = ExpertsSpec(activation, interleaved, weight_on_input, first, num_experts, wide=wide)
    return *tensors, spec, *more


def _fake_experts(x: Tensor, *rest: Any) -> Tensor:
    *_, wide, _ = rest
    return x.new_empty(x.shape, dtype=result_dtype(x, wide))


_activation = cache(Activation)


def _train_experts(backend: Backend, *arguments: Any) -> tuple[Tensor, Tensor]:
    return backend.train_experts(*_with_spec(arguments))


def _experts_backward(backend: Backend, grad: Tensor, *rest: Any) -> list[Tensor]:
    *arguments, kept, wanted, may_write, sums = rest
    kept = kept if kept.numel() else None
    more = (kept, ExpertGradients(*wanted), may_write, ExpertGradients(*sums))
    gradients = backend.experts_backward(grad, *_with_spec(arguments, *more))
    return [gradient for gradient in gradients if gradient is not None]


def _fake_kept(x: Tensor, gate_up_proj: Tensor, *rest: Any) -> Tensor:
    T, K = rest[2].shape
    return x.new_empty(T * K, gate_up_proj.shape[1])


_EXPERTS = Operation(
    "fused_experts",
    "Tensor x, Tensor gate_up_proj, Tensor down_proj, Tensor topk_weights, Tensor topk_ids, "
    "Tensor? gate_up_bias, Tensor? down_bias, str activation, float alpha, float limit, "
    "bool interleaved, bool weight_on_input, int first_expert, int num_experts, bool wide",
    "Tensor",
    facts=_experts_facts,
    compute=_experts,
    fake=_fake_experts,
    differentiable=(0, 1, 2, 3, 5, 6),
    prepare=partial(prepare_weights, _plain_weights, _experts),
    release=lambda backend, *arguments: prepared.keep_only(backend, _plain_weights(*arguments)),
).define(has_backward=False)
Training(_EXPERTS, _experts_backward, (1, 2), _train_experts, _fake_kept).define()


# quantized_grouped_gemm ---------------------------------------------------------------------------


def _quantized_gemm_facts(a: Tensor, b: list[Tensor], *rest: Any) -> Facts:
    _, bias, _, scheme, _, _ = rest
    E, N, _ = b[0].shape
    rows, D, has_bias = token_bucket(a.shape[0]), a.shape[1], bias is not None
    return Facts("grouped_gemm", rows, D, N, E, 1, a.dtype, has_bias=has_bias, scheme=scheme)


def _quantized_gemm(backend: Backend, a: Tensor, b: list[Tensor], *rest: Any) -> Tensor:
    expert_offsets, bias, a_scale, scheme, format, block, out = rest
    _expect_offsets(expert_offsets, a.shape[0])
    weight = weight_of(b, format, block, a)
    return backend.grouped_gemm(a, weight, expert_offsets, bias, out, scheme, a_scale)


def _quantized_gemm_gradients(
    backend: Backend, grads: list[Tensor], arguments: list[Any], wanted: list[bool]
) -> list[Tensor] | None:
    a, b, expert_offsets, bias, _, _, format, block = arguments
    find = getattr(backend, "frozen_gemm_backward", None)
    if find is None:
        return None
    of_a, of_bias = wanted
    weight = weight_of(b, format, block, a)
    asked = GemmGradients(of_a, False, of_bias)
    found = find(grads[0], weight, expert_offsets, bias, asked)
    return [gradient for gradient in found if gradient is not None]


Operation(
    "quantized_grouped_gemm",
    "Tensor a, Tensor[] b, Tensor expert_offsets, Tensor? bias, Tensor? a_scale, str scheme, "
    "str weight_format, int weight_block",
    "Tensor",
    facts=_quantized_gemm_facts,
    compute=_quantized_gemm,
    fake=lambda a, b, *rest: a.new_empty(a.shape[0], b[0].shape[1]),
    differentiable=(0, 3),
    gradients=_quantized_gemm_gradients,
).define()


# quantized_experts --------------------------------------------------------------------------------


def _quantized_facts(*arguments: Any) -> Facts:
    x, gate_up, down, _, topk_ids, gate_up_bias, down_bias, *rest = arguments
    input_scale, hidden_scale, scheme, format, _, name, alpha, limit, interleaved, *rest = rest
    weight_on_input, first, num_experts, wide = rest
    (T, K), (local, H, columns) = topk_ids.shape, down[0].shape
    activation = _activation(name, alpha, limit)
    return Facts(
        "fused_experts",
        token_bucket(T),
        H,
        columns * (2 if FORMATS[format].is_packed else 1),
        num_experts,
        K,
        x.dtype,
        activation=activation,
        has_bias=gate_up_bias is not None or down_bias is not None,
        weight_on_input=weight_on_input,
        scheme=scheme,
        has_static_scales=input_scale is not None and hidden_scale is not None,
        window=None if local == num_experts else (first, local),
        wide=wide,
        prepared=()
        if prepared.is_empty()
        else prepared.backends_of(
            gate_up,
            down,
            (gate_up_bias, down_bias, input_scale, hidden_scale),
            activation,
            interleaved,
        ),
    )


def _quantized_weights(*arguments: Any) -> ExpertWeights:
    x, gate_up, down, _, _, gate_up_bias, down_bias, input_scale, hidden_scale, *rest = arguments
    _, format, block, name, alpha, limit, interleaved, *_ = rest
    return ExpertWeights(
        weight_of(gate_up, format, block, x),
        weight_of(down, format, block, x),
        _activation(name, alpha, limit),
        interleaved,
        gate_up_bias,
        down_bias,
        input_scale,
        hidden_scale,
    )


def _quantized(backend: Backend, *arguments: Any) -> Tensor:
    x, gate_up, down, topk_weights, topk_ids, gate_up_bias, down_bias, *rest = arguments
    input_scale, hidden_scale, scheme, format, block, name, alpha, limit, *rest = rest
    interleaved, weight_on_input, first_expert, num_experts, wide, out = rest
    activation = _activation(name, alpha, limit)
    spec = ExpertsSpec(
        activation, interleaved, weight_on_input, first_expert, num_experts, scheme, wide
    )
    return backend.fused_experts(
        x,
        weight_of(gate_up, format, block, x),
        weight_of(down, format, block, x),
        topk_weights,
        topk_ids,
        gate_up_bias,
        down_bias,
        spec,
        out,
        StaticScales(input_scale, hidden_scale),
    )


def weight_of(parts: list[Tensor], format: str, block: int, x: Tensor) -> QuantizedTensor:
    """The weight (E, N, D) that stands in an op's arguments as codes, scales and global scale."""
    data, scale, *global_scale = parts
    spec = FORMATS[format]
    shape = (*data.shape[:-1], data.shape[-1] * (2 if spec.is_packed else 1))
    return QuantizedTensor(
        data,
        scale,
        global_scale[0] if global_scale else None,
        format,
        spec.block_shapes[block],
        shape,
        x.dtype,
    )


_QUANTIZED = (
    "Tensor[] gate_up, Tensor[] down, Tensor topk_weights, Tensor topk_ids, "
    "Tensor? gate_up_bias, Tensor? down_bias, Tensor? input_scale, Tensor? hidden_scale, "
    "str scheme, str weight_format, int weight_block, str activation, float alpha, float limit, "
    "bool interleaved, bool weight_on_input, int first_expert, int num_experts, bool wide"
)

Operation(
    "quantized_experts",
    "Tensor x, " + _QUANTIZED,
    "Tensor",
    facts=_quantized_facts,
    compute=_quantized,
    fake=_fake_experts,
    differentiable=(0, 3, 5, 6),  # no backend has their gradients; asking for them is refused
    prepare=partial(prepare_weights, _quantized_weights, _quantized),
    release=lambda backend, *arguments: prepared.keep_only(backend, _quantized_weights(*arguments)),
).define()


# coded_experts ------------------------------------------------------------------------------------


def _coded(
    x: Tensor, scales: list[Tensor], dtype: torch.dtype, gate_up: list[Tensor], down: list[Tensor],
    *rest: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """The arguments of quantized_experts, with a quantised x."""
    recipe = SCHEMES[rest[6]].inputs
    assert recipe is not None, "a scheme that quantises its inputs"
    shape = (x.shape[0], down[0].shape[1])
    scale, *more = scales
    q = QuantizedTensor(
        x, scale, more[0] if more else None, recipe.format.name, recipe.block_shape, shape, dtype
    )
    return q, gate_up, down, *rest


def _fake_coded(*arguments: Any) -> Tensor:
    x, _, dtype, _, down, *_, wide, _ = arguments
    result = torch.promote_types(dtype, torch.float32) if wide else dtype
    return x.new_empty((x.shape[0], down[0].shape[1]), dtype=result)


Operation(
    "coded_experts",
    "Tensor x, Tensor[] x_scales, ScalarType x_dtype, " + _QUANTIZED,
    "Tensor",
    facts=lambda *arguments: _quantized_facts(*_coded(*arguments))._replace(coded=True),
    compute=lambda backend, *rest: _quantized(backend, *_coded(*rest[:-1]), rest[-1]),
    fake=_fake_coded,
    differentiable=(5, 7, 8),  # as of quantized_experts
).define(has_out=False)
