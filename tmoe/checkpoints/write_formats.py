"""What each checkpoint format calls the parts of a quantised matrix, and what its config says.

`WRITTEN` is the whole table: for a checkpoint format and a scheme of tmoe, the tensors that stand
for one matrix and the configuration that makes others read them. Sources: compressed-tensors
(`quantization/quant_scheme.py`, `compressors/`), nvidia-modelopt (`torch/export/`), and
transformers (`quantizers/quantizer_finegrained_fp8.py`) for DeepSeek's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..checks import expect
from ..formats import SCHEMES, QuantizedTensor, Scheme
from ..formats.recipe import Recipe
from ..version import __version__

OP = "quantize_checkpoint"
Config = dict[str, Any]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Written:
    """How a checkpoint format holds the weights of a scheme.

    Attributes:
        method: "deepseek", "compressed-tensors", "modelopt" or "gpt-oss".
        scheme: a name of `tmoe.formats.SCHEMES`.
        data, scale, global_scale: what the parts of a linear's weight are called, below the linear.
        data_shape, scale_shape: from the shape of the codes and scales as tmoe has them to that in
            the file.
        divides: the global scale is stored as its reciprocal.
        config: what stands in the configuration, without the list of what isn't quantised.
        note: what a user should know, or "".
    """

    method: str
    scheme: str
    data: str
    scale: str
    global_scale: str = ""
    data_shape: Callable[[Shape], Shape] = lambda shape: shape
    scale_shape: Callable[[Shape], Shape] = lambda shape: shape
    divides: bool = False
    config: Config = field(default_factory=dict)
    note: str = ""

    @property
    def recipe(self) -> Recipe:
        return SCHEMES[self.scheme].weights[0]

    def describe(self, shape: Shape) -> dict[str, tuple[torch.dtype, Shape]]:
        """Names, dtypes and shapes of what `parts` gives for a matrix (N, K)."""
        form, block = self.recipe.format, self.recipe.block_shape
        scale_shape = self.scale_shape(form.scale_shape(shape, block))
        described = {
            self.data: (form.element.storage, self.data_shape(form.data_shape(shape))),
            self.scale: (form.scale.storage, scale_shape),
        }
        if self.global_scale:
            described[self.global_scale] = (torch.float32, self._one)
        return described

    def parts(self, q: QuantizedTensor) -> dict[str, Tensor]:
        """The tensors that stand for `q`, a matrix (N, K)."""
        scale = q.scale.reshape(self.scale_shape(tuple(q.scale.shape)))
        parts = {self.data: q.data.reshape(self.data_shape(tuple(q.data.shape))), self.scale: scale}
        if q.global_scale is not None:
            value = q.global_scale.reciprocal() if self.divides else q.global_scale
            parts[self.global_scale] = value.reshape(self._one)
        return parts

    @property
    def fused(self) -> bool:
        """Whether a tensor holds all experts of a layer; else each linear has its own."""
        return self.method == "gpt-oss"

    @property
    def _one(self) -> Shape:
        """compressed-tensors stores one number as (1,), ModelOpt as ()."""
        return (1,) if self.method == "compressed-tensors" else ()

    def configs(self, not_quantized: Sequence[str]) -> dict[str, Config]:
        """The `quantization_config` for config.json, and further files by name."""
        # A model that ties it to its embedding has a linear of that name and no tensor.
        ignored = list(dict.fromkeys((*not_quantized, "lm_head")))
        if self.method == "deepseek":
            config = {"quant_method": "fp8", **self.config, "modules_to_not_convert": ignored}
            return {"config.json": config}
        if self.method == "gpt-oss":
            return {"config.json": {"quant_method": "mxfp4", "modules_to_not_convert": ignored}}
        if self.method == "compressed-tensors":
            config = {
                "quant_method": "compressed-tensors",
                "format": self.config["format"],
                "quantization_status": "compressed",
                "config_groups": {"group_0": {"targets": ["Linear"], **self.config}},
                "ignore": ignored,
                "kv_cache_scheme": None,
                "global_compression_ratio": None,
            }
            return {"config.json": config}
        # Loaders ask for the producer's name to recognise the format; the version says who wrote.
        producer = {"name": "modelopt", "version": f"tmoe {__version__}"}
        stated = {"quant_algo": self.config["quant_algo"], "kv_cache_quant_algo": None}
        if "group_size" in self.config:
            stated["group_size"] = self.config["group_size"]
        weights = {"dynamic": False, "type": "float", **self.config["weights"]}
        group = {"weights": weights, "targets": ["Linear"], **self.config.get("group", {})}
        return {
            "config.json": {
                "config_groups": {"group_0": group},
                "ignore": ignored,
                "quant_algo": self.config["quant_algo"],
                "producer": producer,
                "quant_method": "modelopt",
            },
            "hf_quant_config.json": {
                "producer": producer,
                "quantization": {**stated, "exclude_modules": ignored},
            },
        }


def _as_column(shape: Shape) -> Shape:
    return (*shape, 1)


def _args(bits: int, strategy: str, *, dynamic: bool = False, **more: Any) -> Config:
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
    "scales, which come from calibration; tmoe runs such weights with scheme nvfp4 too"
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
METHODS = ("deepseek", "compressed-tensors", "modelopt", "gpt-oss")
_WHY_NOT = {
    ("modelopt", "fp8_tensor"): "its FP8 needs static scales of the inputs, from calibration",
    ("modelopt", "fp8_block"): "its block FP8 (FP8_PB_WO) leaves the inputs unquantised",
    ("deepseek", "fp8_tensor"): "its readers differ in what the scale is called",
}


def written_format(scheme: str, method: str | None = None) -> Written:
    """How to write the weights of a scheme; by default as most others read them.

    Raises:
        ValueError: no such scheme or format, or the format has no form for the scheme.
    """
    Scheme.of(scheme, OP)
    fitting = [name for name in METHODS if (name, scheme) in WRITTEN]
    if method is None:
        method = fitting[0]
    expect(method in METHODS, OP, "format", f"one of {', '.join(METHODS)}", repr(method))
    why = _WHY_NOT.get((method, scheme), "it has no form for such weights and inputs")
    wanted = f"{' or '.join(fitting)} for {scheme}"
    expect((method, scheme) in WRITTEN, OP, "format", wanted, f"{method}: {why}")
    return WRITTEN[method, scheme]
