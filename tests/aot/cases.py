"""What is compiled: the Triton backend's operations at the shapes of real models.

The tensors have no storage, so size costs nothing. Numbers of tokens are such that every tile in
the table for this GPU is taken.

A compilation takes a quarter of a second. So what differs between GPUs (instructions, tables,
which codes are multiplied as they are) is compiled for every one; variants of the same kernel, for
one GPU of those that share its way (targets.py): all else would find the same fault again.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch

from tests.aot.case import Case
from tests.aot.exchange_cases import exchange_cases
from tests.aot.frozen_cases import EVERYWHERE, OF_EVERY_KIND, OTHERS, frozen_cases, gemm_cases
from tests.aot.layer_cases import (
    GPT_OSS,
    LAYERS,
    LLAMA4,
    OTHER_SIZES,
    QWEN3,
    UNALIGNED,
    at_every_tile,
    grouped_gemm,
    quantized_layers,
    quantized_layers_at_every_height,
    training,
    training_at_every_tile,
)
from tests.aot.quantiser_cases import of_every_format, quantisers
from tests.aot.route_cases import MINIMAX_M2, route, route_backward, router
from tests.aot.targets import EVERY_KIND, EVERY_TOOLCHAIN, MEASURED, WITH_E4M3, WITHOUT_TMA
from tmoe.routing import Routing


def _on(gpus: Collection[str], *cases: Case) -> list[Case]:
    return [replace(case, gpus=gpus) for case in cases]


def cases() -> list[Case]:
    """All cases for the GPU that torch says it has."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    groups = {"n_group": 8, "topk_group": 4}
    large = quantisers(16384, 7168, 8, bf16)
    # Neither wide loads nor whole words of codes: every element has an address of its own.
    unaligned = [replace(c, max_spilled=320) for c in quantisers(64, 90, 8, fp16)]
    return [
        route(Routing(64, 4, MINIMAX_M2), bf16, weights_dtype=bf16, ids_dtype=torch.int64),
        route(Routing(2048, 64, "Default"), bf16, want_counts=True),
        route(Routing(256, 8, "DeepSeekV3", **groups), fp32),
        router(256, 7168, bf16, fp32),
        *exchange_cases(),
        route_backward(Routing(128, 8, "Renormalize"), bf16),
        route_backward(Routing(256, 8, "DeepSeekV3", **groups), fp32),
        grouped_gemm(bf16),
        QWEN3.case(8192, bf16),
        QWEN3.case(8192, fp32),
        QWEN3.training_case(8192, bf16),
        QWEN3.training_case(8192, fp32),
        training(LLAMA4),
        training(GPT_OSS),
        *quantized_layers(),
        *of_every_format(large),
        *frozen_cases(EVERYWHERE),
        *_on(
            WITH_E4M3,
            *quantized_layers("fp8_tensor", "fp8_channel", "fp8_block"),
            *quantized_layers_at_every_height("fp8_tensor", "fp8_block"),
        ),
        *_on(
            WITHOUT_TMA,
            *at_every_tile(QWEN3, bf16),
            *quantized_layers_at_every_height("fp8_block", "nvfp4_a16"),
        ),
        *_on(
            EVERY_KIND,
            *at_every_tile(QWEN3, bf16),
            *at_every_tile(QWEN3, fp32),
            QWEN3.case(8192, fp16),
            *(layer.case(8192, bf16) for layer in LAYERS),
            replace(UNALIGNED.case(8192, bf16), max_spilled=640),
            *(training(layer) for layer in LAYERS if layer not in (LLAMA4, GPT_OSS)),
            *training_at_every_tile(bf16),
            *training_at_every_tile(fp32),
            *(QWEN3.training_case(T, bf16, added=True) for T in (512, 16384)),
            replace(UNALIGNED.training_case(8192, bf16), max_spilled=640),
            *quantized_layers_at_every_height(),
            *frozen_cases(OF_EVERY_KIND),
        ),
        *_on(
            EVERY_TOOLCHAIN,
            route(Routing(8, 2, "Renormalize"), bf16, num_tokens=8192),
            route(Routing(128, 8, "RenormalizeNaive"), bf16, num_tokens=8192, want_probs=True),
            router(8, 4096, bf16, bf16),
            router(128, 2048, fp16, fp16),
            route(Routing(8, 2, "Renormalize"), bf16),
            route(Routing(60, 4, "Default"), bf16),
            route(Routing(128, 8, "RenormalizeNaive"), fp32),
            route(Routing(512, 10, "Renormalize"), bf16),
            route(Routing(16, 1, "Llama4"), bf16),
            route(Routing(128, 8, "SigmoidRenorm"), fp16),
            route(Routing(256, 8, "MiniMax2"), fp32),
            route_backward(Routing(64, 4, MINIMAX_M2), bf16),
            route_backward(Routing(2048, 64, "Default"), fp16),
            *large,
            *of_every_format(unaligned),
        ),
        *_on(
            MEASURED,
            QWEN3.training_case(8192, fp16),
            *(layer.case(1, bf16) for layer in LAYERS),
            *(layer.case(num_tokens, bf16) for layer in OTHER_SIZES for num_tokens in (1, 8192)),
            *quantisers(16, 7168, 8, bf16),
            *of_every_format(quantisers(64, 2880, 8, fp32)),
            *unaligned,
            *frozen_cases(OTHERS),
            *gemm_cases(),
        ),
    ]
