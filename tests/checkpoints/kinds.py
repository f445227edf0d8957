"""How each kind of checkpoint stores one matrix, and what the matrix is, by the library that
defines the kind: what it dequantises to is the truth. Where no library runs on a CPU, the layout is
as documented and the truth is its formula, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

Parts = dict[str, Tensor]  # by the last part of the tensor's name


@dataclass(frozen=True)
class Kind:
    """`store` gives the tensors of one matrix, `truth` what they mean; `config` is what config.json
    says of them."""

    name: str
    config: dict[str, Any]
    store: Callable[[Tensor], Parts]
    truth: Callable[[Parts], Tensor]
    scheme: str | None  # None: tmoe has none for it, so one has to be named
    static: tuple[str, bool] | None = None  # name of the inputs' scale, and whether it divides

    def __str__(self) -> str:
        return self.name


def amax(w: Tensor, dim: Any = None) -> Tensor:
    return w.abs().amax(dim) if dim is not None else w.abs().amax()


# ---- compressed-tensors: its compressors write, its decompressors are the truth ------------------


def compressed_tensors(
    preset: str, scheme: str | None, static: Any = None, *, exact: bool = True
) -> Kind:
    def library() -> tuple[Any, Any, str]:
        pytest.importorskip("compressed_tensors")
        from compressed_tensors.compressors.base import BaseCompressor
        from compressed_tensors.quantization import preset_name_to_scheme

        quantization = preset_name_to_scheme(preset, ["Linear"])
        format = "float-quantized"
        for start in ("NVFP4", "MXFP4", "MXFP8"):
            if preset.startswith(start):
                format = start.lower() + ("-quantized" if start == "MXFP8" else "-pack-quantized")
        return BaseCompressor.get_value_from_registry(format), quantization, format

    def store(w: Tensor) -> Parts:
        from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

        compressor, quantization, _ = library()
        args = quantization.weights
        parts = {"weight": w}
        if args.strategy == "tensor":
            extent = amax(w)
        elif args.strategy == "channel":
            extent = w.abs().amax(-1, keepdim=True)
        elif args.strategy == "block":
            N, K = w.shape
            blocks = -(-N // 128), -(-K // 128)
            whole = torch.zeros(blocks[0] * 128, blocks[1] * 128)
            whole[:N, :K] = w
            extent = whole.view(blocks[0], 128, blocks[1], 128).abs().amax((1, 3))
        else:
            extent = w.view(len(w), -1, args.group_size).abs().amax(-1)
        if args.strategy == "tensor_group":
            divisor = generate_gparam(-amax(w), amax(w))
            # a power of two has an exact reciprocal; test_any_divisor takes others
            parts["weight_global_scale"] = divisor.log2().floor().exp2() if exact else divisor
        scale, _ = calculate_qparams(-extent, extent, args, parts.get("weight_global_scale"))
        return compressor.compress({**parts, "weight_scale": scale}, quantization)

    def truth(parts: Parts) -> Tensor:
        """As its decompressors, which would round the products to bf16: here in fp32."""
        from compressed_tensors.compressors.mx_utils import decompress_mx_scale
        from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
        from compressed_tensors.quantization.lifecycle.forward import dequantize

        _, quantization, _ = library()
        scale = parts["weight_scale"]
        codes = parts.get("weight")
        if codes is None:
            packed = parts["weight_packed"]
            codes = unpack_fp4_from_uint8(packed, len(packed), packed.shape[1] * 2)
        if scale.dtype == torch.uint8:
            scale = decompress_mx_scale(scale)
        return dequantize(
            codes.float(), scale.float(), args=quantization.weights, dtype=torch.float32,
            global_scale=parts.get("weight_global_scale"),
        )  # fmt: skip

    def config() -> dict[str, Any]:
        _, quantization, format = library()
        from compressed_tensors.quantization import QuantizationConfig

        whole = QuantizationConfig(
            config_groups={"group_0": quantization}, quantization_status="compressed",
            ignore=["lm_head"], format=format,
        )  # fmt: skip
        return whole.model_dump(mode="json")

    return Kind(f"compressed-tensors-{preset}", config(), store, truth, scheme, static)


# ---- fine-grained FP8: transformers' own quantiser and dequantiser -------------------------------


def finegrained(
    name: str, scheme: str, *, block=(128, 128), scale_fmt="float", **more: Any
) -> Kind:
    from types import SimpleNamespace

    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    quantizer = SimpleNamespace(
        quantization_config=SimpleNamespace(weight_block_size=block, scale_fmt=scale_fmt)
    )
    scale_dtype = more.pop("scale_dtype", None)

    def store(w: Tensor) -> Parts:
        stored = Fp8Quantize(quantizer)._quantize_one("x.weight", w)
        parts = {key.removeprefix("x."): value for key, value in stored.items()}
        scale = parts["weight_scale_inv"]
        if block is None:
            scale = scale.view(())
        if scale_dtype == torch.uint8:
            scale = scale.view(torch.uint8)
        elif scale_dtype:
            scale = scale.to(scale_dtype)
        return parts | {"weight_scale_inv": scale}

    def truth(parts: Parts) -> Tensor:
        dequantize = Fp8Dequantize(quantizer)._dequantize_one
        return dequantize(parts["weight"], parts["weight_scale_inv"], output_dtype=torch.float32)

    static = more.pop("static", None)
    config = dict(quant_method="fp8", weight_block_size=block, activation_scheme="dynamic")
    config |= {"fmt": "e4m3", **more}
    if static:
        config["activation_scheme"] = "static"
    return Kind(name, config, store, truth, scheme, static)


def deepseek_v4() -> Kind:
    """FP4 experts: int8 with two codes each, and ``.scale`` in e8m0."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    def store(w: Tensor) -> Parts:
        codes, exponents = mx(w, 6.0)
        return {
            "weight": pack(codes).view(torch.int8),
            "scale": exponents.view(torch.float8_e8m0fnu),
        }

    def truth(parts: Parts) -> Tensor:
        return Fp8Dequantize(None)._dequantize_one(
            parts["weight"], parts["scale"], output_dtype=torch.float32
        )

    config = dict(quant_method="fp8", weight_block_size=[128, 128], activation_scheme="dynamic",
                  scale_fmt="ue8m0", expert_dtype="fp4")  # fmt: skip
    return Kind("deepseek-v4-fp4", config, store, truth, "mxfp4_a8")


