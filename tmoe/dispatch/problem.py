"""What is asked of a backend, as frozen, hashable facts: no tensor, no device handle."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..activation import Activation
from ..environment import installed_version
from ..formats.recipe import Recipe
from ..routing import Routing


class RouteInputs(NamedTuple):
    """What `route` may be given beside the logits, and what it shall return beside the weights."""

    bias: Tensor | None = None  # (E,) added for the selection
    expert_scale: Tensor | None = None  # (E,) multiplies the weights
    topk_ids: Tensor | None = None  # (T, K) in place of a selection
    want_probs: bool = False
    want_counts: bool = False
    weights_dtype: torch.dtype = torch.float32  # of the result; a backend may leave it fp32
    ids_dtype: torch.dtype = torch.int32  # and this int32: the caller casts what it gets


class Routed(NamedTuple):
    """What `route` returns: T tokens, E experts, K slots and one more for each shared expert."""

    weights: Tensor  # (T, K) fp32
    ids: Tensor  # (T, K) int32
    probs: Tensor | None = None  # (T, E) fp32, softmax of the logits
    counts: Tensor | None = None  # (E,) int32, how many slots each expert got


class GemmGradients(NamedTuple):
    """Of `grouped_gemm`'s inputs: whether each is wanted; and then these, None if it wasn't."""

    a: Any = None
    b: Any = None
    bias: Any = None


class ExpertGradients(NamedTuple):
    """Of `fused_experts`' inputs: whether each is wanted; and then these, None if it wasn't."""

    x: Any = None
    gate_up_proj: Any = None
    down_proj: Any = None
    topk_weights: Any = None
    gate_up_bias: Any = None
    down_bias: Any = None


class FrozenGradients(NamedTuple):
    """The same of experts whose weights are frozen, and of adapters on them."""

    x: Any = None
    topk_weights: Any = None
    gate_up_bias: Any = None
    down_bias: Any = None
    gate_up_a: Any = None
    gate_up_b: Any = None
    down_a: Any = None
    down_b: Any = None


class ExpertTensors(NamedTuple):
    """What a layer's experts compute with; weights plain, or `QuantizedTensor`s."""

    x: Tensor  # (T, H)
    gate_up_proj: Tensor  # (E, 2I, H), or (E, I, H) without a gate
    down_proj: Tensor  # (E, H, I)
    topk_weights: Tensor  # (T, K)
    topk_ids: Tensor  # (T, K), global
    gate_up_bias: Tensor | None = None  # (E, 2I) or (E, I)
    down_bias: Tensor | None = None  # (E, H)


class StaticScales(NamedTuple):
    """Scales of the experts' inputs that were measured beforehand: one number, or (E,)."""

    input: Tensor | None = None  # of the first projection's input
    hidden: Tensor | None = None  # of the second one's


class Adapters(NamedTuple):
    """Low-rank additions to the weights, one pair for each expert: W[e] + b[e] @ a[e]."""

    gate_up_a: Tensor | None = None  # (E, rank, H)
    gate_up_b: Tensor | None = None  # (E, 2I, rank)
    down_a: Tensor | None = None  # (E, another rank, I)
    down_b: Tensor | None = None  # (E, H, that rank)


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """How `fused_experts` reads its arguments; goes to the backend with the tensors."""

    activation: Activation = field(default_factory=lambda: Activation("swiglu"))
    interleaved: bool = False  # gate and up rows alternate: g0, u0, g1, u1, ...
    weight_on_input: bool = False  # the routing weight scales the expert's input, not its output
    first_expert: int = 0  # global id of the first expert in the weights
    num_experts: int = 0  # global count
    scheme: str | None = None  # number formats of weights and inputs; None: not quantised
    wide: bool = False  # the result is float32, a partial sum that isn't rounded yet


