"""Ranks of `torch.distributed` that measured for themselves, and must choose the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist

Key = tuple[str, str]  # type of device, problem


def agreed(mine: Mapping[Key, Mapping[str, float]]) -> dict[Key, dict[str, float]]:
    """What all ranks shall go by, from what each of them knows; one collective of the default
    group. Nothing where there are no other ranks."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return {}
    of_ranks: list[Mapping[Key, Mapping[str, float]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(of_ranks, {key: dict(times) for key, times in mine.items()})
    return slowest(of_ranks)


def slowest(of_ranks: Sequence[Mapping[Key, Mapping[str, float]]]) -> dict[Key, dict[str, float]]:
    """For each problem its candidates' longest times. A candidate counts only if it has a time on
    every rank that knows times of the problem: elsewhere it could not run."""
    result = {}
    for key in dict.fromkeys(key for known in of_ranks for key in known):
        rows = [known[key] for known in of_ranks if known.get(key)]
        shared = [name for name in rows[0] if all(name in row for row in rows)] if rows else []
        result[key] = {name: max(row[name] for row in rows) for name in shared}
    return result
