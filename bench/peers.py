"""Other people's MoE layers, each behind the same call; a library is imported when it is asked for.

An adapter takes the weights of a layer once, (E, 2I, H) and (E, H, I), and returns a function of
x (T, H), topk_weights (T, K) and topk_ids (T, K).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]


def grouped_mm(gate_up_proj: Tensor, down_proj: Tensor) -> Layer:
    """transformers' experts on torch's grouped GEMM."""
    pytest.importorskip("transformers")
    from tmoe.demo.layer_table import PeerExperts

    experts = PeerExperts(gate_up_proj, down_proj)
    return lambda x, topk_weights, topk_ids: experts(x, topk_ids, topk_weights)


def vllm(gate_up_proj: Tensor, down_proj: Tensor) -> Layer:
    """vLLM's Triton kernels, with its tuned table where it has one for this GPU and shape."""
    fused_moe = pytest.importorskip("vllm.model_executor.layers.fused_moe")
    return lambda x, topk_weights, topk_ids: fused_moe.fused_experts(
        x, gate_up_proj, down_proj, topk_weights, topk_ids
    )


PEERS = {"grouped_mm": grouped_mm, "vllm": vllm}
