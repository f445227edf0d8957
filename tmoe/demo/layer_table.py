"""One MoE layer at the shapes of real models: tmoe beside transformers' own `grouped_mm`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

import tmoe

from ..shapes import MODEL_SHAPES, MoEShape, random_inputs, random_weights
from .timing import median_ms
from .verdict import error_and_bound, experts_fp64

TOKENS = (1, 16, 128, 1024, 8192)
INPUTS = 4  # different tokens and routes per measurement
CHECKED = 8  # tokens per input that are recomputed in fp64


class PeerExperts(nn.Module):
    """What transformers' expert functions read of an experts module: SwiGLU, no bias."""

    has_gate, has_bias, has_post_expert_norm = True, False, False
    is_transposed, is_concatenated, _is_expert_parallel = False, True, False
    _apply_gate = _default_apply_gate

    def __init__(self, gate_up_proj: Tensor, down_proj: Tensor) -> None:
        super().__init__()
        self.num_experts = gate_up_proj.shape[0]
        self.act_fn = nn.SiLU()
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        return ALL_EXPERTS_FUNCTIONS["grouped_mm"](self, x, topk_ids, topk_weights)


@dataclass(frozen=True, slots=True)
class Row:
    """One cell of the comparison; times in milliseconds."""

    shape: MoEShape
    tokens: int
    tmoe_ms: float
    peer_ms: float
    error: float
    allowed: float


def measure(
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    shapes: Iterable[MoEShape] = MODEL_SHAPES,
    tokens: Sequence[int] = TOKENS,
    repeats: int = 20,
) -> Iterator[Row]:
    """Check, then time, one layer of each of `shapes` at each number of `tokens`."""
    for shape in shapes:
        torch.manual_seed(0)
        peer = PeerExperts(*random_weights(shape, device, dtype))
        for T in tokens:
            yield _measure_one(peer, shape, T, device, repeats)
        del peer  # gigabytes: free them before the next shape


@torch.no_grad()
def _measure_one(
    peer: PeerExperts, shape: MoEShape, T: int, device: torch.device, repeats: int
) -> Row:
    gate_up, down = peer.gate_up_proj, peer.down_proj
    inputs = [random_inputs(shape, T, device, gate_up.dtype) for _ in range(INPUTS)]

    error = allowed = 0.0
    for x, weights, ids in inputs:
        got = tmoe.fused_experts(x, gate_up, down, weights, ids)[:CHECKED]
        reference = peer(x, ids, weights)[:CHECKED]
        truth = experts_fp64(x[:CHECKED], gate_up, down, weights[:CHECKED], ids[:CHECKED])
        one, bound = error_and_bound(got, truth, reference)
        if one - bound >= error - allowed:
            error, allowed = one, bound

    ours = [lambda i=i: tmoe.fused_experts(i[0], gate_up, down, i[1], i[2]) for i in inputs]
    theirs = [lambda i=i: peer(i[0], i[2], i[1]) for i in inputs]
    ours_ms, theirs_ms = median_ms(ours, device, repeats), median_ms(theirs, device, repeats)
    return Row(shape, T, ours_ms, theirs_ms, error, allowed)