@dataclass(frozen=True, slots=True)
class Machine:
    """The device and the libraries. Build it by hand to ask about a machine that isn't here."""

    device_type: str  # torch's name: "cuda" (HIP as well), "cpu", ...
    name: str = ""
    capability: tuple[int, int] | None = None  # of a CUDA or HIP device
    torch_version: str = torch.__version__
    triton_version: str | None = None  # None: Triton isn't installed
    interpreted: bool = False  # Triton kernels run in its CPU interpreter
    flashinfer_version: str | None = None  # None: FlashInfer isn't installed

    @property
    def architecture(self) -> str:
        """What Triton compiles for: sm_90, gfx94; "interpreter", or "" where there is no GPU."""
        if self.interpreted:
            return "interpreter"
        if self.capability is None:
            return ""
        maker = "gfx{}{}" if self.name.startswith("AMD") else "sm_{}{}"
        return maker.format(*self.capability)

    @classmethod
    def of(cls, device: torch.device | str) -> Machine:
        """The machine behind `device`, described once per device and process."""
        return _machine(torch.device(device))


@cache
def _machine(device: torch.device) -> Machine:
    try:
        import triton  # here, not above: `import tmoe` stays light, and Triton may be missing
    except ImportError:
        triton_version, interpreted = None, False
    else:
        triton_version, interpreted = triton.__version__, bool(triton.knobs.runtime.interpret)
    name, capability = device.type, None
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        capability = torch.cuda.get_device_capability(device)
    return Machine(
        device.type, name, capability, torch.__version__, triton_version, interpreted,
        installed_version("flashinfer-python"),
    )  # fmt: skip


def result_dtype(x: Tensor, wide: bool) -> torch.dtype:
    """The dtype of what `fused_experts` returns for x."""
    return torch.float32 if wide and x.dtype != torch.float64 else x.dtype


def token_bucket(num_tokens: int) -> int:
    """The next power of two: all that a decision may know of the number of tokens."""
    return 1 << max(num_tokens - 1, 0).bit_length()


@dataclass(frozen=True, slots=True)
class Problem:
    """One operation on one machine."""

    op: str  # "route", "router", "quantize", "grouped_gemm" or "fused_experts"
    tokens: int  # rows of the input, as a bucket
    hidden: int  # contracted size of the (first) matmul; 0 for route
    intermediate: int  # I of fused_experts, N of grouped_gemm; 0 for route
    num_experts: int  # global count
    top_k: int
    dtype: torch.dtype  # of the activations and of unquantised weights
    machine: Machine
    activation: Activation | None = None
    routing: Routing | None = None  # of route and router
    extras: tuple[str, ...] = ()  # fields of `RouteInputs` that are in use, beside the bias
    recipe: Recipe | None = None  # of quantize
    has_bias: bool = False
    weight_on_input: bool = False
    scheme: str | None = None
    has_static_scales: bool = False  # of both projections' inputs
    has_lora: bool = False  # low-rank adapters on frozen weights
    window: tuple[int, int] | None = None  # first and number of the local experts; None: all
    wide: bool = False  # a 16-bit input has its partial sum in float32
    coded: bool = False  # the input is quantised already, as the scheme has it
    prepared: tuple[str, ...] = ()  # backends that have these weights in their own layout
    needs_grad: bool = False
    deterministic: bool = False
    batch_invariant: bool = False

    @property
    def key(self) -> str:
        """The problem without its machine, in words."""
        return str(self).rpartition(" on ")[0]

    def __str__(self) -> str:
        first, second = ("D", "N") if self.op == "grouped_gemm" else ("H", "I")
        sizes = {
            "T<": self.tokens,
            first: self.hidden,
            second: self.intermediate,
            "E": self.num_experts,
        }
        parts = [f"{name}={size}" for name, size in sizes.items() if size]
        parts += [f"K={self.top_k}", str(self.dtype).removeprefix("torch.")]
        parts += [self.activation.name] if self.activation else []
        parts += [self.routing.name] if self.routing else []
        if self.recipe:
            block = "x".join(str(size or "all") for size in self.recipe.block_shape)
            rule = [self.recipe.scale_rule] if self.recipe.scale_rule else []
            parts += [" ".join([self.recipe.format.name, block, *rule])]
        parts += self.extras
        parts += [self.scheme] if self.scheme else []
        parts += [f"{self.window[1]} local"] if self.window else []  # the same on every rank
        flags = (
            "has_bias", "weight_on_input", "has_static_scales", "has_lora", "wide", "coded",
            "needs_grad", "deterministic", "batch_invariant",
        )  # fmt: skip
        parts += [name.replace("_", " ") for name in flags if getattr(self, name)]
        return f"{self.op}({', '.join(parts)}) on {self.machine.name or self.machine.device_type}"
