"""How long ranks need to exchange tokens: latency, and bytes over the bandwidth of each link.

    time = start + max(bytes over NVLink / B_nvlink, bytes over the network / B_network)

A group of n ranks is spread over m nodes, NVLink domains, with p = n / m ranks on each. Per rank:

    all_gather, reduce_scatter    NVLink (n - 1) b     network (n - p) b / p
    all_reduce                    one of each          b is an n-th of what is added up
    all_to_all                    NVLink (p - 1) c     network (n - p) c

b bytes are what a rank contributes, or keeps; c what it has for each other rank. Gathering brings
each byte onto a node once, through any of its p network cards, and from there over NVLink. Both
kinds of link work at once. Over NVLink, NCCL sends few bytes by protocols that start early, and
many by one that reaches the bandwidth: each has its start and B_nvlink, and what takes less counts.

    all_gather, reduce_scatter    start_op + (n - m - 1) hop_nvlink + (m - 1) hop_network
    all_to_all                    start_op on one node, start_network over several

Beside that an exchange of tmoe sorts and copies rows: start + rows · (a + hidden size · b). The
numbers are in communication.json, each with where it comes from: measured by us, a data sheet, or
published by others. `python -m bench.fit_communication` writes those that were measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from ..checks import expect, expect_type

CONSTANTS = Path(__file__).parent / "communication.json"
OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A row of the data sheet, and what NVLink does each way."""

    name: str
    memory_gb: float  # 10^9 bytes
    memory_gbs: float
    bf16_tflops: float  # dense
    fp8_tflops: float | None  # None: it has no such units
    nvlink_gbs: float  # one way


@dataclass(frozen=True, slots=True)
class Span:
    """Where a group's ranks are."""

    ranks: int  # n
    nodes: int  # m

    @property
    def per_node(self) -> float:
        """p; a mean, where nodes differ."""
        return self.ranks / self.nodes


@dataclass(frozen=True, slots=True)
class Transfer:
    """A predicted exchange on one rank, in microseconds."""

    us: float
    start_us: float
    nvlink_us: float
    network_us: float
    copies_us: float = 0.0

    @property
    def bound(self) -> str:
        """What takes longest: "start", "NVLink" or "network"."""
        named = {"start": self.start_us, "NVLink": self.nvlink_us, "network": self.network_us}
        return max(named, key=named.__getitem__)

    def with_copies(self, us: float) -> Transfer:
        """And what it takes on both of its ends."""
        return replace(self, us=self.us + us, copies_us=self.copies_us + us)

    def __add__(self, other: Transfer) -> Transfer:
        """One after the other."""
        return Transfer(
            self.us + other.us,
            self.start_us + other.start_us,
            self.nvlink_us + other.nvlink_us,
            self.network_us + other.network_us,
            self.copies_us + other.copies_us,
        )


