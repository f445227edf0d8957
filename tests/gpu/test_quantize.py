"""The quantisers at real sizes: the bits of the reference, and rows past 2^31 elements."""

from __future__ import annotations

import pytest
import torch

from tmoe.formats import FORMATS
from tmoe.formats.compute import quantize_parts
from tmoe.formats.recipe import Recipe

pytestmark = pytest.mark.gpu

RECIPES = [
    *(Recipe.of("test", name) for name in FORMATS),
    Recipe.of("test", "fp8_block", (128, 128)),
    Recipe.of("test", "fp8_block", scale_rule="ceil"),
    Recipe.of("test", "mxfp4", scale_rule="ceil"),
]


def as_bytes(part):
    return part.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("shape", [(8192, 7168), (16, 2880), (8, 5760, 2880)], ids=str)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: "-".join(map(str, r.words)))
def test_same_bits_as_the_reference(recipe, shape, device):
    x = torch.randn(shape, device=device, dtype=torch.bfloat16)
    x[..., ::97] *= 50
    got = quantize_parts(x, recipe, None, None, "triton")
    want = quantize_parts(x, recipe, None, None, "torch")
    for part, wanted in zip(got, want, strict=True):
        assert part is wanted or torch.equal(as_bytes(part), as_bytes(wanted))


@pytest.mark.parametrize("name", ["fp8_token", "fp8_block", "mxfp8", "mxfp4"])
def test_rows_past_32_bits(name, device):
    T, K = 2**31 // 4096 + 100, 4096
    x = torch.zeros(T, K, device=device, dtype=torch.bfloat16)
    x[-64:] = torch.randn(64, K, device=device)
    recipe = Recipe.of("test", name)
    got = quantize_parts(x, recipe, None, None, "triton")
    want = quantize_parts(x[-64:].clone(), recipe, None, None, "triton")
    for part, wanted in zip(got[:2], want[:2], strict=True):
        assert torch.equal(as_bytes(part[-64:]), as_bytes(wanted))
