"""Tuned tiles: what is timed, what is kept, that a call takes them, and when it must not."""

from __future__ import annotations

import warnings

import pytest
import torch

import tmoe
from tests.checking import assert_matches
from tests.dispatch.conftest import forget
from tests.dispatch.tuning import BEST, LAYER_TILES, E, H, K, know, layer, pretend_times, problem
from tests.reference import fused_experts_ref, quantized
from tmoe.backends.triton_backend import TritonBackend
from tmoe.backends.triton_tiles import TABLE, tiles_name
from tmoe.dispatch import measure
from tmoe.dispatch.problem import ExpertsSpec, ExpertTensors, Machine
from tmoe.dispatch.tuned import is_same, load_tuned, settings_key
from tmoe.formats import SCHEMES
from tmoe.kernels.tiles import LayerTiles, Tile

pytestmark = pytest.mark.usefixtures("empty_store")


@pytest.fixture
def timed(monkeypatch):
    """The settings that were timed; all take 2 ms but `BEST`, which takes 1."""
    seen = pretend_times(monkeypatch, {BEST: 1.0}, 2.0)
    monkeypatch.setattr("tmoe.backends.triton_backend.candidates", some_candidates)
    return seen


def some_candidates(problem, way, device):
    return [LayerTiles(Tile(16, 16, 32, 4, 2), Tile(16, 16, 32, 4, 2))], [LAYER_TILES]


def test_the_best_tiles_run_from_then_on(timed, launched, device):
    arguments = layer(device)
    with tmoe.autotune(tiles=True):
        y = tmoe.fused_experts(*arguments)
    assert timed[:3] == ["triton", "16x16x32 w4 s2", BEST]
    assert sorted(timed[3:]) == [BEST, "torch"]  # the backends, Triton with what is best
    for forced in (None, "triton"):
        launched.clear()
        with tmoe.options(backend=forced):
            y = tmoe.fused_experts(*arguments)
            tmoe.fused_experts(*layer(device, tokens=7))  # of the same bucket
        assert launched == 2 * [LAYER_TILES.gate_up, LAYER_TILES.down]
        launched.clear()
        with tmoe.options(backend="triton"):
            tmoe.fused_experts(*layer(device, tokens=9))  # of another
        assert launched and LAYER_TILES.gate_up not in launched
    truth, naive = (fused_experts_ref(*arguments, dtype=t) for t in (torch.float64, torch.float32))
    assert_matches(y, truth, naive)


def test_all_times_are_kept_and_the_next_process_has_them(timed, launched, device):
    with tmoe.autotune(tiles=True):
        tmoe.fused_experts(*layer(device))
    forget()
    key = settings_key(problem(device), "triton")
    assert measure.known(Machine.of(device), key) == {
        "plain, rows: table": 2.0, "plain, rows: 16x16x32 w4 s2": 2.0, f"plain, rows: {BEST}": 1.0,
    }  # fmt: skip
    launched.clear()
    tmoe.fused_experts(*layer(device))
    assert launched == [LAYER_TILES.gate_up, LAYER_TILES.down]


def test_what_is_known_is_not_timed_unless_asked(timed, device):
    def count(**asked):
        timed.clear()
        with tmoe.autotune(tiles=True, **asked):
            tmoe.fused_experts(*layer(device))
            tmoe.fused_experts(*layer(device))
        return len(timed)

    assert count(quick=True) == 4  # table and a row, then both backends
    assert count(quick=True) == 0
    assert count() == 5  # the neighbours are new
    assert count() == count(quick=True) == 0
    assert count(again=True) == 5


def test_autotune_leaves_tiles_alone_unless_asked(timed, device):
    with tmoe.autotune():
        tmoe.fused_experts(*layer(device))
    assert sorted(timed) == ["torch", "triton"]
    with tmoe.autotune(tiles=True), tmoe.options(batch_invariant=True):
        tmoe.fused_experts(*layer(device))
    assert BEST not in timed