# ---- by layout: nvidia-modelopt and FBGEMM ------------------------------------------------------

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def fp4(x: Tensor) -> Tensor:
    """The nearest code of each value."""
    return (x.unsqueeze(-1) - E2M1).abs().argmin(-1).to(torch.uint8)


def pack(codes: Tensor) -> Tensor:
    """Two codes a byte, the even element in the low nibble."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def unpack(packed: Tensor) -> Tensor:
    packed = packed.view(torch.uint8)
    return E2M1[torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()]


def mx(w: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """Codes' values and e8m0 bytes of blocks of 32."""
    blocks = w.view(*w.shape[:-1], -1, 32)
    exponent = (blocks.abs().amax(-1) / largest).log2().ceil()
    scaled = (blocks / exponent.exp2().unsqueeze(-1)).view(w.shape)
    bytes = (exponent + 127).to(torch.uint8)
    return (fp4(scaled) if largest == 6.0 else scaled.to(torch.float8_e4m3fn)), bytes


def spread(scale: Tensor, *sizes: int) -> Tensor:
    """Each scale over its block of rows and columns."""
    for dim, size in zip((-2, -1), sizes, strict=True):
        scale = scale.repeat_interleave(size, dim)
    return scale


def e4m3(w: Tensor, scale: Tensor) -> Tensor:
    return (w / scale).clamp(-448, 448).to(torch.float8_e4m3fn)


def nvfp4(w: Tensor) -> Parts:
    several = amax(w) / (6 * 448)
    blocks = w.view(*w.shape[:-1], -1, 16)
    scale = (blocks.abs().amax(-1) / 6 / several).to(torch.float8_e4m3fn)
    codes = fp4((blocks / (scale.float() * several).unsqueeze(-1)).view(w.shape))
    return {"weight": pack(codes), "weight_scale": scale, "weight_scale_2": several}


