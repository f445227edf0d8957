"""Public bug reports, on replaced models: ties, NaN, sums of zeros, strides, odd and square sizes.

The codes name entries of the survey that the suite's cases come from (RT routing, NC strides, WL
weight layouts, SH shapes).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tmoe
from tests.integrations.families import BY_NAME
from tests.integrations.family import DEVICE, outputs
from tests.integrations.test_router_swap import X, router_of


def replaced(name: str) -> nn.Module:
    router = router_of(name)
    tmoe.replace_moe(router)
    return router


@torch.no_grad()
def set_logits(router: nn.Module, logits: list[float]) -> Tensor:
    """Make it see these, for the hidden states that are returned (1, H)."""
    for parameter in router.parameters():  # the linear bias of gpt-oss too
        parameter.zero_()
    router.weight[:, 0] = torch.tensor(logits)
    return torch.eye(1, router.weight.shape[1], device=DEVICE)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "lfm2_moe"])
def test_ties_go_to_the_lower_expert(name):
    """RT15: transformers leaves them to torch.topk, which says another thing on each device."""
    router = replaced(name)
    x = set_logits(router, [0.0] * 8).expand(5, -1)
    ids = router(x, *[torch.zeros(8)] * (name == "lfm2_moe"))[2]
    wanted = torch.arange(4).expand(5, 4)
    assert torch.equal(ids.cpu(), wanted)


def test_nan_stays_with_its_token():
    """RT10: ids are distinct and in range, and the other tokens see nothing of it."""
    router = replaced("mixtral")
    _, want, want_ids = router(X)
    broken = X.clone()
    broken[2] = float("nan")
    _, weights, ids = router(broken)
    others = torch.arange(len(X)) != 2
    assert torch.equal(weights[others], want[others]) and torch.equal(ids[others], want_ids[others])
    assert len(set(ids[2].tolist())) == 4 and 0 <= ids.min() and ids.max() < 8
    assert (weights[2] == 0).all()


def test_a_sum_of_zeros():
    """RT12: every selected sigmoid is 0 in fp32; DeepSeek's epsilon makes that weights of 0."""
    router = replaced("deepseek_v3")
    x = set_logits(router, [-200.0] * 8)
    router.e_score_correction_bias.copy_(torch.arange(8.0).flip(0))
    _, weights, ids = router(x)
    assert weights.tolist() == [[0.0] * 4] and ids.tolist() == [[0, 1, 2, 3]]


def test_the_selection_bias_is_no_part_of_a_weight():
    """RT03, with the numbers of the report: biased weights would be .6 and .4."""
    router = replaced("minimax_m3_vl_text")
    router.top_k = 2
    x = set_logits(router, [0.0] * 8)
    bias = torch.tensor([1.0, 0, 0, 0.5, 0, 0, 0, 0])
    router.e_score_correction_bias.copy_(bias)
    _, weights, ids = router(x)
    assert ids.tolist() == [[0, 3]] and weights.tolist() == [[0.5, 0.5]]


def test_groups_that_are_ruled_out_stay_out():
    """RT01: scores .9 .8 .3 .2, and biases so low that 0 would win."""
    router = replaced("deepseek_v3")
    router.top_k, router.norm_topk_prob, router.routed_scaling_factor = 2, True, 1.0
    x = set_logits(router, [2.1972, 1.3863, -9, -9, -0.8473, -1.3863, -9, -9])
    router.e_score_correction_bias.copy_(torch.tensor([-1.5, -1.6, -3, -3, -3, -3, -3, -3]))
    _, weights, ids = router(x)
    assert ids.tolist() == [[0, 1]]
    torch.testing.assert_close(weights.cpu(), torch.tensor([[0.5294, 0.4706]]), rtol=0, atol=1e-4)


def test_a_fine_bias_decides_in_a_bf16_model(tmp_path):
    """RT18: as bf16 numbers these eight biases are all 34.5."""
    model = BY_NAME["deepseek_v3"].build()
    bias = 34.5 + 0.01 * torch.arange(8.0)
    router_of("deepseek_v3", model).e_score_correction_bias.copy_(bias)
    model.save_pretrained(tmp_path)
    model = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16).to(DEVICE)
    tmoe.replace_moe(model)
    router = router_of("deepseek_v3", model)
    router.top_k = 2
    x = set_logits(router, [0.0] * 8).bfloat16()
    logits, weights, ids = router(x)
    assert ids.tolist() == [[7, 6]]
    assert logits.dtype == weights.dtype == router.e_score_correction_bias.dtype == torch.float32


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "gpt_oss", "hunyuan_v1_moe"])
def test_strides(name):
    """NC02: transposed, cut out of something wider, repeated by a stride of 0; and no token."""
    router = replaced(name)
    wide = torch.randn(7, 3 * 64, device=DEVICE)
    for x in (X.T.contiguous().T, wide[:, 64:128], X[:1].expand(7, -1), X[::2], X[:0]):
        for got, want in zip(router(x), router(x.contiguous().clone()), strict=True):
            torch.testing.assert_close(got, want)
            assert got.shape[0] == x.shape[0]


def same_logits(name: str, **sizes: Any) -> None:
    family = BY_NAME[name]
    model = replace(family, overrides=family.overrides | sizes).build()
    if family.on_interface:
        model.set_experts_implementation("eager")  # grouped_mm refuses odd sizes
    with torch.no_grad():
        want = outputs(model)
        tmoe.replace_moe(model)
        got = outputs(model)
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "aria_text", "llama4_text", "nemotron_h"])
def test_square_weights(name):
    """WL03: with I = H, and 2I = H, no shape says which axis is which."""
    for I in (64, 32):
        same_logits(name, intermediate_size=I, moe_intermediate_size=I)


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe"])
def test_odd_sizes(name):
    """SH05, RT06: I no multiple of anything, and a number of experts that is no power of two."""
    same_logits(
        name, intermediate_size=33, moe_intermediate_size=33, num_experts=5, num_local_experts=5
    )


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "llama4_text"])
def test_new_weights_are_used(name):
    """WL09: nothing keeps a copy of the old ones."""
    model, other = BY_NAME[name].build(), BY_NAME[name].build()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
        want = outputs(other)
        tmoe.replace_moe(model)
        outputs(model)
        model.load_state_dict(other.state_dict())
        got = outputs(model)
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()
