"""Which checkpoint format can hold which scheme, and how: a table.

`WRITTEN` is the whole of it: for a format and a scheme of tmoe, the tensors that stand for one
matrix and the configuration that makes others read them; `STATIC` is the same with static scales of
the inputs. Sources: compressed-tensors (`quantization/quant_scheme.py`, `compressors/`),
nvidia-modelopt (`torch/export/`), transformers (`quantizers/quantizer_finegrained_fp8.py` for
DeepSeek's, `integrations/mxfp4.py` for gpt-oss').
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..checks import expect
from ..formats import Scheme
from .written import OP, Config, Shape, Written


def _as_column(shape: Shape) -> Shape:
    return (*shape, 1)


def _args(bits: int, strategy: str, *, dynamic: bool | str = False, **more: Any) -> Config:
    """compressed-tensors' `QuantizationArgs`."""
    common = {"num_bits": bits, "type": "float", "symmetric": True, "strategy": strategy}
    return {**common, "dynamic": dynamic, **more}


def _compressed(
    scheme: str, format: str, weights: Config, inputs: Config | None, **fields: Any
) -> Written:
    config = {"format": format, "weights": weights, "input_activations": inputs}
    config["output_activations"] = None
    data = "weight_packed" if "pack" in format else "weight"
    return Written("compressed-tensors", scheme, data, "weight_scale", config=config, **fields)


_NVFP4_NOTE = (
    "written as nvfp4_a16, weights only: for quantised inputs the format needs their static "
    "scales (--input-ranges), from calibration; tmoe runs such weights with scheme nvfp4 too"
)
_BYTES: Config = {"scale_dtype": "torch.uint8"}
_E4M3: Config = {"group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
_nvfp4 = _compressed(
    "nvfp4_a16", "nvfp4-pack-quantized", _args(4, "tensor_group", **_E4M3), None,
    global_scale="weight_global_scale", divides=True,
)  # fmt: skip
_tensor = _compressed(
    "fp8_tensor", "float-quantized", _args(8, "tensor"), _args(8, "tensor", dynamic=True),
    scale_shape=_as_column,
)  # fmt: skip
_mxfp4 = _compressed(
    "mxfp4_a16", "mxfp4-pack-quantized", _args(4, "group", group_size=32, **_BYTES), None
)
_modelopt_nvfp4 = Written(
    "modelopt", "nvfp4_a16", "weight", "weight_scale", "weight_scale_2",
    config={
        "quant_algo": "W4A16_NVFP4",
        "group_size": 16,
        "weights": {"num_bits": 4, "group_size": 16},
    },
)  # fmt: skip
_FP8_INPUTS = {"input_activations": {"dynamic": False, "num_bits": 8, "type": "float"}}

WRITTEN: dict[tuple[str, str], Written] = {
    (written.method, written.scheme): written
    for written in (
        Written(
            "deepseek", "fp8_block", "weight", "weight_scale_inv",
            config={
                "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3",
            },
        ),
        _tensor,
        _compressed(
            "fp8_channel", "float-quantized", _args(8, "channel"), _args(8, "token", dynamic=True),
            scale_shape=_as_column,
        ),
        _compressed(
            "fp8_block", "float-quantized", _args(8, "block", block_structure=[128, 128]),
            _args(8, "group", dynamic=True, group_size=128),
        ),
        _compressed(
            "fp8_a16", "naive-quantized", _args(8, "tensor"), None, scale_shape=_as_column
        ),
        _compressed(
            "mxfp8", "mxfp8-quantized", _args(8, "group", group_size=32, **_BYTES),
            _args(8, "group", dynamic=True, group_size=32, **_BYTES),
        ),
        _mxfp4,
        _compressed(
            "mxfp4_a8", "mxfp4-pack-quantized", _args(4, "group", group_size=32, **_BYTES),
            _args(8, "group", dynamic=True, group_size=32, **_BYTES),
        ),
        _nvfp4,
        replace(_nvfp4, scheme="nvfp4", note=_NVFP4_NOTE),
        Written(
            "modelopt", "fp8_channel", "weight", "weight_scale",
            config={
                "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN",
                "weights": {"num_bits": 8, "strategy": "channel"},
                "group": _FP8_INPUTS,
            },
        ),
        Written(
            "modelopt", "mxfp8", "weight", "weight_scale",
            config={
                "quant_algo": "MXFP8",
                "group_size": 32,
                "weights": {"num_bits": 8, "group_size": 32},
                "group": _FP8_INPUTS,
            },
        ),
        Written(
            "gpt-oss", "mxfp4_a16", "_blocks", "_scales",
            data_shape=lambda shape: (*shape[:-1], shape[-1] // 16, 16),
        ),
        _modelopt_nvfp4,
        replace(_modelopt_nvfp4, scheme="nvfp4", note=_NVFP4_NOTE),
    )
}  # fmt: skip
_STATIC_E4M3 = _args(4, "tensor_group", dynamic="local", **_E4M3)
STATIC: dict[tuple[str, str], Written] = {
    (written.method, written.scheme): written
    for written in (
        replace(
            _nvfp4, scheme="nvfp4", input_scale="input_global_scale", largest=448.0 * 6,
            config={**_nvfp4.config, "input_activations": _STATIC_E4M3},
        ),
        replace(
            _tensor, input_scale="input_scale", largest=448.0,
            config={**_tensor.config, "input_activations": _args(8, "tensor")},
        ),
        replace(
            _modelopt_nvfp4, scheme="nvfp4", input_scale="input_scale", largest=448.0 * 6,
            config={
                **_modelopt_nvfp4.config,
                "quant_algo": "NVFP4",
                "group": {
                    "input_activations": {
                        "dynamic": False, "num_bits": 4, "type": "float", "group_size": 16,
                    },
                },
            },
        ),
        Written(
            "modelopt", "fp8_tensor", "weight", "weight_scale", input_scale="input_scale",
            largest=448.0,
            config={"quant_algo": "FP8", "weights": {"num_bits": 8}, "group": _FP8_INPUTS},
        ),
    )
}  # fmt: skip
METHODS = ("deepseek", "compressed-tensors", "modelopt", "gpt-oss")
_WHY_NOT = {
    (
        "modelopt",
        "fp8_tensor",
    ): "its FP8 needs scales of the inputs (--input-ranges), from calibration",
    ("modelopt", "fp8_block"): "its block FP8 (FP8_PB_WO) leaves the inputs unquantised",
    ("deepseek", "fp8_tensor"): "its readers differ in what the scale is called",
}


def written_format(scheme: str, method: str | None = None, static: bool = False) -> Written:
    """How to write the weights of a scheme; by default as most others read them. `static`: with
    scales of the inputs.

    Raises:
        ValueError: no such scheme or format, or the format has no form for the scheme.
    """
    Scheme.of(scheme, OP)
    table = STATIC if static else WRITTEN
    if static:
        schemes = sorted({known for _, known in STATIC})
        wanted = f"None for {scheme}; {' and '.join(schemes)} have static scales of their inputs"
        expect(scheme in schemes, OP, "input_ranges", wanted, "a file")
    fitting = [name for name in METHODS if (name, scheme) in table]
    if method is None:
        method = fitting[0]
    expect(method in METHODS, OP, "format", f"one of {', '.join(METHODS)}", repr(method))
    why = _WHY_NOT.get((method, scheme), "it has no form for such weights and inputs")
    wanted = f"{' or '.join(fitting)} for {scheme}"
    expect((method, scheme) in table, OP, "format", wanted, f"{method}: {why}")
    return table[method, scheme]
