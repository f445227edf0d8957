"""Peers: memory that all ranks of a group can write, each in its own GPU: torch's symmetric memory.

Whether a group can have some is asked once, of all ranks, which then know the same: `peers_of`.
A buffer is made at the first call that needs one so large, by all ranks together, and kept, since
CUDA graphs have its address. Calls that use the same buffers come one after the other.

NVLink multicast is never used: torch is told so while it maps the memory, and what it did is looked
at afterwards.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .faults import next_number, said_by_all, time_out
from .groups import Group

SMALLEST = 1 << 21  # bytes of a buffer: what the driver allocates at once
_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
_NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


@dataclass(frozen=True, eq=False)
class Buffer:
    """As large on every rank.

    Attributes:
        all: the buffer of each rank, (bytes,) uint8, in the group's order.
        mine: this rank's.
        addresses: (P,) int64 on the device: where they begin.
        handle: torch's.
        wait_ms: how long a barrier waits for a rank.
        channels: how many barriers there are.
    """

    all: Sequence[Tensor]
    mine: Tensor
    addresses: Tensor
    handle: Any
    wait_ms: int
    channels: int

    def barrier(self, kind: int) -> None:
        """What ranks wrote before it, all of them see after it. The stream waits, not the host. A
        rank that doesn't come within the time-out is an error of the device; so is one that comes
        with a call of another kind, by all odds, instead of a wrong sum."""
        self.handle.barrier(kind % self.channels, self.wait_ms)


@dataclass(eq=False)
class Peers:
    """What a group of ranks has in common.

    Attributes:
        reason: why there is no such memory, the same on everyone; "" if there is.
        verified: for which problems its exchange was compared with all-to-all.
    """

    reason: str
    verified: set[Any] = field(default_factory=set)
    _buffers: dict[str, list[Buffer]] = field(default_factory=dict)
    _stream: Any = None

    def buffer(
        self, what: str, size: int, device: torch.device, group: Group, everyone: Group
    ) -> Buffer:
        """At least `size` bytes for messages, or for sums, that the ranks of `group` can write; a
        collective where there is none yet. RuntimeError, on all ranks, if one can't make it."""
        held = self._buffers.setdefault(what, [])
        for large in held:
            if large.mine.numel() >= size:
                return large
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"tmoe.parallel: {size} bytes that other ranks can write can't be had while a CUDA "
                "graph is captured; run the layer once before, with as many tokens"
            )
        size = max(SMALLEST, 1 << (size - 1).bit_length())
        buffer: Buffer | None = None
        error = ""
        try:
            buffer = allocate(group, size, device)
        except RuntimeError as found:  # the driver, or torch's store
            error = str(found).partition("\n")[0]
        _agree(everyone, error)
        assert buffer is not None
        held.append(buffer)
        return buffer

    def follow(self, device: torch.device) -> None:
        """Let this stream come after the one that used the buffers before."""
        if device.type != "cuda":
            return
        now = torch.cuda.current_stream(device)
        if self._stream not in (None, now) and not torch.cuda.is_current_stream_capturing():
            now.wait_stream(self._stream)
        self._stream = now


def _agree(everyone: Group, error: str) -> None:
    """RuntimeError on all ranks if one has an error."""
    said = _said(everyone, "room for messages in memory", {"error": error})
    failed = [f"rank {r}: {one['error']}" for r, one in zip(everyone.ranks, said, strict=True)
              if one["error"]]  # fmt: skip
    if failed:
        raise RuntimeError("; ".join(failed))


# By torch's group of those who write, and of everyone; gone when these are.
_known: WeakKeyDictionary[Any, WeakKeyDictionary[Any, Peers]] = WeakKeyDictionary()


def peers_of(group: Group, everyone: Group) -> Peers:
    """What these ranks, of which `everyone` has to know the same, have in common; made once. On
    GPUs all of `everyone` have to call it, and are compared."""
    if group.handle is None:
        return Peers("experts aren't divided among ranks (ep 1)")
    known = _known.setdefault(group.handle, WeakKeyDictionary())
    if everyone.handle not in known:
        reason = why_not_here(group)
        if group.backend == "nccl":
            reason = _why_not_there(group, everyone, reason)
        known[everyone.handle] = Peers(reason)
    return known[everyone.handle]


