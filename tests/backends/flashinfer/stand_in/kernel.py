"""What FlashInfer's entry points compute, in fp64, from what they are given.

The arithmetic follows FlashInfer's documentation of them and uses nothing of what it tests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.backends.flashinfer.stand_in.rounding import Rounding
from tests.reference import activation_ref

# Members of ActivationType with a gate, and what they do to it; SwiGLU has numbers of its own.
GATED = {"Swiglu": "", "SwigluBias": "", "SwigluStep": "silu", "Geglu": "gelu"}
GATED |= {"GegluTanh": "gelu_tanh"}
UNGATED = {"Relu2": "relu2", "Silu": "silu", "Gelu": "gelu", "Identity": "identity"}
Number = Tensor | float | None


@dataclass(frozen=True, slots=True)
class Kernel:
    """Scalars are one number, or one per expert; None is the number that changes nothing."""

    activation: str  # a member of ActivationType
    gate_up: Tensor  # fp64 (E, 2I or I, H), rows [gate; up], without per-expert scales
    down: Tensor  # fp64 (E, H, I)
    biases: tuple[Number, Number] = (None, None)
    constants: tuple[Number, Number, Number] = (None, None, None)  # alpha, beta, limit
    input: Number = None  # x is multiplied with this before the first product,
    first: Number = None  # the first product with this,
    hidden: Number = None  # the activation's result with this,
    second: Number = None  # and the second product with this
    natural: bool = True  # biases meet the products after `first` and `second`, or before;
    natural_constants: bool = True  # so do beta and limit
    rounding: Rounding = Rounding()

    def expert(self, e: int, x: Tensor, token_scale: Tensor | None = None) -> Tensor:
        """x (rows, H) fp64 -> (rows, H): the answer of one expert. `token_scale` (rows,) multiplies
        the first product, as if it multiplied x."""
        first, second = self._of(self.first, e), self._of(self.second, e)
        unit1, unit2 = (1.0, 1.0) if self.natural else (first, second)
        x = self.rounding.input(x * self._of(self.input, e))
        acc = x @ self.gate_up[e].T * first
        if token_scale is not None:
            acc = acc * token_scale[:, None]
        acc = self.rounding.first(acc) + self._of(self.biases[0], e, 0.0) * unit1
        unit = 1.0 if self.natural_constants else first
        alpha = self._of(self.constants[0], e)
        beta = self._of(self.constants[1], e, 0.0) * unit
        limit = self._of(self.constants[2], e, math.inf) * unit
        h = self._activated(acc, alpha, beta, limit) * self._of(self.hidden, e)
        y = self.rounding.hidden(h) @ self.down[e].T * second
        return self.rounding.answer(y + self._of(self.biases[1], e, 0.0) * unit2)

    def _activated(self, acc: Tensor, alpha: Tensor, beta: Tensor, limit: Tensor) -> Tensor:
        if self.activation in UNGATED:
            return activation_ref(acc, None, UNGATED[self.activation], 1.0, math.inf)
        gate, up = acc.chunk(2, dim=-1)
        up = torch.maximum(torch.minimum(up, limit), -limit) + beta
        if name := GATED[self.activation]:
            gate = torch.minimum(activation_ref(gate, None, name, 1.0, math.inf), limit)
        else:
            gate = torch.minimum(gate, limit)
            gate = gate / (1 + torch.exp(-alpha * gate))
        return gate * up

    @staticmethod
    def _of(value: Number, e: int, default: float = 1.0) -> Tensor:
        """Of this expert, in fp64: a number, or a row of a matrix."""
        value = torch.as_tensor(default if value is None else value, dtype=torch.float64)
        return value if value.ndim == 0 else value[e]


def experts_answer(
    kernel: Kernel,
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    first_expert: int = 0,
    token_scale: Tensor | None = None,
) -> Tensor:
    """x (T, H), weights and global ids (T, K) -> (T, H), all fp64 but the ids; other ids than the
    kernel's experts are left out. `token_scale` (T,) as in `Kernel.expert`."""
    total = torch.zeros(len(x), kernel.down.shape[1], dtype=torch.float64)
    for e in range(len(kernel.down)):
        token, slot = (ids == first_expert + e).nonzero(as_tuple=True)
        scale = None if token_scale is None else token_scale[token]
        y = kernel.expert(e, x[token], scale)
        total.index_add_(0, token, y * weights[token, slot][:, None])
    return total
