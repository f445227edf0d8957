"""Which modules of a model hold experts that can be divided, and where each has its weights.

tmoe's own `Experts`, and the experts' modules of transformers that `tmoe.replace_moe` or
``experts_implementation="tmoe"`` put on tmoe: theirs may be stored transposed.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import is_parametrized

from ..checks import expect
from ..integrations.transformers.quantized import PARALLEL, is_transposed, scheme_of
from ..nn import Experts
from ..nn.lora import LORA, LoraPair
from .shard import down_columns, first_rows, take_experts, whole

OP = "parallelize"


@dataclass(frozen=True, eq=False)
class ExpertsLayer:
    """One module with the experts of a layer.

    Attributes:
        name: in the model.
        module: holds the parameters.
        first, down: the names of its two projections.
        biases: whether there are some, named as the projections and ``_bias``.
        transposed: both projections are stored as (E, K, N).
        gated, interleaved, activation: of the first projection and what follows it.
        scheme: of quantised weights, or None.
        scales: the module that has ``input_scale`` and ``hidden_scale``.
        whole_width: why the width can't be divided, or None.
    """

    name: str
    module: Any
    first: str
    down: str
    biases: bool
    transposed: bool
    gated: bool
    interleaved: bool
    activation: str
    scheme: str | None
    scales: nn.Module | None
    whole_width: str | None = None

    @property
    def tensors(self) -> list[str]:
        """The names of the parameters with experts in them, but for adapters."""
        biases = [f"{self.first}_bias", f"{self.down}_bias"] if self.biases else []
        return [self.first, self.down, *biases]

    @property
    def pairs(self) -> dict[str, LoraPair]:
        """The adapters of `tmoe.lora`, by the names of the projections."""
        lora = getattr(self.module, LORA, None)
        return {} if lora is None else dict(lora.named_children())

    @property
    def adapters(self) -> list[str]:
        """The names of their parameters."""
        return [f"{LORA}.{name}.lora_{part}" for name in self.pairs for part in "AB"]

    def usual(self, name: str) -> Tensor:
        """A parameter in the usual order, (E, N, K) or (E, N); a view, without a gradient."""
        weight: Tensor = getattr(self.module, name).detach()
        return weight.transpose(1, 2) if self.transposed and weight.ndim == 3 else weight

    @property
    def down_proj(self) -> Tensor:
        return self.usual(self.down)

    @property
    def static_scales(self) -> dict[str, Tensor]:
        found = {n: getattr(self.scales, n, None) for n in ("input_scale", "hidden_scale")}
        return {name: scale for name, scale in found.items() if scale is not None}

    @property
    def words(self) -> dict[str, Any]:
        """What all ranks have to agree on."""
        E, H, I = self.down_proj.shape
        return {
            "layer": self.name or type(self.module).__name__,
            "experts": E,
            "hidden_size": H,
            "intermediate_size": I,
            "scheme": self.scheme,
            "dtype": str(self.down_proj.dtype).removeprefix("torch."),
            "activation": self.activation,
            "bias": self.biases,
            "adapters": {name: [pair.rank, pair.alpha] for name, pair in self.pairs.items()},
        }  # fmt: skip

    def share(self, held: tuple[int, ...], part: tuple[int, int]) -> Share:
        """These experts and this part of the width."""
        E, _, I = self.down_proj.shape
        return Share(self, E, held, part, I)

    def keep(self, share: Share) -> None:
        """Let go of all but a share; in place. What is all of it stays where it is."""
        for name in (*self.tensors, *self.adapters):
            weight = self.module.get_parameter(name)
            mine = share.of_all(name, weight.detach())
            if mine.shape != weight.shape or share.held != tuple(range(len(mine))):
                parameter = nn.Parameter(whole(mine), requires_grad=weight.requires_grad)
                owner, _, last = name.rpartition(".")
                setattr(self.module.get_submodule(owner), last, parameter)
        for name, scale in self.static_scales.items():
            if scale.numel() > 1:
                setattr(self.scales, name, whole(take_experts(scale, share.held)))


@dataclass(frozen=True, eq=False)
class Share:
    """What one rank has of a layer.

    Attributes:
        layer: the layer, which may have its share only by now.
        num_experts: E, of all ranks.
        held: its experts, in the order of its slots.
        part: where its part of the width begins and ends.
        width: I, of the whole layer.
    """

    layer: ExpertsLayer
    num_experts: int
    held: tuple[int, ...]
    part: tuple[int, int]
    width: int

    @property
    def whole_width(self) -> bool:
        return self.part == (0, self.width)

    def of_all(self, name: str, weight: Tensor) -> Tensor:
        """A parameter as the layer stores it, of all experts -> what is the share's; perhaps a view
        of it."""
        weight = take_experts(weight, self.held)
        if self.layer.transposed and name in (self.layer.first, self.layer.down):
            return self.cut(name, weight.transpose(1, 2)).transpose(1, 2)
        return self.cut(name, weight)

    def of_one(self, name: str, matrix: Tensor) -> Tensor:
        """The weight of one linear of one expert, (I, H) of gate or up, or (H, I) of down."""
        rows = slice(*self.part)
        return matrix[:, rows] if name == self.layer.down else matrix[rows]

    def cut(self, name: str, weight: Tensor) -> Tensor:
        """A parameter (E, N, K), or (E, N) of a bias, of any experts -> the part of its width."""
        layer = self.layer
        first, down = layer.first, layer.down
        if name in (first, f"{first}_bias", f"{LORA}.{first}.lora_B"):
            gated, interleaved = layer.gated, layer.interleaved
            return first_rows(weight, self.part, self.width, gated=gated, interleaved=interleaved)
        columns = name in (down, f"{LORA}.{down}.lora_A")
        return down_columns(weight, self.part) if columns else weight


def expert_layers(model: nn.Module) -> dict[str, ExpertsLayer]:
    """The layers of `model` that can be divided, by name.

    Raises:
        ValueError: there are none, or one is divided already or can't be, with the reason.
    """
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            plain = type(module) is Experts
            got = f"{type(module).__name__} {name!r}"
            expect(plain, OP, "model", "not divided already", got)
            found[name] = _of_tmoe(name, module)
    if "transformers" in sys.modules:
        from ..integrations.transformers.dividing import divisible_experts

        for name, module, reason in divisible_experts(model):
            got = f"{type(module).__name__} {name!r}: {reason}"
            expect(reason is None, OP, "model", "of experts that can be divided", got)
            found[name] = _of_transformers(name, module)
    wanted = "one with a tmoe.MoE or tmoe.Experts in it, or on which tmoe.replace_moe was called"
    expect(bool(found), OP, "model", wanted, type(model).__name__)
    for name, layer in found.items():
        for tensor in layer.tensors:
            weight = getattr(layer.module, tensor)
            here = f"{name}.{tensor}".strip(".")
            wanted = "a tensor of this rank alone, not distributed already"
            expect(not isinstance(weight, DTensor), OP, here, wanted, type(weight).__name__)
            wanted = "without a parametrisation (LoRA, for example): merge or remove it first"
            expect(not is_parametrized(layer.module, tensor), OP, here, wanted, "one")
    return found


def divided_layers(model: nn.Module) -> dict[str, tuple[ExpertsLayer, Any]]:
    """The layers that are divided, by name, as this rank has them, and the `ExpertParallel` of
    each."""
    found: dict[str, tuple[ExpertsLayer, Any]] = {}
    for name, module in model.named_modules():
        if isinstance(module, Experts) and hasattr(module, "parallel"):
            found[name] = _of_tmoe(name, module), module.parallel
        elif (parallel := vars(module).get(PARALLEL)) is not None:
            found[name] = _of_transformers(name, module), parallel
    return found


def _of_tmoe(name: str, module: Experts) -> ExpertsLayer:
    return ExpertsLayer(
        name,
        module,
        module._first,
        "down_proj",
        biases=module.down_proj_bias is not None,
        transposed=False,
        gated=module.activation.gated,
        interleaved=module.interleaved,
        activation=str(module.activation),
        scheme=module.scheme,
        scales=module,
    )


def _of_transformers(name: str, module: Any) -> ExpertsLayer:
    from ..integrations.transformers.activations import activation_of

    scheme, activation = scheme_of(module), activation_of(module)
    normed = getattr(module, "has_post_expert_norm", False)
    return ExpertsLayer(
        name,
        module,
        "gate_up_proj" if module.has_gate else "up_proj",
        "down_proj",
        biases=module.has_bias,
        transposed=is_transposed(module),
        gated=module.has_gate,
        interleaved=not module.is_concatenated,
        activation=str(activation or type(module).__name__),
        scheme=scheme.name,
        scales=scheme if isinstance(scheme, nn.Module) else None,
        whole_width="a norm follows each expert" if normed else None,
    )
