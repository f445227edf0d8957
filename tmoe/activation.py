"""The expert's activation: a name and its constants.

Gated activations combine the two halves of the first projection, ``act(gate, up)``; ungated ones
see one half only, and then ``gate_up_proj`` is (E, I, H). The maths is in
``kernels/activation.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from tmoe.kernels.activation_ref import activate_ref

from .checks import expect, expect_type

GATED = ("swiglu", "geglu", "geglu_tanh", "swiglu_oai", "swiglu_step")
UNGATED = ("silu", "gelu", "gelu_tanh", "relu2", "identity")


@dataclass(frozen=True, slots=True)
class Activation:
    """An activation, hashable. Build it from a name with `Activation.of` or from the constructors
    below.

    ``limit`` is infinite where nothing is clamped; ``alpha`` is used by ``swiglu_oai`` only.

    """

    name: str
    alpha: float = 1.0
    limit: float = math.inf

    def __post_init__(self) -> None:
        expect_type(self.name, str, "Activation", "name")
        known = GATED + UNGATED
        expect(
            self.name in known, "Activation", "name", f"one of {', '.join(known)}", repr(self.name)
        )
        expect_type(self.alpha, (int, float), "Activation", "alpha")
        expect_type(self.limit, (int, float), "Activation", "limit")
        expect(self.limit > 0, "Activation", "limit", "positive", self.limit)
        expect(math.isfinite(self.alpha), "Activation", "alpha", "finite", self.alpha)
        if self.name != "swiglu_oai":
            expect(
                self.alpha == 1.0, "Activation", "alpha", f"left out for {self.name}", self.alpha
            )
        if self.name not in ("swiglu", "swiglu_oai", "swiglu_step"):
            expect(
                self.limit == math.inf,
                "Activation",
                "limit",
                f"left out for {self.name}",
                self.limit,
            )
        if self.name == "swiglu_step":
            expect(
                math.isfinite(self.limit),
                "Activation",
                "limit",
                "finite for swiglu_step",
                self.limit,
            )

    @property
    def gated(self) -> bool:
        """Whether the first projection has a gate half and an up half (2I rows)."""
        return self.name in GATED

    def apply(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        """act(gate, up) in torch, in the dtype that comes in; `up` only where there is a gate."""
        return activate_ref(gate, up, name=self.name, alpha=self.alpha, limit=self.limit)

    @classmethod
    def swiglu(cls, limit: float = math.inf) -> Activation:
        """silu(gate) · up; with `limit`, gate ≤ limit and |up| ≤ limit first (DeepSeek-V4, GLM-5,
        HY-V4)."""
        return cls("swiglu", limit=limit)

    @classmethod
    def swiglu_oai(cls, alpha: float = 1.702, limit: float = 7.0) -> Activation:
        """gpt-oss: g = min(gate, limit), u = clamp(up, ±limit); g · sigmoid(alpha · g) · (u +
        1)."""
        return cls("swiglu_oai", alpha=alpha, limit=limit)

    @classmethod
    def swiglu_step(cls, limit: float) -> Activation:
        """Step-3.7: min(silu(gate), limit) · clamp(up, ±limit)."""
        return cls("swiglu_step", limit=limit)

    @classmethod
    def of(cls, activation: str | Activation, op: str = "Activation.of") -> Activation:
        """`activation` itself, or the one of that name with its model's usual constants. `op` is
        whom an error names."""
        if isinstance(activation, Activation):
            return activation
        expect_type(activation, (str, Activation), op, "activation")
        wanted = f"one of {', '.join(GATED + UNGATED)}"
        expect(activation in GATED + UNGATED, op, "activation", wanted, repr(activation))
        if activation == "swiglu_oai":
            return cls.swiglu_oai()
        return cls(activation)
