"""Calls that are replayed: the same bits as launched through Triton, at other addresses, streams,
devices, in threads, and only where nobody looks on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

import tmoe
from tests.gpu.conftest import NEEDS_TWO
from tmoe.backends.triton_backend import TritonBackend
from tmoe.formats import SCHEMES
from tmoe.library import shortcut
from tmoe.ops import router

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
E, K, H, I = 16, 4, 256, 128
ROUTING = tmoe.Routing(E, K, "Renormalize")
Call = Callable[[], object]


@contextmanager
def long_way() -> Iterator[None]:
    """Through all checks, the dispatcher, the launchers and Triton."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shortcut, "DEVICES", ())
        patch.delattr(TritonBackend, "repeat")
        yield


@contextmanager
def without_triton() -> Iterator[None]:
    """A launch through Triton's Python raises."""

    def refuse(kernel, *args, **kwargs):
        raise AssertionError(f"{kernel.__name__} was launched by Python")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", refuse)
        yield


def check_replay(make: Callable[[], Call]) -> None:
    """`make` gives a call with new tensors of the same kinds. The first one is recorded, and the
    second replayed; the bits are those of the long way."""
    make()()
    call = make()
    with without_triton():
        got = call()
    with long_way():
        want = call()
    got, want = (value if isinstance(value, tuple) else (value,) for value in (got, want))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def tensors(T: int, device: torch.device, dtype: torch.dtype = BF16) -> dict[str, Tensor]:
    weights, ids = torch.randn(T, E, device=device).softmax(-1).topk(K)
    return {
        "x": torch.randn(T, H, device=device).to(dtype),
        "gate_up_proj": torch.randn(E, 2 * I, H, device=device).to(dtype) / 16,
        "down_proj": torch.randn(E, H, I, device=device).to(dtype) / 16,
        "topk_weights": weights,
        "topk_ids": ids.int(),
    }


def moved(x: Tensor, elements: int) -> Tensor:
    """A copy that starts so many elements behind an aligned address."""
    memory = x.new_empty(x.numel() + elements)
    return memory[elements:].view(x.shape).copy_(x)


def experts(T: int, device: torch.device, dtype=BF16, move: str = "", by: int = 1) -> Call:
    given = tensors(T, device, dtype)
    if move:
        given[move] = moved(given[move], by)
    return lambda: tmoe.fused_experts(**given)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("T", [1, 16, 17, 300])
def test_experts(T, dtype, device):
    check_replay(lambda: experts(T, device, dtype))


@pytest.mark.parametrize("name", ["x", "gate_up_proj", "down_proj", "topk_weights", "topk_ids"])
def test_an_address_that_is_aligned_otherwise(name, device):
    """Triton compiles for addresses on 16 bytes; a tensor that isn't there needs another binary,
    whatever was recorded before."""
    check_replay(lambda: experts(17, device))
    for elements in (1, 8):
        check_replay(lambda by=elements: experts(17, device, move=name, by=by))
    check_replay(lambda: experts(17, device))


