"""MoE: a router, its experts and, where the model has one, a shared expert.

y = Σ_k topk_weights[k] · expert[topk_ids[k]](x)  +  shared_expert(x) (· sigmoid(gate(x)))
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from ..activation import Activation
from ..checks import expect, expect_size, expect_tensor, expect_type
from ..routing import Routing
from .arguments import expect_flags, expect_parameter_dtype, expect_scheme_name, expect_sizes
from .experts import Experts
from .router import Router
from .shared_expert import SharedExpert

# Other names that transformers has for the same parts; load_state_dict takes them too.
RENAMES = {"router.": "gate.", "shared_experts.": "shared_expert."}


class MoE(nn.Module):
    """A Mixture-of-Experts layer.

        layer = tmoe.MoE(2048, 768, tmoe.Routing(128, 8, "Renormalize"))  # Qwen3-30B-A3B
        y = layer(x)  # (..., 2048) -> (..., 2048)

    Parts, named as in transformers: ``gate`` (`Router`), ``experts`` (`Experts`), and where asked
    for ``shared_expert`` (`SharedExpert`) and ``shared_expert_gate`` (`nn.Linear` to 1). The state
    dict of a Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE or DeepSeek-V3 block of transformers 5 loads as
    it is: ``router.`` is read as ``gate.``, and ``shared_experts.`` as ``shared_expert.``.

    The routing's scaling factor is part of the routing weights, so the shared expert isn't scaled.
    Routing weights stay fp32, where some transformers routers round them to 16 bits.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        routing: Routing,
        *,
        activation: str | Activation = "swiglu",
        scheme: str | None = "bf16",
        shared_intermediate_size: int = 0,
        shared_expert_gate: bool = False,
        bias: bool = False,
        router_bias: bool = False,
        interleaved: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Build and initialise the layer; on ``device="meta"``, call ``to_empty`` and then
        ``reset_parameters``, or load a state dict with ``assign=True``.

        Args:
            hidden_size: H, the width of the layer's input and output.
            intermediate_size: I, the width of one expert.
            routing: number of experts, top-k, method; also where the routing weight is applied.
            activation: a name or a `tmoe.Activation`; the shared expert has the same one.
            scheme: "bf16" means not quantised; else one of `tmoe.formats.SCHEMES`, number formats
                of the expert weights and of their inputs. The shared expert isn't quantised.
            shared_intermediate_size: width of the shared expert; 0 for none.
            shared_expert_gate: multiply the shared expert by sigmoid(Linear(x)) (Qwen2-MoE).
            bias: biases on both projections of the experts.
            router_bias: bias on the router's logits.
            interleaved: the rows of ``gate_up_proj`` are g0, u0, g1, u1, ... (gpt-oss).
            device, dtype: of the parameters; a floating-point dtype of 16, 32 or 64 bits.

        Raises:
            TypeError: an argument of the wrong type.
            ValueError: a size below 1, an unknown activation or scheme, another dtype, a gate
                without a shared expert, interleaved rows without a gate.
        """
        super().__init__()
        expect_type(routing, Routing, "MoE", "routing")
        expect_sizes("MoE", hidden_size=hidden_size, intermediate_size=intermediate_size)
        expect_parameter_dtype("MoE", dtype)
        expect_scheme_name("MoE", scheme)
        activation = Activation.of(activation, "MoE")
        shared = shared_intermediate_size
        expect_size(shared, "MoE", "shared_intermediate_size", least=0)
        expect_flags("MoE", shared_expert_gate=shared_expert_gate, router_bias=router_bias)
        wanted = "False where shared_intermediate_size is 0"
        expect(shared > 0 or not shared_expert_gate, "MoE", "shared_expert_gate", wanted, True)
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.routing = routing

        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.gate = Router(hidden_size, routing, bias=router_bias, **where)
        self.experts = Experts(
            routing.num_logits,
            hidden_size,
            intermediate_size,
            activation=activation,
            scheme=scheme,
            bias=bias,
            interleaved=interleaved,
            weight_on_input=routing.weight_on_input,
            **where,
        )
        self.shared_expert = (
            SharedExpert(hidden_size, shared, activation=activation, **where) if shared else None
        )
        self.shared_expert_gate = (
            nn.Linear(hidden_size, 1, bias=False, **where) if shared_expert_gate else None
        )

    @classmethod
    def quantized(cls, layer: MoE, scheme: str, **scales: Tensor | None) -> MoE:
        """A layer with the weights of `layer` (not quantised), those of the experts as the scheme
        has them; everything else is shared. `scales`: as for `Experts.quantized`."""
        expect_type(layer, MoE, "MoE.quantized", "layer")
        result = copy.copy(layer)
        result._modules = dict(layer._modules)
        result.experts = Experts.quantized(layer.experts, scheme, **scales)
        return result

    def reset_parameters(self) -> None:
        """Initialise every part, as the constructor did."""
        for part in self.children():
            part.reset_parameters()  # type: ignore[operator]

    def forward(self, x: Tensor, topk_ids: Tensor | None = None) -> Tensor:
        """x (..., H) -> the same shape and dtype. Any number of tokens, zero included.

        `topk_ids` (T, K), of an earlier run or of a table, take the place of the selection.
        """
        tokens, topk_weights, topk_ids = self._routed(x, topk_ids)
        y = self.experts(tokens, topk_ids, topk_weights)
        if x.ndim != 2:  # not as a view, on which FSDP2's hooks could get lost
            y = torch.ops.aten._unsafe_view.default(y, x.shape)
        if self.shared_expert is not None:
            y = y + self._shared(x)
        return y.to(x.dtype)

    def _routed(self, x: Tensor, topk_ids: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """x as (T, H), and the weights and ids (T, K) of its tokens."""
        expect_tensor(x, "MoE", "x")
        H = self.hidden_size
        ok = x.ndim > 0 and x.shape[-1] == H
        expect(ok, "MoE", "x", f"of shape (..., {H})", tuple(x.shape))
        tokens = x.reshape(-1, H)
        _, topk_weights, topk_ids = self.gate(tokens, topk_ids)
        return tokens, topk_weights, topk_ids

    def _shared(self, x: Tensor) -> Tensor:
        """What the shared expert, which there has to be, says to x."""
        assert self.shared_expert is not None
        shared: Tensor = self.shared_expert(x)
        if self.shared_expert_gate is not None:
            shared = torch.sigmoid(self.shared_expert_gate(x)) * shared
        return shared

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for key in list(state_dict):
            for theirs, ours in RENAMES.items():
                if key.startswith(prefix + theirs):
                    name = prefix + ours + key.removeprefix(prefix + theirs)
                    state_dict[name] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return f"hidden_size={self.hidden_size}, intermediate_size={self.intermediate_size}"
