"""Other people's MoE layers, each behind the same call; a library is imported when it is asked for.

A peer takes the weights of a layer once, (E, 2I, H) with gate rows first and (E, H, I), and returns
a function of x (T, H), topk_weights (T, K) and topk_ids (T, K). It is checked like ours, so one
whose conventions have changed fails instead of being timed.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from .peer import Layer, Missing, Peer, module
from .vllm_peers import VLLM_PEERS

__all__ = ["PEERS", "TRAINING_PEERS", "Missing"]


def _grouped_mm(gate_up_proj: Tensor, down_proj: Tensor, scheme: str) -> Layer:
    experts = module("tmoe.demo.layer_table").PeerExperts(gate_up_proj, down_proj)
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


def _sonicmoe(
    gate_up_proj: Tensor, down_proj: Tensor, scheme: str, *, trains: bool = False
) -> Layer:
    """On QuACK's kernels. Experts come last in its weights, which are views of ours."""
    sonicmoe = module("sonicmoe")
    swiglu = module("sonicmoe.enums").ActivationType.SWIGLU
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
    fused_moe = module("flashinfer.fused_moe")
    first = module("tmoe.backends.flashinfer.layouts").up_gate(gate_up_proj)

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
    *VLLM_PEERS,
    Peer("sonicmoe", "SonicMoE on QuACK", "sonic-moe", _sonicmoe),
    Peer("flashinfer", "FlashInfer's cutlass layer", "flashinfer-python", _flashinfer),
)
PEERS = {peer.name: peer for peer in _PEERS}


# peers that train ---------------------------------------------------------------------------------


def _liger(gate_up_proj: Tensor, down_proj: Tensor, scheme: str) -> Layer:
    """The function behind its patches of transformers' models, which give it weights in x's
    dtype."""
    apply = module("liger_kernel.ops.fused_moe").LigerFusedMoEFunction.apply

    def layer(x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        y: Tensor = apply(x, gate_up_proj, down_proj, topk_ids.int(), topk_weights.to(x.dtype))
        return y

    return layer


def _scattermoe(gate_up_proj: Tensor, down_proj: Tensor, scheme: str) -> Layer:
    """As its gated MLP calls it. It multiplies by (E, inputs, outputs), which are views of ours."""
    experts = module("scattermoe.parallel_experts")
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
