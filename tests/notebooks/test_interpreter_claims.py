"""What notebooks/interpreter_and_gpu.md says of the interpreter; its examples run elsewhere.

Each test names the words that it holds, so that page and tests stay together. What is said of GPUs
needs one, but for what a compiler refuses.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl
from packaging.version import Version
from triton.runtime.errors import InterpreterError

from tests.notebooks.folder import NOTEBOOKS

PAGE = " ".join((NOTEBOOKS / "interpreter_and_gpu.md").read_text().split())
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels aren't interpreted here")


def holds(*words: str) -> None:
    for part in words:
        assert part in PAGE, f"the page doesn't say {part!r} any more"


@triton.jit
def _dot_kernel(out_ptr, a_ptr, b_ptr, M: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr):
    m, k = tl.arange(0, M), tl.arange(0, K)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    b = tl.load(b_ptr + k[:, None] * M + m[None, :])
    out = tl.dot(a, b, input_precision=PRECISION)
    tl.store(out_ptr + m[:, None] * M + m[None, :], out)


def _dot(dtype, M=16, K=16, precision="ieee") -> tuple[torch.Tensor, torch.Tensor]:
    a, b = torch.randn(M, K).to(dtype), torch.randn(K, M).to(dtype)
    out = torch.zeros(M, M)
    _dot_kernel[(1,)](out, a, b, M=M, K=K, PRECISION=precision)
    return out, a.float() @ b.float()


def test_products_of_other_formats_are_right():
    holds("`tl.dot` of fp32, fp16 and e4m3")
    for dtype in (torch.float32, torch.float16, torch.float8_e4m3fn):
        torch.testing.assert_close(*_dot(dtype))


def test_products_of_bf16_are_not():
    holds("**Arithmetic with bf16 is wrong**: sums, comparisons, `tl.sum`, `tl.dot`.")
    got, wanted = _dot(torch.bfloat16)
    assert (got - wanted).abs().max() > 1e9


@triton.jit
def _compare_and_sum_kernel(less_ptr, sum_ptr, x_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    tl.store(less_ptr + i, (x < tl.load(y_ptr + i)).to(tl.int32))
    tl.store(sum_ptr, tl.sum(x, 0).to(tl.float32))


def test_neither_are_comparisons_and_sums_of_bf16():
    x, y = torch.tensor([-1.0, 3.0]).bfloat16(), torch.tensor([-2.0, -3.0]).bfloat16()
    less, total = torch.zeros(2, dtype=torch.int32), torch.zeros(1)
    _compare_and_sum_kernel[(1,)](less, total, x, y, N=2)
    assert less.tolist() == [1, 1]  # it is greater, twice
    assert total.item() != 2.0


def test_ten_bits_are_never_used():
    holds("may also use TF32", "The interpreter keeps them always.")
    bits = []
    for precision in ("tf32", "ieee"):
        torch.manual_seed(0)
        bits.append(_dot(torch.float32, precision=precision)[0])
    assert torch.equal(*bits)


@triton.jit
def _exp_kernel(out_ptr, x_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.exp(tl.load(x_ptr + i)))


def test_last_bits_differ():
    holds("**Last bits differ** in `tl.exp`")
    x, out = torch.randn(4096), torch.zeros(4096)
    _exp_kernel[(1,)](out, x, N=4096)
    assert not torch.equal(out, x.exp())
    torch.testing.assert_close(out, x.exp())


@triton.jit
def _order_kernel(order_ptr, count_ptr):
    tl.store(order_ptr + tl.atomic_add(count_ptr, 1), tl.program_id(0))


def _order(programs: int, **options) -> list[int]:
    order, count = torch.full((8,), -1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    _order_kernel[(programs,)](order, count, **options)
    return order.tolist()


def test_programs_run_in_order():
    holds("Programs run one after the other, in order.", "`num_warps`, `num_stages`")
    assert _order(8) == _order(8, num_warps=1, num_stages=5) == list(range(8))


def test_a_grid_may_be_empty():
    holds("a grid without programs don't start", "all of it runs here")
    assert _order(0) == [-1] * 8


def test_small_and_large_products_run():
    holds("`tl.dot` less than 16 deep", "tiles that don't fit into shared memory")
    torch.testing.assert_close(*_dot(torch.float32, 8, 4))
    torch.testing.assert_close(*_dot(torch.float32, 256, 256), rtol=1e-4, atol=1e-4)


COMPILE = """
import sys
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

@triton.jit
def kernel(out_ptr, a_ptr, b_ptr, M: tl.constexpr, K: tl.constexpr):
    m, k = tl.arange(0, M), tl.arange(0, K)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    b = tl.load(b_ptr + k[:, None] * M + m[None, :])
    tl.store(out_ptr + m[:, None] * M + m[None, :], tl.dot(a, b))

