"""What a routing method does, as data; ten of them have names.

With x the logits of a token, b the selection bias, c the scaling factor, K = top_k:

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

With groups, a group's score is the sum of its two best selection scores; only the experts of the
``topk_group`` best groups can be selected. Scores are fp32. Of equal scores the lower index wins,
of equal groups too. The maths is in ``kernels/route.py``. Names and formulas are those of
FlashInfer's ``RoutingMethodType``, version 0.7.4.
"""

from __future__ import annotations

import enum
import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from ..checks import expect, expect_type

# The smallest fp32 number. As min_sum it makes weights of a sum of zeros 0, not NaN, and changes
# no other.
TINY = 2.0**-149

CHOICES = {
    "score": ("logit", "softmax", "sigmoid", "sqrtsoftplus"),
    "weight": ("score", "sigmoid", "softmax", "sparsemixer"),
    "group_score": (None, "top2", "max"),
    "ruled_out": ("never", "zero"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRule:
    """What a method does with a token's logits x, in the order in which it does it.

    Raises ``ValueError`` or ``TypeError`` for a value that isn't known and for one without effect.
    """

    logit_scale: float = 1.0  # x = logit_scale · logit
    logit_softcap: float = 0.0  # then x = softcap · tanh(x / softcap); 0: none
    score: str = "logit"  # of every expert: "logit" (x), "softmax", "sigmoid", "sqrtsoftplus"
    takes_bias: bool = False  # a bias (E,) may be added to the scores, for the selection only
    group_score: str | None = None  # of a group: "top2" (sum of the two best) or "max"; None: none
    ruled_out: str = "never"  # experts of other groups are left out; "zero": they compete with 0
    weight: str = "score"  # of a selected one: its score, "sigmoid" of x, "softmax" over the K
    jitter: float = 0.0  # weight="sparsemixer": how near, relatively, the others have to be
    num_shared: int = 0  # more logits behind the E, of experts that are always selected
    renormalize: bool = False  # divide by max(sum of the weights + epsilon, min_sum)
    epsilon: float = 0.0
    min_sum: float = 0.0
    takes_scaling_factor: bool = False
    takes_expert_scale: bool = False  # a factor (E,), looked up for each selected expert
    weight_on_input: bool = False  # the weight multiplies the expert's input, not its output

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in CHOICES:
                names = CHOICES[field.name]
                wanted = "one of " + ", ".join(map(str, names))
                expect_type(value, (str, type(None)), "RoutingRule", field.name)
                expect(value in names, "RoutingRule", field.name, wanted, repr(value))
            elif field.type == "float":
                expect_type(value, (float, int), "RoutingRule", field.name)
                expect(math.isfinite(value), "RoutingRule", field.name, "finite", value)
                object.__setattr__(self, field.name, float(value))
            else:
                kind = bool if field.type == "bool" else int
                expect_type(value, kind, "RoutingRule", field.name)
        self._check()

    def _check(self) -> None:
        def check(ok: bool, arg: str, wanted: str) -> None:
            expect(ok, "RoutingRule", arg, wanted, getattr(self, arg))

        check(self.logit_scale != 0, "logit_scale", "not 0")
        check(self.logit_softcap >= 0, "logit_softcap", "at least 0")
        for name in ("epsilon", "min_sum"):
            check(getattr(self, name) >= 0, name, "at least 0")
            ok = self.renormalize or getattr(self, name) == 0
            check(ok, name, "0 where renormalize is False")
        if self.group_score is None:
            check(self.ruled_out == "never", "ruled_out", "never where there are no groups")
        check(self.num_shared >= 0, "num_shared", "at least 0")
        if self.num_shared:
            ok = self.score != "softmax"
            check(ok, "score", "one that needs no sum over the experts, with num_shared")
        if self.weight == "sparsemixer":
            check(self.jitter >= 0, "jitter", "at least 0")
            check(self.score == "logit", "score", "logit with sparsemixer")
            check(not self.takes_bias, "takes_bias", "False with sparsemixer")
            check(self.group_score is None, "group_score", "None with sparsemixer")
            check(self.num_shared == 0, "num_shared", "0 with sparsemixer")
        else:
            check(self.jitter == 0, "jitter", "0 without sparsemixer")

    @property
    def takes_groups(self) -> bool:
        """Whether the experts may be divided into groups."""
        return self.group_score is not None

    @property
    def kernel_arguments(self) -> dict[str, object]:
        """The keywords of ``kernels.route.route`` and ``route_ref`` that the rule decides."""
        arguments = asdict(self)
        for name in ("takes_bias", "takes_scaling_factor", "takes_expert_scale", "weight_on_input"):
            del arguments[name]
        arguments["group_score"] = self.group_score or "top2"
        return arguments


class RoutingMethod(enum.Enum):
    """The rules that have a name; the module's docstring says what each one computes."""

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


_SIGMOID_BIAS: dict[str, Any] = dict(
    score="sigmoid", takes_bias=True, renormalize=True, epsilon=1e-20, takes_scaling_factor=True
)

RULES = {
    RoutingMethod.Default: RoutingRule(score="softmax"),
    RoutingMethod.Renormalize: RoutingRule(weight="softmax"),
    RoutingMethod.RenormalizeNaive: RoutingRule(score="softmax", renormalize=True),
    RoutingMethod.TopK: RoutingRule(),
    RoutingMethod.Sigmoid: RoutingRule(score="sigmoid"),
    RoutingMethod.SigmoidRenorm: RoutingRule(score="sigmoid", renormalize=True, min_sum=1e-20),
    RoutingMethod.TopKSigmoid: RoutingRule(weight="sigmoid"),
    RoutingMethod.Llama4: RoutingRule(weight="sigmoid", weight_on_input=True),
    RoutingMethod.MiniMax2: RoutingRule(**_SIGMOID_BIAS),
    RoutingMethod.DeepSeekV3: RoutingRule(**_SIGMOID_BIAS, group_score="top2"),
}
