"""The hooks of transformers' loading that tmoe needs: before the weights come, and after.

transformers calls them for the quantisation method that a model's config names. This one is named
``tmoe``, and only `from_pretrained` asks for it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.quantizers.auto import (
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from tmoe.formats import QuantizedTensor

from .checkpoint_loading import CheckpointLoading

METHOD = "tmoe"


class LoadingConfig(QuantizationConfigMixin):
    """Carries the loading to the quantiser."""

    def __init__(self, loading: CheckpointLoading) -> None:
        self.quant_method: Any = METHOD
        self.loading = loading

    def to_dict(self) -> dict[str, Any]:
        return {"quant_method": METHOD}


class LoadingQuantizer(HfQuantizer):
    """Prepares a model for the tensors of a checkpoint, while it is on the meta device."""

    requires_calibration = False
    quantization_config: LoadingConfig

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        self.quantization_config.loading.prepare(model)
        return model

    def param_element_size(self, model: nn.Module, param_name: str, param: Tensor) -> float:
        """Bytes for a value, by which `device_map="auto"` plans."""
        if isinstance(param, QuantizedTensor):
            return param.nbytes / param.numel()
        return float(param.element_size())

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


def register_method() -> None:
    """Make transformers know the method; twice is fine."""
    if METHOD not in AUTO_QUANTIZER_MAPPING:
        register_quantizer(METHOD)(LoadingQuantizer)
        register_quantization_config(METHOD)(LoadingConfig)
