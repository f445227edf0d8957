"""What ranks run: layers under fully_shard, their gradients compared with whole ones."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import tmoe
from tests.nn.layers import CASES, make_layer
from tests.nn.test_training_survives import LAYERS
from tests.parallel.cases import device
from tmoe.parallel import parallelize

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def gradients(layer, x):
    layer(x).float().square().sum().backward()
    grads = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()}


def whole_gradients(layer, parts):
    """Of the unsharded layer, for each rank's tokens."""
    found = []
    for part in parts:
        layer.zero_grad()
        found.append({n: g.float().clone() for n, g in gradients(layer, part).items()})
    return found


def tokens(layer, count, dtype=torch.float32):
    """(ranks, count, H)"""
    torch.manual_seed(7)
    width = layer.gate.weight.shape[1]
    return torch.randn(dist.get_world_size(), count, width).to(device(), dtype)


def compare(name, layer, rank, *, count=16, inner=False, policy=None, **kept):
    """FSDP averages over the ranks; each has its part of the tokens."""
    layer = layer.to(device())
    whole, dtype = copy.deepcopy(layer), torch.float32
    if policy is not None:
        whole, dtype = whole.to(policy.param_dtype), policy.param_dtype
    x = tokens(layer, count, dtype)
    parts = whole_gradients(whole, x)
    policy = {} if policy is None else {"mp_policy": policy}
    mesh = init_device_mesh(device().type, (len(x),))
    if inner:
        fully_shard(layer.experts, mesh=mesh, **policy)
    fully_shard(layer, mesh=mesh, **policy, **kept)
    got = gradients(layer, x[rank])
    assert got.keys() == parts[0].keys() and len(got) > 0, (name, set(got) ^ set(parts[0]))
    for parameter in got:
        want = sum(part[parameter] for part in parts) / len(parts)
        error = (got[parameter].float() - want).norm() / want.norm().clamp(min=1e-6)
        # Each part is rounded to bf16 by itself, in both; sums over the ranks are fp32.
        assert error < (2**-8 if policy else 1e-5), (name, parameter, float(error))


def compare_all(rank: int) -> None:
    for case in CASES:
        compare(case, make_layer(case), rank)
    compare("inner", make_layer("deepseek"), rank, inner=True)
    compare("bf16", make_layer("gated-shared"), rank, policy=BF16)
    for scheme in ("bf16", "nvfp4_a16"):
        compare_adapters(make_layer("shared"), scheme, rank)


def compare_adapters(layer: tmoe.MoE, scheme: str, rank: int, count: int = 16) -> None:
    layer = layer.requires_grad_(False).to(device())
    layer = layer if scheme == "bf16" else tmoe.MoE.quantized(layer, scheme)
    tmoe.lora.add(layer, rank=4)
    for pair in layer.experts.lora.children():
        torch.nn.init.normal_(pair.lora_B)
    # Codes stay whole on every rank: FSDP would flatten them.
    held = {p for p in layer.parameters() if isinstance(p, tmoe.QuantizedTensor)}
    kept = {"ignored_params": held} if held else {}
    compare(f"lora-{scheme}", layer, rank, count=count, **kept)


def compare_beside_divided_experts(
    rank: int, layer: tmoe.MoE | None = None, count: int = 16
) -> None:
    """Experts divided among the ranks, all else sharded: every gradient is that of the losses'
    sum, once FSDP doesn't divide."""
    layer = (make_layer("gated-shared") if layer is None else layer).to(device())
    whole, x = copy.deepcopy(layer), tokens(layer, count)
    parts = whole_gradients(whole, x)
    want = {name: sum(part[name] for part in parts) for name in parts[0]}
    mesh = init_device_mesh(device().type, (len(x),), mesh_dim_names=("x",))
    parallelize(layer, mesh, ep="x", dp="x")
    fully_shard(layer, mesh=mesh, ignored_params=set(layer.experts.parameters()))
    layer.set_gradient_divide_factor(1.0)
    layer.set_force_sum_reduction_for_comms(True)  # gloo has no other way
    got = gradients(layer, x[rank])
    assert got.keys() == want.keys()
    mine = list(layer.experts.parallel.placement.ranks[rank])
    for name, gradient in got.items():
        true = want[name][mine] if name.startswith("experts.") else want[name]
        torch.testing.assert_close(gradient, true, msg=lambda m, name=name: f"{name}: {m}")


def compare_data_parallel(rank: int) -> None:
    """DistributedDataParallel, which also averages; the gradients are views of its buckets, too."""
    for name, make in LAYERS.items():
        for options in ({}, {"static_graph": True}, {"gradient_as_bucket_view": True}):
            torch.manual_seed(0)
            with device():  # where it is quantised, too
                layer = make()
            x = tokens(layer, 16)
            parts = whole_gradients(copy.deepcopy(layer), x)
            parallel = DistributedDataParallel(layer, **options)
            for _ in range(2):  # the second time in buckets of another order
                parallel.zero_grad()
                parallel(x[rank]).float().square().sum().backward()
            for parameter, gradient in parts[0].items():
                want = (gradient + parts[1][parameter]) / 2
                got = layer.get_parameter(parameter).grad
                torch.testing.assert_close(got, want, msg=lambda m, n=name: f"{n}: {m}")  # noqa: B023
