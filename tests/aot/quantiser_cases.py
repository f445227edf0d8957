"""The quantisers, forth and back, in every format."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tmoe.kernels.launch import cdiv
from tmoe.kernels.quantize_fp8 import dequantize_fp8, quantize_fp8
from tmoe.kernels.quantize_mx import dequantize_mx, quantize_mx
from tmoe.kernels.quantize_nvfp4 import dequantize_nvfp4, quantize_nvfp4
from tmoe.kernels.quantize_ref import Rows


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def launches(T: int, H: int, E: int, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """Activations (T, H) in every format, weights (E, 2I, H) in those that have others for them."""
    x, fp32, bytes_ = _empty(T, H, dtype=dtype), torch.float32, torch.uint8
    gate_up = _empty(T, 4096, dtype=dtype)
    weights = _empty(E, 4096, H, dtype=dtype)
    offsets, rows = _empty(E + 1, dtype=torch.int32), _empty(T, dtype=torch.int32)
    swiglu = ("swiglu", 1.0, math.inf)
    of_experts = {"global_scale": _empty(E, dtype=fp32), "expert_offsets": offsets}
    codes = _empty(T, H, dtype=torch.float8_e4m3fn)
    nibbles = _empty(T, H // 2, dtype=bytes_)
    return {
        "fp8 tensor": lambda: quantize_fp8(x, block="tensor"),
        "fp8 tensor static": lambda: quantize_fp8(x, block="tensor", scale=_empty(dtype=fp32)),
        "fp8 row": lambda: quantize_fp8(x, block="row"),
        "fp8 long row": lambda: quantize_fp8(_empty(T, 20480, dtype=dtype), block="row"),
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
            codes, _empty(T, cdiv(H, 128), dtype=fp32), block=(1, 128), dtype=dtype
        ),
        "mxfp8 back": lambda: dequantize_mx(
            codes, _empty(T, cdiv(H, 32), dtype=bytes_), element="e4m3", dtype=dtype
        ),
        "mxfp4 back": lambda: dequantize_mx(
            nibbles, _empty(T, cdiv(H, 32), dtype=bytes_), element="e2m1", dtype=dtype
        ),
        "nvfp4 back": lambda: dequantize_nvfp4(
            nibbles,
            _empty(T, cdiv(H, 16), dtype=torch.float8_e4m3fn),
            _empty(dtype=fp32),
            dtype=dtype,
        ),
    }
