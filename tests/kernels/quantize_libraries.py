"""Other libraries' quantisers, called on the CPU with fp32 copies of the data.

On a GPU they divide by Python numbers, which torch turns into a product there; given 16 bits they
compute in 16 bits. Each function gives codes and scales in this library's types and shapes. A
library that isn't installed skips the test.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor


def _blocks(x: Tensor, size: int) -> Tensor:
    return x.view(*x.shape[:-1], -1, size)


class CompressedTensors:
    """llm-compressor's library: calculate_qparams for the scales, quantize for the codes."""

    @staticmethod
    def _args(**how):
        quantization = pytest.importorskip("compressed_tensors.quantization")
        return quantization.QuantizationArgs(type="float", symmetric=True, dynamic=False, **how)

    @classmethod
    def _quantize(cls, x: Tensor, amax: Tensor, args, global_scale=None) -> tuple[Tensor, Tensor]:
        from compressed_tensors.quantization.lifecycle.forward import quantize
        from compressed_tensors.quantization.utils import calculate_qparams

        scale, zero = calculate_qparams(-amax, amax, args, global_scale)
        return quantize(x, scale, zero, args, global_scale=global_scale), scale

    @classmethod
    def fp8(cls, x: Tensor, block) -> tuple[Tensor, Tensor]:
        if block == "tensor":
            codes, scale = cls._quantize(
                x, x.abs().amax(), cls._args(num_bits=8, strategy="tensor")
            )
            return codes.to(torch.float8_e4m3fn), scale.view(())
        if block == "row":
            amax = x.abs().amax(-1, keepdim=True)
            codes, scale = cls._quantize(x, amax, cls._args(num_bits=8, strategy="channel"))
            return codes.to(torch.float8_e4m3fn), scale.view(-1)
        if block == (1, 128):
            args = cls._args(num_bits=8, strategy="group", group_size=128)
            codes, scale = cls._quantize(x, _blocks(x, 128).abs().amax(-1), args)
        else:
            args = cls._args(num_bits=8, strategy="block", block_structure=list(block))
            M, K = x.shape
            tiles = x.view(M // 128, 128, K // 128, 128)
            codes, scale = cls._quantize(x, tiles.abs().amax((1, 3)), args)
        return codes.to(torch.float8_e4m3fn), scale

    @classmethod
    def mx(cls, x: Tensor, element: str) -> tuple[Tensor, Tensor]:
        """Its only rule: even."""
        bits = {"e4m3": 8, "e2m1": 4}[element]
        args = cls._args(
            num_bits=bits, strategy="group", group_size=32, scale_dtype=torch.uint8,
            zp_dtype=torch.uint8,
        )  # fmt: skip
        from compressed_tensors.quantization.lifecycle.forward import quantize
        from compressed_tensors.quantization.utils.mxfp_utils import generate_mx_scales

        byte = generate_mx_scales(_blocks(x, 32).abs().amax(-1), num_bits=bits).clamp(0, 254)
        scale = torch.exp2(byte.float() - 127)
        codes = quantize(x, scale, torch.zeros_like(scale), args)
        return cls._codes(codes, element), byte.to(torch.uint8)

    @classmethod
    def nvfp4(cls, x: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
        """`global_scale` is the multiplier; theirs is a divisor."""
        args = cls._args(
            num_bits=4, strategy="tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn,
            zp_dtype=torch.float8_e4m3fn,
        )  # fmt: skip
        amax = _blocks(x, 16).abs().amax(-1)
        codes, scale = cls._quantize(x, amax, args, 1 / global_scale.view(1))
        return cls._codes(codes, "e2m1"), scale.to(torch.float8_e4m3fn)

    @staticmethod
    def _codes(values: Tensor, element: str) -> Tensor:
        if element == "e4m3":
            return values.to(torch.float8_e4m3fn)
        from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8

        return pack_fp4_to_uint8(values)


class TorchAO:
    @staticmethod
    def fp8(x: Tensor, block) -> tuple[Tensor, Tensor]:
        primitives = pytest.importorskip("torchao.quantization.quant_primitives")
        size = {"tensor": tuple(x.shape), "row": (1, x.shape[-1])}.get(block, block)
        scale = primitives._choose_scale_float8(x, list(size))
        codes = primitives._quantize_affine_float8(x, scale)
        return codes, scale.view({"tensor": (), "row": (-1,)}.get(block, scale.shape))

    @staticmethod
    def mx(x: Tensor, element: str, rule: str) -> tuple[Tensor, Tensor]:
        module = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
        mode = getattr(module.ScaleCalculationMode, {"ceil": "RCEIL"}.get(rule, rule.upper()))
        types = {"e4m3": torch.float8_e4m3fn, "e2m1": torch.float4_e2m1fn_x2}
        scale, codes = module.to_mx(x, types[element], 32, mode)
        codes = codes.view(torch.uint8) if element == "e2m1" else codes
        return codes, scale.view(torch.uint8)

    @staticmethod
    def nvfp4(x: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
        module = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
        scale, codes = module.nvfp4_quantize(x, 16, global_scale)
        return codes, scale.view(*x.shape[:-1], -1)


class ModelOpt:
    """Not among the extras: it brings a solver, SciPy and more along. Install it to run these."""

    @staticmethod
    def _qtensor():
        return pytest.importorskip("modelopt.torch.quantization.qtensor")

    @classmethod
    def fp8(cls, x: Tensor, block) -> tuple[Tensor, Tensor]:
        axis, blocks = {"tensor": (None, None), "row": (0, None)}.get(block, (None, block))
        sizes = None if blocks is None else {-2: blocks[0], -1: blocks[1]}
        codes, scale = cls._qtensor().FP8QTensor.quantize(x, axis=axis, block_sizes=sizes)
        shape = {"tensor": (), "row": (-1,)}.get(block, scale.shape)
        return codes._quantized_data, scale.view(shape)

    @classmethod
    def mx(cls, x: Tensor, element: str) -> tuple[Tensor, Tensor]:
        """Its only rule: ceil."""
        if element == "e4m3":
            codes, scale = cls._qtensor().MXFP8QTensor.quantize(x)
        else:
            codes, scale = cls._qtensor().MXFP4QTensor.quantize(x, 32)
        return codes._quantized_data, scale.view(*x.shape[:-1], -1)

    @classmethod
    def nvfp4(cls, x: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
        codes, scale, _ = cls._qtensor().NVFP4QTensor.quantize(
            x.clone(), 16, weights_scaling_factor_2=global_scale
        )
        return codes._quantized_data, scale
