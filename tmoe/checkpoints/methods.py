"""The configurations of each quantisation method, read into groups of layers and their formats.

Sources: the configuration classes of transformers (`utils/quantization_config.py`), of
compressed-tensors (`quantization/quant_args.py`) and the exporter of nvidia-modelopt
(`torch/export/convert_hf_config.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..checks import expect
from .header import OP
from .json_files import read_json
from .names import names_of
from .quantization import LinearFormat, Quantization

Groups = list[tuple[str, LinearFormat]]
_EVERY = "*"


def _fp8(stated: dict[str, Any], config: dict[str, Any]) -> tuple[Groups, list[str]]:
    """DeepSeek-V3's method and transformers' fine-grained FP8; DeepSeek-V4's experts are MXFP4."""
    block, activations = stated.get("weight_block_size"), stated.get("activation_scheme", "dynamic")
    fmt = stated.get("fmt", "e4m3")
    expect(fmt in ("e4m3", "float8_e4m3fn"), OP, "fmt of the fp8 method", "e4m3", repr(fmt))
    ok = activations in ("dynamic", "static")
    expect(ok, OP, "activation_scheme", "dynamic or static", repr(activations))
    static = activations == "static"
    if block is None:
        linear = LinearFormat("fp8_tensor", "static" if static else "token", static)
    elif list(block) == [1, 32]:
        linear = LinearFormat("mxfp8", "mxfp8")
    else:
        expect(list(block) == [128, 128], OP, "weight_block_size", "[128, 128] or [1, 32]", block)
        linear = LinearFormat("fp8_block", "static" if static else "block", static)
    expert_dtype = stated.get("expert_dtype", config.get("expert_dtype", "fp8"))
    ok = expert_dtype in ("fp8", "fp4")
    expect(ok, OP, "expert_dtype", "fp8 or fp4", repr(expert_dtype))
    groups = [(_EVERY, linear)]
    if expert_dtype == "fp4":
        groups.insert(0, (r"re:.*\.experts\.", LinearFormat("mxfp4", "mxfp8")))
    return groups, stated.get("modules_to_not_convert") or stated.get("ignored_layers") or []


def _mxfp8(stated: dict[str, Any], config: dict[str, Any]) -> tuple[Groups, list[str]]:
    return _fp8({**stated, "weight_block_size": [1, 32]}, config)


_ALGORITHMS = {
    "FP8": LinearFormat("fp8_tensor", "static", static=True),
    "FP8_PER_CHANNEL_PER_TOKEN": LinearFormat("fp8_channel", "token"),
    "FP8_PB_WO": LinearFormat("fp8_block", None),
    "MXFP8": LinearFormat("mxfp8", "mxfp8"),
    "NVFP4": LinearFormat("nvfp4", "nvfp4", static=True),
    "W4A16_NVFP4": LinearFormat("nvfp4", None),
    "MXFP4": LinearFormat("mxfp4", None),
}


def _modelopt(stated: dict[str, Any], config: dict[str, Any]) -> tuple[Groups, list[str]]:
    def linear(entry: dict[str, Any], where: str) -> LinearFormat:
        algorithm = entry.get("quant_algo")
        what = f"quant_algo of {where}"
        expect(algorithm in _ALGORITHMS, OP, what, f"one of {', '.join(_ALGORITHMS)}", algorithm)
        found = _ALGORITHMS[str(algorithm)]
        sizes = {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32, "fp8_block": 128}
        size = entry.get("group_size")
        wanted = sizes.get(found.format)
        ok = size in (None, 0, wanted)
        expect(ok, OP, f"group_size of {where}", f"{wanted} for {algorithm}", size)
        return found

    ignored = stated.get("exclude_modules") or stated.get("ignore") or []
    if stated.get("quant_algo") == "MIXED_PRECISION":
        layers = stated.get("quantized_layers")
        ok = isinstance(layers, dict) and bool(layers)
        expect(ok, OP, "quantized_layers", "an object of layers for MIXED_PRECISION", layers)
        assert isinstance(layers, dict)
        return [(name, linear(entry, name)) for name, entry in layers.items()], ignored
    return [(_EVERY, linear(stated, "the modelopt method"))], ignored


_FORMATS = {
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "mixed-precision",
}


def _compressed_tensors(stated: dict[str, Any], config: dict[str, Any]) -> tuple[Groups, list[str]]:
    expect_format(stated.get("format"), "the compressed-tensors method")
    for name in ("sparsity_config", "transform_config"):
        option = stated.get(name) or {}
        ok = not option or option == {"config_groups": {}} or option.get("format") == "dense"
        expect(ok, OP, name, "empty: tmoe can't apply it", option)
    groups: Groups = []
    for name, group in (stated.get("config_groups") or {}).items():
        if group.get("format") is not None:
            expect_format(group["format"], name)
        weights = _weights(group.get("weights"), name)
        inputs, static = _inputs(group.get("input_activations"), name)
        linear = LinearFormat(weights, inputs, static)
        groups += [(target, linear) for target in group.get("targets") or []]
    expect(bool(groups), OP, "config_groups", "at least one group with targets", groups)
    groups.sort(key=lambda group: group[0] == "Linear")  # a layer's name counts before its class
    return groups, stated.get("ignore") or []


