"""Experts move between two GPUs: the same tokens before and after, and graphs that don't lie."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import tmoe
from tests.parallel.ranks import ranks
from tmoe.parallel import balance, fixed_tokens, parallelize, rebalance

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
E, K, H, I, T = 16, 4, 512, 256, 64


@pytest.fixture(scope="module")
def two():
    with ranks(2, device="cuda") as started:
        yield started


@torch.no_grad()
def moved(rank: int, scheme: str, exchange: str) -> dict[str, object]:
    """Captured, moved, captured anew; all beside the whole layer on this GPU."""
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    whole = tmoe.Experts(E, H, I, dtype=torch.bfloat16, device=device).eval()
    if scheme != "bf16":
        whole = tmoe.Experts.quantized(whole, scheme).eval()
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("x",))
    old = balance([1.0] * E, 2, redundant=2)
    new = balance([1 / (1 + e) ** 1.2 for e in range(E)], 2, redundant=2)
    layer = parallelize(
        copy.deepcopy(whole), mesh, ep="x", dp="x", placement=old, exchange=exchange
    )
    torch.manual_seed(1 + rank)
    x = torch.randn(T, H, device=device).bfloat16()
    weights, ids = tmoe.simulate_routing(T, E, K, seed=rank, device=device)
    want = whole(x, ids, weights)

    def off(y: torch.Tensor) -> float:
        return ((y - want).float().norm() / want.float().norm()).item()

    def replayed() -> torch.Tensor:
        with fixed_tokens():
            layer(x, ids, weights)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                y = layer(x, ids, weights)
            graph.replay()
            torch.cuda.synchronize()
        return y

    found: dict[str, object] = {"before": off(layer(x, ids, weights)), "graph": off(replayed())}
    try:
        rebalance(layer, new)
    except ValueError as error:
        found["refused"] = str(error)
    found["kept"] = off(layer(x, ids, weights))
    (moves,) = rebalance(layer, new, captured_anew=True).values()
    found["sent"] = moves.sent
    found["after"], found["new graph"] = off(layer(x, ids, weights)), off(replayed())
    return found


@pytest.mark.parametrize("exchange", ["all_gather", "all_to_all"])
@pytest.mark.parametrize("scheme", ["bf16", "fp8_block", "mxfp4_a16"])
def test_two_gpus(two, scheme, exchange):
    for found in two.run(moved, scheme, exchange):
        assert found["sent"] > 0 and "captured in a CUDA graph" in found["refused"]
        for name in ("before", "graph", "kept", "after", "new graph"):
            assert found[name] < 2**-7, name
