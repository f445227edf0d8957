"""What the Mixture-of-Experts families of transformers do, read from a model's config.

`FAMILIES` has a builder per router and the model types that have it. Only fields of the config are
read: no transformers is imported, and any object with these fields will do. What each family
computes, formula by formula, is in ``docs/routing-families.md``.

A routing holds what a family's router returns. Three things around it stay with the layer:
  * a factor on the sum over the experts, not on the weights: beam, laguna, minimax_m3_vl, step3p7,
    and openai_privacy_filter, whose block multiplies by the K that its router divided by;
  * a learned factor: Inkling's `global_scale` multiplies all of a token's weights;
  * experts that are no matrices: LongCat's ids from n_routed_experts on hand the token through,
    ZAYA's last id skips the layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .recipe import Routing
from .rule import TINY, RoutingMethod, RoutingRule

NUM_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
TOP_K = (
    "num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k", "moe_k"
)  # fmt: skip


def routing_of(config: Any) -> Routing:
    """The routing of `config`, or of its text model's config.

    Raises ``ValueError`` that names the family and says why there is none.
    """
    name = getattr(config, "model_type", type(config).__name__)
    try:
        return _routing_of(config)
    except ValueError as error:
        raise ValueError(f"Routing.from_transformers: {name}: {error}") from error


def _routing_of(config: Any) -> Routing:
    model_type = getattr(config, "model_type", None)
    if model_type in REFUSED:
        raise ValueError(REFUSED[model_type])
    if model_type in _BUILDERS:
        return _BUILDERS[model_type](_Fields(config))
    text = getattr(config, "text_config", None)
    if text is None and hasattr(config, "get_text_config"):
        text = config.get_text_config()
    if text is None or getattr(text, "model_type", None) == model_type:
        raise ValueError(f"{model_type} isn't a Mixture-of-Experts family that tmoe knows")
    return _routing_of(text)


@dataclass(frozen=True, slots=True)
class _Fields:
    """A config, read by field; a field that is missing or None is an error or has a default."""

    config: Any

    def read(self, *names: str, default: Any = None) -> Any:
        """The first of the fields `names` that the config has."""
        for name in names:
            try:
                value = getattr(self.config, name, None)
            except RuntimeError as error:  # how a config of transformers says that layers differ
                raise ValueError(f"{name} differs between layers: pass one layer's config") from error
            if isinstance(value, (list, tuple)):
                if len(set(value)) != 1:
                    raise ValueError(f"{name} differs between layers: {list(value)}")
                value = value[0]
            if value is not None:
                return value
        if default is None:
            raise ValueError(f"the config has no {' or '.join(names)}")
        return default

    def routing(
        self, method: str | RoutingRule, *, more_experts: int = 0, **numbers: Any
    ) -> Routing:
        """`method` with the config's numbers of experts, and what else it takes."""
        E, K = self.read(*NUM_EXPERTS), self.read(*TOP_K)
        if E == 0:
            raise ValueError("this model is dense, it has no experts")
        return Routing(E + more_experts, K, method, **numbers)

    def groups(self) -> dict[str, int]:
        """No number of groups means no groups."""
        n_group = self.read("n_group", "num_expert_group", default=1)
        return dict(n_group=n_group, topk_group=self.read("topk_group", default=1))


def _divided(wanted: bool = True, *, epsilon: float = 0.0, min_sum: float = 0.0) -> dict[str, Any]:
    """Fields of a rule that divides by the sum; without epsilon a sum of zeros gives weights 0."""
    if not wanted:
        return {}
    return dict(renormalize=True, epsilon=epsilon, min_sum=min_sum or (0.0 if epsilon else TINY))


# Softmax over all experts, then the K largest ---------------------------------------------------


def softmax(config: _Fields) -> Routing:
    """Softmax over the experts; the weights are its K largest values."""
    return config.routing("Default")


def softmax_divided(config: _Fields) -> Routing:
    """Softmax over the experts; the K largest values, divided by their sum."""
    return config.routing("RenormalizeNaive")


def softmax_perhaps_divided(config: _Fields) -> Routing:
    """Softmax over the experts; the K largest values, divided by their sum if the config says so."""
    return config.routing("RenormalizeNaive" if config.read("norm_topk_prob") else "Default")


def softmax_p_norm(config: _Fields) -> Routing:
    """Softmax over the experts; the K largest values, divided by their p-norm, which is the sum."""
    ffn = config.read("ffn_config")
    p = getattr(ffn, "moe_normalize_expert_weights", 1)
    if p not in (None, 1):
        raise ValueError(f"moe_normalize_expert_weights must be None or 1, got {p}")
    return _Fields(ffn).routing("Default" if p is None else "RenormalizeNaive")


