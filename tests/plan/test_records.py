"""`tmoe plan` beside what was recorded on one and on two GPUs, and beside what `choose` takes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from bench.fit_cost_model import RECORDS, ROOT, read_cells
from tmoe.bench.cost_model import Fit, predict
from tmoe.dispatch.problem import token_bucket
from tmoe.parallel.choose import ROUTE, ExchangeProblem, choose
from tmoe.parallel.communication_model import Cluster
from tmoe.plan import known_model, layouts, plan
from tmoe.plan.layouts import Layout, Question, estimate, row_bytes
from tmoe.plan.models import _KNOWN

TWO = ROOT / "bench" / "results" / "h200x2_parallel.json"
H200 = Cluster.of("H200", 8, 400)
DEEPSEEK = known_model("deepseek-v3")
# By `bench.fit_cost_model`, to the records of one GPU that were made when that of two was.
FITTED_THEN = {
    "bf16": Fit(11.22, 1.0201, 0.8910, 1.946, 53.54),
    "fp8_block": Fit(19.81, 0.9460, 0.7955, 2.206, 439.0),
}


def test_one_gpu_is_what_was_recorded():
    """No exchange, and the time of the cost model, which a quarter around every record holds."""
    cells = [cell for own in read_cells([ROOT / r for r in RECORDS]).values() for cell in own]
    compared = 0
    for layer, us in cells:
        name = layer.shape.name
        if layer.routing != "random" or name not in _KNOWN:
            continue
        model = replace(known_model(name), layers=1, other=0)
        (found,) = plan(model, 1, H200, tokens=layer.tokens, scheme=layer.scheme).ranked
        assert found.exchange == "none" and str(found.layout) == "1 GPU"
        assert found.us == predict(layer.shape, layer.tokens, scheme=layer.scheme).us
        assert found.us == pytest.approx(us, rel=0.25)
        compared += 1
    assert compared > 60


@pytest.fixture
def fitted_to_its_kernels(monkeypatch):
    """Later kernels are faster than those of the two GPUs' record."""
    assert FITTED_THEN != {scheme: layouts.fitted()[scheme] for scheme in FITTED_THEN}
    monkeypatch.setattr(layouts, "fitted", lambda: FITTED_THEN)


def test_two_gpus_are_what_was_recorded(fitted_to_its_kernels):
    """bench.parallel, 1 to 8192 tokens of each: a rank's experts, and all of the layer with each
    exchange. On one GPU with everybody's tokens too. Of one row the experts are said to be off."""
    rows = json.loads(TWO.read_text())["rows"]
    off = {}
    for row in rows:
        model = replace(known_model(row["model"]), layers=1, other=0)
        found = estimate(Layout(ep=2), Question(model, H200, 2, row["tokens"], row["scheme"]))
        times = {found.exchange: found.transfer.us, **found.other_exchanges}
        if found.compute.us != pytest.approx(row["all_gather_experts_us"], rel=0.19):
            off[row["model"], row["scheme"], row["tokens"]] = (
                f"({found.compute.us:.0f} µs for {row['all_gather_experts_us']:.0f})"
            )
        for name in ("all_gather", "all_to_all", "symmetric_memory"):
            predicted = found.compute.us + times[name]
            assert predicted == pytest.approx(row[f"{name}_us"], rel=0.16), (name, row)
        alone = estimate(Layout(), Question(model, H200, 1, 2 * row["tokens"], row["scheme"]))
        assert alone.us == pytest.approx(row["one_us"], rel=0.2), row
    assert len(rows) >= 20
    page = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    assert off.keys() == {("qwen3-30b-a3b", "fp8_block", 1)} and all(
        x in page for x in off.values()
    )


def test_symmetric_memory_is_planned_where_it_is_chosen():
    """`choose` knows the next power of two of tokens: 3000 would have room for their rows, but not
    all that are counted with them."""
    for tokens in (2048, 3000):
        ask = Question(DEEPSEEK, H200, 8, tokens, "fp8_block")
        found = estimate(Layout(ep=8), ask)
        planned = {found.exchange, *found.other_exchanges}
        shape = DEEPSEEK.shape
        sent = row_bytes(shape, "fp8_block") - ROUTE * shape.top_k
        problem = ExchangeProblem(
            token_bucket(tokens), shape.hidden, shape.top_k, sent, 4, 4, owners=8, shares=1, width=1
        )
        (peers,) = (c for c in choose(problem).candidates if c.name == "symmetric_memory")
        assert ("symmetric_memory" in planned) == peers.accepted == (tokens == 2048)
