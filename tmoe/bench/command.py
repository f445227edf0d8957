"""`tmoe bench`: measure, predict, report, compare. What is heavy is imported when it is needed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from ..command_errors import said_by
from .arguments import names_of, shapes_of, tokens_of

WIDTH = 120
PLAIN: Any = {"highlight": False, "markup": False}  # brackets are brackets
MEASURE = "run"  # what is done if no other command is named


class _MeasuresByDefault(TyperGroup):
    """`tmoe bench mixtral-8x7b` is `tmoe bench run mixtral-8x7b`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] not in (*self.commands, "--help"):
            args = [MEASURE, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_MeasuresByDefault,
    help="Measure expert layers, or say what they should take. Without a command's name: run.",
)

Shapes = Annotated[
    list[str] | None,
    typer.Argument(help="mixtral-8x7b, deepseek-v3-tp8, ..., E=8,K=2,H=4096,I=14336, or all."),
]
Tokens = Annotated[str | None, typer.Option(help="Tokens per call: 1,16,128; or all.")]
Routings = Annotated[
    str, typer.Option("--routing", help="random, balanced, zipf, one_expert; all.")
]
Backend = Annotated[
    str | None,
    typer.Option(help="Whose times are ours: triton or torch; without it triton, if that ran."),
]


@app.command(MEASURE)
def run(
    shapes: Shapes = None,
    tokens: Tokens = None,
    schemes: Annotated[str, typer.Option(help="bf16, fp8_block, nvfp4_a16, ...; all.")] = "bf16",
    routing: Routings = "random",
    backends: Annotated[
        str | None, typer.Option(help="triton, torch, flashinfer_trtllm, peers: vllm, ...; all.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("tmoe-bench"),
    only_predict: Annotated[
        bool, typer.Option("--predict", help="Measure nothing: as tmoe bench predict.")
    ] = False,
) -> None:
    """Measure layers: check, time, print a table, write results.json, pictures and report.html.

    Without arguments: on a GPU the layers of seven models, 1 to 8192 tokens, in bf16 by Triton;
    elsewhere a small layer in fp32 by torch. Exits with 1 if a result was wrong or nothing ran.
    """
    from .cost_model import fitted
    from .shapes import CPU_TOKENS, GPU_TOKENS, ROUTINGS

    if only_predict:
        for scheme in [*fitted()] if schemes == "all" else schemes.split(","):
            for one in [*ROUTINGS] if routing == "all" else routing.split(","):
                predict(shapes, tokens, scheme, one)
        return
    import torch

    from ..formats import SCHEMES
    from .cases import BACKENDS, OURS
    from .report import Report, why_no_pictures
    from .run import Selection, measure

    gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
    selection = Selection(
        shapes_of(shapes, gpu),
        tokens_of(tokens, GPU_TOKENS if gpu else CPU_TOKENS),
        names_of("--schemes", schemes, ("bf16", *SCHEMES)),
        names_of("--routing", routing, ROUTINGS),
        names_of("--backends", backends or ("triton" if gpu else "torch"), BACKENDS),
    )
    is_new = _make(out)  # before time is spent
    console, err = _console(), Console(stderr=True)
    if not gpu:
        err.print("There is no GPU here: these times say little about any.", style="yellow")
    found = None
    try:
        for so_far in _with_progress(measure, selection, torch.device(device), dtype, err):
            found = so_far
    finally:  # what is measured stays, whatever ends it
        if found is not None and found.benchmarks:
            path = out / "results.json"
            path.write_text(json.dumps(found.as_json(), indent=1) + "\n", encoding="utf-8")
            console.print(f"results: {path}", **PLAIN, soft_wrap=True)
        elif is_new:
            out.rmdir()
    assert found is not None
    for what, why in (found.skipped | found.failed).items():
        err.print(f"{what}: {why}", **PLAIN, soft_wrap=True, style="yellow")
    ours = next((name for name in selection.backends if name in OURS), None)
    if found.benchmarks and ours is not None:
        report = Report(found.as_json(), ours)
        _show(report, console)
        _write(report, out, console, err, why_no_pictures())
    raise typer.Exit(0 if found.benchmarks and not found.failed else 1)


@app.command("predict")
def predict(
    shapes: Shapes = None,
    tokens: Tokens = None,
    scheme: Annotated[str, typer.Option(help="bf16, fp8_block, ...")] = "bf16",
    routing: Annotated[str, typer.Option(help="random, balanced, zipf or one_expert.")] = "random",
    tp: Annotated[int, typer.Option(min=1, help="Ranks that share every expert.")] = 1,
    ep: Annotated[int, typer.Option(min=1, help="Ranks that divide the experts.")] = 1,
) -> None:
    """Print the floor and the predicted time of layers on an H200, and how they grow.

    Measures nothing and needs no GPU. Tokens are those of all ranks together; what ranks send one
    another isn't counted.
    """
    from .growth import growth, over_tokens
    from .shapes import GPU_TOKENS

    console = _console()
    options = {"scheme": scheme, "routing": routing, "tp": tp, "ep": ep}
    counts = tokens_of(tokens, GPU_TOKENS)
    for shape in shapes_of(shapes, True):
        try:
            tables = over_tokens(shape, counts, **options), growth(shape, counts, **options)
        except ValueError as error:
            raise typer.BadParameter(said_by("predict", error)) from error
        for table in tables:
            console.print(table.as_rich())


@app.command("report")
def report(
    results: Annotated[list[Path], typer.Argument(help="results.json, of one machine.")],
    out: Annotated[Path | None, typer.Option(help="Folder for pictures and the page.")] = None,
    backend: Backend = None,
    recorded: Annotated[
        list[Path] | None, typer.Option(help="Peers measured before, instead of those shipped.")
    ] = None,
) -> None:
    """Show results again: tables here, and with --out pictures and one HTML page.

    Takes files of tmoe bench and of pytest-benchmark.
    """
    from .cases import OURS
    from .records import read_recorded, read_results
    from .report import Report, why_no_pictures

    if backend not in (None, *OURS):
        raise typer.BadParameter(f"--backend: {backend} is none of {', '.join(OURS)}")
    try:
        peers = read_recorded(recorded) if recorded else read_recorded()
        read = read_results(results)
        ran = {bench["extra_info"].get("backend") for bench in read["benchmarks"]}
        backend = backend or next((name for name in OURS if name in ran), OURS[0])
        found = Report(read, backend, peers)
    except ValueError as error:
        raise typer.BadParameter(said_by("bench", error)) from error
    if not found.tables:
        wanted = f"no layer that the {backend} backend ran, and no operation with a peer"
        raise typer.BadParameter(f"{', '.join(map(str, results))} has {wanted}")
    if out is not None:
        _make(out)
    console, err = _console(), Console(stderr=True)
    _show(found, console)
    if out is not None:
        _write(found, out, console, err, why_no_pictures())


@app.command("compare")
def compare(
    before: Annotated[Path, typer.Argument(help="results.json of before.")],
    after: Annotated[Path, typer.Argument(help="results.json of after.")],
    everything: Annotated[bool, typer.Option("--all", help="Also what didn't change.")] = False,
    fail_above: Annotated[
        float | None, typer.Option(min=0, help="Exit with 1 if a cell is slower by more, in %.")
    ] = None,
) -> None:
    """Say which times changed beyond noise, slowest first.

    A cell counts as changed if its medians differ by more than the spreads of both, (slowest -
    fastest round) / median, together, and by more than 2 %.
    """
    from .changes import changes, changes_table
    from .records import read_results

    try:
        found = changes(read_results([before]), read_results([after]))
    except ValueError as error:
        raise typer.BadParameter(said_by("bench", error)) from error
    if not found.cells:
        raise typer.BadParameter(f"{before} and {after} have no cell in common")
    console = _console()
    for remark in found.remarks:
        console.print(remark, **PLAIN, style="yellow")
    if found.real or everything:
        console.print(changes_table(found, everything=everything).as_rich())
    same = len(found.cells) - len(found.real)
    slower = sum(cell.ratio > 1 for cell in found.real)
    console.print(
        f"{slower} slower, {len(found.real) - slower} faster, {same} the same; "
        f"geometric mean of after / before: {found.mean_ratio:.3f}",
        highlight=False,
        markup=False,
    )
    for name, groups in (("before", found.only_before), ("after", found.only_after)):
        if groups:
            console.print(f"only {name}: {', '.join(dict.fromkeys(groups))}", **PLAIN)
    too_slow = fail_above is not None and found.slower_than(fail_above)
    raise typer.Exit(1 if too_slow else 0)


def _with_progress(
    measure: Any, selection: Any, device: Any, dtype: Any, err: Console
) -> Iterable[Any]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    )  # fmt: skip
    command = " ".join(["tmoe", *sys.argv[1:]])
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task("", total=len(selection))

        def show(name: str) -> None:
            bar.update(task, description=name)

        for found in measure(selection, device, dtype, command, show):
            bar.advance(task)
            yield found


def _make(folder: Path) -> bool:
    """Have a folder that can be written; whether it wasn't there."""
    from ..doctor import why_not_writable

    is_new = not folder.exists()
    problem = why_not_writable(folder)
    if problem is not None:
        raise typer.BadParameter(f"--out: {folder} can't be written: {problem}")
    return is_new


def _console() -> Console:
    """As wide as the widest table: lines may break in a narrow terminal, but no number is cut."""
    return Console(width=max(WIDTH, Console().width))


def _show(report: Any, console: Console) -> None:
    for table in report.tables:
        console.print(table.as_rich())
    for fact in report.facts:
        console.print(fact, **PLAIN)


def _write(report: Any, out: Path, console: Console, err: Console, why_not: str | None) -> None:
    from .records import picture_cells

    if why_not is not None:
        err.print(why_not, style="yellow", **PLAIN)
        return
    for path in report.write(out):
        console.print(f"written: {path}", **PLAIN, soft_wrap=True)
    if report.cells and not picture_cells(report.cells):
        err.print("no pictures: they are of random routing", style="yellow", **PLAIN)
