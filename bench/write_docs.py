"""Write docs/performance.md and the pictures in it from what is recorded:

    python -m bench.write_docs

Everything in the page is read from bench/results/*.json, computed by the cost model, or said here.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.product_tables import product_table, where_a_step_goes
from bench.training_tables import training_tables
from tmoe.bench.cost_model import FITTED, fitted
from tmoe.bench.growth import growth, over_tokens
from tmoe.bench.records import Cell, picture_cells, read_results
from tmoe.bench.report import Report
from tmoe.bench.shapes import SHAPES
from tmoe.bench.tables import Grid, Row, standing_table

Json = dict[str, Any]
ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
PICTURES = RESULTS / "plots"
PAGE = ROOT / "docs" / "performance.md"

# File, heading, and the schemes whose pictures are shown; files that aren't there are left out.
SECTIONS = (
    ("h200_beside.json", "Routed experts, bf16", ("bfloat16",)),
    ("h200_beside_fp8.json", "FP8 weights", ("fp8_block",)),
    ("h200_shapes.json", "More models, bf16", ("bfloat16",)),
    ("h200_routings.json", "Skewed routing", ()),
    ("h200_tokens.json", "Every power of two of tokens", ("bfloat16",)),
    ("h200_quantized.json", "FP4 weights", ("mxfp4_a16",)),
    ("h200_operations.json", "Single operations", ()),
)
IN_TURN = ("h200_beside.json", "h200_beside_fp8.json")  # with peers, a round of each in turn
NOBODY = {"rows": [], "provenance": "none; those here ran in turn with tmoe"}  # recorded before
TOGETHER = ("bfloat16", "fp8_block", "fp8_channel", "fp8_tensor")
STARTUP = RESULTS / "h200_startup.json"
DECODE = RESULTS / "h200_decode_step.json"
HOST = RESULTS / "h200_host_time.json"
TRAINING = RESULTS / "h200_training.json"
PRODUCTS = RESULTS / "h200_training_products.json"

INTRO = """# Performance

