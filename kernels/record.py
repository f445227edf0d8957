"""Record: watch what a call launches, and write it down as a `Recording`.

A replay does only what is written down, so a call is written down only if it did nothing else.
`Watch` sees every operation of torch: allocations and views are as good as repeated, anything that
computes is not. It sees the launches by `launch`, and counts all launches as Triton counts them.
`Writer` looks up the root of every address; one that lies in none, or in two, ends it. So does a
launch that isn't written down as Triton's launcher carries it out (`cuda_launcher.py`).
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from operator import itemgetter
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tmoe.kernels import cuda_launcher
from tmoe.kernels.launch import Launch, cdiv, on_launch
from tmoe.kernels.recording import Descriptors, Pick, Recording, circumstances

MOST_BYTES = 64 << 20  # of a workspace; a call that needs more keeps the GPU busy for long enough
APART = 512  # bytes between starts in a workspace; torch's own allocations start on multiples of it
ALLOCATIONS = (
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
)


class NotReplayableError(Exception):
    """A call does what a replay can't do, or would leave out."""


def record(
    function: Callable[..., Any], arguments: Sequence[Any], inputs: list[Tensor]
) -> tuple[tuple[Tensor, ...], Recording | str]:
    """The results of function(*arguments) and its recording, or why there can't be one. `inputs`
    are all tensors among the arguments."""
    watch = Watch()
    with watch, on_launch(watch.launches.append), _counted() as count:
        results = function(*arguments)
    try:
        if watch.others:
            raise NotReplayableError(f"it runs {watch.others[0]}")
        if len(count) != len(watch.launches):
            raise NotReplayableError(f"{len(count)} launches, {len(watch.launches)} by `launch`")
        return results, Writer(inputs, watch, results).write()
    except NotReplayableError as reason:
        return results, str(reason)


