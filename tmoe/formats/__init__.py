"""Number formats: what FP8, MXFP8, MXFP4 and NVFP4 are, and tensors in them."""

from .error_report import (
    ErrorReport,
    ErrorSums,
    FormatComparison,
    compare_formats,
    error_report,
    plot_error_reports,
)
from .files import load_file, save_file
from .format import FORMATS, ElementType, Format
from .layouts import (
    decode_e8m0,
    e4m3fn_to_fnuz,
    pack_e2m1,
    swizzle_scale,
    transpose_scale,
    unpack_e2m1,
    unswizzle_scale,
)
from .quantized_tensor import QuantizedTensor
from .scheme import SCHEMES, Scheme

__all__ = [
    "FORMATS",
    "SCHEMES",
    "ElementType",
    "ErrorReport",
    "ErrorSums",
    "Format",
    "FormatComparison",
    "QuantizedTensor",
    "Scheme",
    "compare_formats",
    "decode_e8m0",
    "e4m3fn_to_fnuz",
    "error_report",
    "load_file",
    "pack_e2m1",
    "plot_error_reports",
    "save_file",
    "swizzle_scale",
    "transpose_scale",
    "unpack_e2m1",
    "unswizzle_scale",
]
