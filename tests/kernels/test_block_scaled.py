"""Block-scaled units, which no machine of ours has: what the kernel feeds them, multiplied by hand.

Only `tl.dot_scaled` is replaced. That it becomes the instruction meant is what `tests/aot` sees to.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tmoe
from tests.reference import quantized_experts_ref
from tmoe.backends import triton_quantized
from tmoe.formats import SCHEMES
from tmoe.kernels import gemm_loop, tiles
from tmoe.kernels.quantize_ref import decode_e2m1_ref, decode_ue8m0_ref

if torch.cuda.is_available():
    pytest.skip(
        "stands in for an instruction that the interpreter lacks; a GPU runs its own, which "
        "tests/test_quantized_experts.py checks on whatever GPU there is",
        allow_module_level=True,
    )

E, T, K, H, I = 4, 9, 2, 160, 96  # partial blocks and steps in both projections


def from_numpy(data) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(data).view(np.uint8).copy())


def multiply_by_hand(scale_of):
    """What `add_block_scaled` does, which this interpreter can't."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    def operand(codes, scale, is_packed):
        codes = from_numpy(codes.handle.data)
        values = decode_e2m1_ref(codes) if is_packed else codes.view(torch.float8_e4m3fn).float()
        scale = scale_of(from_numpy(scale.handle.data))
        return values * scale.repeat_interleave(values.shape[1] // scale.shape[1], 1)

    def add_block_scaled(acc, a, a_scale, w, w_scale, CODES):
        product = operand(a, a_scale, CODES.a_packed) @ operand(w, w_scale, CODES.packed).T
        return tl.tensor(TensorHandle(acc.handle.data + product.numpy(), tl.float32), acc.type)

    return add_block_scaled


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4_a8", "nvfp4"])
def test_layer(name, monkeypatch):
    def e4m3(scale):
        return scale.view(torch.float8_e4m3fn).float()

    scale_of = e4m3 if name == "nvfp4" else decode_ue8m0_ref
    monkeypatch.setattr(gemm_loop, "add_block_scaled", multiply_by_hand(scale_of))
    monkeypatch.setattr(triton_quantized, "multiplies_block_scaled", lambda device: True)
    monkeypatch.setattr(tiles, "QUANTIZED_INTERPRETER", tiles.BLACKWELL_SCALED)
    recipe = SCHEMES[name].weights[0]
    gate_up, down = (
        tmoe.quantize(torch.randn(shape) / shape[2] ** 0.5, recipe.format.name)
        for shape in ((E, 2 * I, H), (E, H, I))
    )
    x, weights = torch.randn(T, H), torch.rand(T, K)
    ids = torch.stack([torch.randperm(E)[:K] for _ in range(T)])
    with tmoe.options(backend="triton"):
        y = tmoe.fused_experts(x, gate_up, down, weights, ids, scheme=name)
    want = quantized_experts_ref(x, gate_up.dequantize(), down.dequantize(), weights, ids, name)
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-5)
