"""Write docs/support-matrix.md, from tests' results: python -m tests.integrations.support_matrix

A test whose mark is ``@pytest.mark.column(name)`` and that has a row among its parameters (a
`Family`, a `Wrapper`, the name of one, or the name of a scheme) makes one cell: "yes" if it passes,
a note with its reason if it skips. Where several tests make one cell, all of them have to pass. To
add a column: name it in `COLUMNS` (or `SCHEME_COLUMNS`), mark the test, run this module. It writes
nothing while a test fails.

The marked tests compare their result with the page whenever they run (`conftest.py`), so a page
that lags behind fails the suite.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.integrations.families import BY_NAME
from tests.integrations.wrappers import WRAPPERS
from tests.routing.case import PINNED
from tmoe.checkpoints.write_formats import METHODS
from tmoe.formats import SCHEMES
from tmoe.integrations.transformers.families import LEFT_ALONE
from tmoe.integrations.transformers.router_kinds import LEFT_ALONE as ROUTERS_LEFT_ALONE

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "support-matrix.md"
FOLDERS = ["tests/integrations"]  # where the marked tests are

COLUMNS = {
    "experts": "`tmoe.replace_moe`: the experts of every MoE layer run on tmoe; the fp32 logits "
    "differ by at most 1e-5 of their scale, or by what transformers' own two implementations do",
    "router": "`tmoe.replace_moe`: the routers run on tmoe too, and return what they returned",
    "interface": '`from_pretrained(..., experts_implementation="tmoe")` loads and runs the model',
    "bf16": "in bf16 the error against fp32 is at most twice that of transformers' eager experts",
    "generation": "greedy decoding in fp32 gives the same tokens",
    "training": "gradients of all parameters, within twice the error of transformers' own",
    "save and load": "`save_pretrained` writes the same bytes before and after replacing",
    "restore": "`report.restore()` gives the model back, bit for bit",
    "quantised": '`tmoe.replace_moe(model, "fp8_channel")`: the experts\' weights become what '
    "`tmoe.quantize` makes of them, and all other weights stay",
    "on disk": "`tmoe quantize` of its checkpoint, as transformers saves it, to fp8_channel; "
    "`tmoe.from_pretrained` loads that, and the outputs are those of the model quantised in place, "
    "bit for bit",
    "saved": "`save_pretrained` of the model quantised in place writes the files that "
    "`tmoe quantize` writes",
    "loaded": "`tmoe.from_pretrained` of a checkpoint whose linear layers, each expert's too, "
    "compressed-tensors quantised to FP8 (MXFP4 for gpt-oss); the outputs are those of the model "
    "with the weights that it stands for",
}
SCHEME_COLUMNS = ["quantised", *METHODS, "saved", "loaded"]
ROWS = [*sorted(BY_NAME), *sorted(wrapper.name for wrapper in WRAPPERS), *SCHEMES]

INTRO = """\
# Which models run on tmoe

Every Mixture-of-Experts family of transformers {version}, as a tiny random model in fp32. A cell
is the result of a test; `python -m tests.integrations.support_matrix` runs them and writes this
page. The tests are in `tests/integrations/`: `test_families.py`, `test_training.py`,
`test_wrappers.py`, `test_quantized_families.py`, `test_quantize_model.py`,
`test_save_quantized.py`, `test_from_pretrained.py` and `test_from_pretrained_fused.py`.

"""
WRAPPED = """\

## Models around these

What contains one of the models above, such as a vision-language model, and where that test looks
for every MoE layer. The other columns are those of the model inside.

"""
BY_SCHEME = """\

## Schemes

The ways of a scheme's weights into a model, each with one model of transformers:

* {formats}: `tmoe quantize` writes this format and `tmoe.from_pretrained` loads it,
with the outputs of the model quantised in place; where a cell is empty, the format can't say it.
* **loaded**: from what compressed-tensors wrote; the experts compute what the scheme says.

The other columns are those of the first table.

"""
ALONE = """\

## Left alone

What `tmoe.replace_moe` meets and leaves to transformers, with the reason that its report gives.

