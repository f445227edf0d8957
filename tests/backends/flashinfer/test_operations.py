"""FlashInfer's single operations: what is accepted, by hand, and what a call computes."""

from __future__ import annotations

import re

import pytest
import torch
from packaging.version import Version

import tmoe
from tests.backends.flashinfer.operating import (
    GPUS,
    flashinfer,
    gemm_problem,
    quantize_problem,
    route_problem,
)
from tmoe.backends.flashinfer import operations_support
from tmoe.backends.flashinfer.operations import FlashInferOperations
from tmoe.backends.flashinfer.operations_support import GEMMS, QUANTIZERS, ROUTER, why_not
from tmoe.backends.flashinfer.signatures import binds, recorded_versions, signature
from tmoe.dispatch.problem import RouteInputs
from tmoe.dispatch.ranking import RANKING
from tmoe.formats import SCHEMES
from tmoe.formats.recipe import Recipe
from tmoe.routing import Routing, RoutingMethod, RoutingRule

route, quantize, gemm = route_problem, quantize_problem, gemm_problem

# Typed in from notes on FlashInfer's sources: problem, GPU and version -> what is said.
DECISIONS = [
    (route, "B200", "0.7.4", {}, None),
    (route, "B300", "0.7.4", {}, None),
    (route, "B200", "0.6.8.post1", {}, None),
    (route, "B200", "0.6.8", {}, "needs FlashInfer 0.6.8.post1 for fused_topk_deepseek, got 0.6.8"),
    (route, "B200", "0.5.3", {}, "needs FlashInfer 0.6.8.post1 for fused_topk_deepseek, got 0.5.3"),
    (route, "B200", "0.8.0", {}, "knows FlashInfer below 0.8, got 0.8.0"),
    (route, "B200", "0.8.0rc1", {}, "knows FlashInfer below 0.8"),
    (route, "B200", "0.0.0+unknown", {}, "needs FlashInfer 0.6.8.post1"),
    (route, "B200", "unknown", {}, "version can't be read: unknown"),
    (route, "B200", None, {}, "FlashInfer isn't installed"),
    (route, "H200", "0.7.4", {}, "runs on compute capability 10.0 or 10.3, got 9.0"),
    (route, "B40", "0.7.4", {}, "got 10.7"),
    (route, "THOR", "0.7.4", {}, "got 11.0"),
    (route, "RTX5090", "0.7.4", {}, "got 12.0"),
    (route, "MI300X", "0.7.4", {}, "got 9.4"),
    (route, "CPU", None, {}, "got no GPU"),
    (quantize, "B200", "0.7.4", {}, None),
    (quantize, "B300", "0.6.18", {}, None),
    (quantize, "B200", "0.6.17", {}, "needs FlashInfer 0.6.18 for mxfp8_quantize, got 0.6.17"),
    (quantize, "H200", "0.7.4", {}, "got 9.0"),
    (quantize, "B200", "0.7.4", {"format": "mxfp4", "rule": "ceil"}, None),
    (quantize, "B200", "0.6.8.post1", {"format": "mxfp4", "rule": "ceil"}, None),
    (quantize, "RTX5090", "0.7.4", {"format": "mxfp4", "rule": "ceil"}, "got 12.0"),
    (gemm, "B200", "0.7.4", {}, None),
    (gemm, "B300", "0.6.8.post1", {}, None),
    (gemm, "H200", "0.7.4", {}, "got 9.0"),
    (gemm, "B200", "0.7.4", {"scheme": "mxfp4_a8"}, None),
    (gemm, "B300", "0.6.15", {"scheme": "mxfp4_a8"}, None),
    (gemm, "B200", "0.6.12", {"scheme": "mxfp4_a8"}, "0.6.15 for group_gemm_mxfp8_mxfp4_nt_group"),
    (gemm, "RTX5090", "0.7.4", {"scheme": "mxfp4_a8"}, "got 12.0"),
    (gemm, "B200", "0.7.4", {"scheme": "nvfp4"}, "runs on compute capability 12.0 or 12.1"),
    (gemm, "B200", "0.7.4", {"scheme": None}, "no grouped GEMM for bf16; it has fp8_block, mxfp4_"),
    (gemm, "B200", "0.7.4", {"scheme": "mxfp8"}, "no grouped GEMM for mxfp8"),
    (gemm, "B200", "0.7.4", {"scheme": "fp8_tensor"}, "no grouped GEMM for fp8_tensor"),
]  # fmt: skip

