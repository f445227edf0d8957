"""What is said when ranks don't fit each other, or one of them is gone.

`agree` compares what each rank is about to do, before any tensor is sent: through the store that
the process group was started with, which waits with a time-out and knows who has answered, whereas
a collective that meets another one hangs or adds up the wrong numbers.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

ANSWER = timedelta(seconds=5)  # for who is still there to say so, once something has failed
SOON = timedelta(seconds=1)  # likewise, where the time-out has passed already


class RankMismatchError(RuntimeError):
    """Ranks of one group were about to do different things; the message has both."""


class RankLostError(RuntimeError):
    """A rank of the group did not take part, in time or at all; the message names it."""


def agree(
    handle: Any, ranks: Sequence[int], rank: int, number: str, what: str, mine: Mapping[str, Any]
) -> None:
    """Return once all ranks of the group say the same; `number`: the same on all ranks, and new.

    Raises:
        RankMismatchError: what is different, and on which ranks.
        RankLostError: who did not say anything within the group's time-out.
    """
    differs = differences(ranks, said_by_all(handle, ranks, rank, number, what, mine))
    if differs:
        raise RankMismatchError(f"tmoe.parallel: {what}: {differs}")


def next_number(handle: Any, what: str) -> int:
    """How often this group's ranks have come to `what`, this time counted; 0 for one rank alone.

    It goes when the group does. What kept a destroyed group would keep gloo's threads, and with
    them Python's exit aborts now and then ("terminate called without an active exception").
    """
    if handle is None:
        return 0
    counts = _numbers.setdefault(handle, Counter())
    counts[what] += 1
    return counts[what]


_numbers: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()


def said_by_all(
    handle: Any, ranks: Sequence[int], rank: int, number: str, what: str, mine: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """What each rank of the group says, as JSON has it. Raises ``RankLostError`` as `agree`."""
    store = _store(handle)
    prefix = f"tmoe/{number}"
    store.set(f"{prefix}/{rank}", json.dumps(mine))
    absent = _absent(store, prefix, len(ranks), time_out(handle))
    if absent:
        others = ", ".join(str(ranks[other]) for other in absent)
        doing = f"{what} ({_words(mine)})" if mine else what
        raise RankLostError(
            f"tmoe.parallel: rank {ranks[rank]} is at {doing}; rank "
            f"{others} didn't come to it within {time_out(handle)}: "
            f"{who_is_gone(handle, ranks, rank, f'the start of {what}', wait=SOON)}"
        )
    return [json.loads(store.get(f"{prefix}/{other}")) for other in range(len(ranks))]


def differences(ranks: Sequence[int], said: Sequence[Mapping[str, Any]]) -> str:
    """What differs between ranks, field by field: "top_k is 2 on rank 0, 1 and 4 on rank 2"."""
    found = []
    for field in dict.fromkeys(name for one in said for name in one):
        holders: dict[str, list[str]] = {}
        for rank, one in zip(ranks, said, strict=True):
            holders.setdefault(json.dumps(one.get(field)), []).append(str(rank))
        if len(holders) > 1:
            each = (f"{value} on rank {', '.join(on)}" for value, on in holders.items())
            found.append(f"{field} is {' and '.join(each)}")
    return "; ".join(found)


def who_is_gone(
    handle: Any, ranks: Sequence[int], rank: int, step: str, wait: timedelta = ANSWER
) -> str:
    """After a failure in `step`: every rank that is still there says where it is, and the others
    are named."""
    try:
        store = _store(handle)
        store.set(f"tmoe/there/{rank}", step)
        absent = _absent(store, "tmoe/there", len(ranks), min(wait, time_out(handle)))
        steps: dict[str, list[str]] = {}
        for other in range(len(ranks)):
            if other not in absent:
                at = store.get(f"tmoe/there/{other}").decode()
                steps.setdefault(at, []).append(str(ranks[other]))
    except RuntimeError as error:
        return f"and the store that ranks meet in can't be reached ({error})"
    if absent:
        return f"rank {', '.join(str(ranks[other]) for other in absent)} is gone or elsewhere"
    where = "; ".join(f"rank {', '.join(on)} at {at}" for at, on in steps.items())
    return f"every rank is still there, but not together: {where}"


def time_out(handle: Any) -> timedelta:
    """The group's."""
    for kind in handle._device_types:
        options = getattr(handle._get_backend(kind), "options", None)
        if options is not None:
            return options._timeout
    return dist.default_pg_timeout


def _absent(store: Any, prefix: str, count: int, wait: timedelta) -> list[int]:
    keys = [f"{prefix}/{other}" for other in range(count)]
    try:
        store.wait(keys, wait)
    except RuntimeError:
        return [other for other, key in enumerate(keys) if not store.check([key])]
    return []


def _store(handle: Any) -> Any:
    return handle.get_group_store()


def _words(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in fields.items())
