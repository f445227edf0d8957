"""Models around a Mixture-of-Experts model: every layer is found, in a vision tower too."""

from __future__ import annotations

import pytest
import torch

import tmoe
from tests.integrations.counting import CountOps
from tests.integrations.families import BY_NAME
from tests.integrations.family import DEVICE, IDS, outputs
from tests.integrations.wrappers import WRAPPERS


@pytest.fixture(scope="module", params=WRAPPERS, ids=str)
def wrapper(request):
    """(Wrapper, its report, outputs before and after), the outputs of the same random numbers."""
    model = request.param.build()
    before = after = None
    with torch.no_grad():
        if request.param.runs:
            model.to(DEVICE)
            torch.manual_seed(0)  # a diffusion model draws some
            before = outputs(model)
        report = tmoe.replace_moe(model)
        if request.param.runs:
            torch.manual_seed(0)
            after = outputs(model)
    return request.param, report, before, after


@pytest.mark.column("experts")
def test_every_layer_is_found(wrapper):
    case, report, before, after = wrapper
    assert len(report.replaced) == case.layers
    if before is not None:
        assert (after - before).abs().max() <= 1e-5 * before.abs().max()


@pytest.mark.column("router")
def test_every_router_is_found(wrapper):
    case, report, _, _ = wrapper
    assert len(report.routers) == case.layers
    assert not report.skipped


def test_vision_experts_of_ernie():
    """Which idle on text: here half of the tokens are an image's."""
    model = BY_NAME["ernie4_5_vl_moe_text"].build()
    is_image = (torch.arange(IDS.shape[1]) % 2 == 0).expand(IDS.shape).to(DEVICE)
    with torch.no_grad():
        want = outputs(model, moe_mm_token_type_ids=is_image)
        report = tmoe.replace_moe(model)
        with CountOps() as ops:
            got = outputs(model, moe_mm_token_type_ids=is_image)
    assert len(report.replaced) == ops.calls["fused_experts"] == ops.calls["router"] == 2
    assert not torch.equal(want, outputs(model))  # the vision experts made a difference
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()


def test_vision_experts_of_dots3():
    """Each layer has another number of experts, and its router reads it from itself."""
    pytest.importorskip("transformers.models.dots3_note")
    case = next(case for case in WRAPPERS if case.name == "dots3_note")
    model = case.build().to(DEVICE)
    blocks = [m for m in model.modules() if type(m).__name__ == "Dots3NoteVisionMoE"]
    x = torch.randn(1, 9, 32, device=DEVICE)
    with torch.no_grad():
        want = [block(x) for block in blocks]
        tmoe.replace_moe(model)
        with CountOps() as ops:
            got = [block(x) for block in blocks]
    assert [block.gate.weight.shape[0] for block in blocks] == [3, 4]
    assert dict(ops.calls) == {"router": 2, "fused_experts": 2}
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs)