def nvfp4_truth(parts: Parts) -> Tensor:
    scale = spread(parts["weight_scale"].float(), 1, 16)
    return unpack(parts["weight"]) * (scale * parts["weight_scale_2"])  # in ModelOpt's order


def modelopt(algorithm: str, store: Any, truth: Any, scheme: str, static: Any = None) -> Kind:
    config = dict(quant_method="modelopt", quant_algo=algorithm, ignore=["lm_head"])
    return Kind(f"modelopt-{algorithm}", config, store, truth, scheme, static)


def fp8_tensor(w: Tensor) -> Parts:
    scale = amax(w) / 448
    return {"weight": e4m3(w, scale), "weight_scale": scale}


def fp8_channel(w: Tensor) -> Parts:
    scale = amax(w, 1) / 448
    return {"weight": e4m3(w, scale[:, None]), "weight_scale": scale}


def fp8_blocks(w: Tensor) -> Parts:
    N, K = w.shape
    scale = w.view(N // 128, 128, K // 128, 128).abs().amax((1, 3), keepdim=True) / 448
    codes = e4m3(w.view(N // 128, 128, K // 128, 128), scale).view(N, K)
    return {"weight": codes, "weight_scale": scale}


def mxfp8(w: Tensor) -> Parts:
    codes, exponents = mx(w, 448.0)
    return {"weight": codes, "weight_scale": exponents}


def mxfp4(w: Tensor) -> Parts:
    codes, exponents = mx(w, 6.0)
    return {"weight": pack(codes), "weight_scale": exponents}


def mxfp4_truth(parts: Parts) -> Tensor:
    scale = (parts["weight_scale"].float() - 127).exp2()
    return unpack(parts["weight"]) * spread(scale, 1, 32)


def fp8_truth(parts: Parts) -> Tensor:
    codes, scale = parts["weight"].float(), parts["weight_scale"]
    if scale.dtype == torch.uint8:
        scale = spread((scale.float() - 127).exp2(), 1, 32)
    elif scale.ndim == 4:
        scale = spread(scale[:, 0, :, 0], 128, 128)
    elif scale.ndim == 1:
        scale = scale[:, None]
    return codes * scale


INPUT = ("input_scale", False)


def kinds() -> list[Kind]:
    return [
        compressed_tensors("FP8", "fp8_tensor", INPUT),
        compressed_tensors("FP8_DYNAMIC", "fp8_channel"),
        compressed_tensors("FP8_BLOCK", "fp8_block"),
        compressed_tensors("NVFP4", "nvfp4", ("input_global_scale", True)),
        compressed_tensors("NVFP4A16", "nvfp4_a16"),
        compressed_tensors("MXFP4A16", "mxfp4_a16"),
        compressed_tensors("MXFP4", None),
        compressed_tensors("MXFP8", "mxfp8"),
        finegrained("deepseek-v3", "fp8_block"),
        finegrained("fp8-ue8m0", "fp8_block", scale_fmt="ue8m0"),
        finegrained("fp8-bf16-scales", "fp8_block", scale_dtype=torch.bfloat16),
        finegrained("fp8-per-tensor", "fp8_channel", block=None),
        finegrained("fp8-static", "fp8_tensor", block=None, static=("activation_scale", False)),
        finegrained(
            "mxfp8",
            "mxfp8",
            block=(1, 32),
            scale_fmt="ue8m0",
            scale_dtype=torch.uint8,
            quant_method="mxfp8",
        ),
        deepseek_v4(),
        modelopt("FP8", fp8_tensor, fp8_truth, "fp8_tensor", INPUT),
        modelopt("FP8_PER_CHANNEL_PER_TOKEN", fp8_channel, fp8_truth, "fp8_channel"),
        modelopt("FP8_PB_WO", fp8_blocks, fp8_truth, "fp8_a16"),
        modelopt("MXFP8", mxfp8, fp8_truth, "mxfp8"),
        modelopt("NVFP4", nvfp4, nvfp4_truth, "nvfp4", INPUT),
        modelopt("MXFP4", mxfp4, mxfp4_truth, "mxfp4_a16"),
        modelopt("W4A16_NVFP4", nvfp4, nvfp4_truth, "nvfp4_a16"),
    ]