| class | why |
| --- | --- |
"""

Cell = tuple[str, str]  # row, column


def cell_of(item: pytest.Item) -> Cell | None:
    """The cell that a test makes, if it makes one."""
    mark = item.get_closest_marker("column")
    if mark is None:
        return None
    (column,) = mark.args
    rows = [_row(value) for value in item.callspec.params.values()]  # type: ignore[attr-defined]
    (row,) = (row for row in rows if row is not None)
    columns = SCHEME_COLUMNS if row in SCHEMES else COLUMNS
    assert column in columns, f"{item.nodeid}: {row} has no column {column!r}"
    return row, column


def _row(value: Any) -> str | None:
    name = getattr(value, "name", value)
    return name if isinstance(name, str) and name in ROWS else None


def result_of(report: pytest.TestReport) -> str | None:
    """ "yes", the reason of a skip, or None for what fails and what isn't the test itself."""
    if report.skipped and isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    return "yes" if report.when == "call" and report.passed else None


class Results:
    """A plugin of pytest: the cells, as the tests make them."""

    def __init__(self) -> None:
        self.cells: dict[Cell, set[str]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        cell, result = cell_of(item), result_of(report)
        if cell is not None and result is not None:
            self.cells.setdefault(cell, set()).add(result)
        return report


def page(cells: dict[Cell, set[str]]) -> str:
    notes: list[str] = []

    def shown(cell: Cell) -> str:
        results = cells.get(cell, set()) - {"yes"}
        if not results:
            return "yes" if cell in cells else ""
        for reason in sorted(results - set(notes)):
            notes.append(reason)
        return " ".join(f"[{notes.index(reason) + 1}]" for reason in sorted(results))

    def table(rows: list[str], columns: list[str], first: str) -> list[str]:
        lines = [f"| {first} | " + " | ".join(columns) + " |"]
        lines.append("| --- |" + " --- |" * len(columns))
        for row in rows:
            lines.append(f"| `{row}` | " + " | ".join(shown((row, c)) for c in columns) + " |")
        return lines

    columns = list(COLUMNS)
    lines = [INTRO.format(version=transformers.__version__)]
    lines += [f"* **{name}**: {meaning}." for name, meaning in COLUMNS.items()]
    lines += ["", *table(sorted(BY_NAME), columns, "model type")]
    used = [c for c in columns if any((w.name, c) in cells for w in WRAPPERS)]
    lines += [WRAPPED, *table(sorted(w.name for w in WRAPPERS), used, "model type")]
    formats = ", ".join(f"**{method}**" for method in METHODS)
    lines += [BY_SCHEME.format(formats=formats), *table(list(SCHEMES), SCHEME_COLUMNS, "scheme")]
    lines += ["", *(f"[{i}] {note}  " for i, note in enumerate(notes, 1))]
    lines += [ALONE.rstrip("\n")]
    lines += [f"| `{name}` | {why} |" for name, why in (LEFT_ALONE | ROUTERS_LEFT_ALONE).items()]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + "\n"


def read_page() -> dict[Cell, set[str]]:
    """What the page says of each cell: "yes", or reasons; nothing where it is empty."""
    text = PAGE.read_text() if PAGE.exists() else ""
    notes = dict(re.findall(r"^\[(\d+)\] (.*?) *$", text, re.MULTILINE))
    cells, columns = {}, []
    for line in text.splitlines():
        head, *rest = [word.strip() for word in line.strip("|").split("|")]
        if head in ("model type", "scheme"):
            columns = rest
        elif (row := head.strip("`")) in ROWS and columns:
            for column, word in zip(columns, rest, strict=True):
                marks = re.findall(r"\[(\d+)\]", word)
                cells[row, column] = {notes[mark] for mark in marks} or {word} - {""}
    return cells


def main() -> int:
    if not PINNED:
        print("the page is about the transformers that constraints.txt pins")
        return 1
    results = Results()
    code = pytest.main(["-q", "-m", "column", "-n", "0", *FOLDERS], plugins=[results])
    if code == pytest.ExitCode.OK:
        PAGE.write_text(page(results.cells))
    return int(code)


if __name__ == "__main__":
    from tests.integrations import support_matrix  # the module that conftest.py imports

    sys.exit(support_matrix.main())
