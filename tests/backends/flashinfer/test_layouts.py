"""FlashInfer's layouts: bit for bit its own helpers', and undone by arithmetic of ours."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import tmoe
from tests.backends.flashinfer.stand_in.undo import (
    VECTOR,
    gate_first,
    gate_up_of_fused,
    source_rows,
    unshuffled,
)
from tmoe.activation import Activation
from tmoe.backends.flashinfer import cutlass_weights, trtllm_weights
from tmoe.backends.flashinfer.layouts import (
    block_major,
    interleave_halves,
    shuffle_rows,
    shuffle_scale_rows,
    shuffled_row_indices,
    up_gate,
    up_gate_from_interleaved,
)
from tmoe.dispatch.prepared import ExpertWeights
from tmoe.formats import FORMATS, QuantizedTensor, swizzle_scale
from tools import record_flashinfer_layouts as tool

recipes = SimpleNamespace(**vars(trtllm_weights) | vars(cutlass_weights))
RECORDED = json.loads((Path(__file__).parent / "layouts.json").read_text())
DTYPES = (torch.uint8, torch.float8_e4m3fn, torch.bfloat16)


def numbered(rows):
    """(1, rows): the rows' own numbers."""
    return torch.arange(rows)[None]


def our_order(name):
    """The order that a recorded name stands for, (rows,) int64."""
    what, rows, *rest = name.split()
    order = numbered(int(rows))
    if what in ("interleave", "w3_w1"):
        order = interleave_halves(order)
    if what != "interleave":
        order = shuffle_rows(order, int(rest[0]))
    return order[0]


def our_bytes(name):
    """The moved bytes that a recorded name stands for."""
    what, rows, columns, *rest = name.split()
    matrix = tool.pattern(int(rows), int(columns))
    if what == "swizzle":
        return swizzle_scale(matrix).flatten()
    if what == "shuffle_matrix_sf_a":
        return shuffle_scale_rows(matrix[None], int(rest[0]), int(rest[1])).flatten()
    matrix = matrix.view(getattr(torch, rest[0]))
    if what == "shuffle_matrix_a":
        return shuffle_rows(matrix[None], int(rest[1]))[0]
    assert what == "convert_to_block_layout"
    return block_major(matrix)


@pytest.mark.parametrize("name", RECORDED["orders"])
def test_orders_are_flashinfers(name):
    assert tool.order_in_words(our_order(name)) == RECORDED["orders"][name]


@pytest.mark.parametrize("name", RECORDED["bytes"])
def test_bytes_are_flashinfers(name):
    assert tool.fingerprint(our_bytes(name)) == RECORDED["bytes"][name]


def test_what_is_recorded_is_what_flashinfer_gives():
    flashinfer = pytest.importorskip("flashinfer")
    if flashinfer.__version__ != RECORDED["flashinfer"]:
        pytest.skip(f"recorded is {RECORDED['flashinfer']}, installed {flashinfer.__version__}")
    assert tool.record() == RECORDED


