"""What the public operations compute, on every backend. Bad input: test_ops_bad_input.py."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

import tmoe
from tests.checking import assert_matches
from tests.layouts import STRIDED
from tests.reference import fused_experts_ref
from tmoe.activation import GATED, UNGATED

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAN = float("nan")


@dataclass(frozen=True)
class Case:
    why: str
    T: int = 5
    H: int = 32
    I: int = 16
    E: int = 6
    K: int = 2
    activation: str | tmoe.Activation = "swiglu"
    bias: bool = False
    ids: tuple | None = None  # instead of random ones
    local: int | None = None  # experts in the weights, if not all
    options: dict = field(default_factory=dict)


CASES = [
    Case("small"),
    Case("one-token", T=1),
    Case("no-token (EM03, EM04)", T=0),
    Case("one-expert (PD07)", E=1, K=1),
    Case("every-expert-for-every-token", E=3, K=3),
    Case("odd-sizes (SH05, PD10)", T=7, H=33, I=21, E=5, K=3),
    Case("all-to-the-last-expert (EP14)", T=9, ids=((5, 0),) * 9),
    Case("one-expert-twice (RT10)", ids=((3, 3), (1, 3)), T=2),
    Case("dropped-slots (PD03)", T=3, ids=((0, 1), (-1, -1), (2, -1))),
    Case("ids-past-the-end (EP07)", T=3, ids=((0, 6), (7, 2), (2**31 - 1, -(2**31)))),
    Case(
        "window-of-experts (EP01, EP06)",
        E=8,
        local=4,
        options={"first_expert": 4, "num_experts": 8},
    ),
    Case("biases", bias=True),
    Case("gpt-oss", activation="swiglu_oai", bias=True, options={"interleaved": True}),
    Case("weight-on-input (SC08)", options={"weight_on_input": True}),
    Case("weight-on-input-with-biases", bias=True, options={"weight_on_input": True}),
    Case("clamped (WL05)", activation=tmoe.Activation.swiglu(limit=0.5)),
    Case("swiglu-step", activation=tmoe.Activation.swiglu_step(limit=0.3), T=2),
    *(Case(f"activation-{name}", T=2, activation=name) for name in GATED[1:4] + UNGATED),
]


def make(case: Case, dtype: torch.dtype, device) -> tuple[dict[str, Tensor], dict]:
    """Tensors and other keywords of a `fused_experts` call."""
    local = case.E if case.local is None else case.local
    activation = tmoe.Activation.of(case.activation)
    rows = 2 * case.I if activation.gated else case.I

    def randn(*shape, scale=1.0):
        return (torch.randn(*shape) * scale).to(device, dtype)

    logits = torch.randn(case.T, case.E)
    weights, ids = logits.softmax(-1).topk(case.K)
    if case.ids is not None:
        ids = torch.tensor(case.ids)
    tensors = {
        "x": randn(case.T, case.H),
        "gate_up_proj": randn(local, rows, case.H, scale=case.H**-0.5),
        "down_proj": randn(local, case.H, case.I, scale=case.I**-0.5),
        "topk_weights": weights.to(device),
        "topk_ids": ids.to(device, torch.int32),
    }
    if case.bias:
        tensors |= {"gate_up_bias": randn(local, rows), "down_bias": randn(local, case.H)}
    return tensors, {"activation": activation} | case.options


def reference(tensors: dict[str, Tensor], keywords: dict, dtype: torch.dtype) -> Tensor:
    known = dict(keywords)
    known.pop("num_experts", None)
    activation = known.pop("activation", tmoe.Activation("swiglu"))
    return fused_experts_ref(
        **tensors,
        **known,
        activation=activation.name,
        alpha=activation.alpha,
        limit=activation.limit,
        dtype=dtype,
    )


def check(tensors: dict[str, Tensor], keywords: dict) -> Tensor:
    dtype = tensors["x"].dtype
    got = tmoe.fused_experts(**tensors, **keywords)
    assert got.dtype == dtype
    assert_matches(
        got, reference(tensors, keywords, torch.float64), reference(tensors, keywords, dtype)
    )
    return got


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.why)
def test_fused_experts(case, dtype, backend, device):
    check(*make(case, dtype, device))


def test_rows_without_a_local_expert_are_zero(backend, device):
    tensors, keywords = make(CASES[8], torch.float32, device)  # PD03, EP09
    assert (tmoe.fused_experts(**tensors, **keywords)[1] == 0).all()


def test_int64_ids_and_strided_ids(backend, device):
    """NC04, NC05"""
    tensors, keywords = make(Case("ids"), torch.float32, device)
    want = tmoe.fused_experts(**tensors, **keywords)
    ids = tensors["topk_ids"]
    for other in (ids.long(), ids.t().contiguous().t(), torch.stack([ids, ids], -1)[..., 0]):
        assert torch.equal(tmoe.fused_experts(**tensors | {"topk_ids": other}, **keywords), want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_routing_weights_of_any_float_dtype(dtype, backend, device):
    tensors, keywords = make(Case("weights"), torch.float32, device)
    check(tensors | {"topk_weights": tensors["topk_weights"].to(dtype)}, keywords)


@pytest.mark.parametrize("name", ["x", "gate_up_proj", "down_proj", "gate_up_bias", "topk_weights"])
@pytest.mark.parametrize("how", STRIDED)
def test_any_strides(how, name, backend, device):
    tensors, keywords = make(Case("strides", bias=True), torch.float32, device)
    check(tensors | {name: STRIDED[how](tensors[name])}, keywords)


def test_expanded_x_and_half_views(backend, device):
    tensors, keywords = make(Case("views"), torch.float32, device)
    check(tensors | {"x": tensors["x"][:1].expand(5, -1)}, keywords)  # NC02, stride 0
    wide = torch.randn(6, 32, 64, device=device)
    check(tensors | {"gate_up_proj": wide[:, :, :32]}, keywords)  # WL10


def test_square_weights_have_no_ambiguous_layout(backend, device):
    check(*make(Case("WL03", H=16, I=16), torch.float32, device))


def test_more_than_two_dimensions(backend, device):
    tensors, keywords = make(Case("3-D", T=8), torch.float32, device)
    want = tmoe.fused_experts(**tensors, **keywords)
    x = tensors["x"].view(4, 2, -1).transpose(0, 1)  # NC02: last stride 1, not contiguous
    order = torch.arange(8).view(4, 2).t().flatten()
    changed = {name: tensors[name][order] for name in ("topk_weights", "topk_ids")}
    got = tmoe.fused_experts(**tensors | changed | {"x": x}, **keywords)
    assert got.shape == x.shape
    torch.testing.assert_close(got.reshape(8, -1), want[order])
    nested = {name: value.view(2, 4, -1) for name, value in changed.items()}
    assert torch.equal(tmoe.fused_experts(**tensors | nested | {"x": x}, **keywords), got)


def test_inputs_are_not_modified(backend, device):
    tensors, keywords = make(Case("inputs", bias=True), torch.float32, device)
    before = {name: value.clone() for name, value in tensors.items()}
    tmoe.fused_experts(**tensors, **keywords)
    assert all(torch.equal(before[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("where", ["x", "topk_weights"])
def test_nan_stays_with_its_token(where, backend, device):
    tensors, keywords = make(Case("nan"), torch.float32, device)
    want = tmoe.fused_experts(**tensors, **keywords)
    tensors[where][2, 0] = NAN
    got = tmoe.fused_experts(**tensors, **keywords)
    assert got[2].isnan().all()
    others = [0, 1, 3, 4]
    torch.testing.assert_close(got[others], want[others])


def test_a_dropped_slot_may_hold_anything(backend, device):
    tensors, keywords = make(Case("PD05, PD12"), torch.float32, device)
    tensors["topk_ids"][1:] = -1
    want = reference(tensors, keywords, torch.float64)
    tensors["topk_weights"][1:] = NAN
    tensors["x"][3:] = NAN
    got = tmoe.fused_experts(**tensors, **keywords)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    assert (got[1:] == 0).all()


def test_out(backend, device):
    tensors, keywords = make(Case("out"), torch.float32, device)
    want = tmoe.fused_experts(**tensors, **keywords)
    out = torch.full_like(want, NAN)
    assert tmoe.fused_experts(**tensors, **keywords, out=out) is out
    assert torch.equal(out, want)


def test_the_scheme_bf16_means_unquantised(backend, device):
    tensors, keywords = make(Case("scheme"), torch.float32, device)
    want = tmoe.fused_experts(**tensors, **keywords)
    assert torch.equal(tmoe.fused_experts(**tensors, **keywords, scheme="bf16"), want)


# Single numbers that public bug reports got wrong -------------------------------------------------


def one(x, gate_up, down, weight, **keywords) -> float:
    """An MoE of one token and one expert, H = I = 1."""
    y = tmoe.fused_experts(
        torch.tensor([[x]]),
        torch.tensor(gate_up).reshape(1, -1, 1),
        torch.tensor([[[down]]]),
        torch.tensor([[weight]]),
        torch.tensor([[0]]),
        **keywords,
    )
    return y.item()


@pytest.mark.parametrize(
    "why, want, arguments, keywords",
    [
        ("SC07 on the output", 1.7616, (2.0, [1.0, 1.0], 1.0, 0.5), {}),
        ("SC07 on the input", 0.7311, (2.0, [1.0, 1.0], 1.0, 0.5), {"weight_on_input": True}),
        ("WL01 gate comes first", -1.7616, (1.0, [2.0, -1.0], 1.0, 1.0), {}),
        (
            "WL05 limit", -99.995, (1.0, [12.0, -15.0], 1.0, 1.0),
            {"activation": tmoe.Activation.swiglu(limit=10.0)},
        ),
        ("WL06 gpt-oss", -41.9997, (1.0, [10.0, -20.0], 1.0, 1.0), {"activation": "swiglu_oai"}),
        ("WL06 gate below", -1.3e-13, (1.0, [-20.0, 3.0], 1.0, 1.0), {"activation": "swiglu_oai"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_known_numbers(why, want, arguments, keywords):
    assert one(*arguments, **keywords) == pytest.approx(want, rel=2e-2 if "below" in why else 1e-4)


@pytest.mark.parametrize("interleaved", [False, True])
def test_gate_and_up_are_paired(interleaved, backend, device):
    """WL02: pairs (1, 10) and (2, 20), in both layouts."""
    rows = [1.0, 10.0, 2.0, 20.0] if interleaved else [1.0, 2.0, 10.0, 20.0]
    y = tmoe.fused_experts(
        torch.ones(1, 1, device=device),
        torch.tensor(rows, device=device).reshape(1, 4, 1),
        torch.ones(1, 1, 2, device=device),
        torch.ones(1, 1, device=device),
        torch.zeros(1, 1, dtype=torch.int32, device=device),
        interleaved=interleaved,
    )
    gate, up = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])
    assert y.item() == pytest.approx((torch.nn.functional.silu(gate) * up).sum().item(), rel=1e-5)


def test_fp16_outputs_are_weighted_before_they_are_rounded(backend, device):
    """QN19: an expert's output of 70000 passes fp16's range, half of it doesn't."""
    x = torch.full((1, 1), 100.0, dtype=torch.float16, device=device)
    y = tmoe.fused_experts(
        x,
        torch.ones(1, 1, 1, dtype=torch.float16, device=device),
        torch.full((1, 1, 1), 700.0, dtype=torch.float16, device=device),
        torch.full((1, 1), 0.5, device=device),
        torch.zeros(1, 1, dtype=torch.int64, device=device),
        activation="identity",
    )
    assert y.item() == torch.tensor(35000.0).half().item()


