"""FSDP2 around the layer: shards, gathers and reduces, with the same numbers."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tests.nn import fsdp_ranks
from tests.nn.layers import H, make_layer
from tests.nn.test_training import gradients
from tests.parallel.ranks import ranks


@pytest.fixture
def mesh(tmp_path):
    """A mesh of this one process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("inner", [False, True], ids=["layer", "experts-and-layer"])
def test_same_output_and_gradients(inner, mesh):
    layer, x = make_layer("deepseek"), torch.randn(16, H)
    want = gradients(layer, layer, x)
    if inner:
        fully_shard(layer.experts, mesh=mesh)
    fully_shard(layer, mesh=mesh)
    got = gradients(layer, layer, x)
    for name, gradient in got.items():
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        torch.testing.assert_close(local, want[name], msg=name)


def test_mixed_precision_leaves_the_correction_bias_alone(mesh):
    layer = make_layer("deepseek")
    fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    layer(torch.randn(8, H)).sum().backward()
    assert layer.gate.e_score_correction_bias.dtype == torch.float32
    assert all(p.grad.dtype == torch.float32 for p in layer.parameters())


def test_two_ranks():
    """Sharded and reduced over two processes: every layer of layers.py, bf16 parameters with fp32
    sums, adapters on plain and on quantised experts; experts that are divided instead; and whole
    copies under DistributedDataParallel."""
    with ranks(2) as group:
        group.run(fsdp_ranks.compare_all)
        group.run(fsdp_ranks.compare_beside_divided_experts)
        group.run(fsdp_ranks.compare_data_parallel)
