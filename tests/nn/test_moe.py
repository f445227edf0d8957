"""MoE: the right numbers in every arrangement, and a module that behaves as modules do."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import tmoe
from tests.checking import assert_matches
from tests.nn.layers import CASES, H, I, make_layer
from tests.nn.plain import plain_moe, plain_router

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("case", CASES)
def test_equals_a_loop_over_experts(case, dtype, device):
    layer = make_layer(case).to(device, dtype).eval()
    x = torch.randn(7, H, device=device, dtype=dtype)
    with torch.no_grad():
        got, truth = layer(x), plain_moe(layer, x, torch.float64)
        # In 16 bits a router may choose otherwise than in fp64: compare where it does not.
        ids, ids64 = layer.gate(x)[2], plain_router(layer, x.double())[1]
        same = (ids.sort().values == ids64.sort().values).all(1)
        naive = plain_moe(layer, x, dtype)
    assert got.dtype == dtype and same.sum() >= 5
    assert_matches(got[same], truth[same], naive[same])


@pytest.mark.parametrize(
    "shape", [(H,), (5, H), (2, 3, H), (2, 1, 3, H), (0, H), (2, 0, H)], ids=str
)
@pytest.mark.parametrize("case", ["gated-shared", "llama4"])
def test_any_leading_shape(case, shape):
    layer, x = make_layer(case), torch.randn(shape)
    y = layer(x)
    assert y.shape == x.shape and y.dtype == x.dtype
    torch.testing.assert_close(y.reshape(-1, H), layer(x.reshape(-1, H)))


def test_strided_input_is_accepted_and_left_alone():
    layer, wide = make_layer("shared"), torch.randn(5, 2 * H)
    x, before = wide[:, ::2], wide.clone()
    torch.testing.assert_close(layer(x), layer(x.contiguous()))
    assert torch.equal(wide, before)


@pytest.mark.parametrize("shared", [0, 40])
def test_scaling_factor_applies_once_and_not_to_the_shared_expert(shared):  # SC01
    scaled = make_layer("deepseek", shared_intermediate_size=shared)
    plain = make_layer("deepseek", shared_intermediate_size=shared, scaling=1.0)
    plain.load_state_dict(scaled.state_dict())
    x = torch.randn(5, H)
    shared_part = scaled.shared_expert(x) if shared else 0
    torch.testing.assert_close(scaled(x) - shared_part, 2.5 * (plain(x) - shared_part))


@pytest.mark.parametrize("case", ["biases", "gpt-oss", "llama4", "deepseek", "softmax-of-all"])
def test_every_entry_point_gives_the_same(case):  # SC02
    layer, x = make_layer(case, shared_intermediate_size=0), torch.randn(7, H)
    experts = layer.experts
    logits, topk_weights, topk_ids = layer.gate(x)
    keywords = dict(
        activation=experts.activation,
        gate_up_bias=experts.gate_up_proj_bias,
        down_bias=experts.down_proj_bias,
        interleaved=experts.interleaved,
    )
    weights = (experts.gate_up_proj, experts.down_proj)
    bias = layer.gate.e_score_correction_bias
    fused = tmoe.fused_experts(
        x, *weights, topk_weights, topk_ids,
        weight_on_input=layer.routing.weight_on_input, **keywords,
    )  # fmt: skip
    whole = tmoe.moe(x, logits, *weights, layer.routing, bias=bias, **keywords)
    chunks = torch.cat([layer(part) for part in x.split(3)])
    for other in (fused, whole, chunks, experts(x, topk_ids, topk_weights)):
        torch.testing.assert_close(other, layer(x))


def test_output_follows_the_weights():  # WL09
    layer, other, x = make_layer("shared"), make_layer("shared"), torch.randn(5, H)
    before = layer(x).detach()
    layer.load_state_dict(other.state_dict())
    assert torch.equal(layer(x), other(x)) and not torch.equal(layer(x), before)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    layer(x).square().sum().backward()
    optimizer.step()
    torch.testing.assert_close(layer(x), plain_moe(layer, x, torch.float32))
    layer.load_state_dict(other.state_dict())
    layer.load_state_dict(other.state_dict())
    assert torch.equal(layer(x), other(x))


def test_in_sequential():
    model = nn.Sequential(nn.Linear(8, H), make_layer("plain"), nn.Linear(H, 8))
    assert model(torch.randn(2, 3, 8)).shape == (2, 3, 8)


def saved_and_loaded(layer):
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def state_saved_and_loaded(layer):
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    fresh = make_layer("deepseek")
    fresh.load_state_dict(torch.load(file, weights_only=True))
    return fresh


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "torch.save": saved_and_loaded,
    "state-dict": state_saved_and_loaded,
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_copies_are_equal_and_independent(copied):
    layer, x = make_layer("deepseek"), torch.randn(5, H)
    twin = copied(layer)
    assert twin.routing == layer.routing
    assert torch.equal(twin(x), layer(x))
    with torch.no_grad():
        twin.experts.down_proj.zero_()
    assert not torch.equal(twin(x), layer(x))


def test_dtype_moves_convert_all_but_the_correction_bias():
    layer = make_layer("deepseek").to(torch.bfloat16)
    kept = {name for name, t in layer.state_dict().items() if t.dtype != torch.bfloat16}
    assert kept == {"gate.e_score_correction_bias"}
    assert layer(torch.randn(3, H, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("training", [False, True])
def test_meta_tensors_go_through(training):
    """Shapes without numbers, as tools that count memory or operations want them."""
    layer = make_layer("gated-shared", device="meta").train(training)
    with torch.set_grad_enabled(training):
        y = layer(torch.empty(2, 3, layer.hidden_size, device="meta"))
    assert y.is_meta and y.shape == (2, 3, layer.hidden_size)
    if training:
        y.sum().backward()
        assert layer.experts.down_proj.grad.is_meta and layer.gate.weight.grad.is_meta


def test_meta_device_then_reset():
    layer = make_layer("deepseek", device="meta", dtype=torch.bfloat16)
    assert all(t.is_meta for t in layer.state_dict().values())
    layer.to_empty(device="cpu").reset_parameters()
    y = layer(torch.randn(4, H, dtype=torch.bfloat16))
    assert y.isfinite().all() and y.abs().max() > 0


def test_meta_device_then_assigned():
    layer, source = make_layer("gated-shared", device="meta"), make_layer("gated-shared")
    layer.load_state_dict(source.state_dict(), assign=True)
    x = torch.randn(4, H)
    assert torch.equal(layer(x), source(x))


def test_initialisation_keeps_the_scale_of_a_linear_layer():
    layer = make_layer("biases")
    for weight, fan_in in ((layer.experts.gate_up_proj, H), (layer.experts.down_proj, I)):
        bound = fan_in**-0.5
        assert weight.abs().max() <= bound
        assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.1)


def test_repr_says_what_it_is():
    text = repr(make_layer("gpt-oss"))
    for part in ("hidden_size=32", "intermediate_size=24", "num_experts=6", "top_k=2", "swiglu_oai",
                 "scheme=bf16", "interleaved=True", "Renormalize"):  # fmt: skip
        assert part in text


ROUTING = dict(num_experts=4, top_k=2, method="Renormalize")

BAD = {
    "hidden": (ValueError, "hidden_size must be at least 1, got 0", dict(hidden_size=0)),
    "intermediate": (ValueError, "intermediate_size must be at least 1, got -8",
                     dict(intermediate_size=-8)),
    "size-type": (TypeError, "hidden_size must be an int, got float", dict(hidden_size=32.0)),
    "routing-type": (TypeError, "routing must be a Routing, got str", dict(routing="Renormalize")),
    "scheme": (ValueError, "scheme must be None, bf16 or one of .*, got fp9", dict(scheme="fp9")),
    "activation": (ValueError, "MoE: activation must be one of swiglu", dict(activation="swish")),
    "shared": (ValueError, "shared_intermediate_size must be at least 0, got -1",
               dict(shared_intermediate_size=-1)),
    "gate-without-shared": (ValueError, "shared_expert_gate must be False",
                            dict(shared_expert_gate=True)),
    "dtype": (ValueError, "dtype must be one of float32, .*got int8", dict(dtype=torch.int8)),
}  # fmt: skip


@pytest.mark.parametrize("error, match, changes", BAD.values(), ids=BAD)
def test_bad_arguments(error, match, changes):
    good = dict(hidden_size=H, intermediate_size=I, routing=tmoe.Routing(**ROUTING))
    with pytest.raises(error, match=match):
        tmoe.MoE(**(good | changes))


def test_bad_input():
    layer = make_layer("plain")
    with pytest.raises(ValueError, match=r"MoE: x must be of shape \(\.\.\., 32\), got \(3, 31\)"):
        layer(torch.randn(3, 31))
    with pytest.raises(TypeError, match="MoE: x must be a Tensor, got list"):
        layer([1.0])
    with pytest.raises(TypeError, match="x.*dtype"):
        layer(torch.randn(3, H, dtype=torch.float16))
