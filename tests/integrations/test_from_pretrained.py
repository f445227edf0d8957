"""`tmoe.from_pretrained`: whole tiny models from quantised checkpoints. Truth: transformers' own
model with the weights as the defining library dequantises them. With weight-only schemes the logits
are equal; where inputs are rounded too, the experts are compared with the scheme's arithmetic."""

from __future__ import annotations

import copy
import io
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

import tmoe
from tests.checking import assert_matches
from tests.checkpoints.kinds import (
    compressed_tensors,
    finegrained,
    modelopt,
    nvfp4,
    nvfp4_truth,
)
from tests.integrations.counting import CountOps
from tests.integrations.families import BY_NAME
from tests.integrations.family import DEVICE, outputs
from tests.integrations.saved import INPUT_SCALE, save
from tests.reference import fused_experts_ref, quantized_experts_ref
from tmoe.formats import QuantizedTensor

FP8 = compressed_tensors("FP8_DYNAMIC", "fp8_channel")
BLOCKS = compressed_tensors("FP8_BLOCK", "fp8_block")
NVFP4 = compressed_tensors("NVFP4", "nvfp4", ("input_global_scale", True))
NOT_LINEAR = (
    "not tested: its files have all experts of a layer in one tensor, of a name of its own or with "
    "biases, and we know no quantised checkpoint of that form"
)
QWEN = replace(BY_NAME["qwen3_moe"], overrides=dict(moe_intermediate_size=64))


def load(folder, **options):
    return tmoe.from_pretrained(folder, dtype=torch.float32, device=DEVICE, **options)


def quantized(model):
    return {n: p for n, p in model.named_parameters() if isinstance(p, QuantizedTensor)}


@pytest.mark.column("loaded")
@pytest.mark.parametrize("name", [name for name in BY_NAME if name != "gpt_oss"])  # see _fused.py
def test_families(name, tmp_path):
    """Names of every style: w1 and gate_proj, block_sparse_moe, other prefixes, no gate. The
    experts are held quantised; attention and shared experts are dequantised."""
    family = BY_NAME[name]
    folder, reference = save(family, FP8, tmp_path)
    layers = {name.split(".experts.")[0] for name in load_file(folder / "model.safetensors")
              if re.search(r"\.experts\.\d+\..*scale$", name)}  # fmt: skip
    if not layers:
        pytest.skip(NOT_LINEAR)
    assert len(layers) == family.layers
    model = load(folder, scheme="fp8_a16", model_class=type(reference))
    assert len(quantized(model)) == 2 * family.layers
    assert all("experts." in name for name in quantized(model))
    assert not model.training
    with torch.no_grad(), CountOps() as ops:
        got = outputs(model)
    calls = ops.calls["quantized_experts"] + ops.calls["quantized_grouped_gemm"]
    assert calls == family.expected_ops - family.expected_routers
    assert not ops.calls["fused_experts"] and not ops.calls["grouped_gemm"]
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


@pytest.mark.column("loaded")
@pytest.mark.parametrize("scheme, kind", [
    ("fp8_tensor", compressed_tensors("FP8", "fp8_tensor", ("input_scale", False))),
    ("fp8_channel", FP8),
    ("fp8_block", BLOCKS),
    ("mxfp8", compressed_tensors("MXFP8", "mxfp8")),
    ("mxfp4_a8", compressed_tensors("MXFP4A16", "mxfp4_a16")),
    ("nvfp4", NVFP4),
    ("fp8_a16", FP8),
    ("mxfp4_a16", compressed_tensors("MXFP4A16", "mxfp4_a16")),
    ("nvfp4_a16", compressed_tensors("NVFP4A16", "nvfp4_a16")),
], ids=str)  # fmt: skip
def test_each_scheme(scheme, kind, tmp_path):
    """Inputs are rounded as the checkpoint says, with its static scales, or as we are asked."""
    folder, reference = save(QWEN, kind, tmp_path)
    asked = None if kind.scheme == scheme else scheme
    experts = load(folder, scheme=asked).model.layers[0].mlp.experts
    plain = reference.model.layers[0].mlp.experts
    assert experts.tmoe_scheme.name == scheme
    x, weights = torch.randn(9, 64), torch.rand(9, 2)
    ids = torch.stack([torch.randperm(8)[:2] for _ in range(9)])
    scales = {}
    if kind.static:
        scales = {key: torch.tensor(INPUT_SCALE) for key in ("input_scale", "hidden_scale")}
        assert torch.allclose(experts.tmoe_scheme.input_scale.cpu(), torch.full((8,), INPUT_SCALE))
    with torch.no_grad():
        y = experts(x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE)).cpu()
        layer = (x, plain.gate_up_proj, plain.down_proj, weights, ids)
        truth = quantized_experts_ref(*layer, scheme, **scales)
        assert_matches(y, truth, fused_experts_ref(*layer, dtype=torch.bfloat16))


@pytest.mark.parametrize("name, router", [("qwen3_moe", "router"), ("jetmoe", "route")])
def test_an_ordinary_checkpoint(name, router, tmp_path):
    """Not quantised: as transformers loads it, on tmoe; JetMoE's experts once they have weights."""
    folder, reference = save(BY_NAME[name], FP8, tmp_path, which=lambda name, w: False)
    model = load(folder)
    assert not quantized(model) and not model.is_quantized
    with torch.no_grad(), CountOps() as ops:
        got, want = outputs(model), outputs(reference.to(DEVICE))
    assert dict(ops.calls) == {router: 2, "fused_experts": 2}
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
