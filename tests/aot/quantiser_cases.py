"""The quantisers, forth and back, in every format."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from tests.aot.case import Case, empty, short
from tmoe.kernels.launch import cdiv
from tmoe.kernels.quantize_fp8 import dequantize_fp8, quantize_fp8
from tmoe.kernels.quantize_mx import dequantize_mx, quantize_mx
from tmoe.kernels.quantize_nvfp4 import dequantize_nvfp4, quantize_nvfp4
from tmoe.kernels.quantize_ref import Rows


def _launches(T: int, H: int, E: int, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """Activations (T, H) in every format, weights (E, 2I, H) in those that have others for them."""
    x, fp32, bytes_ = empty(T, H, dtype=dtype), torch.float32, torch.uint8
    gate_up = empty(T, 4096, dtype=dtype)
    weights = empty(E, 4096, H, dtype=dtype)
    offsets, rows = empty(E + 1, dtype=torch.int32), empty(T, dtype=torch.int32)
    swiglu = ("swiglu", 1.0, math.inf)
    of_experts = {"global_scale": empty(E, dtype=fp32), "expert_offsets": offsets}
    codes = empty(T, H, dtype=torch.float8_e4m3fn)
    nibbles = empty(T, H // 2, dtype=bytes_)
    return {
        "fp8 tensor": lambda: quantize_fp8(x, block="tensor"),
        "fp8 tensor static": lambda: quantize_fp8(x, block="tensor", scale=empty(dtype=fp32)),
        "fp8 row": lambda: quantize_fp8(x, block="row"),
        "fp8 long row": lambda: quantize_fp8(empty(T, 20480, dtype=dtype), block="row"),
        "fp8 1x128": lambda: quantize_fp8(x, block=(1, 128), rows=Rows(rows)),
        "fp8 1x128 ceil": lambda: quantize_fp8(x, block=(1, 128), power_of_two=True),
        "fp8 1x128 swiglu": lambda: quantize_fp8(gate_up, block=(1, 128), activation=swiglu),
        "fp8 128x128": lambda: quantize_fp8(weights, block=(128, 128)),
        "mxfp8": lambda: quantize_mx(x, element="e4m3", scale_rule="ceil"),
        "mxfp4": lambda: quantize_mx(x, element="e2m1", scale_rule="even", rows=Rows(rows)),
        "mxfp4 swiglu": lambda: quantize_mx(
            gate_up, element="e2m1", scale_rule="even", activation=swiglu
        ),
        "nvfp4": lambda: quantize_nvfp4(weights),
        "nvfp4 of experts": lambda: quantize_nvfp4(x, rows=Rows(rows), **of_experts),
        "nvfp4 swiglu": lambda: quantize_nvfp4(gate_up, activation=swiglu, **of_experts),
        "fp8 back": lambda: dequantize_fp8(
            codes, empty(T, cdiv(H, 128), dtype=fp32), block=(1, 128), dtype=dtype
        ),
        "mxfp8 back": lambda: dequantize_mx(
            codes, empty(T, cdiv(H, 32), dtype=bytes_), element="e4m3", dtype=dtype
        ),
        "mxfp4 back": lambda: dequantize_mx(
            nibbles, empty(T, cdiv(H, 32), dtype=bytes_), element="e2m1", dtype=dtype
        ),
        "nvfp4 back": lambda: dequantize_nvfp4(
            nibbles,
            empty(T, cdiv(H, 16), dtype=torch.float8_e4m3fn),
            empty(dtype=fp32),
            dtype=dtype,
        ),
    }


def quantisers(T: int, H: int, E: int, dtype: torch.dtype) -> list[Case]:
    return [
        Case(f"{name} T={T} H={H} {short(dtype)}", launch)
        for name, launch in _launches(T, H, E, dtype).items()
    ]


# One with each kind of elements, and those with an activation or tiles of two dimensions.
OF_EVERY_FORMAT = ("fp8 128x128", "fp8 1x128 swiglu", "mxfp4 swiglu", "nvfp4 swiglu")
OF_EVERY_FORMAT += ("fp8 back", "mxfp8 back", "mxfp4 back", "nvfp4 back")


def of_every_format(quantisers: list[Case]) -> list[Case]:
    return [case for case in quantisers if case.name.startswith(OF_EVERY_FORMAT)]
