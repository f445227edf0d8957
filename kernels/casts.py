"""Casts that give the same bits on a GPU and under Triton's CPU interpreter.

The interpreter does bf16 arithmetic on raw bits and truncates when it stores fp32 as bf16. So every
kernel widens with `widen` right after a load and narrows with `narrow` right before a store.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def widen(x):
    """A matmul operand as loaded; under the interpreter bf16 becomes fp32, which holds it
    exactly."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        bits = x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16  # its own cast bends subnormals
        x = bits.to(tl.float32, bitcast=True)
    return x


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """fp32 `x` as `dtype`, rounded to nearest even everywhere."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)
        top = tl.where(x == x, rounded, bits | 0x400000) >> 16  # a NaN stays one: set its top bit
        x = top.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)
