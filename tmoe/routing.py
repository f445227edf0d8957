"""How tokens choose their experts: ten named methods, and what each of them does.

A method is a row of `RULES`. With x the logits of a token, b the selection bias, K = top_k:

    method            selects by         weight of a selected expert                takes
    Default           softmax(x) over E  softmax(x) over E
    Renormalize       x                  softmax over the K selected x
    RenormalizeNaive  softmax(x) over E  softmax(x) / sum over the K
    TopK              x                  x
    Sigmoid           sigmoid(x)         sigmoid(x)
    SigmoidRenorm     sigmoid(x)         sigmoid(x) / max(sum over the K, 1e-20)
    TopKSigmoid       x                  sigmoid(x)
    Llama4 (K = 1)    x                  sigmoid(x), on the expert's input
    MiniMax2          sigmoid(x) + b     c · sigmoid(x) / (sum over the K + 1e-20)  b, c
    DeepSeekV3        sigmoid(x) + b     c · sigmoid(x) / (sum over the K + 1e-20)  b, c, groups

c is ``scaling_factor``. With groups, a group's score is the sum of its two best selection scores;
only the experts of the ``topk_group`` best groups can be selected. Scores are fp32. Of equal scores
the lower index wins, of equal groups too. The maths is in ``kernels/route.py``. Names and formulas
are those of FlashInfer's ``RoutingMethodType``, version 0.7.4.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Any

from .checks import expect, expect_type


class RoutingMethod(enum.Enum):
    """The routing methods; the module's docstring says what each one computes."""

    Default = "Default"
    Renormalize = "Renormalize"
    DeepSeekV3 = "DeepSeekV3"
    Llama4 = "Llama4"
    RenormalizeNaive = "RenormalizeNaive"
    TopK = "TopK"
    SigmoidRenorm = "SigmoidRenorm"
    MiniMax2 = "MiniMax2"
    Sigmoid = "Sigmoid"
    TopKSigmoid = "TopKSigmoid"


@dataclass(frozen=True, slots=True)
class Rule:
    """What a method does: the first four go to the kernel, the rest says what it takes."""

    score: str  # of every expert, before selection: "none" (the logit), "softmax" or "sigmoid"
    normalise: str  # the K selected scores: "none", "sum", "softmax" or "sigmoid"
    epsilon: float = 0.0  # normalise="sum" divides by max(sum + epsilon, min_sum)
    min_sum: float = 0.0
    takes_bias: bool = False
    takes_groups: bool = False
    takes_scaling_factor: bool = False
    weight_on_input: bool = False


RULES = {
    RoutingMethod.Default: Rule("softmax", "none"),
    RoutingMethod.Renormalize: Rule("none", "softmax"),
    RoutingMethod.RenormalizeNaive: Rule("softmax", "sum"),
    RoutingMethod.TopK: Rule("none", "none"),
    RoutingMethod.Sigmoid: Rule("sigmoid", "none"),
    RoutingMethod.SigmoidRenorm: Rule("sigmoid", "sum", min_sum=1e-20),
    RoutingMethod.TopKSigmoid: Rule("none", "sigmoid"),
    RoutingMethod.Llama4: Rule("none", "sigmoid", weight_on_input=True),
    RoutingMethod.MiniMax2: Rule(
        "sigmoid", "sum", epsilon=1e-20, takes_bias=True, takes_scaling_factor=True
    ),
    RoutingMethod.DeepSeekV3: Rule(
        "sigmoid",
        "sum",
        epsilon=1e-20,
        takes_bias=True,
        takes_groups=True,
        takes_scaling_factor=True,
    ),
}


