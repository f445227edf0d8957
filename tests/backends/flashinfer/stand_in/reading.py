"""Prepared weights, by the entry points' keywords -> the kernel that computes with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tests.backends.flashinfer.stand_in import undo
from tests.backends.flashinfer.stand_in.kernel import GATED, Kernel

NO_FAULTS: frozenset[str] = frozenset()


def of_trtllm(
    given: Mapping[str, Any], format: str, activation: str, faults: frozenset[str] = NO_FAULTS
) -> Kernel:
    """For a trtllm entry point; `format` of the weights, `activation` a member's name."""
    gated, apart = activation in GATED, format == "fp8_block"  # its activation is a kernel apart
    tile = 64 if apart else 128
    shuffled = given.get("use_shuffled_weight", True) and "shuffle_ignored" not in faults
    matrices, biases = [], []
    for name in ("gemm1", "gemm2"):
        w, scale = given[f"{name}_weights"], given.get(f"{name}_weights_scale")
        if w.ndim == 4:
            w = undo.unblocked(w)
        if scale is not None and not apart:
            scale = undo.unswizzled(scale, w, format)
            scale = undo.unshuffled(scale, tile) if shuffled else scale
        w = undo.unshuffled(w, tile) if shuffled else w
        bias = given.get(f"{name}_bias")
        bias = undo.unshuffled(bias, tile) if shuffled and bias is not None else bias
        if name == "gemm1" and gated:
            ordered = undo.gate_first if apart else undo.gate_up_of_fused
            w, scale, bias = _each(_halves(ordered, faults), w, scale, bias)
        matrices.append(undo.values_of(w, scale, format))
        biases.append(bias)
    scalars, natural = {}, True
    name = "output{}_scales_{}" if format == "fp8_tensor" else "output{}_scale_{}"
    if given.get(name.format(1, "scalar")) is not None:
        first, hidden = given[name.format(1, "gate_scalar")], given[name.format(1, "scalar")]
        # With a gate it stands in for the scale of the product's up half, too.
        hidden = hidden.double() / first.double() if gated else hidden
        scalars = {"first": first, "hidden": hidden, "second": given[name.format(2, "scalar")]}
        natural = False
    constants = tuple(given.get(f"gemm1_{c}") for c in ("alpha", "beta", "clamp_limit"))
    return Kernel(
        activation, *matrices, biases=tuple(biases), constants=constants, **scalars,
        natural=natural, natural_constants=natural ^ ("limit_in_raw_units" in faults),
    )  # fmt: skip


def of_cutlass(
    given: Mapping[str, Any], format: str, activation: str, faults: frozenset[str] = NO_FAULTS
) -> Kernel:
    """For `cutlass_fused_moe`; the input's scale is the one with which it is quantised inside, or
    was outside."""
    scales, gated = given["quant_scales"] or [], activation in GATED
    block_scales = {"nvfp4": (1, 4), "mxfp4": (0, 2), "fp8_block": (0, 1)}.get(format)
    matrices = []
    for place, w in enumerate((given["fc1_expert_weights"], given["fc2_expert_weights"])):
        scale = None if block_scales is None else scales[block_scales[place]]
        if format in undo.PER_BYTE:
            w = w.view(torch.uint8)
            scale = undo.unswizzled(scale, w, format)
        if place == 0 and gated:
            w, scale = _each(_halves(undo.gate_first, faults), w, scale)
        matrices.append(undo.values_of(w, scale, format))
    names: tuple[str, ...] = ()
    if format == "fp8_tensor":
        names = ("first", "hidden", "second")  # and the input's, for inputs that aren't quantised
    elif format == "nvfp4":
        names = ("input", "", "first", "hidden", "", "second")
    elif format == "mxfp4":
        names = ("", "first", "", "second")
    scalars = {name: scale for name, scale in zip(names, scales, strict=False) if name}
    bias1, bias2 = given["fc1_expert_biases"], given["fc2_expert_biases"]
    (bias1,) = _each(_halves(undo.gate_first, faults), bias1) if gated else (bias1,)
    return Kernel(
        activation, *matrices, biases=(bias1, bias2), **scalars,
        constants=(given["swiglu_alpha"], given["swiglu_beta"], given["swiglu_limit"]),
        natural_constants="limit_in_raw_units" not in faults,
    )  # fmt: skip


def _each(change: Callable[[Tensor], Tensor], *parts: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(None if part is None else change(part) for part in parts)


def _halves(
    ordered: Callable[[Tensor], Tensor], faults: frozenset[str]
) -> Callable[[Tensor], Tensor]:
    """`ordered` gives [gate; up], if nothing is at fault."""
    if "gate_up_swapped" not in faults:
        return ordered
    return lambda w: undo.gate_first(ordered(w))
