"""Operators of Triton's interpreter that remember what they found out about operands' types.

`mask & (offs < n)`: before NumPy computes anything, the interpreter asks of both operands whether
they are numbers, pointers, signed or blocks, which type both become, and copies the smaller one to
the shape of the other. All of that depends on the types alone, and a kernel has few. So an operator
is the interpreter's own where it meets two types for the first time. If they differ in shape at
most, or are integers of two widths, NumPy alone has the same answer from then on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from triton.language import core
from triton.runtime.interpreter import TensorHandle, _get_np_dtype, interpreter_semantic

COMPARISONS = {
    "__lt__": np.less,
    "__le__": np.less_equal,
    "__gt__": np.greater,
    "__ge__": np.greater_equal,
    "__eq__": np.equal,
    "__ne__": np.not_equal,
}
ARITHMETIC = {
    "__add__": np.add,
    "__sub__": np.subtract,
    "__mul__": np.multiply,
    "__and__": np.bitwise_and,
    "__or__": np.bitwise_or,
    "__xor__": np.bitwise_xor,
    "__lshift__": np.left_shift,
}
REVERSED = {"__radd__": np.add, "__rmul__": np.multiply}  # a number and a tensor

_ADD = core.tensor.__add__
_COMPARES = [getattr(core.tensor, name) for name in COMPARISONS]
_REVERSES = [getattr(core.tensor, name) for name in REVERSED]
_remembered: list[dict] = []


def remember() -> None:
    """Replace the operators. Once per process, before any launch."""
    for name, compute in (COMPARISONS | ARITHMETIC | REVERSED).items():
        setattr(core.tensor, name, _operator(getattr(core.tensor, name), compute))
    semantic = type(interpreter_semantic)
    semantic.broadcast_impl_value = _broadcasting(semantic.broadcast_impl_value)
    semantic.binary_op_type_checking_impl = _checking(semantic.binary_op_type_checking_impl)


def forget() -> None:
    """Let each operator's next use with any types be the interpreter's own."""
    for known in _remembered:
        known.clear()


@dataclass(frozen=True, slots=True)
class _Plan:
    """What becomes of two operands whose types are known."""

    like: dict  # the result, but for its handle
    dtype: core.dtype | None = None  # of the handle; None: the left operand's
    left: np.dtype | None = None  # the wider integer that an operand becomes
    right: np.dtype | None = None
    number: np.ndarray | None = None  # the right operand
    element: int = 0  # bytes, where the left operand points


def _operator(original, compute):
    known = {}
    _remembered.append(known)

    def operate(left, right, _semantic=None):
        if type(right) is core.tensor:
            key = left.type.name, right.type.name
        else:
            right = right.value if type(right) is core.constexpr else right
            if type(right) not in (int, float, bool):  # the interpreter raises
                return original(left, right, _semantic=interpreter_semantic)
            key = left.type.name, type(right), right
        plan = known.get(key)
        if plan is None:
            result = original(left, right, _semantic=interpreter_semantic)
            if key not in known:
                known[key] = _plan(original, left, right, result)
            return result
        a, b = left.handle.data, plan.number
        if b is None:
            b = right.handle.data
        if plan.left is not None:
            a = a.astype(plan.left)
        if plan.right is not None:
            b = b.astype(plan.right)
        if plan.element:
            b = plan.element * b
        return _alike(plan.like, TensorHandle(compute(a, b), plan.dtype or left.handle.dtype))

    return operate


def _plan(original, left, right, result) -> _Plan | None:
    """How to get from operands of these types to such a result; None if it takes more than that."""
    is_number = type(right) is not core.tensor
    a = left.type.scalar
    b = (interpreter_semantic.to_tensor(right) if is_number else right).type.scalar
    like = _description(result)
    if a.is_ptr() and b.is_int_signed() and original is _ADD:
        number = np.array([right]).astype(np.uint64) if is_number else None
        bits = a.element_ty.primitive_bitwidth
        return _Plan(like, right=np.uint64, number=number, element=max(1, bits // 8))
    if a.is_ptr() or b.is_ptr():
        return None
    # A number that is compared has a type of its own; any other takes the tensor's if it can.
    gives_way = is_number and original not in _COMPARES
    both = interpreter_semantic.computation_type_impl(a, False, b, gives_way, False)
    for operand in [a] if is_number else [a, b]:
        if operand != both and not (operand.is_int() and both.is_int()):
            return None
    width, number = _get_np_dtype(both), None
    if is_number:
        number = interpreter_semantic.scalar_constant(right, both).handle.data
    return _Plan(
        like,
        dtype=None if a == both and original not in _REVERSES else both,
        left=None if a == both else width,
        right=None if b == both or is_number else width,
        number=number,
    )


def _checking(original):
    """Of `binary_op_type_checking_impl`, which gives both operands one type and one shape."""
    known = {}
    _remembered.append(known)

    def check(semantic, left, right, *flags, **named):
        key = _kind(left), _kind(right), flags, *named.values()
        plan = known.get(key)
        if plan is None:
            checked = original(semantic, left, right, *flags, **named)
            if key not in known:
                known[key] = _uncast(semantic, (left, right), checked)
            return checked
        pair = [
            operand if number is None else _alike(number[0], TensorHandle(*number[1:]))
            for operand, number in zip((left, right), plan, strict=True)
        ]
        return semantic.broadcast_impl_value(*pair)

    return check


def _kind(operand):
    return operand.type.name if type(operand) is core.tensor else (type(operand), operand)


def _uncast(semantic, before, after):
    """The numbers among two operands, as tensors; None if an operand was cast."""
    plan = []
    for operand, checked in zip(before, after, strict=True):
        if type(operand) is not core.tensor:
            constant = semantic.scalar_constant(operand, checked.type.scalar)
            plan.append((_description(constant), constant.handle.data, constant.handle.dtype))
        elif operand.type.scalar == checked.type.scalar:
            plan.append(None)
        else:
            return None
    return plan


def _broadcasting(original):
    """Of `broadcast_impl_value`, which gives both operands one shape."""
    known = {}
    _remembered.append(known)

    def broadcast(semantic, left, right):
        key = left.type.name, right.type.name
        plan = known.get(key)
        if plan is None:
            spread = left, right = original(semantic, left, right)
            known[key] = [
                None if wide.type.name == name else (_description(wide), tuple(wide.type.shape))
                for wide, name in zip(spread, key, strict=True)
            ]
            return spread
        left_plan, right_plan = plan
        if left_plan is not None:
            left = _spread(left, *left_plan)
        if right_plan is not None:
            right = _spread(right, *right_plan)
        return left, right

    return broadcast


def _spread(tensor, like, shape):
    handle = tensor.handle
    data = np.empty(shape, handle.data.dtype)
    data[...] = handle.data  # `np.broadcast_to` takes longer, but for large blocks
    return _alike(like, TensorHandle(data, handle.dtype.scalar))


def _description(tensor: core.tensor) -> dict:
    return {name: value for name, value in vars(tensor).items() if name != "handle"}


def _alike(description: dict, handle: TensorHandle) -> core.tensor:
    made = core.tensor.__new__(core.tensor)
    made.__dict__.update(description)
    made.handle = handle
    return made
