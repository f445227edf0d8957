"""The routers of transformers: from the fields of a model's config to a `Routing`.

A function per router. `families.py` says which model types have which one, and
``docs/routing-families.md`` what each of them computes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from .recipe import Routing
from .rule import RULES, TINY, RoutingMethod, RoutingRule

# Llama4 is for K = 1 alone, so whoever means it says so.
_NAMED = {rule: method for method, rule in RULES.items() if method is not RoutingMethod.Llama4}

# What the families call the numbers that every router has.
NUM_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
TOP_K = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "top_k_experts",
    "moe_topk",
    "moe_top_k",
    "moe_k",
)


@dataclass(frozen=True, slots=True)
class Fields:
    """A config, read by field; a field that is missing or None is an error or has a default."""

    config: Any

    def read(self, *names: str, default: Any = None) -> Any:
        """The first of the fields `names` that the config has; a list is one value per layer."""
        for name in names:
            try:
                value = getattr(self.config, name, None)
            except RuntimeError as error:  # transformers': layers differ in this field
                raise ValueError(f"{name} differs between layers, pass one's config") from error
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
        """`method` with the config's numbers of experts; a rule with a name goes by its name."""
        E, K = self.read(*NUM_EXPERTS), self.read(*TOP_K)
        if E == 0:
            raise ValueError("a dense model, it has no experts")
        if isinstance(method, RoutingRule):
            return Routing(E + more_experts, K, _NAMED.get(method, method), **numbers)
        return Routing(E + more_experts, K, method, **numbers)

    def groups(self) -> dict[str, int]:
        """No number of groups means one group."""
        n_group = self.read("n_group", "num_expert_group", default=1)
        return dict(n_group=n_group, topk_group=self.read("topk_group", default=1))


def _divided(wanted: bool = True, *, epsilon: float = 0.0, min_sum: float = 0.0) -> dict[str, Any]:
    """Fields of a rule that divides by the sum; where a model would divide 0 by 0, we give 0."""
    if not wanted:
        return {}
    return dict(renormalize=True, epsilon=epsilon, min_sum=min_sum or (0.0 if epsilon else TINY))


# Softmax over all experts -----------------------------------------------------------------------


def softmax(config: Fields) -> Routing:
    """Softmax over the experts; its K largest values."""
    return config.routing("Default")


def softmax_divided(config: Fields) -> Routing:
    """Softmax over the experts; its K largest values, divided by their sum."""
    return config.routing("RenormalizeNaive")


def softmax_perhaps_divided(config: Fields) -> Routing:
    """Softmax over the experts; its K largest values, perhaps divided by their sum."""
    return softmax_divided(config) if config.read("norm_topk_prob") else softmax(config)


def softmax_p_norm(config: Fields) -> Routing:
    """Softmax over the experts; its K largest values, perhaps divided by their p-norm, p = 1."""
    ffn = Fields(config.read("ffn_config"))
    p = getattr(ffn.config, "moe_normalize_expert_weights", 1)
    if p not in (None, 1):
        raise ValueError(f"moe_normalize_expert_weights must be None or 1, got {p}")
    return softmax(ffn) if p is None else softmax_divided(ffn)


def softmax_expert_scale(config: Fields) -> Routing:
    """Softmax over the experts; its K largest values over their sum, times a learned scale each."""
    if not config.read("enable_moe_block", default=True):
        raise ValueError("a dense model, enable_moe_block is False")
    return config.routing(RoutingRule(score="softmax", takes_expert_scale=True, **_divided()))


def softmax_scaled(config: Fields) -> Routing:
    """Softmax over the experts, perhaps only of the groups with the best ones, times a factor."""
    factor, method = config.read("routed_scaling_factor"), config.read("topk_method")
    rule = RoutingRule(score="softmax", takes_scaling_factor=factor != 1)
    if method == "greedy":
        return config.routing(rule, scaling_factor=factor)
    if method != "group_limited_greedy":
        raise ValueError(f"topk_method must be greedy or group_limited_greedy, got {method!r}")
    # The models set the scores of other groups to 0, and a weight is the score that is left. To
    # leave them out instead gives the same weights: what they could win are slots that weigh 0.
    rule = replace(rule, group_score="max")
    return config.routing(rule, scaling_factor=factor, **config.groups())