def expect_format(format: Any, where: str) -> None:
    known = ", ".join(sorted(_FORMATS))
    expect(format in _FORMATS, OP, f"format of {where}", f"one of {known}", repr(format))


def _weights(weights: dict[str, Any] | None, group: str) -> str:
    arguments = weights or {}
    bits, kind, symmetric = (arguments.get(key) for key in ("num_bits", "type", "symmetric"))
    strategy, size = arguments.get("strategy"), arguments.get("group_size")
    got = {key: arguments.get(key) for key in ("num_bits", "type", "strategy", "group_size")}
    wanted = "float with 8 bits by tensor, channel, 128 x 128 or 32, or with 4 bits by 16 or 32"
    block = arguments.get("block_structure")
    format = None
    if kind == "float" and bits == 8:
        if strategy == "block":
            sizes = [int(s) for s in block.split("x")] if isinstance(block, str) else block
            expect(sizes == [128, 128], OP, f"block_structure of {group}", "[128, 128]", block)
        by = {"tensor": "fp8_tensor", "channel": "fp8_channel", "block": "fp8_block"}
        format = "mxfp8" if size == 32 else by.get(strategy or "tensor")
    elif kind == "float" and bits == 4:
        format = {16: "nvfp4", 32: "mxfp4"}.get(size or 0)
    expect(format is not None, OP, f"weights of {group}", wanted, got)
    expect(symmetric is not False, OP, f"symmetric of {group}", "true", symmetric)
    assert format is not None
    return format


def _inputs(inputs: dict[str, Any] | None, group: str) -> tuple[str | None, bool]:
    """What inputs are rounded to, and whether the checkpoint has a scale for it."""
    if not inputs:
        return None, False
    bits, kind, size = (inputs.get(key) for key in ("num_bits", "type", "group_size"))
    dynamic = inputs.get("dynamic", False)
    got = {key: inputs.get(key) for key in ("num_bits", "type", "strategy", "group_size")}
    found = None
    if kind == "float" and bits == 8:
        by = {"tensor": "tensor" if dynamic else "static", "token": "token"}
        by_size = {128: "block", 32: "mxfp8"}
        found = by_size.get(size) if size else by.get(inputs.get("strategy") or "tensor")
    elif kind == "float" and bits == 4:
        found = {16: "nvfp4", 32: "mxfp4"}.get(size or 0)
    wanted = "float with 8 bits by tensor, token, 128 or 32, or with 4 bits by 16 or 32"
    expect(found is not None, OP, f"input_activations of {group}", wanted, got)
    return found, found == "static" or (found == "nvfp4" and dynamic is not True)


def _fbgemm(stated: dict[str, Any], config: dict[str, Any]) -> tuple[Groups, list[str]]:
    """Its bound of the inputs' scales (`activation_scale_ub`) only clips; without it nothing is
    clipped, so it isn't needed."""
    linear = LinearFormat("fp8_channel", "token")
    return [(_EVERY, linear)], stated.get("modules_to_not_convert") or []


def _mxfp4(stated: dict[str, Any], config: dict[str, Any]) -> tuple[Groups, list[str]]:
    """gpt-oss: the experts alone, with inputs as they come."""
    linear = LinearFormat("mxfp4", None)
    return [(_EVERY, linear)], stated.get("modules_to_not_convert") or []


METHODS: dict[str, Callable[[dict[str, Any], dict[str, Any]], tuple[Groups, list[str]]]] = {
    "fp8": _fp8,
    "mxfp8": _mxfp8,
    "modelopt": _modelopt,
    "compressed-tensors": _compressed_tensors,
    "fbgemm_fp8": _fbgemm,
    "mxfp4": _mxfp4,
}


def describe(config: dict[str, Any], folder: Path) -> Quantization | None:
    """The description of a folder's weights, or None if they aren't quantised.

    Raises ``ValueError`` for a method, an algorithm or an option that tmoe doesn't know.
    """
    text = config.get("text_config")
    stated = config.get("quantization_config")
    if stated is None and isinstance(text, dict):
        stated = text.get("quantization_config")
    where = "quantization_config of config.json"
    if stated is None:
        where = "hf_quant_config.json"
        whole = read_json(folder / where)
        if not whole:
            return None
        stated = {"quant_method": "modelopt", **whole.get("quantization", {})}
    expect(isinstance(stated, dict), OP, where, "an object", type(stated).__name__)
    method = str(stated.get("quant_method"))
    known = ", ".join(METHODS)
    expect(method in METHODS, OP, f"quant_method in the {where}", f"one of {known}", repr(method))
    groups, ignored = METHODS[method](stated, config)
    return Quantization(method, tuple(groups), tuple(ignored), names_of(method))