@pytest.mark.parametrize("scheme", ["fp8_a16", "fp8_block"])
def test_quantised_experts_and_gemms_have_tiles_too(scheme, timed, launched, device, monkeypatch):
    H, I, best = 128, 128, Tile(16, 32, 64, 4, 2)

    def candidates(problem, way, device):
        return [LayerTiles(best, best)], []

    monkeypatch.setattr("tmoe.backends.triton_backend.candidates", candidates)
    monkeypatch.setattr(measure, "_milliseconds", lambda run, _: 1.0 if tuned_of(run) else 2.0)
    x, w = torch.randn(5, H, device=device), torch.rand(5, K, device=device)
    ids = torch.stack([torch.randperm(E)[:K] for _ in range(5)]).to(device)
    recipe = SCHEMES[scheme].weights[-1]
    gate_up = quantized(torch.randn(E, 2 * I, H, device=device), recipe)
    down = quantized(torch.randn(E, H, I, device=device), recipe)
    offsets = torch.tensor([0, 2, 3, 3, 5], dtype=torch.int32, device=device)

    def calls():
        tmoe.fused_experts(x, gate_up, down, w, ids, scheme=scheme)
        tmoe.grouped_gemm(x, down, offsets, scheme=scheme)

    with tmoe.autotune(tiles=True):
        calls()
    launched.clear()
    with tmoe.options(backend="triton"):
        calls()
    assert launched == [best, best, best]


def tuned_of(run):
    (backend,) = run.args
    return backend.name == "triton" and backend._tiles.tuned


def test_an_unquantised_gemm_has_tiles_too(timed, launched, device):
    a, b = torch.randn(5, H, device=device), torch.randn(E, 24, H, device=device)
    offsets = torch.tensor([0, 2, 3, 3, 5], dtype=torch.int32, device=device)
    with tmoe.autotune(tiles=True):
        tmoe.grouped_gemm(a, b, offsets)
    launched.clear()
    with tmoe.options(backend="triton"):
        y = tmoe.grouped_gemm(a, b, offsets)
    assert launched == [LAYER_TILES.down]
    expert = torch.tensor([0, 0, 1, 3, 3], device=device)
    torch.testing.assert_close(y, torch.einsum("sd,snd->sn", a, b[expert]))


# what never counts --------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["scaled", "a row", "NaN"])
def test_a_wrong_result_is_never_stored(wrong, timed, device, monkeypatch):
    real = TritonBackend.fused_experts

    def faulty(self, *args, **more):
        y = real(self, *args, **more)
        if self._tiles.tuned:
            if wrong == "scaled":
                y *= 1.1
            else:
                y[2] = float("nan") if wrong == "NaN" else 0.0
        return y

    monkeypatch.setattr(TritonBackend, "fused_experts", faulty)
    with tmoe.autotune(tiles=True):
        tmoe.fused_experts(*layer(device))
    known = measure.known(Machine.of(device), settings_key(problem(device), "triton"))
    assert list(known) == ["plain, rows: table"]


def test_tiles_that_fail_are_passed_over(timed, device, monkeypatch):
    """HW05"""
    real = TritonBackend.fused_experts

    def faulty(self, *args, **more):
        if "16x16x32 w4 s2" in map(tiles_name, self._tiles.tuned.values()):
            raise RuntimeError("out of resources: shared memory")
        return real(self, *args, **more)

    monkeypatch.setattr(TritonBackend, "fused_experts", faulty)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with tmoe.autotune(tiles=True):
            tmoe.fused_experts(*layer(device))
    known = measure.known(Machine.of(device), settings_key(problem(device), "triton"))
    assert [*known] == ["plain, rows: table", f"plain, rows: {BEST}"]


def test_where_the_usual_tiles_fail_nothing_is_tuned(timed, device, monkeypatch):
    def fail(self, *args, **more):
        raise RuntimeError("no driver")

    with monkeypatch.context() as patch:
        patch.setattr(TritonBackend, "fused_experts", fail)
        with tmoe.autotune(tiles=True), pytest.warns(UserWarning, match="triton failed"):
            tmoe.fused_experts(*layer(device))
    assert not measure.known(Machine.of(device), settings_key(problem(device), "triton"))


