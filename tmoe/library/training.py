"""How an operation trains on every backend that has a backward, as torch.library ops.

    {name}_train(…) -> result, kept              a forward that keeps something for the backward
    {name}_backward(grad, …, kept, wanted, …)    the gradients that are wanted
    {name}_backward_(…, kept, sums, added, …)    the same, and may write to `kept` and `sums`

What is kept means the same to every backend, so that each can go on from it. After a plain {name}
nothing is kept, and its backward computes that again. What nobody wants isn't computed.

The last op runs where nobody can need `kept` again: in a backward that doesn't retain its graph,
and not where a compiler or a mode looks on. It also adds gradients to `main_grad`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..options import current, options
from .define import implement, implement_autograd, operator
from .guards import autocast_off, autograd_works, device_guard
from .main_grad import main_grad_of, tell_added
from .operation import Operation, choose_for_training, laid_out_like


@dataclass(frozen=True)
class Training:
    """The ops beside an `Operation`, which is defined without a backward of its own."""

    operation: Operation
    # (backend, grad, *arguments, kept, wanted, whether `kept` may be written, sums) -> gradients;
    # sums: for each of the differentiable arguments a tensor to add to, or None
    backward: Callable[..., list[Tensor]]
    weights: tuple[int, ...]  # positions of the arguments that may have a `main_grad`
    forward: Callable[..., tuple[Tensor, Tensor]] | None = None  # (backend, *arguments)
    fake_kept: Callable[..., Tensor] | None = None  # (*arguments)

    def define(self) -> None:
        """Register the ops in torch.ops.tmoe."""
        name, arguments = self.operation.name, self.operation.arguments
        tail = "bool[] wanted, str? backend, bool batch_invariant) -> Tensor[]"
        implement(
            f"{name}_backward(Tensor grad, {arguments}, Tensor kept, {tail}",
            self.run_backward,
            self.fake_backward,
        )
        implement(
            f"{name}_backward_(Tensor grad, {arguments}, Tensor(a!) kept, Tensor(b!)[] sums, "
            f"int[] added, {tail}",
            self.run_backward_,
            self.fake_backward_,
        )
        ops = [name]
        if self.forward is not None:
            ops.append(f"{name}_train")
            schema = f"{name}_train({arguments}) -> (Tensor, Tensor)"
            implement(schema, self.run_forward, self.fake_forward)
        for op in ops:
            implement_autograd(op, self.differentiate, self.setup_context)

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
        more = (kept, wanted, False, [None] * len(wanted))
        gradients = self._run_backward(grad, arguments, more, forced, batch_invariant)
        return self._laid_out(arguments, wanted, gradients)

    def run_backward_(self, grad: Tensor, *args: Any) -> list[Tensor]:
        *arguments, kept, sums, added, wanted, forced, batch_invariant = args
        sum_of = dict(zip(added, sums, strict=True))
        in_order = [sum_of.get(i) for i in self.operation.differentiable]
        more = (kept, wanted, True, in_order)
        gradients = self._run_backward(grad, arguments, more, forced, batch_invariant)
        torch.autograd.graph.increment_version([kept, *sums])
        return self._laid_out(arguments, _without(self.operation, wanted, added), gradients)

    def _run_backward(
        self, grad: Tensor, arguments: Any, more: Any, forced: str | None, batch_invariant: bool
    ) -> list[Tensor]:
        first = arguments[0]
        with (
            options(backend=forced, batch_invariant=batch_invariant),
            device_guard(first.device),
            autocast_off(first.device),
            autograd_works(),  # the torch backend differentiates by it
        ):
            backend = choose_for_training(first, self.operation.facts(*arguments))
            return self.backward(backend, grad, *arguments, *more)

    def _laid_out(self, arguments: Any, wanted: list[bool], gradients: Any) -> list[Tensor]:
        positions = self.operation.positions(wanted)
        return [laid_out_like(arguments[i], g) for i, g in zip(positions, gradients, strict=True)]

    def fake_backward(self, grad: Tensor, *args: Any) -> list[Tensor]:
        *arguments, _, wanted, _, _ = args
        return [torch.empty_like(arguments[i]) for i in self.operation.positions(wanted)]

    def fake_backward_(self, grad: Tensor, *args: Any) -> list[Tensor]:
        *arguments, _, _, added, wanted, _, _ = args
        positions = self.operation.positions(_without(self.operation, wanted, added))
        return [torch.empty_like(arguments[i]) for i in positions]

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
        ctx.weights = {}
        if ctx.options.main_grad:
            needed = [i for i in self.weights if inputs[i].requires_grad]
            ctx.weights = {i: inputs[i] for i in needed}
            for weight in ctx.weights.values():
                main_grad_of(self.operation.name, weight)

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
            asked = (wanted, ctx.options.backend, ctx.options.batch_invariant)
            is_last = not (_is_seen() or torch._C._autograd._get_current_graph_task_keep_graph())
            weights = {i: weight for i, weight in ctx.weights.items() if ctx.needs_input_grad[i]}
            if weights or (is_last and kept.numel()):
                run = operator(f"{operation.name}_backward_")
                sums = [main_grad_of(operation.name, weight) for weight in weights.values()]
                kept = kept if is_last else kept.clone()
                found = run(grad, *arguments, kept, sums, list(weights), *asked)
                wanted = _without(operation, wanted, weights)
                gradients = {
                    i: rest for i, w in weights.items() if (rest := tell_added(w)) is not None
                }
            else:
                run = operator(f"{operation.name}_backward")
                found = run(grad, *arguments, kept, *asked)
            gradients |= zip(operation.positions(wanted), found, strict=True)
        nothing = [
            [None] * len(needed) if isinstance(needed, list | tuple) else None
            for needed in ctx.needs_input_grad
        ]
        return tuple(gradients.get(i, none) for i, none in enumerate(nothing))


_SAVED = object()  # stands where a tensor was


def _is_seen() -> bool:
    """Whether a compiler traces, or a mode looks at operations."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def _without(operation: Operation, wanted: list[bool], added: Collection[int]) -> list[bool]:
    """Which gradients are returned, if some of the wanted ones are added to something instead."""
    pairs = zip(operation.differentiable, wanted, strict=True)
    return [needed and i not in added for i, needed in pairs]
