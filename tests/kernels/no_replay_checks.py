"""Which calls are not replayed, and what the long way is needed for; see `replay_checks.py`."""

from __future__ import annotations

import gc
import weakref
from unittest.mock import patch

import torch
import triton
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.nvidia.driver import CudaLauncher

import tmoe
from tests.kernels import off_device
from tests.kernels.replaying import BF16, E, H, I, K, adapted, experts, is_replayed, tensors
from tmoe import registry
from tmoe.dispatch import measure, prepared
from tmoe.kernels import record, replay
from tmoe.library import shortcut


def reasons() -> set[str]:
    known = registry.load("triton")._replays.known.values()
    return {why for why in known if isinstance(why, str)}


def check_a_call_that_computes():
    """A replay would leave out what torch computes."""
    change = {"topk_weights": lambda w: torch.cat([w, w], 1)[:, :K]}  # is made contiguous
    for _ in range(3):
        assert not is_replayed(experts(12, change=change)[0])
    assert "it runs aten.contiguous.default" in reasons(), reasons()


def check_overlapping_inputs():
    """Which one an address belongs to can't be told; in the next call they may be apart."""
    given = tensors(14) | {"down_proj": torch.randn(E, H, I).to(BF16)}
    both = torch.randn(E, 2 * I).to(BF16)
    assert H == 2 * I
    call = lambda: tmoe.fused_experts(**given, gate_up_bias=both, down_bias=both)  # noqa: E731
    assert not is_replayed(call) and not is_replayed(call)
    assert "an address lies in 2 roots" in reasons()


def check_a_large_workspace():
    """What it needs is longer on the GPU than on the host; in pieces, some can be freed before."""
    with patch.object(record, "MOST_BYTES", 10_000):
        for _ in range(2):
            assert not is_replayed(experts(50)[0])


def check_a_launch_that_is_not_noted():
    """A kernel launched in another way would be missing from the replay."""
    from tmoe.kernels import combine

    def launch(kernel, grid, *arguments, **options):
        kernel[grid](*arguments, **options)

    with patch.object(combine, "launch", launch):
        for _ in range(2):
            assert not is_replayed(experts(51)[0])
    assert any("launches, 3 by `launch`" in why for why in reasons())


def check_a_triton_that_is_not_known():
    """Whatever its launchers look like: every launch is Triton's own."""
    with (
        patch.object(replay, "TRITON_IS_KNOWN", False),
        patch.object(record, "record", side_effect=AssertionError("was recorded")),
    ):
        for _ in range(2):
            assert not is_replayed(experts(59)[0])


def check_a_launcher_that_passes_other_things():
    """A release that differs there is found out, and its launches aren't repeated."""
    launch = CudaLauncher.__call__

    def with_another_order(launcher, x, y, z, *rest):
        launch(launcher, y, x, z, *rest)

    def with_another_kernel(launcher, x, y, z, stream, function, *rest):
        launch(launcher, x, y, z, stream, function + 1, *rest)

    for T, changed in ((60, with_another_order), (61, with_another_kernel)):
        with patch.object(CudaLauncher, "__call__", changed):
            call, _ = experts(T)
            assert not is_replayed(call) and not is_replayed(call)
    known = list(registry.load("triton")._replays.known.values())
    assert sum("in a way that isn't known" in str(why) for why in known) == 2, reasons()


def check_unaligned_memory():
    """From an allocator that isn't torch's."""
    call, _ = experts(52)
    call()
    empty_strided = torch.empty_strided

    def unaligned(size, stride, **how):
        memory = empty_strided((size.numel() + 1,), (1,), **how)
        return memory[1:].as_strided(size, stride, 1)

    with patch.object(torch, "empty_strided", unaligned):
        assert not is_replayed(call)
    assert is_replayed(call)


def check_listeners_and_settings():
    call, _ = experts(53)
    call()
    assert is_replayed(call)
    heard, runtime = [], triton.knobs.runtime
    for hooks in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        hooks.add(heard.append)
        assert not is_replayed(call)
        hooks.remove(heard.append)
    assert len(heard) == 8 and is_replayed(call)
    with patch.object(triton.knobs.compilation, "instrumentation_mode", "a tool's"):
        assert not is_replayed(call)
    assert is_replayed(call)
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
    assert not is_replayed(call) and is_replayed(call)
    matmul.fp32_precision = before
    with tmoe.options(batch_invariant=True):
        assert not is_replayed(call) and is_replayed(call)
    assert is_replayed(call)


class _Ops(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        seen.append(str(func))
        return func(*args, **(kwargs or {}))


class _Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        seen.append(str(func))
        return func(*args, **(kwargs or {}))


seen: list[str] = []


def check_who_looks_on():
    """Modes and profilers see the operation, though not its replay."""
    call, _ = experts(54)
    call()
    for mode in (_Ops, _Functions):
        seen.clear()
        with mode():
            call()
        assert "tmoe.fused_experts.default" in seen
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    assert "tmoe::fused_experts" in {event.key for event in profile.key_averages()}


def check_what_changes_the_meaning():
    given = tensors(55)
    call = lambda: tmoe.fused_experts(**given)  # noqa: E731
    call()
    ways = len(shortcut._ways)
    with patch.object(torch, "is_autocast_enabled", lambda device_type: True):
        call()
    prepared.hold("flashinfer_trtllm", None, prepared.ExpertWeights(*tensors(1).values()), 0, [])
    call()
    tmoe.release()
    with torch.device("cpu"):
        call()
    torch.func.vmap(lambda _: call())(torch.ones(2))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(given["x"], given["x"])
        try:
            tmoe.fused_experts(**given | {"x": dual})
        except RuntimeError as error:
            assert "can't be differentiated" in str(error)
        else:
            raise AssertionError("the result was taken for a constant")
    given["x"].requires_grad_()
    with torch.enable_grad():
        assert call().requires_grad
    assert len(shortcut._ways) == ways
    with torch.no_grad():
        assert is_replayed(call)


def check_bad_input_after_good():
    """The checks aren't passed over by an argument that only compares equal."""
    call, _ = experts(56, interleaved=False)
    call()
    for bad in ({"interleaved": 0}, {"activation": ["swiglu"]}, {"first_expert": False}):
        given = {"interleaved": False} | bad
        try:
            experts(56, **given)[0]()
        except TypeError:
            continue
        if bad != {"first_expert": False}:  # a bool is an int
            raise AssertionError(f"{bad} was taken")


def check_nothing_is_kept():
    """Of tensors: neither by what was recorded, nor by who noted it."""
    for make in (experts, experts, adapted, adapted):  # recorded, replayed
        call, inputs = make(57)
        result = call()
        alive = [weakref.ref(x) for x in (*inputs, result)]
        del call, inputs, result
        off_device.launched.clear()
        gc.collect()
        assert not any(ref() is not None for ref in alive)


def check_times_that_change():
    """What was measured may choose another backend."""
    experts(58)[0]()
    assert shortcut._ways
    for hear in measure._listeners:
        hear()
    assert not shortcut._ways
