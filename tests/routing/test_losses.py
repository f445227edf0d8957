"""The auxiliary losses against transformers', and the bias update against the paper."""

from __future__ import annotations

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import tmoe
from tmoe.routing.losses import load_balancing_loss, router_z_loss, update_correction_bias

E, K = 8, 2
ROUTING = tmoe.Routing(E, K, "Default")


def some_logits(num_layers=3, tokens=12, dtype=torch.float32):
    return [torch.randn(tokens, E).to(dtype).requires_grad_() for _ in range(num_layers)]


def ours(logits, **kwargs):
    routed = [tmoe.route(x, ROUTING, return_probs=True) for x in logits]
    return load_balancing_loss([r[2] for r in routed], [r[1] for r in routed], **kwargs)


MASKS = {
    "no-mask": None,
    "int-mask": torch.tensor([[1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1]]),
    "one-token": torch.tensor([[0] * 11 + [1]]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_transformers_loss_and_gradient(mask, num_layers, dtype):
    logits = some_logits(num_layers, dtype=dtype)
    want = load_balancing_loss_func(tuple(x.float() for x in logits), E, K, mask)
    got = ours(logits, mask=mask)
    torch.testing.assert_close(got, want)
    for mine, theirs in zip(
        torch.autograd.grad(got, logits), torch.autograd.grad(want, logits), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


def test_probabilities_of_another_softmax_do_as_well():
    logits = some_logits(1)[0]
    weights, ids = tmoe.route(logits, ROUTING)
    torch.testing.assert_close(load_balancing_loss(logits.softmax(-1), ids), ours([logits]))


def test_balanced_routing_has_loss_k():
    probs = torch.full((E, E), 1 / E)
    ids = (torch.arange(E)[:, None] + torch.arange(K)) % E
    assert load_balancing_loss(probs, ids) == K
    one_expert = torch.eye(E)[:1].expand(E, E)
    assert load_balancing_loss(one_expert, torch.zeros(E, 1, dtype=torch.int32)) == E


def test_padding_may_hold_anything():
    mask = torch.tensor([True, True, False])
    clean, dirty = torch.randn(2, 3, E).unbind()
    dirty = torch.where(mask[:, None], clean, torch.nan).requires_grad_()
    clean.requires_grad_()
    ids = torch.tensor([[0, 1], [2, 3], [99, -5]])
    for loss, want in (
        (load_balancing_loss(dirty, ids, mask=mask), load_balancing_loss(clean[:2], ids[:2])),
        (router_z_loss(dirty, mask=mask), router_z_loss(clean[:2])),
    ):
        torch.testing.assert_close(loss, want)
        gradient = torch.autograd.grad(loss, dirty)[0]
        torch.testing.assert_close(gradient, torch.autograd.grad(want, clean)[0])


def test_dropped_slots_and_shared_experts_count_for_no_expert():
    probs = torch.full((2, E), 1 / E)
    ids = torch.tensor([[0, -1, E], [1, E + 1, -7]])  # one real slot per token
    assert load_balancing_loss(probs, ids) == 1


def test_leading_dimensions_are_tokens():
    probs, ids = torch.rand(2, 3, E), torch.randint(0, E, (2, 3, K))
    mask = torch.tensor([[1, 0, 1], [1, 1, 0]])
    want = load_balancing_loss(probs.view(6, E), ids.view(6, K), mask=mask.view(6))
    assert load_balancing_loss(probs, ids, mask=mask) == want


@pytest.mark.parametrize("mask", [None, torch.zeros(4, dtype=torch.bool)], ids=["T=0", "padding"])
def test_without_tokens_the_losses_are_zero(mask):
    x = torch.randn(0 if mask is None else 4, E, requires_grad=True)
    ids = torch.zeros(len(x), K, dtype=torch.int32)
    for loss in (load_balancing_loss(x, ids, mask=mask), router_z_loss(x, mask=mask)):
        assert loss == 0
        assert not torch.autograd.grad(loss, x)[0].any()


def test_z_loss():
    layers, mask = some_logits(2), torch.arange(12) % 3
    kept = torch.cat(layers)[torch.cat([mask, mask]) != 0]
    got = router_z_loss(layers, mask=mask)
    torch.testing.assert_close(got, kept.exp().sum(-1).log().square().mean())
    assert router_z_loss(torch.zeros(3, E)) == pytest.approx(torch.tensor(E).log().item() ** 2)


def test_gradients_numerically():
    logits = torch.randn(5, E, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(0, E, (5, K))
    mask = torch.tensor([1, 1, 0, 1, 1])
    loss = lambda x: load_balancing_loss(x.softmax(-1), ids, mask=mask)  # noqa: E731
    assert loss(logits).dtype == torch.float64
    assert torch.autograd.gradcheck(loss, logits)
    assert torch.autograd.gradcheck(lambda x: router_z_loss(x, mask=mask), logits)


def test_under_torch_compile():
    logits, mask = some_logits(1)[0], torch.arange(12) % 2
    ids = tmoe.route(logits, ROUTING)[1]

    def losses(x):
        return load_balancing_loss(x.softmax(-1), ids, mask=mask) + router_z_loss(x, mask=mask)

    compiled = torch.compile(losses, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(logits), losses(logits))


def test_bias_moves_towards_the_experts_below_the_mean():
    bias = torch.tensor([0.5, 0.0, -0.5, 0.0])
    update_correction_bias(bias, torch.tensor([7, 4, 0, 5]), 0.25)  # the mean is 4
    assert bias.tolist() == [0.25, 0.0, -0.25, -0.25]


def test_counts_too_large_for_a_float_are_compared_exactly():
    bias = torch.zeros(2, dtype=torch.float64)
    update_correction_bias(bias, torch.tensor([2**53, 2**53 + 1]), 1)
    assert bias.tolist() == [1, -1]


def test_bias_update_balances_a_router():
    """The loop of the paper: an expert that nobody would choose gets its share in the end."""
    router = tmoe.Router(16, tmoe.Routing(E, 1, "MiniMax2"))
    x = torch.randn(512, 16)
    with torch.no_grad():
        router.e_score_correction_bias.copy_(torch.linspace(-0.5, 0.5, E))
        for _ in range(300):
            counts = torch.bincount(router(x)[2].flatten().long(), minlength=E)
            update_correction_bias(router.e_score_correction_bias, counts, 5e-3)
    assert counts.min() > 0.5 * counts.float().mean()


probs, ids = torch.rand(4, E), torch.zeros(4, K, dtype=torch.int64)
BAD = {
    "float ids": (lambda: load_balancing_loss(probs, probs), TypeError, "topk_ids must have dtype"),
    "int probs": (lambda: load_balancing_loss(ids, ids), TypeError, "probs must have a floating"),
    "additive mask": (
        lambda: load_balancing_loss(probs, ids, mask=torch.zeros(4)),
        TypeError,
        "mask must be bool or integer, got torch.float32",
    ),
    "mask length": (
        lambda: router_z_loss(probs, mask=torch.ones(5, dtype=torch.int32)),
        ValueError,
        r"mask must be of 4 elements, one per token, got \(5,\)",
    ),
    "other tokens": (
        lambda: load_balancing_loss(probs, ids[:3]),
        ValueError,
        r"topk_ids must be of shape \(4, 'K'\), got \(3, 2\)",
    ),
    "other layers": (
        lambda: load_balancing_loss([probs, probs], [ids]),
        ValueError,
        "topk_ids must be of 2 layers, got 1 layers",
    ),
    "other experts": (
        lambda: load_balancing_loss([probs, probs[:, 1:]], [ids, ids]),
        ValueError,
        "probs must be of 8 experts in every layer, got 7",
    ),
    "no layers": (lambda: router_z_loss([]), ValueError, "logits must be a tensor or at least one"),
    "16-bit bias": (
        lambda: update_correction_bias(torch.zeros(E).half(), torch.zeros(E).int(), 1),
        TypeError,
        "bias must have dtype float32 or float64, got torch.float16",
    ),
    "float counts": (
        lambda: update_correction_bias(torch.zeros(E), torch.zeros(E), 1),
        TypeError,
        "counts must have dtype int32 or int64",
    ),
    "counts of other experts": (
        lambda: update_correction_bias(torch.zeros(E), torch.zeros(3).int(), 1),
        ValueError,
        r"counts must be of shape \(8,\)",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_refused(case):
    call, error, message = BAD[case]
    with pytest.raises(error, match=message):
        call()
