"""Which experts get a token, and with what weight: ids as given, or logits by FlashInfer's methods.

The methods are written from FlashInfer's description of them; bf16 weights, as its kernels emit.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from tests.backends.flashinfer.stand_in.checks import Checks

BIASED = ("DeepSeekV3", "MiniMax2")  # methods with a bias and a factor
# The sizes that routing from logits is compiled for: experts, experts per token.
SMALL = ("Default", "Sigmoid", "SigmoidRenorm", "TopK", "TopKSigmoid")
TIERS = dict.fromkeys(SMALL, (256, 8)) | {"MiniMax2": (1024, 32), "Llama4": (128, 1)}
LARGE = (2048, 32)  # Renormalize, and ids that are given
TUPLES_FROM = {"trtllm_fp4_block_scale_routed_moe": "0.6.12"}  # others: 0.6.18


def given(checks: Checks, args: dict[str, Any], version: Version) -> tuple[Tensor, Tensor]:
    """Ids (T, K) int64 and weights (T, K) fp64 from `topk_ids`: packed, or a pair."""
    T, K, value = len(args["hidden_states"]), args["top_k"], args["topk_ids"]
    if isinstance(value, tuple):
        since = TUPLES_FROM.get(checks.op, "0.6.18")
        ok = version >= Version(since) and len(value) == 2
        checks.refuse(ok, "topk_ids", f"packed before {since}, or 2 tensors", value, TypeError)
        parts = dict(zip(("topk_ids", "topk_weights"), value, strict=True))
        ids = checks.tensor(parts, "topk_ids", torch.int32, (T, K), "dtype shape")
        floats = (torch.bfloat16, torch.float32)
        weights = checks.tensor(parts, "topk_weights", floats, (T, K), "dtype shape")
        return ids.long(), weights.double()
    packed = checks.tensor(args, "topk_ids", torch.int32, (T, K), "dtype shape")
    low = (packed & 0xFFFF).to(torch.int32)
    return (packed >> 16).long(), (low << 16).view(torch.float32).double()


def fits_a_tier(args: dict[str, Any], method: str) -> bool:
    """Whether FlashInfer is compiled for so many experts."""
    E, K, groups = args["num_experts"], args["top_k"], args["n_group"] or 0
    most, most_k = LARGE if "topk_ids" in args else TIERS.get(method, LARGE)
    if method == "DeepSeekV3" and "topk_ids" not in args:
        most, most_k = (1024, 32) if groups <= 1 else (512, 22 if E > 384 else 8)
        if groups > 1 and (groups > 8 or (args["topk_group"] or 0) > 4 or E // groups > 32):
            return False
    return E <= most and most_k >= K


def from_logits(
    args: dict[str, Any], method: str, faults: Collection[str]
) -> tuple[Tensor, Tensor]:
    """Ids (T, K) int64 and weights (T, K), computed in fp32 and rounded to bf16, in fp64."""
    x, K = args["routing_logits"].float(), args["top_k"]
    if method in BIASED:
        ids, weights = _biased(x, args, method, faults)
    elif method == "Default":
        ids, weights = _picked(torch.softmax(x, dim=1), K)
    elif method in ("SigmoidRenorm", "Sigmoid"):
        ids, weights = _picked(_sigmoid(x), K)
        if method == "SigmoidRenorm" and args.get("norm_topk_prob", True):
            weights = weights / weights.sum(1, keepdim=True).clamp(min=1e-20)
    else:
        ids, weights = _picked(x, K)
        if method in ("Renormalize", "RenormalizeNaive"):
            weights = torch.softmax(weights, dim=1)
        elif method in ("TopKSigmoid", "Llama4"):
            weights = _sigmoid(weights)
    return ids, weights.bfloat16().double()


def _biased(
    x: Tensor, args: dict[str, Any], method: str, faults: Collection[str]
) -> tuple[Tensor, Tensor]:
    """The bias selects and doesn't weigh; the factor comes before the division."""
    groups, factor, bias = args["n_group"] or 0, args["routed_scaling_factor"], args["routing_bias"]
    grouped = method == "DeepSeekV3" and groups > 1
    factor = 1.0 if factor is None else factor
    bias = torch.zeros(x.shape[1]) if bias is None else bias
    bias = (bias.bfloat16() if grouped else bias).float()  # what the grouped kernel holds
    scores = _sigmoid(x)
    key = _in_kept_groups(scores + bias, groups, args["topk_group"]) if grouped else scores + bias
    ids = _picked(key, args["top_k"])[0]
    epsilon = 1e-20
    if method == "MiniMax2":
        factor = 1.0 if "minimax_ignores_factor" in faults else factor
    else:
        if f"deepseek_{'' if grouped else 'un'}grouped_no_epsilon" in faults:
            epsilon = 0.0
        if "deepseek_bias_cancels" in faults and not grouped:
            scores = (scores + bias) - bias
    picked = scores.gather(1, ids)
    return ids, picked * factor / (picked.sum(1, keepdim=True) + epsilon)


def _sigmoid(x: Tensor) -> Tensor:
    """As the kernels write it: exactly 0 for what is far below."""
    return 0.5 * torch.tanh(0.5 * x) + 0.5


def _picked(key: Tensor, K: int) -> tuple[Tensor, Tensor]:
    """The K largest: ids and keys. The lower index wins a tie."""
    ids = key.sort(dim=1, descending=True, stable=True).indices[:, :K]
    return ids, key.gather(1, ids)


def _in_kept_groups(key: Tensor, groups: int, kept: int) -> Tensor:
    """-inf outside the groups whose two largest keys have the largest sums."""
    by_group = key.unflatten(1, (groups, -1))
    best = by_group.sort(dim=2, descending=True).values[..., :2].sum(2)
    lost = torch.ones_like(best, dtype=torch.bool).scatter(1, _picked(best, kept)[0], False)
    return by_group.masked_fill(lost[..., None], -torch.inf).flatten(1)
