"""Groups as users make them: with torch's name of a library, with one for each device, without."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.parallel.ranks import ranks
from tmoe.parallel.groups import carrier_of
from tmoe.parallel.layout import Layout


@pytest.mark.parametrize("name", [None, "gloo", "cpu:gloo"])
def test_what_carries_the_bytes(name):
    dist.init_process_group(name, store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert carrier_of(dist.group.WORLD, "cpu") == "gloo"
    finally:
        dist.destroy_process_group()


# What torch says of groups on a machine with GPUs: by `nccl`, without a name, with both.
ON_GPUS = [
    ("nccl", "cuda:nccl", "cuda", "nccl"),
    ("undefined", "cuda:nccl", "cuda", "nccl"),
    ("undefined", "cpu:gloo,cuda:nccl", "cuda", "nccl"),
    ("undefined", "cpu:gloo,cuda:nccl", "cpu", "gloo"),
    ("gloo", "cpu:gloo,cuda:gloo", "cuda", "gloo"),
    ("nccl", "cuda:nccl", "cpu", "nccl"),
]


@pytest.mark.parametrize(("name", "config", "device", "carrier"), ON_GPUS)
def test_what_carries_them_on_gpus(name, config, device, carrier, monkeypatch):
    monkeypatch.setattr(dist, "get_backend", lambda group: name)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    assert carrier_of("a group", device) == carrier


def unnamed(rank: int, store: str) -> list[str]:
    """In a world that torch chose the library of, as `init_device_mesh` makes one."""
    dist.destroy_process_group()
    dist.init_process_group(store=dist.FileStore(store, 4), rank=rank, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("d", "t"))
    layout = Layout.of(mesh, None, ("d", "t"), "d")
    return [dist.get_backend(), layout.experts.backend, layout.shares.backend]


def test_a_world_that_nobody_named(tmp_path):
    with ranks(4) as four:
        assert four.run(unnamed, str(tmp_path / "store")) == [["undefined", "gloo", "gloo"]] * 4
