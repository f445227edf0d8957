"""What would have to change for a layout to fit, where none does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..bench.cases import multiplies_fp8
from ..bench.cost_model import fitted
from ..parallel.communication_model import gpu_named, gpu_names
from .layouts import Estimate, Question, estimate, layouts, why_not

MOST_GPUS = 1024  # a suggestion of more would be none


def nothing_fits(ask: Question) -> str:
    """A sentence with the memory that is wanted of a GPU, and the options that would do."""
    least = max(_estimates(ask), key=lambda one: one.left_gb)
    gpu = ask.cluster.gpu
    text = (
        f"no layout fits: {least.layout} needs least, {gpu.memory_gb - least.left_gb:.1f} GB on "
        f"each GPU, {ask.reserve_gb:g} in reserve included, and the {gpu.name} has "
        f"{gpu.memory_gb:g}"
    )
    options = _options(ask)
    if options:
        return f"{text}. What would do: {', or '.join(options)}."
    return (
        f"{text}. No other --scheme or --gpu and no --gpus up to {MOST_GPUS} would do alone; "
        "--tokens and --reserve-gb take memory, too."
    )


def _options(ask: Question) -> list[str]:
    """Changes of one option of the command, each of which is enough."""
    found = []
    more = next((n for n in _more_gpus(ask) if _fits(replace(ask, gpus=n))), None)
    if more is not None:
        found.append(f"--gpus {more}")
    others = [replace(ask, scheme=name) for name in fitted()]
    schemes = [other.scheme for other in others if _fits(other)]
    if schemes:
        found.append(f"--scheme {'|'.join(schemes)}")
    clusters = [replace(ask.cluster, gpu=gpu_named(name)) for name in gpu_names()]
    gpus = [one.gpu.name for one in clusters if _fits(replace(ask, cluster=one))]
    if gpus:
        found.append(f"--gpu {'|'.join(gpus)}")
    return found


def _more_gpus(ask: Question) -> Iterator[int]:
    """Twice as many, and so on, in whole NVLink domains."""
    gpus, domain = 2 * ask.gpus, ask.cluster.domain
    while gpus <= MOST_GPUS:
        if gpus > domain:
            gpus = -(-gpus // domain) * domain
        yield gpus
        gpus *= 2


def _fits(ask: Question) -> bool:
    if multiplies_fp8(ask.scheme) and ask.cluster.gpu.fp8_tflops is None:
        return False
    return any(one.left_gb >= 0 for one in _estimates(ask))


def _estimates(ask: Question) -> Iterator[Estimate]:
    """Of the layouts that memory alone can rule out; DP, copies of the whole model, always can."""
    return (estimate(layout, ask) for layout in layouts(ask.gpus) if why_not(layout, ask) is None)