def test_sizes_for_which_triton_compiles_specially(device):
    """1, and multiples of 16."""
    for rows in (1, 15, 16, 17, 32):
        for columns in (1, 8, 16, 17):
            a = torch.randn(rows, columns, device=device).to(BF16)
            b = torch.randn(2, 16, columns, device=device).to(BF16)
            offsets = torch.tensor([0, rows // 2, rows], dtype=torch.int32, device=device)
            check_replay(lambda a=a, b=b, o=offsets: lambda: tmoe.grouped_gemm(a.clone(), b, o))


@pytest.mark.parametrize("T", [1, 64, 65, 3000])
def test_routers(T, device):
    def route() -> Call:
        logits = torch.randn(T, E, device=device)
        return lambda: tmoe.route(logits, ROUTING, weights_dtype=BF16, ids_dtype=torch.int64)

    def route_router(dtype=BF16) -> Call:
        x, weight = torch.randn(T, H, device=device).to(BF16), torch.randn(E, H, device=device)
        return lambda: router(x, weight.to(dtype), ROUTING)

    check_replay(route)
    if T <= 64:  # beyond, torch's matmul runs too
        check_replay(route_router)
        check_replay(lambda: route_router(torch.float32))


@pytest.mark.parametrize("T", [1, 130])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantised_experts(scheme, T, device):
    weights = SCHEMES[scheme].weights[0]

    def make() -> Call:
        given = tensors(T, device)
        for name in ("gate_up_proj", "down_proj"):
            given[name] = tmoe.quantize(
                given[name], weights.format.name, block_shape=weights.block_shape
            )
        return lambda: tmoe.fused_experts(**given, scheme=scheme)

    check_replay(make)


def test_on_the_way_to_the_launches(device):
    """Where the public function changes tensors, or writes to one, the operation still replays."""

    def with_more_dimensions() -> Call:
        given = tensors(6, device)
        given["x"] = given["x"].view(2, 3, H)
        return lambda: tmoe.fused_experts(**given)

    def with_out() -> Call:
        given = tensors(6, device)
        return lambda: tmoe.fused_experts(**given, out=torch.empty_like(given["x"]))

    def compiled() -> Call:
        given = tensors(6, device)
        rest = None, None, "swiglu", 1.0, float("inf"), False, False, 0, E, False, False
        return lambda: torch.ops.tmoe.fused_experts(*given.values(), *rest)

    for make in (with_more_dimensions, with_out, compiled):
        check_replay(make)


def test_precision_counts(device):
    """GR06: what torch's settings say about fp32 at the call, not what they said before."""
    matmul = torch.backends.cuda.matmul
    call = experts(300, device, torch.float32)
    exact = call()
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        rough = call()
        with long_way():
            assert torch.equal(rough, call())
    finally:
        matmul.fp32_precision = before
    assert not torch.equal(rough, exact)
    assert torch.equal(call(), exact)


def test_on_the_current_stream(device):
    """A replay on the default stream would not wait for what the current one still has to write."""
    call, given = experts(4, device), tensors(4, device)
    call()
    want = tmoe.fused_experts(**given)
    late = {name: torch.zeros_like(value) for name, value in given.items()}
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), without_triton():
        torch.cuda._sleep(50_000_000)
        for name, value in late.items():
            value.copy_(given[name])
        got = tmoe.fused_experts(**late)
    stream.synchronize()
    assert torch.equal(got, want)


@NEEDS_TWO
def test_on_several_devices():
    """EN07: on both in turn, with the first as the current one."""
    places = [torch.device("cuda", i) for i in range(2)]
    calls = {place: experts(17, place) for place in places}
    with torch.cuda.device(places[0]):
        found = {place: [calls[place]() for _ in range(3)] for place in places}
        with long_way():
            want = {place: calls[place]() for place in places}
    for place in places:
        assert all(torch.equal(y, want[place]) for y in found[place])


def test_in_threads(device):
    """The first calls are recorded at the same time, later ones replayed."""
    made = [(T, experts(T, device)) for T in (2, 3, 2, 3)]
    with long_way():
        want = [call() for _, call in made]
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(i: int) -> None:
        call = made[i][1]
        if not all(torch.equal(call(), want[i]) for _ in range(50)):
            wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(made))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_nothing_is_kept(device):
    """OV08: neither tensors of a recorded call, nor of a replayed one."""
    experts(5, device)()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for T in (5, 6):  # replayed, recorded
        experts(T, device)()
    assert torch.cuda.memory_allocated() == before


def test_who_listens_hears(device):
    """A profiler of Triton's, then one of torch's."""
    call = experts(4, device)
    call()
    heard = []
    hooks = triton.knobs.runtime.launch_enter_hook
    hooks.add(lambda metadata: heard.append(metadata.get()["name"]))
    try:
        call()
    finally:
        hooks.calls.pop()
    assert heard == [
        "_sort_kernel", "_grouped_gemm_kernel", "_grouped_gemm_kernel", "_combine_kernel"
    ]  # fmt: skip
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    assert "tmoe::fused_experts" in {event.key for event in profile.key_averages()}


def test_gradients_take_the_long_way(device):
    given = tensors(4, device)
    tmoe.fused_experts(**given)
    given["x"].requires_grad_()
    assert tmoe.fused_experts(**given).requires_grad
    with torch.no_grad(), without_triton():
        assert not tmoe.fused_experts(**given).requires_grad