def test_scaling_is_applied_once(backend, device):
    """SC01, SC02, SC10: the factor is in the routing weights, and only there."""
    tensors, keywords = make(Case("SC01"), torch.float32, device)
    want = 2.5 * tmoe.fused_experts(**tensors, **keywords)
    tensors["topk_weights"] = 2.5 * tensors["topk_weights"]
    torch.testing.assert_close(tmoe.fused_experts(**tensors, **keywords), want)


# route and moe ------------------------------------------------------------------------------------


def test_moe_is_route_then_experts(backend, device):
    tensors, _ = make(Case("moe"), torch.float32, device)
    routing = tmoe.Routing(6, 2, "DeepSeekV3", n_group=3, topk_group=2, scaling_factor=2.5)
    logits, bias = torch.randn(5, 6, device=device), torch.randn(6, device=device)
    weights, ids = tmoe.route(logits, routing, bias=bias)
    assert (weights.dtype, ids.dtype, ids.shape) == (torch.float32, torch.int32, (5, 2))
    projections = tensors["x"], tensors["gate_up_proj"], tensors["down_proj"]
    want = tmoe.fused_experts(*projections, weights, ids)
    got = tmoe.moe(projections[0], logits, *projections[1:], routing, bias=bias)
    assert torch.equal(got, want)


