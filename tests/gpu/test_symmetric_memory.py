"""Rows that GPUs write into each other's memory: the bits of all-to-all, whoever is late."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import tmoe
from tests.gpu.conftest import NEEDS_TWO
from tests.gpu.test_parallel import BF16, DPEP, EP, EVERY, captured
from tests.parallel.cases import Case, make_whole, run, spread, tokens_of
from tests.parallel.ranks import ranks
from tests.parallel.wire_ranks import coded
from tmoe.parallel import fixed_tokens, parallelize

pytestmark = [pytest.mark.gpu, NEEDS_TWO]
NAME = "symmetric_memory"
LATE = int(2e8)  # cycles that a GPU does nothing: a tenth of a second


def facts(rank: int) -> dict[str, Any]:
    """What a buffer is."""
    case = Case("", **DPEP, **BF16, tokens=(8, 8), exchange=NAME)
    layer = spread(case, make_whole(case))
    with torch.no_grad():
        layer(tokens_of(case)[rank])
    peers = layer.experts.parallel._peers
    held = {what: buffers[0] for what, buffers in peers._buffers.items()}
    return {
        "reason": peers.reason,
        "multicast": [buffer.handle.multicast_ptr for buffer in held.values()],
        "told": os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST"),
        "what": sorted(held),
        "verified": len(peers.verified),
    }


def test_memory_of_both_without_multicast(two):
    before = os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST")
    for found in two.run(facts):
        assert found["reason"] == "" and found["what"] == ["messages", "sums"]
        assert found["multicast"] == [0, 0] and found["told"] == before
        assert found["verified"] > 0


@pytest.mark.parametrize("case", [c for c in EVERY if not c.grads], ids=lambda c: c.why)
def test_experts_of_two_gpus(two, case):
    for found in two.run(run, replace(case, exchange=NAME)):
        assert found["same_bits"] or not case.deterministic


@pytest.mark.parametrize("scheme", ["fp8_block", "fp8_channel", "fp8_tensor", "mxfp8", "nvfp4"])
def test_tokens_go_as_codes(two, scheme):
    case = Case("", **DPEP, **BF16, tokens=(70, 70), scheme=scheme, exchange=NAME)
    for found in two.run(coded, case):
        assert found["codes"] and torch.equal(found["before"].cpu(), found["after"].cpu())


@torch.no_grad()
def late(rank: int, case: Case, calls: int) -> list[int]:
    """Two layers take turns in the same buffers, with other tokens and numbers of them each time,
    and now one rank is late and now the other. Which calls gave other bits than all-to-all?"""
    layers = {
        name: [spread(replace(case, exchange=name), make_whole(case)) for _ in range(2)]
        for name in ("all_to_all", NAME)
    }
    x = tokens_of(case)[layers[NAME][0].experts.parallel.layout.owners.rank]
    sizes = [len(x), 1, len(x) // 2, 7]
    found = []
    for call in range(calls):
        here = x[: sizes[call % 4]] * (call + 1)
        with fixed_tokens(), tmoe.options(deterministic=case.deterministic):
            right = layers["all_to_all"][call % 2](here)
            layers[NAME][call % 2](here)  # compares in the first of a kind
            torch.cuda.synchronize()
            dist.barrier()
            for again in range(3):
                if (call + again) % 2 == rank:
                    torch.cuda._sleep(LATE // (1 + 9 * (again > 0)))
                got = layers[NAME][(call + again) % 2](here)
                if again == call % 3:
                    found.append(got)
        torch.cuda.synchronize()
        found[-1] = int(not torch.equal(found[-1], right))
    return found


@pytest.mark.parametrize(
    "case",
    [
        Case("own tokens", **DPEP, **BF16, tokens=(512, 512)),
        Case("same tokens", **EP, **BF16, tokens=(64,)),
        Case("codes", **DPEP, **BF16, tokens=(96, 96), scheme="fp8_block"),
        Case("slot by slot", **DPEP, **BF16, tokens=(40, 40), deterministic=True),
    ],
    ids=lambda c: c.why,
)  # fmt: skip
def test_a_late_rank_changes_no_bit(two, case):
    for differ in two.run(late, case, 12):
        assert differ == [0] * 12


@pytest.mark.parametrize(
    "case",
    [
        Case("bf16", **DPEP, **BF16, tokens=(64, 64), fixed=True),
        Case("same tokens", **EP, **BF16, tokens=(64,), fixed=True),
        Case("room for some", **DPEP, **BF16 | {"top_k": 1}, tokens=(64, 64), fixed=64),
        Case("fp8 block", **DPEP, **BF16, tokens=(64, 64), scheme="fp8_block", fixed=True),
        Case(
            "copies", **DPEP, **BF16, tokens=(9, 9), fixed=True,
            placement=((*range(8), 15, 12), (*range(8, 16), 0)),
        ),
    ],
    ids=lambda c: c.why,
)  # fmt: skip
def test_cuda_graphs_capture_it(two, case):
    assert two.run(captured, replace(case, exchange=NAME)) == [0, 0]


@torch.no_grad()
def beside(rank: int, case: Case) -> list[bool]:
    """A slow shared expert on a stream of its own, eager and captured, beside one in turn."""
    layer, x = spread(case, make_whole(case)), tokens_of(case)[rank]
    shared = layer._shared

    def slow(rows: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(LATE // 10)
        return shared(rows)

    found = []
    with fixed_tokens():
        layer.experts.parallel.overlap = False
        right = layer(x)
        layer.experts.parallel.overlap = True
        layer._shared = slow
        for _ in range(3):
            found.append(layer(x))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            y = layer(x)
        for _ in range(2):
            graph.replay()
            found.append(y.clone())
    torch.cuda.synchronize()
    return [torch.equal(got, right) for got in found]


@pytest.mark.parametrize("exchange", ["all_gather", "all_to_all", NAME])
def test_a_shared_expert_beside_the_others(two, exchange):
    layer = {"shared_intermediate_size": 128}
    case = Case("", **DPEP, **BF16, tokens=(33, 33), fixed=True, layer=layer, exchange=exchange)
    for found in two.run(beside, case):
        assert found == [True] * 5


@torch.no_grad()
def alone(rank: int) -> tuple[str, float]:
    """The other rank dies; the device says so within the time-out, not never."""
    case = Case("", **DPEP, **BF16, tokens=(8, 8), exchange=NAME)
    layer, x = spread(case, make_whole(case)), tokens_of(case)[rank]
    with fixed_tokens(), tmoe.options(verify=False):
        layer(x)
        torch.cuda.synchronize()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        try:
            layer(x)
            torch.cuda.synchronize()
        except RuntimeError as error:
            return str(error), time.monotonic() - start
    return "no error", 0.0


def test_a_killed_rank_is_an_error_of_the_device():
    """Or NCCL's watchdog, which sees it too, ends the process."""
    started = time.monotonic()
    with ranks(2, seconds=5, device="cuda") as two:
        (answer, error), (_, other) = two.answers(alone)
    assert other == "died"
    assert error == "died" or (error is None and answer[0] != "no error" and answer[1] < 15)
    assert time.monotonic() - started < 60


@torch.no_grad()
def nobody_named(rank: int, store: str, device: str) -> tuple[str, str, bool]:
    """As those have it who make a mesh and no more: torch's name of the world's library, the
    exchange that is chosen, whether tokens get what they get from one rank."""
    dist.destroy_process_group()
    dist.init_process_group(store=dist.FileStore(store, 2), rank=rank, world_size=2)
    mesh = init_device_mesh(device, (2,), mesh_dim_names=("x",))
    torch.manual_seed(0)
    layer = tmoe.MoE(256, 128, tmoe.Routing(8, 2, "Renormalize")).to(device)
    x = torch.randn(16, 256, device=device)
    alone = layer(x)
    parallelize(layer, mesh, ep="x", dp="x")
    close = torch.allclose(layer(x), alone, atol=1e-3)
    return dist.get_backend(), tmoe.explain(layer, num_tokens=16).exchange.chosen, close


def test_a_world_that_nobody_named(tmp_path):
    with ranks(2, device="cuda") as two:
        found = two.run(nobody_named, str(tmp_path / "store"), "cuda")
    assert found == [("undefined", NAME, True)] * 2
