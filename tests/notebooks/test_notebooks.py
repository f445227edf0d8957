"""Each notebook runs, says what is committed, and shows pictures that aren't empty.

What changes is written again by `python -m tools.write_notebooks`.
"""

from __future__ import annotations

import base64
import re
from io import BytesIO

import pytest
import torch
from matplotlib.image import imread

from tests.notebooks.folder import NOTEBOOKS, SOURCES, committed, outputs
from tools.write_notebooks import execute, read_source, running_kernel, written

NUMBER = re.compile(r"(?<![\w.])\d+\.\d+(?:e[+-]?\d+)?")  # with a point: it was rounded
AGAIN = "if that is intended: python -m tools.write_notebooks"
MACHINE = re.compile(r"/(home|root|tmp|usr|work)/|site-packages|0x[0-9a-f]{6}")


@pytest.fixture(scope="module")
def kernel():
    with running_kernel() as kernel:
        yield kernel


def assert_same_text(got: str, wanted: str) -> None:
    """Equal; but in its last digit a rounded number may differ by one, as another CPU adds up in
    another order."""
    assert NUMBER.sub("#", got) == NUMBER.sub("#", wanted), AGAIN
    for one, other in zip(NUMBER.findall(got), NUMBER.findall(wanted), strict=True):
        mantissa, _, exponent = other.partition("e")
        step = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
        assert float(one) == pytest.approx(float(other), abs=1.01 * step), AGAIN


@pytest.mark.parametrize(
    "got", ["4 rows, 0.52 of 1.0", "3 rows, 0.54 of 1.0", "3 rows, 0.52 of 1.0, more", "3 rows"]
)
def test_a_change_is_noticed(got):
    assert_same_text("3 rows, 0.53 of 1.0", "3 rows, 0.52 of 1.0")  # another CPU
    with pytest.raises(AssertionError):
        assert_same_text(got, "3 rows, 0.52 of 1.0")


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_notebook_says_what_is_committed(source, kernel):
    """On a GPU it only has to run: it names the GPU, and measures."""
    got, wanted = execute(read_source(source), kernel), committed(source.name[:2])
    if torch.cuda.is_available():
        return
    assert [cell.source for cell in got.cells] == [cell.source for cell in wanted.cells], AGAIN
    shown, before = list(outputs(got)), list(outputs(wanted))
    assert [line[0] for line in shown] == [line[0] for line in before], AGAIN
    for (_, text, picture), (_, text_before, _) in zip(shown, before, strict=True):
        assert_same_text(text, text_before)
        if picture is not None:
            pixels = imread(BytesIO(base64.b64decode(picture)), format="png")
            assert pixels[..., 3].max() > 0.9 and pixels[..., 3].min() == 0, (
                "empty, or not see-through"
            )


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_outputs_are_the_same_on_every_machine(source):
    """No errors, warnings, paths or addresses; pictures say in words what they show."""
    notebook = committed(source.name[:2])
    for _, text, picture in outputs(notebook):
        assert not MACHINE.search(text)
        assert picture is None or text.startswith("[picture: ")
    kinds = {o.get("name", o.output_type) for c in notebook.cells for o in c.get("outputs", ())}
    assert kinds <= {"stdout", "display_data"}


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_every_notebook_begins_and_ends_alike(source):
    cells = read_source(source).cells
    number = int(source.name[:2])
    assert cells[0].source.startswith(f"# {number} · ")
    assert "Needs" in cells[1].source and "lesson.start(" in cells[1].source
    words = "".join(cell.source for cell in cells if cell.cell_type == "markdown")
    links = re.findall(r"\]\(([^)]+)\)", re.sub("`[^`]+`", "", words))
    local = [link for link in links if not link.startswith("https://")]
    assert not [link for link in local if not (NOTEBOOKS / link.partition("#")[0]).exists()]
    assert 2 <= sum("lesson.check(" in c.source for c in cells) <= 3
    assert any(picture for _, _, picture in outputs(committed(source.name[:2])))


def test_nothing_is_left_over():
    assert sorted(NOTEBOOKS.glob("*.ipynb")) == sorted(map(written, SOURCES))
    assert [int(source.name[:2]) for source in SOURCES] == list(range(1, len(SOURCES) + 1))
