"""Record how large the inputs of experts get while a model runs on some text (calibration)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tmoe.checkpoints.input_ranges import InputRanges
from tmoe.checks import expect, expect_type

RECORDER = "tmoe_recorder"  # on an experts module, while its inputs are recorded


@dataclass(eq=False)
class Recorder:
    """The largest magnitudes that the experts of one module have seen: (E,) fp32 each."""

    input: Tensor | None = None
    hidden: Tensor | None = None

    def see(self, name: str, rows: Tensor, expert_offsets: Tensor) -> None:
        """rows (S, D), sorted by expert; those past the last offset belong to none."""
        E = expert_offsets.numel() - 1
        places = torch.arange(len(rows), device=rows.device, dtype=expert_offsets.dtype)
        owners = torch.searchsorted(expert_offsets[1:].contiguous(), places, right=True)
        amax = rows.detach().abs().amax(-1).float()
        found = torch.zeros(E + 1, device=rows.device).scatter_reduce_(0, owners, amax, "amax")[:E]
        known = getattr(self, name)
        setattr(self, name, found if known is None else torch.maximum(known, found))


@dataclass(eq=False)
class InputRecording:
    """What `record_input_ranges` has recorded so far."""

    model: Any
    _recorders: dict[str, Recorder] = field(default_factory=dict)

    def ranges(self) -> InputRanges:
        """The ranges, named as the layers are in a checkpoint.

        An expert that saw no token gets the largest of its layer's, with a warning that lists such
        experts: run more text, or accept the guess.

        Raises:
            ValueError: a layer saw no token at all, or saw NaN or Inf.
        """
        from .save import names_in_file
        from .switch import expert_modules

        layers = {}
        for name, experts in expert_modules(self.model):
            recorder = self._recorders[name]
            both = []
            for what in ("input", "hidden"):
                amax = getattr(recorder, what)
                seen = amax is not None and bool(amax.max() > 0)
                expect(seen, "record_input_ranges", name, "given some tokens", "none")
                finite = bool(torch.isfinite(amax).all())
                expect(finite, "record_input_ranges", name, "finite inside", "NaN or Inf")
                unseen = (amax == 0).nonzero().flatten().tolist()
                if unseen and what == "input":
                    warnings.warn(
                        f"record_input_ranges: {name}: experts {unseen} saw no tokens; they get "
                        "the largest range of their layer",
                        stacklevel=2,
                    )
                both.append(amax.masked_fill(amax == 0, amax.max()))
            linear = names_in_file(self.model, name, experts)[0, "down"]
            layers[linear.rsplit(".", 2)[0]] = (both[0], both[1])
        return InputRanges(layers)


@contextmanager
def record_input_ranges(model: nn.Module) -> Iterator[InputRecording]:
    """``with record_input_ranges(model) as recording: model(...)``, then ``recording.ranges()``.

    Call `tmoe.replace_moe` first. Meanwhile the experts run in two steps, so that what is between
    them can be seen; the results are the same up to rounding.

    Raises:
        TypeError: `model` is not a module.
        ValueError: it has no experts on tmoe, they are quantised already, or of a class for which
            this isn't available (JetMoE, LongCat-Flash, DBRX).
    """
    op = "record_input_ranges"
    expect_type(model, nn.Module, op, "model")
    from .quantized import PARALLEL, scheme_of
    from .switch import expert_modules

    recording = InputRecording(model)
    modules = dict(expert_modules(model))
    expect(bool(modules), op, "model", "one with experts on tmoe", "none; call replace_moe first")
    for name, experts in modules.items():
        can = hasattr(experts, "has_gate") and scheme_of(experts).name is None
        got = scheme_of(experts).name or type(experts).__name__
        expect(can, op, name, "unquantised experts that can be recorded", got)
        wanted = "experts of one rank: record before they are divided"
        expect(PARALLEL not in vars(experts), op, name, wanted, "some of several ranks")
        recording._recorders[name] = Recorder()
    try:
        for name, experts in modules.items():
            setattr(experts, RECORDER, recording._recorders[name])
        with torch.no_grad():
            yield recording
    finally:
        for experts in modules.values():
            vars(experts).pop(RECORDER, None)
