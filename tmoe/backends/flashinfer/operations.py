"""FlashInfer's router, quantisers and grouped GEMMs as one backend: each call by keyword.

What a call lacks beside ours is done around it: a NaN logit becomes -inf, rows are moved apart for
the grouped GEMM and back again. That takes launches of its own, so that Triton stands first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...dispatch import verify
from ...dispatch.problem import Problem, Routed, RouteInputs
from ...formats import QuantizedTensor
from ...formats.compute import quantize_parts
from ...formats.layouts import swizzle_scale, transpose_scale
from ...formats.recipe import Recipe
from ...formats.scheme import SCHEMES
from ...options import current
from ...routing import Routing
from . import installed, operations_support
from .group_layouts import (
    numbered,
    padded_size,
    padded_starts,
    place_of,
    scale_size,
    scale_starts,
)
from .operations_support import GEMMS, QUANTIZERS, ROUTER


class FlashInferOperations:
    """See `tmoe.dispatch.backend.Backend` for what the methods take and return."""

    name = "flashinfer"
    is_compared = True

    def why_not(self, problem: Problem) -> str | None:
        found = verify.refusal(self.name, problem) if current().verify else None
        return operations_support.why_not(problem) or found

    def form(self, problem: Problem) -> str:
        if not current().verify:
            return "not compared with Triton"
        agrees = verify.is_known(self.name, problem)
        return "agrees with Triton" if agrees else "to be compared with Triton at its first call"

    def route(self, logits: Tensor, routing: Routing, inputs: RouteInputs) -> Routed:
        (T, E), K = logits.shape, routing.top_k
        # The kernel takes a NaN for the largest of all.
        is_lost = logits.isnan() | ~logits.isfinite().any(dim=1, keepdim=True)
        if inputs.bias is None:
            bias = logits.new_zeros(E)
        else:
            bias = inputs.bias.float().nan_to_num(nan=torch.finfo(torch.float32).min).contiguous()
        weights, ids = logits.new_empty(T, K), logits.new_empty(T, K, dtype=torch.int32)
        keywords = {
            "scores": logits.masked_fill(is_lost, -torch.inf).contiguous(),
            "bias": bias,
            "n_group": routing.n_group,
            "topk_group": routing.topk_group,
            "topk": K,
            "routed_scaling_factor": routing.scaling_factor,
            "topk_values": weights,
            "topk_indices": ids,
            "launch_with_pdl": False,
        }
        installed.call(ROUTER.name, keywords, {"backend": "default"})
        return Routed(weights, ids)

    def quantize(
        self, x: Tensor, recipe: Recipe, scale: Tensor | None, global_scale: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        format = recipe.format
        keywords: dict[str, Any] = {
            "input": x.reshape(-1, x.shape[-1]).contiguous(),
            "is_sf_swizzled_layout": False,
        }
        if format.name == "mxfp8":
            keywords["alignment"] = 32
        else:
            keywords |= {"global_scale": None, "sf_vec_size": 32, "sf_use_ue8m0": True}
        optional = {"backend": "cuda", "nvfp4_4over6": None}
        codes, scales = installed.call_for_all(QUANTIZERS[format.name].name, keywords, optional)
        codes = codes.view(format.element.storage).view(format.data_shape(x.shape))
        shape = format.scale_shape(x.shape, recipe.block_shape)
        return codes, scales.view(format.scale.storage).view(shape), None

    def grouped_gemm(
        self,
        a: Tensor,
        b: Tensor,
        expert_offsets: Tensor,
        bias: Tensor | None,
        out: Tensor | None = None,
        scheme: str | None = None,
        scale: Tensor | None = None,
    ) -> Tensor:
        assert isinstance(b, QuantizedTensor) and scheme is not None
        (E, N, _), S, offsets = b.shape, a.shape[0], expert_offsets.contiguous()
        inputs = SCHEMES[scheme].inputs
        assert inputs is not None
        codes, scales, _ = quantize_parts(a, inputs, None, None)
        starts, size = padded_starts(offsets), padded_size(S, E)
        source = place_of(numbered(size, offsets), starts, offsets, S)
        y = a.new_empty(size, N)
        keywords: dict[str, Any] = {
            "a": codes.view(torch.uint8)[source].view(codes.dtype),
            "b": b.data.contiguous(),
            "m_indptr": starts,
            "mma_sm": 1,
            "out": y,
        }
        if scheme == "fp8_block":
            keywords |= {
                "a_scale": transpose_scale(scales[source]),
                "b_scale": transpose_scale(b.scale.float()),
                "scale_granularity_mnk": (1, 128, 128),
                "scale_major_mode": "MN",
            }
        else:
            tiles = numbered(scale_size(size, E), offsets)
            keywords |= {
                "a_scale": swizzle_scale(scales[place_of(tiles, scale_starts(starts), offsets, S)]),
                "b_scale": swizzle_scale(b.scale),
                "tile_m": 128,
                "tile_n": 128,
                "tile_k": 128,
                "swap_ab": True,
            }
        installed.call(GEMMS[scheme].name, keywords, {"backend": "trtllm"})
        rows = numbered(S, offsets)
        kept = (rows < offsets[-1])[:, None]
        zero = y.new_zeros(())
        return torch.where(kept, y[place_of(rows, offsets, starts, size)], zero, out=out)
