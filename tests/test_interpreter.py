"""What the kernels rely on Triton's CPU interpreter for, each as a kernel of a few lines.

The interpreter does bf16 arithmetic on raw bits and truncates fp32 when it stores bf16. So kernels
go through `widen` and `narrow`; everything else here has to be right by itself. When one of these
fails after an upgrade of Triton or NumPy, other results mean nothing until it is understood.
"""

import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.language.semantic import IncompatibleTypeErrorImpl

import tmoe.kernels.launch  # noqa: F401  (mends the interpreter)
from tests import operators
from tmoe.kernels.casts import INTERPRETED, narrow, widen

N = 16


@pytest.fixture(autouse=True)
def _operators_of_triton():
    """What the tests' operators remember is not what a kernel relies on elsewhere."""
    operators.forget()


@triton.jit
def _copy_kernel(out_ptr, x_ptr, num, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs, mask=offs < num, other=0), mask=offs < num)


@triton.jit
def _masked_sum_kernel(out_ptr, x_ptr, num, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < num, other=0)
    tl.store(out_ptr, tl.sum(x.to(out_ptr.dtype.element_ty), 0))


@triton.jit
def _widened_kernel(sum_ptr, less_ptr, a_ptr, b_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)
    a = widen(tl.load(a_ptr + offs)).to(tl.float32)
    b = widen(tl.load(b_ptr + offs)).to(tl.float32)
    tl.store(sum_ptr + offs, narrow(a + b, sum_ptr.dtype.element_ty))
    tl.store(less_ptr + offs, (a < b).to(tl.int32))


@triton.jit
def _narrow_kernel(out_ptr, x_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, narrow(tl.load(x_ptr + offs), out_ptr.dtype.element_ty))


@triton.jit
def _matmul_kernel(out_ptr, a_ptr, b_ptr, depth, N: tl.constexpr):
    offs = tl.arange(0, N)
    acc = tl.zeros((N, N), tl.float32)
    for d in range(0, depth, N):  # a bound known only at run time
        inside = d + offs < depth
        a_ptrs = a_ptr + offs[:, None] * depth + d + offs[None, :]
        b_ptrs = b_ptr + (d + offs)[:, None] * N + offs[None, :]
        a = widen(tl.load(a_ptrs, mask=inside[None, :], other=0.0))
        b = widen(tl.load(b_ptrs, mask=inside[:, None], other=0.0))
        acc = tl.dot(a, b, acc, input_precision="ieee")
    tl.store(out_ptr + offs[:, None] * N + offs[None, :], acc)


@triton.jit
def _index_kernel(hist_ptr, offsets_ptr, picked_ptr, added_ptr, ids_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)
    ids = tl.load(ids_ptr + offs)
    hist = tl.histogram(ids, N)
    offsets = tl.cumsum(hist, 0) - hist
    tl.store(hist_ptr + offs, hist)
    tl.store(offsets_ptr + offs, offsets)
    tl.store(picked_ptr + offs, tl.gather(offsets, ids, 0))
    tl.atomic_add(added_ptr + ids, 1)


@triton.jit
def _split_kernel(even_ptr, odd_ptr, x_ptr, N: tl.constexpr):
    even, odd = tl.split(tl.reshape(tl.load(x_ptr + tl.arange(0, 2 * N)), (N, 2)))
    tl.store(even_ptr + tl.arange(0, N), even)
    tl.store(odd_ptr + tl.arange(0, N), odd)


@triton.jit
def _condition_kernel(out_ptr, x_ptr, row, num, N: tl.constexpr):
    offs = tl.arange(0, N)
    mask = (offs < num) & (row >= 0)
    if INTERPRETED:
        assert mask.handle.data.dtype == bool  # what Triton 3.9 asks of a mask
    tl.store(out_ptr + offs, tl.load(x_ptr + offs, mask=mask, other=-1.0))


@triton.jit
def _divide_kernel(out_ptr, x_ptr, num, N: tl.constexpr):
    offs = tl.arange(0, N)
    x = tl.load(x_ptr + offs, mask=offs < num, other=0.0)
    tl.store(out_ptr + offs, tl.exp(x) / x, mask=offs < num)
    tl.store(out_ptr + offs, x / x, mask=(offs < num) & (x > 1.0))