def test_route_takes_any_leading_shape(backend, device):
    logits = torch.randn(2, 3, 6, device=device)
    weights, ids = tmoe.route(logits, tmoe.Routing(6, 2, "Renormalize"))
    assert weights.shape == ids.shape == (2, 3, 2)
    flat = tmoe.route(logits.reshape(6, 6), tmoe.Routing(6, 2, "Renormalize"))
    assert torch.equal(flat[0], weights.reshape(6, 2)) and torch.equal(flat[1], ids.reshape(6, 2))


def test_llama4_puts_the_weight_on_the_input():
    """SC07 and SC08 through `moe`."""
    logit = torch.logit(torch.tensor([[0.5]]))
    x, gate_up, down = torch.tensor([[2.0]]), torch.ones(1, 2, 1), torch.ones(1, 1, 1)
    y = tmoe.moe(x, logit, gate_up, down, tmoe.Routing(1, 1, "Llama4"))
    assert y.item() == pytest.approx(0.7311, rel=1e-4)


def test_moe_with_a_window_is_a_partial_sum(backend, device):
    tensors, _ = make(Case("EP", E=8), torch.float32, device)
    routing, logits = tmoe.Routing(8, 2, "Renormalize"), torch.randn(5, 8, device=device)
    x, gate_up, down = tensors["x"], tensors["gate_up_proj"], tensors["down_proj"]
    parts = [
        tmoe.moe(x, logits, gate_up[e : e + 4], down[e : e + 4], routing, first_expert=e)
        for e in (0, 4)
    ]
    torch.testing.assert_close(parts[0] + parts[1], tmoe.moe(x, logits, gate_up, down, routing))


def test_zero_tokens_through_route_and_moe(backend, device):
    """EM01"""
    routing = tmoe.Routing(6, 2, "Renormalize")
    weights, ids = tmoe.route(torch.randn(0, 6, device=device), routing)
    assert weights.shape == ids.shape == (0, 2)
    tensors, _ = make(Case("empty", T=0), torch.bfloat16, device)
    y = tmoe.moe(
        tensors["x"], torch.randn(0, 6, device=device),
        tensors["gate_up_proj"], tensors["down_proj"], routing,
    )  # fmt: skip
    assert y.shape == (0, 32) and y.dtype == torch.bfloat16
