"""The operations as torch.library ops: what torch.compile, torch.export and autograd see.

An op is opaque to the compiler, so the dispatcher runs inside it and is never traced. Each op has a
fake kernel (the result's shape without the result) and a backward, which is one more op. Unless
`training.py` brings another one, or the backend finds the gradients, it runs the forward again with
the torch backend and differentiates that, for the inputs that need it only; `replay` says what
needn't be found again.
Whether gradients are needed comes from outside, where autograd's state can be seen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import backends, registry  # noqa: F401  (backends fills the registry)
from ..activation import Activation
from ..dispatch.backend import Backend
from ..dispatch.first_use import NotComparedError, is_compared, may_use
from ..dispatch.measure import known_times, tuning, when_times_change
from ..dispatch.prepared import preparing
from ..dispatch.problem import Machine, Problem
from ..dispatch.resolve import candidates, resolve
from ..dispatch.tuned import load_tuned, measure_call
from ..formats.recipe import Recipe
from ..options import Options, current, options
from ..routing import Routing
from .define import implement, implement_autograd, operator
from .guards import autocast_off, autograd_works, device_guard, is_current
from .shortcut import note


class Facts(NamedTuple):
    """The part of a `Problem` that an op's arguments tell; cheap to build and to hash."""

    op: str
    tokens: int
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    dtype: torch.dtype
    activation: Activation | None = None
    routing: str | None = None  # as JSON
    extras: tuple[str, ...] = ()
    recipe: tuple[str, int, str] | None = None  # the words of a Recipe
    scheme: str | None = None
    has_bias: bool = False
    weight_on_input: bool = False
    has_static_scales: bool = False
    has_lora: bool = False
    window: tuple[int, int] | None = None
    wide: bool = False
    coded: bool = False
    prepared: tuple[str, ...] = ()


@lru_cache(maxsize=4096)
def _choose(device: torch.device, options: Options, facts: Facts, needs_grad: bool) -> Backend:
    """The backend for these facts: one look-up in the hot path."""
    problem = _problem(device, options, facts, needs_grad)
    chosen = resolve(problem, options.backend, times=known_times(problem)).chosen
    while options.verify and not may_use(chosen, problem, device):  # then it accepts no longer
        chosen = resolve(problem, options.backend, times=known_times(problem)).chosen
    return load_tuned(chosen, problem)


when_times_change(_choose.cache_clear)


def choose_for_training(first: Tensor, facts: Facts) -> Backend:
    """The backend that has a forward and a backward for these facts."""
    backend = _choose(first.device, current(), facts, True)
    return backend if first.shape[0] > 0 else registry.load("torch")


def _choose_another(
    device: torch.device, facts: Facts, needs_grad: bool, error: NotComparedError
) -> Backend:
    """The best of the backends that needn't be compared first, for this call only. Raises `error`
    if there is none, or if one is forced."""
    problem = _problem(device, current(), facts, needs_grad)
    for answer in candidates(problem, times=known_times(problem)):
        if answer.accepted and not is_compared(answer.name) and current().backend is None:
            return load_tuned(answer.name, problem)
    raise error


def _problem(device: torch.device, options: Options, facts: Facts, needs_grad: bool) -> Problem:
    routing = None if facts.routing is None else Routing.from_json(facts.routing)
    recipe = None if facts.recipe is None else Recipe.from_words(*facts.recipe)
    return Problem(
        **facts._asdict() | {"routing": routing, "recipe": recipe},
        machine=Machine.of(device),
        needs_grad=needs_grad,
        deterministic=options.deterministic,
        batch_invariant=options.batch_invariant,
    )


