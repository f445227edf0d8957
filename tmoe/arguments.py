"""What the public operations check about their arguments, and how autocast and autograd see them.

Checks look at types, shapes, dtypes and devices, never at values: a value on a GPU can't be read
without waiting for it. A size that may be symbolic under `torch.compile` is put into words only
when a check has failed.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from .checks import expect, expect_size, expect_tensor, expect_type
from .formats import QuantizedTensor
from .formats.scheme import SCHEMES as QUANTIZED
from .formats.scheme import Scheme

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
INTS = (torch.int32, torch.int64)
SCHEMES = ("bf16",)  # of unquantised weights


def expect_dtype(value: Any, op: str, arg: str, dtypes: tuple[torch.dtype, ...]) -> None:
    """Raise ``TypeError`` unless `value` is an ordinary tensor of one of `dtypes`."""
    expect_tensor(value, op, arg)
    if value.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{op}: {arg} must have dtype {names}, got {value.dtype}")


def expect_optional(value: Any, op: str, arg: str, shape: tuple[int, ...]) -> None:
    """Raise unless `value` is None or a float tensor of `shape`."""
    if value is not None:
        expect_dtype(value, op, arg, FLOATS)
        expect(value.shape == shape, op, arg, f"of shape {shape}", tuple(value.shape))


def expect_alike(op: str, first: dict[str, Tensor], **others: Tensor | None) -> None:
    """Raise unless `others` have the dtype and the device of the one tensor in `first`."""
    ((name, like),) = first.items()
    for arg, value in others.items():
        if value is not None and value.dtype != like.dtype:
            raise TypeError(f"{op}: {arg} must have {name}'s dtype {like.dtype}, got {value.dtype}")
    expect_same_device(op, first, **others)


def expect_same_device(op: str, first: dict[str, Tensor], **others: Tensor | None) -> None:
    """Raise unless `others` are on the device of the one tensor in `first`."""
    ((name, like),) = first.items()
    for arg, value in others.items():
        if value is not None and value.device != like.device:
            expect(False, op, arg, f"on {name}'s device {like.device}", value.device)


def expect_topk(
    op: str, weights: Any, ids: Any, x: Tensor, num_experts: int
) -> tuple[Tensor, Tensor]:
    """topk_weights and topk_ids as (T, K); both may have x's leading sizes, or be flat already."""
    expect_dtype(weights, op, "topk_weights", FLOATS)
    expect_dtype(ids, op, "topk_ids", INTS)
    lead, K = ids.shape[:-1], ids.shape[-1] if ids.ndim else 0
    T = x.shape[0] if x.ndim == 2 else x.reshape(-1, x.shape[-1]).shape[0]
    if lead != x.shape[:-1] and lead != (T,):
        expect(False, op, "topk_ids", f"(T, K) for x of shape {tuple(x.shape)}", tuple(ids.shape))
    if not 1 <= K <= num_experts:
        wanted = f"of at least 1 and at most num_experts={num_experts} columns"
        expect(False, op, "topk_ids", wanted, K)
    if weights.shape != ids.shape:
        wanted = f"of topk_ids' shape {tuple(ids.shape)}"
        expect(False, op, "topk_weights", wanted, tuple(weights.shape))
    return (weights, ids) if ids.ndim == 2 else (weights.reshape(T, K), ids.reshape(T, K))


def expect_window(op: str, first_expert: Any, num_experts: Any, num_local: int) -> int:
    """The global number of experts; raises unless it covers the local ones."""
    expect_size(first_expert, op, "first_expert", least=0)
    if num_experts is None:
        return first_expert + num_local
    expect_size(num_experts, op, "num_experts")
    if num_experts < first_expert + num_local:
        wanted = f"at least first_expert + E = {first_expert} + {num_local}"
        expect(False, op, "num_experts", wanted, num_experts)
    return num_experts


def expect_scheme(op: str, scheme: Any) -> None:
    """Raise unless `scheme` is None or one of weights that aren't quantised."""
    if scheme is not None:
        expect_type(scheme, str, op, "scheme")
        wanted = f"None or {' or '.join(SCHEMES)} with weights that aren't quantised"
        if scheme in QUANTIZED:
            wanted += f"; {scheme} takes weights from tmoe.quantize"
        expect(scheme in SCHEMES, op, "scheme", wanted, repr(scheme))


def expect_quantized(
    op: str, scheme: Any, weights: dict[str, Any], **scales: Tensor | None
) -> None:
    """Raise unless the weights are quantised alike, as the scheme has them, and the static scales
    of their inputs are such that it takes."""
    fitting = ", ".join(name for name, known in QUANTIZED.items() if _fits(known, weights))
    wanted = f"named for quantised weights: one of {fitting or ', '.join(QUANTIZED)}"
    expect(scheme is not None, op, "scheme", wanted, scheme)
    chosen = Scheme.of(scheme, op)
    forms = " or ".join(f"{r.format.name} {r.block_shape}" for r in chosen.weights)
    for arg, weight in weights.items():
        expect_type(weight, QuantizedTensor, op, arg)
        ok = chosen.accepts(weight.format, weight.block_shape)
        got = f"{weight.format} {weight.block_shape}"
        expect(ok, op, arg, f"{forms} for {scheme}", got)
    (name, first), *others = weights.items()
    for arg, weight in others:
        wanted = f"{first.format} {first.block_shape}, as {name} is"
        got = f"{weight.format} {weight.block_shape}"
        expect(got == f"{first.format} {first.block_shape}", op, arg, wanted, got)
    E = first.shape[0]
    for arg, scale in scales.items():
        if scale is not None:
            wanted = f"None for {scheme}, whose scales come from the inputs"
            expect(chosen.takes_scales, op, arg, wanted, "a scale")
            expect_dtype(scale, op, arg, FLOATS)
            ok = scale.numel() == 1 or scale.shape == (E,)
            expect(ok, op, arg, f"one number, or of shape ({E},)", tuple(scale.shape))


