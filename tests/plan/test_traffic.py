"""How many ranks a token is sent to: formula and draws against routes drawn anew."""

from __future__ import annotations

import pytest
import torch

import tmoe
from tmoe.plan.traffic import chance_of_any

GROUPS = tmoe.Routing(256, 8, "DeepSeekV3", n_group=8, topk_group=4, scaling_factor=2.5)


def drawn(routing, parts, tokens=4000):
    """The mean number of `parts` equal parts that a token has an expert on."""
    logits = torch.randn(tokens, routing.num_experts, generator=torch.Generator().manual_seed(7))
    _, ids = tmoe.route(logits, routing)
    where = ids.long() // (routing.num_experts // parts)
    return torch.zeros(tokens, parts).scatter_(1, where, 1.0).sum(1).mean().item()


@pytest.mark.parametrize("parts", [2, 8, 32, 64])
def test_without_groups(parts):
    expected = parts * chance_of_any(128, 8, parts)
    assert expected == pytest.approx(drawn(tmoe.Routing(128, 8, "Renormalize"), parts), rel=0.02)


@pytest.mark.parametrize("parts", [2, 4, 8, 16, 64])
def test_with_groups(parts):
    """DeepSeek-V3: four of eight groups, so that it reaches no more than four of eight nodes."""
    expected = parts * chance_of_any(256, 8, parts, 8, 4)
    assert expected == pytest.approx(drawn(GROUPS, parts), rel=0.02)
    if parts == 8:
        assert 3.9 < expected <= 4 and 8 * chance_of_any(256, 8, 8) > 5.2


def test_ends():
    assert chance_of_any(8, 2, 1) == 1 and chance_of_any(8, 8, 8) == pytest.approx(1)
    assert chance_of_any(256, 8, 1, 8, 4) == 1
    assert chance_of_any(10, 2, 4) == pytest.approx(1 - 7.5 * 6.5 / 90)  # 2.5 experts each
