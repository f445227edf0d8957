"""`tmoe.from_pretrained` with checkpoints of unusual shape: fused tensors, experts taken apart, two
formats in one model. Truth: transformers' model with the dequantised weights."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration
from transformers import Qwen3VLMoeTextConfig as TEXT

from tests.checkpoints.fused import fbgemm, gpt_oss
from tests.checkpoints.kinds import deepseek_v4, spread
from tests.checkpoints.writing import PREFIX, write
from tests.integrations.families import BY_NAME
from tests.integrations.family import COMMON, DEVICE, outputs
from tests.integrations.saved import save
from tests.integrations.test_from_pretrained import BLOCKS, load, quantized


@pytest.mark.column("loaded")
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


def vision_model():
    """A tiny Qwen3-VL: the text model is inside another, and so are its names."""
    text = {k: v for k, v in COMMON.items() if k in TEXT.__dataclass_fields__}
    text |= dict(hidden_size=128, moe_intermediate_size=96)
    vision = dict(depth=1, hidden_size=32, num_heads=2, intermediate_size=32, out_hidden_size=128,
                  patch_size=4, deepstack_visual_indexes=[])  # fmt: skip
    config = Qwen3VLMoeConfig(text_config=text, vision_config=vision)
    return Qwen3VLMoeForConditionalGeneration(config).eval()


@pytest.mark.parametrize("is_transposed", [True, False])
def test_fused_as_transformers_has_a_rule(is_transposed, tmp_path):
    """Qwen3-VL's experts: stored transposed by their authors, and not by transformers; its rule
    for them looks at the shape."""
    reference = vision_model()
    reference.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        parameter = reference.get_parameter(name)
        N, K = parameter.shape[1:]
        codes = torch.randn(parameter.shape).to(torch.float8_e4m3fn)
        scale = torch.rand(8, -(-N // 128), -(-K // 128)) * 0.01
        parameter.data = codes.float() * spread(scale, 128, 128)[:, :N, :K]
        parts = {name: codes, f"{name}_scale_inv": scale}
        turned = {key: part.transpose(1, 2) for key, part in parts.items()}
        tensors |= turned if is_transposed else parts
    described = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    folder = write(tmp_path / "quantized", tensors, config | {"quantization_config": described})
    model = load(folder, scheme="fp8_a16")
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
