"""How long an exchange takes, all of it: what is sent, there and back, and the copies at its ends.

One model for `choose`, which picks an exchange for a call, and for `tmoe plan`, which ranks layouts
of clusters that aren't here.
"""

from __future__ import annotations

from .communication_model import Cluster, Span, Transfer

MOST_PEER_BYTES = 1 << 30  # of a GPU that others may write


def all_gather(
    cluster: Cluster, span: Span, tokens: float, sent: float, back: float, hidden: int
) -> Transfer:
    """Each rank's `tokens` to all ranks, `sent` bytes each, and the sums, `back` bytes each."""
    return (
        cluster.gather("all_gather", tokens * sent, span)
        + cluster.gather("reduce_scatter", tokens * back, span)
    ).with_copies(cluster.copies_us("all_gather", tokens * span.ranks, hidden))


def all_to_all(
    cluster: Cluster, span: Span, rows: float, sent: float, back: float, hidden: int
) -> Transfer:
    """`rows` from each rank to each."""
    near, far = (rows * n for n in (span.per_node - 1, span.ranks - span.per_node))
    return (
        cluster.all_to_all(near * sent, far * sent, span)
        + cluster.all_to_all(near * back, far * back, span)
    ).with_copies(cluster.copies_us("all_to_all", rows * span.ranks, hidden))


def symmetric_memory(
    cluster: Cluster, ranks: int, rows: float, sent: float, back: float, hidden: int
) -> Transfer:
    """`rows` from each rank to each, written over the NVLink of one host."""
    others = rows * (ranks - 1)
    us = cluster.written_us(others * (sent + back))
    copies = cluster.copies_us("symmetric_memory", rows * ranks, hidden)
    return Transfer(us, 0.0, us, 0.0).with_copies(copies)


def bytes_needed(
    ranks: int, rows: int, row_bytes: int, sum_bytes: int, per_row: int
) -> int:  # fmt: skip
    """What `symmetric_memory` wants of a GPU: messages that go, come and stay, and sums that come
    back, `rows` for each rank."""
    others = (ranks - 1) * rows
    return (2 * others + rows) * row_bytes + others * per_row * sum_bytes
