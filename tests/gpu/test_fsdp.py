"""FSDP2 and DDP around layers, on one GPU and on two: the kernels between gathers and sums."""

from __future__ import annotations

import pytest

import tmoe
from tests.gpu.conftest import NEEDS_TWO
from tests.nn import fsdp_ranks
from tests.parallel.ranks import ranks

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=NEEDS_TWO)], ids=["one", "two"])
def group(request):
    with ranks(request.param, device="cuda") as started:
        yield started


TOKENS = 1024  # of each rank: 256 rows for an expert


def larger() -> tmoe.MoE:
    routing = tmoe.Routing(16, 4, "Renormalize")
    return tmoe.MoE(512, 256, routing, shared_intermediate_size=128)


def on_kernels(rank: int, what: str) -> None:
    with tmoe.options(backend="triton"):
        if what == "layers":
            fsdp_ranks.compare_all(rank)
        elif what == "larger, bf16":
            fsdp_ranks.compare(what, larger(), rank, policy=fsdp_ranks.BF16, count=TOKENS)
        elif what == "divided experts":
            fsdp_ranks.compare_beside_divided_experts(rank, larger(), TOKENS)
        elif what == "whole copies":
            fsdp_ranks.compare_data_parallel(rank)
        else:
            fsdp_ranks.compare_adapters(larger(), what, rank, TOKENS)


OF_TWO = ["divided experts", "whole copies"]


@pytest.mark.parametrize(
    "what", ["layers", "larger, bf16", "bf16", "nvfp4_a16", "fp8_block", *OF_TWO]
)
def test_same_gradients(group, what):
    """Of everything; with bf16 parameters; of adapters on plain and on quantised experts; beside
    experts that are divided among the ranks; and under DistributedDataParallel."""
    if what in OF_TWO and group.size == 1:
        pytest.skip("there is nothing to divide, and nothing to average")
    group.run(on_kernels, what)
