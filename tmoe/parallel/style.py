"""`DivideExperts`: `parallelize` as one of torch's parallel styles."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from .layout import Dims
from .parallelize import parallelize
from .placement import Placement


class DivideExperts(ParallelStyle):
    """`parallelize` for a plan of `torch.distributed.tensor.parallel.parallelize_module`.

        plan = {
            "model.layers.*.self_attn.q_proj": ColwiseParallel(),
            "model.layers.*.mlp": DivideExperts(ep="x"),
        }
        parallelize_module(model, mesh, plan)

    Each module that the plan names is given to `parallelize`, with the mesh: a `tmoe.MoE`, a
    `tmoe.Experts`, or something that contains them or experts of transformers. What comes in and
    goes out are ordinary tensors, the same on all ranks unless `dp` says otherwise.
    """

    def __init__(
        self,
        *,
        tp: Dims = None,
        ep: Dims = None,
        dp: Dims = None,
        placement: Placement | None = None,
        exchange: str | None = None,
        sums: torch.dtype = torch.float32,
    ) -> None:
        """The arguments of `parallelize`, which says what they mean and what is refused."""
        super().__init__()
        self.tp, self.ep, self.dp = tp, ep, dp
        self.placement, self.exchange, self.sums = placement, exchange, sums

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return parallelize(
            module, device_mesh, tp=self.tp, ep=self.ep, dp=self.dp,
            placement=self.placement, exchange=self.exchange, sums=self.sums,
        )  # fmt: skip