ARGUMENTS = [
    (route, {"routing": Routing(256, 8, "MiniMax2")}, "n_group · topk_group .* top_k=8, got 1 · 1"),
    (route, {"routing": Routing(384, 1, "MiniMax2")}, None),
    (route, {"routing": Routing(385, 1, "DeepSeekV3")}, "up to 384 experts in one group, got 385"),
    (route, {"routing": Routing(256, 8, "Renormalize")}, "like DeepSeekV3, not like Renormalize"),
    (route, {"routing": Routing(64, 6, RoutingRule(score="sigmoid"))}, "not like this RoutingRule"),
    (route, {"routing": Routing(256, 9, "DeepSeekV3", n_group=8, topk_group=4)}, "to 8 experts"),
    (route, {"routing": Routing(256, 8, "DeepSeekV3", n_group=16, topk_group=4)}, "8 groups .* 16"),
    (route, {"routing": Routing(128, 8, "DeepSeekV3", n_group=8, topk_group=8)}, "to 4, got 8 and"),
    (route, {"routing": Routing(160, 8, "DeepSeekV3", n_group=4, topk_group=2)}, "32 experts, got"),
    (route, {"routing": Routing(8, 4, "DeepSeekV3", n_group=8, topk_group=4)}, "2 to 32 .* got 1"),
    (route, {"routing": Routing(512, 8, "DeepSeekV3", n_group=8, topk_group=4)}, "experts, got 64"),
    (route, {"routing": Routing(64, 6, "DeepSeekV3", n_group=8, topk_group=3)}, None),
    (route, {"dtype": torch.bfloat16}, "must be float32, got bfloat16"),
    (route, {"extras": ("topk_ids", "want_counts")}, "knows nothing of topk_ids, want_counts"),
    (route, {"has_bias": False}, None),
    (route, {"needs_grad": True}, "has no backward"),
    (route, {"batch_invariant": True, "deterministic": True}, None),
    (route, {"op": "router"}, "runs route, quantize, grouped_gemm, not router"),
    (route, {"op": "fused_experts"}, "runs route, quantize, grouped_gemm, not fused_experts"),
    (quantize, {"format": "mxfp8", "rule": "floor"}, "rounds scales by the rule ceil, got floor"),
    (quantize, {"format": "mxfp4"}, "rounds scales by the rule ceil, got even"),
    (quantize, {"format": "nvfp4"}, "approximate reciprocals"),
    (quantize, {"format": "fp8_block"}, "has no quantiser for fp8_block; it has mxfp8, mxfp4"),
    (quantize, {"dtype": torch.float32}, "takes bfloat16 and float16, got float32"),
    (quantize, {"dtype": torch.float16}, None),
    (quantize, {"hidden": 48}, "whole blocks of 32, got 48"),
    (quantize, {"batch_invariant": True}, None),
    (gemm, {"has_bias": True}, "adds no bias"),
    (gemm, {"dtype": torch.float32}, "is used for bfloat16, got float32"),
    (gemm, {"dtype": torch.float16}, "is used for bfloat16, got float16"),
    (gemm, {"batch_invariant": True}, "depend on its batch"),
    (gemm, {"deterministic": True}, None),
    (gemm, {"needs_grad": True}, "has no backward"),
    (gemm, {"hidden": 2880}, "contracts a multiple of 128, got 2880"),
    (gemm, {"intermediate": 1408 + 64}, "a multiple of 128 rows of weights, got 1472"),
    (gemm, {"scheme": "mxfp4_a8", "intermediate": 2888}, None),
    (gemm, {"scheme": "mxfp4_a8", "intermediate": 2884}, "a multiple of 8 rows of weights, got"),
    (gemm, {"scheme": "mxfp4_a8", "hidden": 2880}, "contracts a multiple of 128, got 2880"),
]  # fmt: skip


def assert_said(refusal, said):
    if said is None:
        assert refusal is None
    else:
        assert refusal is not None and re.search(said, refusal), refusal


@pytest.mark.parametrize(("kind", "gpu", "version", "changes", "said"), DECISIONS)
def test_decisions(kind, gpu, version, changes, said):
    assert_said(why_not(kind(gpu, version, **changes)), said)


