"""The benchmark of training: peers are called as they are, checked, and timed as they can be."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from bench import training
from bench.product_tables import DENSE, GROUPED, OF_A_STEP, where_a_step_goes
from bench.training_tables import training_tables
from tests.reference import fused_experts_ref
from tmoe.bench import peer
from tmoe.bench.activation_memory import Peaks
from tmoe.bench.gradients import experts_gradients_ref
from tmoe.bench.shapes import TINY, routed_inputs
from tmoe.shapes import random_weights

CPU = torch.device("cpu")
OTHERS = ("liger", "scattermoe", "sonicmoe")


@pytest.fixture
def here(monkeypatch):
    """The benchmark on a CPU, whose memory nobody counts."""
    monkeypatch.setattr(training, "DEVICE", CPU)
    monkeypatch.setattr(training, "DTYPE", torch.float32)
    monkeypatch.setattr(training, "peak_memory", lambda *_: Peaks(3, 2, 1))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(training, "seconds_per_call", lambda calls, _: [1e-6])
    monkeypatch.setattr(training, "seconds_per_queued_call", lambda call, _: [2e-6])


def stand_in(monkeypatch, **modules):
    monkeypatch.setattr(peer, "installed_version", lambda _: "1.0")
    for name, functions in modules.items():
        module = ModuleType(name)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, name.replace("__", "."), module)


def rows(ways, **how):
    return list(training.measure(TINY, [6], ways, **how))


def test_ours_and_what_runs_anywhere(here, capsys):
    for row in rows(["tmoe", "tmoe, recompute", "torch_grouped_mm"]):
        assert row["us"] == 1 and row["timed"] == "graph" and row["peak_bytes"] == 3
        assert "1 µs" in training._line(row)
    (row,) = rows(["tmoe"], eager=True)
    assert row["us"] == 2 and row["timed"] == "call by call"


def test_a_peer_that_is_not_installed_is_said(here, monkeypatch):
    monkeypatch.setattr(peer, "installed_version", lambda _: None)
    for row in rows(OTHERS):
        assert "which isn't installed" in row["failed"] and "us" not in row
        assert row["failed"] in training._line(row)


def test_one_with_another_convention_is_not_timed(here, monkeypatch):
    """Up rows first: every gradient of the second half is another one."""

    def apply(x, gate_up, down, ids, weights):
        swapped = torch.cat(gate_up.chunk(2, 1)[::-1], 1)
        return fused_experts_ref(x, swapped, down, weights, ids, dtype=x.dtype)

    function = SimpleNamespace(apply=apply)
    stand_in(monkeypatch, liger_kernel__ops__fused_moe={"LigerFusedMoEFunction": function})
    (row,) = rows(["liger"])
    assert row["failed"].startswith("AssertionError: gradient of")


def layer_of(way):
    torch.manual_seed(0)
    x, weights, ids = routed_inputs(TINY, 6, CPU, torch.float32)
    gate_up, down = random_weights(TINY, CPU, torch.float32)
    tensors = {"x": x, "topk_weights": weights, "gate_up_proj": gate_up, "down_proj": down}
    leaves = {name: tensor.requires_grad_() for name, tensor in tensors.items()}
    y = training.forward_of(way, leaves, ids)()
    dy = torch.randn_like(y)
    got = dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), dy), strict=True))
    plain = {name: leaf.detach() for name, leaf in leaves.items()}
    want = experts_gradients_ref(torch.float64, plain, ids, dy)
    for name, gradient in got.items():
        torch.testing.assert_close(gradient.double(), want[name].double(), rtol=1e-4, atol=1e-5)


def test_liger_is_called_as_it_is(monkeypatch):
    """By its source: (x, gate and up, down, int32 ids, weights in x's dtype)."""

    def apply(x, gate_up_proj, down_proj, top_k_index, top_k_weights):
        assert top_k_index.dtype == torch.int32 and top_k_weights.dtype == x.dtype
        layer = x, gate_up_proj, down_proj, top_k_weights, top_k_index
        return fused_experts_ref(*layer, dtype=x.dtype)

    function = SimpleNamespace(apply=apply)
    stand_in(monkeypatch, liger_kernel__ops__fused_moe={"LigerFusedMoEFunction": function})
    layer_of("liger")


def test_scattermoe_is_called_as_it_is(monkeypatch):
    """By its source: weights (E, inputs, outputs), an order made once, and gates in the second."""

    def flatten_sort_count(expert_idxs, num_experts):
        experts, slots = expert_idxs.flatten().sort(stable=True)
        return experts, slots, experts.bincount(minlength=num_experts).cumsum(-1)

    def parallel_linear(
        inputs, expert_weights, k, sorted_expert_idxs, sorted_scattered_idxs, expert_offsets,
        expert_biases=None, gates=None, grouped_in=False, grouped_out=False,
    ):  # fmt: skip
        rows = inputs if grouped_in else inputs[sorted_scattered_idxs // k]
        y = torch.einsum("sd,sdn->sn", rows, expert_weights[sorted_expert_idxs])
        if grouped_out:
            return y
        y = torch.empty_like(y).index_copy(0, sorted_scattered_idxs, y)
        return (gates.unsqueeze(1) @ y.view(*gates.shape, -1)).squeeze(1)

    functions = {"flatten_sort_count": flatten_sort_count, "parallel_linear": parallel_linear}
    stand_in(monkeypatch, scattermoe__parallel_experts=functions)
    layer_of("scattermoe")


def test_sonicmoe_keeps_what_its_backward_needs(monkeypatch):
    def moe_general_routing_inputs(x, scores, tokens, experts, w1, b1, w2, b2, E, *_, **how):
        assert not how["is_inference_mode_enabled"] and how["concat_layout"]
        gate, up = torch.einsum("sd,nds->sn", x[tokens], w1[..., experts]).chunk(2, -1)
        y = torch.einsum("sd,nds->sn", F.silu(gate) * up, w2[..., experts]) * scores[:, None]
        return torch.zeros_like(x).index_add(0, tokens, y), experts.bincount(minlength=E)

    stand_in(
        monkeypatch,
        sonicmoe={"moe_general_routing_inputs": moe_general_routing_inputs},
        sonicmoe__enums={"ActivationType": SimpleNamespace(SWIGLU=None)},
    )
    stream = SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    layer_of("sonicmoe")


def test_tables_have_a_column_for_every_recorded_peer():
    """The least peer is the one that memory is compared with, and what failed is said."""

    def row(way, us, mib):
        measured = {"us": us, "tflops": 300.0, "activation_bytes": mib * 2**20}
        return {"shape": "tiny", "tokens": 6, "way": way} | measured

    rows = [row("tmoe", 10.0, 3), row("grouped_mm", 15.0, 8), row("liger", 25.0, 6)]
    rows.append({"shape": "tiny", "tokens": 6, "way": "scattermoe", "failed": "Missing: of a kind"})
    machine = {"device": "a GPU", "matmul_tflops_at_start": 600.0, "commit": "abc"}
    times, memory, failures = training_tables({"rows": rows, "machine_info": machine})
    assert "| grouped_mm (speedup) | liger (speedup) | scattermoe (speedup) |" in times
    assert "| tiny | 6 | 10 | 300 | 50 | – | 15 (1.50) | 25 (2.50) | – |" in times
    assert "| tiny | 6 | 3 | – | 8 | 6 | – | 0.50 |" in memory
    assert failures == "* tiny T=6 scattermoe: Missing: of a kind"


@pytest.mark.parametrize(("dense", "said"), [(100.0, "less"), (90.0, "more")])
def test_where_a_step_goes_is_said_of_any_record(dense, said):
    """Whether or not the goal is reached, and nothing of what wasn't recorded together."""

    def step(way, ms):
        return {"shape": "mixtral-8x7b", "tokens": 64, "way": way, "us": 1e3 * ms}

    steps = [step("tmoe", 600), step("grouped_mm", 855), step("tmoe, recompute", 700)]
    steps.append({"shape": "mixtral-8x7b", "tokens": 128, "way": "tmoe", "failed": "no memory"})
    training = {"rows": steps, "machine_info": {"matmul_tflops_at_start": 800.0}}
    times = {"Tile(block_m=128)": 90.0, "Tile(block_m=64)": 80.0, DENSE: dense, GROUPED: 95.0}
    rows = [
        {"shape": "mixtral-8x7b", "tokens": 64, "product": product, "tile": tile, "us": 1e3 * ms}
        for product in OF_A_STEP
        for tile, ms in times.items()
    ]
    first, table, last = where_a_step_goes(training, {"rows": rows})
    assert "a step is 1.43 to 1.43 × as fast as `grouped_mm`'s; the goal was 1.5 ×" in first
    assert "| tmoe | 540.0 | 0 | 60.0 | 600.0 |" in table  # by the tile in use
    assert "| torch's grouped_mm, as in transformers | 570.0 | 0 | 285.0 | 855.0 |" in table
    assert f"| torch's dense matmul | {6 * dense:.1f} | 0 | – | – |" in table
    assert last.startswith(f"1.5 × is a step of 570.0 ms, {said} than torch's dense matmul takes")
    faster = {**training, "rows": [step("tmoe", 400), step("grouped_mm", 855)]}
    assert "2.14 to 2.14 ×" in next(where_a_step_goes(faster, {"rows": rows}))
    assert list(where_a_step_goes(training, {"rows": rows[:-4]})) == []
