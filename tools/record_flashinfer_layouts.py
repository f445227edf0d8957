"""Record the weight layouts that FlashInfer's own helpers give, for tests that run without it.

    python tools/record_flashinfer_layouts.py [--output FILE]

Needs flashinfer-python 0.7.4 to be importable, and no GPU. Orders of few rows are recorded as they
are, everything else as dtype, shape and the sha256 of its bytes. Inputs are integer arithmetic, the
same on every machine; the tests make them with the functions below and compare bit for bit.

Some of FlashInfer's functions need a GPU. `block_scale_interleave` is replaced by the swizzle in
torch that FlashInfer has for another backend, and the quantisers by arbitrary bytes: what is then
recorded is where these bytes end up.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

OUTPUT = Path(__file__).parents[1] / "tests" / "backends" / "flashinfer" / "layouts.json"

TILES = (64, 128)
LISTED_ROWS, HASHED_ROWS = (32, 64, 96), (128, 1536, 5760)
SCALES = ((128, 3), (256, 8), (384, 45))  # rows, columns
MATRICES = ((32, 128), (64, 384), (128, 2048))  # rows, bytes
E, H, I = 3, 512, 384  # of the whole recipes
PADDED = (2, 192, 80)  # E, H, I of a layer whose sizes must be filled up


def pattern(*shape: int, below: int = 256, seed: int = 0) -> Tensor:
    """Bytes 0 ... below - 1 without an order that a permutation could keep."""
    numbers = torch.arange(torch.Size(shape).numel()) + 7919 * seed
    return (((numbers * 2654435761) >> 13) % below).to(torch.uint8).reshape(shape)


def weights(*shape: int) -> Tensor:
    """bf16 (E, rows, columns) whose largest value makes the FP8 scale of expert e 2^-(5 + e)."""
    values = (pattern(*shape).float() - 128) / 16
    values[:, 0, 0] = 448 / 32
    powers = torch.arange(shape[0]).view(-1, 1, 1)
    return (values * 0.5**powers).to(torch.bfloat16)


def fingerprint(value: Tensor) -> str:
    """dtype, shape and sha256 of the bytes, in words."""
    data = value.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    dtype = str(value.dtype).removeprefix("torch.")
    return f"{dtype} {tuple(value.shape)} {hashlib.sha256(data).hexdigest()}"


def order_in_words(order: Tensor) -> str:
    """The numbers themselves if they are few."""
    short = len(order) in LISTED_ROWS
    return " ".join(map(str, order.tolist())) if short else fingerprint(order.long())


def fingerprints(values: dict[str, Any]) -> dict[str, str]:
    return {name: fingerprint(v) for name, v in sorted(values.items()) if isinstance(v, Tensor)}


def fp4_parts(rows: int, columns: int, vector: int, seed: int) -> tuple[Tensor, Tensor]:
    """Codes and scale bytes of an FP4 matrix; no scale is NaN or negative."""
    codes = pattern(rows, columns // 2, seed=seed)
    return codes, pattern(rows, columns // vector, below=127, seed=seed + 1)


def mxfp8_parts(rows: int, columns: int, seed: int) -> tuple[Tensor, Tensor]:
    """The same for MXFP8, codes viewed as float8_e4m3fn."""
    codes = pattern(rows, columns, below=127, seed=seed)
    return codes.view(torch.float8_e4m3fn), pattern(rows, columns // 32, below=127, seed=seed + 1)


def record() -> dict[str, Any]:
    """Everything that is recorded."""
    import flashinfer

    return {
        "flashinfer": flashinfer.__version__,
        "orders": _orders(),
        "bytes": _moved_bytes(),
        "recipes": _recipes(),
        "replaced quantisers": _recipes_without_quantisers(),
        "filled up": _filled_up(),
    }


def _orders() -> dict[str, Any]:
    from flashinfer import utils
    from flashinfer.fused_moe import core, reorder_rows_for_gated_act_gemm

    orders: dict[str, Tensor] = {}
    for rows in (*LISTED_ROWS, *HASHED_ROWS):
        matrix = torch.zeros(rows, 4, dtype=torch.uint8)
        numbered = torch.arange(rows)[:, None]
        orders[f"interleave {rows}"] = reorder_rows_for_gated_act_gemm(numbered)[:, 0]
        for tile in TILES:
            orders[f"shuffle {rows} {tile}"] = utils.get_shuffle_matrix_a_row_indices(matrix, tile)
            vectors = (None, 16, 32) if rows % 128 == 0 else (None,)
            for vector in vectors:
                suffix = f"{rows} {tile}" + (f" {vector}" if vector else "")
                orders[f"w3_w1 {suffix}"] = core._maybe_get_cached_w3_w1_permute_indices(
                    {}, matrix, tile, vector
                )
                orders[f"w1 {suffix}"] = core._maybe_get_cached_w3_w1_permute_indices(
                    {}, matrix, tile, vector, is_gated_act_gemm=False
                )
                orders[f"w2 {suffix}"] = core.get_w2_permute_indices_with_cache(
                    {}, matrix, tile, vector
                )
    return {name: order_in_words(order) for name, order in orders.items()}


def _moved_bytes() -> dict[str, Any]:
    from flashinfer import shuffle_matrix_a, utils
    from flashinfer.fused_moe import convert_to_block_layout

    moved: dict[str, Tensor] = {}
    for rows, columns in MATRICES:
        matrix = pattern(rows, columns)
        for dtype in (torch.uint8, torch.float8_e4m3fn, torch.bfloat16):
            name = f"{rows} {columns} {str(dtype).removeprefix('torch.')}"
            for tile in TILES:
                shuffled = shuffle_matrix_a(matrix.view(dtype), tile)
                moved[f"shuffle_matrix_a {name} {tile}"] = shuffled
            block = 128 // dtype.itemsize
            moved[f"convert_to_block_layout {name}"] = convert_to_block_layout(
                matrix.view(dtype), block
            )
    for rows, columns in SCALES:
        scale = pattern(rows, columns)
        moved[f"swizzle {rows} {columns}"] = _swizzle(scale)
        for tile in TILES:
            for vector in (16, 32):
                order = utils.get_shuffle_matrix_sf_a_row_indices(scale, tile, vector)
                moved[f"shuffle_matrix_sf_a {rows} {columns} {tile} {vector}"] = _swizzle(
                    scale[order]
                )
    return {name: fingerprint(value) for name, value in moved.items()}


def _swizzle(scale: Tensor, *_: object, **__: object) -> Tensor:
    """In place of `block_scale_interleave`: bytes (rows, columns), flat and swizzled."""
    from flashinfer.fused_moe import prepare

    return prepare._swizzle_cutile_fp4_scales(scale[None], scale_block_size=16).flatten()


def _layer(activation: Any) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Weights [up; gate] and sizes, as the prepare_* functions take them."""
    rows = 2 * I if activation.is_gated else I
    sizes = {"num_local_experts": E, "hidden_size": H, "intermediate_size": I}
    return weights(E, rows, H), weights(E, H, I), {**sizes, "activation": activation}


