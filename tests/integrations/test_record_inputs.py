"""Ranges of the experts' inputs, recorded and written as static scales."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

import tmoe
from tests.checkpoints.tiny_models import qwen3_moe, save
from tests.integrations.families import BY_NAME
from tests.integrations.family import outputs
from tmoe.checkpoints import Checkpoint, quantize_checkpoint, read_experts
from tmoe.checkpoints.input_ranges import InputRanges
from tmoe.integrations.transformers import record_input_ranges
from tmoe.integrations.transformers.switch import expert_modules

LAYER = "model.layers.1.mlp.experts"
IDS = torch.arange(48).view(2, 24)


def record(model) -> InputRanges:
    tmoe.replace_moe(model)
    with record_input_ranges(model) as recording:
        model(IDS)
        model(IDS.flip(1))
    return recording.ranges()


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "llama4_text", "muse_spark_text"])
def test_the_ranges(name):
    """Those of the rows that reach an expert, by hand; outputs stay what they are."""
    model = BY_NAME[name].build()
    tmoe.replace_moe(model)
    modules, calls = dict(expert_modules(model)), {}
    for module_name, experts in modules.items():
        experts.register_forward_pre_hook(
            lambda _, args, name=module_name: calls.setdefault(name, args)
        )
    with torch.no_grad():
        want = outputs(model)
        with record_input_ranges(model) as recording:
            torch.testing.assert_close(outputs(model), want, rtol=1e-4, atol=1e-4)
    for module_name, (x, ids, weights) in calls.items():
        seen = recording._recorders[module_name]
        for e in range(8):
            tokens, slots = (ids == e).nonzero(as_tuple=True)
            rows = x[tokens]
            if "llama4" in name:
                rows = rows * weights[tokens, slots, None]
            largest = rows.abs().max() if len(rows) else torch.zeros(())
            torch.testing.assert_close(seen.input[e], largest)
        experts = modules[module_name]
        if name == "mixtral":
            gate, up = (x @ experts.gate_up_proj[0].T)[(ids == 0).any(1)].chunk(2, -1)
            hidden = torch.nn.functional.silu(gate) * up
            torch.testing.assert_close(seen.hidden[0], hidden.abs().max())
    with torch.no_grad():
        assert torch.equal(outputs(model), want)  # nothing is left behind


def test_experts_without_tokens_get_a_guess_and_a_warning():
    model = BY_NAME["mixtral"].build()
    tmoe.replace_moe(model)
    with record_input_ranges(model) as recording:
        for _, experts in expert_modules(model):
            experts(torch.randn(6, 64), torch.arange(12).view(6, 2) % 4, torch.full((6, 2), 0.5))
    with pytest.warns(UserWarning, match=r"experts \[4, 5, 6, 7\] saw no tokens"):
        ranges = recording.ranges()
    for both in ranges.layers.values():
        for amax in both:
            assert amax.min() > 0 and torch.equal(amax[4:], amax[:4].max().expand(4))
    with record_input_ranges(model) as recording:
        pass
    with pytest.raises(ValueError, match="must be given some tokens, got none"):
        recording.ranges()


@pytest.mark.parametrize("scheme", ["nvfp4", "fp8_tensor"])
@pytest.mark.parametrize("format", ["compressed-tensors", "modelopt"])
def test_a_checkpoint_with_static_scales(scheme, format, tmp_path):
    """They are read back, as multipliers, and used."""
    source = save(qwen3_moe(), tmp_path / "source")
    ranges = record(qwen3_moe())
    ranges.save(tmp_path / "ranges")
    assert list(ranges.layers) == [f"model.layers.{i}.mlp.experts" for i in range(2)]
    out = tmp_path / "out"
    report = quantize_checkpoint(
        source, out, scheme, format=format, input_ranges=tmp_path / "ranges"
    )
    assert not report.note
    read = read_experts(Checkpoint(out), LAYER)
    assert read.scheme == scheme
    largest = 448 * 6 if scheme == "nvfp4" else 448
    for got, amax in zip((read.input_scale, read.hidden_scale), ranges.layers[LAYER], strict=True):
        torch.testing.assert_close(got, amax / largest, rtol=3e-7, atol=0)
    stated = json.loads((out / "config.json").read_text())["quantization_config"]
    if format == "compressed-tensors":
        from compressed_tensors.quantization import QuantizationConfig

        (group,) = QuantizationConfig.model_validate(stated).config_groups.values()
        assert group.input_activations.dynamic == ("local" if scheme == "nvfp4" else False)
    else:
        assert stated["quant_algo"] == ("NVFP4" if scheme == "nvfp4" else "FP8")
    loaded, before = tmoe.from_pretrained(out), qwen3_moe()
    with torch.no_grad():
        got, want = loaded(IDS).logits.float(), before(IDS).logits.float()
    assert 0 < (got - want).norm() / want.norm() < 0.5


def test_what_is_refused(tmp_path):
    model = BY_NAME["mixtral"].build()
    with pytest.raises(ValueError, match="got none; call replace_moe first"):
        with record_input_ranges(torch.nn.Linear(2, 2)):
            pass
    tmoe.replace_moe(model, "nvfp4")
    with pytest.raises(ValueError, match="unquantised experts .* got nvfp4"):
        with record_input_ranges(model):
            pass
    jetmoe = BY_NAME["jetmoe"].build()
    tmoe.replace_moe(jetmoe)
    with pytest.raises(ValueError, match="can be recorded, got TmoeJetMoeMoE"):
        with record_input_ranges(jetmoe):
            pass

    source = save(qwen3_moe(), tmp_path / "source")
    good = record(qwen3_moe())
    first = next(iter(good.layers))
    for layers, match in [
        ({first: good.layers[first]}, "of model.layers.1.mlp.experts too"),
        ({n: (a[:3], b) for n, (a, b) in good.layers.items()}, r"input_amax .* shape \(4,\)"),
        ({n: (a, b * torch.nan) for n, (a, b) in good.layers.items()}, "hidden_amax .* finite"),
    ]:
        InputRanges(layers).save(tmp_path / "bad")
        with pytest.raises(ValueError, match=match):
            quantize_checkpoint(source, tmp_path / "a", "nvfp4", input_ranges=tmp_path / "bad")
    save_file({"x": torch.ones(1)}, tmp_path / "other")
    with pytest.raises(ValueError, match="a file that InputRanges wrote, got x"):
        quantize_checkpoint(source, tmp_path / "b", "nvfp4", input_ranges=tmp_path / "other")
    good.save(tmp_path / "good")
    with pytest.raises(ValueError, match="None for fp8_block; fp8_tensor and nvfp4 have static"):
        quantize_checkpoint(source, tmp_path / "c", "fp8_block", input_ranges=tmp_path / "good")
    quantize_checkpoint(source, tmp_path / "d", "nvfp4", input_ranges=tmp_path / "good")
    with pytest.raises(ValueError, match="begun with input ranges"):
        quantize_checkpoint(source, tmp_path / "d", "nvfp4")
