"""The sizes of a model's MoE layers, from its config alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tmoe.checkpoints.json_files import read_json
from tmoe.checks import expect
from tmoe.routing import Routing

OP = "sizes_of_config"


@dataclass(frozen=True)
class ModelSizes:
    """Of the routed experts in all layers; `other` counts the parameters beside them."""

    name: str
    layers: int
    num_experts: int
    top_k: int
    hidden: int
    intermediate: int
    n_group: int
    topk_group: int
    other: int


def sizes_of_config(file: Path) -> ModelSizes:
    """Read a config.json. The model is built on the meta device, which holds no weights.

    Raises ``ValueError`` that names the file: it isn't JSON, is of no model that transformers can
    build, or of one without MoE layers that tmoe knows, or with layers of different sizes.
    """
    from .quantized import weight_names
    from .replace import replace_moe
    from .switch import expert_modules

    model = _model_without_weights(file)
    replace_moe(model, routers=False)  # what isn't on the experts interface is known after that
    config, text = model.config, model.config.get_text_config()
    layers = [experts for _, experts in expert_modules(model)]
    wanted = "of a model with MoE layers that tmoe knows"
    expect(len(layers) > 0, OP, file.name, wanted, type(config).__name__)
    try:
        routing = Routing.from_transformers(text)
    except ValueError as error:
        said = str(error).removeprefix("Routing.from_transformers: ")
        wanted = "must have a router that tmoe knows"
        raise ValueError(f"{OP}: {file.name} {wanted}, got {said}") from error
    found: Counter[tuple[int, int]] = Counter()
    for experts in layers:
        down = experts.get_parameter(weight_names(experts)[1])
        num_experts = down.shape[0]
        found[num_experts, down.numel() // (num_experts * text.hidden_size)] += 1
    wanted = "of layers of one size (experts, intermediate)"
    expect(len(found) == 1, OP, file.name, wanted, dict(found))
    ((num_experts, intermediate),) = found
    inside = sum(parameter.numel() for experts in layers for parameter in experts.parameters())
    total = sum(parameter.numel() for parameter in model.parameters())
    return ModelSizes(
        config.model_type, len(layers), num_experts, routing.top_k, text.hidden_size, intermediate,
        routing.n_group, routing.topk_group, total - inside,
    )  # fmt: skip


def _model_without_weights(file: Path) -> Any:
    import torch
    import transformers

    from .load_model import class_of_config, take_description

    kind = read_json(file).get("model_type")
    known = isinstance(kind, str) and kind in transformers.CONFIG_MAPPING
    wanted = f"one that transformers {transformers.__version__} knows"
    expect(known, OP, f"model_type of {file.name}", wanted, repr(kind))
    try:
        config = transformers.AutoConfig.from_pretrained(file, trust_remote_code=False)
        take_description(config)  # sizes are the same without
        with torch.device("meta"):
            return class_of_config(config, transformers)(config)
    except ImportError:
        raise  # a package that the model needs
    except Exception as error:  # noqa: BLE001  each model has its own way to fail on bad numbers
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{OP}: {file.name} can't be made into a model: {said}") from error
