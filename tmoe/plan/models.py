"""The models that a plan is made for: sizes of their layers, how many, and what else they hold."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..bench.shapes import SHAPES
from ..checks import expect
from ..shapes import MoEShape

OP = "plan"


@dataclass(frozen=True, slots=True)
class PlanModel:
    """What a model asks of its GPUs.

    Attributes:
        shape: of one MoE layer, whole.
        layers: MoE layers.
        other: parameters beside the routed experts.
        n_group, topk_group: a token's experts are in `topk_group` of `n_group` groups.
        source: where the numbers are from.
    """

    shape: MoEShape
    layers: int
    other: float
    n_group: int = 1
    topk_group: int = 1
    source: str = "given"

    @property
    def expert_parameters(self) -> int:
        """Of all layers."""
        shape = self.shape
        return 3 * shape.hidden * shape.intermediate * shape.num_experts * self.layers


# MoE layers, parameters beside the routed experts in 10^9, groups. From the published configs;
# parameters are those of embeddings, attention, routers, shared experts and dense layers.
_KNOWN: dict[str, tuple[int, float, int, int]] = {
    "mixtral-8x7b": (32, 1.6, 1, 1),
    "olmoe": (16, 0.48, 1, 1),
    "qwen3-30b-a3b": (48, 1.54, 1, 1),
    "qwen3-235b-a22b": (94, 8.0, 1, 1),
    "glm-4.5": (89, 16.8, 1, 1),
    "deepseek-v3": (58, 17.1, 8, 4),
    "kimi-k2": (60, 11.7, 1, 1),
    "llama4-scout": (48, 11.1, 1, 1),
    "llama4-maverick": (24, 14.2, 1, 1),
    "gpt-oss-20b": (24, 1.8, 1, 1),
    "gpt-oss-120b": (36, 2.13, 1, 1),
}


def known_model(name: str) -> PlanModel:
    """A model by name. Raises ``ValueError`` with the names that there are."""
    wanted = f"one of {', '.join(_KNOWN)}, or the path of a config.json"
    expect(name in _KNOWN, OP, "model", wanted, repr(name))
    layers, other, n_group, topk_group = _KNOWN[name]
    return PlanModel(SHAPES[name], layers, 1e9 * other, n_group, topk_group, "its published config")


def model_from_config(path: Path | str) -> PlanModel:
    """A model of transformers, from its config.json or the folder of it; weights aren't read.

    The model is built without memory for its weights, and its experts are found as `replace_moe`
    finds them. Raises ``ValueError`` where there is no such file, no MoE layer or no router that
    tmoe knows, and ``ImportError`` without transformers.
    """
    from ..integrations.transformers.sizes import sizes_of_config

    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    expect(
        file.is_file(), OP, "model", "a known name or the path of a config.json", repr(str(path))
    )
    found = sizes_of_config(file)
    shape = MoEShape(found.name, found.num_experts, found.top_k, found.hidden, found.intermediate)
    return PlanModel(shape, found.layers, found.other, found.n_group, found.topk_group, str(file))