@pytest.mark.parametrize(("kind", "changes", "said"), ARGUMENTS)
def test_arguments(kind, changes, said):
    assert_said(why_not(kind(**changes)), said)


def test_every_problem_gets_an_answer_everywhere():
    problems = [(route, {"routing": Routing(8, 1, method)}) for method in RoutingMethod]
    problems += [(quantize, {"format": format}) for format in tmoe.formats.FORMATS]
    problems += [(gemm, {"scheme": scheme}) for scheme in (None, *SCHEMES)]
    for kind, changes in problems:
        for gpu in GPUS:
            for version in (None, "0.5.3", "0.9", *map(str, recorded_versions())):
                said = why_not(kind(gpu, version, **changes))
                assert said is None or (len(said) > 20 and "\n" not in said)


@pytest.mark.parametrize("function", [ROUTER, *QUANTIZERS.values(), *GEMMS.values()])
def test_what_is_accepted_can_be_called(function):
    """Every recorded version from the first known one on takes the keywords of every call."""
    floor = Version(function.known_from)
    versions = [version for version in recorded_versions() if version >= floor]
    assert str(versions[-1]) == "0.7.4" and len(versions) >= 4
    for version in versions:
        assert binds(signature(version, function.name), function.keywords) is None


def test_a_signature_that_does_not_fit_is_a_reason(monkeypatch):
    wanted = operations_support.Function("fused_topk_deepseek", "0.6.8.post1", ("scores", "other"))
    monkeypatch.setattr(operations_support, "ROUTER", wanted)
    assert "0.7.4 can't be called: it requires bias" in why_not(route())
    absent = operations_support.Function("trtllm_gen_routing", "0.6.8.post1", ())
    monkeypatch.setattr(operations_support, "ROUTER", absent)
    assert why_not(route(version="0.6.12")) == "FlashInfer 0.6.12 has no trtllm_gen_routing"


def test_triton_stands_first_and_it_is_not_ranked_elsewhere():
    for row in RANKING:
        names = [name for name, _ in row.order]
        on_blackwell = row.capabilities == ((10, 0), (10, 3))
        assert ("flashinfer" in names) == on_blackwell
        assert not on_blackwell or names.index("triton") < names.index("flashinfer")


# calls --------------------------------------------------------------------------------------------

BACKEND = FlashInferOperations()


@pytest.mark.parametrize("version", ["0.6.8.post1", "0.6.16.post4", "0.7.4"])
def test_a_route_is_deepseeks(version):
    """By hand: two groups of three, the better one kept, ties to the lower, NaN never."""
    routing = Routing(6, 2, "DeepSeekV3", n_group=2, topk_group=1, scaling_factor=2.0)
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([
        [0.0, 0.0, 0.0, 1.0, -9.0, -9.0],  # sums of two: 1 and 0.73
        [0.0, 0.0, nan, 2.0, 2.0, 2.0],
        [nan, 0.0, 0.0, -9.0, -9.0, -9.0],
        [inf, -inf, 0.0, 0.0, 0.0, 0.0],  # 1 + 0.5 and 0.5 + 0.5
        [nan, nan, inf, -inf, nan, nan],  # nothing finite
    ])  # fmt: skip
    before = logits.clone()
    bias = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, nan]).bfloat16()
    with flashinfer(version) as calls:
        weights, ids, probs, counts = BACKEND.route(logits, routing, RouteInputs(bias))
    assert ids.tolist() == [[0, 1], [3, 4], [1, 2], [0, 2], [0, 1]]
    wanted = [[1.0, 1.0], [1.0, 1.0], [1.0, 1.0], [2 / 1.5, 1 / 1.5], [0.0, 0.0]]
    torch.testing.assert_close(weights, torch.tensor(wanted))
    assert (weights.dtype, ids.dtype, probs, counts) == (torch.float32, torch.int32, None, None)
    assert torch.equal(logits.nan_to_num(7), before.nan_to_num(7))
    (name, keywords), = calls  # fmt: skip
    assert name == "fused_topk_deepseek" and ("backend" in keywords) == (version == "0.7.4")


