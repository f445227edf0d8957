"""What every benchmark shares: which cases run, and how one is checked, timed and written down."""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

import pytest
import torch
from torch import Tensor

import tmoe
from bench.peers import PEERS
from bench.roofline import Work, device_name, matmul_tflops, roof_of
from bench.shapes import CPU_TOKENS, GPU_SHAPES, GPU_TOKENS, SHAPES, TINY
from bench.timing import DeviceTimer, time_on_cpu, time_on_gpu
from tmoe.demo.shapes import MoEShape, random_weights
from tmoe.doctor import diagnose

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
DTYPE = torch.bfloat16 if HAS_GPU else torch.float32
PAUSE_SECONDS = 0.3  # between cases, so that one doesn't inherit the heat of the one before

MACHINE = diagnose()
VERSIONS = {name: found for name, found in MACHINE.versions.items() if found}
VERSIONS |= {"tmoe": tmoe.__version__}
if importlib.util.find_spec("vllm"):
    VERSIONS["vllm"] = version("vllm")

if importlib.util.find_spec("triton") is None:  # these time a kernel that has no public function
    collect_ignore = ["bench_sort.py", "bench_combine.py"]

matmul_at_start = pytest.StashKey[float]()


def pytest_addoption(parser):
    group = parser.getgroup("tmoe")
    group.addoption(
        "--shapes",
        type=_shapes,
        default=GPU_SHAPES if HAS_GPU else (TINY,),
        help=f"some of {','.join(SHAPES)}",
    )
    group.addoption(
        "--tokens",
        type=_tokens,
        default=GPU_TOKENS if HAS_GPU else CPU_TOKENS,
        help="numbers of tokens: 1,16",
    )
    group.addoption(
        "--backends",
        type=_backends,
        default=["triton" if HAS_GPU else "torch"],
        help=f"some of triton,torch and, for the experts, {','.join(PEERS)}",
    )


def _shapes(text: str) -> list[MoEShape]:
    return [SHAPES[name] for name in _names(text, SHAPES)]


def _backends(text: str) -> list[str]:
    return _names(text, ("triton", "torch", *PEERS))


def _names(text: str, known: Iterable[str]) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(known)}")
    return names


def _tokens(text: str) -> list[int]:
    numbers = text.split(",")
    if not all(number.isdecimal() and int(number) > 0 for number in numbers):
        raise argparse.ArgumentTypeError(f"must be numbers from 1 on, as in 1,16; got {text}")
    return [int(number) for number in numbers]


def pytest_generate_tests(metafunc):
    """Shapes outside, backends inside: what is compared is timed one after the other."""
    asked = metafunc.config.getoption("backends")
    cases = {
        "shape": metafunc.config.getoption("shapes"),
        "tokens": metafunc.config.getoption("tokens"),
        "backend": [name for name in asked if name in metafunc.module.IMPLEMENTATIONS],
    }
    for name, values in cases.items():
        ids = [getattr(value, "name", str(value)) for value in values]
        metafunc.parametrize(name, values, ids=ids, scope="module")


def pytest_sessionstart(session):
    session.config.stash[matmul_at_start] = matmul_tflops(DEVICE, DTYPE)


def pytest_benchmark_update_machine_info(config, machine_info):
    if matmul_at_start not in config.stash:  # --benchmark-compare asks before the session starts
        return
    machine_info["device"] = device_name(DEVICE)
    machine_info["driver"] = MACHINE.driver
    machine_info["versions"] = VERSIONS
    machine_info["matmul_tflops_at_start"] = config.stash[matmul_at_start]
    machine_info["matmul_tflops_at_end"] = matmul_tflops(DEVICE, DTYPE)


@pytest.fixture(scope="session")
def device() -> torch.device:
    return DEVICE


@pytest.fixture(scope="session")
def dtype() -> torch.dtype:
    return DTYPE


@pytest.fixture(scope="module")
def weights(shape: MoEShape) -> tuple[Tensor, Tensor]:
    """gate_up_proj and down_proj of `shape`: gigabytes, made once and freed before the next."""
    torch.manual_seed(0)
    return random_weights(shape, DEVICE, DTYPE)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def timer(request) -> DeviceTimer:
    """The device's clock as this test's timer; on a CPU pytest-benchmark's own stays."""
    timer = DeviceTimer()
    if HAS_GPU:
        request.node.add_marker(pytest.mark.benchmark(timer=timer))
    return timer


@pytest.fixture
def measure(request, timer, benchmark, shape: MoEShape, tokens: int, backend: str):
    """`measure(call, inputs, check, work, **labels)`: check `call` on all inputs, then time it.

    `check(result, *input)` raises if the result is wrong; nothing wrong is ever timed. `multiplies`
    is the dtype whose roof counts.
    """
    operation = request.path.stem.removeprefix("bench_")

    def run(
        call: Callable[..., Any],
        inputs: Sequence[tuple[Tensor, ...]],
        check: Callable[..., None],
        work: Work,
        multiplies: torch.dtype = DTYPE,
        **labels: str,
    ) -> None:
        for tensors in inputs:
            check(call(*tensors), *tensors)
        benchmark.group = " ".join([operation, *labels.values(), shape.name, f"T={tokens}"])
        calls = [partial(call, *tensors) for tensors in inputs]
        if HAS_GPU:
            time.sleep(PAUSE_SECONDS)
            time_on_gpu(benchmark, timer, calls)
        else:
            time_on_cpu(benchmark, calls)
        if benchmark.stats is None:  # --benchmark-disable: the checks were all that was wanted
            return
        us, roof = 1e6 * benchmark.stats.stats.median, roof_of(DEVICE, multiplies)
        benchmark.extra_info.update(
            operation=operation,
            **labels,
            shape=shape.name,
            tokens=tokens,
            backend=backend,
            dtype=str(DTYPE).removeprefix("torch."),
            us=us,
            tflops=work.flops / (1e6 * us),
            gbs=work.bytes / (1e3 * us),
            floor_us=work.floor_us(roof),
            percent_of_floor=100 * work.floor_us(roof) / us,
            roof=f"{roof.tflops:.3g} TFLOP/s, {roof.gbs:.4g} GB/s, {roof.source}",
            device=device_name(DEVICE),
            versions=VERSIONS,
        )

    return run
