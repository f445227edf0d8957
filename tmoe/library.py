"""The operations as torch.library ops: what torch.compile, torch.export and autograd see.

An op is opaque to the compiler, so the dispatcher runs inside it and is never traced. Each op has a
fake kernel (the result's shape without the result) and a backward, which is one more op: it runs
the forward again with the torch backend and differentiates that, for the inputs that need it only.
Whether gradients are needed comes from outside, where autograd's state can be seen.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import backends, registry  # noqa: F401  (backends fills the registry)
from .activation import Activation
from .checks import expect
from .dispatch.backend import Backend
from .dispatch.problem import ExpertsSpec, Machine, Problem, token_bucket
from .dispatch.resolve import resolve
from .options import Options, current
from .routing import Routing

_LIBRARY = torch.library.Library("tmoe", "DEF")


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
    method: str | None = None
    has_bias: bool = False
    weight_on_input: bool = False


@lru_cache(maxsize=4096)
def _choose(device: torch.device, options: Options, facts: Facts, needs_grad: bool) -> Backend:
    """The backend for these facts: one look-up in the hot path."""
    problem = Problem(
        **facts._asdict(),
        machine=Machine.of(device),
        needs_grad=needs_grad,
        deterministic=options.deterministic,
        batch_invariant=options.batch_invariant,
    )
    chosen: Backend = registry.load(resolve(problem, options.backend).chosen)
    return chosen


@dataclass(frozen=True)
class Operation:
    """One operation: three torch ops (forward, ``_backward``, ``_out``) from one description."""

    name: str
    arguments: str  # of the schema; the first is a tensor with one row per token
    result: str
    facts: Callable[..., Facts]  # (*arguments)
    compute: Callable[..., Any]  # (backend, *arguments, out); out is None or the tensor to write
    fake: Callable[..., Any]  # (*arguments, needs_grad)
    differentiable: tuple[int, ...]  # positions of the arguments that can have gradients

    def define(self, *, has_out: bool = True) -> None:
        """Register the ops in torch.ops.tmoe."""
        name, arguments = self.name, self.arguments
        forward = f"{name}({arguments}, bool needs_grad) -> {self.result}"
        backward = f"{name}_backward(Tensor grad, {arguments}, bool[] wanted) -> Tensor[]"
        _implement(forward, self.forward, self.fake)
        _implement(backward, self.backward, self.fake_backward)
        torch.library.register_autograd(
            f"tmoe::{name}", self.differentiate, setup_context=self.setup_context, lib=_LIBRARY
        )
        if has_out:
            _implement(f"{name}_out(Tensor(a!) out, {arguments}) -> ()", self.forward_out, _no_fake)

    def forward(self, *args: Any) -> Any:
        *arguments, needs_grad = args
        return self.run(arguments, needs_grad, None)

    def forward_out(self, out: Tensor, *arguments: Any) -> None:
        self.run(arguments, False, out)

    def run(self, arguments: Any, needs_grad: bool, out: Tensor | None) -> Any:
        first = arguments[0]
        backend = _choose(first.device, current(), self.facts(*arguments), needs_grad)
        if first.shape[0] == 0:  # nothing to launch, and some libraries fail on a null pointer
            backend = registry.load("torch")
        with _device_guard(first.device), _autocast_off(first.device):
            return self.compute(backend, *arguments, out)

    def backward(self, grad: Tensor, *args: Any) -> list[Tensor]:
        *arguments, wanted = args
        positions = self._positions(wanted)
        again = list(arguments)
        for i in positions:
            again[i] = arguments[i].detach().requires_grad_()
        with _device_guard(grad.device), _autocast_off(grad.device), torch.enable_grad():
            y = self.compute(registry.load("torch"), *again, None)
            y = y[0] if isinstance(y, tuple) else y  # of route: the weights; ids have no gradient
            gradients = torch.autograd.grad(y, [again[i] for i in positions], grad)
        return [
            _laid_out_like(arguments[i], gradient)
            for i, gradient in zip(positions, gradients, strict=True)
        ]

    def fake_backward(self, grad: Tensor, *args: Any) -> list[Tensor]:
        *arguments, wanted = args
        return [torch.empty_like(arguments[i]) for i in self._positions(wanted)]

    def _positions(self, wanted: list[bool]) -> list[int]:
        return [i for i, needed in zip(self.differentiable, wanted, strict=True) if needed]

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *arguments, _ = inputs
        ctx.save_for_backward(*(value for value in arguments if isinstance(value, Tensor)))
        ctx.arguments = [_SAVED if isinstance(value, Tensor) else value for value in arguments]

    def differentiate(self, ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            why = "backward was called with create_graph=True"
            raise RuntimeError(f"{self.name}: no second derivative ({why})")
        tensors = iter(ctx.saved_tensors)
        arguments = [next(tensors) if value is _SAVED else value for value in ctx.arguments]
        wanted = [ctx.needs_input_grad[i] for i in self.differentiable]
        op = getattr(torch.ops.tmoe, f"{self.name}_backward").default
        gradients = dict(zip(self._positions(wanted), op(grad, *arguments, wanted), strict=True))
        return tuple(gradients.get(i) for i in range(len(arguments) + 1))


_SAVED = object()  # stands where a tensor was


def _implement(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tmoe::{name}", fake, lib=_LIBRARY)


def _no_fake(*arguments: Any) -> None:
    """An op that returns nothing has no shape to predict."""


def _device_guard(device: torch.device) -> AbstractContextManager[Any]:
    """Kernels are launched on the current device, which may be another one than the tensors'."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return torch.cuda.device(device)
    return nullcontext()


