"""Every kernel, as its launcher launches it, compiles for every GPU in targets.py. Needs no GPU."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.aot.targets import TARGETS, WITH_E4M3, Target

ROOT = Path(__file__).parents[2]
TENSOR_MEMORY_COLUMNS = 512  # per SM of compute capability 10.x


def _compile(target: Target, cache: Path) -> list[dict]:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), "TRITON_DEFAULT_FP_FUSION": "0"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.aot.compile", target.name]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _kernels_on_disk() -> set[str]:
    names = set()
    for path in (ROOT / "kernels").rglob("*.py"):
        functions = [n for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef)]
        names |= {function.name for function in functions if function.name.endswith("_kernel")}
    return names


# What multiplies the codes of a scheme, where tiles are high enough for the units that matter.
UNITS = {
    "sm_90": dict.fromkeys(("fp8_tensor", "fp8_channel", "fp8_block"), "f32.e4m3.e4m3"),
    "sm_100": {
        **dict.fromkeys(("fp8_tensor", "fp8_channel", "fp8_block"), "kind::f8f6f4"),
        **dict.fromkeys(("mxfp8", "mxfp4_a8"), "kind::mxf8f6f4.block_scale"),
        "nvfp4": "kind::mxf4nvf4.block_scale",
    },
}
UNITS["sm_89"], UNITS["sm_103"] = UNITS["sm_90"], UNITS["sm_100"]
ONLY_ON = {"_fp8_blocks_kernel": "sm_90"}


def _faults(kernel: dict, target: Target) -> list[str]:
    """What is wrong with one compiled kernel."""
    faults = []
    if kernel["shared"] > target.shared:
        faults.append(f"{kernel['shared']} bytes of shared memory, at most {target.shared}")
    if kernel["tensor_memory"] > TENSOR_MEMORY_COLUMNS:
        faults.append(f"{kernel['tensor_memory']} columns of tensor memory")
    if kernel["spilled"] > kernel["max_spilled"]:
        faults.append(f"spills {kernel['spilled']} bytes, at most {kernel['max_spilled']}")
    if kernel["fuses"] == (kernel["kernel"] == "_route_backward_kernel"):
        faults.append("rounds a product before it adds it, or ought to and doesn't")
    if kernel["kernel"] == "_grouped_gemm_kernel" and kernel["dtype"] in ("bf16", "fp16"):
        wanted = target.matmul_of(kernel["constants"]["BLOCK_M"])
        if len(kernel["instructions"]) != 1 or kernel["instructions"][0] not in wanted:
            faults.append(f"multiplies with {kernel['instructions']}, not with one of {wanted}")
    if kernel["kernel"] == "_grouped_gemm_kernel" and kernel["constants"]["BLOCK_M"] >= 64:
        unit = UNITS.get(target.name, {}).get(kernel["case"].split()[0])
        if unit is not None and kernel["units"] != [unit]:
            faults.append(f"codes meet in {kernel['units']}, not in {unit}")
    if kernel["kernel"] == "_fp8_blocks_kernel" and kernel["units"] != ["f32.e4m3.e4m3"]:
        faults.append(f"codes meet in {kernel['units']}")
    return faults


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS.keys())
def test_compiles_and_fits(target, tmp_path):
    compiled = _compile(target, tmp_path)
    elsewhere = {kernel for kernel, name in ONLY_ON.items() if name != target.name}
    found, wanted = {kernel["kernel"] for kernel in compiled}, _kernels_on_disk() - elsewhere
    if target.name in WITH_E4M3:
        assert "_grouped_gemm_kernel" in found and found < wanted
    else:
        assert found == wanted
    faults = [
        f"{kernel['case']}: {kernel['kernel']} {fault} ({kernel['constants']})"
        for kernel in compiled
        for fault in _faults(kernel, target)
    ]
    assert not faults, "\n".join(faults)
