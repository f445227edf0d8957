"""What the trtllm entry points take for each number format, as data."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.backends.flashinfer.stand_in import rounding
from tests.backends.flashinfer.stand_in.rounding import Rounding

E4M3, BF16, FP32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32
UINT8 = torch.uint8

_FEW = ("Swiglu", "SwigluStep", "Relu2")
_ROWS = rounding.to(BF16)  # of the second projection


@dataclass(frozen=True, slots=True)
class Scheme:
    format: str  # of the weights, in the words of `undo`
    inputs: torch.dtype
    weights: torch.dtype
    checked: str  # what of the weights the launcher looks at
    activations: tuple[str, ...]
    hidden: int  # H is a multiple of
    intermediate: tuple[int, int]  # I is, with and without a gate
    rounding: Rounding
    narrower: bool = False  # whether `output` may be narrower than H


SCHEMES = {
    # Which activations FlashInfer's own tests cover: others have no kernel, or none that we know.
    "fp8_tensor": Scheme(
        "fp8_tensor", E4M3, E4M3, "dtype", _FEW, 32, (16, 128),
        Rounding(hidden=rounding.fp8, answer=_ROWS),
    ),
    "fp8_block": Scheme(
        "fp8_block", E4M3, E4M3, "dtype shape", ("Swiglu",), 128, (128, 128),
        Rounding(first=rounding.fp8_of_128, hidden=rounding.fp8_of_128, answer=_ROWS),
        narrower=True,
    ),
    "mxfp8": Scheme(
        "mxfp8", E4M3, E4M3, "dtype shape", (*_FEW, "Geglu"), 128, (128, 128),
        Rounding(hidden=rounding.mxfp8, answer=_ROWS), narrower=True,
    ),
    "nvfp4": Scheme(
        "nvfp4", UINT8, UINT8, "dtype", (*_FEW, "Geglu"), 256, (128, 128),
        Rounding(hidden=rounding.nvfp4, answer=_ROWS), narrower=True,
    ),
    "mxfp4_a8": Scheme(
        "mxfp4", E4M3, UINT8, "dtype", ("Swiglu", "Geglu"), 256, (128, 128),
        Rounding(hidden=rounding.mxfp8, answer=_ROWS), narrower=True,
    ),
    "mxfp4_a16": Scheme(
        "mxfp4", BF16, UINT8, "dtype", ("Swiglu",), 256, (128, 128),
        Rounding(hidden=_ROWS, answer=_ROWS), narrower=True,
    ),
    "bf16": Scheme(
        "bfloat16", BF16, BF16, "dtype shape", _FEW, 64, (128, 128),
        Rounding(hidden=_ROWS, answer=_ROWS),
    ),
}  # fmt: skip
