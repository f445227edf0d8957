"""Recording: a call of the kernels without its addresses, which can be launched again at others.

Every address among the arguments of a launch lies in a root: an input of the call, a result that it
makes, or the workspace, one piece of memory for all else that it allocated.

    address = start of its root + offset

`record.py` makes recordings, `replay.py` says which one is for a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from tmoe.kernels.launch import fp32_precision

MOST_DESCRIPTORS = 4096

Pick = Callable[[Sequence[Any]], tuple[Any, ...]]  # some items of a list


def circumstances() -> tuple[Any, ...]:
    """What launchers, and Triton at each launch, read beside their arguments."""
    device = triton.runtime.driver.active.get_current_device()
    return device, fp32_precision(), triton.knobs.runtime.debug


def is_watched() -> bool:
    """Whether someone listens to launches, or changes how kernels are compiled."""
    knobs = triton.knobs.runtime
    if knobs.add_stages_inspection_hook is not None:
        return True
    if triton.knobs.compilation.instrumentation_mode:  # launchers may pass more to such kernels
        return True
    listening = knobs.launch_enter_hook, knobs.launch_exit_hook
    return any(getattr(hook, "calls", True) for hook in listening)


@dataclass(frozen=True, slots=True)
class Recording:
    """What a call launched.

    The arguments of all launches are picked from one list of values: the stream, the addresses,
    constants, then descriptors, each made of an address, and tuples of values before them.
    """

    made: tuple[tuple[Any, ...], ...]  # size, stride and dtype of each result that isn't an input
    num_floats: int  # of the workspace
    returned: tuple[int, ...]  # numbers of roots: inputs, then what is made, then the workspace
    places: tuple[tuple[int, int], ...]  # of each address: number of the root, bytes from its start
    constants: tuple[Any, ...]
    descriptors: tuple[tuple[Descriptors, int], ...]  # each with the index of its address
    tuples: tuple[Pick, ...]
    launches: tuple[tuple[Callable[..., Any], Pick], ...]  # C launchers and their arguments
    kernels: tuple[Any, ...]  # the compiled ones, which have to live as long
    circumstances: tuple[Any, ...]

    def fits(self) -> bool:
        """Whether it can be replayed now, for a call of its kind."""
        return not is_watched() and circumstances() == self.circumstances

    def replay(self, inputs: list[Tensor]) -> tuple[Tensor, ...] | None:
        """Launch, and return the results. None, and nothing done, if torch doesn't align what it
        allocates as it does by itself."""
        device = inputs[0].device
        new = [
            torch.empty_strided(size, stride, dtype=dtype, device=device)
            for size, stride, dtype in self.made
        ]
        if self.num_floats:
            new.append(torch.empty(self.num_floats, dtype=torch.float32, device=device))
        roots = inputs + new
        starts = [root.data_ptr() for root in roots]
        for start in starts[len(inputs) :]:
            if start % 16:
                return None
        stream = triton.runtime.driver.active.get_current_stream(self.circumstances[0])
        values = [stream, *[starts[root] + offset for root, offset in self.places]]
        values += self.constants
        for descriptors, index in self.descriptors:
            values.append(descriptors.at(values[index]))
        for pick in self.tuples:
            values.append(pick(values))
        for launch, pick in self.launches:
            launch(*pick(values))
        return tuple([roots[number] for number in self.returned])


class Descriptors:
    """Descriptors of the same tiles at different addresses, in the form that a launcher takes.

    One follows from its address and constants, whatever is stored there, so it never grows stale.
    """

    def __init__(self, kind: type, make: Callable[[int], Any]) -> None:
        self.kind = kind
        self._make = make
        self._known: dict[int, Any] = {}

    def at(self, address: int) -> Any:
        found = self._known.get(address)
        if found is None:
            if len(self._known) >= MOST_DESCRIPTORS:
                self._known.clear()
            found = self._known[address] = self._make(address)
        return found
