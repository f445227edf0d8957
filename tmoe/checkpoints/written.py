"""How a checkpoint format holds the weights of a scheme: tensors, and what its config says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..formats import SCHEMES, QuantizedTensor
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
        divides: the global scale, and that of the inputs, are stored as their reciprocals.
        input_scale: what the static scale of a linear's inputs is called; "" if it has none.
        largest: the value that such a scale of 1 reaches.
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
    input_scale: str = ""
    largest: float = 1.0
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
        if self.input_scale:
            described[self.input_scale] = (torch.float32, self._one)
        return described

    def parts(self, q: QuantizedTensor, input_amax: float = 0.0) -> dict[str, Tensor]:
        """The tensors that stand for `q`, a matrix (N, K), whose inputs reach `input_amax`."""
        scale = q.scale.reshape(self.scale_shape(tuple(q.scale.shape)))
        parts = {self.data: q.data.reshape(self.data_shape(tuple(q.data.shape))), self.scale: scale}
        if q.global_scale is not None:
            value = q.global_scale.reciprocal() if self.divides else q.global_scale
            parts[self.global_scale] = value.reshape(self._one)
        if self.input_scale:
            reach = torch.tensor(input_amax or self.largest, dtype=torch.float32)
            value = self.largest / reach if self.divides else reach / self.largest
            parts[self.input_scale] = value.reshape(self._one)
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
