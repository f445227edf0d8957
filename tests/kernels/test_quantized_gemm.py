"""The GEMM with quantised weights against its operands taken apart, in fp64."""

from __future__ import annotations

import math

import pytest
import torch

import tmoe
from tests.checking import assert_matches
from tmoe.kernels.activation_ref import activate_ref
from tmoe.kernels.grouped_gemm import grouped_gemm
from tmoe.kernels.launch import is_nvidia
from tmoe.kernels.quantize_ref import decode_e2m1_ref, decode_ue8m0_ref, quantize_fp8_ref
from tmoe.kernels.sort import sort_tokens
from tmoe.kernels.tiles import Tile
from tmoe.kernels.weight_codes import Scales

E, T, K = 3, 7, 2
TILE = Tile(16, 32, 128, 4, 2)
TILES = [TILE, Tile(8, 32, 64, 2, 2), Tile(64, 64, 64, 4, 3)]
BLOCKS = {"block_shape": (128, 128)}
WEIGHTS = {
    "fp8_tensor": ({}, {}),
    "fp8_channel": ({}, dict(weight_rows=1)),
    "fp8_block": (BLOCKS, dict(weight_rows=128, weight_columns=128)),
    "mxfp8": ({}, dict(weight_rows=1, weight_columns=32)),
    "mxfp4": ({}, dict(weight_rows=1, weight_columns=32, packed=True)),
    "nvfp4": ({}, dict(weight_rows=1, weight_columns=16, packed=True)),
}
SHAPES = [(40, 160), (32, 128), (200, 96), (17, 272)]  # N, D


def make_order(device, tile=TILE):
    ids = torch.stack([torch.randperm(E)[:K] for _ in range(T)]).to(device)
    return sort_tokens(ids, num_experts=E, block_m=tile.block_m)


