"""tmoe's layers with a part of their weights: what `parallelize` turns them into."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..formats import QuantizedTensor
from ..nn import Experts, MoE, SharedExpert
from ..nn.lora import read_adapted
from ..ops import fused_experts
from . import autograd
from .choose import ExchangeDecision
from .codes import codes_of
from .expert_parallel import ExpertParallel
from .groups import Group
from .local import Rows


class ParallelExperts(Experts):
    """`Experts` of which this rank holds a part. ``num_experts`` and ``intermediate_size`` are the
    whole layer's; the parameters have what is here: ``parallel.placement`` and ``parallel.layout``
    say what that is.

    `forward` takes this rank's tokens, with global ids, and returns their whole sums. Where tokens
    differ between ranks, all of them must call it, also those without tokens.
    """

    parallel: ExpertParallel

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """x (T, H), topk_ids (T, K), topk_weights (T, K) -> (T, H) in the dtype of x."""
        return self.run(x, topk_ids, topk_weights, None)[0]

    def run(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, beside: Any
    ) -> tuple[Tensor, Tensor | None]:
        """`forward`, and what `beside()` returned, which is called while tokens are under way."""
        y, other = self.parallel.run(
            x, topk_weights, topk_ids, self.local_experts, beside, codes_of(self),
            trained=self._trained,
        )  # fmt: skip
        return y.to(x.dtype), other

    def explain_exchange(self, num_tokens: int, top_k: int) -> ExchangeDecision:
        """See `ExpertParallel.explain`."""
        codes, dtype = codes_of(self), self.down_proj.dtype
        gradients = self._trained and torch.is_grad_enabled()
        return self.parallel.explain(num_tokens, self.hidden_size, top_k, dtype, codes, gradients)

    @property
    def _trained(self) -> bool:
        return any(parameter.requires_grad for parameter in self.parameters())

    def local_experts(self, rows: Rows, out_dtype: torch.dtype) -> Tensor:
        """What this rank's experts say to rows: (R, H) in `out_dtype`."""
        parallel, first = self.parallel, self._first
        coded = isinstance(rows.x, QuantizedTensor)
        gate_up, gate_up_lora = read_adapted(self, first)
        down, down_lora = read_adapted(self, "down_proj")
        return fused_experts(
            rows.x,
            parallel.weight(gate_up),
            parallel.weight(down),
            rows.weights,
            rows.slots,
            activation=self.activation,
            scheme=self.scheme,
            gate_up_bias=parallel.bias(getattr(self, f"{first}_bias")),
            down_bias=parallel.bias_once(self.down_proj_bias),
            interleaved=self.interleaved,
            weight_on_input=self.weight_on_input,
            first_expert=rows.first,
            num_experts=rows.num_slots,
            input_scale=None if coded else self.input_scale,
            hidden_scale=self.hidden_scale,
            gate_up_lora=parallel.adapter(gate_up_lora, first=True),
            down_lora=parallel.adapter(down_lora, first=False),
            out_dtype=out_dtype,
        )

    def extra_repr(self) -> str:
        experts = len(self.parallel.placement.ranks[self.parallel.layout.experts.rank])
        here = f"{experts} experts of width {self.down_proj.shape[-1]} here"
        return f"{super().extra_repr()}, {self.parallel.layout}, {here}"


class ParallelSharedExpert(SharedExpert):
    """A shared expert with a part of its width; the parts of a sum are added up in float32."""

    group: Group

    def forward(self, x: Tensor) -> Tensor:
        """x (..., H), the same on all ranks of the group -> (..., H)."""
        part = super().forward(autograd.copy_to_all(x, self.group))
        wide = part.to(autograd.wide(part.dtype), copy=True)
        return autograd.sum_over_all(wide, self.group, "adding up the shared expert").to(part.dtype)


class ParallelMoE(MoE):
    """`MoE` on several ranks: the shared expert runs while tokens are on their way."""

    experts: ParallelExperts

    def forward(self, x: Tensor, topk_ids: Tensor | None = None) -> Tensor:
        """x (..., H) of this rank -> the same shape and dtype."""
        tokens, topk_weights, topk_ids = self._routed(x, topk_ids)
        beside = None if self.shared_expert is None else lambda: self._shared(x)
        y, shared = self.experts.run(tokens, topk_ids, topk_weights, beside)
        y = y.reshape(x.shape)
        return (y if shared is None else y + shared).to(x.dtype)
