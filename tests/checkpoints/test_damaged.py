"""Damaged checkpoints: an error with file, tensor, wanted and got, before a tensor is read."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints.kinds import finegrained
from tests.checkpoints.writing import PREFIX, matrices, stored, write
from tmoe.checkpoints import Checkpoint, read_experts

FILE = "model.safetensors"
SHARD = "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
UP = f"{PREFIX}.1.up_proj"


@pytest.fixture
def fp8(tmp_path):
    kind = finegrained("deepseek-v3", "fp8_block")
    tensors, _ = stored(kind, matrices())
    return write(tmp_path / "one", tensors, {"quantization_config": kind.config})


@pytest.fixture
def sharded(fp8, tmp_path):
    config = json.loads((fp8 / "config.json").read_text())
    return write(tmp_path / "two", load_file(fp8 / FILE), config, shards=2)


@pytest.fixture(autouse=True)
def nothing_is_read(monkeypatch):
    """Every error here comes from headers alone."""
    monkeypatch.setattr(Checkpoint, "view", lambda self, name: pytest.fail(f"read {name}"))


def change(folder, **changes):
    """Rewrite the one file with some tensors changed; None = without it."""
    tensors = load_file(folder / FILE)
    for name, tensor in changes.items():
        name = f"{UP}.{name}"
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, folder / FILE)


def configure(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))


def header(folder, edit):
    """Rewrite the header of the one file."""
    raw = (folder / FILE).read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    entries = json.loads(raw[8 : 8 + length])
    edit(entries)
    text = json.dumps(entries).encode()
    (folder / FILE).write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def size(folder):
    return (folder / FILE).stat().st_size


def first(folder, name, **changes):
    header(folder, lambda entries: entries[f"{UP}.{name}"].update(changes))


FILES = {
    "cut off": (
        lambda f: (f / FILE).write_bytes((f / FILE).read_bytes()[:-100]),
        f"{FILE} must be .* bytes, as its header says, got .*: cut off",
    ),
    "cut off in the header": (
        lambda f: (f / FILE).write_bytes((f / FILE).read_bytes()[:100]),
        f"{FILE} must be at least .* bytes, as its first 8 say, got 100 bytes: cut off",
    ),
    "longer than the header says": (
        lambda f: (f / FILE).write_bytes((f / FILE).read_bytes() + b"more"),
        f"{FILE} must be (.*) bytes, as its header says, got",
    ),
    "empty file": (
        lambda f: (f / FILE).write_bytes(b""),
        f"{FILE} must be a safetensors file of at least 8 bytes, got 0 bytes",
    ),
    "garbage header": (
        lambda f: (f / FILE).write_bytes(struct.pack("<Q", 5) + b"{oops" + b"x" * 50),
        f"{FILE} must be a safetensors file with a header in JSON, got Expecting property name",
    ),
    "not text": (
        lambda f: (f / FILE).write_bytes(struct.pack("<Q", 2) + b"\xff\xfe"),
        f"{FILE} must be a safetensors file with a header in JSON, got 'utf-?.*' codec",
    ),
    "a list as header": (
        lambda f: (f / FILE).write_bytes(struct.pack("<Q", 2) + b"[]"),
        f"{FILE} must be a safetensors file with an object as header, got list",
    ),
    "another format": (
        lambda f: torch.save({}, f / FILE),
        f"{FILE} must be at least .* bytes, .*: cut off, or not a safetensors file",
    ),
    "git lfs": (
        lambda f: (f / FILE).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid 1"),
        f"{FILE} must be a safetensors file, got a pointer of Git LFS; `git lfs pull` gets the",
    ),
    "unknown dtype": (
        lambda f: first(f, "weight", dtype="F6"),
        rf"{FILE}: {UP}.weight must be of a dtype of F64, .*, got F6",
    ),
    "size against shape": (
        lambda f: first(f, "weight", shape=[128, 255]),
        rf"{UP}.weight must have 32640 bytes, as F8_E4M3 \(128, 255\) takes, got 32768",
    ),
    "overlap": (
        lambda f: first(f, "weight", data_offsets=[0, 32768]),
        rf"{FILE}: .* must start at byte \d+, got \d+",
    ),
    "no offsets": (
        lambda f: header(f, lambda entries: entries[f"{UP}.weight"].pop("data_offsets")),
        f"{UP}.weight must be described by dtype, shape and data_offsets, got",
    ),
    "config that isn't JSON": (
        lambda f: (f / "config.json").write_text("{'a': 1}"),
        "config.json must be in JSON, got Expecting property name",
    ),
    "unknown method": (
        lambda f: configure(f, quant_method="awq"),
        "quant_method in the quantization_config of config.json must be one of fp8, .*, got 'awq'",
    ),
    "unknown algorithm": (
        lambda f: configure(f, quant_method="modelopt", quant_algo="NVFP4_AWQ"),
        "quant_algo of the modelopt method must be one of FP8, .*, got NVFP4_AWQ",
    ),
    "other blocks": (
        lambda f: configure(f, weight_block_size=[64, 64]),
        r"weight_block_size must be \[128, 128\] or \[1, 32\], got \[64, 64\]",
    ),
    "e5m2": (lambda f: configure(f, fmt="e5m2"), "fmt of the fp8 method must be e4m3, got 'e5m2'"),
    "unknown format": (
        lambda f: configure(f, quant_method="compressed-tensors", format="pack-quantized"),
        "format of the compressed-tensors method must be one of .*, got 'pack-quantized'",
    ),
    "integers": (
        lambda f: configure(
            f, quant_method="compressed-tensors", format="float-quantized",
            config_groups={"g": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int"}}},
        ),
        "weights of g must be float with 8 bits .*, got {'num_bits': 8, 'type': 'int'",
    ),
    "rotations": (
        lambda f: configure(
            f, quant_method="compressed-tensors", format="float-quantized",
            transform_config={"config_groups": {"u": {"type": "hadamard"}}},
        ),
        "transform_config must be empty: tmoe can't apply it, got",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", FILES)
def test_files(damage, fp8):
    """Found when the checkpoint is opened."""
    harm, message = FILES[damage]
    harm(fp8)
    with pytest.raises(ValueError, match=f"^Checkpoint: .*{message}"):
        Checkpoint(fp8)


def link_to_nowhere(folder):
    (folder / SHARD).unlink()
    (folder / SHARD).symlink_to("blobs/5f2b")


def index(folder, edit):
    content = json.loads((folder / INDEX).read_text())
    edit(content["weight_map"])
    (folder / INDEX).write_text(json.dumps(content))


SHARDS = {
    "missing shard": (
        lambda f: (f / SHARD).unlink(), f"{SHARD} must be a safetensors file, got nothing"
    ),
    "link to nowhere": (
        link_to_nowhere, f"{SHARD} must be a safetensors file, got a link to blobs/5f2b, which"
    ),
    "missing entry": (
        lambda f: index(f, lambda names: names.pop(f"{PREFIX}.0.gate_proj.weight")),
        f"{INDEX} must be a list of all tensors of .*, got {PREFIX}.0.gate_proj.weight",
    ),
    "entry without tensor": (
        lambda f: index(f, lambda names: names.update({"model.norm.weight": SHARD})),
        f"{SHARD} must be a file with the tensors .* for it, got none named model.norm.weight",
    ),
    "entry elsewhere": (
        lambda f: index(f, lambda names: names.update({"a": "../other.safetensors"})),
        f"{INDEX} must be names of files beside it, got '../other.safetensors'",
    ),
    "no weight_map": (
        lambda f: (f / INDEX).write_text("{}"),
        f"{INDEX} must be an object with a weight_map of names to files, got None",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", SHARDS)
def test_shards(damage, sharded):
    harm, message = SHARDS[damage]
    harm(sharded)
    with pytest.raises((ValueError, FileNotFoundError), match=f"^Checkpoint: .*{message}"):
        Checkpoint(sharded)


def test_no_files(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    wanted = f"must have {FILE} or {INDEX}, got pytorch_model.bin"
    with pytest.raises(FileNotFoundError, match=wanted):
        Checkpoint(tmp_path)
    with pytest.raises(FileNotFoundError, match="must be a safetensors file, got nothing"):
        Checkpoint(tmp_path / "nowhere")


E4M3 = torch.float8_e4m3fn
TENSORS = {
    "missing weight": (
        dict(weight=None), rf"must have a tensor {UP}.weight, got none; beside it are {UP}"
    ),
    "missing scale": (  # QN14, QN15
        dict(weight_scale_inv=None),
        rf"{UP}.weight must be beside its scale, {UP}.weight_scale_inv or .*, got none for "
        "fp8_block weights",
    ),
    "wrong dtype": (
        dict(weight=torch.zeros(128, 256).bfloat16()),
        rf"{UP}.weight must be of dtype float8_e4m3fn, got bfloat16 \(128, 256\)",
    ),
    "fnuz": (  # QN16
        dict(weight=torch.zeros(128, 256).to(torch.float8_e4m3fnuz)),
        rf"{UP}.weight must be of dtype float8_e4m3fn, got float8_e4m3fnuz \(128, 256\)",
    ),
    "wrong shape": (
        dict(weight=torch.zeros(128, 384).to(E4M3), weight_scale_inv=torch.ones(1, 3)),
        rf"{UP}.weight must be of shape \(128, 256\), as .*, got float8_e4m3fn \(128, 384\)",
    ),
    "wrong scale shape": (
        dict(weight_scale_inv=torch.ones(2, 2)),
        rf"{UP}.weight_scale_inv must be of shape \(1, 2\) or .* fp8_block weights \(128, 256\), "
        r"got shape \(2, 2\)",
    ),
    "wrong scale dtype": (
        dict(weight_scale_inv=torch.ones(1, 2, dtype=torch.int32)),
        rf"{UP}.weight_scale_inv must be of dtype float32 or .*, got int32 \(1, 2\)",
    ),
    "an expert of another kind": (
        dict(weight_scale_inv=torch.ones(1)), rf"{UP}.weight must be fp8_block, as the other"
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", TENSORS)
def test_tensors(damage, fp8):
    """Found before a tensor is read."""
    changes, message = TENSORS[damage]
    change(fp8, **changes)
    with pytest.raises(ValueError, match=message):
        read_experts(Checkpoint(fp8), PREFIX)


def test_missing_experts(fp8):
    tensors = load_file(fp8 / FILE)
    left = {name: t for name, t in tensors.items() if f"{PREFIX}.1." not in name}
    save_file(left, fp8 / FILE)
    with pytest.raises(ValueError, match=rf"{PREFIX} must be of experts 0 to 2, got none of \[1\]"):
        read_experts(Checkpoint(fp8), PREFIX)
    strange = {name.replace("up_proj", "upper"): t for name, t in tensors.items()}
    save_file(strange, fp8 / FILE)
    with pytest.raises(ValueError, match="must be of experts with gate_proj, .*, got down_proj, g"):
        read_experts(Checkpoint(fp8), PREFIX)


def test_config_mismatch(fp8):
    for sizes, got in ((dict(hidden_size=128), 256), (dict(intermediate_size=64), 128)):
        with pytest.raises(ValueError, match=rf"down_proj.weight must be .*, got .*{got}"):
            read_experts(Checkpoint(fp8), PREFIX, **sizes)


def test_hf_quant_config(fp8):
    """ModelOpt's own file, where config.json says nothing; config.json counts if both do."""
    (fp8 / "hf_quant_config.json").write_text(
        json.dumps({"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}})
    )
    assert Checkpoint(fp8).quantization.method == "fp8"
    (fp8 / "config.json").write_text("{}")
    found = Checkpoint(fp8).quantization
    assert found.method == "modelopt" and found.ignored == ("lm_head",)
    assert found.of(UP).format == "nvfp4"
    (fp8 / "hf_quant_config.json").unlink()
    with pytest.raises(ValueError, match="must be described by a quantization_config, got float8"):
        read_experts(Checkpoint(fp8), PREFIX)


def test_mixed_precision(fp8):
    """Layer by layer; a layer that none names is an error."""
    layers = {f"{PREFIX}.{e}": {"quant_algo": "FP8"} for e in range(3)}
    configure(fp8, quant_method="modelopt", quant_algo="MIXED_PRECISION", quantized_layers=layers)
    found = Checkpoint(fp8).quantization
    assert found.of(UP).format == "fp8_tensor" and found.of("model.layers.1.mlp.up_proj") is None
