"""Every unquantised family: same logits on tmoe, one call per MoE layer, and the way back."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import tmoe
from tests.checking import assert_matches
from tests.integrations.counting import CountOps
from tests.integrations.families import FAMILIES
from tests.integrations.family import Family, outputs


@dataclass(frozen=True)
class Run:
    """One family's outputs: on `eager`, on something else, on tmoe, and after `restore`."""

    family: Family
    eager: Tensor
    other: Tensor  # grouped_mm in fp32; in fp64, eager's formula where there is no grouped_mm
    tmoe: Tensor
    restored: Tensor
    replaced: list[str]
    layers: list[str]
    ops: int
    same_state: bool  # names and tensors of the state dict, classes outside the adapters
    report: str


@pytest.fixture(scope="module", params=FAMILIES, ids=str)
def run(request) -> Run:
    family: Family = request.param
    model = family.build()
    with torch.no_grad():
        if family.on_interface:
            model.set_experts_implementation("grouped_mm")
            other = outputs(model)
            model.set_experts_implementation("eager")
        eager = outputs(model)
        state = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
        report = tmoe.replace_moe(model)
        with CountOps() as ops:
            ours = outputs(model)
        state_after = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
        text, replaced = str(report), list(report.replaced)
        layers = [layer.name for layer in report.layers]
        report.restore()
        restored = outputs(model)
        if not family.on_interface:
            other = outputs(model.double())
    return Run(
        family,
        eager,
        other,
        ours,
        restored,
        replaced,
        layers,
        ops.calls.total(),
        state == state_after,
        text,
    )


def test_logits(run):
    """Within twice what transformers' own two implementations differ by, or its one's error."""
    assert torch.isfinite(run.tmoe).all() and run.tmoe.std() > 0.01
    if run.family.on_interface:
        floor = 32 * torch.finfo(torch.float32).eps * run.eager.abs().max()
        allowed = 2 * (run.other - run.eager).abs().max() + floor
        assert (run.tmoe - run.eager).abs().max() <= allowed
    else:
        assert_matches(run.tmoe, run.other, run.eager)


def test_runs_once_per_layer(run):
    assert len(run.replaced) == run.family.layers
    assert run.ops == run.family.expected_ops


def test_restore_is_exact(run):
    assert torch.equal(run.restored, run.eager)


def test_nothing_moves(run):
    assert run.same_state
    assert all(name in run.report for name in run.layers)
