"""What every benchmark shares: which cases run, and how one is checked, timed and written down."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tmoe.bench.cases import BACKENDS, Case
from tmoe.bench.machine import machine_info
from tmoe.bench.peers import Missing
from tmoe.bench.roofline import Work, matmul_tflops
from tmoe.bench.shapes import (
    ALL_TOKENS,
    CPU_TOKENS,
    GPU_SHAPES,
    GPU_TOKENS,
    ROUTINGS,
    SHAPES,
    TINY,
)
from tmoe.bench.timing import ROUNDS, DeviceTimer, one_call_at_a_time, round_on_gpu, warm_up
from tmoe.shapes import MoEShape, random_weights

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
DTYPE = torch.bfloat16 if HAS_GPU else torch.float32
MACHINE = machine_info(DEVICE)

if importlib.util.find_spec("triton") is None:  # these time a kernel that has no public function
    collect_ignore = ["bench_sort.py", "bench_combine.py"]

matmul_at_start = pytest.StashKey[float]()


def pytest_addoption(parser):
    group = parser.getgroup("tmoe")
    group.addoption(
        "--shapes",
        type=_shapes,
        default=GPU_SHAPES if HAS_GPU else (TINY,),
        help=f"all, or some of {','.join(SHAPES)}",
    )
    group.addoption(
        "--tokens",
        type=_tokens,
        default=GPU_TOKENS if HAS_GPU else CPU_TOKENS,
        help="numbers of tokens: 1,16; or all",
    )
    group.addoption(
        "--routing",
        type=_routings,
        default=["random"],
        help=f"how tokens choose their experts: some of {','.join(ROUTINGS)}",
    )
    group.addoption(
        "--backends",
        type=_backends,
        default=["triton" if HAS_GPU else "torch"],
        help=f"some of {','.join(BACKENDS)}; all but the first two for the experts only",
    )


def _shapes(text: str) -> list[MoEShape]:
    return [*SHAPES.values()] if text == "all" else [SHAPES[name] for name in _names(text, SHAPES)]


def _backends(text: str) -> list[str]:
    return _names(text, BACKENDS)


def _routings(text: str) -> list[str]:
    return _names(text, ROUTINGS)


def _names(text: str, known: Iterable[str]) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(known)}")
    return names


def _tokens(text: str) -> list[int]:
    if text == "all":
        return [*ALL_TOKENS]
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
        "routing": metafunc.config.getoption("routing"),
        "backend": [name for name in asked if name in metafunc.module.IMPLEMENTATIONS],
    }
    for name, values in cases.items():
        if name in metafunc.fixturenames:
            ids = [getattr(value, "name", str(value)) for value in values]
            metafunc.parametrize(name, values, ids=ids, scope="module")


def pytest_sessionstart(session):
    session.config.stash[matmul_at_start] = matmul_tflops(DEVICE, DTYPE)


def pytest_benchmark_update_machine_info(config, machine_info):
    if matmul_at_start not in config.stash:  # --benchmark-compare asks before the session starts
        return
    machine_info.update(MACHINE)
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
def measure_case(timer, benchmark):
    """`measure_case(make, *args, **kwargs)`: check the `Case` that `make` returns, then time it.

    A result that is wrong fails and is never timed; a peer that is missing is skipped.
    """

    def run(make: Callable[..., Case], *args: Any, **kwargs: Any) -> None:
        try:
            case = make(*args, **kwargs)
        except Missing as reason:
            pytest.skip(str(reason))
        case.verify()
        benchmark.group = case.group
        if HAS_GPU:
            one = round_on_gpu(case.calls)
            timer.calls = one.calls
            warm_up([one])
            benchmark.pedantic(one.run, setup=one.before, rounds=ROUNDS, warmup_rounds=1)
        else:
            one, calls = one_call_at_a_time(case.calls), len(case.inputs)
            benchmark.pedantic(one, rounds=ROUNDS, iterations=calls, warmup_rounds=1)
        if benchmark.stats is None:  # --benchmark-disable: the checks were all that was wanted
            return
        info = case.info(benchmark.stats.stats.data)
        benchmark.extra_info.update(info, versions=MACHINE["versions"])

    return run


@pytest.fixture
def measure(request, measure_case, shape: MoEShape, tokens: int, backend: str):
    """`measure(call, inputs, check, work, **labels)`: the same for a call of the file's operation.

    `check(result, *input)` raises if the result is wrong. `multiplies` is the dtype whose roof
    counts.
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
        measure_case(
            Case, operation, shape, tokens, backend, DTYPE, DEVICE, call, inputs, check, work,
            multiplies, labels,
        )  # fmt: skip

    return run
