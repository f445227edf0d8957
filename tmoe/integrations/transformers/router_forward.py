"""What takes the place of a router's `forward`: the same call, the same answer, on tmoe.

Each function here stands in a subclass of a router of transformers (`routers.py` makes it), whose
`tmoe_kind` says where things are and which dtypes to answer in.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tmoe.arguments import autocast, autocast_is_on
from tmoe.ops import route, router
from tmoe.routing import Routing
from tmoe.routing.routers import Fields

from .router_kinds import Kind

RouterModule = Any  # an nn.Module with a `tmoe_kind` and a `tmoe_original`
Answer = tuple[Tensor, ...]
Recipe = Callable[[Fields], Routing]

# What a config calls the numbers that a router holds under another name.
_CONFIG_NAMES = {
    "num_group": "n_group",
    "norm_min": "moe_norm_min",
    "router_logit_softcapping": "moe_router_logit_softcapping",
    "score_fn": "scoring_func",
}


# The routing of an instance --------------------------------------------------------------------


def routing_of(module: RouterModule, kind: Kind) -> Routing:
    """The recipe with the numbers that `module` holds now.

    Raises:
        AttributeError: it lacks a number, as in a version of transformers that we don't know.
        ValueError: numbers that the recipe doesn't have.
    """
    values = [read(module, kind.num_experts), read(module, kind.top_k)]
    for name in kind.numbers:
        value = getattr(module, name)
        values.append(type(value).__name__ if name == "score_fn" else value)
    return getattr(_routings, _name_of_routing(kind.recipe, kind.numbers, tuple(values)))


class _Routings:
    """Every routing in use, as an attribute: where torch.compile can read one."""


_routings = _Routings()
_numbers = count()


@torch.compiler.assume_constant_result
def _name_of_routing(recipe: Recipe, numbers: tuple[str, ...], values: tuple[Any, ...]) -> str:
    """A function of constants, which torch.compile takes as one since it can't trace it. (A `Kind`
    is none to torch 2.11.)"""
    return _made(recipe, numbers, values)


@cache
def _made(recipe: Recipe, numbers: tuple[str, ...], values: tuple[Any, ...]) -> str:
    num_experts, top_k, *rest = values
    names = (_CONFIG_NAMES.get(name, name) for name in numbers)
    config = SimpleNamespace(
        num_experts=num_experts, num_experts_per_tok=top_k, **dict(zip(names, rest, strict=True))
    )
    if "scoring_func" in vars(config):
        functions = {"Sigmoid": "sigmoid", "SqrtSoftplusActivation": "sqrtsoftplus"}
        config.scoring_func = functions.get(config.scoring_func, config.scoring_func)
    config.ffn_config = config  # where DBRX has these numbers
    name = f"number_{next(_numbers)}"
    setattr(_routings, name, recipe(Fields(config)))
    return name


def read(module: RouterModule, path: str) -> Any:
    if "." not in path:
        return getattr(module, path)
    for name in path.split("."):
        module = getattr(module, name)
    return module


# Routers with a matrix of their own ------------------------------------------------------------


def matrix(self: RouterModule, hidden_states: Tensor) -> Answer:
    kind: Kind = self.tmoe_kind
    if kind.only_eval and self.training:
        return self.tmoe_original.forward(self, hidden_states)
    return _matrix(self, hidden_states, read(self, kind.bias) if kind.bias else None)


def matrix_given_bias(
    self: RouterModule, hidden_states: Tensor, e_score_correction_bias: Tensor
) -> Answer:
    return _matrix(self, hidden_states, e_score_correction_bias)


def matrix_given_expert_bias(
    self: RouterModule, hidden_states: Tensor, expert_bias: Tensor | None = None
) -> Answer:
    return _matrix(self, hidden_states, expert_bias if self.use_expert_bias else None)


def hashed(self: RouterModule, hidden_states: Tensor, input_ids: Tensor) -> Answer:
    """DeepSeek-V4's first layers: the experts are those of the token, the weights the router's."""
    return _matrix(self, hidden_states, None, self.tid2eid[input_ids.reshape(-1)].long())


def _matrix(
    self: RouterModule, hidden_states: Tensor, bias: Tensor | None, topk_ids: Tensor | None = None
) -> Answer:
    logits, weights, ids = _routed(self, hidden_states, bias, topk_ids, as_answered=True)
    return _answer(self, hidden_states, logits, weights, ids)


def _routed(
    self: RouterModule,
    hidden_states: Tensor,
    bias: Tensor | None,
    topk_ids: Tensor | None = None,
    *,
    as_answered: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, weights and ids; the product in the dtype that transformers takes it in. Weights and
    ids in fp32 and int32, or in the dtypes of the answer."""
    kind: Kind = self.tmoe_kind
    x = hidden_states
    if x.ndim != 2:
        x = x.reshape(-1, x.shape[-1])
    weight = read(self, kind.weight)
    linear_bias = self.bias if kind.linear_bias else None
    if kind.in_fp32 and weight.dtype != torch.float32:
        weight = weight.float()
    if not kind.ignores_autocast and autocast_is_on(weight.device.type):
        (weight,) = autocast(weight)
    dtype = weight.dtype
    if dtype not in (torch.float32, x.dtype):  # fp32 makes the product one of fp32, whatever x is
        x = x.to(dtype)
    return router(
        x,
        weight,
        routing_of(self, kind),
        linear_bias=None if linear_bias is None else linear_bias.to(dtype),
        bias=None if bias is None else bias.reshape(-1),
        topk_ids=topk_ids,
        **(_answered_in(self, hidden_states, weight) if as_answered else {}),
    )


