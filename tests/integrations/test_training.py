"""Gradients, checkpointing and auxiliary losses of replaced models."""

from __future__ import annotations

import pytest
import torch
from packaging.version import Version
from torch import Tensor, nn

import tmoe
from tests.checking import assert_matches
from tests.integrations.families import BY_NAME
from tests.integrations.family import IDS, TRANSFORMERS, outputs


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Of a fixed random functional: with the output's norm, a last RMSNorm's would vanish."""
    model.zero_grad()
    y = outputs(model)
    direction = torch.randn(y.shape, generator=torch.Generator().manual_seed(3))
    (y * direction.to(y)).sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


# Their models mix fp32 into fp64 and fail, with or without tmoe.
NOT_IN_FP64 = {"inkling2_text", "inkling2_loop_text"}


@pytest.mark.column("training")
@pytest.mark.parametrize("name", BY_NAME)
def test_gradients(name):
    """Of every parameter, within twice eager's own distance from fp64, or from grouped_mm."""
    model = BY_NAME[name].build()
    if BY_NAME[name].on_interface:
        model.set_experts_implementation("eager")
    eager = gradients(model)
    report = tmoe.replace_moe(model)
    got = gradients(model)
    report.restore()
    if name in NOT_IN_FP64:
        model.set_experts_implementation("grouped_mm")
        truth = gradients(model)
    else:
        truth = gradients(model.double())
    assert got.keys() == eager.keys() == truth.keys()
    scale = {key: value.abs().max().clamp(min=1e-30) for key, value in truth.items()}

    def flat(grads: dict[str, Tensor]) -> Tensor:
        return torch.cat(
            [(value / scale[key].to(value.dtype)).flatten() for key, value in grads.items()]
        )

    assert_matches(flat(got), flat(truth), flat(eager))


@pytest.mark.parametrize("name", ["mixtral", "llama4_text", "deepseek_v3", "gpt_oss"])
def test_gradient_checkpointing(name):
    """The router and the experts run twice and must do the same twice."""
    model = BY_NAME[name].build().train()
    tmoe.replace_moe(model)
    want = gradients(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    got = gradients(model)
    assert all(torch.equal(got[key], want[key]) for key in want)


def test_frozen_weights_get_no_gradient():
    model = BY_NAME["mixtral"].build()
    tmoe.replace_moe(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("experts" not in name)
    got = gradients(model)
    assert got and not any("experts" in name for name in got)
    assert got["model.layers.0.mlp.gate.weight"].abs().max() > 0


# What transformers 5.17 itself can't do, with or without tmoe.
LACKING_BEFORE_5_24 = {
    "llama4_text": "its output has no router logits",
    "dbrx": "its auxiliary loss raises",
    "granitemoe": "its auxiliary loss raises",
}


@pytest.mark.parametrize(
    "name",
    [
        "mixtral", "qwen3_moe", "llama4_text", "jetmoe", "dbrx", "qwen2_moe", "olmoe", "phimoe",
        "gpt_oss", "granitemoe", "jamba", "minimax", "ernie4_5_moe",
    ],
)  # fmt: skip
def test_router_logits_and_aux_loss(name):
    """transformers records them by a hook on the router module, which must go on being called."""
    if name in LACKING_BEFORE_5_24 and Version("5.24") > TRANSFORMERS:
        pytest.skip(f"{name} before transformers 5.24: {LACKING_BEFORE_5_24[name]}")
    model = BY_NAME[name].build()
    with torch.no_grad():
        want = model(input_ids=IDS, labels=IDS, output_router_logits=True)
        tmoe.replace_moe(model)
        got = model(input_ids=IDS, labels=IDS, output_router_logits=True)
    want_logits = want.get("router_logits")
    assert want_logits is not None and len(want_logits) > 0
    torch.testing.assert_close(got.router_logits, want_logits)
    torch.testing.assert_close(got.loss, want.loss)
    assert (got.get("aux_loss") is None) == (want.get("aux_loss") is None)
    if want.get("aux_loss") is not None:
        torch.testing.assert_close(got.aux_loss, want.aux_loss)
