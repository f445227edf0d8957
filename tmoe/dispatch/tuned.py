"""Settings of a backend that can do a problem in several ways, as the Triton kernels can by tiles.

Such a backend has two methods more. `variants` names the ways worth timing, its usual one first,
and gives for each the backend that goes that way and no other. `tuned` gives the backend that goes
the way that was fastest. Times are measured and kept as those of backends are, in an entry of their
own; what a name means is the backend's affair, and a name that means nothing to it is a miss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Protocol

from torch import Tensor

from .. import registry
from .backend import Backend
from .measure import Tuning, keep, known, known_times, measure, milliseconds, tuning
from .problem import Problem

Run = Callable[[Backend], Tensor]  # the call that is being tuned, by this backend
Variants = Mapping[str, Backend]  # settings by name, each as the backend that has it

# Results of two settings differ by roundings: about 1 % of a row's length where inputs are rounded
# to four bits, far less elsewhere. A tile or a step that is missing makes more than this.
SAME = 1 / 16


class Tunable(Backend, Protocol):
    """A backend with settings."""

    def variants(self, problem: Problem, run: Run) -> tuple[Variants, Variants]:
        """What is worth timing for a problem: a few settings, the usual one first, and many more.
        `run` may be called to see what the call is like; none if that fails."""

    def tuned(self, problem: Problem, times: Mapping[str, float]) -> Tunable:
        """The backend with the best settings by these milliseconds; itself if none helps."""

    @property
    def settings(self) -> str:
        """In words, what was tuned about it; "" if nothing."""


def load_tuned(name: str, problem: Problem) -> Backend:
    """The backend of that name with its best settings for a problem, as far as they are known.

    A token's bits must not depend on its batch where that is asked for, so then there are none.
    """
    backend: Tunable = registry.load(name)
    times = known(problem.machine, settings_key(problem, name))
    if not times or problem.batch_invariant or not hasattr(backend, "tuned"):
        return backend
    return backend.tuned(problem, times)


def tuned_settings(name: str, problem: Problem) -> str:
    """What is tuned about the backend of that name, in words; "" if nothing is."""
    return getattr(load_tuned(name, problem), "settings", "")


def settings_key(problem: Problem, name: str) -> str:
    """The entry of the store for a backend's settings."""
    return f"{problem.key} by {name}"


def measure_call(problem: Problem, names: Iterable[str], run: Run) -> None:
    """Time the backends `names`, if that wasn't done before, and first, where that is asked for,
    their settings. For a call inside `autotune`."""
    asked = tuning()
    if asked is None or not asked.meet(problem.machine, problem.key):
        return
    names, searched = tuple(names), False
    for name in names:
        asked.meet(problem.machine, settings_key(problem, name))
        if asked.tiles and not problem.batch_invariant:
            searched |= _search(problem, registry.load(name), run, asked)
    is_new = searched or asked.again or not known_times(problem)
    if is_new and (len(names) > 1 or asked.tiles):
        measure(problem, {name: partial(run, load_tuned(name, problem)) for name in names})


def _search(problem: Problem, backend: Tunable, run: Run, asked: Tuning) -> bool:
    """Time a backend's settings; whether there is something new."""
    if not hasattr(backend, "variants"):
        return False
    key = settings_key(problem, backend.name)
    few, more = backend.variants(problem, run)
    before = known(problem.machine, key)
    if asked.quick:
        more = {}
    is_known = next(iter(few), "") in before and (not more or any(name in before for name in more))
    if not few or (is_known and not asked.again):
        return False
    variants = {**few, **more}
    times = _times(problem, variants, run, asked)
    if times:
        others = {name: ms for name, ms in before.items() if name not in variants}
        keep(problem.machine, key, {**others, **times})
    return bool(times)


def _times(problem: Problem, variants: Variants, run: Run, asked: Tuning) -> dict[str, float]:
    """Milliseconds of the settings that run and give what the first one gives."""
    times: dict[str, float] = {}
    want: Tensor | None = None
    for i, (name, variant) in enumerate(variants.items()):
        asked.progress(f"{variant.name}, {name}", i, len(variants))
        try:
            got = run(variant)
            if want is not None and not is_same(got, want):
                continue
            times[name] = milliseconds(partial(run, variant), problem.machine)
        except Exception:  # noqa: BLE001  many a tile is more than this GPU or compiler can do
            if want is None:
                return {}  # nothing to compare with
            continue
        want = got if want is None else want
    return times


def is_same(got: Tensor, want: Tensor) -> bool:
    """Whether two results (rows, columns) are one, but for roundings; a NaN makes them differ."""
    got, want = got.float(), want.float()
    return bool(((got - want).norm(dim=-1) <= SAME * want.norm(dim=-1)).all())
