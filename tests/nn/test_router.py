"""Router: what it returns, in which dtype, and a correction bias that no cast reaches."""

import copy
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F

import tmoe
from tmoe.nn import Router


def router(method="Renormalize", *, experts=8, top_k=2, hidden=16, **kwargs):
    return Router(hidden, tmoe.Routing(experts, top_k, method), **kwargs)


def test_returns_logits_weights_and_ids():
    r = router(bias=True)
    x = torch.randn(2, 3, 16)
    logits, weights, ids = r(x)
    torch.testing.assert_close(logits, F.linear(x, r.weight, r.bias).reshape(6, 8))
    top, want_ids = logits.topk(2)
    torch.testing.assert_close(weights, top.softmax(-1))
    assert torch.equal(ids, want_ids.int())
    assert weights.dtype == torch.float32 and ids.dtype == torch.int32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_matmul_runs_in_the_dtype_of_its_weight(dtype):
    x = torch.randn(5, 16, dtype=dtype)
    r = router().to(dtype)
    assert r(x)[0].dtype == dtype
    r.float()
    want = F.linear(x.float(), r.weight)
    assert torch.equal(r(x)[0], want)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(r(x)[0], want), "an fp32 router stays fp32 under autocast"


def test_other_dtype_is_refused_by_name():
    with pytest.raises(TypeError, match=r"router: x must have dtype bfloat16, got torch.float32"):
        router().bfloat16()(torch.randn(5, 16))


def test_other_width_is_refused_by_name():
    with pytest.raises(
        ValueError, match=r"Router: x must be of shape \(\.\.\., 16\), got \(5, 15\)"
    ):
        router()(torch.randn(5, 15))


CORRECTION = 34.5 + 0.01 * torch.arange(8.0)  # in bf16 all eight are 34.5


def corrected():
    r = router("DeepSeekV3")
    with torch.no_grad():
        r.weight.zero_()
        r.e_score_correction_bias.copy_(CORRECTION)
    return r


def reloaded(r, **kwargs):
    other = router("DeepSeekV3").bfloat16()
    other.load_state_dict(r.state_dict(), **kwargs)
    return other


