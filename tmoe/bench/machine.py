"""Where a measurement was made: what makes two of them comparable, or not."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import torch

import tmoe

from ..doctor import diagnose
from ..environment import installed_version, kernels_hash
from .peers import PEERS, TRAINING_PEERS
from .roofline import device_name


def machine_info(device: torch.device) -> dict[str, Any]:
    """Device, driver, versions, the commit of a checkout, and what the kernels' sources hash to."""
    found = diagnose()
    versions = {name: version for name, version in found.versions.items() if version}
    versions["tmoe"] = tmoe.__version__
    for peer in (PEERS | TRAINING_PEERS).values():
        package = peer.package or "torch"
        version = installed_version(package)
        if version is not None:
            versions.setdefault(package.removesuffix("-python"), version)
    info = {"device": device_name(device), "driver": found.driver, "versions": versions}
    return info | {"commit": commit(), "kernels_hash": kernels_hash()}


def commit() -> str | None:
    """The commit of the checkout that tmoe runs from, with "-dirty" where tracked files differ;
    None if it was installed, or there is no git."""
    root = Path(tmoe.__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    command = [
        "git",
        "-C",
        str(root),
        "describe",
        "--always",
        "--abbrev=12",
        "--dirty",
        "--exclude=*",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except OSError:
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
