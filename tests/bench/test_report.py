"""What is read from files, and what tables, pictures and the page make of it."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from bench import write_docs
from tests.bench.results import H200, layer, results, write
from tmoe.bench.cost_model import predict
from tmoe.bench.plots import INK, as_svg, time_over_tokens
from tmoe.bench.records import PEER_LAYERS, read_cells, read_recorded, read_results
from tmoe.bench.report import Report, why_no_pictures
from tmoe.bench.shapes import SHAPES
from tmoe.bench.tables import Grid, Row
from tmoe.formats import SCHEMES

RECORDS = Path(__file__).parents[2] / "bench" / "results"


def lines(grid):
    return [" ".join(" ".join(row.texts).split()) for row in grid.rows]


def test_recorded_peers_are_complete():
    counts = (6 * 5 * 3, 2 * (6 * 5 + 6 * 3) + 5 * 5 * 2 + 12 + 5 * 2)
    for path, count in zip(PEER_LAYERS, counts, strict=True):
        recorded = json.loads(path.read_text())
        rows = recorded["rows"]
        cells = {(row.get("scheme"), row["shape"], row["tokens"], row["peer"]) for row in rows}
        assert len(cells) == len(rows) == count
        assert {row["shape"] for row in rows} <= SHAPES.keys()
        assert {row["peer"] for row in rows} == recorded["peers"].keys()
        assert {row["scheme"] for row in rows if "scheme" in row} <= SCHEMES.keys()


def test_recorded_and_measured_peers_are_read():
    found = results(
        layer("mixtral-8x7b", 1, "triton", 200.0),
        layer("mixtral-8x7b", 1, "vllm", 250.0),  # recorded: 186.4
        layer("mixtral-8x7b", 1, "torch", 1.0),  # ours too, so no peer
        {"extra_info": {"operation": "route"}},
    )
    (cell,) = read_cells(found, read_recorded(), "triton")
    assert cell.peers == {"vllm": 250.0, "grouped_mm": 383.7, "triton_kernels": 219.9}
    assert cell.best_peer == "triton_kernels" and not cell.loses
    assert cell.speedup == pytest.approx(219.9 / 200)
    assert cell.intensity == 100
    assert cell.predicted_us == predict(SHAPES["mixtral-8x7b"], 1).us


def test_schemes_and_routings_are_kept_apart():
    """The same shape and tokens with FP8 blocks meet FP8 blocks: FlashInfer's 113 here. Peers were
    recorded under random routing only."""
    found = results(
        layer("mixtral-8x7b", 1, "triton", 100.0, scheme="fp8_block"),
        layer("mixtral-8x7b", 1, "triton", 200.0),
        layer("mixtral-8x7b", 1, "triton", 150.0, routing="zipf"),
    )
    cells = read_cells(found, read_recorded(), "triton")
    assert [cell.scheme for cell in cells] == ["bfloat16", "bfloat16", "fp8_block"]
    assert [cell.best_peer for cell in cells] == ["vllm", None, "flashinfer"]
    assert cells[2].speedup == pytest.approx(113 / 100, abs=0.01)


def test_no_record_of_another_device_is_taken():
    found = results(
        layer("mixtral-8x7b", 1, "triton", 200.0, device="NVIDIA L4"), device="NVIDIA L4"
    )
    (cell,) = read_cells(found, read_recorded(), "triton")
    assert cell.peers == {} and cell.speedup is None and not cell.loses
    assert cell.predicted_us is None
    assert "left out, since this is another device" in Report(found, "triton").facts[-1]


def test_the_table_says_who_wins():
    """One cell that wins by 186.4 / 93.2 = 2 and one that loses by 663.2 / 1326.4 = 0.5."""
    found = results(
        layer("mixtral-8x7b", 1, "triton", 93.2, floor_us=46.6),
        layer("mixtral-8x7b", 16, "triton", 1326.4, floor_us=648.0),
        layer("olmoe", 1, "triton", 60.0),
    )
    report = Report(found, "triton")
    layers, everybody, means = report.tables
    first, second = (f"{predict(SHAPES['mixtral-8x7b'], T).us:.1f}" for T in (1, 16))
    assert f"mixtral-8x7b 1 46.6 93.2 50 100 1000 {first} vllm 186.4 2.00" in lines(layers)
    assert f"mixtral-8x7b 16 648.0 1326 49 100 1000 {second} vllm 663.2 0.50 ✗" in lines(layers)
    assert [row.marked for row in layers.rows] == [False, True, False]
    assert lines(everybody) == [
        "mixtral-8x7b 1 93.2 * 383.7 219.9 186.4",
        "mixtral-8x7b 16 1326 1072 706.3 663.2 *",
    ]
    assert "over the best 2.00 0.50 1.00" in lines(means)
    assert "a peer is faster in 1 of 2 cells" in report.facts
    assert report.facts[0] == (
        "NVIDIA H200, driver 580.1; torch 2.11.0, tmoe 0.1, commit abc123, kernels f00d"
    )


def test_operations_stand_beside_their_peer():
    """vLLM's 1.8 over 0.9 is 2; a group without a record and another backend are left out."""
    mine = []
    for group, backend in (
        ("route Renormalize mixtral-8x7b T=1", "triton"),
        ("route Renormalize mixtral-8x7b T=64", "torch"),
        ("route Renormalize unknown T=1", "triton"),
    ):
        info = {"backend": backend, "device": H200, "us": 0.9, "floor_us": 0.09}
        mine.append({"group": group, "extra_info": info})
    (grid,) = Report(results(*mine), "triton").tables
    assert lines(grid) == ["route Renormalize mixtral-8x7b T=1 0.1 0.90 10 1.80 2.00"]


