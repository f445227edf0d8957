"""`tmoe.from_pretrained`: whole tiny models from quantised checkpoints. Truth: transformers' own
model with the weights as the defining library dequantises them. With weight-only schemes the logits
are equal; where inputs are rounded too, the experts are compared with the scheme's arithmetic."""

from __future__ import annotations

import copy
import io
import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

import tmoe
from tests.checking import assert_matches
from tests.checkpoints.fused import fbgemm, gpt_oss
from tests.checkpoints.kinds import (
    compressed_tensors,
    deepseek_v4,
    finegrained,
    modelopt,
    nvfp4,
    nvfp4_truth,
)
from tests.checkpoints.writing import PREFIX, write
from tests.integrations.counting import CountOps
from tests.integrations.families import BY_NAME
from tests.integrations.family import DEVICE, outputs
from tests.integrations.saved import INPUT_SCALE, save
from tests.reference import fused_experts_ref, quantized_experts_ref
from tmoe.formats import QuantizedTensor

FP8 = compressed_tensors("FP8_DYNAMIC", "fp8_channel")
BLOCKS = compressed_tensors("FP8_BLOCK", "fp8_block")
NVFP4 = compressed_tensors("NVFP4", "nvfp4", ("input_global_scale", True))
QWEN = replace(BY_NAME["qwen3_moe"], overrides=dict(moe_intermediate_size=64))


def load(folder, **options):
    return tmoe.from_pretrained(folder, dtype=torch.float32, device=DEVICE, **options)


def quantized(model):
    return {n: p for n, p in model.named_parameters() if isinstance(p, QuantizedTensor)}


@pytest.mark.parametrize("name", [
    "qwen3_moe", "mixtral", "deepseek_v3", "deepseek_v4", "minimax_m2", "kimi_linear", "nemotron_h",
    "longcat_flash",
])  # fmt: skip
def test_families(name, tmp_path):
    """Names of every style: w1 and gate_proj, block_sparse_moe, other prefixes, no gate. The
    experts are held quantised; attention and shared experts are dequantised."""
    family = BY_NAME[name]
    folder, reference = save(family, FP8, tmp_path)
    model = load(folder, scheme="fp8_a16", model_class=type(reference))
    assert len(quantized(model)) == 2 * family.layers
    assert all(".experts." in name for name in quantized(model))
    assert not model.training
    with torch.no_grad(), CountOps() as ops:
        got = outputs(model)
    assert ops.calls["quantized_experts"] + ops.calls["quantized_grouped_gemm"] >= family.layers
    assert not ops.calls["fused_experts"]
    with torch.no_grad():
        want = outputs(reference.to(DEVICE))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind, scheme", [
    (compressed_tensors("FP8", "fp8_tensor", ("input_scale", False)), "fp8_a16"),
    (BLOCKS, "fp8_a16"),
    (NVFP4, "nvfp4_a16"),
    (compressed_tensors("MXFP4A16", "mxfp4_a16"), None),
    (modelopt("NVFP4", nvfp4, nvfp4_truth, "nvfp4", ("input_scale", False)), "nvfp4_a16"),
    (finegrained("fp8-per-tensor", "fp8_channel", block=None), "fp8_a16"),
], ids=str)  # fmt: skip
def test_kinds(kind, scheme, tmp_path):
    """Every kind of file, from two shards; blocks end within I = 64, and are filled with zeros."""
    folder, reference = save(QWEN, kind, tmp_path, shards=2)
    model = load(folder, scheme=scheme)
    with torch.no_grad():
        got, want = outputs(model), outputs(reference.to(DEVICE))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [NVFP4, BLOCKS, FP8], ids=str)
