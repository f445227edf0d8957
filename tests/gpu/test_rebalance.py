"""Experts move between two GPUs: the same tokens before and after, and graphs that don't lie."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import tmoe
from tests.checking import assert_matches
from tests.gpu.conftest import NEEDS_TWO
from tmoe.bench.reference import quantized_experts_ref
from tmoe.demo.verdict import experts_in
from tmoe.parallel import balance, fixed_tokens, parallelize, rebalance

pytestmark = [pytest.mark.gpu, NEEDS_TWO]
E, K, H, I, T = 16, 4, 512, 256, 128


def true_output(
    whole: tmoe.Experts, scheme: str, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """In float64."""
    gate_up, down = whole.gate_up_proj, whole.down_proj
    if scheme == "bf16":
        return experts_in(torch.float64, x, gate_up, down, weights, ids)
    layer = gate_up.dequantize(), down.dequantize(), weights, ids.long()
    return quantized_experts_ref(x, *layer, scheme)


@torch.no_grad()
def moved(rank: int, scheme: str, exchange: str) -> dict[str, object]:
    """Captured, moved, captured anew; each result beside the truth, and held to the whole layer's
    error on this GPU. That has the tokens of both, as the experts of the two have."""
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
    torch.manual_seed(1)
    every = torch.randn(2 * T, H, device=device).bfloat16()
    all_weights, all_ids = tmoe.simulate_routing(2 * T, E, K, seed=0, device=device)
    mine = slice(rank * T, (rank + 1) * T)
    x, weights, ids = every[mine], all_weights[mine], all_ids[mine]
    truth = true_output(whole, scheme, x, weights, ids)
    one = whole(every, all_ids, all_weights)[mine]

    def compare(y: torch.Tensor) -> None:
        assert_matches(y, truth, one)

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

    compare(layer(x, ids, weights))
    compare(replayed())
    found: dict[str, object] = {}
    try:
        rebalance(layer, new)
    except ValueError as error:
        found["refused"] = str(error)
    compare(layer(x, ids, weights))
    (moves,) = rebalance(layer, new, captured_anew=True).values()
    found["sent"] = moves.sent
    compare(layer(x, ids, weights))
    compare(replayed())
    return found


@pytest.mark.parametrize("exchange", ["all_gather", "all_to_all", "symmetric_memory"])
@pytest.mark.parametrize("scheme", ["bf16", "fp8_block", "mxfp4_a16"])
def test_two_gpus(two, scheme, exchange):
    for found in two.run(moved, scheme, exchange):
        assert found["sent"] > 0 and "captured in a CUDA graph" in found["refused"]