def test_a_route_of_strided_logits_without_a_bias():
    logits = torch.randn(5, 2 * 64)[:, ::2]
    routing = Routing(64, 4, "DeepSeekV3", n_group=4, topk_group=2, scaling_factor=1.5)
    with flashinfer():
        got = BACKEND.route(logits, routing, RouteInputs())
    wanted = tmoe.route(logits.double(), routing)
    assert torch.equal(got.ids, wanted[1])
    torch.testing.assert_close(got.weights, wanted[0].float())


@pytest.mark.parametrize("version", ["0.6.18", "0.7.4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", ["mxfp8", "mxfp4"])
def test_codes_and_scales_are_linear_and_exact(version, dtype, format):
    x = torch.zeros(2, 3, 64, dtype=dtype)
    x[0, 0, 0], x[0, 1, 40], x[1, 2, 5] = 3.0, -7.0, 448.0
    recipe = Recipe.of("quantize", format, None, "ceil")
    with flashinfer(version) as calls:
        codes, scales, global_scale = BACKEND.quantize(x.mT.contiguous().mT, recipe, None, None)
    assert global_scale is None and scales.shape == (2, 3, 2) and scales.dtype == torch.uint8
    # 2^e covers max / 448: 3 -> -7, 7 -> -6, 448 -> 0; max / 6: 3 -> -1, 7 -> 1, 448 -> 7
    e = {"mxfp8": (-7, -6, 0), "mxfp4": (-1, 1, 7)}[format]
    bytes_ = torch.zeros(2, 3, 2, dtype=torch.uint8)
    bytes_[0, 0, 0], bytes_[0, 1, 1], bytes_[1, 2, 0] = (127 + n for n in e)
    assert torch.equal(scales, bytes_)
    if format == "mxfp8":
        assert codes.shape == (2, 3, 64) and codes.dtype == torch.float8_e4m3fn
        values = [codes[0, 0, 0].item(), codes[0, 1, 40].item(), codes[1, 2, 5].item()]
        assert values == [384.0, -448.0, 448.0]
    else:
        assert codes.shape == (2, 3, 32) and codes.dtype == torch.uint8
        # 3 / 2^-1 = 6: code 7; -7 / 2 = -3.5: -4, code 6 with a sign; 448 / 128 = 3.5: 4, code 6
        assert codes[0, 0, 0] == 7 and codes[0, 1, 20] == 14 and codes[1, 2, 2] == 6 << 4
    assert calls[0][1].get("backend") == "cuda"


OFFSETS = {
    "uneven": (5, 0, 131, 1), "one expert": (0, 0, 40, 0), "nothing": (0, 0, 0, 0),
    "full": (4, 8, 128, 4), "last": (0, 0, 0, 3), "first": (129, 0, 0, 0),
}  # fmt: skip


@pytest.mark.parametrize("tail", [0, 3])
@pytest.mark.parametrize("counts", OFFSETS)
@pytest.mark.parametrize("scheme", GEMMS)
def test_a_grouped_gemm_by_hand(scheme, counts, tail):
    counts, (N, D) = OFFSETS[counts], (128, 256)
    S, E = sum(counts) + tail, len(counts)
    a = (torch.randn(max(S, 1), D) * torch.rand(max(S, 1), 1).exp()).bfloat16()
    a[sum(counts) :] = torch.nan
    b = torch.randn(E, N, D) * torch.arange(1.0, E + 1)[:, None, None]
    recipe = SCHEMES[scheme].weights[0]
    b = tmoe.quantize(b, recipe.format.name, block_shape=recipe.block_shape)
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    rows = SCHEMES[scheme].inputs
    x = tmoe.quantize(a, rows.format.name, block_shape=rows.block_shape).dequantize().double()
    wanted = torch.zeros(len(a), N, dtype=torch.float64)
    for e, weight in enumerate(b.dequantize().double()):
        mine = slice(int(offsets[e]), int(offsets[e + 1]))
        wanted[mine] = x[mine] @ weight.T
    with flashinfer():
        got = BACKEND.grouped_gemm(a, b, offsets, None, None, scheme)
        out = torch.full((len(a), N), torch.nan, dtype=torch.bfloat16)
        assert BACKEND.grouped_gemm(a, b, offsets, None, out, scheme) is out
    torch.testing.assert_close(got.double(), wanted, rtol=2.0**-8, atol=1e-4)
    assert torch.equal(out, got)
