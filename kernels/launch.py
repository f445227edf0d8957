"""How a kernel is launched, and what that needs to know about the device, looked up once.

Two features of newer GPUs matter here. The tensor memory accelerator (TMA) copies a tile that a
descriptor describes. Programmatic dependent launch (PDL) overlaps a kernel's start with the end of
the one before: a kernel launched with USE_PDL calls `gdc_wait` before it touches memory, which
returns when its predecessor's writes are visible, and `gdc_launch_dependents` when it has nothing
left to compute. Both exist from compute capability 9.0 on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton

if triton.knobs.runtime.interpret:
    from tmoe.kernels.interpreter import mend

    mend()

# Replays (`replay.py`) and what is written in Gluon (`fp8_blocks.py`) use what Triton doesn't
# promise to keep. With another Triton there is neither; all else runs.
KNOWN_TRITONS = ("3.6", "3.7", "3.8", "3.9")
TRITON_IS_KNOWN = triton.__version__.startswith(tuple(f"{known}." for known in KNOWN_TRITONS))


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. (Triton's own takes microseconds on the host, eight times in a layer.)"""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n, for n >= 1."""
    return 1 << (n - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch that took place."""

    compiled: Any  # the kernel
    grid: tuple[int, ...]
    bound: tuple[Any, ...]  # all arguments of the kernel, constexprs too, in its order


_listener: ContextVar[Callable[[Launch], None] | None] = ContextVar("tmoe_launch", default=None)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """kernel[grid](*arguments, **options). All launches go through here: see `record.py`.

    A product and a sum become one instruction, with one rounding, whatever Triton does by itself
    (3.9 warns that 3.10 won't, and the bits shall not depend on that), unless `options` say
    enable_fp_fusion=False.
    """
    compiled = kernel[grid](*arguments, **{"enable_fp_fusion": True} | options)
    hear = _listener.get()
    if hear is not None:
        named = {name: options[name] for name in kernel.arg_names if name in options}
        bound = kernel.signature.bind(*arguments, **named)
        hear(Launch(compiled, grid, tuple(bound.arguments.values())))


@contextmanager
def on_launch(hear: Callable[[Launch], None]) -> Iterator[None]:
    """Inside, `hear` is told of each launch by this thread."""
    token = _listener.set(hear)
    try:
        yield
    finally:
        _listener.reset(token)


@cache
def architecture(device: torch.device) -> str:
    """sm_90, gfx942, …; "interpreter" where kernels run on the CPU."""
    if triton.knobs.runtime.interpret:
        return "interpreter"
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@cache
def num_multiprocessors(device: torch.device) -> int:
    """How many programs of a persistent kernel run at once."""
    if triton.knobs.runtime.interpret:
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _is_hopper_or_newer(device: torch.device) -> bool:
    return _nvidia(architecture(device)) >= 90


def has_fp8_units(architecture: str) -> bool:
    """Whether the matmul units take e4m3 as torch's float8_e4m3fn has it."""
    if architecture == "interpreter" or architecture.startswith("gfx95"):
        return True
    return _nvidia(architecture) >= 89


def has_block_scaled_units(architecture: str) -> bool:
    """Whether they take codes together with the scales of their blocks: MX formats and NVFP4."""
    return _nvidia(architecture) >= 100


def _nvidia(architecture: str) -> int:
    """90 for sm_90; 0 for another maker's."""
    return int(architecture[3:]) if architecture.startswith("sm_") else 0


@cache
def is_nvidia(device: torch.device) -> bool:
    return _nvidia(architecture(device)) > 0


@cache
def multiplies_fp8(device: torch.device) -> bool:
    """`has_fp8_units` of this device."""
    return has_fp8_units(architecture(device))


@cache
def multiplies_block_scaled(device: torch.device) -> bool:
    """`has_block_scaled_units` of this device."""
    return has_block_scaled_units(architecture(device))


def specializes_warps(device: torch.device) -> bool:
    """Whether `fp8_blocks.py` can run: on Hopper, with a Triton whose Gluon it is written in."""
    return TRITON_IS_KNOWN and architecture(device) == "sm_90"


def supports_tma(device: torch.device) -> bool:
    """Whether tiles can be loaded through tensor descriptors; the interpreter can too."""
    return architecture(device) == "interpreter" or _is_hopper_or_newer(device)


def pdl_options(device: torch.device) -> dict[str, bool]:
    """Launch options of a kernel that has the constexpr USE_PDL.

    Such a kernel waits for the one before it with `gdc_wait`, ahead of any load, and says with
    `gdc_launch_dependents` from when on the programs of the next may come and wait. A short kernel
    says so at once, since with few tokens a layer is made of launches; a GEMM at its end, since
    programs that come while others still run crowd where there is room.
    """
    if _is_hopper_or_newer(device):
        return {"USE_PDL": True, "launch_pdl": True}
    return {"USE_PDL": False}


def fp32_precision() -> str:
    """How a dot multiplies fp32: "ieee", or "tf32" where torch's own matmuls may use that."""
    # Not allow_tf32, which raises once a program has used torch's newer settings.
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"
