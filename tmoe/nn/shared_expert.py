"""SharedExpert: the dense MLP that every token goes through beside its routed experts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..activation import Activation
from .arguments import expect_parameter_dtype, expect_sizes


class SharedExpert(nn.Module):
    """down_proj(act(gate_proj(x), up_proj(x))); without the gate where the activation has none.

    Plain `nn.Linear` layers without bias, named as in transformers' dense MLPs, so that whatever a
    library does to linear layers (LoRA, quantisation, tensor parallelism) applies here too.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str | Activation = "swiglu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`intermediate_size` is the width of the MLP; that of several shared experts added up."""
        super().__init__()
        expect_sizes("SharedExpert", hidden_size=hidden_size, intermediate_size=intermediate_size)
        expect_parameter_dtype("SharedExpert", dtype)
        self.activation = Activation.of(activation, "SharedExpert")

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, device=device, dtype=dtype)

        if self.activation.gated:
            self.gate_proj = linear(hidden_size, intermediate_size)
        self.up_proj = linear(hidden_size, intermediate_size)
        self.down_proj = linear(intermediate_size, hidden_size)

    def reset_parameters(self) -> None:
        """Initialise the linear layers as `nn.Linear` does."""
        for linear in self.children():
            linear.reset_parameters()  # type: ignore[operator]

    def forward(self, x: Tensor) -> Tensor:
        """x (..., H) -> (..., H)."""
        if self.activation.gated:
            return self.down_proj(self.activation.apply(self.gate_proj(x), self.up_proj(x)))
        return self.down_proj(self.activation.apply(self.up_proj(x)))

    def extra_repr(self) -> str:
        return f"activation={self.activation}"
