"""A right call of a FlashInfer entry point -> calls with one thing wrong each, by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.backends.flashinfer.calling import E, Tokens, packed
from tests.backends.flashinfer.stand_in import undo
from tmoe.backends.flashinfer.layouts import as_bytes, shuffled_row_indices

Keywords = dict[str, Any]
# cutlass needs the scale of the input only where it quantises it itself.
UNUSED = ("quant_scales 3 of 4", "quant_scales 0 of 6")


def wrong_calls(keywords: Keywords, tokens: Tokens) -> Iterator[tuple[str, Keywords]]:
    for name, value in _tensors(keywords):
        if name.startswith(("topk_ids", "token_", "output")) or (
            name in UNUSED and keywords["input"].dtype.itemsize == 1
        ):
            continue
        for what, other in _wrong_tensors(value):
            if other.shape != value.shape or not _same(other, value):
                yield f"{name} {what}", _with(keywords, name, other)
    yield from _wrong_routing(keywords, tokens)
    yield from _wrong_flags(keywords)
    yield from _wrong_units(keywords)
    for name, value in keywords.items():
        if isinstance(value, Tensor):
            yield f"without {name}", {n: v for n, v in keywords.items() if n != name}


def _tensors(keywords: Keywords) -> Iterator[tuple[str, Tensor]]:
    for name, value in keywords.items():
        if isinstance(value, Tensor):
            yield name, value
        elif name == "quant_scales":
            yield from ((f"{name} {n} of {len(value)}", scale) for n, scale in enumerate(value))


def _with(keywords: Keywords, name: str, value: Tensor) -> Keywords:
    name, _, place = name.partition(" ")
    if not place:
        return keywords | {name: value}
    at = int(place.split()[0])
    scales = keywords[name]
    return keywords | {name: [*scales[:at], value, *scales[at + 1 :]]}


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(as_bytes(a), as_bytes(b))


def _wrong_tensors(value: Tensor) -> Iterator[tuple[str, Tensor]]:
    plain = as_bytes(value)
    if value.dtype in (torch.float32, torch.bfloat16, torch.float16):
        yield "doubled", value * 2
        yield "in fp64", value.double()
    if value.ndim >= 2:
        yield "not contiguous", plain.mT.contiguous().mT.view(value.dtype)
        yield "without a row", value[:, 1:].contiguous()
    if value.ndim >= 1 and len(value) == E:
        yield "of other experts", plain.roll(1, 0).view(value.dtype)
        yield "of fewer experts", value[1:].contiguous()
    if value.ndim >= 2 and len(value) == E:
        rows = 2 if value.ndim == 4 else 1
        for what, order in _orders(value.shape[rows]):
            yield what, plain.index_select(rows, order).view(value.dtype)


def _orders(rows: int) -> Iterator[tuple[str, Tensor]]:
    """Wrong ones."""
    if rows % 2 == 0:
        yield "with swapped halves", torch.arange(rows).roll(rows // 2)
        yield "with swapped pairs", torch.arange(rows).view(-1, 2).flip(1).flatten()
    for tile in (64, 128):
        if rows % (tile // 4) == 0:
            order = shuffled_row_indices(rows, tile)
            yield f"shuffled, once more or at all, for {tile}", order
            yield f"unshuffled, once more or at all, for {tile}", order.argsort()


def _wrong_routing(keywords: Keywords, tokens: Tokens) -> Iterator[tuple[str, Keywords]]:
    for what, other in (
        ("doubled weights", replace(tokens, weights=tokens.weights * 2)),
        ("weights of other slots", replace(tokens, weights=tokens.weights.flip(1))),
        ("ids of other experts", replace(tokens, ids=(tokens.ids + 1) % E)),
    ):
        given = {"token_selected_experts": other.ids, "token_final_scales": other.weights}
        yield (
            what,
            keywords | given
            if "input" in keywords
            else keywords | {"topk_ids": (other.ids, other.weights)},
        )
    if "topk_ids" in keywords:
        low = tokens.weights.bfloat16().view(torch.int16).int()
        yield "packed without a mask", keywords | {"topk_ids": tokens.ids << 16 | low}
        yield "packed in int64", keywords | {"topk_ids": packed(tokens.ids, tokens.weights).long()}
        yield "a list of ids", keywords | {"topk_ids": [tokens.ids, tokens.weights]}


def _wrong_flags(keywords: Keywords) -> Iterator[tuple[str, Keywords]]:
    for name, value in keywords.items():
        if isinstance(value, bool):
            yield f"{name}={not value}", keywords | {name: not value}
        elif name in ("num_experts", "top_k", "intermediate_size", "local_num_experts"):
            yield f"{name}={value // 2}", keywords | {name: value // 2}
        elif name in ("n_group", "local_expert_offset", "routed_scaling_factor"):
            yield f"{name}=2", keywords | {name: 2}
    other = 4 if keywords["activation_type"] != 4 else 3
    yield "another gate", keywords | {"activation_type": other}
    yield "an activation without a gate", keywords | {"activation_type": 6}


def _wrong_units(keywords: Keywords) -> Iterator[tuple[str, Keywords]]:
    """What NVFP4's and per-tensor FP8's constants would be elsewhere; scales that are plain."""
    gate = keywords.get("output1_scale_gate_scalar", keywords.get("output1_scales_gate_scalar"))
    for name in ("gemm1_beta", "gemm1_clamp_limit", "gemm1_bias"):
        if gate is not None and keywords.get(name) is not None:
            bias = keywords[name]
            factor = gate[:, None] if bias.ndim == 2 else gate
            yield f"{name} in natural units", keywords | {name: bias * factor}
    for name in ("gemm1", "gemm2"):
        codes, scale = keywords.get(f"{name}_weights"), keywords.get(f"{name}_weights_scale")
        if scale is None or scale.dtype == torch.float32:
            continue
        per_byte = 2 if codes.dtype == torch.uint8 else 1
        vector = codes.shape[2] * per_byte // scale.shape[2]
        format = {(2, 16): "nvfp4", (2, 32): "mxfp4", (1, 32): "mxfp8"}[per_byte, vector]
        plain = undo.unswizzled(scale, codes, format).contiguous().view(scale.dtype)
        yield f"{name}'s scales not swizzled", keywords | {f"{name}_weights_scale": plain}
