"""What `save_pretrained` does after experts were quantised in place.

It writes the checkpoint that ``tmoe quantize`` would have made of the model, in the same format.
transformers asks a model's ``hf_quantizer`` for the tensors to save; ours gives it those.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from tmoe.checkpoints.expert_matrices import ROLES
from tmoe.checkpoints.write_formats import written_format
from tmoe.checkpoints.written import Written
from tmoe.formats import SCHEMES, QuantizedTensor

from .activations import ExpertsModule
from .quantized import HELD, PADDED, HeldScheme, scheme_of, weight_names
from .switch import expert_modules

_PER_EXPERT = re.compile(r".*experts\.\d+\.(\w+)\.weight$")


class SavingQuantizer(HfQuantizer):
    """Stands in ``model.hf_quantizer`` of a model whose experts were quantised in place."""

    requires_calibration = False

    def __init__(self) -> None:
        super().__init__(QuantizationConfigMixin(quant_method="tmoe"))  # type: ignore[arg-type]

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """What can't be written is refused by `get_state_dict_and_metadata`, with the reason."""
        return True

    @property
    def is_trainable(self) -> bool:
        return False

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, Any], dict]:
        """The tensors to save and, in the model's config, what they mean."""
        state = dict(model.state_dict())
        layers = [(n, m) for n, m in expert_modules(model) if scheme_of(m).name is not None]
        schemes = sorted({str(scheme_of(experts).name) for _, experts in layers})
        if len(schemes) != 1:
            _refuse(f"its layers are in {len(schemes)} schemes: {', '.join(schemes)}")
        written = written_format(schemes[0])
        quantized: dict[str, Tensor] = {}
        for name, experts in layers:
            for weight in weight_names(experts):
                del state[f"{name}.{weight}"]
            quantized |= _linears(model, name, experts, written)
        rest = revert_weight_conversion(model, {k: v.to("meta") for k, v in state.items()})
        kept = [k for k, v in rest.items() if k.endswith(".weight") and v.ndim == 2]
        kept = [name.removesuffix(".weight") for name in kept]
        model.config.quantization_config = written.configs(kept)["config.json"]
        return {**state, **quantized}, {}


def prepare_saving(model: nn.Module) -> None:
    """Make `save_pretrained` of `model`, and of models inside it, write quantised experts."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and any(
            isinstance(child, HeldScheme) for child in module.modules()
        ):
            vars(module)["hf_quantizer"] = SavingQuantizer()


def _linears(
    model: PreTrainedModel, name: str, experts: ExpertsModule, written: Written
) -> dict[str, Tensor]:
    """The parts of each linear of each expert, by their names in a file."""
    if reason := _why_not(experts):
        _refuse(f"{name}: {reason}")
    first, down = (experts.get_parameter(weight) for weight in weight_names(experts))
    assert isinstance(first, QuantizedTensor) and isinstance(down, QuantizedTensor)
    held = getattr(experts, HELD).name
    made = SCHEMES[held].weights[0]
    if (first.format, first.block_shape) != (made.format.name, made.block_shape):
        _refuse(
            f"{name}: its weights are {first.format}, and for {held} tmoe writes {made.format.name}"
        )
    names = names_in_file(model, name, experts)
    result = {}
    for e in range(len(down)):
        halves = first[e].chunk(2) if experts.has_gate else (first[e],)
        roles = ("gate", "up") if experts.has_gate else ("up",)
        for role, q in zip((*roles, "down"), (*halves, down[e]), strict=True):
            assert isinstance(q, QuantizedTensor)
            for part, tensor in written.parts(q).items():
                result[f"{names[e, role]}.{part}"] = tensor.to("cpu", copy=True)
    return result


def _why_not(experts: ExpertsModule) -> str | None:
    held = getattr(experts, HELD)
    if getattr(experts, PADDED, False):
        return "rows of zeros fill its blocks of scales"
    if held.input_scale is not None or held.hidden_scale is not None:
        return "it has static scales of its inputs"
    if not hasattr(experts, "has_gate") or not experts.is_concatenated:
        return f"the layout of {type(experts).__name__} is not one that the format describes"
    if experts.has_bias:
        return "its experts have biases, in tensors of all experts"
    first = experts.get_parameter(weight_names(experts)[0])
    rows = first.block_shape[0] or 1
    if experts.has_gate and first.shape[1] // 2 % rows:
        return f"gate and up have {first.shape[1] // 2} rows, no multiple of {rows}"
    return None


def names_in_file(
    model: PreTrainedModel, name: str, experts: ExpertsModule
) -> dict[tuple[int, str], str]:
    """What the linears of an expert are called on disk, found by sending marked tensors there."""
    first, down = weight_names(experts)
    E = experts.get_parameter(down).shape[0]
    roles = ("gate", "up") if experts.has_gate else ("up",)
    marks = torch.arange(E * len(roles)).view(E, len(roles), 1)
    probe = {f"{name}.{first}": marks, f"{name}.{down}": torch.arange(E).view(E, 1, 1)}
    found: dict[tuple[int, str], str] = {}
    for key, mark in revert_weight_conversion(model, probe).items():
        match = _PER_EXPERT.fullmatch(key)
        if match and match[1] in ROLES and mark.numel() == 1:
            e, place = divmod(int(mark), len(roles))
            role = roles[place] if ROLES[match[1]] != "down" else "down"
            e = e if role != "down" else int(mark)
            found[e, role] = key.removesuffix(".weight")
        elif key.endswith((f".{first}", f".{down}")):  # of all experts; we write each one's
            below = roles if key.endswith(f".{first}") else ("down",)
            layer = key.rpartition(".")[0]
            found |= {(e, role): f"{layer}.{e}.{role}_proj" for e in range(E) for role in below}
    if len(found) != E * (len(roles) + 1):
        _refuse(f"{name}: tmoe doesn't know its names in a file")
    # They pass through the same conversion once more when they are saved.
    again = revert_weight_conversion(model, {f"{k}.weight": torch.ones(1) for k in found.values()})
    if set(again) != {f"{linear}.weight" for linear in found.values()}:
        _refuse(f"{name}: its names change on the way to a file")
    return found


def _refuse(reason: str) -> None:
    raise NotImplementedError(
        f"save_pretrained: the experts of this model were quantised by tmoe, and {reason}. "
        "Quantise the original checkpoint on disk instead: "
        "tmoe quantize MODEL_DIR OUT_DIR --scheme SCHEME"
    )
