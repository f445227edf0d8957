"""Calls, and whether they are replayed; for the checks of `test_replay.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

import tmoe
from tests.kernels import off_device
from tmoe.backends.triton_backend import TritonBackend
from tmoe.dispatch.backend import Replayed
from tmoe.library import shortcut

E, K, H, I = 8, 2, 128, 64
BF16 = torch.bfloat16
Call = Callable[[], object]
Case = tuple[Call, list[Tensor]]  # with the tensors that it passes


@contextmanager
def long_way() -> Iterator[None]:
    """Through all checks, the dispatcher, the launchers and Triton."""

    def launch(self, compute, arguments):
        return Replayed(compute(self, *arguments), None, [])

    with patch.object(shortcut, "DEVICES", ()), patch.object(TritonBackend, "repeat", launch):
        yield


def launches_of(call: Call) -> list[off_device.Launched]:
    off_device.launched.clear()
    off_device.through_triton.clear()
    call()
    return list(off_device.launched)


def is_replayed(call: Call) -> bool:
    return bool(launches_of(call)) and not off_device.through_triton


def check_replay(make: Callable[[], Case]) -> None:
    """The first case is recorded; the second one has tensors of the same kinds elsewhere."""
    make()[0]()
    call, inputs = make()
    with long_way():
        want = launches_of(call)
        assert off_device.through_triton
    got = launches_of(call)
    assert not off_device.through_triton, "it was launched by Python"
    assert len(got) == len(want)
    same_as: dict[int, int] = {}  # memory that the replay allocates, and the long way
    for a, b in zip(got, want, strict=True):
        assert a[:4] == b[:4], (a[:4], b[:4])
        for x, y in zip(_flat(a.arguments), _flat(b.arguments), strict=True):
            y = (y.data_ptr() or None) if isinstance(y, Tensor) else y
            if isinstance(y, tuple):
                assert x[2:] == y[2:]
                x, y = x[1], y[1]
            is_address = isinstance(y, int) and y > 2**32
            if is_address and not _inside(y, inputs):
                assert not _inside(x, inputs) and same_as.setdefault(x, y) == y
                assert (x % 16 == 0) == (y % 16 == 0)
            else:
                assert type(x) is type(y) and x == y, (x, y)


def _flat(values: tuple) -> Iterator[object]:
    for value in values:
        if isinstance(value, tuple) and value[:1] != ("descriptor",):
            yield from _flat(value)
        else:
            yield value


def _inside(address: int, tensors: list[Tensor]) -> bool:
    """Whether it is an address of one of the tensors."""
    return any(
        0 <= address - x.data_ptr() < x.untyped_storage().nbytes() for x in tensors if x.numel()
    )


def tensors(T: int, dtype: torch.dtype = BF16, experts: int = E) -> dict[str, Tensor]:
    return {
        "x": torch.randn(T, H).to(dtype),
        "gate_up_proj": torch.randn(experts, 2 * I, H).to(dtype),
        "down_proj": torch.randn(experts, H, I).to(dtype),
        "topk_weights": torch.rand(T, K),
        "topk_ids": torch.randint(0, experts, (T, K)).int(),
    }


def experts(T: int, dtype: torch.dtype = BF16, change: dict | None = None, **keywords) -> Case:
    given = tensors(T, dtype)
    for name, function in (change or {}).items():
        given[name] = function(given[name])
    return lambda: tmoe.fused_experts(**given, **keywords), list(given.values())


def adapted(T: int, scaling: float = 1.0) -> Case:
    """Frozen experts with frozen adapters."""
    given = tensors(T)
    shapes = {"gate_up": ((E, 4, H), (E, 2 * I, 4)), "down": ((E, 4, I), (E, H, 4))}
    factors = {name: [torch.randn(shape).to(BF16) for shape in s] for name, s in shapes.items()}
    loras = {f"{name}_lora": tmoe.LowRank(*pair, scaling) for name, pair in factors.items()}
    return lambda: tmoe.fused_experts(**given, **loras), [
        *given.values(),
        *sum(factors.values(), []),
    ]


def moved(x: Tensor, elements: int = 1) -> Tensor:
    """A copy that starts so many elements behind an aligned address."""
    memory = x.new_empty(x.numel() + elements)
    return memory[elements:].view(x.shape).copy_(x)
