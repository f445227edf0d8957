"""What the scripts of this folder share: how ranks start, and the JSON that `--out` is for."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tmoe.bench.machine import machine_info


def command_of(start: str, out: Path | None, arguments: Sequence[str] | None = None) -> str:
    """`start` and what the script was given, but for the file that it writes to."""
    given = sys.argv[1:] if arguments is None else arguments
    return " ".join([start, *(shlex.quote(x) for x in given if x not in ("--out", str(out)))])


def write_record(out: Path, device: torch.device, command: str, **found: Any) -> None:
    """Where it was measured, with which command, and what."""
    record = {"machine_info": machine_info(device), "command": command, **found}
    out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def start_ranks() -> tuple[torch.device, DeviceMesh]:
    """This rank's device, and a mesh of one dimension, "x", of all that torchrun started."""
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    return device, init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("x",))
