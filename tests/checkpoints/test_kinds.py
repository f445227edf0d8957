"""Experts of every kind of checkpoint: exactly what the defining library makes of the tensors."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.checkpoints.kinds import (
    compressed_tensors,
    finegrained,
    kinds,
    modelopt,
    nvfp4,
    nvfp4_truth,
)
from tests.checkpoints.writing import MIXTRAL, PREFIX, QWEN, E, H, I, matrices, stored, write
from tmoe.checkpoints import Checkpoint, read_experts
from tmoe.formats import SCHEMES

KINDS = kinds()


def stacked(truths, names, experts=range(E)):
    """The library's matrices as (E, 2I, H) and (E, H, I)."""
    gate, up, down = (
        torch.stack([truths[f"{PREFIX}.{e}.{name}"] for e in experts]) for name in names
    )
    return torch.cat([gate, up], 1), down


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_kind(kind, tmp_path):
    """Bit for bit, gate rows first; in the scheme that the checkpoint says, with its scales."""
    tensors, truths = stored(kind, matrices())
    checkpoint = Checkpoint(write(tmp_path, tensors, {"quantization_config": kind.config}, 2))
    scheme = kind.scheme
    if scheme is None:
        with pytest.raises(ValueError, match="scheme must be given .* tmoe has none for mxfp4"):
            read_experts(checkpoint, PREFIX)
        scheme = "mxfp4_a16"
    got = read_experts(checkpoint, PREFIX, scheme=None if kind.scheme else scheme)
    gate_up, down = stacked(truths, QWEN)
    assert torch.equal(got.gate_up_proj.dequantize(), gate_up)
    assert torch.equal(got.down_proj.dequantize(), down)
    assert got.scheme == scheme
    assert SCHEMES[scheme].accepts(got.down_proj.format, got.down_proj.block_shape)
    if kind.static:  # gate's 1, 4, 7 and up's 2, 5, 8: the larger; down's 3, 6, 9
        assert torch.allclose(got.input_scale, torch.tensor([2, 5, 8]) / 64)
        assert torch.allclose(got.hidden_scale, torch.tensor([3, 6, 9]) / 64)
    else:
        assert got.input_scale is got.hidden_scale is None
    assert got.gate_up_bias is got.down_bias is None


@pytest.mark.parametrize("kind", [k for k in KINDS if k.name in (
    "deepseek-v3", "modelopt-NVFP4", "compressed-tensors-FP8")], ids=str)  # fmt: skip
def test_a_range_of_experts(kind, tmp_path):
    """What a rank of expert parallelism reads: its experts, with their numbers counted from 0."""
    tensors, truths = stored(kind, matrices(MIXTRAL))
    checkpoint = Checkpoint(write(tmp_path, tensors, {"quantization_config": kind.config}))
    got = read_experts(checkpoint, PREFIX, experts=range(1, 3))
    gate_up, down = stacked(truths, MIXTRAL, range(1, 3))
    assert torch.equal(got.gate_up_proj.dequantize(), gate_up)
    assert torch.equal(got.down_proj.dequantize(), down)
    if kind.static:
        assert torch.allclose(got.hidden_scale, torch.tensor([6, 9]) / 64)
    for wrong in (range(0), range(2, 4), range(0, 3, 2)):
        with pytest.raises(ValueError, match=r"experts must be a range within range\(3\)"):
            read_experts(checkpoint, PREFIX, experts=wrong)


def test_gate_and_up_keep_their_own_scales(tmp_path):
    """WL01, and nothing is rounded again: (E, 2); one per expert where they are equal."""
    kind = next(k for k in KINDS if k.name == "modelopt-NVFP4")
    tensors, _ = stored(kind, matrices())
    config = {"quantization_config": kind.config}
    apart = read_experts(Checkpoint(write(tmp_path / "a", tensors, config)), PREFIX)
    assert apart.gate_up_proj.global_scale.shape == (E, 2)
    for e in range(E):
        name = f"{PREFIX}.{e}.%s.weight_scale_2"
        tensors[name % "up_proj"] = tensors[name % "gate_proj"]
    alike = read_experts(Checkpoint(write(tmp_path / "b", tensors, config)), PREFIX)
    assert alike.gate_up_proj.global_scale.shape == (E,)