MOVES = {
    "to": lambda r: r.to(torch.bfloat16),
    "bfloat16": lambda r: r.bfloat16(),
    "half": lambda r: r.half(),
    "to-device-and-dtype": lambda r: r.to("cpu", torch.float16),
    "inside-a-parent": lambda r: torch.nn.Sequential(r).to(torch.bfloat16)[0],
    "there-and-back": lambda r: r.bfloat16().float(),
    "deepcopy": lambda r: copy.deepcopy(r.bfloat16()).bfloat16(),
    "pickle": lambda r: pickle.loads(pickle.dumps(r.bfloat16())).bfloat16(),
    "state-dict": lambda r: reloaded(r.bfloat16()),
    "state-dict-assign": lambda r: reloaded(r.bfloat16(), assign=True),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_correction_bias_keeps_its_bits(move):  # RT18
    r = move(corrected())
    assert r.e_score_correction_bias.dtype == torch.float32
    assert torch.equal(r.e_score_correction_bias, CORRECTION)
    ids = r(torch.zeros(1, 16, dtype=r.weight.dtype))[2]
    assert sorted(ids[0].tolist()) == [6, 7]


def test_correction_bias_of_a_16_bit_checkpoint_is_held_in_fp32():
    r = router("DeepSeekV3", device="meta")
    state = {"weight": torch.zeros(8, 16), "e_score_correction_bias": CORRECTION.bfloat16()}
    r.load_state_dict(state, assign=True)
    assert r.e_score_correction_bias.dtype == torch.float32
    assert state["e_score_correction_bias"].dtype == torch.bfloat16, (
        "the caller's dict is left alone"
    )


def test_correction_bias_on_meta():
    r = router("DeepSeekV3", device="meta").bfloat16()
    assert r.e_score_correction_bias.dtype == torch.float32
    r.to_empty(device="cpu").reset_parameters()
    assert torch.equal(r.e_score_correction_bias, torch.zeros(8))
    assert r.weight.dtype == torch.bfloat16 and r.weight.isfinite().all()


def test_methods_without_a_selection_bias_have_none():
    assert router().e_score_correction_bias is None
    assert list(router().state_dict()) == ["weight"]
    assert sorted(router("DeepSeekV3").state_dict()) == ["e_score_correction_bias", "weight"]


def gradient_of_logits(method):
    """d weight / d logits for one token with logits [1, 0] and k = 1."""
    r = router(method, experts=2, top_k=1, hidden=2)
    with torch.no_grad():
        r.weight.copy_(torch.eye(2))
    x = torch.tensor([[1.0, 0.0]], requires_grad=True)
    r(x)[1].sum().backward()
    return x.grad[0]


def test_top_1_that_renormalizes_cannot_learn_and_warns():  # GR04
    with pytest.warns(UserWarning, match="top_k is 1 and Renormalize"):
        gradient = gradient_of_logits("Renormalize")
    assert gradient.tolist() == [0, 0]


def test_top_1_that_keeps_the_score_learns_without_a_warning():  # GR04
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradient = gradient_of_logits("Default")
    torch.testing.assert_close(gradient, torch.tensor([0.1966, -0.1966]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("quiet", ["eval", "no_grad"])
def test_inference_with_top_1_does_not_warn(quiet):
    r = router("Renormalize", top_k=1)
    r.train(quiet != "eval")
    with warnings.catch_warnings(), torch.set_grad_enabled(quiet != "no_grad"):
        warnings.simplefilter("error")
        r(torch.randn(3, 16))


def test_bad_arguments():
    with pytest.raises(TypeError, match="Router: routing must be a Routing, got str"):
        Router(16, "Renormalize")
    with pytest.raises(ValueError, match="Router: hidden_size must be at least 1, got 0"):
        router(hidden=0)


@pytest.mark.parametrize("T", [1, 64, 65])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_inference_and_training_route_alike(weight_dtype, T, device):
    """A few tokens at inference take two kernels of their own, others torch's matmul."""
    routing = tmoe.Routing(20, 3, "DeepSeekV3", scaling_factor=2.5)
    router = tmoe.Router(96, routing, bias=True, dtype=weight_dtype, device=device)
    router.e_score_correction_bias.normal_()
    x = torch.randn(T, 96, device=device, dtype=torch.bfloat16)
    trained = router(x)
    with torch.no_grad():
        served = router(x)
    assert trained[0].requires_grad and not served[0].requires_grad
    assert served[0].dtype == trained[0].dtype == weight_dtype
    step = 2**-7 if weight_dtype == torch.bfloat16 else 1e-5  # one rounding of the logits
    torch.testing.assert_close(served[0], trained[0].detach(), rtol=step, atol=step)
    want = tmoe.route(served[0], routing, bias=router.e_score_correction_bias)
    assert torch.equal(served[1], want[0]) and torch.equal(served[2], want[1])


def test_batch_invariance(device):
    """Each token's logits have the same bits in a batch of one and in a large one."""
    routing = tmoe.Routing(60, 4, "Renormalize")
    router = tmoe.Router(200, routing, dtype=torch.bfloat16, device=device)
    x = torch.randn(70, 200, device=device, dtype=torch.bfloat16)
    with torch.no_grad(), tmoe.options(backend="triton", batch_invariant=True):
        together = router(x)
        for t in (0, 17, 69):
            for a, b in zip(router(x[t : t + 1]), together, strict=True):
                assert torch.equal(a[0], b[t])


def test_replayed_ids():
    router = tmoe.Router(32, tmoe.Routing(8, 2, "DeepSeekV3"))
    x = torch.randn(5, 32)
    logits, weights, ids = router(x)
    again = router(x, topk_ids=ids)
    for a, b in zip(again, (logits, weights, ids), strict=True):
        assert torch.equal(a, b)
    other = torch.tensor([[7, 0]] * 5)
    assert torch.equal(router(x, topk_ids=other)[2], other.int())