def softmax_expert_scale(config: _Fields) -> Routing:
    """As above, divided; then times a learned factor of each expert."""
    if not config.read("enable_moe_block", default=True):
        raise ValueError("this model is dense: enable_moe_block is False")
    return config.routing(RoutingRule(score="softmax", takes_expert_scale=True, **_divided()))


def softmax_scaled(config: _Fields) -> Routing:
    """Softmax over the experts, times a factor; perhaps only the groups with the best experts."""
    factor, method = config.read("routed_scaling_factor"), config.read("topk_method")
    if method == "greedy":
        if factor == 1:
            return config.routing("Default")
        rule = RoutingRule(score="softmax", takes_scaling_factor=True)
        return config.routing(rule, scaling_factor=factor)
    if method != "group_limited_greedy":
        raise ValueError(f"topk_method must be greedy or group_limited_greedy, got {method!r}")
    # The models give the other groups' experts the score 0, as choice and as weight. Leaving them
    # out is the same, but for experts of weight 0: then it takes one of a kept group.
    rule = RoutingRule(score="softmax", group_score="max", takes_scaling_factor=True)
    return config.routing(rule, scaling_factor=factor, **config.groups())


def softmax_groups(config: _Fields) -> Routing:
    """Softmax over the experts, in the groups with the best pairs; perhaps divided; times a factor."""
    rule = RoutingRule(
        score="softmax",
        group_score="top2",
        ruled_out="zero",
        takes_scaling_factor=True,
        **_divided(config.read("norm_topk_prob", default=True), epsilon=1e-20),
    )
    factor = config.read("routed_scaling_factor")
    return config.routing(rule, scaling_factor=factor, **config.groups())


def softmax_bias(config: _Fields) -> Routing:
    """Softmax over the experts, selected with a bias, divided by the sum or a smallest sum."""
    divided = _divided(min_sum=config.read("moe_norm_min"))
    return config.routing(RoutingRule(score="softmax", takes_bias=True, **divided))


def softmax_zero_experts(config: _Fields) -> Routing:
    """Softmax over the experts and those that compute nothing, selected with a bias; a factor."""
    rule = RoutingRule(score="softmax", takes_bias=True, takes_scaling_factor=True)
    zero_experts = config.read("zero_expert_num", default=0)
    factor = config.read("routed_scaling_factor")
    return config.routing(rule, more_experts=zero_experts, scaling_factor=factor)


def softmax_skip(config: _Fields) -> Routing:
    """Softmax over the experts and a last class that skips the layer, selected with a bias."""
    rule = RoutingRule(score="softmax", takes_bias=True)
    return config.routing(rule, more_experts=1)


# The K largest logits ---------------------------------------------------------------------------


def top_logits(config: _Fields) -> Routing:
    """The K largest logits; softmax over these."""
    return config.routing("Renormalize")


def top_logits_divided_by_k(config: _Fields) -> Routing:
    """The K largest logits; softmax over these, divided by K."""
    rule = RoutingRule(weight="softmax", takes_scaling_factor=True)
    return config.routing(rule, scaling_factor=1 / config.read(*TOP_K))


def top_logits_softmax_or_sigmoid(config: _Fields) -> Routing:
    """The K largest logits; softmax over these, or their sigmoids, perhaps divided by the sum."""
    weight = config.read("expert_selection_fn")
    if weight == "softmax":
        return config.routing("Renormalize")
    if weight != "sigmoid":
        raise ValueError(f"expert_selection_fn must be softmax or sigmoid, got {weight!r}")
    if not config.read("norm_topk_prob"):
        return config.routing("TopKSigmoid")
    return config.routing(RoutingRule(weight="sigmoid", **_divided()))


def top_logits_sigmoid_on_input(config: _Fields) -> Routing:
    """The K largest logits; their sigmoids, on the experts' input."""
    if config.read(*TOP_K) == 1:
        return config.routing("Llama4")
    return config.routing(RoutingRule(weight="sigmoid", weight_on_input=True))


def top_biased_logits(config: _Fields) -> Routing:
    """The K largest of logit + bias; the sigmoids of the logits, perhaps divided by their sum."""
    divided = _divided(config.read("norm_topk_prob"))
    return config.routing(RoutingRule(takes_bias=True, weight="sigmoid", **divided))


def sparsemixer(config: _Fields) -> Routing:
    """SparseMixer: twice the largest logit, its weight a softmax over those near it and left."""
    top_k, jitter = config.read(*TOP_K), config.read("router_jitter_noise")
    if top_k != 2:
        raise ValueError(f"its router always selects 2 experts, num_experts_per_tok is {top_k}")
    return config.routing(RoutingRule(weight="sparsemixer", jitter=jitter))