@dataclass(frozen=True, slots=True, init=False)
class Routing:
    """A routing recipe, hashable.

    Args:
        num_experts: E.
        top_k: experts per token, K.
        method: a `RoutingMethod` or its name; kept as the member.
        n_group: groups of E / n_group neighbouring experts (DeepSeekV3 only).
        topk_group: groups that a token may choose from.
        scaling_factor: multiplies every weight (DeepSeekV3 and MiniMax2 only).
        weight_on_input: the weight multiplies the expert's input; Llama4 implies it.

    Raises:
        ValueError: numbers that don't fit together, or an argument that the method doesn't use.
        TypeError: an argument of the wrong type.
    """

    num_experts: int
    top_k: int
    method: RoutingMethod
    n_group: int
    topk_group: int
    scaling_factor: float
    weight_on_input: bool

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        method: RoutingMethod | str,
        *,
        n_group: int = 1,
        topk_group: int = 1,
        scaling_factor: float = 1.0,
        weight_on_input: bool = False,
    ) -> None:
        sizes = {"num_experts": num_experts, "top_k": top_k, "n_group": n_group}
        for name, size in (sizes | {"topk_group": topk_group}).items():
            expect_type(size, int, "Routing", name)
            expect(size >= 1, "Routing", name, "at least 1", size)
        expect_type(scaling_factor, (float, int), "Routing", "scaling_factor")
        expect_type(weight_on_input, bool, "Routing", "weight_on_input")
        member = _member(method)
        set_field = object.__setattr__  # the instance is frozen
        set_field(self, "num_experts", num_experts)
        set_field(self, "top_k", top_k)
        set_field(self, "method", member)
        set_field(self, "n_group", n_group)
        set_field(self, "topk_group", topk_group)
        set_field(self, "scaling_factor", float(scaling_factor))
        set_field(self, "weight_on_input", weight_on_input or RULES[member].weight_on_input)
        self._check()

    def _check(self) -> None:
        def check(ok: bool, arg: str, wanted: str, got: object) -> None:
            expect(ok, "Routing", arg, wanted, got)

        E, K, G = self.num_experts, self.top_k, self.n_group
        method, rule, factor = self.method.name, self.rule, self.scaling_factor
        check(K <= E, "top_k", f"at most num_experts={E}", K)
        if self.method is RoutingMethod.Llama4:
            check(K == 1, "top_k", "1 with Llama4", K)
        if not rule.takes_groups:
            check(G == 1, "n_group", f"1 with {method}, which has no groups", G)
        check(E % G == 0, "n_group", f"a divisor of num_experts={E}", G)
        check(self.topk_group <= G, "topk_group", f"at most n_group={G}", self.topk_group)
        left = self.topk_group * (E // G)
        kept = f"the {self.topk_group} kept groups of {E // G}"
        check(K <= left, "top_k", f"at most {left}, the experts in {kept}", K)
        check(math.isfinite(factor), "scaling_factor", "finite", factor)
        if not rule.takes_scaling_factor:
            check(factor == 1.0, "scaling_factor", f"1 with {method}, which doesn't scale", factor)

    @property
    def rule(self) -> Rule:
        """What the method does."""
        return RULES[self.method]

    @property
    def takes_bias(self) -> bool:
        """Whether a selection bias (E,) may be given to `route`."""
        return self.rule.takes_bias

    @property
    def renormalizes(self) -> bool:
        """Whether the K weights add up to ``scaling_factor``; with K = 1 they are constant then."""
        return self.rule.normalise in ("sum", "softmax")

    @property
    def kernel_arguments(self) -> dict[str, Any]:
        """The keyword arguments of ``kernels.route.route`` and ``route_ref``, all but the bias."""
        rule = self.rule
        return {
            "top_k": self.top_k,
            "score": rule.score,
            "normalise": rule.normalise,
            "n_group": self.n_group,
            "topk_group": self.topk_group,
            "scaling_factor": self.scaling_factor,
            "epsilon": rule.epsilon,
            "min_sum": rule.min_sum,
        }


def _member(method: RoutingMethod | str) -> RoutingMethod:
    expect_type(method, (RoutingMethod, str), "Routing", "method")
    if isinstance(method, RoutingMethod):
        return method
    names = RoutingMethod.__members__
    expect(method in names, "Routing", "method", f"one of {', '.join(names)}", repr(method))
    return names[method]
