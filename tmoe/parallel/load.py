"""`from_pretrained`: a model whose ranks each read their own experts from the checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .expert_layers import Share
from .layout import Dims
from .parallelize import divide
from .placement import Placement


def from_pretrained(
    path: str | os.PathLike[str],
    mesh: DeviceMesh,
    *,
    tp: Dims = None,
    ep: Dims = None,
    dp: Dims = None,
    placement: Placement | Mapping[str, Placement] | None = None,
    exchange: str | None = None,
    sums: torch.dtype = torch.float32,
    **options: Any,
) -> Any:
    """`tmoe.from_pretrained` and `parallelize` in one: no rank ever holds the experts of others.

        model = tmoe.parallel.from_pretrained(path, mesh, ep="ep", dp="ep", device=f"cuda:{rank}")

    All ranks of the mesh call it. Each reads all of the model but the experts, and of those the
    ones that it will hold: plain ones also only in the part of the width that it will hold,
    quantised ones whole.

    Args:
        path, options: as for `tmoe.from_pretrained`.
        mesh, tp, ep, dp, placement, exchange, sums: as for `parallelize`.

    Returns:
        The model, as `parallelize` leaves one.

    Raises:
        FileNotFoundError, TypeError, ValueError, ImportError: as both; before a tensor is read.
    """
    from ..integrations.transformers.load_model import load_model

    def shares(model: nn.Module) -> dict[str, Share]:  # while it is on the meta device
        return divide(
            model, mesh, tp=tp, ep=ep, dp=dp, placement=placement, exchange=exchange, sums=sums
        )  # fmt: skip

    return load_model(path, shares, **options)