def test_the_scheme_of_the_checkpoint(kind, tmp_path):
    """Inputs are rounded as the checkpoint says, with its static scales."""
    folder, reference = save(QWEN, kind, tmp_path)
    experts = load(folder).model.layers[0].mlp.experts
    plain = reference.model.layers[0].mlp.experts
    assert experts.tmoe_scheme.name == kind.scheme
    x, weights = torch.randn(9, 64), torch.rand(9, 2)
    ids = torch.stack([torch.randperm(8)[:2] for _ in range(9)])
    scales = {}
    if kind.static:
        scales = {key: torch.tensor(INPUT_SCALE) for key in ("input_scale", "hidden_scale")}
        assert torch.allclose(experts.tmoe_scheme.input_scale.cpu(), torch.full((8,), INPUT_SCALE))
    with torch.no_grad():
        y = experts(x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE)).cpu()
        layer = (x, plain.gate_up_proj, plain.down_proj, weights, ids)
        truth = quantized_experts_ref(*layer, kind.scheme, **scales)
        assert_matches(y, truth, fused_experts_ref(*layer, dtype=torch.bfloat16))


def test_an_ordinary_checkpoint(tmp_path):
    """Not quantised: as transformers loads it, on tmoe."""
    folder, reference = save(QWEN, FP8, tmp_path, which=lambda name, w: False)
    model = load(folder)
    assert not quantized(model)
    with torch.no_grad(), CountOps() as ops:
        got, want = outputs(model), outputs(reference.to(DEVICE))
    assert dict(ops.calls) == {"fused_experts": 2}
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name, make", [("gpt_oss", gpt_oss), ("llama4_text", fbgemm)])
def test_fused(name, make, tmp_path):
    """gpt-oss: blocks and scales, rows and biases that alternate. Llama 4: stored transposed."""
    family = replace(BY_NAME[name], overrides={"intermediate_size": 64})
    reference = family.build().cpu()
    reference.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    tensors = load_file(tmp_path / "model.safetensors")
    for i in (0, 1):
        block = "mlp" if name == "gpt_oss" else "feed_forward"
        prefix = f"model.layers.{i}.{block}.experts"
        experts = reference.get_submodule(prefix)
        parts, described, *truths = make(8, 64, 64)
        for parameter, values in zip(("gate_up_proj", "down_proj"), truths, strict=True):
            del tensors[f"{prefix}.{parameter}"]
            getattr(experts, parameter).data = values.transpose(1, 2).contiguous()
        tensors |= {key.replace(PREFIX, prefix): part for key, part in parts.items()}
        for bias in ("gate_up_proj_bias", "down_proj_bias"):
            if hasattr(experts, bias):
                getattr(experts, bias).data = tensors[f"{prefix}.{bias}"].float()
    config["quantization_config"] = described["quantization_config"]
    folder = write(tmp_path / "quantized", tensors, config)
    scheme = "fp8_a16" if name == "llama4_text" else None
    model = load(folder, scheme=scheme, model_class=type(reference))
    assert len(quantized(model)) == 4
    with torch.no_grad():
        got, want = outputs(model), outputs(reference.to(DEVICE))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_deepseek_v4(tmp_path):
    """FP4 experts, FP8 blocks elsewhere, and all scales under ``.scale``."""
    fp4 = deepseek_v4()

    def store(w):
        parts = BLOCKS.store(w)
        return {"weight": parts["weight"], "scale": parts["weight_scale"]}

    def truth(parts):
        return BLOCKS.truth({"weight": parts["weight"], "weight_scale": parts["scale"]})

    fp8 = replace(fp4, store=store, truth=truth)
    family = replace(BY_NAME["deepseek_v4"], overrides={"moe_intermediate_size": 64})
    folder, reference = save(
        family, fp4, tmp_path, kind_of=lambda name: fp4 if ".experts." in name else fp8
    )
    model = load(folder, scheme="mxfp4_a16")
    assert len(quantized(model)) == 4
    with torch.no_grad():
        got, want = outputs(model), outputs(reference.to(DEVICE))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_llama4_expert_by_expert(tmp_path):
    """llm-compressor takes Llama 4's fused tensors apart; the model's rules don't say so."""
    reference = BY_NAME["llama4_text"].build().cpu()
    reference.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    tensors = load_file(tmp_path / "model.safetensors")
    for i in (0, 1):
        prefix = f"model.layers.{i}.feed_forward.experts"
        experts = reference.get_submodule(prefix)
        gate_up, down = (tensors.pop(f"{prefix}.{n}_proj") for n in ("gate_up", "down"))
        for e in range(8):
            gate, up = gate_up[e].T.chunk(2)
            weights = {"gate_proj": gate, "up_proj": up, "down_proj": down[e].T}
            for name, w in weights.items():
                parts = FP8.store(w.contiguous())
                tensors |= {f"{prefix}.{e}.{name}.{k}": v for k, v in parts.items()}
                weights[name] = FP8.truth(parts).T
            experts.gate_up_proj.data[e] = torch.cat([weights["gate_proj"], weights["up_proj"]], 1)
            experts.down_proj.data[e] = weights["down_proj"]
    config["quantization_config"] = FP8.config
    folder = write(tmp_path / "quantized", tensors, config)
    model = load(folder, scheme="fp8_a16", model_class=type(reference))
    with torch.no_grad():
        got, want = outputs(model), outputs(reference.to(DEVICE))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3"])