@triton.jit
def _cast_kernel(out_ptr, x_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs).to(out_ptr.dtype.element_ty))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int32])
def test_a_copy_is_a_copy(device, dtype):
    """IN08"""
    x = torch.arange(1, N + 1, device=device).to(dtype)
    out = torch.full_like(x, 99)
    _copy_kernel[(1,)](out, x, N - 3, BLOCK=N)
    assert out[: N - 3].tolist() == x[: N - 3].tolist()
    assert out[N - 3 :].tolist() == [99] * 3


def test_a_masked_load_fills_with_other(device):
    """IN07"""
    x, out = torch.ones(256, device=device), torch.empty(1, device=device)
    _masked_sum_kernel[(1,)](out, x, 16, BLOCK=256)
    assert out.item() == 16


def test_small_integers_are_summed_in_int32(device):
    """IN06"""
    x = torch.ones(512, dtype=torch.int8, device=device)
    out = torch.empty(1, dtype=torch.int32, device=device)
    _masked_sum_kernel[(1,)](out, x, 512, BLOCK=512)
    assert out.item() == 512


def test_a_grid_of_no_programs_does_nothing():
    if torch.cuda.is_available():
        pytest.skip("a GPU refuses an empty grid; launchers return before that")
    out = torch.full((N,), 7.0)
    _copy_kernel[(0,)](out, torch.zeros(N), N, BLOCK=N)
    assert out.tolist() == [7.0] * N


