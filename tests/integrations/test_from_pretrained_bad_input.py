"""What `tmoe.from_pretrained` refuses: by the headers, so that no tensor is read and no model is
half loaded."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch

import tmoe
from tests.checkpoints.kinds import compressed_tensors
from tests.integrations.families import BY_NAME
from tests.integrations.saved import save
from tmoe.checkpoints import Checkpoint

FP8 = compressed_tensors("FP8_DYNAMIC", "fp8_channel")
QWEN = replace(BY_NAME["qwen3_moe"], overrides=dict(moe_intermediate_size=64))
EXPERT = "model.layers.1.mlp.experts.3.up_proj"
QUERY = "model.layers.0.self_attn.q_proj"


@pytest.fixture(autouse=True)
def nothing_is_read(monkeypatch):
    monkeypatch.setattr(Checkpoint, "view", lambda self, name: pytest.fail(f"read {name}"))


def without(*names):
    return lambda tensors: [tensors.pop(name) for name in names]


def with_(**more):
    return lambda tensors: tensors.update(
        {name.replace("__", "."): tensor for name, tensor in more.items()}
    )


def every_expert(tensors):
    """Nine experts where the config says eight."""
    for name in [n for n in tensors if ".experts.0." in n]:
        tensors[name.replace(".experts.0.", ".experts.8.")] = tensors[name]


def other_width(tensors):
    for name, tensor in tensors.items():
        if ".experts." in name and not name.endswith("down_proj.weight_scale"):
            tensors[name] = tensor[:, :48] if "down_proj" in name else tensor[:48]


TENSORS = {
    "missing expert": (
        without(f"{EXPERT}.weight", f"{EXPERT}.weight_scale"),
        "model.layers.1.mlp.experts: up_proj must be of experts 0 to 7, got none of [3]",
    ),
    "missing scale of an expert": (
        without(f"{EXPERT}.weight_scale"),
        f"{EXPERT}.weight must be beside its scale, {EXPERT}.weight_scale, got none for",
    ),
    "scale without a weight": (
        without(f"{EXPERT}.weight"), f"got 1: {EXPERT}.weight_scale"
    ),
    "missing scale of a layer": (
        without(f"{QUERY}.weight_scale"), f"{QUERY}.weight must be beside its scale"
    ),
    "missing norm": (
        without("model.norm.weight"), "must be complete, got without 1 tensors: model.norm.weight"
    ),
    "surplus": (
        with_(model__layers__0__mlp__extra__weight=torch.zeros(2)),
        "without tensors that the model has no place for, got 1: model.layers.0.mlp.extra.weight",
    ),
    "many surplus": (
        with_(**{f"x{i}__weight": torch.zeros(2) for i in range(20)}), "got 20: x0.weight, x1"
    ),
    "more experts than the config says": (
        every_expert, "must be of 8 experts, as the config says, got [8]"
    ),
    "a width that the config doesn't have": (
        other_width, "must be of shape (64, 64), as the config says, got float8_e4m3fn (48, 64)"
    ),
    "a norm of another size": (
        with_(model__norm__weight=torch.ones(32)),
        "model.norm.weight must be of shape (64,), as the config says, got (32,)",
    ),
    "an expert that isn't quantised": (
        lambda t: t.update({f"{EXPERT}.weight": torch.zeros(64, 64)}),
        f"{EXPERT}.weight must be of dtype float8_e4m3fn, got float32 (64, 64)",
    ),
    "codes without a description": (
        with_(model__norm__weight=torch.ones(64).to(torch.float8_e4m3fn)),
        "model.norm.weight must be beside its scale",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", TENSORS)
def test_tensors(damage, tmp_path):
    edit, message = TENSORS[damage]
    folder, _ = save(QWEN, FP8, tmp_path, edit=edit)
    with pytest.raises(ValueError, match=f"^from_pretrained: .*{re.escape(message)}"):
        tmoe.from_pretrained(folder)


def test_scales_of_a_cache_are_left_out(tmp_path):
    """ModelOpt and llm-compressor write them; transformers' cache isn't quantised."""
    scale = torch.ones(())
    edit = with_(**{f"model__layers__0__self_attn__{x}_proj__{x}_scale": scale for x in "kv"})
    folder, _ = save(QWEN, FP8, tmp_path, edit=edit)
    with pytest.raises(pytest.fail.Exception, match="^read "):  # all is well until tensors are read
        tmoe.from_pretrained(folder)


def test_no_description(tmp_path):
    folder, _ = save(QWEN, FP8, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="no place for, got 56: .*weight_scale"):
        tmoe.from_pretrained(folder)


@pytest.mark.parametrize("arguments, message", [
    (dict(scheme="nvfp4"), "scheme must be one for fp8_channel weights, got nvfp4"),
    (dict(scheme="fp7"), "scheme must be one of fp8_tensor, .*, got 'fp7'"),
    (dict(quantization_config={}), "quantization_config must be left to tmoe, got {}"),
    (dict(tp_plan="auto"), "tp_plan must be left to tmoe, got auto"),
    (dict(device="cpu", device_map="auto"), "device_map must be None where device is given"),
    (dict(device_map={"": "disk"}), "device_map must be all on GPUs or all on the CPU"),
    (dict(device_map={"model": 0, "lm_head": "cpu"}), "device_map must be all on GPUs or all on"),
], ids=str)  # fmt: skip
def test_arguments(arguments, message, tmp_path):
    folder, _ = save(QWEN, FP8, tmp_path)
    with pytest.raises(ValueError, match=f"^from_pretrained: {message}"):
        tmoe.from_pretrained(folder, **arguments)


def test_no_such_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="path must be a folder with config.json .*, got"):
        tmoe.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(TypeError, match="path must be a str or PathLike, got int"):
        tmoe.from_pretrained(3)