@dataclass(frozen=True, eq=False)
class Operation:
    """One operation: three torch ops (forward, ``_backward``, ``_out``) from one description."""

    name: str
    arguments: str  # of the schema; the first is a tensor with one row per token
    result: str
    facts: Callable[..., Facts]  # (*arguments)
    compute: Callable[..., Any]  # (backend, *arguments, out); out is None or the tensor to write
    fake: Callable[..., Any]  # (*arguments, needs_grad)
    differentiable: tuple[int, ...]  # positions of the arguments that can have gradients
    differentiated: tuple[int, ...] = (0,)  # positions of the results that have them
    replay: Callable[..., Any] | None = None  # (arguments, results) -> the backward's arguments
    # (backend, grads, arguments, wanted) -> gradients; None: torch has to find them
    gradients: Callable[..., list[Tensor] | None] = lambda *_: None
    prepare: Callable[..., None] | None = None  # (problem, backends, whether all, *arguments)
    release: Callable[..., None] | None = None  # (backend to keep, *arguments)

    def define(self, *, has_out: bool = True, has_backward: bool = True) -> Operation:
        """Register the ops in torch.ops.tmoe; without a backward, `Training` brings one."""
        name, arguments = self.name, self.arguments
        forward = f"{name}({arguments}, bool needs_grad) -> {self.result}"
        implement(forward, self.forward, self.fake)
        if has_backward:
            tail = "bool[] wanted, str? backend) -> Tensor[]"
            backward = f"{name}_backward(Tensor[] grads, {arguments}, {tail}"
            implement(backward, self.backward, self.fake_backward)
            implement_autograd(name, self.differentiate, self.setup_context)
        if has_out:
            implement(f"{name}_out(Tensor(a!) out, {arguments}) -> ()", self.forward_out, _no_fake)
        return self

    def forward(self, *args: Any) -> Any:
        *arguments, needs_grad = args
        return self.run(arguments, needs_grad, None)

    def forward_out(self, out: Tensor, *arguments: Any) -> None:
        self.run(arguments, False, out)

    def run(self, arguments: Any, needs_grad: bool, out: Tensor | None) -> Any:
        first = arguments[0]
        facts, device = self.facts(*arguments), first.device
        if first.shape[0] > 0 and not needs_grad and (preparing() or tuning() is not None):
            self.get_ready(arguments, facts)
            facts = self.facts(*arguments)
        if is_current(device) and not torch.is_autocast_enabled(device.type):
            return self._run(arguments, facts, needs_grad, out)
        with device_guard(device), autocast_off(device):
            return self._run(arguments, facts, needs_grad, out)

    def _run(self, arguments: Any, facts: Facts, needs_grad: bool, out: Tensor | None) -> Any:
        first = arguments[0]
        try:
            backend = _choose(first.device, current(), facts, needs_grad)
        except NotComparedError as error:
            backend = _choose_another(first.device, facts, needs_grad, error)
        if first.shape[0] == 0:  # nothing to launch, and some libraries fail on a null pointer
            backend = registry.load("torch")
        repeat = getattr(backend, "repeat", None)
        if repeat is None:
            return self.compute(backend, *arguments, out)
        replayed = repeat(self._results, (*arguments, out))
        note(replayed)
        return replayed.results[0] if self.result == "Tensor" else replayed.results

    def _results(self, *arguments: Any) -> tuple[Tensor, ...]:
        result = self.compute(*arguments)
        return (result,) if self.result == "Tensor" else result

    def get_ready(self, arguments: Any, facts: Facts) -> None:
        """Prepare the weights, and inside `tmoe.autotune` time what can run the call."""
        device, options = arguments[0].device, current()
        problem = _problem(device, options, facts, False)
        forced = options.backend
        asked = None if forced else tuning()
        with device_guard(device), autocast_off(device):
            if self.prepare is not None:
                times = known_times(problem)
                order = [forced] if forced else [c.name for c in candidates(problem, times=times)]
                every = asked is not None and (asked.again or not times)
                self.prepare(problem, order, every, *arguments)
                problem = _problem(device, options, self.facts(*arguments), False)
            if asked is None:
                return
            names = [
                answer.name
                for answer in candidates(problem)
                if answer.accepted and (not options.verify or may_use(answer.name, problem, device))
            ]
            measure_call(problem, names, lambda backend: self.compute(backend, *arguments, None))
            if self.release is not None:
                self.release(resolve(problem, times=known_times(problem)).chosen, *arguments)

    def backward(self, grads: list[Tensor], *args: Any) -> list[Tensor]:
        *arguments, wanted, forced = args
        positions, device = self.positions(wanted), grads[0].device
        with options(backend=forced), device_guard(device), autocast_off(device):
            backend = choose_for_training(arguments[0], self.facts(*arguments))
            gradients = self.gradients(backend, grads, arguments, wanted)
            if gradients is None:
                gradients = self._by_torch(grads, arguments, positions)
        return [
            laid_out_like(arguments[i], gradient)
            for i, gradient in zip(positions, gradients, strict=True)
        ]

    def _by_torch(self, grads: list[Tensor], arguments: Any, positions: list[int]) -> Any:
        """Through the forward on the torch backend."""
        again = list(arguments)
        for i in positions:
            again[i] = arguments[i].detach().requires_grad_()
        with autograd_works(), torch.enable_grad():
            results = self.compute(registry.load("torch"), *again, None)
            results = results if isinstance(results, tuple) else (results,)
            ys, grads = self._with_gradients(results, grads)
            return torch.autograd.grad(ys, [again[i] for i in positions], grads)

    def _with_gradients(
        self, results: tuple[Tensor, ...], grads: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Results with a gradient, and those; an optional result that wasn't wanted is empty."""
        pairs = zip((results[i] for i in self.differentiated), grads, strict=True)
        used = [(y, grad) for y, grad in pairs if y.requires_grad]
        return [y for y, _ in used], [grad for _, grad in used]

    def fake_backward(self, grads: list[Tensor], *args: Any) -> list[Tensor]:
        *arguments, wanted, _ = args
        return [torch.empty_like(arguments[i]) for i in self.positions(wanted)]

    def positions(self, wanted: list[bool]) -> list[int]:
        return [i for i, needed in zip(self.differentiable, wanted, strict=True) if needed]

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *arguments, _ = inputs
        if self.replay is not None:
            arguments = self.replay(arguments, output)
        ctx.save_for_backward(*(value for value in arguments if isinstance(value, Tensor)))
        ctx.arguments = [_SAVED if isinstance(value, Tensor) else value for value in arguments]
        ctx.backend = current().backend  # autograd has threads of its own, without our options

    def differentiate(self, ctx: Any, *all_grads: Any) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            why = "backward was called with create_graph=True"
            raise RuntimeError(f"{self.name}: no second derivative ({why})")
        tensors = iter(ctx.saved_tensors)
        arguments = [next(tensors) if value is _SAVED else value for value in ctx.arguments]
        wanted = [ctx.needs_input_grad[i] for i in self.differentiable]
        op = operator(f"{self.name}_backward")
        grads = [all_grads[i] for i in self.differentiated]
        found = op(grads, *arguments, wanted, ctx.backend)
        gradients = dict(zip(self.positions(wanted), found, strict=True))
        nothing = [[None] * len(arg) if isinstance(arg, list) else None for arg in arguments]
        return (*(gradients.get(i, none) for i, none in enumerate(nothing)), None)


_SAVED = object()  # stands where a tensor was


def _no_fake(*arguments: Any) -> None:
    """An op that returns nothing has no shape to predict."""


def laid_out_like(tensor: Tensor, gradient: Tensor) -> Tensor:
    """`gradient` with the strides that the fake kernel promised: those of empty_like."""
    if gradient.stride() == tensor.stride():  # then empty_like keeps them
        return gradient
    strides = torch.empty_like(tensor, device="meta").stride()
    return gradient if gradient.stride() == strides else torch.empty_like(tensor).copy_(gradient)