def test_is_same():
    want = torch.randn(3, 64)
    assert is_same(want + 0.01 * want.abs(), want)
    for change in (0.0, float("nan"), float("inf")):
        got = want.clone()
        got[1, :8] = change  # an eighth of one row
        assert not is_same(got, want)
    assert is_same(torch.zeros(2, 4), torch.zeros(2, 4))
    assert not is_same(torch.full((2, 4), 1e-9), torch.zeros(2, 4))


def test_batch_invariant_calls_take_the_tables_row(launched, device):
    for options in ({}, {"batch_invariant": True}):
        know(device, {BEST: 1.0}, **options)
    with tmoe.options(backend="triton", batch_invariant=True):
        tmoe.fused_experts(*layer(device))
    assert launched and LAYER_TILES.gate_up not in launched
    assert load_tuned("triton", problem(device, batch_invariant=True)).settings == ""


def test_a_backend_with_tuned_tiles_keeps_batches_out_of_them(launched, device):
    """Whatever instance a call got before the option was set."""
    know(device, {BEST: 1.0})
    backend = load_tuned("triton", problem(device))
    assert BEST in backend.settings
    with tmoe.options(batch_invariant=True):
        x, gate_up, down, w, ids = layer(device)
        tensors = ExpertTensors(x, gate_up, down, w, ids)
        backend.fused_experts(tensors, ExpertsSpec(num_experts=E))
    assert launched and LAYER_TILES.gate_up not in launched


@pytest.mark.parametrize("other", ["columns", "strided", "rows, interleaved"])
def test_tiles_of_another_way_are_not_taken(other, launched, device):
    know(device, {BEST: 1.0}, way=f"plain, {other}")
    with tmoe.options(backend="triton"):
        tmoe.fused_experts(*layer(device))
        assert launched and LAYER_TILES.gate_up not in launched
        launched.clear()
        if other == "columns":
            tmoe.fused_experts(*layer(device, transposed=True))
            assert launched == [LAYER_TILES.gate_up, LAYER_TILES.down]


NONSENSE = {
    "no tiles": "fast",
    "nothing": "",
    "rows that differ": "16x16x32 w4 s2 + 32x32x32 w4 s2",
    "three tiles": " + ".join(3 * ["16x16x32 w4 s2"]),
    "not a power of two": "16x24x32 w4 s2",
    "zero": "16x16x0 w4 s2",
    "too many columns": "16x512x32 w4 s2",
    "too many warps": "16x16x32 w64 s2",
    "unknown word": "16x16x32 w4 s2 sparse",
    "specialised, for what isn't": "128x64x128 w4 s6 g16 specialized",
    "a long number": f"{10**30}x16x32 w4 s2",
    "another spelling": "016x16x32 w4 s2",
}


@pytest.mark.parametrize("name", NONSENSE.values(), ids=NONSENSE.keys())
def test_a_name_that_means_nothing_is_a_miss(name, launched, device):
    know(device, {name: 0.1, TABLE: 1.0})
    with tmoe.options(backend="triton"):
        y = tmoe.fused_experts(*layer(device))
    assert launched and y.isfinite().all() and "tuned" not in str(tmoe.explain(problem(device)))
    know(device, {BEST: 0.5}, way="a way of the future, rows")
    assert "tuned" not in str(tmoe.explain(problem(device)))


def test_less_than_a_margin_is_noise(device):
    """CG10"""
    know(device, {TABLE: 1.0, BEST: 0.99})
    assert load_tuned("triton", problem(device)).settings == ""
    know(device, {TABLE: 1.0, BEST: 0.97})
    assert BEST in load_tuned("triton", problem(device)).settings


def test_explain_names_the_tiles_and_all_times(device):
    know(device, {TABLE: 0.05, BEST: 0.04}, backends={"triton": 0.041, "torch": 1.5})
    decision = tmoe.explain(problem(device))
    lines = str(decision).splitlines()
    assert "-> triton" in lines[1] and "41.0 us" in lines[1] and "1.500 ms" in lines[2]
    assert lines[1].endswith(f"; tiles {BEST} tuned for plain, rows") and "tiles" not in lines[2]
    assert "tuned" not in str(tmoe.explain(problem(device, tokens=16)))
