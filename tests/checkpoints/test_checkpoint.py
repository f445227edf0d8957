"""`Checkpoint`: one file or many, read where they are."""

from __future__ import annotations

import json
import struct

import pytest
import torch

from tests.checkpoints.writing import write
from tmoe.checkpoints import Checkpoint


@pytest.mark.parametrize("shards", [1, 3])
def test_tensors_of_every_dtype(shards, tmp_path):
    """As they were written, whatever the dtype; copies, not windows into the file."""
    dtypes = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
              torch.int16, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn,
              torch.float8_e5m2]  # fmt: skip
    tensors = {str(dtype): torch.randn(3, 5).mul(8).to(dtype) for dtype in dtypes}
    tensors |= {"nothing": torch.zeros(0, 4), "scalar": torch.tensor(2.5)}
    checkpoint = Checkpoint(write(tmp_path, tensors, shards=shards))
    assert sorted(checkpoint) == sorted(tensors) and len(checkpoint) == len(tensors)
    for name, tensor in tensors.items():
        got = checkpoint.tensor(name)
        info = checkpoint.info(name)
        assert got.dtype == tensor.dtype == info.dtype and got.shape == info.shape
        assert torch.equal(got.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    got = checkpoint.tensor("torch.float32")
    got.zero_()
    assert checkpoint.tensor("torch.float32").any()
    checkpoint.close()
    assert checkpoint.tensor("scalar") == 2.5  # opened again
    assert "nothing" in checkpoint and "else" not in checkpoint
    assert repr(checkpoint).endswith(f"14 tensors in {shards} files, not quantised)")


def test_one_file(tmp_path):
    """A path to a file: its tensors alone, with the config beside it."""
    folder = write(tmp_path, {"a.weight": torch.ones(2)}, {"hidden_size": 2})
    checkpoint = Checkpoint(folder / "model.safetensors")
    assert list(checkpoint) == ["a.weight"] and checkpoint.config == {"hidden_size": 2}
    with pytest.raises(ValueError, match="must have a tensor a.bias, got none; beside it are a.we"):
        checkpoint.info("a.bias")
    with pytest.raises(TypeError, match="path must be a str or PathLike, got int"):
        Checkpoint(3)


def test_a_file_larger_than_memory(tmp_path):
    """256 GB that are never looked at; what stands behind them is read."""
    size = 2**38
    header = json.dumps({
        "hole": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]},
        "end": {"dtype": "F32", "shape": [2], "data_offsets": [size, size + 8]},
    }).encode()  # fmt: skip
    header += b" " * (-len(header) % 8)
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        try:
            file.seek(size, 1)
            file.write(struct.pack("<ff", 1.5, -2.0))
        except OSError as error:
            pytest.skip(f"this file system has no such files: {error}")
    assert Checkpoint(tmp_path).tensor("end").tolist() == [1.5, -2.0]


def test_a_header_of_odd_length(tmp_path):
    """Tensors that don't start at a multiple of their size."""
    header = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    assert len(header) % 4
    data = struct.pack("<ff", 1.5, -2.0)
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data)
    assert Checkpoint(tmp_path).tensor("a").tolist() == [1.5, -2.0]
