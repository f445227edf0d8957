"""`quantize_checkpoint`: quantise the experts of a model on disk, file by file."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from ..checks import expect, expect_type
from ..progress import progress_bar
from ..version import __version__
from .checkpoint import INDEX, Checkpoint
from .expert_matrices import ExpertLayer, expert_layers
from .header import TensorInfo
from .input_ranges import InputRanges
from .json_files import read_json, some
from .write_experts import Errors, ExpertsWriter, why_not_write
from .write_formats import written_format
from .write_report import CheckpointReport, by_projection
from .write_shard import Described, ShardWriter
from .write_state import STATE, State, identity, write_json
from .written import OP, Written

CONFIG = "config.json"
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack"}


def quantize_checkpoint(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    scheme: str,
    *,
    format: str | None = None,
    input_ranges: str | os.PathLike[str] | None = None,
    device: str | torch.device = "cpu",
    progress: bool | None = None,
) -> CheckpointReport:
    """Write a copy of a checkpoint with its experts quantised, as vLLM and others read it.

    Every file of tensors becomes one of the same name. Beside it, no more than one expert is in
    memory. All other tensors and files are copied byte for byte, and config.json lists the linear
    layers that aren't quantised. Gate and up of an expert share a scale of their whole matrix where
    the format has one.

    A run that was killed is taken up by calling it again: finished files are kept, and a file has
    its name only when it is whole.

    Args:
        source: a folder with config.json and the weights in safetensors, not quantised.
        out: a new folder, or one that a killed run with the same arguments left behind.
        scheme: a name of `tmoe.formats.SCHEMES`.
        format: "deepseek" (default for fp8_block), "compressed-tensors" (default for the others),
            "modelopt", or "gpt-oss" (MXFP4, for gpt-oss itself).
        input_ranges: a file of `InputRanges`, recorded by running the model on some text; from it
            come static scales of the inputs, for nvfp4 and fp8_tensor.
        device: where to compute. The result is the same everywhere.
        progress: show a progress bar; None shows it on a terminal.

    Raises:
        FileNotFoundError: a file of the source is missing.
        ValueError: a file isn't whole, a weight is NaN or Inf, nothing can be quantised, or `out`
            holds something else. The message names the file and the tensor.
    """
    expect_type(source, (str, os.PathLike), OP, "source")
    expect_type(out, (str, os.PathLike), OP, "out")
    written = written_format(scheme, format, input_ranges is not None)
    source, out = Path(source), Path(out)
    expect(source.is_dir(), OP, "source", "a folder", source)
    apart = not out.resolve().is_relative_to(source.resolve())
    expect(apart, OP, "out", f"a folder outside the source {source}", out)
    config = read_json(source / CONFIG)
    expect(bool(config), OP, str(source), f"a folder with a {CONFIG}", "none")
    checkpoint = Checkpoint(source)
    quantized = checkpoint.quantization
    expect(quantized is None, OP, str(source), "a model that isn't quantised", quantized)

    infos = {name: checkpoint.info(name) for name in checkpoint}
    layers, left_alone = _choose(infos, written, checkpoint)
    ranges = None if input_ranges is None else InputRanges.load(input_ranges)
    if ranges is not None:
        ranges.check({layer.name: len(layer.experts) for layer in layers}, OP)
    experts = ExpertsWriter(layers, written, torch.device(device), ranges)
    shards: dict[Path, list[TensorInfo]] = {}
    for info in infos.values():
        shards.setdefault(info.file, []).append(info)
    files = [*shards, source / CONFIG]
    job = {"scheme": scheme, "format": written.method, "tmoe": __version__}
    job["source"] = identity(files)
    job["input ranges"] = "none" if ranges is None else ranges.digest
    state = State(out, job)
    todo = [path for path in shards if not state.is_finished(path.name)]
    with progress_bar(sum(len(shards[path]) for path in todo), "tensors", progress) as step:
        for path in todo:
            _write_shard(out / path.name, path, shards[path], experts, state, step)

    not_copied = _copy_other_files(source, out, set(shards))
    linears = [name for name in infos if name.endswith(".weight") and name not in experts]
    kept = [name.removesuffix(".weight") for name in linears if len(infos[name].shape) == 2]
    kept += [name for name in left_alone if f"{name}.gate_up_proj" in infos]
    for name, extra in written.configs(kept).items():
        whole = {**config, "quantization_config": extra} if name == CONFIG else extra
        write_json(out / name, whole)
    tensors = {
        name: size for done in state.finished.values() for name, size in done["tensors"].items()
    }
    if (source / INDEX).exists():
        _write_index(source, out, state, tensors)
    return CheckpointReport(
        out=str(out),
        scheme=scheme,
        format=written.method,
        errors=by_projection(state.errors()),
        left_alone=left_alone,
        not_copied=not_copied,
        written=len(todo),
        kept=len(shards) - len(todo),
        bytes_before=sum(info.end - info.begin for info in infos.values()),
        bytes_after=sum(tensors.values()),
        note=written.note,
    )


def _choose(
    infos: dict[str, TensorInfo], written: Written, checkpoint: Checkpoint
) -> tuple[list[ExpertLayer], dict[str, str]]:
    """The layers to quantise, and why the others aren't."""
    layers = expert_layers(infos)
    if not layers:
        known = "….experts.0.gate_proj.weight (or w1), ….experts.gate_up_proj"
        others = [name for name, info in infos.items() if len(info.shape) == 3] or list(infos)
        got = f"{checkpoint.config.get('model_type')} with {some(others)}"
        raise ValueError(f"{OP}: source must have experts by names such as {known}, got {got}")
    model_type = checkpoint.config.get("model_type")
    ok = written.method != "gpt-oss" or model_type == "gpt_oss"
    expect(ok, OP, "format", f"another one for {model_type}", "gpt-oss, which only gpt-oss reads")
    reasons = {name: why_not_write(layer, written, infos) for name, layer in layers.items()}
    left_alone = {name: reason for name, reason in reasons.items() if reason is not None}
    chosen = [layer for name, layer in layers.items() if name not in left_alone]
    if not chosen:
        name, reason = next(iter(left_alone.items()))
        wanted = f"a model with experts that {written.method} can hold as {written.scheme}"
        raise ValueError(f"{OP}: source must be {wanted}, got {name}: {reason}")
    return chosen, left_alone


