"""`route` and `router` write the dtypes that they are asked for: the bits of a cast afterwards."""

import pytest
import torch

import tmoe
from tmoe.ops import router

E, K, H, T = 12, 3, 32, 9
RULES = {
    "softmax": tmoe.Routing(E, K, "RenormalizeNaive"),
    "groups": tmoe.Routing(E, K, "DeepSeekV3", n_group=4, topk_group=2, scaling_factor=2.5),
    "sparsemixer": tmoe.Routing(E, 2, tmoe.RoutingRule(weight="sparsemixer", jitter=0.01)),
    "shared": tmoe.Routing(E, K, tmoe.RoutingRule(score="sigmoid", num_shared=2)),
}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def logits_of(routing: tmoe.Routing, device: torch.device) -> torch.Tensor:
    logits = 4 * torch.randn(T, routing.num_logits, device=device)
    logits[0] = float("nan")  # weights of 0
    logits[1, 0] = 1e30
    return logits


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", RULES)
def test_route(rule, dtype, backend, device):
    routing = RULES[rule]
    logits = logits_of(routing, device)
    weights, ids = tmoe.route(logits, routing)
    got = tmoe.route(logits, routing, weights_dtype=dtype, ids_dtype=torch.int64)
    assert (got[0].dtype, got[1].dtype) == (dtype, torch.int64)
    assert torch.equal(got[0], weights.to(dtype)) and torch.equal(got[1], ids.long())


def test_with_all_results_and_given_ids(backend, device):
    logits = torch.randn(T, E, device=device)
    given = torch.randint(-1, E, (T, K), device=device)
    keywords = {"topk_ids": given, "return_probs": True, "return_counts": True}
    weights, ids, probs, counts = tmoe.route(logits, RULES["softmax"], **keywords)
    got = tmoe.route(
        logits, RULES["softmax"], **keywords, weights_dtype=torch.bfloat16, ids_dtype=torch.int64
    )
    want = (weights.bfloat16(), ids.long(), probs, counts)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_router(weight_dtype, backend, device):
    x = torch.randn(T, H, device=device).bfloat16()
    weight = torch.randn(E, H, device=device).to(weight_dtype)
    logits, weights, ids = router(x, weight, RULES["softmax"])
    got = router(x, weight, RULES["softmax"], weights_dtype=torch.float16, ids_dtype=torch.int64)
    want = (logits, weights.half(), ids.long())
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def test_float64_logits_keep_their_digits():
    logits = torch.randn(T, E, dtype=torch.float64)
    assert tmoe.route(logits, RULES["softmax"])[0].dtype == torch.float64
    weights, _ = tmoe.route(logits, RULES["softmax"], weights_dtype=torch.float32)
    assert torch.equal(weights, tmoe.route(logits, RULES["softmax"])[0].float())


def test_the_gradient_goes_through_the_rounding():
    logits = torch.randn(T, E, requires_grad=True)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        weights, _ = tmoe.route(logits, RULES["softmax"], weights_dtype=dtype)
        assert weights.dtype == dtype
        found += torch.autograd.grad(weights.float().square().sum(), logits)
    torch.testing.assert_close(found[1], found[0], rtol=2e-2, atol=2e-2)
    assert found[0].abs().max() > 0.1


def test_other_dtypes_are_refused():
    logits = torch.randn(T, E)
    with pytest.raises(ValueError, match="route: weights_dtype must be float32 or .*, got torch.i"):
        tmoe.route(logits, RULES["softmax"], weights_dtype=torch.int32)
    with pytest.raises(ValueError, match="route: ids_dtype must be int32 or int64, got torch.in"):
        tmoe.route(logits, RULES["softmax"], ids_dtype=torch.int16)
    with pytest.raises(TypeError, match="route: ids_dtype must be a dtype, got str"):
        tmoe.route(logits, RULES["softmax"], ids_dtype="int64")
