"""`replace_moe(model, scheme=...)`: what it makes of weights, what it needs, what it refuses."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import tmoe
from tests.integrations.families import BY_NAME
from tests.integrations.family import IDS, outputs
from tests.live_bytes import LiveBytes
from tmoe.formats import SCHEMES, QuantizedTensor
from tmoe.integrations.transformers import quantize_model
from tmoe.integrations.transformers.switch import expert_modules


def quantized_parameters(model: nn.Module) -> dict[str, QuantizedTensor]:
    return {n: p for n, p in model.named_parameters() if isinstance(p, QuantizedTensor)}


@pytest.mark.column("quantised")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_each_scheme(scheme):
    """With the error that the report states, against tmoe.formats' own."""
    model = BY_NAME["mixtral"].build().bfloat16()
    originals = {n: p.detach().clone() for n, p in model.named_parameters()}
    report = tmoe.replace_moe(model, scheme)
    recipe = SCHEMES[scheme].weights[0]
    for name, held in quantized_parameters(model).items():
        assert (held.format, held.block_shape) == (recipe.format.name, recipe.block_shape)
        assert held.dtype == torch.bfloat16
        module, _, arg = name.rpartition(".")
        error = report.errors[module][arg]
        known = tmoe.formats.error_report(
            originals[name], recipe.format, block_shape=recipe.block_shape
        )
        assert error.snr_db == pytest.approx(known.snr_db)
        off = (held.dequantize() - originals[name].float()).norm() / originals[name].float().norm()
        assert error.relative == pytest.approx(off.item(), rel=1e-4)
        assert f"{error.snr_db:.1f} dB" in str(report)
    assert f"2 experts modules quantised to {scheme}" in str(report)
    with torch.no_grad():
        assert outputs(model).isfinite().all()


def test_one_layer_at_a_time(monkeypatch):
    """The old weights of a layer are gone when the next begins; little is needed beside them."""
    family = BY_NAME["mixtral"]
    model = type(family)(
        "mixtral", "MixtralForCausalLM", dict(num_hidden_layers=4, num_local_experts=16)
    ).build()
    layers = [
        [weakref.ref(p.untyped_storage()) for p in module.parameters()]
        for _, module in expert_modules(model)
    ]
    expert_bytes = sum(ref().nbytes() for ref in layers[0]) / 16
    alive = []
    original = quantize_model._quantize_layer

    def watched(*args):
        alive.append([any(ref() is not None for ref in layer) for layer in layers])
        return original(*args)

    monkeypatch.setattr(quantize_model, "_quantize_layer", watched)
    with LiveBytes(model.parameters()) as memory:
        tmoe.replace_moe(model, "fp8_channel")
    assert alive == [[done >= now for done in range(4)] for now in range(4)]
    held = sum(q.nbytes for q in quantized_parameters(model).values())
    assert held <= memory.most < held + 6 * expert_bytes  # one in fp64 is 2, and its errors
    assert not any(ref() is not None for layer in layers for ref in layer)


def test_restore_says_that_the_weights_are_gone():
    for name in ("mixtral", "llama4_text"):
        model = BY_NAME[name].build()
        first = tmoe.replace_moe(model)
        reports = [first, tmoe.replace_moe(model, "nvfp4"), tmoe.replace_moe(model)]
        with torch.no_grad():
            want = outputs(model)
            for report in reports:
                with pytest.raises(RuntimeError, match="quantised to nvfp4.*load the model again"):
                    report.restore()
            assert torch.equal(outputs(model), want)


def test_again():
    """Another scheme can't be had from quantised weights; the report says so."""
    model = BY_NAME["mixtral"].build()
    tmoe.replace_moe(model, "fp8_tensor")
    report = tmoe.replace_moe(model, "nvfp4")
    assert set(report.not_quantized.values()) == {"it is quantised already, as fp8_tensor"}
    assert {q.format for q in quantized_parameters(model).values()} == {"fp8_tensor"}
    assert tmoe.replace_moe(BY_NAME["mixtral"].build(), "bf16").scheme is None