NOTHING = Transfer(0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Cluster:
    """GPUs of one kind in NVLink domains, with a network card for each.

    Attributes:
        gpu: a name in `gpus`.
        domain: GPUs that NVLink joins, a node.
        net_gbit: of each GPU's network card, Gbit/s one way.
        known: as `constants`.
    """

    gpu: Gpu
    domain: int
    net_gbit: float
    known: Mapping[str, Any] = field(repr=False)

    @classmethod
    def of(cls, gpu: str, domain: int = 8, net_gbit: float = 400.0) -> Cluster:
        """Raises ``ValueError``: a GPU without a row, no GPU in a domain, no bandwidth."""
        op = "Cluster"
        expect_type(domain, int, op, "domain")
        expect(domain >= 1, op, "domain", "at least 1", domain)
        expect(net_gbit > 0, op, "net_gbit", "above 0", net_gbit)
        return cls(gpu_named(gpu), domain, float(net_gbit), constants())

    def span(self, ranks: int, stride: int = 1) -> Span:
        """Of a group of every `stride`-th GPU."""
        per_node = max(1, self.domain // stride)
        return Span(ranks, -(-ranks // per_node))

    def gather(self, operation: str, part_bytes: float, span: Span) -> Transfer:
        """`all_gather` of `part_bytes` from each rank, or `reduce_scatter` that leaves each rank
        `part_bytes`."""
        return self._gather(operation, part_bytes, span, 1)

    def all_reduce(self, whole_bytes: float, span: Span) -> Transfer:
        """`whole_bytes` on each rank, added up on all of them."""
        return self._gather("all_reduce", whole_bytes / span.ranks, span, 2)

    def all_to_all(self, near_bytes: float, far_bytes: float, span: Span) -> Transfer:
        """near_bytes: that a rank sends to others of its node; far_bytes: to other nodes."""
        if span.ranks == 1:
            return NOTHING
        network = far_bytes / self._network_bytes_per_us
        least = self.known["network"]["start_us"] if span.nodes > 1 else 0.0
        return self._faster("all_to_all", near_bytes, network, 0.0, least)

    def written_us(self, size: float) -> float:
        """Bytes that a GPU writes into others' memory over NVLink, at what NCCL reaches."""
        reach: float = self.known["nvlink"]["all_to_all"]["many"]["reach"]
        return size / (1e3 * self.gpu.nvlink_gbs * reach)

    def copies_us(self, exchange: str, rows: float, hidden: int) -> float:
        """What tmoe's exchange takes beside what is sent, for `rows` that come to a rank."""
        own = self.known["tmoe"][exchange]
        each: float = own["us_per_row"] + own["us_per_value"] * hidden
        start: float = own["start_us"]
        return start + rows * each

    def _gather(self, operation: str, part_bytes: float, span: Span, times: int) -> Transfer:
        n, m, p, hops = span.ranks, span.nodes, span.per_node, self.known["hops"]
        if n == 1:
            return NOTHING
        more = max(0, n - m - 1) * hops["nvlink_us"] + (m - 1) * hops["network_us"]
        near = times * (n - 1) * part_bytes if p > 1 else 0.0
        network = times * (n - p) * part_bytes / p / self._network_bytes_per_us
        return self._faster(operation, near, network, times * more, 0.0)

    def _faster(
        self, operation: str, near_bytes: float, network_us: float, more_us: float, least_us: float
    ) -> Transfer:
        """By the protocol that takes less. more_us, least_us: of its start."""
        found = []
        for name in ("few", "many"):
            link = self.known["nvlink"][operation][name]
            start = max(link["start_us"] + more_us, least_us)
            nvlink = near_bytes / (1e3 * self.gpu.nvlink_gbs * link["reach"])
            found.append(Transfer(start + max(nvlink, network_us), start, nvlink, network_us))
        return min(found, key=lambda transfer: transfer.us)

    @property
    def _network_bytes_per_us(self) -> float:
        return 1e3 * self.net_gbit / 8 * self.known["network"]["reach"]


@cache
def constants() -> Mapping[str, Any]:
    """The file, which is shipped with the package."""
    found: Mapping[str, Any] = json.loads(CONSTANTS.read_text(encoding="utf-8"))
    return found


def gpu_names() -> list[str]:
    """Those with a row."""
    return [*constants()["gpus"]]


def gpu_named(name: str) -> Gpu:
    """The row of a GPU; case, spaces and dashes don't matter. Raises ``ValueError`` with those
    known."""
    expect_type(name, str, "Cluster", "gpu")
    key = name.upper().replace(" ", "").replace("-", "").removeprefix("NVIDIA")
    known = gpu_names()
    expect(key in known, "Cluster", "gpu", f"one of {', '.join(known)}", repr(name))
    row = dict(constants()["gpus"][key])
    row.pop("source")
    return Gpu(key, **row)


def sources() -> list[tuple[str, str, str]]:
    """What each group of numbers is, how it is known, and from where, for people."""
    found = []
    for name in ("nvlink", "hops", "network", "tmoe", "sheets"):
        source = constants()[name]["source"]
        found.append((name, source["kind"], source["what"]))
    return found