Made by `python -m bench.write_docs` from the files in [bench/results](../bench/results); what a
number means, and how it was measured, stands in [bench/README.md](../bench/README.md). In short: a
call is checked, then timed by the GPU's own clock in a CUDA graph, with tokens and routes of its
own, so that its weights come from memory. The *floor* is the larger of necessary bytes over
bandwidth and of flops over peak, both measured. *Predicted* is the [cost model](#cost-model).

```console
$ tmoe bench mixtral-8x7b --tokens 1,1024 --backends triton,grouped_mm   # on your GPU
$ tmoe bench report bench/results/h200_beside.json --out report          # these tables, as one page
```
"""

DECODING = """## A decode step of a model of transformers

Qwen3-30B-A3B's layers with random weights in bf16, one token for each of T sequences, attention
included. Called as Python calls it, most of the time is the host's, and that of transformers' own
modules; as a CUDA graph, or compiled, only the GPU's counts.
"""

CALLING = """## What a call costs the host

The router and the experts of one of its layers, one token, without waiting for the GPU. The first
call of a kind is launched by Triton; later ones with tensors of the same shapes, strides, dtypes
and alignment replay its launches ([replay.py](../kernels/replay.py)).
"""

BESIDE = """## Beside others

A cell is a layer with weights of one kind and a number of tokens. A speedup is a peer's time over
tmoe's, so above 1 tmoe is faster; the best peer is whichever is fastest in that cell. Everybody was
timed in one process, a round of each in turn: vLLM's Triton kernels (tuned, where it has a table
for the layer), its CUTLASS experts, and DeepGEMM and triton_kernels as it vendors them
([adapters](../bench/README.md#peers)).
"""

TRAINED = """## Training: forward and backward

Routed experts in bf16 with all gradients: of x, the routing weights and both weights. They are
checked against fp64 before a step is timed, a peer's to within 8 times torch's error: as a CUDA
graph, or call by call where a layer waits for the GPU, as Liger's and ScatterMoE's do.
*Activations* is the most that it holds beside its inputs and the weights' gradients; *recomputed*
is with `tmoe.options(recompute=True)`, which doesn't change the most that one layer holds: it saves
what every layer of a model keeps until its backward ([memory](training.md#memory)). A step has
18·T·K·H·I flops, whatever is computed twice.
"""

PRODUCTS_ALONE = """### Its products, one by one

Each as a launch of its own, checked, beside torch's dense matmul of as many numbers and its grouped
GEMM: with the tile that was in use when it was recorded, and with the fastest that was tried. Then
those of adapters of rank 16, and of the gradient through codes.

*gate_up* and *down* are the forward's, *d_activated* (dy · down) and *d_rows* (d_hidden · gate_up)
go back to their inputs, *d_down* and *d_gate_up* are the weights' gradients; A and B are an
adapter's. *Gathered*: rows are fetched by token while they are loaded; *permuted*: they stood in
expert order before, and that copy isn't timed. *With*: rows, columns and depth of a tile (of a
weight's gradient: its two sides, and rows at a time), warps, stages, tiles that go along together.

The clock of the GPU moves a time by some per cent: a tile is taken into use where the products that
it is for gain 3 %, at every number of tokens that was recorded.
"""

MODEL = """## Cost model

`tmoe bench --predict qwen3-30b-a3b` prints what a layer should take on an H200, and how that grows.
The formulas stand in [cost_model.py](../tmoe/bench/cost_model.py): both projections load and
multiply at once, more or less, and around them are the time to launch four kernels and the bytes of
the combine. How many experts are touched and how many rows computed, padding included, follows from
how tokens choose ([loads.py](../tmoe/bench/loads.py)). Five numbers per scheme are fitted to the
records above, by `python -m bench.fit_cost_model`. It holds for the kernels that were recorded, on
the GPU that they ran on, and leaves out what ranks send one another.
"""


def sections() -> Iterator[str]:
    """The page, part by part."""
    yield INTRO
    yield f"{BESIDE}\n{standing_table(compared(), TOGETHER).as_markdown()}"
    for name, heading, schemes in SECTIONS:
        if (RESULTS / name).exists():
            yield from section(name, heading, schemes)
    if STARTUP.exists():
        yield startup()
    if DECODE.exists():
        yield from decode_step()
    if HOST.exists():
        yield from host_time()
    if TRAINING.exists():
        yield from training()
    yield MODEL
    yield fits().as_markdown()
    for shape in ("qwen3-30b-a3b", "deepseek-v3"):
        for table in (over_tokens, growth):
            yield table(SHAPES[shape], (1, 16, 128, 1024, 8192)).as_markdown()


def reported(name: str) -> Report:
    """What a recorded file says. Those that have peers are compared with nobody else's record."""
    results = read_results([RESULTS / name])
    recorded = NOBODY | {"device": results["machine_info"]["device"], "dtype": None}
    return Report(results, "triton", recorded if name in IN_TURN else None)


def compared() -> list[Cell]:
    """The layers that were measured in turn with peers."""
    return [cell for name in IN_TURN for cell in reported(name).cells if cell.peers]


def section(name: str, heading: str, schemes: tuple[str, ...]) -> Iterator[str]:
    """A recorded file: where it was made and how, its tables, its pictures."""
    report = reported(name)
    yield f"## {heading}"
    facts = [fact for fact in report.facts if not fact.startswith(report.results["command"])]
    yield f"Recorded in [{name}](../bench/results/{name}) with"
    yield from typed(report.results["command"])
    yield "\n".join(f"* {fact}" for fact in facts)
    for table in report.tables:
        yield table.as_markdown()
    names = shown(report, schemes)
    if names:
        folder = f"../bench/results/plots/{_folder(name)}"
        yield "\n".join(f"![{text}]({folder}/{text}.png)" for text in names)


def typed(command: str) -> Iterator[str]:
    """The commands of a record, and what it says besides."""
    commands, _, besides = command.partition("; ")
    lines = commands.replace(" && ", "\n$ ")
    yield f"```console\n$ {lines}\n```"
    if besides:
        yield f"{besides[0].upper()}{besides[1:]}."


def shown(report: Report, schemes: tuple[str, ...]) -> list[str]:
    """The names of the pictures that the page has of a record."""
    named = picture_cells(report.cells)
    return [name for name, cells in named.items() if cells[0].scheme in schemes]


def _folder(name: str) -> str:
    return name.removeprefix("h200_").removesuffix(".json")


def fits() -> Grid:
    """The five numbers of each scheme, and the largest error on the recorded cells."""
    found = json.loads(FITTED.read_text(encoding="utf-8"))
    rows = []
    for scheme, fit in fitted().items():
        parts = (f"{100 * part:.0f} %" for part in (fit.reach_memory, fit.reach_arithmetic))
        texts = (scheme, f"{fit.start_us:.1f}", *parts, f"{fit.overlap:.2f}", f"{fit.ramp:.0f}")
        rows.append(Row((*texts, f"{100 * found['largest_error'][scheme]:.0f} %")))
    columns = ("scheme", "start, µs", "of bandwidth", "of peak", "overlap", "ramp", "largest error")
    title = f"fitted to {', '.join(Path(record).name for record in found['records'])}"
    return Grid(title, columns, tuple(rows))


def startup() -> str:
    """What the first calls take."""
    found = json.loads(STARTUP.read_text(encoding="utf-8"))
    names = {
        "import_s": "`import tmoe`, beyond torch",
        "warm_first_call_s": "first call, with a warm Triton cache",
        "cold_first_call_s": "first call, with an empty one",
        "cold_all_s": "everything compiled that a layer needs for 1 to 16384 tokens",
    }
    rows = tuple(Row((text, f"{found[name]:.2f}")) for name, text in names.items())
    grid = Grid(f"{found['shape']}, seconds", ("", "s"), rows)
    return f"## First calls\n\n```console\n$ {found['command']}\n```\n\n{grid.as_markdown()}"


def decode_step() -> Iterator[str]:
    """What a whole model takes for a token, eagerly and captured."""
    found = json.loads(DECODE.read_text(encoding="utf-8"))
    yield DECODING
    yield f"```console\n$ {found['command']}\n```"
    rows = tuple(
        Row(
            (row["experts"], str(row["tokens"]), f"{row['eager_ms']:.2f}", f"{row['graph_ms']:.3f}")
        )
        for row in found["rows"]
    )
    columns = ("experts", "T", "eager, ms", "CUDA graph, ms")
    title = f"{found['layers']} layers, {found['machine_info']['device']}"
    yield Grid(title, columns, rows).as_markdown()


def training() -> Iterator[str]:
    """A step of the experts beside peers'."""
    found = json.loads(TRAINING.read_text(encoding="utf-8"))
    yield TRAINED
    yield from typed(found["command"])
    yield from training_tables(found)
    if PRODUCTS.exists():
        products = json.loads(PRODUCTS.read_text(encoding="utf-8"))
        yield PRODUCTS_ALONE
        yield from typed(products["command"])
        yield product_table(products).as_markdown()
        yield from where_a_step_goes(found, products)


def host_time() -> Iterator[str]:
    """What the host takes for a call, by each way that there is."""
    found = json.loads(HOST.read_text(encoding="utf-8"))
    yield CALLING
    yield f"```console\n$ {found['command']}\n```"
    rows = tuple(Row((row["call"], row["way"], f"{row['us']:.0f}")) for row in found["rows"])
    title = f"The host of an {found['machine_info']['device']}"
    yield Grid(title, ("call", "way", "µs"), rows).as_markdown()


def page() -> str:
    return "\n\n".join(part.strip() for part in sections()) + "\n"


def draw() -> Iterator[Path]:
    """The pictures that the page shows, and no others."""
    from tmoe.bench.plots import save_png

    shutil.rmtree(PICTURES, ignore_errors=True)
    for name, _, schemes in SECTIONS:
        if (RESULTS / name).exists() and schemes:
            report = reported(name)
            figures, folder = report.pictures(), PICTURES / _folder(name)
            folder.mkdir(parents=True)
            for picture in shown(report, schemes):
                save_png(figures[picture], folder / f"{picture}.png")
                yield folder / f"{picture}.png"


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE.relative_to(ROOT))
    for path in draw():
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
