"""What is compiled: the Triton backend's operations at the shapes of real models.

The tensors have no storage, so size costs nothing. Numbers of tokens are such that every tile in
the table for this GPU is taken.

A compilation takes a quarter of a second. So what differs between GPUs (instructions, tables,
which codes are multiplied as they are) is compiled for every one; variants of the same kernel, for
one GPU of those that share its way (targets.py): all else would find the same fault again.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tests.aot.case import Case
from tests.aot.exchange_cases import launches as exchange_launches
from tests.aot.frozen_cases import EVERYWHERE, OF_EVERY_KIND, OTHERS, frozen_cases, gemm_cases
from tests.aot.quantiser_cases import launches as quantiser_launches
from tests.aot.targets import EVERY_KIND, EVERY_TOOLCHAIN, MEASURED
from tmoe.activation import Activation
from tmoe.backends.triton_backend import TritonBackend
from tmoe.dispatch.problem import ExpertGradients, ExpertsSpec, RouteInputs
from tmoe.formats import SCHEMES, Scheme
from tmoe.formats.recipe import Recipe
from tmoe.kernels.tiles import tile_table
from tmoe.routing import Routing, RoutingRule
from tmoe.routing.rule import TINY

DEVICE = torch.device("meta")
BACKEND = TritonBackend()


@dataclass(frozen=True)
class Layer:
    """An MoE layer as a model has it."""

    model: str
    E: int
    K: int
    H: int
    I: int
    activation: Activation = Activation("swiglu")
    bias: bool = False
    interleaved: bool = False
    weight_on_input: bool = False
    transposed: bool = False  # weights stored (E, H, 2I) and (E, I, H)

    def case(self, num_tokens: int, dtype: torch.dtype) -> Case:
        """The whole layer: sort, both GEMMs, combine."""
        E, H, I = self.E, self.H, self.I
        columns = 2 * I if self.activation.gated else I
        spec = ExpertsSpec(self.activation, self.interleaved, self.weight_on_input, 0, E)

        def launch() -> Tensor:
            return BACKEND.fused_experts(
                _empty(num_tokens, H, dtype=dtype),
                self._weights(E, columns, H, dtype),
                self._weights(E, H, I, dtype),
                _empty(num_tokens, self.K, dtype=torch.float32),
                _empty(num_tokens, self.K, dtype=torch.int32),
                _empty(E, columns, dtype=dtype) if self.bias else None,
                _empty(E, H, dtype=dtype) if self.bias else None,
                spec,
            )

        return Case(f"{self.model} T={num_tokens} {_short(dtype)}", launch)

    def training_case(
        self, num_tokens: int, dtype: torch.dtype, *, recompute: bool = False, added: bool = False
    ) -> Case:
        """Forward and backward of the whole layer; `added`: gradients go to fp32 sums."""
        E, H, I, S = self.E, self.H, self.I, num_tokens * self.K
        columns = 2 * I if self.activation.gated else I
        spec = ExpertsSpec(self.activation, self.interleaved, self.weight_on_input, 0, E)

        def launch() -> ExpertGradients:
            arguments = (
                _empty(num_tokens, H, dtype=dtype),
                self._weights(E, columns, H, dtype),
                self._weights(E, H, I, dtype),
                _empty(num_tokens, self.K, dtype=torch.float32),
                _empty(num_tokens, self.K, dtype=torch.int32),
                _empty(E, columns, dtype=dtype) if self.bias else None,
                _empty(E, H, dtype=dtype) if self.bias else None,
                spec,
            )
            y, kept = BACKEND.train_experts(*arguments)
            assert kept.shape == (S, columns)
            wanted = ExpertGradients(*[True] * 4, *[self.bias] * 2)
            sums = [
                _empty(*w.shape, dtype=torch.float32) if added else None for w in arguments[1:3]
            ]
            return BACKEND.experts_backward(
                y,
                *arguments,
                None if recompute else kept,
                wanted,
                False,
                ExpertGradients(None, *sums),
            )

        how = "training, gradients added" if added else "training"
        return Case(f"{self.model} {how} T={num_tokens} {_short(dtype)}", launch)

    def _weights(self, E: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        if self.transposed:
            return _empty(E, columns, rows, dtype=dtype).transpose(1, 2)
        return _empty(E, rows, columns, dtype=dtype)


QWEN3 = Layer("Qwen3-30B-A3B", 128, 8, 2048, 768)
OTHER_SIZES = (  # with QWEN3's GEMMs
    Layer("Mixtral-8x7B", 8, 2, 4096, 14336),
    Layer("DeepSeek-V3", 256, 8, 7168, 2048),
)
LAYERS = (
    Layer("Llama-4-Scout", 16, 1, 5120, 8192, weight_on_input=True, transposed=True),
    Layer(
        "gpt-oss-120b", 128, 4, 2880, 2880, Activation.swiglu_oai(),
        bias=True, interleaved=True, transposed=True,
    ),
    Layer("gpt-oss-120b, rows first", 128, 4, 2880, 2880, bias=True, interleaved=True),
    Layer("Nemotron-3-Nano", 128, 6, 2688, 1856, Activation("relu2")),
    Layer("GeGLU", 64, 8, 2048, 1024, Activation("geglu")),
)  # fmt: skip
# No multiple of 8: neither tensor descriptors nor wide loads can be used. A path for completeness.
UNALIGNED = Layer("DeepSeek-V2-Lite with I=1407", 64, 6, 2048, 1407)


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=DEVICE)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _at_every_tile(layer: Layer, dtype: torch.dtype) -> list[Case]:
    """The layer with a number of tokens, and as wide, as each row of the tile table is for."""
    cases, fewest = [], 1
    for row in tile_table(DEVICE, dtype):
        tokens = max(1, fewest * layer.E // layer.K)
        narrow = row.max_intermediate < layer.I
        fitting = replace(layer, I=int(row.max_intermediate)) if narrow else layer
        cases.append(fitting.case(tokens, dtype))
        if not narrow and row.max_rows < math.inf:
            fewest = int(row.max_rows) + 1
    return cases


def _grouped_gemm(dtype: torch.dtype) -> Case:
    E, N, D, S = 64, 2048, 768, 8192

    def launch() -> Tensor:
        offsets = _empty(E + 1, dtype=torch.int32)
        return BACKEND.grouped_gemm(
            _empty(S, D, dtype=dtype), _empty(E, N, D, dtype=dtype), offsets, None
        )

    return Case(f"grouped_gemm {_short(dtype)}", launch)


# Its smallest sum is subnormal in fp32, so that Triton passes it as fp64.
MINIMAX_M2 = RoutingRule(score="sigmoid", takes_bias=True, renormalize=True, min_sum=TINY)


def _quantized_layer(scheme: Scheme, weights: Recipe, num_tokens: int) -> Case:
    """Qwen3-30B-A3B's layer with quantised weights."""
    E, K, H, I = 128, 8, 2048, 768
    bf16, spec = torch.bfloat16, ExpertsSpec(num_experts=E, scheme=scheme.name)

    def launch() -> Tensor:
        return BACKEND.fused_experts(
            _empty(num_tokens, H, dtype=bf16),
            weights.empty((E, 2 * I, H), device=DEVICE),
            weights.empty((E, H, I), device=DEVICE),
            _empty(num_tokens, K, dtype=torch.float32),
            _empty(num_tokens, K, dtype=torch.int32),
            None,
            None,
            spec,
        )

    name = f"{scheme.name} {weights.format.name} T={num_tokens}"
    return Case(name, launch, max_spilled=96)