def _activations() -> dict[str, Any]:
    from flashinfer.fused_moe import api

    return {"swiglu": api.SwiGLU(), "swiglu_step": api.SwiGLUStep(limit=3.0), "relu2": api.ReLU2()}


def _recipes() -> dict[str, Any]:
    from flashinfer.fused_moe import api, prepare

    recorded = {}
    multipliers = {"hidden_states_scale_global": 8.0, "intermediate_scale_global": 0.5}
    deepseek = api.QuantConfig(api.QuantFormat.DeepSeekFp8, api.QuantFormat.DeepSeekFp8)
    for name, activation in _activations().items():
        w1, w2, sizes = _layer(activation)
        made = {
            "trtllm_fp8_per_tensor": prepare.prepare_trtllm_fp8_per_tensor_weights(
                w1, w2, **multipliers, **sizes
            ),
            "trtllm_bf16": prepare.prepare_trtllm_bf16_weights(w1, w2, **sizes),
            "cutlass_bf16": prepare.prepare_cutlass_bf16_weights(w1, w2, **sizes),
            "cutlass_fp8_per_tensor": prepare.prepare_cutlass_fp8_per_tensor_weights(
                w1, w2, **multipliers, **sizes
            ),
        }
        if name == "swiglu":
            made["trtllm_fp8_block"] = prepare.prepare_trtllm_fp8_block_weights(
                w1, w2, quant=deepseek, **sizes
            )
            made["cutlass_fp8_block"] = prepare.prepare_cutlass_fp8_block_weights(w1, w2, **sizes)
        recorded[name] = {recipe: fingerprints(values) for recipe, values in made.items()}
    return recorded


def _recipes_without_quantisers() -> dict[str, Any]:
    from flashinfer.fused_moe import api, prepare

    def fp4_quantize(x: Tensor, sf_vec_size: int, **_: object) -> tuple[Tensor, Tensor]:
        return fp4_parts(*x.shape, sf_vec_size, seed=0)

    def mxfp8_quantize(x: Tensor, **_: object) -> tuple[Tensor, Tensor]:
        return mxfp8_parts(*x.shape, seed=int(x[0, 0]))

    formats, recorded = api.QuantFormat, {}
    for name, activation in _activations().items():
        w1, w2, sizes = _layer(activation)
        for w in (w1, w2):
            w[:, 0, 0] = torch.arange(E)  # the number of the expert, for mxfp8_quantize
        quantisation = "flashinfer.quantization"
        with (
            mock.patch("flashinfer.fp4_quantization.fp4_quantize", fp4_quantize),
            mock.patch(f"{quantisation}.fp8_quantization.mxfp8_quantize", mxfp8_quantize),
            mock.patch(f"{quantisation}.fp4_quantization.block_scale_interleave", _swizzle),
        ):
            made = {
                pair[0].name.lower(): prepare_weights(w1, w2, quant=api.QuantConfig(*pair), **sizes)
                for prepare_weights, pair in (
                    (prepare.prepare_trtllm_fp4_weights, (formats.NVFP4, formats.NVFP4)),
                    (prepare.prepare_trtllm_fp4_weights, (formats.MXFP4, formats.MXFP8)),
                    (prepare.prepare_trtllm_fp8_block_weights, (formats.MXFP8, formats.MXFP8)),
                )
            }
        recorded[name] = {format: fingerprints(values) for format, values in made.items()}
    return recorded


def _filled_up() -> dict[str, Any]:
    """Codes only: scales of what is filled up are 1 there and 0 here; their codes are 0."""
    from flashinfer.fused_moe import pad_trtllm_moe_weights

    experts, hidden, intermediate = PADDED
    padded = pad_trtllm_moe_weights(*filled_up_input(), hidden, intermediate, hidden_alignment=256)
    return fingerprints(
        {"gemm1_weights": padded.gemm1_weights, "gemm2_weights": padded.gemm2_weights}
    )


def filled_up_input() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes and scales of both projections of a `PADDED` NVFP4 layer."""
    experts, hidden, intermediate = PADDED
    first = fp4_parts(experts * 2 * intermediate, hidden, 16, seed=2)
    second = fp4_parts(experts * hidden, intermediate, 16, seed=4)
    parts = [part.unflatten(0, (experts, -1)) for part in (*first, *second)]
    return parts[0], parts[1], parts[2], parts[3]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=OUTPUT)
    path = parser.parse_args(arguments).output
    path.write_text(json.dumps(record(), indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