def _answered_in(self: RouterModule, hidden_states: Tensor, logits: Tensor) -> dict[str, Any]:
    """Keywords of `route` and `router`: the dtypes of the answer, for logits of that dtype."""
    if autocast_is_on(logits.device.type):  # the product may have another one then
        return {"ids_dtype": torch.int64}
    dtype = _weights_dtype(self, hidden_states, logits)
    return {"weights_dtype": dtype, "ids_dtype": torch.int64}


def shared(self: RouterModule, hidden_states: Tensor) -> Answer:
    """Inkling: the router weighs the shared experts too, and a learned factor scales all."""
    logits, weights, ids = _routed(self, hidden_states, self.e_score_correction_bias)
    K, S = self.top_k, self.n_shared_experts
    weights = (weights * self.global_scale).to(_weights_dtype(self, hidden_states, logits))
    answer = {
        "logits": logits[..., :-S],
        "weights": weights[..., :K].contiguous(),
        "ids": ids[..., :K].long(),
        "shared": weights[..., K:].contiguous(),
    }
    return tuple(answer[name] for name in self.tmoe_kind.returns)


def dense(self: RouterModule, hidden_states: Tensor) -> Answer:
    """Llama 4: (T, E) scores, 0 where an expert isn't selected; and the logits."""
    logits, weights, ids = _routed(self, hidden_states, None)
    scores = torch.zeros_like(logits).scatter(1, ids.long(), weights.to(logits.dtype))
    return scores, logits


# Routers around a linear layer, which goes on being called: hooks and adapters may be on it -----


def layer(self: RouterModule, hidden_states: Tensor) -> Answer:
    return _layer(self, hidden_states, None)


def layer_given_expert_bias(
    self: RouterModule, hidden_states: Tensor, expert_bias: Tensor
) -> Answer:
    return _layer(self, hidden_states, expert_bias)


def _layer(self: RouterModule, hidden_states: Tensor, bias: Tensor | None) -> Answer:
    kind: Kind = self.tmoe_kind
    linear = getattr(self, kind.weight)
    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    # Hunyuan's is kept in fp32 and then wants its input so.
    logits = linear(x.float() if linear.weight.dtype == torch.float32 else x)
    dtypes = _answered_in(self, hidden_states, logits)
    weights, ids = route(logits, routing_of(self, kind), bias=bias, **dtypes)
    return _answer(self, hidden_states, logits, weights, ids)


def normed(self: RouterModule, hidden_states: Tensor) -> Answer:
    """Gemma 4: the logits of normed hidden states; first comes their softmax over all experts."""
    x = self.norm(hidden_states) * self.scale * self.scalar_root_size
    scale = self.per_expert_scale
    weights, ids, probs = route(
        self.proj(x),
        routing_of(self, self.tmoe_kind),
        expert_scale=scale,
        return_probs=True,
        weights_dtype=torch.promote_types(torch.float32, scale.dtype),
        ids_dtype=torch.int64,
    )
    return probs.float(), weights, ids


# Blocks that select by themselves ----------------------------------------------------------------


def select(self: RouterModule, router_logits: Tensor) -> Answer:
    return select_of_input(self, router_logits, router_logits)


def select_of_input(self: RouterModule, hidden_states: Tensor, router_logits: Tensor) -> Answer:
    dtypes = _answered_in(self, hidden_states, router_logits)
    weights, ids = route(router_logits, routing_of(self, self.tmoe_kind), **dtypes)
    return _answer(self, hidden_states, router_logits, weights, ids)


# The answer --------------------------------------------------------------------------------------


def _answer(
    self: RouterModule, hidden_states: Tensor, logits: Tensor, weights: Tensor, ids: Tensor
) -> Answer:
    if weights.dtype != (dtype := _weights_dtype(self, hidden_states, logits)):
        weights = weights.to(dtype)
    answer = {"logits": _logits(self, logits), "weights": weights, "ids": ids}
    return tuple([answer[name] for name in self.tmoe_kind.returns])


def _weights_dtype(self: RouterModule, hidden_states: Tensor, logits: Tensor) -> torch.dtype:
    source = self.tmoe_kind.weights
    if source == "fp32":
        return torch.float32
    if source == "input":
        return hidden_states.dtype
    device = logits.device.type
    if source == "softmax" and device != "cpu" and autocast_is_on(device):
        return torch.promote_types(logits.dtype, torch.float32)
    return logits.dtype


def _logits(self: RouterModule, logits: Tensor) -> Tensor:
    """The logits as the router shows them."""
    source = self.tmoe_kind.logits
    if source == "product":
        return logits
    if source == "multiplied":  # Muse-Spark
        return logits * self.output_multiplier
    logits = logits.float()
    softcap = self.router_logit_softcapping if source == "capped" else 0.0  # Laguna
    return torch.tanh(logits / softcap) * softcap if softcap > 0 else logits
