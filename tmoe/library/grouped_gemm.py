"""torch.ops.tmoe.grouped_gemm, and quantized_grouped_gemm of quantised weights."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..checks import expect
from ..dispatch.backend import Backend
from ..dispatch.problem import GemmGradients, token_bucket
from .operation import Facts, Operation
from .training import Training
from .weights import weight_of


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
