"""What the demo reads off a model: text, logits, bits per byte, times, routes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from .checkpoint import load
from .text import bits_per_byte
from .timing import median_ms


@dataclass(frozen=True, slots=True)
class Observation:
    """A model as it is at one moment."""

    generated: Tensor  # (P + N,) int64: prompt and greedy continuation
    bits: float  # per held-out byte
    one_token_ms: tuple[float, ...]  # of each layer's MoE block, for the prompt's last token
    prompt_ms: tuple[float, ...]  # the same for the whole prompt


@torch.no_grad()
def observe(
    model: Qwen3MoeForCausalLM,
    timed: Qwen3MoeForCausalLM,  # the same weights in the dtype to time; `model` itself will do
    prompt: Tensor,  # (P,) int64 on the models' device
    windows: Tensor,  # (W, 512) uint8 held-out text
    new_bytes: int,
) -> Observation:
    """Generate from `prompt`, score `windows`, time each MoE block on what reaches it."""
    inputs = moe_inputs(timed, prompt)
    blocks = moe_blocks(timed)

    def times(cut: Callable[[Tensor], Tensor]) -> tuple[float, ...]:
        calls = (partial(block, cut(x)) for block, x in zip(blocks, inputs, strict=True))
        return tuple(median_ms([call], prompt.device) for call in calls)

    return Observation(
        generated=generate(model, prompt, new_bytes),
        bits=bits_per_byte(model, windows),
        one_token_ms=times(lambda x: x[:, -1:].contiguous()),
        prompt_ms=times(lambda x: x),
    )


@torch.no_grad()
def generate(model: Qwen3MoeForCausalLM, prompt: Tensor, new_bytes: int) -> Tensor:
    """Greedy continuation of `prompt` (P,): (P + new_bytes,)."""
    ids = prompt[None]
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_bytes,
        min_new_tokens=new_bytes,
        do_sample=False,
    )[0]


@torch.no_grad()
def logits_of(model: Qwen3MoeForCausalLM, ids: Tensor) -> Tensor:
    """Next-byte logits (N, 256) at every position of `ids` (N,)."""
    return model(input_ids=ids[None], use_cache=False).logits[0]


def true_logits(ids: Tensor) -> Tensor:
    """`logits_of` the shipped weights in fp64, with transformers' own loop over experts."""
    model = load(ids.device, torch.float64)
    model.set_experts_implementation("eager")
    return logits_of(model, ids)


@torch.no_grad()
def routing_weights(model: Qwen3MoeForCausalLM, ids: Tensor) -> Tensor:
    """(L, T, E): each layer's routing weight of each expert for each byte; 0 where not chosen."""
    output = model(input_ids=ids[None], use_cache=False, output_router_logits=True)
    probs = torch.stack(output.router_logits).float().softmax(-1)
    weights, chosen = probs.topk(model.config.num_experts_per_tok)
    weights = weights / weights.sum(-1, keepdim=True)
    return torch.zeros_like(probs).scatter(-1, chosen, weights)


def moe_blocks(model: Qwen3MoeForCausalLM) -> list[Qwen3MoeSparseMoeBlock]:
    """Each layer's MoE block: router and experts."""
    return [layer.mlp for layer in model.model.layers]


def moe_inputs(model: Qwen3MoeForCausalLM, ids: Tensor) -> list[Tensor]:
    """What reaches each MoE block for `ids` (T,): one (1, T, H) per layer."""
    seen: list[Tensor] = []
    hooks = [
        block.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        for block in moe_blocks(model)
    ]
    try:
        logits_of(model, ids)
    finally:
        for hook in hooks:
            hook.remove()
    return seen