@pytest.mark.parametrize("tile", [64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_shuffled_rows_come_back(tile, dtype):
    w = tool.pattern(3, 96, 10).view(dtype)
    shuffled = shuffle_rows(w, tile)
    assert shuffled.dtype == dtype and shuffled.is_contiguous()
    back = torch.empty_like(w)
    back[:, source_rows(96, tile)] = shuffled
    assert torch.equal(back.view(torch.uint8), w.view(torch.uint8))


@pytest.mark.parametrize("rows", [0, 64, 1408])
@pytest.mark.parametrize("tile", [64, 128])
def test_an_order_is_a_permutation(rows, tile):
    order = shuffled_row_indices(rows, tile)
    assert order.tolist() == source_rows(rows, tile)
    assert sorted(order.tolist()) == list(range(rows))


def test_the_tiles_have_orders_of_their_own():
    """FlashInfer's cache up to 0.6.17 gives one tile the other's order; here each is made anew, in
    whatever sequence they are asked for."""
    for tile in (64, 128, 64):
        assert shuffled_row_indices(64, tile).tolist() == source_rows(64, tile)
    assert not torch.equal(shuffled_row_indices(64, 64), shuffled_row_indices(64, 128))


def test_gated_and_ungated_have_orders_of_their_own():
    gated = shuffle_rows(interleave_halves(numbered(128)), 128)
    assert not torch.equal(gated, shuffle_rows(numbered(128), 128))


@pytest.mark.parametrize("tail", [(), (5,), (4, 6)])
def test_halves(tail):
    gate, up = tool.pattern(2, 3, *tail), tool.pattern(2, 3, *tail, seed=1)
    w = torch.cat((gate, up), dim=1)
    swapped = up_gate(w)
    assert torch.equal(swapped, torch.cat((up, gate), dim=1)) and swapped.is_contiguous()
    assert torch.equal(up_gate(swapped), w)
    alternating = interleave_halves(swapped)
    assert torch.equal(alternating[:, 0::2], up) and torch.equal(alternating[:, 1::2], gate)
    assert alternating.is_contiguous()


def test_interleaved_rows_are_gate_first():
    """gpt-oss stores g0, u0, g1, u1, ...; swapping each pair, as vLLM and SGLang do, and our way
    over [up; gate] give the same rows."""
    stored = torch.tensor([[10, 20, 11, 21, 12, 22]])
    ordered = up_gate_from_interleaved(stored)
    assert ordered.tolist() == [[20, 21, 22, 10, 11, 12]]
    pairs_swapped = stored.view(1, 3, 2).flip(-1).flatten(1)
    assert torch.equal(interleave_halves(ordered), pairs_swapped)


@pytest.mark.parametrize("tile", [64, 128])
@pytest.mark.parametrize("vector_size", [16, 32])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_shuffled_scales_lie_where_the_formula_says(tile, vector_size, dtype):
    E, rows, columns = 2, 256, 6
    scale = tool.pattern(E, rows, columns, below=127).view(dtype)
    moved = shuffle_scale_rows(scale, tile, vector_size)
    assert moved.shape == (E, rows, 8) and moved.dtype == dtype
    plain, flat = scale.view(torch.uint8), moved.view(torch.uint8).flatten(1)
    source = source_rows(rows, tile)
    for m in range(0, rows, 7):
        for k in range(columns):
            at = (m // 128) * 2 * 512 + (k // 4) * 512
            at += (m % 32) * 16 + (m % 128 // 32) * 4 + k % 4
            assert torch.equal(flat[:, at], plain[:, source[m], k])


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_come_back(dtype):
    w = tool.pattern(2, 5, 384).view(dtype)
    blocks = block_major(w)
    columns = 128 // dtype.itemsize
    assert blocks.shape == (2, 3, 5, columns) and blocks.is_contiguous()
    back = torch.cat([blocks[:, i] for i in range(3)], dim=-1)
    assert torch.equal(back.view(torch.uint8), w.view(torch.uint8))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: shuffled_row_indices(24, 64), "num_rows must be a multiple of 16 .* 64, got 24"),
        (lambda: shuffled_row_indices(48, 128), "num_rows must be a multiple of 32 .* 128, got 48"),
        (lambda: shuffled_row_indices(64, 256), "epilogue_tile must be 64 or 128, got 256"),
        (lambda: shuffle_rows(torch.zeros(2, 40, 4), 64), "a multiple of 16 for tile 64, got 40"),
        (lambda: shuffle_rows(torch.zeros(4), 64), r"w must be of shape \(E, rows, ...\)"),
        (
            lambda: shuffle_scale_rows(tool.pattern(1, 64, 4), 128, 16),
            r"scale must be of rows that are a multiple of 128, got \(1, 64, 4\)",
        ),
        (lambda: shuffle_scale_rows(tool.pattern(1, 128, 4), 128, 64), "16 or 32, got 64"),
        (lambda: shuffle_scale_rows(torch.zeros(1, 128, 4), 128, 16), "of a one-byte dtype"),
        (lambda: shuffle_scale_rows(tool.pattern(1, 128), 128, 16), r"\(E, rows, columns\)"),
        (lambda: block_major(tool.pattern(4, 96)), "a multiple of 128 bytes, got 96 bytes"),
        (lambda: up_gate(torch.zeros(2, 3, 4)), r"even number of rows, got \(2, 3, 4\)"),
        (lambda: up_gate_from_interleaved(torch.zeros(2, 3)), "even number of rows"),
        (lambda: interleave_halves(torch.zeros(2, 5)), "even number of rows"),
    ],
)  # fmt: skip
def test_bad_input(call, said):
    with pytest.raises(ValueError, match=said):
        call()


def test_wrong_types():
    with pytest.raises(TypeError, match="block_major: w must be a Tensor, got list"):
        block_major([1.0])


ACTIVATIONS = {
    "swiglu": "swiglu", "swiglu_step": Activation.swiglu_step(3.0), "relu2": "relu2"
}  # fmt: skip
FORMATS_OF = {
    "trtllm_fp8_per_tensor": "fp8_tensor", "trtllm_fp8_block": "fp8_block", "trtllm_bf16": None,
    "cutlass_fp8_per_tensor": "fp8_tensor", "cutlass_fp8_block": "fp8_block", "cutlass_bf16": None,
}  # fmt: skip
SCALES_OF = {  # FlashInfer's names of quant_scales, in their order
    "cutlass_fp8_block": ("fc1_block_scale", "fc2_block_scale"),
    "cutlass_fp8_per_tensor": (
        "fc1_dequant_scale", "fc2_act_quant_scale", "fc2_dequant_scale", "fc1_act_dequant_scale"
    ),
}  # fmt: skip
# What FlashInfer keeps for other uses, and ones that None stands for.
UNUSED = ("hidden_states_scale_global", "intermediate_scale_global", "fc1_dequant", "fc2_dequant")
ONES = ("output1_scale_scalar", "output1_scale_gate_scalar", "output2_scale_scalar")


def assert_recorded(made: dict, recorded: dict[str, str], unused: tuple[str, ...]) -> None:
    """All tensors for the entry point are FlashInfer's, and none of FlashInfer's is missing."""
    ours = {key: tool.fingerprint(v) for key, v in made.items() if isinstance(v, Tensor)}
    assert ours == {key: v for key, v in recorded.items() if key not in unused}


@pytest.mark.parametrize(
    ("name", "recipe"), [(n, r) for n, made in RECORDED["recipes"].items() for r in made]
)
def test_recipes_are_flashinfers(name, recipe):
    w13 = tool.weights(tool.E, (1 if name == "relu2" else 2) * tool.I, tool.H)
    w13, w2 = w13 if name == "relu2" else gate_first(w13), tool.weights(tool.E, tool.H, tool.I)
    format = FORMATS_OF[recipe]
    if format is not None:
        block = (128, 128) if format == "fp8_block" else None
        w13, w2 = (tmoe.quantize(w, format, block_shape=block) for w in (w13, w2))
    scales = (1 / 8, 1 / 0.5) if format == "fp8_tensor" else (None, None)
    experts = ExpertWeights(w13, w2, ACTIVATIONS[name], False, None, None, *scales)
    made = getattr(recipes, recipe)(experts).keywords()
    assert made.get("use_deepseek_fp8_block_scale", False) == (recipe == "cutlass_fp8_block")
    assert made.get("fp8_quantization_type", "DeepSeekFp8") == "DeepSeekFp8"
    made |= zip(SCALES_OF.get(recipe, ()), made.pop("quant_scales", ()), strict=True)
    made.pop("swiglu_limit", None)  # FlashInfer's function leaves swiglu_step's to its caller
    assert_recorded(made, RECORDED["recipes"][name][recipe], UNUSED)


def quantized(codes: Tensor, scale: Tensor, format: str) -> QuantizedTensor:
    g = torch.ones(len(codes)) if format == "nvfp4" else None
    scale = scale.view(FORMATS[format].scale.storage)
    return QuantizedTensor.from_parts(codes, scale, format=format, global_scale=g)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("format", VECTOR)
def test_shuffled_blocks_are_flashinfers(format, name):
    """With the same bytes in place of FlashInfer's quantisers, which need a GPU."""
    projections = []
    for rows, columns in (((1 if name == "relu2" else 2) * tool.I, tool.H), (tool.H, tool.I)):
        if format == "mxfp8":
            each = [tool.mxfp8_parts(rows, columns, seed=e) for e in range(tool.E)]
            parts = [torch.stack(part) for part in zip(*each, strict=True)]
        else:
            flat = tool.fp4_parts(tool.E * rows, columns, VECTOR[format], seed=0)
            parts = [part.unflatten(0, (tool.E, rows)) for part in flat]
        if rows == 2 * tool.I:
            parts = [gate_first(part) for part in parts]
        projections.append(quantized(*parts, format))
    scales = (1.0, 1.0) if format == "nvfp4" else (None, None)
    experts = ExpertWeights(*projections, ACTIVATIONS[name], False, None, None, *scales)
    recipe = recipes.trtllm_mxfp8 if format == "mxfp8" else recipes.trtllm_fp4
    unused = {"nvfp4": ("gemm1_alpha",), "mxfp4": ONES}.get(format, ())
    recorded = RECORDED["replaced quantisers"][name][format]
    made = recipe(experts).keywords()
    assert_recorded(made, recorded, unused)
    assert made.get("fp8_quantization_type", "MxFp8") == "MxFp8"
    if format == "mxfp4":
        assert recipes.cutlass_mxfp4(experts).use_mxfp8_act_scaling


def test_filled_up_codes_are_flashinfers():
    """Both halves are filled up on their own. FlashInfer's scales there are 1, ours the byte 0."""
    codes1, scale1, codes2, scale2 = tool.filled_up_input()
    projections = quantized(codes1, scale1, "nvfp4"), quantized(codes2, scale2, "nvfp4")
    made = recipes.trtllm_fp4(ExpertWeights(*projections, input_scale=1.0, hidden_scale=1.0))
    assert (made.sizes.padded_hidden, made.sizes.padded_intermediate) == (256, 128)
    first = gate_up_of_fused(unshuffled(made.gemm1_weights, 128))
    second = unshuffled(made.gemm2_weights, 128)
    assert_recorded({"gemm1_weights": first, "gemm2_weights": second}, RECORDED["filled up"], ())