def softmax_groups(config: Fields) -> Routing:
    """Softmax over the experts, of the groups with the best pairs, perhaps divided; a factor."""
    rule = RoutingRule(
        score="softmax",
        group_score="top2",
        ruled_out="zero",
        takes_scaling_factor=True,
        **_divided(config.read("norm_topk_prob", default=True), epsilon=1e-20),
    )
    factor = config.read("routed_scaling_factor")
    return config.routing(rule, scaling_factor=factor, **config.groups())


def softmax_bias(config: Fields) -> Routing:
    """Softmax over the experts, selected with a bias, divided by the sum but not by too little."""
    divided = _divided(min_sum=config.read("moe_norm_min"))
    return config.routing(RoutingRule(score="softmax", takes_bias=True, **divided))


def softmax_zero_experts(config: Fields) -> Routing:
    """Softmax over the experts and those that compute nothing, selected with a bias; a factor."""
    rule = RoutingRule(score="softmax", takes_bias=True, takes_scaling_factor=True)
    more = config.read("zero_expert_num", default=0)
    factor = config.read("routed_scaling_factor")
    return config.routing(rule, more_experts=more, scaling_factor=factor)


def softmax_skip(config: Fields) -> Routing:
    """Softmax over the experts and one more, which skips the layer; selected with a bias."""
    return config.routing(RoutingRule(score="softmax", takes_bias=True), more_experts=1)


# The K largest logits ---------------------------------------------------------------------------


def top_logits(config: Fields) -> Routing:
    """The K largest logits; softmax over these."""
    return config.routing("Renormalize")


def top_logits_over_k(config: Fields) -> Routing:
    """The K largest logits; softmax over these, divided by K."""
    rule = RoutingRule(weight="softmax", takes_scaling_factor=True)
    return config.routing(rule, scaling_factor=1 / config.read(*TOP_K))


def top_logits_softmax_or_sigmoid(config: Fields) -> Routing:
    """The K largest logits; softmax over these, or their sigmoids, perhaps divided by the sum."""
    weight = config.read("expert_selection_fn")
    if weight == "softmax":
        return top_logits(config)
    if weight != "sigmoid":
        raise ValueError(f"expert_selection_fn must be softmax or sigmoid, got {weight!r}")
    return config.routing(RoutingRule(weight="sigmoid", **_divided(config.read("norm_topk_prob"))))


def top_logits_on_input(config: Fields) -> Routing:
    """The K largest logits; their sigmoids multiply the experts' input."""
    if config.read(*TOP_K) == 1:
        return config.routing("Llama4")
    return config.routing(RoutingRule(weight="sigmoid", weight_on_input=True))


def top_biased_logits(config: Fields) -> Routing:
    """The K largest of logit + bias; the logits' sigmoids, perhaps divided by their sum."""
    divided = _divided(config.read("norm_topk_prob"))
    return config.routing(RoutingRule(takes_bias=True, weight="sigmoid", **divided))


def sparsemixer(config: Fields) -> Routing:
    """Twice the largest logit that is left; its share in a softmax over the logits near it."""
    top_k, jitter = config.read(*TOP_K), config.read("router_jitter_noise")
    if top_k != 2:
        raise ValueError(f"its router always selects 2 experts, num_experts_per_tok is {top_k}")
    return config.routing(RoutingRule(weight="sparsemixer", jitter=jitter))


# Sigmoid of each logit --------------------------------------------------------------------------


def _sigmoid(config: Fields, factor: float = 1.0, **fields: Any) -> Routing:
    rule = RoutingRule(score="sigmoid", takes_scaling_factor=factor != 1, **fields)
    return config.routing(rule, scaling_factor=factor)


