"""`Group`: ranks that talk to each other, and the collectives that the exchanges are made of.

Every collective takes the step's name, so that a failure says what was under way and, where that
can be found out, who is gone. Groups of one rank communicate nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

from .faults import RankLostError, said_by_all, time_out, who_is_gone

# torch 2.13 renamed them.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, eq=False)
class Group:
    """A process group as this rank sees it.

    Attributes:
        handle: torch's; None for one rank alone.
        ranks: the global ranks, in the group's order.
        rank: this rank's place among them.
        device: the kind of device that its tensors are on, as the mesh has it: "cpu", "cuda".
    """

    handle: Any
    ranks: tuple[int, ...]
    rank: int
    device: str = "cpu"  # that of one rank alone is never asked for

    @classmethod
    def of(cls, handle: Any, device: str) -> Group:
        ranks = tuple(dist.get_process_group_ranks(handle))
        return cls(handle if len(ranks) > 1 else None, ranks, dist.get_rank(handle), device)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @cached_property
    def backend(self) -> str:
        """torch's name of the library that carries the bytes."""
        return "none" if self.handle is None else carrier_of(self.handle, self.device)

    @cached_property
    def nodes(self) -> int:
        """How many hosts the ranks are on, as torchrun numbers them: host by host."""
        each = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or max(self.ranks) + 1
        return len({rank // each for rank in self.ranks})

    def __str__(self) -> str:
        return f"ranks {', '.join(map(str, self.ranks))} ({self.backend})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        return self  # a copy of a layer talks to the same ranks


def carrier_of(handle: Any, device: str) -> str:
    """What carries tensors of this kind of device: "nccl", "gloo". `dist.get_backend` alone says
    "undefined" of a group that was made without a name, as `init_device_mesh` makes one."""
    each = dict(pair.split(":") for pair in dist.get_backend_config(handle).split(","))
    return each.get(device) or str(dist.get_backend(handle))


@dataclass
class Pending:
    """A collective under way. `wait` before its result is read."""

    group: Group
    step: str
    work: Any = None

    def wait(self) -> None:
        """On a GPU this makes the stream wait, not the host."""
        work, self.work = self.work, None
        if work is not None:
            with naming(self.group, self.step):
                work.wait()


@contextmanager
def naming(group: Group, step: str) -> Iterator[None]:
    """Say of torch's errors which step failed and who did not take part in it."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if isinstance(error, RankLostError):
            raise
        raise RankLostError(
            f"tmoe.parallel: {step} of {group} failed on rank {group.ranks[group.rank]}: "
            f"{who_is_gone(group.handle, group.ranks, group.rank, step)}\n{error}"
        ) from error


def all_gather(x: Tensor, group: Group, step: str, pending: Pending | None = None) -> Tensor:
    """(n, ...) of each rank -> (size · n, ...). With `pending` it is only begun."""
    if group.handle is None:
        return x
    out = x.new_empty(group.size * x.shape[0], *x.shape[1:])
    if x.numel() > 0:
        with naming(group, step):
            work = _all_gather(
                out, x.contiguous(), group=group.handle, async_op=pending is not None
            )
        if pending is not None:
            pending.work = work
    return out


def reduce_scatter(x: Tensor, group: Group, step: str) -> Tensor:
    """(size · n, ...) of each rank -> the sums of this rank's (n, ...)."""
    if group.handle is None:
        return x
    out = x.new_empty(x.shape[0] // group.size, *x.shape[1:])
    if x.numel() > 0:
        with naming(group, step):
            _reduce_scatter(out, x.contiguous(), group=group.handle)
    return out


def all_reduce(x: Tensor, group: Group, step: str, pending: Pending | None = None) -> Tensor:
    """The sum over ranks, in place."""
    if group.handle is not None and x.numel() > 0:
        with naming(group, step):
            work = dist.all_reduce(x, group=group.handle, async_op=pending is not None)
        if pending is not None:
            pending.work = work
    return x


def all_to_all(
    x: Tensor,
    send: Sequence[int],
    receive: Sequence[int],
    group: Group,
    step: str,
    pending: Pending | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Rows for rank 0, then those for rank 1, ... -> the rows from rank 0, from rank 1, ...
    `out`, contiguous, is written instead of a new tensor."""
    if group.handle is None:
        return x
    if out is None:
        out = x.new_empty(sum(receive), *x.shape[1:])
    with naming(group, step):
        work = dist.all_to_all_single(
            out, x.contiguous(), list(receive), list(send), group=group.handle,
            async_op=pending is not None,
        )  # fmt: skip
    if pending is not None:
        pending.work = work
    return out


def group_of(ranks: Sequence[int], like: Any) -> Any:
    """A process group of these ranks, with the time-out of `like`; made once per process. They meet
    first, since torch would wait for a rank that is gone as long as the store does."""
    world: Any = dist.group.WORLD
    made, key = _made.setdefault(world, {}), tuple(ranks)
    if key not in made:
        names, what = "-".join(map(str, ranks)), "making a group of ranks"
        said_by_all(world, ranks, ranks.index(dist.get_rank()), f"group/{names}", what, {})
        made[key] = dist.new_group(
            list(ranks),
            timeout=time_out(like),
            backend=dist.get_backend_config(like),
            use_local_synchronization=True,
        )
    return made[key]


# Of each world, by their ranks; gone when it is (see `faults.next_number`).
_made: WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = WeakKeyDictionary()
