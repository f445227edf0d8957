"""GPUs and models by name, so that one can ask about a machine and a layer that aren't here."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..activation import Activation
from ..checks import expect
from ..environment import installed_version
from ..formats.scheme import SCHEMES
from .problem import Machine, Problem, token_bucket

WITH_A_LAYOUT = ("flashinfer_cutlass", "flashinfer_trtllm")  # backends that prepare weights
NEWEST_TRITON = "3.7.1"  # taken for a machine that isn't here where none is installed here

# What torch calls a GPU, and its compute capability.
GPUS = {
    "A100": ("NVIDIA A100", (8, 0)),
    "L40S": ("NVIDIA L40S", (8, 9)),
    "H100": ("NVIDIA H100", (9, 0)),
    "H200": ("NVIDIA H200", (9, 0)),
    "GH200": ("NVIDIA GH200", (9, 0)),
    "B200": ("NVIDIA B200", (10, 0)),
    "GB200": ("NVIDIA GB200", (10, 0)),
    "B300": ("NVIDIA B300", (10, 3)),
    "GB300": ("NVIDIA GB300", (10, 3)),
    "RTX5090": ("NVIDIA GeForce RTX 5090", (12, 0)),
    "MI300X": ("AMD Instinct MI300X", (9, 4)),
    "MI355X": ("AMD Instinct MI355X", (9, 5)),
}


@dataclass(frozen=True, slots=True)
class Layer:
    """The routed experts of one layer, whole: nothing is divided among GPUs."""

    num_experts: int
    top_k: int
    hidden: int
    intermediate: int  # of one expert
    activation: Activation = Activation("swiglu")
    has_bias: bool = False
    weight_on_input: bool = False


# From the models' configurations.
MODELS = {
    "mixtral-8x7b": Layer(8, 2, 4096, 14336),
    "olmoe": Layer(64, 8, 2048, 1024),
    "qwen3-30b-a3b": Layer(128, 8, 2048, 768),
    "qwen3-235b-a22b": Layer(128, 8, 4096, 1536),
    "glm-4.5": Layer(160, 8, 5120, 1536),
    "deepseek-v3": Layer(256, 8, 7168, 2048),
    "kimi-k2": Layer(384, 8, 7168, 2048),
    "llama4-scout": Layer(16, 1, 5120, 8192, weight_on_input=True),
    "llama4-maverick": Layer(128, 1, 5120, 8192, weight_on_input=True),
    "gpt-oss-20b": Layer(32, 4, 2880, 2880, Activation.swiglu_oai(), has_bias=True),
    "gpt-oss-120b": Layer(128, 4, 2880, 2880, Activation.swiglu_oai(), has_bias=True),
}


def machine_with(gpu: str) -> Machine:
    """A machine with this GPU and the versions that are here; without Triton here, the newest.

    Raises ``ValueError`` for a GPU that isn't in `GPUS`; case, spaces and dashes don't matter.
    """
    key = gpu.upper().replace(" ", "").replace("-", "")
    expect(key in GPUS, "machine_with", "gpu", f"one of {', '.join(GPUS)}", repr(gpu))
    name, capability = GPUS[key]
    return Machine(
        "cuda", name, capability, torch.__version__, installed_version("triton") or NEWEST_TRITON,
        flashinfer_version=installed_version("flashinfer-python"),
    )  # fmt: skip


def model_layer(model: str) -> Layer:
    """The layer of a model in `MODELS`. Raises ``ValueError`` for another name."""
    expect(model in MODELS, "model_layer", "model", f"one of {', '.join(MODELS)}", repr(model))
    return MODELS[model]


def problem_of(
    layer: Layer,
    machine: Machine,
    *,
    num_tokens: int,
    dtype: torch.dtype,
    scheme: str | None = None,
    needs_grad: bool = False,
) -> Problem:
    """`fused_experts` of the layer on the machine, its weights prepared for whoever wants that, and
    with static scales where checkpoints of the scheme have them."""
    return Problem(
        op="fused_experts",
        tokens=token_bucket(num_tokens),
        hidden=layer.hidden,
        intermediate=layer.intermediate,
        num_experts=layer.num_experts,
        top_k=layer.top_k,
        dtype=dtype,
        machine=machine,
        activation=layer.activation,
        has_bias=layer.has_bias,
        weight_on_input=layer.weight_on_input,
        scheme=scheme,
        has_static_scales=scheme is not None and SCHEMES[scheme].takes_scales,
        prepared=WITH_A_LAYOUT,
        needs_grad=needs_grad,
    )
