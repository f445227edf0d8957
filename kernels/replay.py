"""Replay: launch what an earlier call launched, without going through its Python again.

What a call of the kernels launches follows from the shapes, strides, dtypes and alignment of its
tensors, and from a few settings; only addresses differ from call to call. With few tokens a GPU is
done before Python has worked that out, and before Triton has looked at the dozens of arguments of
each launch. So the first call of a kind is recorded, and others like it are replayed.

Numbers are never filled in: a call with other sizes or strides is of another kind, and so is one
with a tensor that starts elsewhere within 16 bytes, which is what Triton compiles for. Calls that
do more than allocate and launch run as they always do (`record.py`). So does everything on AMD, in
the interpreter, with a Triton that isn't known, and while someone listens to launches or has
kernels compiled for a tool of his own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from tmoe.kernels.launch import TRITON_IS_KNOWN, is_nvidia
from tmoe.kernels.recording import Recording, circumstances, is_watched

MOST_KINDS = 1024


class Replays:
    """Recordings by what they depend on. Threads may share it."""

    def __init__(self) -> None:
        self.known: dict[tuple[Any, ...], Recording | str] = {}  # or why there is none

    def run(
        self,
        function: Callable[..., tuple[Tensor, ...]],
        arguments: Sequence[Any],
        *settings: Any,
    ) -> tuple[tuple[Tensor, ...], Recording | None, list[Tensor]]:
        """The results of function(*arguments), perhaps by a replay; the recording, if there is one
        now; and its inputs, the tensors of the arguments.

        Args:
            function: returns tensors that it made or was given. It depends on its arguments, on
                `settings`, and on what launchers ask `launch.py`.
            arguments: tensors of one device, lists of tensors, and what is hashable.
            settings: hashable.
        """
        facts: list[Any] = [function, *settings]
        inputs: list[Tensor] = []
        _describe(arguments, facts, inputs)
        if not TRITON_IS_KNOWN or not is_nvidia(inputs[0].device) or is_watched():
            return function(*arguments), None, inputs
        key = (*facts, *circumstances())
        recording = self.known.get(key)
        if recording is None:
            from tmoe.kernels.record import record  # of NVIDIA's part of Triton

            results, recording = record(function, arguments, inputs)
            if len(self.known) >= MOST_KINDS:
                self.known.clear()
            self.known[key] = recording
            return results, recording if isinstance(recording, Recording) else None, inputs
        if isinstance(recording, Recording):
            replayed = recording.replay(inputs)
            if replayed is not None:
                return replayed, recording, inputs
        return function(*arguments), None, inputs


def _describe(values: Sequence[Any], facts: list[Any], inputs: list[Tensor]) -> None:
    """Collect the tensors, and all that launches may depend on but addresses."""
    for value in values:
        if isinstance(value, Tensor):
            inputs.append(value)
            place = value.data_ptr() % 16
            facts += (value.shape, value.stride(), value.dtype, value.device, place)
        elif isinstance(value, list):
            facts.append(len(value))
            _describe(value, facts, inputs)
        else:
            facts.append(value)