def sigmoid(config: Fields) -> Routing:
    """Sigmoid, perhaps divided by the sum."""
    return _sigmoid(config, **_divided(config.read("norm_topk_prob")))


def sigmoid_bias(config: Fields) -> Routing:
    """Sigmoid, selected with a bias, divided by the sum."""
    return _sigmoid(config, takes_bias=True, **_divided())


def sigmoid_bias_softcap(config: Fields) -> Routing:
    """Sigmoid of logits that a tanh may cap, selected with a bias, divided by the sum."""
    softcap = config.read("moe_router_logit_softcapping", default=0.0)
    return _sigmoid(config, takes_bias=True, logit_softcap=softcap, **_divided())


def sigmoid_bias_scaled(config: Fields) -> Routing:
    """Sigmoid, selected with a bias, divided by the sum, times a factor."""
    factor = config.read("router_scaling_factor", "route_scale")
    return config.routing("MiniMax2", scaling_factor=factor)


def sigmoid_bias_multiplier(config: Fields) -> Routing:
    """Sigmoid of a multiple of the logits, selected with a bias, divided by the sum, a factor."""
    factor, scale = config.read("routed_scaling_factor"), config.read("output_multiplier")
    return _sigmoid(config, factor, takes_bias=True, logit_scale=scale, **_divided(epsilon=1e-15))


def sigmoid_perhaps_bias(config: Fields) -> Routing:
    """Sigmoid, perhaps selected with a bias, perhaps divided by the sum, times a factor."""
    factor, biased = config.read("routed_scaling_factor"), config.read("use_expert_bias")
    divided = _divided(config.read("norm_topk_prob"), epsilon=1e-6)
    return _sigmoid(config, factor, takes_bias=biased, **divided)


def sigmoid_shared(config: Fields) -> Routing:
    """Sigmoid, selected with a bias, divided by a sum with the shared experts in it; a factor."""
    shared, factor = config.read("n_shared_experts"), config.read("route_scale")
    return _sigmoid(config, factor, takes_bias=True, num_shared=shared, **_divided())


def sigmoid_groups(config: Fields) -> Routing:
    """Sigmoid, selected with a bias in the groups with the best pairs; perhaps divided; factor."""
    return _sigmoid_groups(config, config.read("routed_scaling_factor"))


def sigmoid_groups_hybrid(config: Fields) -> Routing:
    """The same, in a family some of whose models have no such layer."""
    if "moe" not in getattr(config.config, "layers_block_type", ("moe",)):
        raise ValueError("a dense model, layers_block_type has no moe")
    return sigmoid_groups(config)


def sigmoid_groups_unscaled(config: Fields) -> Routing:
    """The same without a factor."""
    return _sigmoid_groups(config, 1.0)


def sigmoid_groups_or_zero(config: Fields) -> Routing:
    """The same; but experts of the other groups stay, with a choice of 0."""
    ruled_out = "never" if config.groups()["n_group"] == 1 else "zero"
    return _sigmoid_groups(config, config.read("routed_scaling_factor"), ruled_out)


def _sigmoid_groups(config: Fields, factor: float, ruled_out: str = "never") -> Routing:
    rule = RoutingRule(
        score="sigmoid",
        takes_bias=True,
        group_score="top2",
        ruled_out=ruled_out,
        takes_scaling_factor=True,
        **_divided(config.read("norm_topk_prob"), epsilon=1e-20),
    )
    return config.routing(rule, scaling_factor=factor, **config.groups())


def scoring_func(config: Fields) -> Routing:
    """Sigmoid or √softplus, selected with a bias, divided by the sum, times a factor."""
    score = config.read("scoring_func")
    if score not in ("sigmoid", "sqrtsoftplus"):
        raise ValueError(f"scoring_func must be sqrtsoftplus or sigmoid, got {score!r}")
    rule = RoutingRule(
        score=score, takes_bias=True, takes_scaling_factor=True, **_divided(epsilon=1e-20)
    )
    factor = config.read("routed_scaling_factor", "route_scale")
    return config.routing(rule, scaling_factor=factor)