def _quantized_layers() -> list[Case]:
    return [
        _quantized_layer(scheme, weights, 512)
        for scheme in SCHEMES.values()
        for weights in scheme.weights
    ]


def _quantized_layers_at_every_height() -> list[Case]:
    """Row tiles of every height. Schemes that differ in the quantisers alone have one GEMM."""
    return [
        _quantized_layer(SCHEMES[name], weights, num_tokens)
        for name in ("fp8_tensor", "fp8_block", "mxfp4_a16", "nvfp4_a16")
        for weights in SCHEMES[name].weights
        for num_tokens in (1, 16, 256, 1536, 8192, 16384)
    ]


def _route(routing: Routing, dtype: torch.dtype, num_tokens: int = 64, **wants: Any) -> Case:
    rule, E = routing.rule, routing.num_experts
    logits = _empty(num_tokens, routing.num_logits, dtype=dtype)
    inputs = RouteInputs(
        bias=_empty(E, dtype=torch.float32) if rule.takes_bias else None,
        expert_scale=_empty(E, dtype=dtype) if rule.takes_expert_scale else None,
        **wants,
    )
    return Case(
        f"route {routing.name} E={E} {_short(dtype)}",
        lambda: BACKEND.route(logits, routing, inputs),
    )


def _route_backward(routing: Routing, dtype: torch.dtype) -> Case:
    T, E, K = 4096, routing.num_logits, routing.num_weighed
    logits, scale = _empty(T, E, dtype=dtype), _empty(routing.num_experts, dtype=dtype)
    ids, fp32 = _empty(T, routing.top_k, dtype=torch.int32), torch.float32
    gradients = (_empty(T, K, dtype=fp32), _empty(T, routing.num_experts, dtype=fp32))
    scale = scale if routing.rule.takes_expert_scale else None
    return Case(
        f"route backward {routing.name} E={E} {_short(dtype)}",
        lambda: BACKEND.route_backward(*gradients, logits, routing, scale, ids),
    )


def _router(E: int, H: int, dtype: torch.dtype, weight_dtype: torch.dtype) -> Case:
    x, weight = _empty(16, H, dtype=dtype), _empty(E, H, dtype=weight_dtype)
    routing = Routing(E, 2, "Renormalize")
    return Case(
        f"router E={E} {_short(dtype)} x {_short(weight_dtype)}",
        lambda: BACKEND.router(x, weight, None, routing, RouteInputs()),
    )


def _quantisers(T: int, H: int, E: int, dtype: torch.dtype) -> list[Case]:
    return [
        Case(f"{name} T={T} H={H} {_short(dtype)}", launch)
        for name, launch in quantiser_launches(T, H, E, dtype).items()
    ]