def _write_shard(
    out: Path,
    source: Path,
    infos: list[TensorInfo],
    experts: ExpertsWriter,
    state: State,
    step: Callable[[str], None],
) -> None:
    described: dict[str, Described] = {}
    for info in infos:
        new = (
            experts.describe(info)
            if info.name in experts
            else {info.name: (info.dtype, info.shape)}
        )
        clash = sorted(set(new) & set(described))
        expect(not clash, OP, str(source), "free of the names of quantised parts", some(clash))
        described |= new
    errors: Errors = {}
    with ShardWriter(out, described, _metadata(source)) as shard:
        for info in infos:
            step(f"{source.name}: {info.name}")
            if info.name not in experts:
                shard.copy(info)
                continue
            for layer, roles in experts.write(info, shard).items():
                sums = errors.setdefault(layer, {})
                for role, error in roles.items():
                    sums[role] = sums[role] + error if role in sums else error
    sizes = {name: math.prod(shape) * dtype.itemsize for name, (dtype, shape) in described.items()}
    state.finish(out.name, sizes, errors)


def _metadata(path: Path) -> dict[str, str]:
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return header.get("__metadata__") or {"format": "pt"}


def _copy_other_files(source: Path, out: Path, shards: set[Path]) -> list[str]:
    """Copy what isn't weights; returns the names of what was left out."""
    own = {CONFIG, INDEX, STATE}
    left_out = []
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source)
        if path in shards or str(name) in own or not path.is_file():
            continue
        if any(part.startswith(".") for part in name.parts) or path.suffix in _WEIGHTS:
            left_out.append(str(name))
            continue
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, out / name)
    return left_out


def _write_index(source: Path, out: Path, state: State, tensors: dict[str, int]) -> None:
    index = read_json(source / INDEX)
    metadata = {**index.get("metadata", {}), "total_size": sum(tensors.values())}
    where = {name: file for file, done in state.finished.items() for name in done["tensors"]}
    write_json(out / INDEX, {"metadata": metadata, "weight_map": dict(sorted(where.items()))})