def why_not_here(group: Group) -> str:
    """Why this process can't have such memory; "" if it can."""
    if group.backend != "nccl":
        return f"its ranks talk through {group.backend}, and the memory is that of NVIDIA's GPUs"
    if torch.version.hip is not None:
        return "torch's symmetric memory was tried on NVIDIA's GPUs alone, and these are AMD's"
    if find_spec("triton") is None:
        return "Triton isn't installed, whose kernel writes the rows"
    if find_spec("torch.distributed._symmetric_memory") is None:
        return f"torch {torch.__version__} has no symmetric memory"
    import torch.distributed._symmetric_memory as symmetric

    names = ("rendezvous", "_SymmetricMemory", "get_backend", "get_signal_pad_size")
    missing = [name for name in names if not hasattr(symmetric, name)]
    if missing:
        return f"the symmetric memory of torch {torch.__version__} has no {', '.join(missing)}"
    kind = symmetric.get_backend(torch.device("cuda", torch.cuda.current_device()))
    if kind != "CUDA":
        return f"torch's symmetric memory is set to {kind}, and only CUDA is known here"
    return ""


def _why_not_there(group: Group, everyone: Group, reason: str) -> str:
    """Of all ranks: what one of them can't, or which two GPUs don't see each other."""
    device, count = torch.cuda.current_device(), torch.cuda.device_count()
    others = [d for d in range(count) if d != device and not reason]  # of AMD's nothing is asked
    sees = [d for d in others if sees_peer(device, d)]
    mine = {
        "reason": reason, "host": socket.gethostname(), "device": device, "sees": sees,
        "group": group.ranks,
    }  # fmt: skip
    return unlinked(everyone.ranks, _said(everyone, "what GPUs see of each other", mine))


def sees_peer(device: int, other: int) -> bool:
    """Whether a GPU can write another one's memory, atomically too: barriers of symmetric memory
    swap a word there. Over NVLink it can; over PCIe a GPU may see another one without that."""
    if not torch.cuda.can_device_access_peer(device, other):
        return False
    driver, atomic = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    failed = driver.cuDeviceGetP2PAttribute(ctypes.byref(atomic), _ATOMICS, device, other)
    return not failed and bool(atomic.value)


def _said(everyone: Group, what: str, mine: dict[str, Any]) -> list[dict[str, Any]]:
    number = f"peers/{next_number(everyone.handle, 'peers')}"
    return said_by_all(everyone.handle, everyone.ranks, everyone.rank, number, what, mine)


def unlinked(ranks: Sequence[int], said: Sequence[dict[str, Any]]) -> str:
    """What stands between ranks of one group; "" if nothing does. The same on all of them."""
    about = dict(zip(ranks, said, strict=True))
    for rank, one in about.items():
        if one["reason"]:
            return f"{one['reason']} (rank {rank})" if len(ranks) > 1 else str(one["reason"])
    for rank, one in about.items():
        for other in one["group"]:
            its = about[other]
            if one["host"] != its["host"]:
                hosts = f"{one['host']} and {its['host']}"
                return f"rank {rank} and {other} are on two hosts, {hosts}"
            if rank != other and one["device"] == its["device"]:
                return (
                    f"rank {rank} and {other} both call their GPU cuda:{one['device']}, and torch "
                    "wants each process to see all of them"
                )
            if rank != other and its["device"] not in one["sees"]:
                there = f"cuda:{its['device']} of rank {other}"
                return f"cuda:{one['device']} of rank {rank} can't reach {there} over NVLink"
    return ""


def allocate(group: Group, size: int, device: torch.device) -> Buffer:
    """A collective of the group."""
    import torch.distributed._symmetric_memory as symmetric

    with _without_multicast(), torch.inference_mode(False):  # others use it too
        # Not `symmetric.empty`, whose pool may put it behind something that only one rank has.
        mine = symmetric._SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, device)
        handle = symmetric.rendezvous(mine, group.handle)
    if handle.multicast_ptr:
        raise RuntimeError("torch bound NVLink multicast, though it was told not to")
    every = [handle.get_buffer(rank, (size,), torch.uint8) for rank in range(group.size)]
    if every[group.rank].data_ptr() != mine.data_ptr():
        raise RuntimeError("torch's symmetric memory isn't where torch says that it is")
    places = torch.tensor([buffer.data_ptr() for buffer in every], device=device)
    milliseconds = int(time_out(group.handle).total_seconds() * 1e3)
    channels = max(1, symmetric.get_signal_pad_size() // (4 * group.size))
    return Buffer(every, mine, places, handle, milliseconds, channels)


@contextmanager
def _without_multicast() -> Iterator[None]:
    before = os.environ.get(_NO_MULTICAST)
    os.environ[_NO_MULTICAST] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NO_MULTICAST]
        else:
            os.environ[_NO_MULTICAST] = before