def test_save_and_load_again(name, tmp_path):
    """The experts are written as they were read, under their original names; the rest isn't
    quantised any more."""
    folder, _ = save(BY_NAME[name], FP8, tmp_path)
    model = load(folder)
    model.save_pretrained(tmp_path / "saved")
    before, after = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "saved"))
    experts = {key for key in before if ".experts." in key}
    assert experts == {key for key in after if ".experts." in key}
    assert all(torch.equal(before[key].float(), after[key].float()) for key in experts
               if key.endswith(".weight"))  # fmt: skip
    again = load(tmp_path / "saved")
    with torch.no_grad():
        assert torch.equal(outputs(again), outputs(model))


def test_what_save_pretrained_cannot_write(tmp_path):
    """Static scales, rows of zeros, and weights that the writer has no words for: refused before
    a file is written."""
    for kind, scheme, reason in (
        (NVFP4, None, "static scales"),
        (BLOCKS, None, "rows of zeros fill"),
        (FP8, "fp8_a16", "its weights are fp8_channel, and for fp8_a16 tmoe writes fp8_tensor"),
    ):
        folder, _ = save(QWEN, kind, tmp_path / kind.name)
        with pytest.raises(NotImplementedError, match=reason):
            load(folder, scheme=scheme).save_pretrained(tmp_path / "saved")
        assert not list((tmp_path / "saved").glob("*.safetensors"))


def test_the_model_is_an_ordinary_one(tmp_path):
    """It generates, is copied, its state dict is saved and loaded, and its config is the
    checkpoint's; what can't work says so."""
    folder, reference = save(QWEN, FP8, tmp_path)
    (folder / "generation_config.json").write_text('{"max_new_tokens": 3, "do_sample": false}')
    model = tmoe.from_pretrained(str(folder), dtype=torch.float32).to(DEVICE)
    tokens = torch.tensor([[3, 4, 5]], device=DEVICE)
    assert model.generate(tokens).shape == (1, 6)
    assert set(model.state_dict()) == set(reference.state_dict())
    assert model.config.quantization_config == FP8.config
    again = copy.deepcopy(model)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    again.load_state_dict(torch.load(buffer, weights_only=True))
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, again(tokens).logits)
    assert tmoe.replace_moe(model).replaced == [f"model.layers.{i}.mlp.experts" for i in (0, 1)]
    half = tmoe.from_pretrained(folder)
    assert half.lm_head.weight.dtype == torch.float32  # as the config says
    half = tmoe.from_pretrained(folder, dtype=torch.bfloat16)
    assert half.model.layers[0].self_attn.q_proj.weight.dtype == torch.bfloat16
    assert {p.dtype for p in quantized(half).values()} == {torch.bfloat16}  # nominal