def _autocast_off(device: torch.device) -> AbstractContextManager[Any]:
    """The caller has cast what autocast casts; inside an op, float32 means float32."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def _laid_out_like(tensor: Tensor, gradient: Tensor) -> Tensor:
    """`gradient` with the strides that the fake kernel promised."""
    promised = torch.empty_like(tensor)
    return gradient if gradient.stride() == promised.stride() else promised.copy_(gradient)


# route --------------------------------------------------------------------------------------------


def _route_facts(
    logits: Tensor, bias: Tensor | None, top_k: int, method: str, *groups: Any
) -> Facts:
    T, E = logits.shape
    tokens, has_bias = token_bucket(T), bias is not None
    return Facts("route", tokens, 0, 0, E, top_k, logits.dtype, method=method, has_bias=has_bias)


def _route(
    backend: Backend, logits: Tensor, bias: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor]:
    *recipe, _ = rest  # the last is `out`, which route doesn't have
    return backend.route(logits, _routing(logits.shape[1], *recipe), bias)


@cache
def _routing(
    num_experts: int, top_k: int, method: str, n_group: int, topk_group: int, factor: float
) -> Routing:
    return Routing(
        num_experts,
        top_k,
        method,
        n_group=n_group,
        topk_group=topk_group,
        scaling_factor=factor,
    )


def _fake_route(logits: Tensor, bias: Tensor | None, top_k: int, *rest: Any) -> Any:
    shape = (logits.shape[0], top_k)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return logits.new_empty(shape, dtype=dtype), logits.new_empty(shape, dtype=torch.int32)


Operation(
    "route",
    "Tensor logits, Tensor? bias, int top_k, str method, int n_group, int topk_group, "
    "float scaling_factor",
    "(Tensor, Tensor)",
    facts=_route_facts,
    compute=_route,
    fake=_fake_route,
    differentiable=(0,),
).define(has_out=False)


# grouped_gemm -------------------------------------------------------------------------------------


def _gemm_facts(a: Tensor, b: Tensor, expert_offsets: Tensor, bias: Tensor | None) -> Facts:
    E, N, D = b.shape
    rows, has_bias = token_bucket(a.shape[0]), bias is not None
    return Facts("grouped_gemm", rows, D, N, E, 1, a.dtype, has_bias=has_bias)


def _gemm(backend: Backend, a: Tensor, b: Tensor, expert_offsets: Tensor, *rest: Any) -> Tensor:
    if expert_offsets.device.type == "cpu":
        offsets, S = expert_offsets.tolist(), a.shape[0]
        ok = offsets[0] == 0 and offsets == sorted(offsets) and offsets[-1] <= S
        wanted = f"from 0, never decreasing, to at most S = {S}"
        expect(ok, "grouped_gemm", "expert_offsets", wanted, offsets)
    return backend.grouped_gemm(a, b, expert_offsets, *rest)


Operation(
    "grouped_gemm",
    "Tensor a, Tensor b, Tensor expert_offsets, Tensor? bias",
    "Tensor",
    facts=_gemm_facts,
    compute=_gemm,
    fake=lambda a, b, *rest: a.new_empty(a.shape[0], b.shape[1]),
    differentiable=(0, 1, 3),
).define()


# fused_experts ------------------------------------------------------------------------------------


def _experts_facts(*arguments: Any) -> Facts:
    x, _, down_proj, _, topk_ids, gate_up_bias, down_bias, name, alpha, limit, *rest = arguments
    _, weight_on_input, _, num_experts = rest
    (T, K), (_, H, I) = topk_ids.shape, down_proj.shape
    return Facts(
        "fused_experts",
        token_bucket(T),
        H,
        I,
        num_experts,
        K,
        x.dtype,
        activation=_activation(name, alpha, limit),
        has_bias=gate_up_bias is not None or down_bias is not None,
        weight_on_input=weight_on_input,
    )


def _experts(backend: Backend, *rest: Any) -> Tensor:
    *tensors, name, alpha, limit, interleaved, weight_on_input, first, num_experts, out = rest
    activation = _activation(name, alpha, limit)
    spec = ExpertsSpec(activation, interleaved, weight_on_input, first, num_experts)
    y: Tensor = backend.fused_experts(*tensors, spec, out)  # type: ignore[call-arg]
    return y


_activation = cache(Activation)

Operation(
    "fused_experts",
    "Tensor x, Tensor gate_up_proj, Tensor down_proj, Tensor topk_weights, Tensor topk_ids, "
    "Tensor? gate_up_bias, Tensor? down_bias, str activation, float alpha, float limit, "
    "bool interleaved, bool weight_on_input, int first_expert, int num_experts",
    "Tensor",
    facts=_experts_facts,
    compute=_experts,
    fake=lambda x, *rest: x.new_empty(x.shape),
    differentiable=(0, 1, 2, 3, 5, 6),
).define()
