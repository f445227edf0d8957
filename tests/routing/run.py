"""Make a router of transformers route given logits, and return what it did in our order.

A runner builds a router and calls it: `Plain` knows most of them, its subclasses the others.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

E, HIDDEN = 24, 32  # fewer experts than hidden sizes: a router can make any logits
BIASES = ("e_score_correction_bias", "balancing_biases")  # the router's own
GIVEN_BIASES = ("e_score_correction_bias", "expert_bias")  # an argument: the block's


class Routed(NamedTuple):
    logits: Tensor  # (T, E), as the router's matrix made them; of Inkling (T, E + S)
    weights: Tensor  # (T, K); of Inkling (T, K + S)
    ids: Tensor  # (T, K); of Inkling (T, K + S)


class Plain:
    """A router with one matrix: hidden states -> logits, weights and ids, in any order."""

    def __init__(self, *, batched: bool = False) -> None:
        self.batched = batched  # takes (batch, sequence, hidden)

    def build(self, cls: type[nn.Module], config: Any) -> nn.Module:
        return cls(config)

    def __call__(
        self, router: nn.Module, wanted: Tensor, bias: Tensor | None, logits_in_fp32: bool
    ) -> Routed:
        """Route the logits `wanted`, or what rounding makes of them; `bias` selects."""
        matrix, offset = self.linear(router)
        x = hidden_states(wanted, matrix, offset)
        dtype = torch.float32 if logits_in_fp32 else x.dtype
        offset = None if offset is None else offset.to(dtype)
        logits = F.linear(x.to(dtype), matrix.to(dtype), offset)
        arguments = give_bias(router, bias)
        return self.result(router, router(x[None] if self.batched else x, *arguments), logits)

    def linear(self, router: nn.Module) -> tuple[Tensor, Tensor | None]:
        matrices = [p for p in router.parameters() if p.ndim == 2 and p.shape[0] > 1]
        assert len(matrices) == 1
        bias = getattr(router, "bias", None)
        return matrices[0], bias

    def result(self, router: nn.Module, outputs: Any, logits: Tensor) -> Routed:
        ids = next(out for out in outputs if not out.is_floating_point())
        weights = next(out for out in outputs if out.shape == ids.shape and out is not ids)
        return Routed(logits, weights, ids)

    def canonical(self, weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Our weights and ids as this router would put them."""
        return weights, ids


class Injected(Plain):
    """A router that is more than one matrix: a hook replaces what its last layer makes."""

    def __init__(self, last: str, *, batched: bool = False) -> None:
        super().__init__(batched=batched)
        self.last = last

    def __call__(
        self, router: nn.Module, wanted: Tensor, bias: Tensor | None, logits_in_fp32: bool
    ) -> Routed:
        layer = router.get_submodule(self.last)
        logits = wanted.to(torch.get_default_dtype())
        handle = layer.register_forward_hook(lambda module, args, out: logits.view_as(out))
        x = torch.randn(*((1,) if self.batched else ()), len(wanted), HIDDEN, dtype=logits.dtype)
        arguments = give_bias(router, bias)
        outputs = router(x, *arguments)
        handle.remove()
        return self.result(router, outputs, logits)


class WithLayer(Plain):
    """A router that wants to know its layer."""

    def build(self, cls: type[nn.Module], config: Any) -> nn.Module:
        return cls(config, layer_idx=0)


class Zaya(WithLayer, Injected):
    """The last class means "skip": transformers turns it into expert 0 with weight 0."""

    def canonical(self, weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        skips = ids == E
        return weights.masked_fill(skips, 0), ids.masked_fill(skips, 0)


class Dbrx(Plain):
    """The block selects, so it is built, and its router is called."""

    def linear(self, router: nn.Module) -> tuple[Tensor, Tensor | None]:
        return router.router.layer.weight, None

    def __call__(
        self, router: nn.Module, wanted: Tensor, bias: Tensor | None, logits_in_fp32: bool
    ) -> Routed:
        x = hidden_states(wanted, *self.linear(router))
        logits = router.router(x)
        return Routed(logits, *router.route_tokens_to_experts(logits))


class Llama4(Plain):
    """Dense scores, 0 for what isn't selected."""

    def result(self, router: nn.Module, outputs: Any, logits: Tensor) -> Routed:
        scores = outputs[0]
        assert torch.equal(outputs[1], logits)
        ids = logits.topk(router.top_k, sorted=True).indices
        assert (scores.scatter(1, ids, 0) == 0).all()
        return Routed(logits, scores.gather(1, ids), ids)


class JetMoe(Plain):
    """Slots sorted by expert: put them back."""

    def build(self, cls: type[nn.Module], config: Any) -> nn.Module:
        return cls(config.hidden_size, config.num_local_experts, config.num_experts_per_tok)

    def result(self, router: nn.Module, outputs: Any, logits: Tensor) -> Routed:
        order, _tokens, sorted_weights, counts, _logits = outputs
        weights, ids = torch.zeros_like(sorted_weights), torch.zeros_like(order)
        weights[order] = sorted_weights
        ids[order] = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        return Routed(logits, weights.view(-1, router.top_k), ids.view(-1, router.top_k))


class Inkling(Plain):
    """Shared experts are weighed with the others; `global_scale` isn't part of a routing."""

    def result(self, router: nn.Module, outputs: Any, logits: Tensor) -> Routed:
        _logits, weights, ids, shared_weights = outputs
        E, S = router.num_experts, router.n_shared_experts
        shared = torch.arange(E, E + S).expand(len(ids), S)
        weights = torch.cat([weights, shared_weights], 1)
        return Routed(
            logits, weights / router.global_scale.to(weights.dtype), torch.cat([ids, shared], 1)
        )


class Hash(Plain):
    """Experts from a table, by token."""

    def __call__(
        self, router: nn.Module, wanted: Tensor, bias: Tensor | None, logits_in_fp32: bool
    ) -> Routed:
        vocabulary, top_k = router.tid2eid.shape
        router.tid2eid.copy_(torch.rand(vocabulary, wanted.shape[1]).argsort(1)[:, :top_k])
        x = hidden_states(wanted, router.weight, None)
        return self.result(
            router, router(x, torch.randint(vocabulary, (len(x),))), F.linear(x, router.weight)
        )


def hidden_states(logits: Tensor, matrix: Tensor, offset: Tensor | None) -> Tensor:
    """Hidden states, in the model's dtype, for which the matrix makes these logits."""
    wanted = logits.double() if offset is None else logits.double() - offset.double()
    x = wanted @ torch.linalg.pinv(matrix.double()).T
    return x.to(torch.get_default_dtype())


def give_bias(router: nn.Module, bias: Tensor | None) -> tuple[Tensor, ...]:
    """Set the router's selection bias, or return it as the argument that the block would pass."""
    if bias is None:
        return ()
    if set(inspect.signature(router.forward).parameters) & set(GIVEN_BIASES):
        return (bias,)
    tensors = dict(router.named_buffers()) | dict(router.named_parameters())
    mine = [tensor for name, tensor in tensors.items() if name.endswith(BIASES)]
    assert len(mine) == 1
    mine[0].copy_(bias.view_as(mine[0]))
    return ()