@pytest.mark.parametrize("I", [96, 200])
def test_blocks_that_end_between_gate_and_up(I, tmp_path):
    """SH01: gate and up have a grid of scales each, with a partial last block. Rows of zeros fill
    it, and columns of down_proj: the values stay, and so does the result."""
    kind = next(k for k in KINDS if k.name == "compressed-tensors-FP8_BLOCK")
    tensors, truths = stored(kind, matrices(I=I))
    checkpoint = Checkpoint(write(tmp_path, tensors, {"quantization_config": kind.config}))
    got = read_experts(checkpoint, PREFIX)
    whole = -(-I // 128) * 128
    gate_up, down = stacked(truths, QWEN)
    halves = got.gate_up_proj.dequantize().view(E, 2, whole, H)
    assert torch.equal(halves[:, :, :I].reshape(gate_up.shape), gate_up)
    assert torch.equal(got.down_proj.dequantize()[:, :, :I], down)
    assert not halves[:, :, I:].any() and not got.down_proj.dequantize()[:, :, I:].any()


def test_any_divisor(tmp_path):
    """compressed-tensors divides by the global scale, tmoe keeps its reciprocal: each of the two
    rounds twice, so that they are within two steps of fp32."""
    kind = compressed_tensors("NVFP4A16", "nvfp4_a16", exact=False)
    tensors, truths = stored(kind, matrices())
    folder = write(tmp_path, tensors, {"quantization_config": kind.config})
    got = read_experts(Checkpoint(folder), PREFIX)
    for mine, theirs in zip((got.gate_up_proj, got.down_proj), stacked(truths, QWEN), strict=True):
        torch.testing.assert_close(mine.dequantize(), theirs, rtol=2**-22, atol=0)


def test_another_scheme(tmp_path):
    """A scheme that takes such weights, or the sentence why not."""
    kind = modelopt("NVFP4", nvfp4, nvfp4_truth, "nvfp4", ("input_scale", False))
    tensors, _ = stored(kind, matrices())
    checkpoint = Checkpoint(write(tmp_path, tensors, {"quantization_config": kind.config}))
    got = read_experts(checkpoint, PREFIX, scheme="nvfp4_a16")
    assert got.scheme == "nvfp4_a16" and got.input_scale is None
    with pytest.raises(ValueError, match="scheme must be one for nvfp4 weights, got fp8_block"):
        read_experts(checkpoint, PREFIX, scheme="fp8_block")


def test_e8m0_extremes(tmp_path):
    """QN20: byte 0 is 2^-127, not 0; byte 255 is NaN and refused, with its tensor."""
    kind = finegrained("fp8-ue8m0", "fp8_block", scale_fmt="ue8m0")
    tensors, _ = stored(kind, matrices())
    name = f"{PREFIX}.1.up_proj.weight_scale_inv"
    for byte in (0, 254, 255):
        tensors[name] = torch.full((1, 2), byte, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        folder = write(tmp_path, tensors, {"quantization_config": kind.config})
        if byte == 255:
            with pytest.raises(ValueError, match=f"{name}: scale must be finite.*, got nan"):
                read_experts(Checkpoint(folder), PREFIX)
        else:
            got = read_experts(Checkpoint(folder), PREFIX).gate_up_proj.scale
            assert (got[1, 1] == 2.0 ** (byte - 127)).all()


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -1.0])
def test_scales_of_inputs_that_say_nothing(number, tmp_path):
    """QN18: experts that calibration never met."""
    kind = next(k for k in KINDS if k.name == "modelopt-NVFP4")
    tensors, _ = stored(kind, matrices())
    name = f"{PREFIX}.1.up_proj.input_scale"
    tensors[name] = torch.tensor(number)
    folder = write(tmp_path, tensors, {"quantization_config": kind.config})
    with pytest.raises(ValueError, match=f"{name} must be finite and at least 0.*, got {number}"):
        read_experts(Checkpoint(folder), PREFIX)


def test_ordinary_weights(tmp_path):
    """Experts that aren't quantised come as they are, stacked."""
    weights = {f"{layer}.weight": w.bfloat16() for layer, w in matrices().items()}
    got = read_experts(Checkpoint(write(tmp_path, weights)), PREFIX)
    gate_up, down = stacked({name.removesuffix(".weight"): w for name, w in weights.items()}, QWEN)
    assert torch.equal(got.gate_up_proj, gate_up) and torch.equal(got.down_proj, down)
    assert got.scheme is None and got.down_proj.shape == (E, H, I)


class Allocations(TorchDispatchMode):
    """The bytes of every storage that an operation makes."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        aliases = any(result.alias_info is not None for result in func._schema.returns)
        if isinstance(out, torch.Tensor) and not aliases and "from_file" not in str(func):
            self.sizes.append(out.untyped_storage().nbytes())
        return out


def test_nothing_is_held_twice(tmp_path):
    """WL11: beside the stacked tensors, nothing of the size of two experts is allocated."""
    tensors, _ = stored(KINDS[0], matrices(E=8))
    folder = write(tmp_path, tensors, {"quantization_config": KINDS[0].config})
    with Allocations() as allocations:
        got = read_experts(Checkpoint(folder), PREFIX)
    one = got.gate_up_proj.data[0].nbytes
    large = [size for size in allocations.sizes if size > one]
    assert sorted(large) == sorted([got.gate_up_proj.data.nbytes, got.down_proj.data.nbytes])
