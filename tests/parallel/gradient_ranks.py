"""What ranks run: the gradient through frozen quantised experts that are divided among them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.checking import assert_matches
from tests.nn.test_training import SPREAD
from tests.parallel.cases import Case, make_layer, make_whole, spread, tokens_of


def through_codes(rank: int, case: Case) -> None:
    """To x and the router; the truth is in float64, with the numbers of the codes."""
    whole, layer = make_whole(case), spread(case, make_whole(case))
    exact = make_layer(case).double()
    with torch.no_grad():
        for name in ("gate_up_proj", "down_proj"):
            numbers = getattr(whole.experts, name).dequantize()
            exact.experts.get_parameter(name).copy_(numbers)
    for model in (whole, layer):
        model.gate.requires_grad_(True)
    everyone = tokens_of(case)
    owner = layer.experts.parallel.layout.owners.rank
    starts = sum(len(x) for x in everyone[:owner])
    mine = slice(starts, starts + len(everyone[owner]))
    x_all = torch.cat(everyone)
    dy = torch.randn(x_all.shape).to(x_all)

    def gradients(model: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
        x = x.detach().clone().requires_grad_()
        return list(torch.autograd.grad(model(x), [x, model.gate.weight], dy))

    got = gradients(layer, x_all[mine], dy[mine])
    truth, naive = gradients(exact, x_all.double(), dy.double()), gradients(whole, x_all, dy)
    if layer.experts.parallel.layout.owners.size > 1:  # the router's is that of a rank's own tokens
        dist.all_reduce(got[1], group=layer.experts.parallel.layout.owners.handle)
    assert all(gradient.any() for gradient in got)
    assert_matches(got[0], truth[0][mine], naive[0][mine], factor=SPREAD)
    assert_matches(got[1], truth[1], naive[1], factor=SPREAD)