def truth(a, w, order):
    """(S, N) in fp64, each row's product with its expert's weights."""
    offsets = order.expert_offsets.tolist()
    rows = a.double()[order.row_to_slot.long() // K]
    return torch.cat([rows[offsets[e] : offsets[e + 1]] @ w[e].double().T for e in range(E)])


def check(out, want, naive):
    assert_matches(out, want, naive)
    assert out.norm() > 0.9 * want.norm()


@pytest.mark.parametrize("tile", TILES[:2], ids=["16", "8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("N, D", SHAPES, ids=str)
@pytest.mark.parametrize("name", WEIGHTS)
def test_quantised_weights(name, N, D, dtype, tile, device):
    """Tiles of 8 rows stand on the right: too few for the left operand of tensor cores."""
    options, layout = WEIGHTS[name]
    order = make_order(device, tile)
    a = torch.randn(T, D, device=device).to(dtype)
    w = tmoe.quantize(torch.randn(E, N, D, device=device), name, **options)
    out = torch.empty(T * K, N, device=device)
    scales = Scales(w.scale, weight_global=w.global_scale, **layout)
    grouped_gemm(out, a, w.data, order, tile, scales=scales, gather=True)
    values = w.dequantize()
    check(out, truth(a, values, order), truth(a, values.to(dtype), order))


@pytest.mark.parametrize("tile", [TILE, Tile(8, 64, 128, 4, 3)], ids=["16", "8"])
@pytest.mark.parametrize("N, D", SHAPES, ids=str)
@pytest.mark.parametrize(
    "name, inputs",
    [("fp8_tensor", "fp8_tensor"), ("fp8_channel", "fp8_token"), ("fp8_block", "fp8_block")],
)
def test_codes_times_codes(name, inputs, N, D, tile, device):
    """SH02: every block has a scale of its own, a power of two apart from the next."""
    options, layout = WEIGHTS[name]
    order = make_order(device, tile)
    blocks = torch.arange(D, device=device) // 128
    x = torch.randn(T, D, device=device) * 2.0**blocks
    a = tmoe.quantize(x, inputs)
    w = tmoe.quantize(torch.randn(E, N, D, device=device) * 4.0**-blocks, name, **options)
    out = torch.empty(T * K, N, device=device)
    scales = Scales(w.scale, rows=a.scale, **layout)
    grouped_gemm(out, a.data, w.data, order, tile, scales=scales, gather=True)
    values = [q.dequantize() for q in (a, w)]
    check(out, truth(*values, order), truth(*(v.bfloat16() for v in values), order))


@pytest.mark.parametrize("interleaved", [False, True])
def test_gate_and_up_with_halves_of_their_own(interleaved, device):
    """A global scale for each half of the rows; the rest as in grouped_gemm."""
    N, D = 40, 64
    order = make_order(device)
    a = torch.randn(T, D, device=device)
    halves = torch.tensor([[0.01, 0.02], [0.03, 0.01], [0.02, 0.02]], device=device)
    w = tmoe.quantize(torch.randn(E, 2 * N, D, device=device), "nvfp4", global_scale=halves)
    bias, weight = torch.randn(E, 2 * N, device=device), torch.rand(T * K, device=device)
    out = torch.empty(T * K, N, device=device)
    scales = Scales(w.scale, 1, 16, weight_global=halves, packed=True)
    grouped_gemm(
        out, a, w.data, order, TILE, scales=scales, gather=True, gated=True,
        interleaved=interleaved, activation="swiglu", bias=bias, row_weight=weight,
    )  # fmt: skip
    offsets, slot = order.expert_offsets.long(), order.row_to_slot.long()
    expert = torch.searchsorted(offsets[1:], torch.arange(T * K, device=device), right=True)
    y = truth(a, w.dequantize(), order) + bias.double()[expert]
    gate, up = (y[:, ::2], y[:, 1::2]) if interleaved else y.chunk(2, -1)
    want = activate_ref(gate, up, name="swiglu") * weight.double()[slot, None]
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5 * math.sqrt(D))


@pytest.mark.parametrize("of_experts", [False, True])
def test_a_result_in_codes(of_experts, device):
    """What `quantize_fp8` makes of the fp32 result, bit for bit, NaN and the largest included."""
    N, D = 40, 64
    order = make_order(device)
    a = torch.randn(T, D, device=device)
    a[2] = math.nan
    w = tmoe.quantize(torch.randn(E, N, D, device=device), "fp8_channel")
    scale = torch.tensor([0.001, 0.1, 2.0], device=device)[slice(None) if of_experts else 1]
    scales = Scales(w.scale, 1)
    out = torch.empty(T * K, N, device=device)
    grouped_gemm(out, a, w.data, order, TILE, scales=scales, gather=True, activation="silu")
    codes = torch.empty(T * K, N, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    scales = Scales(w.scale, 1, out=scale)
    grouped_gemm(codes, a, w.data, order, TILE, scales=scales, gather=True, activation="silu")
    row = torch.arange(T * K, device=device)
    expert = torch.searchsorted(order.expert_offsets[1:].long(), row, right=True)
    want, _ = quantize_fp8_ref(out, block="row", scale=scale.expand(E)[expert])
    assert torch.equal(codes.view(torch.uint8), want.view(torch.uint8))


def every_scale(name, device):
    """An expert whose row n has scale byte n and, over and over, all 16 codes."""
    columns = {"mxfp4": 32, "nvfp4": 16}[name]
    data = torch.arange(16, dtype=torch.uint8, device=device)
    data = (data[::2] | data[1::2] << 4).repeat(1, 256, 64 // 16)
    scale = torch.arange(256, dtype=torch.uint8, device=device).repeat(64 // columns, 1).T[None]
    return data, scale.contiguous()


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_every_code_under_every_scale(name, tile, device):
    """Rows that are 1 at one place bring the weights to light: exact in bf16, NaN where one is.

    On NVIDIA GPUs products are 2^-32 of what they should be until they are stored, so e8m0 scales
    beyond 2^33 count as NaN, and numbers below 2^-94 as subnormal.
    """
    data, scale = every_scale(name, device)
    if name == "nvfp4":
        scale = scale.view(torch.float8_e4m3fn)
    a = torch.eye(64, dtype=torch.bfloat16, device=device)
    ids = torch.zeros(64, 1, dtype=torch.int64, device=device)
    order = sort_tokens(ids, num_experts=1, block_m=tile.block_m)
    out = torch.empty(64, 256, device=device)
    scales = Scales(scale, **WEIGHTS[name][1])
    grouped_gemm(out, a, data, order, tile, scales=scales, gather=True)
    value = decode_e2m1_ref(data[0, 0])  # of column d
    factor = decode_ue8m0_ref(scale[0, :, 0]) if name == "mxfp4" else scale[0, :, 0].float()
    want = value[:, None] * factor
    want[:, ~((6 * factor).isfinite())] = math.nan  # 0 · inf, in a sum
    if is_nvidia(device):
        want[:, factor > 2.0**33] = math.nan
    least = 2.0**-94 if is_nvidia(device) else 2.0**-126
    small = (want != 0) & (want.abs() < least)  # matmul units may take it for 0
    torch.testing.assert_close(out[~small], want[~small], rtol=0, atol=0, equal_nan=True)
    assert ((out - want).abs() <= want.abs())[small].all()


def test_poisoned_padding(device):
    """Bytes past a row's end, and rows past the last expert's, may hold anything."""
    N, D = 40, 72
    order = make_order(device)
    a = torch.full((T, D + 8), math.nan, device=device)
    a[:, :D] = torch.randn(T, D, device=device)
    w = tmoe.quantize(torch.randn(E, N, D, device=device), "fp8_channel")
    wide = torch.full((E, N, D + 56), 0x7F, dtype=torch.uint8, device=device)
    wide[:, :, :D] = w.data.view(torch.uint8)
    codes = wide.view(torch.float8_e4m3fn)[:, :, :D]
    outs = []
    for data, rows in ((w.data, a[:, :D].contiguous()), (codes, a[:, :D])):
        out = torch.empty(T * K, N, device=device)
        grouped_gemm(out, rows, data, order, TILE, scales=Scales(w.scale, 1), gather=True)
        outs.append(out)
    assert torch.equal(*outs) and outs[0].isfinite().all()
