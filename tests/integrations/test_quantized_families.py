"""Every family of transformers quantised: in place, on disk, and saved. Three columns of
docs/support-matrix.md; loading others' checkpoints is `test_from_pretrained.py`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tmoe
from tests.checkpoints.tiny_models import save
from tests.integrations.families import FAMILIES
from tests.integrations.family import DEVICE, Family, outputs
from tests.integrations.test_from_pretrained import quantized
from tests.integrations.test_save_quantized import assert_same_files
from tmoe.checkpoints import quantize_checkpoint
from tmoe.integrations.transformers.report import Report

SCHEME = "fp8_channel"


@dataclass
class Run:
    """One family: a model quantised in place, and its checkpoint quantised on disk."""

    family: Family
    model: nn.Module
    report: Report
    before: dict[str, Tensor]  # the parameters
    plain: Tensor  # outputs before quantising, and after
    outputs: Tensor
    folder: Path  # what quantising on disk wrote
    refused: str | None  # why it wrote nothing


@pytest.fixture(scope="module", params=FAMILIES, ids=str)
def run(request, tmp_path_factory) -> Run:
    family, folder = request.param, tmp_path_factory.mktemp(request.param.name)
    model = family.build()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    refused = None
    try:
        quantize_checkpoint(save(model, folder / "source", shards=False), folder / "out", SCHEME)
    except ValueError as error:
        wanted, _, got = str(error).partition(", got ")
        of_layer = re.match(r"\S+experts: (.*)", got)
        refused = of_layer[1] if of_layer else wanted
    with torch.no_grad():
        plain = outputs(model)
        report = tmoe.replace_moe(model, SCHEME)
        return Run(family, model, report, before, plain, outputs(model), folder / "out", refused)


@pytest.mark.column("quantised")
def test_in_place(run):
    """The weights become what tmoe.quantize makes of them, the rest stays, and the model runs."""
    reasons = set(run.report.not_quantized.values())
    if reasons:
        assert not run.report.errors and not quantized(run.model)
        pytest.skip(", ".join(sorted(reasons)))
    assert len(run.report.errors) == run.family.layers
    held = quantized(run.model)
    assert len(held) == 2 * run.family.layers
    for name, parameter in run.model.named_parameters():
        old = run.before[name]
        if name not in held:
            assert torch.equal(parameter, old), name
            continue
        if old.shape[1:] != parameter.shape[1:]:
            old = old.transpose(1, 2)
        # LongCat-Flash has rows of experts that don't exist.
        assert torch.equal(parameter, tmoe.quantize(old[: len(parameter)], SCHEME)), name
    # Two codes of 3 mantissa bits a product; routes of these random models may flip.
    assert 0 < (run.outputs - run.plain).norm() / run.plain.norm() < 0.5


@pytest.mark.column("on disk")
def test_on_disk(run):
    """Loaded again, it gives the outputs of the model quantised in place, bit by bit."""
    if run.refused is not None:
        assert not list(run.folder.glob("*.safetensors"))
        pytest.skip(run.refused)
    loaded = tmoe.from_pretrained(
        run.folder, dtype=torch.float32, device=DEVICE, model_class=type(run.model)
    )
    assert len(quantized(loaded)) == 2 * run.family.layers
    with torch.no_grad():
        assert torch.equal(outputs(loaded), run.outputs)


@pytest.mark.column("saved")
def test_saved(run, tmp_path):
    """The files that quantising on disk writes: w1, w3 and w2, other prefixes, no gate."""
    if run.report.not_quantized:
        pytest.skip(", ".join(sorted(set(run.report.not_quantized.values()))))
    try:
        run.model.save_pretrained(tmp_path)
    except NotImplementedError as error:
        assert not list(tmp_path.glob("*.safetensors"))
        reason = re.search(r": (?:the|its|tmoe) .*(?=\. Quantise)", str(error).partition("and ")[2])
        pytest.skip(reason[0].removeprefix(": "))
    assert_same_files(tmp_path, run.folder)