def test_widened_bf16_adds_and_compares(device):
    """IN02"""
    a = torch.tensor([2.5, -5.0] * (N // 2), dtype=torch.bfloat16, device=device)
    b = torch.tensor([2.0, -2.0] * (N // 2), dtype=torch.bfloat16, device=device)
    total, less = torch.empty_like(a), torch.empty(N, dtype=torch.int32, device=device)
    _widened_kernel[(1,)](total, less, a, b, N=N)
    assert total.tolist() == [4.5, -7.0] * (N // 2)
    assert less.tolist() == [0, 1] * (N // 2)


SPECIAL = [0.0, torch.inf, torch.nan, 3.4e38, 1e-45, 1e-40, 65504.0, 65520.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_rounds_as_torch_does(device, dtype):
    """Ties, overflow to infinity, subnormals, and a NaN whose only set bits are those cut off."""
    halfway = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11])
    low_nan = torch.tensor([0x7F800001], dtype=torch.int32).view(torch.float32)
    x = torch.cat([torch.tensor(SPECIAL), halfway, low_nan, torch.randn(4096)])[:2048]
    x = torch.cat([x, -x]).to(device)
    out = torch.empty(4096, dtype=dtype, device=device)
    _narrow_kernel[(4,)](out, x, BLOCK=1024)
    torch.testing.assert_close(out, x.to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("depth", [N, 3 * N, 3 * N + 5])
def test_dot_of_small_integers_is_exact(device, dtype, depth):
    """IN01"""
    a = torch.randint(-8, 9, (N, depth), device=device)
    b = torch.randint(-8, 9, (depth, N), device=device)
    out = torch.empty(N, N, device=device)
    _matmul_kernel[(1,)](out, a.to(dtype), b.to(dtype), depth, N=N)
    assert out.tolist() == (a.cpu() @ b.cpu()).tolist()


def test_histogram_cumsum_gather_and_atomic_add(device):
    """IN05"""
    ids = torch.tensor([3, 0, 3, 15, 0, 3, 1, 2] * 2, dtype=torch.int32, device=device)
    hist, offsets, picked = (torch.empty_like(ids) for _ in range(3))
    added = torch.zeros_like(ids)
    _index_kernel[(1,)](hist, offsets, picked, added, ids, N=N)
    counts = torch.bincount(ids.cpu(), minlength=N)
    exclusive = counts.cumsum(0) - counts
    assert hist.tolist() == added.tolist() == counts.tolist()
    assert offsets.tolist() == exclusive.tolist()
    assert picked.tolist() == exclusive[ids.cpu()].tolist()


def test_split_takes_even_and_odd(device):
    x = torch.arange(2 * N, dtype=torch.float32, device=device)
    even, odd = torch.empty(N, device=device), torch.empty(N, device=device)
    _split_kernel[(1,)](even, odd, x, N=N)
    assert even.tolist() == x[0::2].tolist()
    assert odd.tolist() == x[1::2].tolist()


def test_values_on_the_e4m3_grid_are_encoded_exactly(device):
    """IN04"""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no e4m3 before compute capability 8.9")
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    grid = codes.float().nan_to_num()
    out = torch.empty(256, dtype=torch.float8_e4m3fn, device=device)
    _cast_kernel[(1,)](out, grid, N=256)
    assert out.float().tolist() == grid.tolist()


@pytest.mark.parametrize("row, wanted", [(0, [0, 1, 2, -1]), (-1, [-1, -1, -1, -1])])
def test_a_block_and_one_condition_are_a_mask(row, wanted, device):
    x = torch.arange(4, dtype=torch.float32, device=device)
    out = torch.empty_like(x)
    _condition_kernel[(1,)](out, x, row, 3, N=4)
    assert out.tolist() == wanted


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_arithmetic_is_silent(device):
    """Lanes that are masked divide 0 by 0, and an infinity is a result: a GPU remarks on neither,
    and NumPy still does outside a kernel."""
    x, out = torch.tensor([1.0, 1000.0], device=device), torch.full((N,), 7.0, device=device)
    _divide_kernel[(1,)](out, x, 2, N=N)
    assert out.tolist() == pytest.approx([math.e, 1.0, *[7.0] * (N - 2)])
    with pytest.raises(RuntimeWarning, match="divide by zero"):
        np.float32(1) / np.float32(0)


def _operands() -> list:
    """Blocks and scalars of every kind, and numbers; inside a kernel, or after one has run."""
    from triton.runtime.interpreter import TensorHandle, _get_np_dtype

    random, tensors = np.random.default_rng(0), []
    types = [tl.int1, tl.uint8, tl.int32, tl.int64, tl.float16, tl.bfloat16, tl.float32]
    for element in [*types, tl.pointer_type(tl.float32)]:
        for shape in [(), (4,), (2, 1)]:
            data = random.integers(0, 2 if element is tl.int1 else 60, shape or (1,))
            handle = TensorHandle(data.astype(_get_np_dtype(element)), element)
            tensors.append(tl.tensor(handle, tl.block_type(element, shape) if shape else element))
    flags = [x < 30 for x in tensors if x.dtype in (tl.float16, tl.int32)]
    return [*tensors, *flags, 0, 3, -1, 2**31, 1.0, -0.0, 2.5, True, False, tl.constexpr(3)]


REPLACED = [*operators.COMPARISONS, *operators.ARITHMETIC, *operators.REVERSED]
# What goes through the checks that are replaced too.
CALLS = {
    "__rshift__": lambda left, right: left >> right,
    "__truediv__": lambda left, right: left / right,
    "maximum": lambda left, right: tl.maximum(left, right),
    "where": lambda left, right: tl.where(left == left, left, right),
} | {name: lambda left, right, name=name: getattr(left, name)(right) for name in REPLACED}


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels don't run in the interpreter")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", CALLS)
def test_operators_that_remember_compute_the_same(name):
    """Whatever Triton's own operator takes: the same type, dtype and bits at the second time."""
    _copy_kernel[(1,)](torch.empty(N), torch.zeros(N), N, BLOCK=N)  # replaces the language
    taken = 0
    for left in [x for x in _operands() if isinstance(x, tl.tensor)]:
        for right in _operands():
            if name in operators.REVERSED and isinstance(right, tl.tensor):
                continue  # never happens: Python asks the left one
            operators.forget()
            try:
                own = CALLS[name](left, right)
            except (TypeError, ValueError, AttributeError, IncompatibleTypeErrorImpl):
                continue
            remembered, taken = CALLS[name](left, right), taken + 1
            assert remembered.type == own.type and remembered.shape == own.shape
            assert remembered.handle.dtype == own.handle.dtype
            assert remembered.handle.data.dtype == own.handle.data.dtype
            assert remembered.handle.data.shape == own.handle.data.shape
            assert remembered.handle.data.tobytes() == own.handle.data.tobytes()
    assert taken > 100
