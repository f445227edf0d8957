"""`Routing`: a rule with the numbers of a model."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

from ..checks import expect, expect_size, expect_type
from .rule import RULES, RoutingMethod, RoutingRule


@dataclass(frozen=True, slots=True, init=False)
class Routing:
    """A routing recipe, hashable.

        Routing(128, 8, "Renormalize")                                            # Qwen3-30B-A3B
        Routing(256, 8, "DeepSeekV3", n_group=8, topk_group=4, scaling_factor=2.5)
        Routing(160, 6, RoutingRule(score="softmax", group_score="max", takes_scaling_factor=True),
                n_group=8, topk_group=3, scaling_factor=16.0)                         # DeepSeek-V2
        Routing.from_transformers(AutoConfig.from_pretrained(...))

    Args:
        num_experts: E.
        top_k: experts per token, K.
        method: a `RoutingMethod` or its name, kept as the member; or a `RoutingRule` of your own.
        n_group: groups of E / n_group neighbouring experts.
        topk_group: groups that a token may choose from.
        scaling_factor: multiplies every weight.
        weight_on_input: the weight multiplies the expert's input; Llama4 implies it.

    Raises:
        ValueError: numbers that don't fit together, or an argument that the method doesn't use.
        TypeError: an argument of the wrong type.
    """

    num_experts: int
    top_k: int
    method: RoutingMethod | RoutingRule
    n_group: int
    topk_group: int
    scaling_factor: float
    weight_on_input: bool
    json: str = field(init=False, repr=False, compare=False)  # what `from_json` reads

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        method: RoutingMethod | RoutingRule | str,
        *,
        n_group: int = 1,
        topk_group: int = 1,
        scaling_factor: float = 1.0,
        weight_on_input: bool = False,
    ) -> None:
        sizes = {"num_experts": num_experts, "top_k": top_k, "n_group": n_group}
        for name, size in (sizes | {"topk_group": topk_group}).items():
            expect_size(size, "Routing", name)
        expect_type(scaling_factor, (float, int), "Routing", "scaling_factor")
        expect_type(weight_on_input, bool, "Routing", "weight_on_input")
        set_field = object.__setattr__  # the instance is frozen
        set_field(self, "num_experts", num_experts)
        set_field(self, "top_k", top_k)
        set_field(self, "method", _method(method))
        set_field(self, "n_group", n_group)
        set_field(self, "topk_group", topk_group)
        set_field(self, "scaling_factor", float(scaling_factor))
        set_field(self, "weight_on_input", weight_on_input or self.rule.weight_on_input)
        self._check()
        set_field(self, "json", _to_json(self))

    def _check(self) -> None:
        def check(ok: bool, arg: str, wanted: str, got: object) -> None:
            expect(ok, "Routing", arg, wanted, got)

        E, K, G = self.num_experts, self.top_k, self.n_group
        name, rule, factor = self.name, self.rule, self.scaling_factor
        check(K <= E, "top_k", f"at most num_experts={E}", K)
        if self.method is RoutingMethod.Llama4:
            check(K == 1, "top_k", "1 with Llama4", K)
        if not rule.takes_groups:
            check(G == 1, "n_group", f"1 with {name}, which has no groups", G)
        check(E % G == 0, "n_group", f"a divisor of num_experts={E}", G)
        check(self.topk_group <= G, "topk_group", f"at most n_group={G}", self.topk_group)
        left = self.topk_group * (E // G)
        kept = f"the {self.topk_group} kept groups of {E // G}"
        check(K <= left, "top_k", f"at most {left}, the experts in {kept}", K)
        check(math.isfinite(factor), "scaling_factor", "finite", factor)
        if not rule.takes_scaling_factor:
            check(factor == 1.0, "scaling_factor", f"1 with {name}, which doesn't scale", factor)

    def __hash__(self) -> int:
        return hash(self.json)  # of all fields, and a string remembers it

    @classmethod
    def from_transformers(cls, config: Any) -> Routing:
        """The routing of a model of transformers, read from its config; loads no model code.

        Raises ``ValueError`` that names the family where there is none, or none that tmoe knows.
        """
        from .families import routing_of

        return routing_of(config)

    @classmethod
    def from_json(cls, text: str) -> Routing:
        """The routing whose ``json`` is `text`."""
        return _from_json(text)

    @property
    def rule(self) -> RoutingRule:
        """What the method does."""
        method = self.method
        return RULES[method] if isinstance(method, RoutingMethod) else method

    @property
    def name(self) -> str:
        """The method's name."""
        return self.method.name if isinstance(self.method, RoutingMethod) else "this RoutingRule"

    @property
    def takes_bias(self) -> bool:
        """Whether a selection bias (E,) may be given to `route`."""
        return self.rule.takes_bias

    @property
    def num_weighed(self) -> int:
        """Columns of the weights and ids that `route` returns: top_k, and the shared experts."""
        return self.top_k + self.rule.num_shared

    @property
    def num_logits(self) -> int:
        """Columns of the logits that `route` takes: num_experts, and the shared experts."""
        return self.num_experts + self.rule.num_shared

    @property
    def renormalizes(self) -> bool:
        """Whether the K weights add up to ``scaling_factor``; with K = 1 they are constant then."""
        rule = self.rule
        return rule.num_shared == 0 and (rule.renormalize or rule.weight == "softmax")

    @property
    def kernel_arguments(self) -> Mapping[str, Any]:
        """The keywords of ``kernels.route.route`` and ``route_ref``, all but the tensors."""
        return _kernel_arguments(self)


@cache
def _kernel_arguments(routing: Routing) -> dict[str, Any]:
    return {
        **routing.rule.kernel_arguments,
        "top_k": routing.top_k,
        "n_group": routing.n_group,
        "topk_group": routing.topk_group,
        "scaling_factor": routing.scaling_factor,
    }


def _to_json(routing: Routing) -> str:
    words = {name: getattr(routing, name) for name in _NUMBERS}
    method = routing.method
    words["method"] = method.name if isinstance(method, RoutingMethod) else asdict(method)
    return json.dumps(words)


_NUMBERS = (
    "num_experts",
    "top_k",
    "n_group",
    "topk_group",
    "scaling_factor",
    "weight_on_input",
)


@cache
def _from_json(text: str) -> Routing:
    words = json.loads(text)
    method = words.pop("method")
    return Routing(**words, method=RoutingRule(**method) if isinstance(method, dict) else method)


def _method(method: RoutingMethod | RoutingRule | str) -> RoutingMethod | RoutingRule:
    expect_type(method, (RoutingMethod, RoutingRule, str), "Routing", "method")
    if not isinstance(method, str):
        return method
    names = RoutingMethod.__members__
    expect(method in names, "Routing", "method", f"one of {', '.join(names)}", repr(method))
    return names[method]
