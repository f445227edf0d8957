"""Routing replay: the recorded choices come back, in every order that calls and recomputes have."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tmoe
from tmoe.nn.replay import RoutingReplay

H, E, K = 16, 8, 2


@pytest.fixture(autouse=True)
def in_torch():
    """Hooks don't depend on the backend, and the interpreter is slow."""
    with tmoe.options(backend="torch"):
        yield


class Model(nn.Module):
    """Two MoE layers, `passes` times over; each call of a layer may be checkpointed."""

    def __init__(self, method="DeepSeekV3", *, reentrant=None, passes=1):
        super().__init__()
        self.layers = nn.ModuleList(tmoe.MoE(H, 8, tmoe.Routing(E, K, method)) for _ in range(2))
        self.reentrant, self.passes = reentrant, passes

    def forward(self, x):
        for layer in list(self.layers) * self.passes:
            if self.reentrant is None:
                x = x + layer(x)
            else:
                x = x + checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def tokens(number=5, device="cpu"):
    return torch.randn(number, H, device=device, requires_grad=True)


def other(model):
    """The same model, whose routers would choose other experts, and no checkpointing."""
    twin = copy.deepcopy(model)
    twin.reentrant = None
    with torch.no_grad():
        for layer in twin.layers:
            layer.gate.weight.copy_(layer.gate.weight.flip(0))
    return twin


def gradients(model, *inputs, backward=lambda losses: sum(losses).backward()):
    model.zero_grad()
    losses = [model(x).square().sum() for x in inputs]
    backward(losses)
    return [p.grad.clone() for p in model.parameters()]


def assert_same(got, want):
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_records_what_every_router_chose():
    model, x = Model(), tokens()
    replay = RoutingReplay(model)
    with replay.record():
        model(x)
        model(x[:3])
    assert list(replay.ids) == ["layers.0.gate", "layers.1.gate"]
    assert [ids.shape for ids in replay.ids["layers.1.gate"]] == [(5, K), (3, K)]
    assert torch.equal(replay.ids["layers.0.gate"][0], model.layers[0].gate(x)[2])


@pytest.mark.parametrize("method", ["Renormalize", "DeepSeekV3", "Sigmoid"])
def test_other_routers_replay_it(method):
    model, x = Model(method), tokens()
    replay = RoutingReplay(model)
    with replay.record():
        model(x)
    replay.remove()
    trainer = other(model)
    theirs = RoutingReplay(trainer)
    theirs.ids = {name: [t.long() for t in ids] for name, ids in replay.ids.items()}
    chosen = RoutingReplay(trainer)
    with theirs.replay(), chosen.record():
        y = trainer(x)
    for name, ids in replay.ids.items():
        assert torch.equal(chosen.ids[name][0], ids[0])
    assert not torch.equal(y, trainer(x)), "outside it chooses for itself again"
    hidden = x
    for layer, name in zip(trainer.layers, replay.ids, strict=True):
        hidden = hidden + layer(hidden, replay.ids[name][0])
    assert torch.equal(y, hidden)
    assert torch.autograd.grad(y.sum(), trainer.layers[0].gate.weight)[0].any()


def test_leading_dimensions_keyword_input_and_given_ids():
    gate, x = tmoe.Router(H, tmoe.Routing(E, K, "Default")), torch.randn(2, 3, H)
    hashed = torch.arange(12, dtype=torch.int32).view(6, K) % E
    with RoutingReplay(gate) as replay:
        with replay.record():
            gate(x, hashed)
        with replay.replay():
            assert torch.equal(gate(x=x)[2], hashed)
        with replay.replay():
            assert torch.equal(gate(x, topk_ids=hashed.flip(0))[2], hashed)


def test_shared_experts_are_not_part_of_a_recording():
    rule = tmoe.RoutingRule(score="sigmoid", weight="softmax", num_shared=2)
    gate, x = tmoe.Router(H, tmoe.Routing(E, K, rule)), torch.randn(4, H)
    with RoutingReplay(gate) as replay:
        with replay.record():
            want = gate(x)
        with replay.replay():
            assert all(map(torch.equal, gate(x), want))
    assert replay.ids[""][0].shape == (4, K)


