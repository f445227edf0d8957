"""The sizes of a model's MoE layers, from its config alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

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

    Raises ``ValueError`` without MoE layers that tmoe knows, or with layers of different sizes.
    """
    import torch
    import transformers

    from .load_model import class_of_config, take_description
    from .quantized import weight_names
    from .replace import replace_moe
    from .switch import expert_modules

    config = transformers.AutoConfig.from_pretrained(file, trust_remote_code=False)
    take_description(config)  # sizes are the same without
    with torch.device("meta"):
        model = class_of_config(config, transformers)(config)
    replace_moe(model, routers=False)  # what isn't on the experts interface is known after that
    text = config.get_text_config()
    found: Counter[tuple[int, int]] = Counter()
    inside = 0
    for _, experts in expert_modules(model):
        down = experts.get_parameter(weight_names(experts)[1])
        num_experts = down.shape[0]
        found[num_experts, down.numel() // (num_experts * text.hidden_size)] += 1
        inside += sum(parameter.numel() for parameter in experts.parameters())
    kind = type(config).__name__
    expect(len(found) > 0, OP, "config", "of a model with MoE layers that tmoe knows", kind)
    wanted = "of layers of one size (experts, intermediate)"
    expect(len(found) == 1, OP, "config", wanted, dict(found))
    (((num_experts, intermediate), layers),) = found.items()
    routing = Routing.from_transformers(text)
    total = sum(parameter.numel() for parameter in model.parameters())
    return ModelSizes(
        config.model_type, layers, num_experts, routing.top_k, text.hidden_size, intermediate,
        routing.n_group, routing.topk_group, total - inside,
    )  # fmt: skip