class Watch(TorchDispatchMode):
    """What a call launches, allocates, and does besides."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []
        self.allocated: list[Tensor] = []  # kept, so that no address is used twice
        self.others: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in ALLOCATIONS:
            self.allocated.append(result)
        elif not (func.is_view and _is_view_of(args[0], result)):
            self.others.append(str(func))
        return result


def _is_view_of(x: Tensor, result: Any) -> bool:
    """Some operations, such as reshape, return a view where they can and otherwise a copy."""
    memory = x.untyped_storage().data_ptr()
    views = [result] if isinstance(result, Tensor) else result
    return all(view.untyped_storage().data_ptr() == memory for view in views)


@contextmanager
def _counted() -> Iterator[list[None]]:
    """One for each launch by this thread, as Triton counts them."""
    count: list[None] = []
    thread = threading.get_ident()

    def hear(metadata: Any) -> None:
        if threading.get_ident() == thread:
            count.append(None)

    triton.knobs.runtime.launch_enter_hook.add(hear)
    try:
        yield count
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hear)


class Index(NamedTuple):
    """A value of the list, by its number among those of its kind."""

    kind: str
    number: int


STREAM = Index("stream", 0)


class Writer:
    """Makes a recording of what was watched."""

    def __init__(self, inputs: list[Tensor], watch: Watch, results: tuple[Tensor, ...]) -> None:
        self._inputs, self._launches = inputs, watch.launches
        self._made: list[tuple[Any, ...]] = []
        self._places: dict[tuple[int, int], int] = {}
        self._addresses: list[int] = []  # where the places are in memory now
        self._constants: list[Any] = []
        self._descriptors: list[tuple[Descriptors, Index]] = []
        self._tuples: list[list[Index]] = []
        # Where the roots are in memory now: start, end, number of the root, and bytes before it.
        self._ranges = [(*_range(x), number, 0) for number, x in enumerate(inputs)]
        rest = {x.data_ptr(): x for x in watch.allocated if x.numel()}
        self._returned = [self._root_of(x, rest) for x in results]
        self._num_bytes = 0
        for x in rest.values():
            if x.device != inputs[0].device or x.data_ptr() % 16:
                raise NotReplayableError(f"it allocates on {x.device}, at {x.data_ptr()}")
            number = len(inputs) + len(self._made)
            self._ranges.append((*_range(x), number, self._num_bytes))
            self._num_bytes += cdiv(x.nbytes, APART) * APART
        if self._num_bytes > MOST_BYTES:
            raise NotReplayableError(f"its workspace has {self._num_bytes} bytes")

    def _root_of(self, result: Tensor, rest: dict[int, Tensor]) -> int:
        """The number of a result: of an input, or of one more allocation, taken from the rest."""
        for number, given in enumerate(self._inputs):
            if result is given:
                return number
        number = len(self._inputs) + len(self._made)
        if result.numel():
            allocated = rest.pop(result.data_ptr(), None)
            if allocated is None or _range(allocated) != _range(result):
                raise NotReplayableError("it returns a part of what it allocates")
            self._ranges.append((*_range(result), number, 0))
        self._made.append((result.shape, result.stride(), result.dtype))
        return number

    def write(self) -> Recording:
        launches = [self._launch(launch) for launch in self._launches]
        kinds = {
            "stream": 1,
            "place": len(self._places),
            "constant": len(self._constants),
            "descriptor": len(self._descriptors),
            "tuple": len(self._tuples),
        }
        starts = dict(zip(kinds, accumulate(kinds.values(), initial=0), strict=False))

        def at(index: Index) -> int:
            return starts[index.kind] + index.number

        def pick(indices: list[Index]) -> Pick:
            return _picker([at(index) for index in indices])

        return Recording(
            made=tuple(self._made),
            num_floats=self._num_bytes // 4,
            returned=tuple(self._returned),
            places=tuple(self._places),
            constants=tuple(self._constants),
            descriptors=tuple((tiles, at(index)) for tiles, index in self._descriptors),
            tuples=tuple(pick(indices) for indices in self._tuples),
            launches=tuple((launcher, pick(indices)) for launcher, indices in launches),
            kernels=tuple(launch.compiled for launch in self._launches),
            circumstances=circumstances(),
        )

    def _launch(self, launch: Launch) -> tuple[Callable[..., Any], list[Index]]:
        """The C launcher and its arguments, as `CudaLauncher` passes them to it."""
        compiled = launch.compiled
        why_not = cuda_launcher.why_not(compiled)
        if why_not is not None:
            raise NotReplayableError(why_not)
        base, is_one = cuda_launcher.base_arguments(compiled)
        written = [*map(self._constant, (*launch.grid, 1, 1)[:3]), STREAM]
        written += map(self._constant, base)
        arguments = self._arguments(launch)
        written += [self._tuple(arguments)] if is_one else arguments
        stream = object()
        called_with = cuda_launcher.called_with(launch, stream)
        if not self._stands_for(written, called_with, stream):
            raise NotReplayableError(f"Triton launches {compiled.name} in a way that isn't known")
        return cuda_launcher.in_c(compiled), written

    def _stands_for(self, written: list[Index], values: Any, stream: object) -> bool:
        """Whether these values would come of it in the call that is being recorded."""
        if not isinstance(values, list | tuple) or len(written) != len(values):
            return False
        for (kind, number), value in zip(written, values, strict=True):
            if kind == "tuple":
                same = self._stands_for(self._tuples[number], value, stream)
            elif kind == "place":
                same = isinstance(value, Tensor) and value.data_ptr() == self._addresses[number]
            elif kind == "descriptor":  # those of the GPU can't be compared
                same = type(value) is self._descriptors[number][0].kind
            elif kind == "stream":
                same = value is stream
            elif isinstance(value, Tensor):
                same = value.data_ptr() == 0 and self._constants[number] is None
            else:
                constant = self._constants[number]
                same = type(value) is type(constant) and value == constant
            if not same:
                return False
        return True

    def _arguments(self, launch: Launch) -> list[Index]:
        """All of the kernel's, constexprs too, with descriptors as a launcher takes them."""
        types = list(launch.compiled.src.signature.values())
        metas = iter(cuda_launcher.descriptor_metas(launch.compiled))
        found: list[Index] = []
        for value, kind in zip(launch.bound, types, strict=True):
            if not isinstance(kind, str) or not kind.startswith("tensordesc"):
                found.append(self._value(value))
                continue
            meta = next(metas, None)
            first, *rest = cuda_launcher.describe(value, meta)
            if meta is None:
                found.append(self._value(first))  # taken apart: the tensor, sizes, strides, …
            else:
                tiles = Descriptors(type(first), partial(_describe, _without_base(value), meta))
                self._descriptors.append((tiles, self._value(value.base)))
                found.append(Index("descriptor", len(self._descriptors) - 1))
            found += map(self._constant, rest)
        return found

    def _value(self, value: Any) -> Index:
        if isinstance(value, Tensor):
            return self._address(value)
        if isinstance(value, tuple) and any(isinstance(x, Tensor | tuple) for x in value):
            return self._tuple([self._value(x) for x in value])
        return self._constant(value)

    def _constant(self, value: Any) -> Index:
        self._constants.append(value)
        return Index("constant", len(self._constants) - 1)

    def _tuple(self, items: list[Index]) -> Index:
        self._tuples.append(items)
        return Index("tuple", len(self._tuples) - 1)

    def _address(self, x: Tensor) -> Index:
        address = x.data_ptr()
        if address == 0:
            return self._constant(None)
        roots = [
            (number, before + address - start)
            for start, end, number, before in self._ranges
            if start <= address < end
        ]
        if len(roots) != 1:
            raise NotReplayableError(f"an address lies in {len(roots)} roots")
        if roots[0] not in self._places:
            self._places[roots[0]] = len(self._places)
            self._addresses.append(address)
        return Index("place", self._places[roots[0]])


def _range(x: Tensor) -> tuple[int, int]:
    """The first address of its elements, and the one after the last."""
    if x.numel() == 0:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def _without_base(descriptor: Any) -> Any:
    descriptor = copy.copy(descriptor)
    descriptor.base = None
    return descriptor


def _describe(descriptor: Any, meta: Any, address: int) -> Any:
    """The descriptor of the same tiles there, as `CudaLauncher` makes it."""
    moved = copy.copy(descriptor)
    moved.base = SimpleNamespace(data_ptr=lambda: address)
    return cuda_launcher.describe(moved, meta)[0]


def _picker(indices: list[int]) -> Pick:
    if len(indices) > 1:
        return itemgetter(*indices)
    return lambda values: tuple(values[i] for i in indices)