for dtype, M, K in (("fp16", 8, 8), ("fp16", 8, 16), ("fp8e4nv", 16, 16), ("fp16", 16, 4096)):
    signature = {"out_ptr": "*fp32", "a_ptr": f"*{dtype}", "b_ptr": f"*{dtype}"}
    signature |= {"M": "constexpr", "K": "constexpr"}
    source = ASTSource(fn=kernel, signature=signature, constexprs={(3,): M, (4,): K})
    try:
        print(triton.compile(source, target=GPUTarget("cuda", 90, 32)).metadata.shared > 227 * 1024)
    except triton.compiler.errors.CompilationError as error:
        print(str(error).strip().rpartition("and ")[2])
"""


def test_what_a_compiler_refuses(tmp_path):
    """Compiled for an H200, in a process of its own: here Triton interprets."""
    holds("`tl.dot` less than 16 deep doesn't compile (FP8: 32)")
    (tmp_path / "compile.py").write_text(COMPILE)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    done = subprocess.run(
        [sys.executable, "compile.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines() == ["K >= 16", "False", "K >= 32", "True"], done.stderr


@triton.jit
def _copy_kernel(out_ptr, x_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.load(x_ptr + i))


def test_addresses_outside_are_read_and_written():
    holds("**Addresses outside of a tensor.** They are read and written as they are")
    x, out = torch.arange(8.0), torch.zeros(8)
    _copy_kernel[(1,)](out[:4], x[:4], N=8)
    assert out.tolist() == x.tolist()


@triton.jit
def _scaled_kernel(out_ptr, a_ptr, scale_ptr, N: tl.constexpr):
    i, k = tl.arange(0, N), tl.arange(0, 32)
    a, scale = tl.load(a_ptr + i[:, None] * 32 + k[None, :]), tl.load(scale_ptr + i[:, None])
    out = tl.dot_scaled(a, scale, "e4m3", tl.trans(a), scale, "e4m3")
    tl.store(out_ptr + i[:, None] * N + i[None, :], out)


@pytest.mark.skipif(Version(triton.__version__) >= Version("3.8"), reason="there it works")
def test_block_scaled_products_do_not_work():
    holds("| `tl.dot_scaled` | before Triton 3.8 |")
    a = torch.ones(16, 32).to(torch.float8_e4m3fn)
    scale = torch.full((16, 1), 127, dtype=torch.uint8)
    with pytest.raises(InterpreterError, match="AttributeError"):
        _scaled_kernel[(1,)](torch.zeros(16, 16), a, scale, N=16)


@pytest.mark.parametrize("count", [1, 2])
def test_tuning_needs_a_driver(count):
    holds("| needs a GPU's driver; with one it works |")
    configs = [triton.Config({"N": n}) for n in (4, 8)[:count]]
    kernel = triton.autotune(configs=configs, key=[])(_copy_kernel)
    out = torch.zeros(8)
    if count == 1:
        kernel[(1,)](out, torch.ones(8))
        assert out.tolist() == [1.0] * 4 + [0.0] * 4
    else:
        with pytest.raises(RuntimeError, match="0 active drivers"):
            kernel[(1,)](out, torch.ones(8))


@triton.jit
def _libdevice_kernel(out_ptr, x_ptr):
    tl.store(out_ptr, tl.extra.cuda.libdevice.tanh(tl.load(x_ptr)))


def test_libdevice_does_not_work():
    holds("| the functions of `libdevice` |")
    with pytest.raises(InterpreterError):
        _libdevice_kernel[(1,)](torch.zeros(1), torch.ones(1))


@triton.jit
def _same_kernel(sorted_ptr, best_ptr, doubled_ptr, x_ptr, n_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    tl.store(sorted_ptr + i, tl.sort(x))
    largest, place = tl.max(x, 0, return_indices=True)
    tl.store(best_ptr, largest)
    tl.store(best_ptr + 1, place.to(tl.float32))
    tl.store(doubled_ptr, tl.load(n_ptr) * 2)
    tl.device_print("sum", tl.sum(x, 0))


def test_what_is_the_same(capsys):
    """`tl.histogram`, `tl.cumsum` and `tl.atomic_add` are in tests/test_interpreter.py."""
    holds("integers, which overflow as on a GPU", "`tl.max` with indices", "`tl.device_print`")
    ordered, best, doubled = torch.zeros(4), torch.zeros(2), torch.zeros(1, dtype=torch.int32)
    n = torch.tensor([2**30], dtype=torch.int32)
    _same_kernel[(1,)](ordered, best, doubled, torch.tensor([3.0, 9.0, -1.0, 9.0]), n, N=4)
    assert ordered.tolist() == [-1.0, 3.0, 9.0, 9.0] and best.tolist() == [9.0, 1.0]
    assert doubled.item() == -(2**31)
    assert "sum" in (said := capsys.readouterr().out) and "20." in said
