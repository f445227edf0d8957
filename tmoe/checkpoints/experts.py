"""`read_experts`: the experts of one layer of a checkpoint as stacked `QuantizedTensor`s."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from ..checks import expect, expect_type
from ..formats import QuantizedTensor
from .checkpoint import Checkpoint
from .json_files import some
from .stacked import StoredExperts

OP = "read_experts"
# Names of an expert's projections: gate, up, down; or up, down where there is no gate.
PROJECTIONS = (
    ("gate_proj", "up_proj", "down_proj"),
    ("w1", "w3", "w2"),
    ("up_proj", "down_proj"),
)
_FIRST = ("gate_up_proj", "up_proj")


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Where the experts of one layer are: the names of the layers that hold their weights.

    Attributes:
        first: of the first projection: one, or gate and up apart. With ``{e}`` in place of the
            expert's number, or of a tensor with all experts.
        down: of the second one.
        num_experts: E.
    """

    first: tuple[str, ...]
    down: str
    num_experts: int

    @property
    def fused(self) -> bool:
        return "{e}" not in self.down


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The experts of one layer, or a range of them, as `tmoe.fused_experts` takes them.

    Attributes:
        gate_up_proj: (E, 2I, H), gate rows first unless `interleaved`; (E, I, H) without a gate.
        down_proj: (E, H, I).
        gate_up_bias, down_bias: (E, 2I) and (E, H), as stored, or None.
        interleaved: rows are g0, u0, g1, u1, ...
        scheme: the scheme that computes what the checkpoint says; None for ordinary weights.
        input_scale, hidden_scale: (E,) fp32, static scales of the inputs, or None.
    """

    gate_up_proj: QuantizedTensor | Tensor
    down_proj: QuantizedTensor | Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    interleaved: bool = False
    scheme: str | None = None
    input_scale: Tensor | None = None
    hidden_scale: Tensor | None = None


def read_experts(
    checkpoint: Checkpoint,
    prefix: str,
    *,
    experts: range | None = None,
    scheme: str | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    hidden_size: int | None = None,
    intermediate_size: int | None = None,
    interleaved: bool | None = None,
) -> ExpertWeights:
    """Read the experts of one layer, without dequantising them.

    Each expert is written straight into the stacked tensors on `device`, so the most memory that
    it takes is theirs and, on a GPU, what moves one expert there.

    Args:
        checkpoint: an open `Checkpoint`.
        prefix: the name of the experts' module in the checkpoint, "model.layers.0.mlp.experts"
            for example; `expert_prefixes` lists them.
        experts: read these only, as a rank of expert parallelism does; None = all.
        scheme: compute in this scheme of `tmoe.formats.SCHEMES`, which has to take such weights,
            instead of the one that the checkpoint says; "nvfp4_a16", for example.
        device, dtype: where they go; the nominal dtype of the quantised weights.
        hidden_size, intermediate_size: H and I of the model; if given, the tensors must fit.
        interleaved: whether fused gate and up rows alternate; None = as the model type says
            (gpt-oss: yes).

    Raises:
        ValueError: a tensor is missing, or of another dtype or shape, or a scale isn't usable:
            with the file, the tensor, what was wanted and what came. All names, dtypes and shapes
            are checked before the first tensor is read.
    """
    expect_type(checkpoint, Checkpoint, OP, "checkpoint")
    names = find_experts(checkpoint, prefix)
    if interleaved is None:
        text = checkpoint.config.get("text_config", checkpoint.config)
        interleaved = names.fused and text.get("model_type") == "gpt_oss"
    if experts is None:
        experts = range(names.num_experts)
    expect_type(experts, range, OP, "experts")
    ok = experts.step == 1 and 0 <= experts.start < experts.stop <= names.num_experts
    expect(ok, OP, "experts", f"a range within range({names.num_experts})", experts)
    biases = [_bias(checkpoint, name, experts) for name in (names.first[0], names.down)]
    expect(
        names.fused or not any(b is not None for b in biases),
        OP,
        prefix,
        "without biases of single experts",
        "some",
    )
    first, second = (None if bias is None else bias.to(device, copy=True) for bias in biases)
    stored = StoredExperts.find(checkpoint, names.first, names.down, experts, scheme, OP)
    if stored is None:
        weights = _plain(checkpoint, names, experts, device)
        return ExpertWeights(*weights, first, second, interleaved)
    stored.expect_sizes(hidden_size, intermediate_size)
    gate_up, down = stored.read_first(device, dtype), stored.read_down(device, dtype)
    scales = stored.input_scales(device)
    return ExpertWeights(gate_up, down, first, second, interleaved, stored.scheme, *scales)


def find_experts(checkpoint: Checkpoint, prefix: str) -> ExpertNames:
    """Where a layer's experts are in a checkpoint. Raises ``ValueError`` if it has none there, or
    not all of them."""
    expect_type(prefix, str, OP, "prefix")
    for first in _FIRST:
        names = [
            name for name in _tensors_of(checkpoint, f"{prefix}.{first}") if "bias" not in name
        ]
        if names:
            down = checkpoint.info(_tensors_of(checkpoint, f"{prefix}.down_proj", must=True)[0])
            return ExpertNames((f"{prefix}.{first}",), f"{prefix}.down_proj", down.shape[0])
    found: dict[int, set[str]] = {}
    pattern = re.compile(rf"{re.escape(prefix)}\.(\d+)\.(\w+)\.")
    for name in checkpoint:
        if match := pattern.match(name):
            found.setdefault(int(match[1]), set()).add(match[2])
    near = some(expert_prefixes(checkpoint)) or "no experts at all"
    expect(bool(found), OP, "prefix", "of experts in the checkpoint", f"{prefix!r}; it has {near}")
    absent = [e for e in range(max(found) + 1) if e not in found]
    expect(not absent, OP, prefix, f"of experts 0 to {max(found)}", f"none of {absent[:8]}")
    every = set().union(*found.values())
    fitting = [names for names in PROJECTIONS if set(names) == every]
    forms = " or ".join(", ".join(names) for names in PROJECTIONS)
    expect(bool(fitting), OP, prefix, f"of experts with {forms}", ", ".join(sorted(every)))
    *first_names, down_name = (f"{prefix}.{{e}}.{name}" for name in fitting[0])
    return ExpertNames(tuple(first_names), down_name, len(found))


def expert_prefixes(checkpoint: Checkpoint) -> list[str]:
    """The names of a checkpoint's experts' modules, in its order."""
    pattern = re.compile(r"(.*\bexperts)\.(?:\d+\.|gate_up_proj|up_proj)")
    matches = (pattern.match(name) for name in checkpoint)
    return list(dict.fromkeys(match[1] for match in matches if match))


def _tensors_of(checkpoint: Checkpoint, layer: str, must: bool = False) -> list[str]:
    """The tensors of a fused layer, the data first."""
    names = checkpoint.quantization.names if checkpoint.quantization else None
    endings = names.of_fused.get("data", ()) if names else ()
    options = [layer + ending for ending in (*endings, "")]
    found = [name for name in options if name in checkpoint]
    if must and not found:
        checkpoint.info(options[0])  # raises, and says what is beside it
    return found


def _bias(checkpoint: Checkpoint, layer: str, experts: range) -> Tensor | None:
    name = f"{layer}_bias" if "{e}" not in layer else f"{layer.format(e=experts.start)}.bias"
    return checkpoint.view(name)[experts.start : experts.stop] if name in checkpoint else None


def _plain(
    checkpoint: Checkpoint, names: ExpertNames, experts: range, device: str | torch.device
) -> tuple[Tensor, Tensor]:
    """Ordinary weights, stacked; fused ones as they are stored."""
    if names.fused:
        layers = (names.first[0], names.down)
        first, down = (checkpoint.view(_tensors_of(checkpoint, layer)[0]) for layer in layers)
        rows = slice(experts.start, experts.stop)
        return first[rows].to(device, copy=True), down[rows].to(device, copy=True)

    def stack(layers: tuple[str, ...]) -> Tensor:
        views = [
            [checkpoint.view(f"{layer.format(e=e)}.weight") for layer in layers] for e in experts
        ]
        rows, like = sum(view.shape[0] for view in views[0]), views[0][0]
        out = torch.empty(len(experts), rows, like.shape[1], dtype=like.dtype, device=device)
        for into, halves in zip(out, views, strict=True):
            expect(sum(len(half) for half in halves) == rows, OP, names.first[0], f"of {rows} rows",
                   [tuple(half.shape) for half in halves])  # fmt: skip
            for part, half in zip(into.split([len(half) for half in halves]), halves, strict=True):
                part.copy_(half)
        return out

    return stack(names.first), stack((names.down,))
