"""safetensors files of quantised tensors: exact on the way back, loud when something is missing."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file as plain_load
from safetensors.torch import save_file as plain_save

from tmoe import quantize
from tmoe.formats import FORMATS, QuantizedTensor, load_file, save_file


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_saved_and_loaded(path, format, dtype):
    tensors = {
        "experts.gate_up_proj": quantize(torch.randn(3, 4, 66, dtype=dtype), format),
        "matrix": quantize(torch.randn(4, 66, dtype=dtype), format),
        "norm.weight": torch.randn(5),
    }
    save_file(tensors, path, metadata={"format": "pt"})
    loaded = load_file(path)
    assert loaded.keys() == tensors.keys()
    assert torch.equal(loaded["norm.weight"], tensors["norm.weight"])
    for name in ("experts.gate_up_proj", "matrix"):
        was, now = tensors[name], loaded[name]
        assert isinstance(now, QuantizedTensor) and torch.equal(was, now)
        assert (now.dtype, now.format, now.block_shape) == (dtype, format, was.block_shape)
        assert now.scale.dtype == was.scale.dtype and now.shape == was.shape
    with safe_open(path, framework="pt") as file:
        assert file.metadata()["format"] == "pt"


def test_what_is_restored_is_exact_even_where_from_parts_would_refuse_it(path):
    q = QuantizedTensor.from_parts(
        torch.zeros(1, 32).to(torch.float8_e4m3fn),
        torch.zeros(1, 1, dtype=torch.uint8),
        format="mxfp8",
    )
    q.scale.fill_(0xFF)  # a block that held NaN
    save_file({"w": q}, path)
    assert torch.equal(load_file(path)["w"], q)


def test_blocks_of_128_by_128_and_slices_of_experts(path):
    q = quantize(torch.randn(4, 130, 130), "fp8_block", block_shape=(128, 128))
    save_file({"w": q[::2]}, path)
    loaded = load_file(path)["w"]
    assert loaded.block_shape == (128, 128) and torch.equal(loaded, q[[0, 2]])


def test_scales_of_halves_are_kept(path):
    q = quantize(torch.randn(3, 4, 32), "nvfp4", global_scale=torch.rand(3, 2) + 0.1)
    save_file({"w": q}, path)
    assert load_file(path)["w"].global_scale.shape == (3, 2)
    q = quantize(torch.randn(3, 4, 32), "fp8_tensor", scale=torch.rand(3, 2) + 0.1)
    save_file({"w": q}, path)
    assert torch.equal(load_file(path)["w"], q)


def test_the_keys_are_readable_by_others(path):
    q = quantize(torch.randn(4, 32), "nvfp4")
    save_file({"w": q}, path)
    flat = plain_load(path)
    assert flat.keys() == {"w", "w.scale", "w.global_scale"}
    assert torch.equal(flat["w"], q.data) and flat["w.scale"].dtype == torch.float8_e4m3fn


def test_a_file_without_quantised_tensors_is_a_plain_one(path):
    plain_save({"a": torch.ones(3)}, path)
    assert torch.equal(load_file(path)["a"], torch.ones(3))
    save_file({"a": torch.ones(3)}, path)
    with safe_open(path, framework="pt") as file:
        assert file.metadata() is None


def rewritten(path, change):
    """The file with its tensors changed and its metadata kept."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    flat = plain_load(path)
    change(flat, metadata)
    plain_save(flat, path, metadata=metadata)


@pytest.mark.parametrize("key", ["w", "w.scale", "w.global_scale"])
def test_a_missing_part_is_named(path, key):
    """QN14, QN15."""
    save_file({"w": quantize(torch.randn(4, 32), "nvfp4")}, path)
    rewritten(path, lambda flat, metadata: flat.pop(key))
    with pytest.raises(RuntimeError, match=f"'{key}' is missing: 'w' is nvfp4 and needs it"):
        load_file(path)


def test_a_part_that_does_not_fit_is_named(path):
    save_file({"w": quantize(torch.randn(4, 64), "mxfp4")}, path)
    rewritten(path, lambda flat, metadata: flat.update({"w.scale": flat["w.scale"][:, :1].clone()}))
    with pytest.raises(RuntimeError, match=r"'w.scale' is torch.uint8 \(4, 1\).* \(4, 2\)"):
        load_file(path)


def test_a_format_of_the_future_is_named(path):
    def rename(flat, metadata):
        about = json.loads(metadata["tmoe.formats"])
        about["w"]["format"] = "fp2"
        metadata["tmoe.formats"] = json.dumps(about)

    save_file({"w": quantize(torch.randn(4, 64), "mxfp4")}, path)
    rewritten(path, rename)
    with pytest.raises(RuntimeError, match="'w' has the unknown format 'fp2'"):
        load_file(path)


@pytest.mark.parametrize("order", [1, -1])
def test_names_that_clash_are_refused(path, order):
    tensors = [("w", quantize(torch.randn(4, 64), "mxfp4")), ("w.scale", torch.ones(1))]
    with pytest.raises(ValueError, match="free of 'w.scale', a part of 'w'"):
        save_file(dict(tensors[::order]), path)
    assert not path.exists()


def test_the_metadata_key_is_ours(path):
    with pytest.raises(ValueError, match="metadata must be free of 'tmoe.formats'"):
        save_file({"a": torch.ones(1)}, path, metadata={"tmoe.formats": "x"})
    with pytest.raises(TypeError, match="save_file: a must be a Tensor, got list"):
        save_file({"a": [1.0]}, path)
