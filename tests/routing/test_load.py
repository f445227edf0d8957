"""Expert load: of one router, of a model, over ranks, and what is printed."""

from __future__ import annotations

import math
import threading
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import tmoe
from tmoe.nn.load import ModelLoad, watch_load
from tmoe.routing.load import ExpertLoad

H, E, K = 16, 6, 2


def test_counts_of_ids_and_of_route_are_the_same():
    routing = tmoe.Routing(E, K, "Default")
    by_ids, by_counts = ExpertLoad(E), ExpertLoad(E)
    for _ in range(2):
        _, ids, counts = tmoe.route(torch.randn(7, E), routing, return_counts=True)
        by_ids.add_ids(ids)
        by_counts.add(counts)
    assert torch.equal(by_ids.counts, by_counts.counts)
    assert by_ids.total == 2 * 7 * K


def test_other_ids_count_for_no_expert():
    load = ExpertLoad(3)
    load.add_ids(torch.tensor([[0, 2], [-1, 3], [2, 99]]))
    assert load.counts.tolist() == [1, 0, 2]


def load_of(*counts):
    load = ExpertLoad(len(counts))
    load.add(torch.tensor(counts))
    return load


def test_measures():
    even, one, some = load_of(5, 5, 5, 5), load_of(0, 8, 0, 0), load_of(1, 3, 0, 0)
    assert (even.imbalance, even.entropy, even.dead) == (1.0, 1.0, [])
    assert (one.imbalance, one.entropy, one.dead) == (4.0, 0.0, [0, 2, 3])
    assert some.share.tolist() == [0.25, 0.75, 0.0, 0.0]
    assert some.imbalance == 3.0
    want = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75)) / math.log(4)
    assert some.entropy == pytest.approx(want)
    assert load_of(3).entropy == 1.0


def test_before_anything_is_added():
    load = ExpertLoad(4)
    assert load.share.tolist() == [0.0] * 4 and load.dead == [0, 1, 2, 3]
    assert math.isnan(load.imbalance) and math.isnan(load.entropy)
    assert str(load)  # prints


def test_reset():
    load = load_of(1, 2)
    load.reset()
    assert load.total == 0


def test_it_prints_the_busiest_first():
    text = str(load_of(10, 0, 30, 0)).splitlines()
    assert text[0] == ("40 slots, max/mean 3.00, entropy 0.406, 2 of 4 dead, busiest 2 (75.0%)")
    assert text[1] == "  expert    2  75.00% " + 30 * "█"
    assert text[2] == "  expert    0  25.00% " + 10 * "█"
    many = str(load_of(*range(100))).splitlines()
    assert len(many) == 18 and many[-1].startswith("  84 others")


class Model(nn.Module):
    """Two MoE layers, each of which may be checkpointed."""

    def __init__(self, method="Default", reentrant=None):
        super().__init__()
        routing = tmoe.Routing(E, K, method)
        self.layers = nn.ModuleList(tmoe.MoE(H, 8, routing) for _ in range(2))
        self.reentrant = reentrant

    def forward(self, x):
        for layer in self.layers:
            if self.reentrant is None:
                x = x + layer(x)
            else:
                x = x + checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def test_watch_load_counts_every_router():
    model, x = Model(), torch.randn(2, 5, H)
    with watch_load(model) as load:
        model(x)
        model(x)
    model(x)  # not watched any more
    assert list(load) == ["layers.0.gate", "layers.1.gate"]
    first = model.layers[0].gate(x)[2]
    assert torch.equal(
        load["layers.0.gate"].counts, 2 * torch.bincount(first.flatten(), minlength=E)
    )
    assert load["layers.1.gate"].total == 2 * 10 * K
    lines = str(load).splitlines()
    assert len(lines) == 2 and lines[1].startswith("layers.1.gate  40 slots, max/mean")
    load.reset()
    assert load["layers.0.gate"].total == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_checkpointing_recomputes_counts_once(reentrant):
    model = Model(reentrant=reentrant)
    with watch_load(model) as load:
        model(torch.randn(5, H, requires_grad=True)).sum().backward()
    assert [layer.total for layer in load.values()] == [5 * K, 5 * K]


def test_the_ids_of_a_replay_are_what_counts():
    layer, ids = tmoe.MoE(H, 8, tmoe.Routing(E, K, "Default")), torch.tensor([[5, 4]])
    with watch_load(layer) as load:
        layer(torch.randn(1, H), ids)
    assert load["gate"].counts.tolist() == [0, 0, 0, 0, 1, 1]


def test_hooks_are_gone_after_an_error():
    model = Model()
    with pytest.raises(KeyError), watch_load(model):
        raise KeyError
    assert not any(part._forward_hooks for part in model.modules())


def test_a_model_without_a_router_is_refused():
    with pytest.raises(ValueError, match="watch_load: model must be one with a tmoe.Router in it"):
        with watch_load(nn.Linear(2, 2)):
            pass


def test_compiled_code_is_not_passed_over_in_silence():
    model, x = Model(), torch.randn(5, H)
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        compiled(x)
        with pytest.warns(UserWarning, match="no router of the model ran"), watch_load(model):
            compiled(x)
        torch._dynamo.reset()
        fresh = torch.compile(model, backend="aot_eager", fullgraph=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(Exception, match="can't be followed"), watch_load(model):
                fresh(x)


def test_sum_over_ranks():
    """Two ranks as two threads, each with its own end of a process group."""
    store, sums = dist.HashStore(), {}

    def rank(number):
        group = dist.ProcessGroupGloo(dist.PrefixStore("load", store), number, 2)
        load = ModelLoad(gate=load_of(1, number, 4))
        sums[number] = (load["gate"], load.all_reduce(group)["gate"])

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, (mine, total) in sums.items():
        assert total.counts.tolist() == [2, 1, 8]
        assert mine.counts.tolist() == [1, number, 4], "a rank's own counts stay"
    assert len(sums) == 2


def test_refused():
    with pytest.raises(ValueError, match="ExpertLoad: num_experts must be at least 1, got 0"):
        ExpertLoad(0)
    with pytest.raises(ValueError, match=r"counts must be of shape \(4,\), got \(3,\)"):
        ExpertLoad(4).add(torch.ones(3, dtype=torch.int32))
    with pytest.raises(TypeError, match="topk_ids must be int32 or int64, got torch.float32"):
        ExpertLoad(4).add_ids(torch.ones(3))