def expect_coded(
    op: str, scheme: str | None, x: Tensor, input_scale: Tensor | None, weight_on_input: bool,
    out: Tensor | None,
) -> None:  # fmt: skip
    """Raise unless x, if it is quantised, is so as the scheme's inputs are."""
    if not isinstance(x, QuantizedTensor):
        return
    recipe = Scheme.of(str(scheme), op).inputs
    wanted = f"not quantised: {scheme} takes its inputs as they come"
    expect(recipe is not None, op, "x", wanted, x.format)
    assert recipe is not None
    wanted = f"{recipe.format.name} {recipe.block_shape} (T, H) for {scheme}, or not quantised"
    got = f"{x.format} {x.block_shape} {tuple(x.shape)}"
    ok = (x.format, x.block_shape) == (recipe.format.name, recipe.block_shape) and x.ndim == 2
    expect(ok, op, "x", wanted, got)
    expect(input_scale is None, op, "input_scale", "None for x that is quantised", "a scale")
    wanted = "False for x that is quantised: codes aren't multiplied"
    expect(not weight_on_input, op, "weight_on_input", wanted, weight_on_input)
    expect(out is None, op, "out", "None for x that is quantised", "a tensor")


def _fits(scheme: Scheme, weights: dict[str, Any]) -> bool:
    return all(
        isinstance(weight, QuantizedTensor) and scheme.accepts(weight.format, weight.block_shape)
        for weight in weights.values()
    )


def expect_out(
    op: str, out: Any, shape: Any, first: dict[str, Tensor], *inputs: Tensor | None
) -> None:
    """Raise unless `out` can be written: shape, dtype, device, strides, and no memory shared."""
    (like,) = first.values()
    expect_dtype(out, op, "out", (like.dtype,))
    if out.shape != shape:
        expect(False, op, "out", f"of shape {tuple(shape)}", tuple(out.shape))
    expect_same_device(op, first, out=out)
    expect(out.is_contiguous(), op, "out", "contiguous", "a strided tensor")
    needed = needs_grad(out, like, *inputs)
    expect(not needed, op, "out", "None while gradients are needed", "a tensor")
    if not torch.compiler.is_compiling():  # while tracing there is no memory to compare
        shared = any(tensor is not None and _overlap(out, tensor) for tensor in (like, *inputs))
        expect(not shared, op, "out", "apart from the inputs", "a tensor that shares their memory")


def _overlap(a: Tensor, b: Tensor) -> bool:
    (a_first, a_end), (b_first, b_end) = _addresses(a), _addresses(b)
    return a_first < b_end and b_first < a_end


def _addresses(tensor: Tensor) -> tuple[int, int]:
    """The first address of a tensor's elements, and the one after the last."""
    if tensor.numel() == 0:
        return 0, 0
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in sizes)
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd wants gradients. An exported program serves, so it may take any forward.

    Raises:
        RuntimeError: torch.func, or forward-mode differentiation, wants them. Neither goes through
            operators of torch.library, and the second would take the result for a constant.
    """
    if not torch.compiler.is_compiling():
        _refuse_transforms(tensors)
    return (
        torch.is_grad_enabled()
        and not torch.compiler.is_exporting()
        and any(tensor is not None and tensor.requires_grad for tensor in tensors)
    )


def _refuse_transforms(tensors: tuple[Tensor | None, ...]) -> None:
    level = torch.autograd.forward_ad._current_level
    kinds = {str(i.key()) for i in torch._C._functorch.get_interpreter_stack() or ()}
    dual = level >= 0 and any(
        tensor is not None and unpack_dual(tensor).tangent is not None for tensor in tensors
    )
    if dual or "TransformType.Jvp" in kinds:
        got = "forward-mode differentiation (torch.func.jvp, forward_ad)"
    elif "TransformType.Grad" in kinds and torch.is_grad_enabled():
        got = "torch.func.grad and what is built on it (vjp, jacrev, hessian)"
    else:
        return
    raise RuntimeError(
        f"tmoe's operators can't be differentiated by {got}; use torch.autograd.grad or backward() "
        "instead. torch.func.functional_call, and vmap without gradients, work"
    )


def autocast_is_on(device_type: str) -> bool:
    """Whether autocast is on; there is none for tensors on meta, and to ask would raise."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def autocast_off(device_type: str) -> AbstractContextManager[Any]:
    """What was cast as autocast does, or is to stay as it is, is computed with as it is."""
    if autocast_is_on(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def autocast(first: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """The tensors in autocast's dtype while it is on; float64 stays, as in torch's own matmul."""
    if not autocast_is_on(first.device.type):
        return first, *others
    dtype = torch.get_autocast_dtype(first.device.type)
    return tuple(
        tensor if tensor is None or tensor.dtype == torch.float64 else tensor.to(dtype)
        for tensor in (first, *others)
    )
