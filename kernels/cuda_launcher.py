"""Triton's launcher for NVIDIA's GPUs, as far as a replay repeats what it does: the call of C.

What C is called with depends on Triton's version, and is no interface of it: here is all that we
know of it. `called_with` asks the launcher itself, so that a recording can be held to it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

from triton.backends.nvidia.driver import CudaLauncher, make_tensordesc_arg, wrap_handle_tensordesc

from tmoe.kernels.launch import Launch

# Newer ones hand on what else the launcher was called with; no descriptor that is tiled needs it.
_MORE = (None,) if len(inspect.signature(make_tensordesc_arg).parameters) == 3 else ()


def why_not(compiled: Any) -> str | None:
    """Why a launch of this kernel is more than a call of C."""
    launcher = compiled.run
    if type(launcher) is not CudaLauncher:
        return f"it is launched by a {type(launcher).__name__}"
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        return f"{compiled.name} wants memory for itself"
    return None


def in_c(compiled: Any) -> Callable[..., Any]:
    """The launcher in C."""
    function = compiled.run.launch
    if inspect.isfunction(function):  # it puts descriptors in
        function = inspect.getclosurevars(function).nonlocals["launcher"]
    return function


def base_arguments(compiled: Any) -> tuple[tuple[Any, ...], bool]:
    """What stands between the stream and the kernel's own arguments, and whether those are one."""
    launcher = compiled.run
    first = compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl
    no_hooks, no_scratch = (None, None, None), (None, None)  # the first are metadata, of hooks
    if not hasattr(launcher, "arg_annotations"):  # Triton 3.6
        return (*first, *no_scratch, compiled.packed_metadata, *no_hooks), False
    rest = launcher.arg_annotations, launcher.kernel_signature
    return (*first, compiled.packed_metadata, *no_hooks, *no_scratch, *rest), True


def descriptor_metas(compiled: Any) -> tuple[Any, ...]:
    """Of each tensor descriptor among the kernel's arguments; of none if they are taken apart."""
    return tuple(getattr(compiled.metadata, "tensordesc_meta", None) or ())


def describe(descriptor: Any, meta: Any) -> list[Any]:
    """A tensor descriptor as C takes it: of the GPU's, then sizes and strides. Without meta, the
    tensor comes first."""
    return make_tensordesc_arg(descriptor, meta, *_MORE)


def called_with(launch: Launch, stream: Any) -> list[Any]:
    """What the launcher would call C with now."""
    compiled, heard = launch.compiled, []
    launcher = copy.copy(compiled.run)
    launcher.launch = wrap_handle_tensordesc(
        lambda *arguments: heard.extend(arguments),
        compiled.src.signature,
        getattr(compiled.metadata, "tensordesc_meta", None),
    )
    grid, no_hooks = (*launch.grid, 1, 1)[:3], (None, None, None)
    launcher(*grid, stream, compiled.function, compiled.packed_metadata, *no_hooks, *launch.bound)
    return heard
