"""Whole layers of experts: as models have them, in inference and training, plain and quantised."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tests.aot.case import BACKEND, DEVICE, Case, empty, short
from tmoe.activation import Activation
from tmoe.dispatch.problem import ExpertGradients, ExpertsSpec, ExpertTensors
from tmoe.formats import SCHEMES, Scheme
from tmoe.formats.recipe import Recipe
from tmoe.kernels.tiles import tile_table


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

        def launch() -> Tensor:
            return BACKEND.fused_experts(self._tensors(num_tokens, dtype), self._spec)

        return Case(f"{self.model} T={num_tokens} {short(dtype)}", launch)

    def training_case(
        self, num_tokens: int, dtype: torch.dtype, *, recompute: bool = False, added: bool = False
    ) -> Case:
        """Forward and backward of the whole layer; `added`: gradients go to fp32 sums."""

        def launch() -> ExpertGradients:
            tensors, spec = self._tensors(num_tokens, dtype), self._spec
            y, kept = BACKEND.train_experts(tensors, spec)
            assert kept.shape == (num_tokens * self.K, tensors.gate_up_proj.shape[1])
            wanted = ExpertGradients(*[True] * 4, *[self.bias] * 2)
            sums = [empty(*w.shape, dtype=torch.float32) if added else None for w in tensors[1:3]]
            kept = None if recompute else kept
            added_to = ExpertGradients(None, *sums)
            return BACKEND.experts_backward(y, tensors, spec, kept, wanted, False, added_to)

        how = "training, gradients added" if added else "training"
        return Case(f"{self.model} {how} T={num_tokens} {short(dtype)}", launch)

    @property
    def _spec(self) -> ExpertsSpec:
        return ExpertsSpec(self.activation, self.interleaved, self.weight_on_input, 0, self.E)

    def _tensors(self, num_tokens: int, dtype: torch.dtype) -> ExpertTensors:
        E, K, H, I = self.E, self.K, self.H, self.I
        columns = 2 * I if self.activation.gated else I
        return ExpertTensors(
            empty(num_tokens, H, dtype=dtype),
            self._weights(E, columns, H, dtype),
            self._weights(E, H, I, dtype),
            empty(num_tokens, K, dtype=torch.float32),
            empty(num_tokens, K, dtype=torch.int32),
            empty(E, columns, dtype=dtype) if self.bias else None,
            empty(E, H, dtype=dtype) if self.bias else None,
        )

    def _weights(self, E: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        if self.transposed:
            return empty(E, columns, rows, dtype=dtype).transpose(1, 2)
        return empty(E, rows, columns, dtype=dtype)


QWEN3 = Layer("Qwen3-30B-A3B", 128, 8, 2048, 768)
OTHER_SIZES = (  # with QWEN3's GEMMs
    Layer("Mixtral-8x7B", 8, 2, 4096, 14336),
    Layer("DeepSeek-V3", 256, 8, 7168, 2048),
)
LLAMA4 = Layer("Llama-4-Scout", 16, 1, 5120, 8192, weight_on_input=True, transposed=True)
GPT_OSS = Layer(
    "gpt-oss-120b", 128, 4, 2880, 2880, Activation.swiglu_oai(),
    bias=True, interleaved=True, transposed=True,
)  # fmt: skip
LAYERS = (
    LLAMA4,
    GPT_OSS,
    Layer("gpt-oss-120b, rows first", 128, 4, 2880, 2880, bias=True, interleaved=True),
    Layer("Nemotron-3-Nano", 128, 6, 2688, 1856, Activation("relu2")),
    Layer("GeGLU", 64, 8, 2048, 1024, Activation("geglu")),
)
# No multiple of 8: neither tensor descriptors nor wide loads can be used. A path for completeness.
UNALIGNED = Layer("DeepSeek-V2-Lite with I=1407", 64, 6, 2048, 1407)


def at_every_tile(layer: Layer, dtype: torch.dtype) -> list[Case]:
    """The layer with a number of tokens, and as wide, as each row of the tile table is for."""
    cases, fewest = [], 1
    for row in tile_table(DEVICE, dtype):
        tokens = max(1, fewest * layer.E // layer.K)
        narrow = row.max_intermediate < layer.I
        fitting = replace(
            layer, I=int(row.max_intermediate) if narrow else max(layer.I, row.min_intermediate)
        )
        cases.append(fitting.case(tokens, dtype))
        if not narrow and row.max_rows < math.inf:
            fewest = int(row.max_rows) + 1
    return cases


def grouped_gemm(dtype: torch.dtype) -> Case:
    E, N, D, S = 64, 2048, 768, 8192

    def launch() -> Tensor:
        offsets = empty(E + 1, dtype=torch.int32)
        return BACKEND.grouped_gemm(
            empty(S, D, dtype=dtype), empty(E, N, D, dtype=dtype), offsets, None
        )

    return Case(f"grouped_gemm {short(dtype)}", launch)


def training(layer: Layer) -> Case:
    # Storing what is activated too, once for a tile, takes registers: on Blackwell, where a thread
    # holds a whole row, those of a bias; on Hopper those of the rows' weights.
    more = 224 if layer.weight_on_input else 176 if layer.bias else 64
    return replace(layer.training_case(8192, torch.bfloat16), max_spilled=more)


def training_at_every_tile(dtype: torch.dtype) -> list[Case]:
    return [QWEN3.training_case(T, dtype, recompute=True) for T in (16, 512, 4096)]


def _quantized_layer(scheme: Scheme, weights: Recipe, num_tokens: int) -> Case:
    """Qwen3-30B-A3B's layer with quantised weights."""
    E, K, H, I = 128, 8, 2048, 768
    bf16, spec = torch.bfloat16, ExpertsSpec(num_experts=E, scheme=scheme.name)

    def launch() -> Tensor:
        tensors = ExpertTensors(
            empty(num_tokens, H, dtype=bf16),
            weights.empty((E, 2 * I, H), device=DEVICE),
            weights.empty((E, H, I), device=DEVICE),
            empty(num_tokens, K, dtype=torch.float32),
            empty(num_tokens, K, dtype=torch.int32),
        )
        return BACKEND.fused_experts(tensors, spec)

    name = f"{scheme.name} {weights.format.name} T={num_tokens}"
    return Case(name, launch, max_spilled=96)


def quantized_layers(*schemes: str) -> list[Case]:
    """In these schemes, or in all."""
    return [
        _quantized_layer(SCHEMES[name], weights, 512)
        for name in schemes or SCHEMES
        for weights in SCHEMES[name].weights
    ]


def quantized_layers_at_every_height(*schemes: str) -> list[Case]:
    """Row tiles of every height. Schemes that differ in the quantisers alone have one GEMM."""
    return [
        _quantized_layer(SCHEMES[name], weights, num_tokens)
        for name in schemes or ("fp8_tensor", "fp8_block", "mxfp4_a16", "nvfp4_a16")
        for weights in SCHEMES[name].weights
        for num_tokens in (1, 16, 256, 1536, 8192, 16384)
    ]
