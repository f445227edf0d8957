"""Forward and backward of frozen experts with adapters, plain and quantised, to compile."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tests.aot.case import BACKEND, DEVICE, Case
from tests.aot.case import empty as empty_of
from tmoe.dispatch.backend import NO_SCALES
from tmoe.dispatch.problem import (
    Adapters,
    ExpertsSpec,
    ExpertTensors,
    FrozenGradients,
    GemmGradients,
)
from tmoe.formats import SCHEMES

E, K, H, I, RANK = 128, 8, 2048, 768, 16  # Qwen3-30B-A3B


def train_adapters(scheme: str | None, num_tokens: int, dtype: torch.dtype) -> FrozenGradients:
    """All that `tmoe.fused_experts` and its backward launch."""
    empty = partial(empty_of, dtype=dtype)
    weights = [empty(E, 2 * I, H), empty(E, H, I)]
    if scheme is not None:
        recipe = SCHEMES[scheme].weights[-1]
        weights = [recipe.empty(tuple(weight.shape), device=DEVICE) for weight in weights]
    adapters = Adapters(
        empty(E, RANK, H), empty(E, 2 * I, RANK), empty(E, RANK, I), empty(E, H, RANK)
    )
    tensors = ExpertTensors(
        empty(num_tokens, H),
        *weights,
        empty(num_tokens, K, dtype=torch.float32),
        empty(num_tokens, K, dtype=torch.int32),
    )
    arguments = (tensors, ExpertsSpec(num_experts=E, scheme=scheme), NO_SCALES, adapters)
    y, kept = BACKEND.train_frozen(*arguments)
    wanted = FrozenGradients(True, True, False, False, True, True, True, True)
    return BACKEND.frozen_backward(y, *arguments, kept, wanted, True)


def gemm_gradients(scheme: str) -> GemmGradients:
    """All that the backward of `tmoe.grouped_gemm` launches."""
    b = SCHEMES[scheme].weights[-1].empty((E, 2 * I, H), device=DEVICE)
    dy, bias = (empty_of(rows, 2 * I, dtype=torch.bfloat16) for rows in (8192, E))
    offsets = empty_of(E + 1)
    return BACKEND.frozen_gemm_backward(dy, b, offsets, bias, GemmGradients(True, False, True))


EVERYWHERE = (("nvfp4_a16", 8192, torch.bfloat16),)
OF_EVERY_KIND = tuple((scheme, 8192, torch.bfloat16) for scheme in (None, "fp8_block"))
OTHERS = (
    *((None, tokens, torch.bfloat16) for tokens in (16, 512)),
    *((scheme, 8192, torch.bfloat16) for scheme in ("fp8_channel", "mxfp8", "mxfp4_a16")),
    *(("nvfp4_a16", tokens, torch.bfloat16) for tokens in (16, 512)),
    (None, 512, torch.float32),
)


def frozen_cases(shapes: tuple[Any, ...]) -> list[Case]:
    return [
        Case(f"adapters on {scheme} T={T} {dtype}", partial(train_adapters, scheme, T, dtype), 96)
        for scheme, T, dtype in shapes
    ]


def gemm_cases() -> list[Case]:
    return [
        Case(f"gradients through a grouped GEMM in {scheme}", partial(gemm_gradients, scheme))
        for scheme in ("fp8_block", "nvfp4_a16")
    ]
