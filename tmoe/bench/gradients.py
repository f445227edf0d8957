"""The gradients of the experts in torch, and how a benchmark decides that ours are right."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ..activation import Activation
from .reference import assert_matches, some_rows

Tensors = Mapping[str, Tensor]
CHECKED_EXPERTS = 2
BY_TOKEN = ("x", "topk_weights")


def experts_gradients_ref(
    dtype: torch.dtype,
    tensors: Tensors,
    topk_ids: Tensor,
    dy: Tensor,
    *,
    activation: str | Activation = "swiglu",
    interleaved: bool = False,
    weight_on_input: bool = False,
) -> dict[str, Tensor]:
    """The output "y" and the gradient of each of `tensors`, expert after expert in `dtype`.

    tensors: what `tmoe.fused_experts` is differentiable in, by its names. Products are torch's in
    `dtype` and so is the activation; routing weights, and the sums over experts, are in fp32 or
    fp64. Gradients have `dtype`; what gets none is 0.
    """
    act = Activation.of(activation)
    wide = torch.promote_types(dtype, torch.float32)
    x, E = tensors["x"], len(tensors["down_proj"])
    experts = {name: tensor for name, tensor in tensors.items() if name not in BY_TOKEN}
    found = {name: torch.zeros_like(tensor, dtype=dtype) for name, tensor in tensors.items()}
    found |= {"y": torch.zeros_like(x, dtype=wide), "x": torch.zeros_like(x, dtype=wide)}
    found["topk_weights"] = torch.zeros_like(tensors["topk_weights"], dtype=wide)
    for e in (e for e in topk_ids.unique().tolist() if 0 <= e < E):
        t, k = torch.nonzero(topk_ids == e, as_tuple=True)
        leaves = {name: tensor[e].to(dtype) for name, tensor in experts.items()}
        leaves["x"] = x[t].to(dtype)
        leaves["topk_weights"] = tensors["topk_weights"][t, k].to(wide)
        for leaf in leaves.values():
            leaf.requires_grad_()
        weight, rows = leaves["topk_weights"][:, None], leaves["x"]
        if weight_on_input:
            rows = (weight * rows).to(dtype)
        hidden = F.linear(rows, leaves["gate_up_proj"], leaves.get("gate_up_bias"))
        halves = (hidden[:, ::2], hidden[:, 1::2]) if interleaved else hidden.chunk(2, 1)
        activated = act.apply(*halves) if act.gated else act.apply(hidden)
        rows = F.linear(activated.to(dtype), leaves["down_proj"], leaves.get("down_bias"))
        rows = rows if weight_on_input else weight * rows
        gradients = torch.autograd.grad(rows, list(leaves.values()), dy[t].to(rows.dtype))
        found["y"].index_add_(0, t, rows.detach().to(wide))
        for name, gradient in zip(leaves, gradients, strict=True):
            if name == "x":
                found["x"].index_add_(0, t, gradient.to(wide))
            elif name == "topk_weights":
                found["topk_weights"][t, k] = gradient
            else:
                found[name][e] = gradient
    return {name: tensor.to(dtype) for name, tensor in found.items()} | {
        "topk_weights": found["topk_weights"]
    }


def check_gradients(
    got: Tensors, tensors: Tensors, topk_ids: Tensor, dy: Tensor, *, factor: float = 2.0
) -> None:
    """SwiGLU experts: gradients of x and topk_weights of some tokens, and of some experts' weights,
    within `factor` times the error of torch in the same dtype; no NaN in any."""
    for name, gradient in got.items():
        assert gradient.isfinite().all(), f"{name}: not finite"
    tokens = some_rows(len(dy), dy.device)
    some = {n: t[tokens] if n in BY_TOKEN else t for n, t in tensors.items()}
    _compare(got, tokens, BY_TOKEN, some, topk_ids[tokens], dy[tokens], factor)
    experts = some_rows(len(tensors["down_proj"]), dy.device, CHECKED_EXPERTS)
    few = {n: t if n in BY_TOKEN else t[experts] for n, t in tensors.items()}
    ids = torch.full_like(topk_ids, -1)
    for i, expert in enumerate(experts.tolist()):
        ids[topk_ids == expert] = i
    _compare(got, experts, ("gate_up_proj", "down_proj"), few, ids, dy, factor)


def _compare(
    got: Tensors, at: Tensor, names: tuple[str, ...], tensors: Tensors, ids: Tensor, dy: Tensor,
    factor: float,
) -> None:  # fmt: skip
    truth = experts_gradients_ref(torch.float64, tensors, ids, dy)
    naive = experts_gradients_ref(dy.dtype, tensors, ids, dy)
    for name in names:
        try:
            assert_matches(got[name][at], truth[name], naive[name], factor=factor)
        except AssertionError as error:
            raise AssertionError(f"gradient of {name}: {error}") from error
