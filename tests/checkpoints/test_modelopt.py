"""Checkpoints whose tensors nvidia-modelopt made. Where it isn't installed, `test_kinds` has its
layouts by formula."""

from __future__ import annotations

import pytest
import torch

from tests.checkpoints.kinds import modelopt
from tests.checkpoints.writing import PREFIX, QWEN, E, matrices, stored, write
from tmoe.checkpoints import Checkpoint, read_experts

pytest.importorskip("modelopt")


def qtensors():
    return pytest.importorskip("modelopt.torch.quantization.qtensor")


def nvfp4():
    def store(w):
        q, scale, several = qtensors().NVFP4QTensor.quantize(w, 16)
        return {"weight": q._quantized_data, "weight_scale": scale, "weight_scale_2": several}

    def truth(parts):
        q = qtensors().NVFP4QTensor((len(parts["weight"]), parts["weight"].shape[1] * 2),
                                    torch.float32, parts["weight"])  # fmt: skip
        return q.dequantize(
            dtype=torch.float32, scale=parts["weight_scale"], double_scale=parts["weight_scale_2"],
            block_sizes={-1: 16}, fast=False,
        )  # fmt: skip

    return modelopt("NVFP4", store, truth, "nvfp4", ("input_scale", False))


def fp8():
    def store(w):
        q, scale = qtensors().FP8QTensor.quantize(w)
        return {"weight": q._quantized_data, "weight_scale": scale}

    def truth(parts):
        q = qtensors().FP8QTensor(parts["weight"].shape, torch.float32, parts["weight"])
        return q.dequantize(dtype=torch.float32, scale=parts["weight_scale"])

    return modelopt("FP8", store, truth, "fp8_tensor", ("input_scale", False))


def mxfp8():
    def store(w):
        q, scale = qtensors().MXFP8QTensor.quantize(w)
        return {"weight": q._quantized_data, "weight_scale": scale}

    def truth(parts):
        q = qtensors().MXFP8QTensor(parts["weight"].shape, torch.float32, parts["weight"])
        return q.dequantize(dtype=torch.float32, scale=parts["weight_scale"])

    return modelopt("MXFP8", store, truth, "mxfp8")


def mxfp4():
    def store(w):
        q, scale = qtensors().MXFP4QTensor.quantize(w, 32)
        # the exporter reshapes the scales like this
        return {"weight": q._quantized_data, "weight_scale": scale.reshape(len(w), -1)}

    def truth(parts):
        packed, scale = parts["weight"], parts["weight_scale"]
        q = qtensors().MXFP4QTensor((len(packed), packed.shape[1] * 2), torch.float32, packed)
        return q.dequantize(dtype=torch.float32, scale=scale, block_sizes={-1: 32})

    return modelopt("MXFP4", store, truth, "mxfp4_a16")


@pytest.mark.parametrize("kind", [nvfp4(), fp8(), mxfp8(), mxfp4()], ids=str)
def test_modelopt(kind, tmp_path):
    """Bit for bit what its own tensors dequantise to."""
    tensors, truths = stored(kind, matrices())
    folder = write(tmp_path, tensors, {"quantization_config": kind.config})
    got = read_experts(Checkpoint(folder), PREFIX)
    gate, up, down = (
        torch.stack([truths[f"{PREFIX}.{e}.{name}"] for e in range(E)]) for name in QWEN
    )
    assert torch.equal(got.gate_up_proj.dequantize(), torch.cat([gate, up], 1))
    assert torch.equal(got.down_proj.dequantize(), down)
    assert got.scheme == kind.scheme