def test_tied_layers_stay_tied():
    model = BY_NAME["mixtral"].build()
    first, second = (module for _, module in expert_modules(model))
    second.down_proj = first.down_proj
    tmoe.replace_moe(model, "mxfp8")
    assert first.down_proj.data.data_ptr() == second.down_proj.data.data_ptr()
    assert first.gate_up_proj.data.data_ptr() != second.gate_up_proj.data.data_ptr()


def break_meta(experts):
    experts.to("meta")


def break_nan(experts):
    with torch.no_grad():
        experts.down_proj[3, 5, 7] = float("nan")


def break_parametrised(experts):
    parametrize.register_parametrization(experts, "down_proj", nn.Identity())


def break_shared(experts):
    experts.gate_up_proj.owner = nn.Linear(2, 2)
    experts.act_fn.weight = experts.gate_up_proj


def break_odd(experts):
    experts.gate_up_proj = nn.Parameter(torch.randn(8, 94, 64))
    experts.down_proj = nn.Parameter(torch.randn(8, 64, 47))


@pytest.mark.parametrize(
    ("breaks", "reason"),
    [
        (break_meta, "gate_up_proj is offloaded or not loaded yet"),
        (break_nan, "down_proj, expert 3: it holds NaN or Inf"),
        (break_parametrised, "its down_proj is parametrised"),
        (break_shared, "gate_up_proj is shared with SiLUActivation"),
        (break_odd, "down_proj: its rows have 47 values and nvfp4 packs two into a byte"),
    ],
)
def test_a_layer_that_cannot_be_quantised_keeps_its_weights(breaks, reason):
    """By name, with the reason, while the others are quantised."""
    model = BY_NAME["mixtral"].build()
    experts = model.model.layers[0].mlp.experts
    breaks(experts)
    before = list(experts.parameters())
    report = tmoe.replace_moe(model, "nvfp4")
    assert list(report.errors) == ["model.layers.1.mlp.experts"]
    ((name, got),) = report.not_quantized.items()
    assert name == "model.layers.0.mlp.experts" and got.startswith(reason)
    assert all(old is new for old, new in zip(before, experts.parameters(), strict=True))
    assert f"  {name}: {got}" in str(report)


def test_dbrx_and_peft_are_left_alone():
    report = tmoe.replace_moe(BY_NAME["dbrx"].build(), "nvfp4")
    assert len(report.replaced) == 2 and not report.errors
    assert "separate parameters" in str(report)
    wrapper = nn.Module()
    wrapper.base_layer = BY_NAME["mixtral"].build().model.layers[0].mlp.experts
    report = tmoe.replace_moe(wrapper, "nvfp4")
    assert report.not_quantized == {
        "base_layer": "PEFT wraps it; merge or unload the adapter first"
    }


def test_experts_of_an_unknown_layout_are_reported(monkeypatch):
    """Nothing that runs on tmoe is left out of the report."""
    model = BY_NAME["jetmoe"].build()
    tmoe.replace_moe(model)
    monkeypatch.delattr(type(model.model.layers[0].mlp), "weight_names")
    report = tmoe.replace_moe(model, "nvfp4")
    assert report.not_quantized == {
        f"model.layers.{i}.mlp": "tmoe doesn't quantise the experts of TmoeJetMoeMoE"
        for i in (0, 1)
    }


def test_progress(capsys):
    model = BY_NAME["mixtral"].build()
    tmoe.replace_moe(copy.deepcopy(model), "nvfp4")
    assert capsys.readouterr() == ("", "")  # no terminal
    tmoe.replace_moe(model, "nvfp4", progress=True)
    out, err = capsys.readouterr()
    assert out == "" and "2/2" in err and "layers" in err


def test_it_compiles_and_generates():
    """Without a graph break, and with the same result."""
    model = BY_NAME["mixtral"].build()
    tmoe.replace_moe(model, "nvfp4_a16")
    torch._dynamo.reset()
    with torch.no_grad():
        want = outputs(model)
        got = outputs(torch.compile(model, fullgraph=True, backend="aot_eager"))
        torch.testing.assert_close(got, want)
        tokens = model.generate(IDS, max_new_tokens=4, do_sample=False)
    assert tokens.shape == (2, IDS.shape[1] + 4)