def test_skew_is_told_per_flop():
    """The flops of a layer don't depend on its routing: 110 over 100 µs is 1.10."""
    times = {"balanced": 100.0, "zipf": 110.0, "one_expert": 95.0}
    found = results(*(layer("olmoe", 8192, "triton", us, routing=r) for r, us in times.items()))
    *_, skew = Report(found, "triton").tables
    assert skew.columns[-2:] == ("zipf", "one_expert")
    assert lines(skew) == ["olmoe bfloat16 8192 100.0 1.10 0.95"]


def test_a_grid_as_markdown():
    grid = Grid("what", ("a", "b"), (Row(("x", "1")),))
    assert grid.as_markdown() == "**what**\n\n| a | b |\n| --- | ---: |\n| x | 1 |"


def test_files_that_do_not_belong_together_are_refused(tmp_path):
    here = Path(write(tmp_path / "a.json", results()))
    other = Path(write(tmp_path / "b.json", results(device="NVIDIA L4")))
    with pytest.raises(ValueError, match="b.json must be of NVIDIA H200, got NVIDIA L4"):
        read_results([here, other])
    (tmp_path / "c.json").write_text("{}")
    with pytest.raises(
        ValueError, match="c.json must be results of tmoe bench or pytest-benchmark"
    ):
        read_results([tmp_path / "c.json"])
    (tmp_path / "d.json").write_text("{")
    with pytest.raises(ValueError, match="d.json can't be read"):
        read_results([tmp_path / "d.json"])
    assert len(read_results([here, here])["benchmarks"]) == 0


class Tags(HTMLParser):
    """Attributes of all tags, and that tags close in order."""

    VOID = {"meta", "br", "link", "img", "input", "hr"}

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.links = [], [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Everything that is made of a recorded file and something with a name that must be escaped."""
    folder = tmp_path_factory.mktemp("report")
    found = read_results([RECORDS / "h200_beside.json"])
    found["skipped"] = {"peer <b>": "needs a & b"}
    paths = [*Report(found, "triton").write(folder)]
    return {path.name: path for path in paths}


def test_the_page_needs_no_other_file(written):
    text = written["report.html"].read_text()
    page = Tags()
    page.feed(text)
    page.close()
    assert not page.open
    assert page.links and all(link.startswith("#") for link in page.links)
    assert not re.search(r"url\((?!#)|@import|<script", text)
    assert page.seen.count("svg") == 1 + 7 and page.seen.count("table") == 3
    assert "peer &lt;b&gt;" in text and "needs a &amp; b" in text
    assert "prefers-color-scheme: dark" in text and INK not in text.split("</style>")[1]
    for fact in ("driver 580.159.04", "torch 2.11.0+cu130", "mixtral-8x7b"):
        assert fact in text


def test_there_is_a_picture_per_layer_and_a_roofline(written):
    names = {f"{name}.png" for name in ("roofline", "mixtral-8x7b", "olmoe", "deepseek-v3-tp8")}
    assert names < written.keys() and len(written) == 1 + 7 + 1
    assert all(path.stat().st_size > 5000 for path in written.values())


def test_a_picture_has_everybody_in_it():
    found = read_results([RECORDS / "h200_beside.json"])
    cells = [c for c in read_cells(found, read_recorded(), "triton") if c.shape == "mixtral-8x7b"]
    text = as_svg(time_over_tokens(cells))
    for name in ("floor", "predicted", "grouped_mm", "triton_kernels", "vllm", "tmoe", "8192"):
        assert f">{name}</text>" in text
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", text)


@pytest.mark.parametrize("slowest, numbers", [(150.0, {20, 50, 100}), (5e4, {100, 1e3, 1e4})])
def test_a_picture_has_numbers_on_its_axis(slowest, numbers):
    """Powers of ten where there are several; one alone would leave the scale open."""
    found = results(*(layer("tiny", T, "triton", us, floor_us=us / 2, device="CPU")
                      for T, us in ((1, 60.0), (16, slowest))))  # fmt: skip
    axes = time_over_tokens(read_cells(found, read_recorded(), "triton")).axes[0]
    low, high = axes.get_ylim()
    assert {tick for tick in axes.yaxis.get_majorticklocs() if low <= tick <= high} == numbers


def test_what_pictures_need_is_one_sentence():
    assert why_no_pictures(("sys", "json")) is None
    said = "no pictures and no page without no_such_package: pip install 'tmoe[bench]'"
    assert why_no_pictures(("sys", "no_such_package")) == said


def test_the_page_in_docs_is_what_its_script_writes():
    """Whoever records anew writes anew: python -m bench.write_docs."""
    assert write_docs.PAGE.read_text() == write_docs.page()
    shown = re.findall(r"!\[.*?\]\((.*?)\)", write_docs.PAGE.read_text())
    pictures = {write_docs.PAGE.parent / name for name in shown}
    assert len(pictures) == len(shown) > 15
    assert {path.resolve() for path in pictures} == {*write_docs.PICTURES.rglob("*.png")}
