"""Compile every kernel that the launchers launch, for a GPU that is not here.

    python -m tests.aot.compile sm_90

The launchers run as they are, on tensors without storage; only the last step is replaced: Triton is
told which GPU to compile for, and hands back the binary where it would launch it. So what is tested
is what would run: the same tile configuration, flags and specialisations. Prints one JSON list, an
entry per compiled kernel.

Runs in a process of its own: once the interpreter is switched on there is no kernel to compile.
"""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from tests.aot.case import Case
from tests.aot.cases import cases
from tests.aot.targets import TARGETS, Target


@dataclass(frozen=True)
class Compiled:
    """What one compilation gave. `spilled` is in bytes per thread."""

    case: str
    kernel: str
    dtype: str  # of the first pointer, the output
    constants: dict[str, object]
    shared: int
    tensor_memory: int
    registers: int
    spilled: int
    max_spilled: int
    fuses: bool  # a product and a sum
    instructions: list[str] = field(default_factory=list)
    units: list[str] = field(default_factory=list)  # of the matmul instructions: what they multiply


class OffDevice:
    """The part of Triton's driver that a compilation asks: which GPU."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_cases(target: Target) -> list[Compiled]:
    """Run each case's launcher with compilation for `target` in place of the launch."""
    results: list[Compiled] = []
    described = set()
    run = JITFunction.run

    def compile_only(kernel, *args, grid, warmup, **kwargs):
        binary = run(kernel, *args, grid=grid, warmup=True, **kwargs)
        if binary.hash not in described:
            described.add(binary.hash)
            results.append(_describe(case, binary))
        return binary

    _pretend(target)
    JITFunction.run = compile_only
    for case in cases():
        if target.name in case.gpus:
            case.launch()
    return results


def _pretend(target: Target) -> None:
    """Answer what Triton and the launchers ask about the device."""
    triton.runtime.driver.set_active(OffDevice(target.gpu_target))
    torch.version.hip = "7.0" if target.gpu_target.backend == "hip" else None
    torch.cuda.get_device_capability = lambda device: target.capability
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(
        gcnArchName=target.name, multi_processor_count=132
    )


def _describe(case: Case, binary) -> Compiled:
    names = binary.src.fn.arg_names
    constants = {
        names[path[0]]: value for path, value in binary.src.constants.items() if len(path) == 1
    }
    registers, spilled = _resources(binary)
    assembly = binary.asm.get("ptx") or binary.asm["amdgcn"]
    return Compiled(
        case=case.name,
        kernel=binary.name,
        dtype=next(iter(binary.src.signature.values())).removeprefix("*"),
        constants={
            name: value for name, value in constants.items() if isinstance(value, int | str)
        },
        shared=binary.metadata.shared,
        tensor_memory=getattr(binary.metadata, "tmem_size", None) or 0,
        registers=registers,
        spilled=spilled,
        max_spilled=case.max_spilled,
        fuses=binary.metadata.enable_fp_fusion,
        instructions=sorted(set(re.findall(r"wgmma|tcgen05\.mma|mma\.sync|v_mfma", assembly))),
        units=sorted(set(re.findall(r"f32\.e4m3\.e4m3|kind::\w+(?:\.block_scale)?", assembly))),
    )


def _resources(binary) -> tuple[int, int]:
    """(registers per thread, bytes of stack and spilled registers per thread)."""
    if "amdgcn" in binary.asm:
        text = binary.asm["amdgcn"]
        keys = (r"\.vgpr_count:", r"\.private_segment_fixed_size:")
    else:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(binary.asm["cubin"])
            file.flush()
            command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
            text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        keys = (r"REG:", r"STACK:")
    registers, spilled = (int(re.search(key + r"\s*(\d+)", text)[1]) for key in keys)
    return registers, spilled


if __name__ == "__main__":
    gc.disable()  # the compiler makes many objects, and each search for cycles goes through torch
    compiled = compile_cases(TARGETS[sys.argv[1]])
    json.dump([asdict(one) for one in compiled], sys.stdout)
