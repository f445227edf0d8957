"""What a checkpoint holds, brought into the one form that kernels take, or refused.

The functions look at values, so on a GPU they wait for the device. They run at load time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..checks import expect, expect_tensor, expect_type
from .format import E8M0, FLOAT32, Block, Format
from .layouts import decode_e8m0

FLOATS = (torch.float32, torch.bfloat16, torch.float16)

# dtypes in which checkpoints hold codes and scales
_CODES = {
    "e4m3": (torch.float8_e4m3fn,),
    "e2m1": (torch.uint8, torch.int8, torch.float4_e2m1fn_x2),
}
_SCALES = {
    "float32": (torch.float32, torch.bfloat16, torch.float8_e8m0fnu),
    "e8m0": (torch.uint8, torch.float8_e8m0fnu),
    "e4m3": (torch.float8_e4m3fn,),
}


def logical_shape(
    data: Tensor, shape: Sequence[int] | None, format: Format, op: str
) -> tuple[int, ...]:
    """The shape of the matrix that `data` holds: as given, checked, or from the data's own."""
    expect_tensor(data, op, "data")
    expect(data.ndim >= 1, op, "data", "of at least 1 dimension", tuple(data.shape))
    if shape is None:
        *lead, K = data.shape
        return (*lead, 2 * K) if format.is_packed else (*lead, K)
    expect_type(shape, (tuple, list, torch.Size), op, "shape")
    shape = tuple(shape)
    expect(len(shape) >= 1, op, "shape", "of at least 1 dimension", shape)
    even = not format.is_packed or shape[-1] % 2 == 0
    expect(even, op, "shape", f"of even row length: {format.name} packs two codes a byte", shape)
    return shape


def checked_data(data: Tensor, shape: tuple[int, ...], format: Format, op: str) -> Tensor:
    """The codes, contiguous and of ``format.data_shape(shape)``.

    Rows may be split into further dimensions, (E, N, K/32, 16) for mxfp4 as gpt-oss stores it.
    """
    _expect_dtype(data, _CODES[format.element.name], op, "data", format)
    wanted = format.data_shape(shape)
    n = len(wanted)
    rows_fit = data.ndim >= n and data.shape[: n - 1] == wanted[:-1]
    fits = rows_fit and math.prod(data.shape[n - 1 :]) == wanted[-1]
    for_shape = f"of shape {wanted} for {format.name} of shape {shape}"
    expect(fits, op, "data", for_shape, tuple(data.shape))
    return data.reshape(wanted).contiguous().view(format.element.storage)


def checked_scale(
    scale: Tensor, shape: tuple[int, ...], format: Format, block_shape: Block, op: str
) -> Tensor:
    """The scales, contiguous, of the format's scale type and one of ``format.scale_shapes``."""
    expect_tensor(scale, op, "scale")
    _expect_dtype(scale, _SCALES[format.scale.name], op, "scale", format)
    wanted = format.scale_shapes(shape, block_shape)
    scale = _reshaped(scale, wanted, op, "scale", format, shape)
    if format.scale is E8M0:
        scale = scale.view(torch.uint8)
        _expect_all(scale != 0xFF, scale, op, "scale", "free of the e8m0 NaN, byte 255")
        return scale
    if format.scale is FLOAT32:
        scale = _as_float32(scale)
    values = scale.float()
    usable = torch.isfinite(values) & (values >= 0)
    _expect_all(usable, values, op, "scale", "finite and at least 0")
    return scale


def checked_global_scale(
    global_scale: Tensor | None, shape: tuple[int, ...], format: Format, op: str
) -> Tensor | None:
    """The global scale in fp32 and one of ``format.global_scale_shapes``; None for a format
    without."""
    if not format.has_global_scale:
        absent = global_scale is None
        expect(absent, op, "global_scale", f"None for {format.name}", "a global scale")
        return None
    if global_scale is None:
        raise ValueError(f"{op}: global_scale must be given for {format.name}, got None")
    expect_tensor(global_scale, op, "global_scale")
    _expect_dtype(global_scale, FLOATS, op, "global_scale", format)
    wanted = format.global_scale_shapes(shape)
    global_scale = _reshaped(global_scale, wanted, op, "global_scale", format, shape).float()
    usable = torch.isfinite(global_scale) & (global_scale > 0)
    _expect_all(usable, global_scale, op, "global_scale", "finite and above 0")
    return global_scale


def _reshaped(
    value: Tensor,
    wanted: tuple[tuple[int, ...], ...],
    op: str,
    arg: str,
    format: Format,
    shape: tuple[int, ...],
) -> Tensor:
    """`value` without further dimensions of size 1 at its end: checkpoints store (N, 1), (1,)."""
    given = tuple(value.shape)
    for target in wanted:
        if given[: len(target)] == target and math.prod(given[len(target) :]) == 1:
            return value.reshape(target).contiguous()
    shapes = " or ".join(map(str, wanted))
    raise ValueError(
        f"{op}: {arg} must be of shape {shapes} for {format.name} of shape {shape}, got {given}"
    )


def _as_float32(scale: Tensor) -> Tensor:
    if scale.dtype != torch.float8_e8m0fnu:
        return scale.float()
    return decode_e8m0(scale.view(torch.uint8))


def _expect_all(usable: Tensor, values: Tensor, op: str, arg: str, wanted: str) -> None:
    """Raise with the first value that isn't usable. On the meta device there are no values."""
    if not usable.is_meta and not usable.all():
        expect(False, op, arg, wanted, values[~usable][0].item())


def _expect_dtype(
    value: Tensor, dtypes: tuple[torch.dtype, ...], op: str, arg: str, format: Format
) -> None:
    names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    fits = value.dtype in dtypes
    expect(fits, op, arg, f"of dtype {names} for {format.name}", value.dtype)
