"""`main_grad`: a buffer beside a parameter that its gradients are added up in, as Megatron has it.

With `tmoe.options(main_grad=True)` the kernels add a weight's gradient to the weight's attribute
`main_grad`, in that tensor's dtype and rounded once, and no gradient of the weight's size is made.
Megatron's hooks run on `.grad` and read two more attributes, which are honoured:

    grad_added_to_main_grad    set to True; only then there is a `.grad`, of zeros, for the hook to
                               drop. A weight without this attribute keeps the `.grad` it has.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from ..checks import expect, expect_tensor


def main_grad_of(op: str, weight: Any) -> Tensor:
    """`weight.main_grad`. Raises ``ValueError`` or ``TypeError`` if there is none that fits."""
    main_grad: Any = getattr(weight, "main_grad", None)
    if main_grad is None:
        wanted = (
            "a tensor beside each weight that needs a gradient, where options(main_grad=True) is "
            "in force; the weight must be the parameter itself, and not compiled"
        )
        expect(False, op, "main_grad", wanted, f"a weight of shape {tuple(weight.shape)} without")
    expect_tensor(main_grad, op, "main_grad")
    ok = main_grad.shape == weight.shape and main_grad.dtype.is_floating_point
    wanted = f"floating point of shape {tuple(weight.shape)} on {weight.device}"
    got = f"{main_grad.dtype} {tuple(main_grad.shape)} on {main_grad.device}"
    expect(ok and main_grad.device == weight.device, op, "main_grad", wanted, got)
    return cast(Tensor, main_grad)


def tell_added(weight: Any) -> Tensor | None:
    """Say that the gradient was added, as Megatron's hooks ask; what to return as `weight`'s."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return torch.zeros_like(weight)
