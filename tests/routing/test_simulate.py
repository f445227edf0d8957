"""Made-up routing: what it promises about loads, ids and weights."""

from __future__ import annotations

import pytest
import torch

from tmoe.routing.simulate import DISTRIBUTIONS, simulate_routing

SIZES = [(0, 4, 2), (1, 1, 1), (1, 8, 8), (7, 5, 3), (64, 60, 6), (33, 128, 22), (1000, 256, 8)]


def counts_of(ids, num_experts):
    return torch.bincount(ids.flatten().long(), minlength=num_experts)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("T, E, K", SIZES)
def test_what_route_promises_holds(T, E, K, distribution):
    weights, ids = simulate_routing(T, E, K, distribution)
    assert weights.shape == ids.shape == (T, K)
    assert weights.dtype == torch.float32 and ids.dtype == torch.int32
    assert ids.is_contiguous() and weights.is_contiguous()
    assert ((ids >= 0) & (ids < E)).all()
    ordered = ids.sort(-1).values
    assert (ordered[:, 1:] > ordered[:, :-1]).all(), "distinct within a token"
    assert (weights > 0).all() and (weights.diff(dim=-1) <= 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(T))


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_seed_decides(distribution):
    def routed(seed):
        return torch.stack(
            [t.double() for t in simulate_routing(50, 32, 4, distribution, seed=seed)]
        )

    assert torch.equal(routed(1), routed(1))
    assert not torch.equal(routed(1), routed(2))


@pytest.mark.gpu
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_same_numbers_on_the_gpu(distribution):
    for got, want in zip(
        simulate_routing(100, 64, 8, distribution, device="cuda"),
        simulate_routing(100, 64, 8, distribution),
        strict=True,
    ):
        assert got.is_cuda and torch.equal(got.cpu(), want)


def test_the_global_generator_takes_no_part_and_the_default_device_only_in_the_end():
    before, want = torch.get_rng_state(), simulate_routing(9, 8, 2)
    assert torch.equal(torch.get_rng_state(), before)
    with torch.device("meta"):
        assert simulate_routing(9, 8, 2)[0].is_meta
        got = simulate_routing(9, 8, 2, device="cpu")
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("T, E, K", SIZES)
def test_balanced_counts_differ_by_at_most_one(T, E, K):
    counts = counts_of(simulate_routing(T, E, K, "balanced")[1], E)
    assert counts.max() - counts.min() <= 1


def test_uniform_counts_are_near_their_mean():
    T, E, K = 4000, 16, 2
    counts = counts_of(simulate_routing(T, E, K)[1], E).double()
    p = K / E
    assert ((counts - T * p).abs() < 5 * (T * p * (1 - p)) ** 0.5).all()


def test_skewed_counts_follow_the_skew():
    T, E = 20_000, 10
    for skew in (0.0, 1.0, 2.0):
        counts = counts_of(simulate_routing(T, E, 1, "skewed", skew=skew)[1], E)
        share = counts.sort(descending=True).values / T
        wanted = torch.arange(1.0, E + 1) ** -skew
        torch.testing.assert_close(share, wanted / wanted.sum(), atol=0.02, rtol=0)


def test_one_expert_is_in_every_token_and_the_others_share_the_rest():
    T, E, K = 2000, 16, 3
    counts = counts_of(simulate_routing(T, E, K, "one_expert")[1], E).sort().values
    assert counts[-1] == T
    assert counts[0] > 0.8 * T * (K - 1) / (E - 1) and counts[-2] < 1.2 * T * (K - 1) / (E - 1)


def test_same_experts():
    counts = counts_of(simulate_routing(50, 16, 3, "same_experts")[1], 16).sort().values
    assert counts.tolist() == [0] * 13 + [50] * 3


def test_the_rows_of_a_large_draw_come_in_pieces(monkeypatch):
    want = simulate_routing(30, 8, 2)
    monkeypatch.setattr("tmoe.routing.simulate.CHUNK", 7 * 8)
    assert all(map(torch.equal, simulate_routing(30, 8, 2), want))


BAD = {
    "top_k > E": ((4, 2, 3), {}, ValueError, "top_k must be at most num_experts=2, got 3"),
    "negative T": ((-1, 2, 1), {}, ValueError, "num_tokens must be at least 0, got -1"),
    "no experts": ((1, 0, 1), {}, ValueError, "num_experts must be at least 1, got 0"),
    "name": ((4, 2, 1, "zipf"), {}, ValueError, "distribution must be one of uniform, .*'zipf'"),
    "skew": ((4, 2, 1), dict(skew=2.0), ValueError, "skew must be 1 with uniform"),
    "type": ((4.0, 2, 1), {}, TypeError, "num_tokens must be an int, got float"),
}


@pytest.mark.parametrize("case", BAD)
def test_refused(case):
    args, kwargs, error, message = BAD[case]
    with pytest.raises(error, match=message):
        simulate_routing(*args, **kwargs)
