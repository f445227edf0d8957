"""Fused tensors: transposed or not, interleaved or not, with the biases beside them."""

from __future__ import annotations

import pytest
import torch

from tests.checkpoints.fused import FUSED, fp8_blocks, gpt_oss
from tests.checkpoints.writing import PREFIX, write
from tmoe.checkpoints import Checkpoint, expert_prefixes, find_experts, read_experts

SIZES = [(3, 96, 160), (2, 64, 64), (2, 64, 32)]  # WL03: also H = I and H = 2I


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", FUSED)
def test_fused(name, sizes, tmp_path):
    """WL03: the layout is the method's, and isn't guessed from a shape that fits both ways."""
    make, scheme = FUSED[name]
    tensors, config, gate_up, down = make(*sizes)
    checkpoint = Checkpoint(write(tmp_path, tensors, config))
    got = read_experts(checkpoint, PREFIX)
    assert torch.equal(got.gate_up_proj.dequantize(), gate_up)
    assert torch.equal(got.down_proj.dequantize(), down)
    assert got.scheme == scheme and got.gate_up_proj.data.is_contiguous()
    E, H, I = sizes
    if scheme in ("nvfp4", "fp8_tensor"):
        assert torch.equal(got.input_scale, torch.full((E,), 0.25))
        assert torch.equal(got.hidden_scale, torch.full((E,), 0.5))
    assert got.interleaved == (name == "gpt-oss")
    if name == "gpt-oss":
        assert torch.equal(got.gate_up_bias, tensors[f"{PREFIX}.gate_up_proj_bias"])
        assert torch.equal(got.down_bias, tensors[f"{PREFIX}.down_proj_bias"])
    last = read_experts(checkpoint, PREFIX, experts=range(E - 1, E))
    assert torch.equal(last.gate_up_proj.dequantize(), gate_up[-1:])
    assert torch.equal(last.down_proj.dequantize(), down[-1:])


def test_what_is_found(tmp_path):
    tensors, config, *_ = gpt_oss(2, 64, 64)
    checkpoint = Checkpoint(write(tmp_path, tensors, config))
    assert expert_prefixes(checkpoint) == [PREFIX]
    names = find_experts(checkpoint, PREFIX)
    assert names.fused and names.num_experts == 2 and names.first == (f"{PREFIX}.gate_up_proj",)
    with pytest.raises(ValueError, match=f"'model.experts'; it has {PREFIX}"):
        find_experts(checkpoint, "model.experts")


def test_a_grid_for_gate_and_another_for_up(tmp_path):
    """Two grids joined have a row of scales more than one over both: refused with the numbers."""
    tensors, config, *_ = fp8_blocks(2, 128, 160)
    name = f"{PREFIX}.gate_up_proj_scale_inv"
    tensors[name] = torch.rand(2, 4, 1)
    checkpoint = Checkpoint(write(tmp_path, tensors, config))
    with pytest.raises(ValueError) as error:
        read_experts(checkpoint, PREFIX)
    assert f"{name} must be of shape (2, 3, 1)" in str(error.value)
    assert "fp8_block weights (2, 320, 128), got shape (2, 4, 1)" in str(error.value)
