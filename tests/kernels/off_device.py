"""Triton on a machine without a GPU: everything but the compiler and the GPU's driver is real.

A kernel that Triton would compile gets a number instead, one for each of Triton's own keys; what
its launcher, written in C, would be called with is noted. For a process of its own: once the
interpreter is switched on, kernels are never launched this way.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
from packaging.version import Version
from triton.backends.nvidia.driver import CudaLauncher, wrap_handle_tensordesc
from triton.runtime.jit import JITFunction

from tests.aot.compile import _pretend
from tests.aot.targets import TARGETS
from tmoe.dispatch import problem
from tmoe.library import shortcut

# For all kernels; before, each has one of its own.
HAS_ONE_LAUNCHER = Version(triton.__version__) >= Version("3.7")
numbers = itertools.count(1)
launched: list[Launched] = []  # by C
through_triton: list[str] = []  # names of kernels that Python launched


class Launched(NamedTuple):
    """What the C launcher was called with."""

    kernel: int
    grid: tuple[int, ...]
    stream: int
    options: tuple[Any, ...]
    arguments: tuple[Any, ...]  # tensors, or their addresses


class Compiled:
    """A kernel as `JITFunction.run` uses it."""

    def __init__(self, kernel: JITFunction, signature: dict[str, Any], options: Any) -> None:
        metas = [
            {"swizzle": 3, "elem_size": 2, "elem_type": 7, "block_size": [1], "fp4_padded": False}
            for kind in signature.values()
            if isinstance(kind, str) and kind.startswith("tensordesc")
        ]
        self.name, self.function, self.packed_metadata = kernel.__name__, next(numbers), (4, 1, 0)
        self.src = SimpleNamespace(signature=signature)
        self.metadata = SimpleNamespace(tensordesc_meta=metas)
        self.run = CudaLauncher.__new__(CudaLauncher)
        vars(self.run).update(
            num_ctas=1, global_scratch_size=0, global_scratch_align=1, profile_scratch_size=0,
            profile_scratch_align=1, launch_cooperative_grid=False, launch_pdl=options.launch_pdl,
            launch=wrap_handle_tensordesc(_InC(), signature, metas),
        )  # fmt: skip
        if HAS_ONE_LAUNCHER:
            vars(self.run).update(arg_annotations=[], kernel_signature=b"", gsan_enabled=False)

    def launch_metadata(self, grid: Any, stream: int, *arguments: Any) -> dict[str, str]:
        return {"name": self.name}


class _InC:
    """Not a Python function, as far as `inspect` can tell."""

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
        cooperative, pdl, *rest = rest
        if HAS_ONE_LAUNCHER:
            packed, metadata, enter, leave, *scratch, _, _, arguments = rest
        else:
            *scratch, packed, metadata, enter, leave = rest[:6]
            arguments = rest[6:]
        if enter is not None:
            enter(metadata)
        options = (cooperative, pdl, packed, *scratch)
        launched.append(Launched(function, (x, y, z), stream, options, tuple(arguments)))
        if leave is not None:
            leave(metadata)


def _fill_descriptor(address: int, *rest: Any) -> tuple[Any, ...]:
    return "descriptor", address, *(tuple(x) if isinstance(x, list) else x for x in rest)


def pretend() -> None:
    """From here on, tensors on the CPU are tensors of an H200."""
    _pretend(TARGETS["sm_90"])
    triton.runtime.driver.active.utils = SimpleNamespace(
        fill_tma_descriptor=_fill_descriptor, fill_tma_descriptor_tiled=_fill_descriptor
    )
    run = JITFunction.run

    def count(kernel: JITFunction, *args: Any, **kwargs: Any) -> Any:
        through_triton.append(kernel.__name__)
        return run(kernel, *args, **kwargs)

    def compile(kernel, key, signature, device, constexprs, options, attrs, warmup):
        compiled = Compiled(kernel, signature, options)
        kernel.device_caches[device][0][key] = compiled
        return compiled

    JITFunction.run, JITFunction._do_compile = count, compile
    h200 = problem.Machine("cuda", "NVIDIA H200", (9, 0), torch.__version__, triton.__version__)
    problem._machine = lambda device: h200
    shortcut.DEVICES = ("cpu",)