ORDERS = {
    "one-graph": lambda losses: sum(losses).backward(),
    "first-to-last": lambda losses: [loss.backward() for loss in losses],
    "last-to-first": lambda losses: [loss.backward() for loss in losses[::-1]],
    "twice": lambda losses: [sum(losses).backward(retain_graph=i == 0) for i in range(2)],
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of the free pass
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize(
    "reentrant, order",
    [
        (reentrant, order)
        for reentrant in (False, True)
        for order in ORDERS
        if (reentrant, order) != (True, "twice")  # torch refuses a second backward
    ],
)
def test_recomputed_parts_get_the_ids_of_their_forward_pass(reentrant, order, passes, device):
    """Several passes are under way, of the same shape: only which call it was tells them apart."""
    model, backward = Model(reentrant=reentrant, passes=passes).to(device), ORDERS[order]
    inputs = [tokens(device=device) for _ in range(3)]
    recorder = other(model)
    source = RoutingReplay(recorder)
    with source.record():
        for x in inputs:
            recorder(x)

    plain = copy.deepcopy(model)
    plain.reentrant = None
    with RoutingReplay(plain) as replay:
        replay.ids = source.ids
        with replay.replay():
            want = gradients(plain, *inputs, backward=backward)

    with RoutingReplay(model) as replay:
        replay.ids = source.ids
        with replay.replay():
            assert_same(gradients(model, *inputs, backward=backward), want)
        with replay.replay():
            losses = [model(x).square().sum() for x in inputs]
        model.zero_grad()
        with torch.no_grad():
            model(inputs[0])  # a pass that chooses for itself, in between
        backward(losses)  # after the `with`
        assert_same([p.grad for p in model.parameters()], want)

    free = gradients(model, *inputs, backward=backward)
    assert not all(torch.equal(a, b) for a, b in zip(free, want, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_passes_that_choose_for_themselves_stay_free(reentrant):
    """Before, between and after replays, some recomputed late: gradients are those without it."""
    model, x = Model(reentrant=reentrant), tokens()
    want = gradients(model, x)
    with RoutingReplay(model) as replay:
        before = model(x).square().sum()
        with replay.record():
            model(x)
        replay.ids = {name: [ids[0].flip(0)] for name, ids in replay.ids.items()}
        for _ in range(4):
            with replay.replay():
                model(x)
        after = [model(x).square().sum() for _ in range(4)]
        for loss in (before, *after):
            model.zero_grad()
            loss.backward()
            assert_same([p.grad for p in model.parameters()], want)


def test_a_recording_run_recomputes_as_it_was():
    model, x = Model(reentrant=False), tokens()
    want = gradients(model, x)
    with RoutingReplay(model) as replay, replay.record():
        assert_same(gradients(model, x), want)
    assert [len(ids) for ids in replay.ids.values()] == [1, 1]


def test_a_pass_from_before_the_latest_replay_is_refused():
    model, x = Model(reentrant=False), tokens()
    with RoutingReplay(model) as replay:
        with replay.record():
            model(x)
        with replay.replay():
            first = model(x).sum()
        with replay.replay():
            second = model(x).sum()
        second.backward()
        with pytest.raises(RuntimeError, match="from before the latest"):
            first.backward()


def test_a_router_twice_in_one_checkpointed_part_is_refused():
    layer, x = tmoe.MoE(H, 8, tmoe.Routing(E, K, "Default")), tokens()
    with RoutingReplay(layer) as replay:
        with replay.record():
            layer(layer(x))
        with replay.replay():
            loss = checkpoint(lambda x: layer(layer(x)), x, use_reentrant=False).sum()
        with pytest.raises(RuntimeError, match="more than once within one checkpointed part"):
            loss.backward()


def recorded():
    model, x = Model(), tokens()
    replay = RoutingReplay(model)
    with replay.record():
        model(x)
    return model, x, replay


def test_more_calls_than_recorded():
    model, x, replay = recorded()
    message = "layers.0.gate is called 2 times, and 1 calls were recorded"
    with pytest.raises(RuntimeError, match=message), replay.replay():
        model(x)
        model(x)
    with replay.replay():
        model(x)  # an error ends a replay; the next one begins at the first call


def test_other_number_of_tokens():
    model, x, replay = recorded()
    message = r"layers.0.gate has 4 tokens and top_k 2 in this call, and ids of shape \(5, 2\)"
    with pytest.raises(ValueError, match=message), replay.replay():
        model(x[:4])


def test_a_router_that_the_recording_lacks():
    model, x, replay = recorded()
    del replay.ids["layers.1.gate"]
    message = "layers.1.gate is called 1 times, and 0 calls were recorded"
    with pytest.raises(RuntimeError, match=message), replay.replay():
        model(x)


def test_one_inside_the_other_is_refused():
    replay = recorded()[2]
    with pytest.raises(RuntimeError, match="record inside replay"):
        with replay.replay(), replay.record():
            pass


def test_nothing_ran():
    replay = recorded()[2]
    for context in (replay.record, replay.replay):
        with pytest.raises(RuntimeError, match="no router of the model ran"), context():
            pass


def test_compiled_code_is_not_passed_over_in_silence():
    model, x = Model(), tokens()
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        compiled(x)
        replay = RoutingReplay(model)
        with pytest.raises(RuntimeError, match="no router of the model ran"), replay.record():
            compiled(x)
        torch._dynamo.reset()
        with pytest.raises(Exception, match="can't be followed"), replay.record():
            torch.compile(model, backend="aot_eager", fullgraph=True)(x)


def test_a_model_without_a_router_is_refused():
    with pytest.raises(ValueError, match="RoutingReplay: model must be one with a tmoe.Router"):
        RoutingReplay(nn.Linear(2, 2))


def test_remove_takes_the_hooks_off():
    model, _, replay = recorded()
    replay.remove()
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    assert replay.ids["layers.0.gate"], "the recording stays"
