"""Tune a layer for the machine at hand: tiles of the Triton kernels, then all backends.

Nothing of its own is measured here: the layer, with random weights and routes, is called inside
`tmoe.autotune`, once for each number of tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from . import Activation, autotune
from .checks import expect
from .dispatch.known import MODELS, Layer, model_layer, problem_of
from .dispatch.measure import known, known_times, store_of
from .dispatch.problem import Machine, Problem, token_bucket
from .dispatch.resolve import duration
from .dispatch.tuned import settings_key
from .nn import Experts
from .shapes import MoEShape, random_inputs

Show = Callable[[str, int, int], None]  # what is timed next, how many were, of how many


@dataclass(frozen=True, slots=True)
class TunedTiles:
    """What tuning found for one way of multiplying."""

    way: str
    tiles: str  # "table": what the package ships is as good
    num_tried: int
    before_ms: float  # with the tiles of the table
    after_ms: float


@dataclass(frozen=True, slots=True)
class Tuned:
    """What is known of a layer at one number of tokens."""

    tokens: int  # up to so many
    tiles: tuple[TunedTiles, ...]
    backends: Mapping[str, float]  # milliseconds, fastest first


def tune(
    layer: Layer,
    tokens: Iterable[int],
    *,
    device: torch.device,
    dtype: torch.dtype,
    scheme: str | None = None,
    quick: bool = False,
    again: bool = False,
    show: Show,
) -> Iterator[Tuned]:
    """Tune `layer` for each of `tokens`, rounded up to powers of two, and yield what is known then.

    What the store has already isn't measured, unless `again`. After each number of tokens the
    result is in the store. quick, show: as quick and progress of `tmoe.autotune`.
    """
    experts = _experts(layer, scheme, device, dtype)
    shape = MoEShape("", layer.num_experts, layer.top_k, layer.hidden, layer.intermediate)
    machine = Machine.of(device)
    for num_tokens in sorted({token_bucket(count) for count in tokens}):
        x, weights, ids = random_inputs(shape, num_tokens, device, dtype)
        here = partial(_show_where, show, f"T<={num_tokens}")
        with torch.no_grad(), autotune(tiles=True, quick=quick, again=again, progress=here):
            experts(x, ids, weights)
        problem = problem_of(layer, machine, num_tokens=num_tokens, dtype=dtype, scheme=scheme)
        problem = replace(problem, has_static_scales=False)  # as it was called
        times = known_times(problem)
        fastest_first = {name: times[name] for name in sorted(times, key=times.__getitem__)}
        yield Tuned(num_tokens, tuple(_tuned_tiles(problem)), fastest_first)


def _show_where(show: Show, where: str, what: str, done: int, total: int) -> None:
    show(f"{where}  {what}", done, total)


def _experts(
    layer: Layer, scheme: str | None, device: torch.device, dtype: torch.dtype
) -> torch.nn.Module:
    experts = Experts(
        layer.num_experts,
        layer.hidden,
        layer.intermediate,
        activation=layer.activation,
        bias=layer.has_bias,
        weight_on_input=layer.weight_on_input,
        device=device,
        dtype=dtype,
    ).requires_grad_(False)
    return experts if scheme is None else Experts.quantized(experts, scheme)


def _tuned_tiles(problem: Problem) -> Iterator[TunedTiles]:
    times = known(problem.machine, settings_key(problem, "triton"))
    if not times:
        return
    from .backends.triton_tiles import TABLE, fastest, tiles_name  # needs Triton

    best = fastest(problem, times)
    for name, before in times.items():
        way, _, text = name.partition(": ")
        if text == TABLE:
            chosen = tiles_name(best[way]) if way in best else TABLE
            tried = sum(other.startswith(f"{way}: ") for other in times) - 1
            yield TunedTiles(way, chosen, tried, before, times[f"{way}: {chosen}"])


# the command --------------------------------------------------------------------------------------

_SHAPE = re.compile(r"([EKHI])=([1-9]\d{0,8})", re.ASCII)


def parse_layer(
    text: str, activation: str | None = None, *, op: str = "tune", arg: str = "MODEL_OR_SHAPE"
) -> Layer:
    """A model of `MODELS`, or "E=8,K=2,H=4096,I=14336": experts, experts per token, hidden size,
    and the intermediate size of an expert. Raises ``ValueError`` for anything else, and names `op`
    and `arg` in it."""
    if "=" in text:
        parts = [_SHAPE.fullmatch(part.strip()) for part in text.split(",")]
        sizes = {part[1]: int(part[2]) for part in parts if part is not None}
        wanted = "of the form E=8,K=2,H=4096,I=14336"
        expect(len(parts) == len(sizes) == 4, op, arg, wanted, repr(text))
        expect(sizes["K"] <= sizes["E"], op, "K", f"at most E = {sizes['E']}", sizes["K"])
        layer = Layer(sizes["E"], sizes["K"], sizes["H"], sizes["I"])
    else:
        wanted = f"one of {', '.join(MODELS)}, or E=8,K=2,H=4096,I=14336 with sizes of yours"
        expect(text in MODELS, op, arg, wanted, repr(text))
        layer = model_layer(text)
    return layer if activation is None else replace(layer, activation=Activation.of(activation))


def parse_tokens(text: str, *, op: str = "tune") -> list[int]:
    """ "1,16,128" as numbers. Raises ``ValueError`` for anything else."""
    parts = [part.strip() for part in text.split(",")]
    ok = all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts)
    expect(ok, op, "--tokens", "positive numbers with commas between them", repr(text))
    return [int(part) for part in parts]


def run_tune(
    layer: Layer,
    tokens: list[int],
    *,
    dtype: torch.dtype,
    scheme: str | None,
    quick: bool,
    again: bool,
    as_json: bool,
) -> bool:
    """Tune on the GPU, or the CPU where there is none, and print what was found; whether it is kept
    for other processes. A progress bar and complaints go to stderr."""
    out, err = Console(), Console(stderr=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        err.print("There is no GPU here: these times say little about any.", style="yellow")
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    )  # fmt: skip
    found, out_of_memory = [], None
    with Progress(*columns, console=err, transient=True, disable=as_json) as bar:
        all_tokens = bar.add_task("numbers of tokens", total=len({*map(token_bucket, tokens)}))
        one = bar.add_task("", total=None)

        def show(what: str, done: int, total: int) -> None:
            bar.update(one, description=what, completed=done, total=total)

        try:
            for tuned in tune(
                layer, tokens, device=device, dtype=dtype, scheme=scheme, quick=quick, again=again,
                show=show,
            ):  # fmt: skip
                found.append(tuned)
                bar.advance(all_tokens)
        except torch.OutOfMemoryError as error:
            out_of_memory = error
    store = store_of(Machine.of(device))
    if as_json:
        result = {"path": str(store.path), "tuned": [asdict(tuned) for tuned in found]}
        out.print_json(json.dumps(result))
    elif found:
        out.print(_table(found))
        where = f"kept in {store.path}"
        if store.problem is not None:
            where = f"not kept: {store.path}: {store.problem}"
        out.print(where, soft_wrap=True, highlight=False)
    if out_of_memory is not None:
        err.print(f"tune: the layer is too large for this GPU: {out_of_memory}", style="red")
    return out_of_memory is None and store.problem is None


def _table(found: Iterable[Tuned]) -> Table:
    table = Table("tokens", "Triton's tiles", "before", "after", "backends")
    for tuned in found:
        backends = "\n".join(f"{name} {duration(ms)}" for name, ms in tuned.backends.items())
        if not tuned.tiles:
            table.add_row(f"<= {tuned.tokens}", "", "", "", backends)
        for tiles in tuned.tiles:
            table.add_row(
                f"<= {tuned.tokens}",
                f"{tiles.way}: {tiles.tiles}\n(of {tiles.num_tried + 1})",
                duration(tiles.before_ms),
                duration(tiles.after_ms),
                backends,
            )
    return table
