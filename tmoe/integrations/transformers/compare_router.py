"""Compare a router with its original once, for a transformers that these sources don't know.

The kinds in `router_kinds.py` were read off the releases up to `KNOWN`. A later one may answer in
another order, as two have done, or compute something else. So there each class is first run beside
ours: a twin of the module with random weights, on the CPU, with numbers of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from .router_forward import RouterModule, read
from .router_kinds import Kind
from .swap import class_of
from .version import before

KNOWN = "5.24"
_TOKENS = 3
_compared: dict[type[nn.Module], str | None] = {}


def is_known() -> bool:
    """Whether the installed transformers is one of those that the kinds were read off."""
    return before("5.25")  # the release after KNOWN


def why_not_alike(module: nn.Module, cls: type[nn.Module]) -> str | None:
    """What `cls` answers otherwise than the class of `module`, or None; compared once a process."""
    if cls not in _compared:
        if is_parametrized(module):
            return "it can't be compared while it is parametrised; call replace_moe before"
        _compared[cls] = _difference(module, cls)
    return _compared[cls]


def _difference(module: nn.Module, cls: Any) -> str | None:
    kind: Kind = cls.tmoe_kind
    generator = torch.Generator().manual_seed(0)
    twin: RouterModule = _twin(module, generator, whole=kind.method == "forward")
    problem = f"in this transformers it is not what it was in {KNOWN}: "
    try:
        with torch.no_grad():
            arguments = _arguments(twin, kind, generator)
            theirs = getattr(twin, kind.method)(*arguments)
            twin.__class__ = cls
            ours = getattr(twin, kind.method)(*arguments)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:
        return f"{problem}{type(e).__name__}: {e}"
    if not isinstance(theirs, tuple) or _facts(theirs) != _facts(ours):
        return f"{problem}it returns {_facts(theirs)}, not {_facts(ours)}"
    if not all(map(_same, _by_expert(theirs, kind), _by_expert(ours, kind))):
        return f"{problem}it computes other numbers"
    return None


def _twin(module: nn.Module, generator: torch.Generator, *, whole: bool) -> nn.Module:
    """A module of the same class with random tensors and no hooks; nothing is copied.

    Of a block, which is more than a router, not `whole`: the modules in it are its own.
    """
    twin = object.__new__(class_of(module))
    own = {name: value for name, value in vars(module).items() if "hook" not in name}
    nn.Module.__init__(twin)
    vars(twin).update({k: v for k, v in own.items() if k not in ("forward", "_old_forward")})
    twin._parameters = {
        name: None if p is None else nn.Parameter(_random(p, generator), requires_grad=False)
        for name, p in module._parameters.items()
    }
    twin._buffers = {
        name: None if b is None else _random(b, generator) for name, b in module._buffers.items()
    }
    twin._modules = {
        name: _twin(m, generator, whole=True) if whole and m is not None else m
        for name, m in module._modules.items()
    }
    twin.training = False
    return twin


def _random(like: Tensor, generator: torch.Generator) -> Tensor:
    if like.is_floating_point():
        return _randn(like.shape, generator)
    return torch.arange(like.shape[-1], device="cpu").expand(like.shape)  # a table of ids


def _randn(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")


def _arguments(twin: RouterModule, kind: Kind, generator: torch.Generator) -> tuple[Tensor, ...]:
    num_experts: int = read(twin, kind.num_experts)
    if kind.method != "forward":
        logits = _randn((_TOKENS, num_experts), generator)
        return (logits,) if kind.forward == "select" else (logits, logits)
    matrix = read(twin, kind.weight)
    matrix = matrix.weight if isinstance(matrix, nn.Linear) else matrix
    hidden_size: int = matrix.shape[-1]
    x = _randn((_TOKENS, hidden_size), generator) * hidden_size**-0.5
    if kind.forward == "hashed":
        return x, torch.arange(_TOKENS, device="cpu")
    if "given" not in kind.forward:
        return (x,)
    batched = x[None] if kind.forward.startswith("layer") else x
    return batched, _randn((num_experts,), generator)


def _facts(answer: Any) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    return [(tensor.dtype, tuple(tensor.shape)) for tensor in answer]


def _by_expert(answer: tuple[Tensor, ...], kind: Kind) -> list[Tensor]:
    """Ids and weights in the order of the ids, which some routers leave open."""
    tensors = dict(zip(kind.returns, answer, strict=True))
    if "ids" in tensors:
        tensors["ids"], order = tensors["ids"].sort(-1)
        tensors["weights"] = tensors["weights"].gather(-1, order)
    return list(tensors.values())


def _same(theirs: Tensor, ours: Tensor) -> bool:
    return torch.allclose(ours.double(), theirs.double(), rtol=1e-4, atol=1e-6)
