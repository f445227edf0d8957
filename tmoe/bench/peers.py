"""Other people's MoE layers, each behind the same call; a library is imported when it is asked for.

A peer takes the weights of a layer once, (E, 2I, H) with gate rows first and (E, H, I), and returns
a function of x (T, H), topk_weights (T, K) and topk_ids (T, K). It is checked like ours, so one
whose conventions have changed fails instead of being timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..environment import installed_version
from ..formats import QuantizedTensor

Weight = Tensor | QuantizedTensor
Layer = Callable[[Tensor, Tensor, Tensor], Tensor]


class Missing(Exception):
    """A peer can't run here, or not this: a sentence that says why."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Somebody's layer, and what has to be installed for it."""

    name: str
    what: str
    package: str | None  # as pip knows it; None: torch alone
    make: Callable[..., Layer]
    schemes: tuple[str, ...] = ("bf16",)
    waits: bool = False  # reads numbers back from the GPU in a call, so a CUDA graph can't hold it

    def layer(self, gate_up_proj: Weight, down_proj: Weight, scheme: str = "bf16") -> Layer:
        """Raises `Missing` with the reason."""
        if scheme not in self.schemes:
            raise Missing(f"{self.name} is measured in {', '.join(self.schemes)}, not in {scheme}")
        if self.package is not None and installed_version(self.package) is None:
            raise Missing(f"{self.name} needs {self.package}, which isn't installed")
        return self.make(gate_up_proj, down_proj, scheme)


def _module(name: str) -> Any:
    """A module of a package that is installed, though perhaps not for this machine."""
    try:
        return import_module(name)
    except (ImportError, OSError) as error:  # OSError: a shared library is missing
        raise Missing(f"{name} can't be imported: {error}") from error


def _grouped_mm(gate_up_proj: Tensor, down_proj: Tensor, scheme: str) -> Layer:
    experts = _module("tmoe.demo.layer_table").PeerExperts(gate_up_proj, down_proj)
    return lambda x, topk_weights, topk_ids: experts(x, topk_ids, topk_weights)


def _torch_grouped_mm(gate_up_proj: Tensor, down_proj: Tensor, scheme: str) -> Layer:
    """Nothing that waits for the GPU: sort, two grouped matmuls, a sum per token."""
    E = len(down_proj)
    gate_up, down = gate_up_proj.transpose(1, 2), down_proj.transpose(1, 2)

    def layer(x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        T, K = topk_ids.shape
        experts, slots = topk_ids.flatten().sort(stable=True)
        last = torch.arange(1, E + 1, device=x.device, dtype=experts.dtype)
        ends = torch.searchsorted(experts, last).int()
        gate, up = F.grouped_mm(x[slots // K], gate_up, offs=ends).chunk(2, dim=-1)
        rows = F.grouped_mm(F.silu(gate) * up, down, offs=ends)
        in_order = torch.empty_like(rows).index_copy_(0, slots, rows).view(T, K, -1)
        return torch.bmm(topk_weights.to(x.dtype).unsqueeze(1), in_order).squeeze(1)

    return layer


def _vllm(gate_up_proj: Weight, down_proj: Weight, scheme: str) -> Layer:
    """With its tuned table, where it has one for this GPU and shape."""
    fused_moe = _module("vllm.model_executor.layers.fused_moe")
    first, second, options = gate_up_proj, down_proj, {}
    if scheme == "fp8_block":
        assert isinstance(first, QuantizedTensor) and isinstance(second, QuantizedTensor)
        config = _module("vllm.model_executor.layers.fused_moe.config").fp8_w8a8_moe_quant_config(
            w1_scale=first.scale, w2_scale=second.scale, block_shape=[128, 128]
        )
        first, second, options = first.data, second.data, {"quant_config": config}
    return lambda x, topk_weights, topk_ids: fused_moe.fused_experts(
        x, first, second, topk_weights, topk_ids, **options
    )


def _triton_kernels(gate_up_proj: Tensor, down_proj: Tensor, scheme: str) -> Layer:
    """Its SwiGLU is gpt-oss', gate · sigmoid(alpha · gate) · (up + 1), of interleaved rows. With
    alpha 1, no limit, and a bias of -1 on every up it is the usual one. It routes from logits, and
    so are the weights given: what that takes is part of its time."""
    _module("vllm.utils.import_utils").import_triton_kernels()
    ogs = _module("triton_kernels.matmul_ogs")
    routing = _module("triton_kernels.routing").routing
    swiglu = _module("triton_kernels.swiglu").swiglu_fn
    E, rows, H = gate_up_proj.shape
    gate, up = gate_up_proj.chunk(2, dim=1)
    interleaved = torch.stack((gate, up), dim=2).view(E, rows, H)
    minus_one = gate_up_proj.new_tensor([0, -1], dtype=torch.float32).repeat(E, rows // 2)
    activation = ogs.FusedActivation(
        ogs.FnSpecs("swiglu", swiglu, ("alpha", "limit")), (1.0, None), 2
    )
    first, second = interleaved.transpose(1, 2), down_proj.transpose(1, 2)

    def layer(x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        logits = topk_weights.new_full((len(x), E), -torch.inf)
        logits.scatter_(1, topk_ids.long(), topk_weights.log())
        data, gather, scatter = routing(logits, topk_ids.shape[1])
        hidden = ogs.matmul_ogs(
            x, first, minus_one, data, gather_indx=gather, fused_activation=activation
        )
        return ogs.matmul_ogs(
            hidden, second, None, data, scatter_indx=scatter, gammas=data.gate_scal
        ).view(x.shape)

    return layer


def _sonicmoe(
    gate_up_proj: Tensor, down_proj: Tensor, scheme: str, *, trains: bool = False
) -> Layer:
    """On QuACK's kernels. Experts come last in its weights, which are views of ours."""
    sonicmoe = _module("sonicmoe")
    swiglu = _module("sonicmoe.enums").ActivationType.SWIGLU
    first, second, E = gate_up_proj.permute(1, 2, 0), down_proj.permute(1, 2, 0), len(down_proj)

    def layer(x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        T, K = topk_ids.shape
        tokens = torch.arange(T, device=x.device, dtype=torch.int32).repeat_interleave(K)
        y, _ = sonicmoe.moe_general_routing_inputs(
            x, topk_weights.flatten(), tokens, topk_ids.int().flatten(), first, None, second, None,
            E, torch.cuda.current_stream().cuda_stream, swiglu,
            is_inference_mode_enabled=not trains, concat_layout=True,
        )  # fmt: skip
        return y

    return layer


def _flashinfer(gate_up_proj: Tensor, down_proj: Tensor, scheme: str) -> Layer:
    """One call for everything from ids to output. Up comes first in its weights."""
    fused_moe = _module("flashinfer.fused_moe")
    first = _module("tmoe.backends.flashinfer.layouts").up_gate(gate_up_proj)

    def layer(x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        out = torch.empty_like(x)
        fused_moe.cutlass_fused_moe(
            input=x, token_selected_experts=topk_ids.int(), token_final_scales=topk_weights.float(),
            fc1_expert_weights=first, fc2_expert_weights=down_proj, output_dtype=x.dtype,
            quant_scales=[], output=out,
        )  # fmt: skip
        return out

    return layer


_PEERS = (
    Peer(
        "grouped_mm", "transformers' experts on torch's grouped GEMM", "transformers", _grouped_mm
    ),
    Peer("torch_grouped_mm", "torch's grouped GEMM, sorted in torch", None, _torch_grouped_mm),
    Peer("vllm", "vLLM's Triton kernels", "vllm", _vllm, ("bf16", "fp8_block")),
    Peer("triton_kernels", "as vendored by vLLM, routing included", "vllm", _triton_kernels),
    Peer("sonicmoe", "SonicMoE on QuACK", "sonic-moe", _sonicmoe),
    Peer("flashinfer", "FlashInfer's cutlass layer", "flashinfer-python", _flashinfer),
)
PEERS = {peer.name: peer for peer in _PEERS}


# peers that train ---------------------------------------------------------------------------------


def _liger(gate_up_proj: Tensor, down_proj: Tensor, scheme: str) -> Layer:
    """The function behind its patches of transformers' models, which give it weights in x's
    dtype."""
    apply = _module("liger_kernel.ops.fused_moe").LigerFusedMoEFunction.apply

    def layer(x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        y: Tensor = apply(x, gate_up_proj, down_proj, topk_ids.int(), topk_weights.to(x.dtype))
        return y

    return layer


def _scattermoe(gate_up_proj: Tensor, down_proj: Tensor, scheme: str) -> Layer:
    """As its gated MLP calls it. It multiplies by (E, inputs, outputs), which are views of ours."""
    experts = _module("scattermoe.parallel_experts")
    first, second, E = gate_up_proj.transpose(1, 2), down_proj.transpose(1, 2), len(down_proj)

    def layer(x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        order = experts.flatten_sort_count(topk_ids, num_experts=E)
        hidden = experts.parallel_linear(x, first, topk_ids.shape[1], *order, grouped_out=True)
        gate, up = hidden.chunk(2, dim=-1)
        gates = topk_weights.to(x.dtype)
        y: Tensor = experts.parallel_linear(
            F.silu(gate) * up, second, 1, *order, gates=gates, grouped_in=True
        )
        return y

    return layer


_TRAINING_PEERS = (
    PEERS["grouped_mm"],
    PEERS["torch_grouped_mm"],
    replace(PEERS["sonicmoe"], make=partial(_sonicmoe, trains=True)),
    Peer("liger", "Liger's fused MoE, in Triton", "liger-kernel", _liger, waits=True),
    Peer("scattermoe", "ScatterMoE, in Triton", "scattermoe", _scattermoe, waits=True),
)
TRAINING_PEERS = {peer.name: peer for peer in _TRAINING_PEERS}
