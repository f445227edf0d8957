"""Orders of codes and scales in memory: formula, round trip, and what other libraries do."""

from __future__ import annotations

import pytest
import torch

from tmoe.formats import (
    decode_e8m0,
    e4m3fn_to_fnuz,
    pack_e2m1,
    swizzle_scale,
    transpose_scale,
    unpack_e2m1,
    unswizzle_scale,
)
from tmoe.formats.format import E2M1

SHAPES = [(1, 1), (128, 4), (5, 3), (129, 5), (300, 8), (256, 90), (2, 3, 130, 7), (0, 4), (3, 0)]
ONE_BYTE = (torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu)


def random_bytes(*shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def swizzled_by_formula(scale):
    """The offset of each byte, as FlashInfer's and TensorRT-LLM's sources have it."""
    M, C = scale.shape
    rows, columns = -(-M // 128) * 128, -(-C // 4) * 4
    flat = torch.zeros(rows * columns, dtype=torch.uint8)
    m, k = torch.arange(M)[:, None], torch.arange(C)[None, :]
    offset = (m // 128) * (columns // 4) * 512 + (k // 4) * 512
    offset = offset + (m % 32) * 16 + ((m % 128) // 32) * 4 + k % 4
    flat[offset.flatten()] = scale.flatten()
    return flat.view(rows, columns)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ONE_BYTE)
def test_swizzle_and_back(shape, dtype):
    scale = random_bytes(*shape).view(dtype)
    swizzled = swizzle_scale(scale)
    assert swizzled.dtype == dtype and swizzled.is_contiguous()
    assert swizzled.shape[-2] % 128 == 0 and swizzled.shape[-1] % 4 == 0
    back = unswizzle_scale(swizzled, *shape[-2:])
    assert back.dtype == dtype
    assert torch.equal(back.view(torch.uint8), scale.view(torch.uint8))
    if scale.numel():
        matrices = scale.view(torch.uint8).reshape(-1, *shape[-2:])
        wanted = torch.stack([swizzled_by_formula(matrix) for matrix in matrices])
        assert torch.equal(swizzled.view(torch.uint8).reshape(wanted.shape), wanted)


def test_a_strided_scale_can_be_swizzled():
    scale = random_bytes(7, 200).t()
    assert not scale.is_contiguous()
    assert torch.equal(swizzle_scale(scale), swizzled_by_formula(scale))


def test_what_stands_in_the_padding_never_comes_back():
    """PD06: five rows of scales in a tile of 128; the other rows hold NaN."""
    scale = random_bytes(5, 3)
    padding = swizzle_scale(torch.ones_like(scale)) == 0
    poisoned = swizzle_scale(scale).masked_fill(padding, 0x7F)
    assert torch.equal(unswizzle_scale(poisoned, 5, 3), scale)


def test_the_padding_is_zeros():
    swizzled = swizzle_scale(torch.full((5, 3), 255, dtype=torch.uint8))
    assert swizzled.shape == (128, 4)
    assert (swizzled == 255).sum() == 15 and (swizzled == 0).sum() == 512 - 15


def test_swizzle_is_torchaos():
    blocked = pytest.importorskip("torchao.prototype.mx_formats.utils").to_blocked
    for shape in ((128, 4), (5, 3), (129, 5), (300, 90)):
        scale = random_bytes(*shape)
        assert torch.equal(swizzle_scale(scale).flatten(), blocked(scale).flatten())


def test_swizzle_is_flashinfers():
    prepare = pytest.importorskip("flashinfer.fused_moe.prepare")
    scale = random_bytes(2, 256, 8)
    theirs = prepare._swizzle_cutile_fp4_scales(scale, scale_block_size=16)
    assert torch.equal(swizzle_scale(scale).flatten(), theirs.view(torch.uint8).flatten())


def test_transpose_is_its_own_inverse():
    scale = torch.randn(2, 5, 3)
    transposed = transpose_scale(scale)
    assert transposed.shape == (2, 3, 5) and transposed.is_contiguous()
    assert torch.equal(transposed[1, 2], scale[1, :, 2])
    assert torch.equal(transpose_scale(transposed), scale)


def test_element_0_is_the_low_nibble():
    """QN17. [0.5, 6] is byte 0x71; symmetric data would pass with the nibbles swapped."""
    codes = torch.tensor([E2M1.values.index(0.5), E2M1.values.index(6.0)], dtype=torch.uint8)
    packed = pack_e2m1(codes)
    assert packed.tolist() == [0x71]
    assert [E2M1.values[code] for code in unpack_e2m1(packed).tolist()] == [0.5, 6.0]


def test_every_byte_unpacks_to_its_codes():
    packed = torch.arange(256, dtype=torch.uint8).view(2, 8, 16)
    codes = unpack_e2m1(packed)
    assert codes.shape == (2, 8, 32) and codes.max() == 15
    assert torch.equal(codes[..., 0::2], packed % 16)
    assert torch.equal(codes[..., 1::2], packed // 16)
    assert torch.equal(pack_e2m1(codes), packed)


def test_nibbles_are_compressed_tensors():
    helpers = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")
    packed = random_bytes(4, 8)
    values = torch.tensor(E2M1.values)[unpack_e2m1(packed).long()]
    assert torch.equal(helpers.unpack_fp4_from_uint8(packed, 4, 16, torch.float32), values)


def test_e8m0_bytes():
    """QN20: byte 0 is 2^-127, not 0."""
    got = decode_e8m0(torch.tensor([0, 1, 127, 254, 255], dtype=torch.uint8))
    assert got[:4].tolist() == [2.0**-127, 2.0**-126, 1.0, 2.0**127]
    assert got[4].isnan()
    every = torch.arange(256, dtype=torch.uint8)
    torch.testing.assert_close(
        decode_e8m0(every), every.view(torch.float8_e8m0fnu).float(), rtol=0, atol=0, equal_nan=True
    )


def test_fnuz_hardware_gets_the_same_values():
    """QN16: bytes 0x38, 0x7E, 0x80 are 1, 448, -0 in e4m3fn and 0.5, 224, NaN in e4m3fnuz."""
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.tensor(0.3)
    data, doubled = e4m3fn_to_fnuz(every, scale)
    assert doubled == 2 * scale
    want, got = every.float() * scale, data.float() * doubled
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    codes = data.view(torch.uint8)[[0x38, 0x7E, 0x80, 0x7F, 0xFF]]
    assert codes.tolist() == [0x38, 0x7E, 0x00, 0x80, 0x80]


@pytest.mark.parametrize(
    "call, match",
    [
        (lambda: swizzle_scale(torch.ones(4)), "swizzle_scale: scale must be of at least 2"),
        (lambda: swizzle_scale(torch.ones(4, 4)), "of a one-byte dtype, got torch.float32"),
        (
            lambda: unswizzle_scale(random_bytes(128, 4), 129, 4),
            r"of shape \(..., 256, 4\), got \(128, 4\)",
        ),
        (lambda: pack_e2m1(random_bytes(3)), r"codes must be of even row length, got \(3,\)"),
        (lambda: pack_e2m1(torch.ones(4)), "of dtype torch.uint8, got torch.float32"),
        (lambda: unpack_e2m1(torch.ones(4)), "of dtype torch.uint8"),
        (lambda: decode_e8m0(torch.ones(4)), "of dtype torch.uint8"),
    ],
)
def test_bad_input(call, match):
    with pytest.raises(ValueError, match=match):
        call()
