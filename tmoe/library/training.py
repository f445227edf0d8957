"""How an operation trains on every backend that has a backward, as torch.library ops.

    {name}_train(…) -> result, kept              a forward that keeps something for the backward
    {name}_backward(grad, …, kept, wanted, …)    the gradients that are wanted

What is kept means the same to every backend, so that each can go on from it. After a plain {name}
nothing is kept, and its backward computes that again. What nobody wants isn't computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..options import current, options
from .operation import (
    LIBRARY,
    Operation,
    autocast_off,
    choose_for_training,
    device_guard,
    implement,
    laid_out_like,
)


@dataclass(frozen=True)
class Training:
    """The ops beside an `Operation`, which is defined without a backward of its own."""

    operation: Operation
    backward: Callable[..., list[Tensor]]  # (backend, grad, *arguments, kept, wanted) -> gradients
    forward: Callable[..., tuple[Tensor, Tensor]] | None = None  # (backend, *arguments)
    fake_kept: Callable[..., Tensor] | None = None  # (*arguments)

    def define(self) -> None:
        """Register the ops in torch.ops.tmoe."""
        name, arguments = self.operation.name, self.operation.arguments
        implement(
            f"{name}_backward(Tensor grad, {arguments}, Tensor kept, bool[] wanted, "
            "str? backend, bool batch_invariant) -> Tensor[]",
            self.run_backward,
            self.fake_backward,
        )
        ops = [name]
        if self.forward is not None:
            ops.append(f"{name}_train")
            schema = f"{name}_train({arguments}) -> (Tensor, Tensor)"
            implement(schema, self.run_forward, self.fake_forward)
        for op in ops:
            torch.library.register_autograd(
                f"tmoe::{op}", self.differentiate, setup_context=self.setup_context, lib=LIBRARY
            )

    def run_forward(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        assert self.forward is not None
        first = arguments[0]
        with device_guard(first.device), autocast_off(first.device):
            backend = choose_for_training(first, self.operation.facts(*arguments))
            return self.forward(backend, *arguments)

    def fake_forward(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        assert self.fake_kept is not None
        return self.operation.fake(*arguments, True), self.fake_kept(*arguments)

    def run_backward(self, grad: Tensor, *args: Any) -> list[Tensor]:
        *arguments, kept, wanted, forced, batch_invariant = args
        first = arguments[0]
        with (
            options(backend=forced, batch_invariant=batch_invariant),
            device_guard(first.device),
            autocast_off(first.device),
        ):
            backend = choose_for_training(first, self.operation.facts(*arguments))
            gradients = self.backward(backend, grad, *arguments, kept, wanted)
        positions = self.operation.positions(wanted)
        return [laid_out_like(arguments[i], g) for i, g in zip(positions, gradients, strict=True)]

    def fake_backward(self, grad: Tensor, *args: Any) -> list[Tensor]:
        *arguments, _, wanted, _, _ = args
        return [torch.empty_like(arguments[i]) for i in self.operation.positions(wanted)]

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        if isinstance(output, tuple):
            arguments, (_, kept) = list(inputs), output
            ctx.mark_non_differentiable(kept)
            ctx.set_materialize_grads(False)  # or autograd would make zeros as large as `kept`
        else:
            *arguments, _ = inputs
            kept = output.new_empty(0)
        values, ctx.structure = tree_flatten([*arguments, kept])
        ctx.save_for_backward(*(value for value in values if isinstance(value, Tensor)))
        ctx.others = [_SAVED if isinstance(value, Tensor) else value for value in values]
        # Autograd has threads of its own for a GPU's backward, where no options are in force.
        ctx.options = current()

    def differentiate(self, ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
        operation = self.operation
        if torch.is_grad_enabled():
            why = "backward was called with create_graph=True"
            raise RuntimeError(f"{operation.name}: no second derivative ({why})")
        tensors = iter(ctx.saved_tensors)
        values = [next(tensors) if value is _SAVED else value for value in ctx.others]
        *arguments, kept = tree_unflatten(values, ctx.structure)
        gradients: dict[int, Tensor] = {}
        if grad is not None:
            wanted = [ctx.needs_input_grad[i] for i in operation.differentiable]
            run = getattr(torch.ops.tmoe, f"{operation.name}_backward").default
            asked = (ctx.options.backend, ctx.options.batch_invariant)
            found = run(grad, *arguments, kept, wanted, *asked)
            gradients = dict(zip(operation.positions(wanted), found, strict=True))
        nothing = [
            [None] * len(needed) if isinstance(needed, list | tuple) else None
            for needed in ctx.needs_input_grad
        ]
        return tuple(gradients.get(i, none) for i, none in enumerate(nothing))


_SAVED = object()  # stands where a tensor was
