"""What a configuration says of each layer: patterns, groups, and the schemes that follow."""

from __future__ import annotations

import pytest
import torch

from tests.checkpoints.writing import write
from tmoe.checkpoints import Checkpoint
from tmoe.checkpoints.methods import describe
from tmoe.checkpoints.quantization import LinearFormat, matches
from tmoe.checkpoints.stored import quantized_layers

FP8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
NVFP4 = {"num_bits": 4, "type": "float", "group_size": 16}
TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
UP = "model.layers.3.mlp.experts.0.up_proj"


@pytest.mark.parametrize("pattern, yes, no", [
    ("Linear", UP, None),
    ("re:.*experts.*up_proj$", UP, "model.layers.3.mlp.up_proj.weight"),
    ("model.layers.3.mlp.experts", UP, "model.layers.3.mlp.experts2"),
    ("*.mlp.experts*", UP, "model.layers.3.self_attn.q_proj"),
    ("lm_head", "lm_head", "lm_head2"),
    ("up_proj", UP, "model.layers.3.mlp.experts.0.gate_up_proj"),
])  # fmt: skip
def test_patterns(pattern, yes, no):
    assert matches(pattern, yes)
    assert no is None or not matches(pattern, no)


def test_groups_by_name_come_before_the_class(tmp_path):
    """compressed-tensors with NVFP4 experts, FP8 elsewhere, and a layer that no group has."""
    groups = {
        "group_0": {"targets": ["Linear"], "weights": FP8, "input_activations": TOKEN},
        "group_1": {"targets": ["re:.*experts.*"], "weights": NVFP4, "input_activations": None},
    }
    config = dict(quant_method="compressed-tensors", format="mixed-precision",
                  config_groups=groups, ignore=["lm_head"])  # fmt: skip
    found = describe({"quantization_config": config}, tmp_path)
    assert found.of(UP) == LinearFormat("nvfp4", None)
    assert found.of("model.layers.3.self_attn.q_proj") == LinearFormat("fp8_channel", "token")
    assert found.ignored == ("lm_head",)
    assert str(found).startswith("compressed-tensors: nvfp4 weights, unquantised inputs; fp8_ch")


def test_of_a_text_model_inside_another(tmp_path):
    """Some configs say it of their text model only; a folder without any says nothing."""
    inner = dict(quant_method="fp8", weight_block_size=[128, 128])
    found = describe({"text_config": {"quantization_config": inner}}, tmp_path)
    assert found.of(UP) == LinearFormat("fp8_block", "block")
    assert describe({"text_config": {}}, tmp_path) is None


@pytest.mark.parametrize("linear, scheme", [
    (LinearFormat("fp8_block", "static"), None),
    (LinearFormat("fp8_channel", "static"), None),
    (LinearFormat("mxfp4", "token"), None),
    (LinearFormat("mxfp8", None), None),
    (LinearFormat("fp8_tensor", "token"), "fp8_channel"),
], ids=str)  # fmt: skip
def test_weights_and_inputs(linear, scheme):
    """QN22: what the checkpoint asks for runs, or an error says what can; it isn't left out."""
    if scheme is not None:
        assert linear.scheme(None, "op") == scheme
        return
    with pytest.raises(ValueError, match=f"op: scheme must be given .* {linear.format} weights"):
        linear.scheme(None, "op")


def test_a_norm_with_a_scale(tmp_path):
    """`scale` is DeepSeek-V4's name for the scales of codes, and others' for a parameter."""
    tensors = {"norm.weight": torch.ones(4), "norm.scale": torch.ones(4)}
    tensors |= {
        "up.weight": torch.zeros(4, 4).to(torch.float8_e4m3fn),
        "up.scale": torch.ones(1, 1),
    }
    config = {"quantization_config": dict(quant_method="fp8", weight_block_size=[128, 128])}
    found = quantized_layers(Checkpoint(write(tmp_path, tensors, config)))
    assert found == {"up": {"data": "up.weight", "scale": "up.scale"}}
