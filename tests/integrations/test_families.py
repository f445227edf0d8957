"""Every unquantised family of transformers: the same model on tmoe, loaded, saved and undone.

A test with a ``column`` mark is a column of docs/support-matrix.md.
"""

from __future__ import annotations

import pytest
import torch

from tests.checking import assert_matches
from tests.integrations.families import FAMILIES
from tests.integrations.family_run import NEW_TOKENS, Run, run_family

NOT_ON_INTERFACE = "not on transformers' experts interface; `tmoe.replace_moe` runs it"


@pytest.fixture(scope="module", params=FAMILIES, ids=str)
def run(request, tmp_path_factory) -> Run:
    return run_family(request.param, tmp_path_factory.mktemp(request.param.name))


def allowed(run: Run) -> torch.Tensor:
    """1e-5 of the logits' scale, or what transformers' own two implementations differ by.

    Theirs is the larger one where a recurrent attention amplifies roundings.
    """
    bound = 1e-5 * run.eager.abs().max()
    if run.family.on_interface:
        bound = torch.maximum(bound, (run.other - run.eager).abs().max())
    return bound


@pytest.mark.column("experts")
def test_logits(run):
    """Every MoE layer runs on tmoe, one call each, and the logits are the same."""
    assert torch.isfinite(run.tmoe).all() and run.tmoe.std() > 0.01
    assert (run.tmoe - run.eager).abs().max() <= allowed(run)
    if not run.family.on_interface:
        assert_matches(run.tmoe, run.other, run.eager)
    assert len(run.report.replaced) == run.family.layers
    assert run.ops == run.family.expected_ops


@pytest.mark.column("router")
def test_routers(run):
    """Each layer's router is on tmoe, or the report says why not."""
    assert run.routers == run.family.expected_routers
    assert len(run.report.layers) == run.family.layers
    for layer in run.report.layers:
        if layer.router is None:
            inside = [n for n in run.report.skipped if n.rpartition(".")[0] == layer.name]
            pytest.skip(run.report.skipped[inside[0]])


@pytest.mark.column("interface")
def test_from_pretrained(run):
    """``from_pretrained(..., experts_implementation="tmoe")`` loads and runs the same model."""
    if not run.family.on_interface:
        pytest.skip(NOT_ON_INTERFACE)
    assert (run.loaded - run.plain).abs().max() <= allowed(run)
    assert run.loaded_ops == run.family.expected_ops - run.family.expected_routers


@pytest.mark.column("bf16")
def test_bf16(run):
    """The error against fp32 with the same routes is at most twice eager's own."""
    if run.bf16 is None:
        pytest.skip("this transformers can't run it in bf16")
    (ours, truth), (eager, eager_truth) = run.bf16, run.bf16_eager
    # the errors of both, around one truth
    assert_matches(ours, truth.to(torch.float64), truth + (eager - eager_truth))


@pytest.mark.column("generation")
def test_same_greedy_tokens(run):
    if run.tokens is None:
        pytest.skip("a model without a head; its tokens are those of the logits")
    assert run.tokens.shape[1] == run.tokens_tmoe.shape[1] > NEW_TOKENS
    assert torch.equal(run.tokens_tmoe, run.tokens)


@pytest.mark.column("save and load")
def test_saved_files_are_the_same_bytes(run):
    """Weights, their names and the config, whether the model was replaced or not."""
    assert {"config.json", "model.safetensors"} <= set(run.files)
    assert all(before == after for before, after in run.files.values())
    torch.testing.assert_close(run.plain, run.restored)


@pytest.mark.column("restore")
def test_restore_is_exact(run):
    assert torch.equal(run.restored, run.eager)


def test_nothing_moves(run):
    """No parameter is copied, renamed or moved; replacing runs no operation (`NoOperations`)."""
    assert run.moved == []
    assert all(layer.name in run.text for layer in run.report.layers)