# One with each kind of elements, and those with an activation or tiles of two dimensions.
OF_EVERY_FORMAT = ("fp8 128x128", "fp8 1x128 swiglu", "mxfp4 swiglu", "nvfp4 swiglu")
OF_EVERY_FORMAT += ("fp8 back", "mxfp8 back", "mxfp4 back", "nvfp4 back")


def _of_every_format(quantisers: list[Case]) -> list[Case]:
    return [case for case in quantisers if case.name.startswith(OF_EVERY_FORMAT)]


def _training(layer: Layer) -> Case:
    # Storing what is activated too, once for a tile, takes registers: on Blackwell, where a thread
    # holds a whole row, those of a bias; on Hopper those of the rows' weights.
    more = 224 if layer.weight_on_input else 176 if layer.bias else 64
    return replace(layer.training_case(8192, torch.bfloat16), max_spilled=more)


def _training_at_every_tile(dtype: torch.dtype) -> list[Case]:
    return [QWEN3.training_case(T, dtype, recompute=True) for T in (16, 512, 4096)]


def _on(gpus: Collection[str], *cases: Case) -> list[Case]:
    return [replace(case, gpus=gpus) for case in cases]


def cases() -> list[Case]:
    """All cases for the GPU that torch says it has."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    groups = {"n_group": 8, "topk_group": 4}
    quantisers = _quantisers(16384, 7168, 8, bf16)
    # Neither wide loads nor whole words of codes: every element has an address of its own.
    unaligned = [replace(c, max_spilled=320) for c in _quantisers(64, 90, 8, fp16)]
    return [
        _route(Routing(64, 4, MINIMAX_M2), bf16, weights_dtype=bf16, ids_dtype=torch.int64),
        _route(Routing(2048, 64, "Default"), bf16, want_counts=True),
        _route(Routing(256, 8, "DeepSeekV3", **groups), fp32),
        _router(256, 7168, bf16, fp32),
        *(Case(name, launch) for name, launch in exchange_launches().items()),
        _route_backward(Routing(128, 8, "Renormalize"), bf16),
        _route_backward(Routing(256, 8, "DeepSeekV3", **groups), fp32),
        _grouped_gemm(bf16),
        QWEN3.case(8192, bf16),
        QWEN3.case(8192, fp32),
        QWEN3.training_case(8192, bf16),
        QWEN3.training_case(8192, fp32),
        *(_training(layer) for layer in LAYERS if layer.bias or layer.weight_on_input),
        *_quantized_layers(),
        *_of_every_format(quantisers),
        *frozen_cases(EVERYWHERE),
        *_on(
            EVERY_KIND,
            *_at_every_tile(QWEN3, bf16),
            *_at_every_tile(QWEN3, fp32),
            QWEN3.case(8192, fp16),
            *(layer.case(8192, bf16) for layer in LAYERS),
            replace(UNALIGNED.case(8192, bf16), max_spilled=640),
            *(_training(layer) for layer in LAYERS if not (layer.bias or layer.weight_on_input)),
            *_training_at_every_tile(bf16),
            *_training_at_every_tile(fp32),
            *(QWEN3.training_case(T, bf16, added=True) for T in (512, 16384)),
            replace(UNALIGNED.training_case(8192, bf16), max_spilled=640),
            *_quantized_layers_at_every_height(),
            *frozen_cases(OF_EVERY_KIND),
        ),
        *_on(
            EVERY_TOOLCHAIN,
            _route(Routing(8, 2, "Renormalize"), bf16, num_tokens=8192),
            _route(Routing(128, 8, "RenormalizeNaive"), bf16, num_tokens=8192, want_probs=True),
            _router(8, 4096, bf16, bf16),
            _router(128, 2048, fp16, fp16),
            _route(Routing(8, 2, "Renormalize"), bf16),
            _route(Routing(60, 4, "Default"), bf16),
            _route(Routing(128, 8, "RenormalizeNaive"), fp32),
            _route(Routing(512, 10, "Renormalize"), bf16),
            _route(Routing(16, 1, "Llama4"), bf16),
            _route(Routing(128, 8, "SigmoidRenorm"), fp16),
            _route(Routing(256, 8, "MiniMax2"), fp32),
            _route_backward(Routing(64, 4, MINIMAX_M2), bf16),
            _route_backward(Routing(2048, 64, "Default"), fp16),
            *quantisers,
            *_of_every_format(unaligned),
        ),
        *_on(
            MEASURED,
            *_at_every_tile(QWEN3, fp16),
            *_training_at_every_tile(fp16),
            *(layer.case(1, bf16) for layer in LAYERS),
            *(layer.case(num_tokens, bf16) for layer in OTHER_SIZES for num_tokens in (1, 8192)),
            *_quantisers(16, 7168, 8, bf16),
            *_of_every_format(_quantisers(64, 2880, 8, fp32)),
            *unaligned,
            *frozen_cases(OTHERS),
            *gemm_cases(),
        ),
    ]
