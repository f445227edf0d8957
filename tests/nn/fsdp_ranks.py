"""What two ranks run: layers under fully_shard, their gradients compared with whole ones."""

from __future__ import annotations

import copy

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import tmoe
from tests.nn.layers import CASES, H, make_layer

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def gradients(layer, x):
    layer(x).float().square().sum().backward()
    grads = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()}


def compare(name, layer, rank, *, inner=False, policy=None, **kept):
    """FSDP averages over the ranks; each has half of the tokens."""
    torch.manual_seed(7)
    x = torch.randn(2, 16, H)
    whole, dtype = copy.deepcopy(layer), torch.float32
    if policy is not None:
        whole, dtype = whole.to(policy.param_dtype), policy.param_dtype
    parts = []
    for half in x:
        whole.zero_grad()
        parts.append({n: g.float().clone() for n, g in gradients(whole, half.to(dtype)).items()})
    policy = {} if policy is None else {"mp_policy": policy}
    mesh = init_device_mesh("cpu", (2,))
    if inner:
        fully_shard(layer.experts, mesh=mesh, **policy)
    fully_shard(layer, mesh=mesh, **policy, **kept)
    got = gradients(layer, x[rank].to(dtype))
    assert got.keys() == parts[0].keys() and len(got) > 0, (name, set(got) ^ set(parts[0]))
    for parameter in got:
        want = (parts[0][parameter] + parts[1][parameter]) / 2
        error = (got[parameter].float() - want).norm() / want.norm().clamp(min=1e-6)
        # Each half is rounded to bf16 by itself, in both; sums over the ranks are fp32.
        assert error < (2**-8 if policy else 1e-5), (name, parameter, float(error))


def compare_all(rank: int) -> None:
    for case in CASES:
        compare(case, make_layer(case), rank)
    compare("inner", make_layer("deepseek"), rank, inner=True)
    compare("bf16", make_layer("gated-shared"), rank, policy=BF16)
    for scheme in ("bf16", "nvfp4_a16"):
        layer = make_layer("shared").requires_grad_(False)
        layer = layer if scheme == "bf16" else tmoe.MoE.quantized(layer, scheme)
        tmoe.lora.add(layer, rank=4)
        for pair in layer.experts.lora.children():
            torch.nn.init.normal_(pair.lora_B)
        # Codes stay whole on every rank: FSDP would flatten them.
        held = {p for p in layer.parameters() if isinstance(p, tmoe.QuantizedTensor)}
        compare(f"lora-{scheme}", layer, rank, **({"ignored_params": held} if held else {}))
