"""What vLLM has for experts: its Triton kernels, CUTLASS, DeepGEMM, and OpenAI's triton_kernels.

Modules, names and arguments are vLLM 0.24's.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from ..formats import QuantizedTensor
from .peer import Layer, Missing, Peer, Weight, module

MOE = "vllm.model_executor.layers.fused_moe"
MOST_TOKENS = 16384  # for which CUTLASS keeps buffers


def _triton(gate_up_proj: Weight, down_proj: Weight, scheme: str, **scales: Tensor) -> Layer:
    """With its tuned table, where it has one for this GPU and shape."""
    fused_experts = module(MOE).fused_experts
    if isinstance(gate_up_proj, QuantizedTensor) and isinstance(down_proj, QuantizedTensor):
        config = _fp8(gate_up_proj, down_proj, scheme, **scales)
        call = partial(fused_experts, quant_config=config)
        return partial(_call, call, gate_up_proj.data, down_proj.data)
    return partial(_call, fused_experts, gate_up_proj, down_proj)


def _call(
    call: Any, first: Weight, second: Weight, x: Tensor, topk_weights: Tensor, topk_ids: Tensor
) -> Tensor:
    y: Tensor = call(x, first, second, topk_weights, topk_ids)
    return y


def _fp8(first: QuantizedTensor, second: QuantizedTensor, scheme: str, **scales: Tensor) -> Any:
    """How it wants to be told what the codes mean. Without static scales it computes them."""
    if scheme == "fp8_block" and (first.shape[2] % 128 or second.shape[2] % 128):
        sizes = f"H={first.shape[2]}, I={second.shape[2]}"
        raise Missing(f"vLLM rounds rows in whole blocks of 128, which {sizes} aren't made of")
    per_channel = scheme == "fp8_channel"
    w1_scale, w2_scale = (
        w.scale.unsqueeze(-1) if per_channel else w.scale for w in (first, second)
    )
    return module(f"{MOE}.config").fp8_w8a8_moe_quant_config(
        w1_scale=w1_scale,
        w2_scale=w2_scale,
        a1_scale=scales.get("input_scale"),
        a2_scale=scales.get("hidden_scale"),
        per_act_token_quant=per_channel,
        per_out_ch_quant=per_channel,
        block_shape=[128, 128] if scheme == "fp8_block" else None,
    )


def _modular(
    file: str, experts: str, first: QuantizedTensor, second: QuantizedTensor, scheme: str
) -> Layer:
    """One of its classes of experts, between the steps that vLLM puts around it on one GPU."""
    kernel, config = module(f"{MOE}.modular_kernel"), module(f"{MOE}.config")
    around = module(f"{MOE}.prepare_finalize.no_dp_ep").MoEPrepareAndFinalizeNoDPEPModular
    silu = module(f"{MOE}.activation").MoEActivation.SILU
    workspace = module("vllm.v1.worker.workspace")
    if not workspace.is_workspace_manager_initialized():
        workspace.init_workspace_manager(first.device)
    E, H, inner = second.shape
    quantized = _fp8(first, second, scheme)

    @cache
    def made(top_k: int) -> Any:
        layer = config.FusedMoEConfig(
            num_experts=E,
            experts_per_token=top_k,
            hidden_dim=H,
            intermediate_size=inner,
            num_local_experts=E,
            num_logical_experts=E,
            activation=silu,
            device=first.device,
            routing_method=config.RoutingMethodType.Default,
            moe_parallel_config=config.FusedMoEParallelConfig.make_no_parallel(),
            in_dtype=torch.bfloat16,
            max_num_tokens=MOST_TOKENS,
        )
        made_experts = getattr(module(f"{MOE}.experts.{file}"), experts)(layer, quantized)
        return kernel.FusedMoEKernel(around(), made_experts)

    def layer(x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        y: Tensor = made(topk_ids.shape[1]).apply(
            x, first.data, second.data, topk_weights, topk_ids, silu, E, None, False
        )
        return y

    return layer


def _triton_kernels(gate_up_proj: Tensor, down_proj: Tensor, scheme: str) -> Layer:
    """Its SwiGLU is gpt-oss', gate · sigmoid(alpha · gate) · (up + 1), of interleaved rows. With
    alpha 1, no limit, and a bias of -1 on every up it is the usual one. It routes from logits, and
    so are the weights given: what that takes is part of its time."""
    module("vllm.utils.import_utils").import_triton_kernels()
    ogs = module("triton_kernels.matmul_ogs")
    routing = module("triton_kernels.routing").routing
    swiglu = module("triton_kernels.swiglu").swiglu_fn
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


_FP8 = ("fp8_tensor", "fp8_channel", "fp8_block")
_CUTLASS = partial(_modular, "cutlass_moe", "CutlassExpertsFp8")
_DEEPGEMM = partial(_modular, "deep_gemm_moe", "DeepGemmExperts")

VLLM_PEERS = (
    Peer("vllm", "vLLM's Triton kernels", "vllm", _triton, ("bf16", *_FP8)),
    Peer("vllm_cutlass", "vLLM's CUTLASS kernels", "vllm", _CUTLASS, ("fp8_channel",)),
    Peer("deepgemm", "as vendored by vLLM", "vllm", _DEEPGEMM, ("fp8_block",)),
    Peer("triton_kernels", "as vendored by vLLM, routing included", "vllm", _triton_kernels),
)