# Sigmoid, selected with a bias ------------------------------------------------------------------


def _sigmoid(config: _Fields, factor: float = 1.0, **fields: Any) -> Routing:
    rule = RoutingRule(score="sigmoid", takes_scaling_factor=factor != 1, **fields)
    return config.routing(rule, scaling_factor=factor)


def sigmoid_groups(config: _Fields) -> Routing:
    """Sigmoid with a bias, in the groups with the best pairs; perhaps divided; times a factor."""
    return _sigmoid_groups(config, config.read("routed_scaling_factor"))


def sigmoid_groups_unscaled(config: _Fields) -> Routing:
    """The same without a factor, which the block has."""
    return _sigmoid_groups(config, 1.0)


def _sigmoid_groups(config: _Fields, factor: float) -> Routing:
    method: str | RoutingRule = "DeepSeekV3"
    if not config.read("norm_topk_prob"):
        method = RoutingRule(
            score="sigmoid", takes_bias=True, group_score="top2", takes_scaling_factor=True
        )
    return config.routing(method, scaling_factor=factor, **config.groups())


def sigmoid_groups_or_zero(config: _Fields) -> Routing:
    """The same, but experts of other groups compete with 0 and win over a negative choice."""
    factor, divided = config.read("routed_scaling_factor"), config.read("norm_topk_prob")
    if config.groups()["n_group"] == 1:
        return _sigmoid_groups(config, factor)
    rule = RoutingRule(
        score="sigmoid",
        takes_bias=True,
        group_score="top2",
        ruled_out="zero",
        takes_scaling_factor=True,
        **_divided(divided, epsilon=1e-20),
    )
    return config.routing(rule, scaling_factor=factor, **config.groups())


def sigmoid_bias_scaled(config: _Fields) -> Routing:
    """Sigmoid with a bias, divided by the sum, times a factor."""
    factor = config.read("router_scaling_factor", "route_scale")
    return config.routing("MiniMax2", scaling_factor=factor)


def sigmoid_bias(config: _Fields) -> Routing:
    """Sigmoid with a bias, divided by the sum, without epsilon."""
    return _sigmoid(config, takes_bias=True, **_divided())


def sigmoid_bias_softcap(config: _Fields) -> Routing:
    """The same, of logits that a tanh may keep within a cap."""
    softcap = config.read("moe_router_logit_softcapping", default=0.0)
    return _sigmoid(config, takes_bias=True, logit_softcap=softcap, **_divided())


def sigmoid_bias_multiplier(config: _Fields) -> Routing:
    """The same, of logits that are multiplied by a constant, with an epsilon and a factor."""
    factor, scale = config.read("routed_scaling_factor"), config.read("output_multiplier")
    return _sigmoid(config, factor, takes_bias=True, logit_scale=scale, **_divided(epsilon=1e-15))


def sigmoid_perhaps_bias(config: _Fields) -> Routing:
    """Sigmoid, perhaps with a bias, perhaps divided by the sum, times a factor."""
    factor, biased = config.read("routed_scaling_factor"), config.read("use_expert_bias")
    divided = _divided(config.read("norm_topk_prob"), epsilon=1e-6)
    return _sigmoid(config, factor, takes_bias=biased, **divided)


def sigmoid(config: _Fields) -> Routing:
    """Sigmoid without a bias, perhaps divided by the sum."""
    if not config.read("norm_topk_prob"):
        return config.routing("Sigmoid")
    return _sigmoid(config, **_divided())


def sigmoid_shared(config: _Fields) -> Routing:
    """Sigmoid with a bias; the shared experts' sigmoids are part of the sum; times a factor.

    The models write it as a softmax of log-sigmoids.
    """
    shared, factor = config.read("n_shared_experts"), config.read("route_scale")
    return _sigmoid(config, factor, takes_bias=True, num_shared=shared, **_divided())


def scoring_func(config: _Fields) -> Routing:
    """The score that the config names, with a bias, divided by the sum, times a factor.

    DeepSeek-V4's first layers take their experts from a table (`topk_ids`) and weigh them like this.
    """
    score = config.read("scoring_func")
    factor = config.read("routed_scaling_factor", "route_scale")
    if score == "sigmoid":
        return config.routing("MiniMax2", scaling_factor=factor)
    if score != "sqrtsoftplus":
        raise ValueError(f"scoring_func must be sqrtsoftplus or sigmoid, got {score!r}")
    divided = _divided(epsilon=1e-20)
    rule = RoutingRule(score=score, takes_bias=True, takes_scaling_factor=True, **divided)
    return config.routing(rule, scaling_factor=factor)
