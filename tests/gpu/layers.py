"""The layers of real models as tensors on the GPU, and how a result of that size is checked."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

import tmoe
from tests.checking import assert_matches
from tests.reference import fused_experts_ref
from tmoe.shapes import MODEL_SHAPES, MoEShape


@dataclass(frozen=True)
class Model:
    """An MoE layer as a model has it; `storage` (E, H, 2I) and (E, I, H) where transposed."""

    shape: MoEShape
    activation: tmoe.Activation = field(default_factory=lambda: tmoe.Activation("swiglu"))
    bias: bool = False
    interleaved: bool = False
    transposed: bool = False
    weight_on_input: bool = False

    @property
    def keywords(self) -> dict:
        return {
            "activation": self.activation,
            "interleaved": self.interleaved,
            "weight_on_input": self.weight_on_input,
        }

    def weights(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """Scaled so that outputs have the size of the inputs."""
        E, H, I = self.shape.num_experts, self.shape.hidden, self.shape.intermediate
        rows = 2 * I if self.activation.gated else I
        tensors = {
            "gate_up_proj": self._randn((E, rows, H), H**-0.5, device, dtype),
            "down_proj": self._randn((E, H, I), I**-0.5, device, dtype),
        }
        if self.bias:
            tensors["gate_up_bias"] = torch.randn(E, rows, device=device, dtype=dtype)
            tensors["down_bias"] = torch.randn(E, H, device=device, dtype=dtype)
        return tensors

    def _randn(self, size, std: float, device, dtype) -> Tensor:
        E, rows, columns = size
        if self.transposed:
            return self._normal((E, columns, rows), std, device, dtype).transpose(1, 2)
        return self._normal(size, std, device, dtype)

    @staticmethod
    def _normal(size, std: float, device, dtype) -> Tensor:
        return torch.zeros(size, device=device, dtype=dtype).normal_(std=std)


SHAPES = {shape.name: shape for shape in MODEL_SHAPES}
QWEN3 = Model(SHAPES["qwen3-30b-a3b"])
GPT_OSS = Model(
    SHAPES["gpt-oss-120b"], tmoe.Activation.swiglu_oai(),
    bias=True, interleaved=True, transposed=True,
)  # fmt: skip
LLAMA4 = Model(SHAPES["llama4-scout"], weight_on_input=True, transposed=True)
MODELS = {
    **{name: Model(shape) for name, shape in SHAPES.items()},
    "deepseek-v3-tp8": Model(MoEShape("deepseek-v3-tp8", 256, 8, 7168, 256)),
    "olmoe": Model(MoEShape("olmoe", 64, 8, 2048, 1024)),
    "llama4-maverick": Model(MoEShape("llama4-maverick", 128, 1, 5120, 8192)),  # 32 GB
    "llama4-scout, its own layout": LLAMA4,
    "gpt-oss-120b, its own layout": GPT_OSS,
}


def zipf(num_experts: int) -> Tensor:
    """The popularity of the experts of a skewed router, most popular first."""
    return 1.0 / torch.arange(1, num_experts + 1)


def inputs(
    model: Model, T: int, device: torch.device, dtype: torch.dtype, routing: str = "random"
) -> dict[str, Tensor]:
    """x, topk_weights and topk_ids. `routing`: "random", "zipf", or "one-expert" for all."""
    E, K, H = model.shape.num_experts, model.shape.top_k, model.shape.hidden
    logits = torch.randn(T, E, device=device)
    if routing == "zipf":
        logits += zipf(E).log().to(device)
    elif routing == "one-expert":
        logits[:, E - 1] += 100
    weights, ids = logits.softmax(-1).topk(K)
    x = torch.randn(T, H, device=device).to(dtype)
    # A weight of one for "one-expert" would hide that it is applied.
    weights = weights.clamp(max=0.8)
    return {"x": x, "topk_weights": weights, "topk_ids": ids.int()}


def sample(T: int, count: int = 6) -> list[int]:
    """A few tokens, with the first and the last."""
    return sorted({0, T - 1, *torch.randint(T, (count,)).tolist()})


def check_tokens(
    got: Tensor, tokens: list[int], tensors: dict[str, Tensor], keywords: dict
) -> None:
    """`got[tokens]` against fp64, allowing twice what the torch backend makes of these tokens."""
    known = dict(tensors)
    for name in ("x", "topk_weights", "topk_ids"):
        known[name] = tensors[name][tokens]
    with tmoe.options(backend="torch"):
        naive = tmoe.fused_experts(**known, **keywords)
    assert_matches(got[tokens], reference(known, keywords), naive)


def reference(tensors: dict[str, Tensor], keywords: dict, dtype=torch.float64) -> Tensor:
    """`tests.reference` with the keywords of `tmoe.fused_experts`."""
    known = dict(keywords)
    known.pop("num_experts", None)
    act = known.pop("activation", tmoe.Activation("swiglu"))
    constants = {"activation": act.name, "alpha": act.alpha, "limit": act.limit}
    return fused_experts_ref(**tensors, **known, **constants, dtype=dtype)


def run(tensors: dict[str, Tensor], keywords: dict, *, backend: str = "triton", **options):
    """`tmoe.fused_experts` on one backend, into memory that holds NaN."""
    out = torch.full_like(tensors["x"], float("nan"))
    with tmoe.options(backend=backend, **options):
        return tmoe.fused_experts(**tensors, **keywords, out=out)
