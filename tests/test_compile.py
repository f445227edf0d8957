"""torch.compile without graph breaks, torch.export, and torch's own checks of the custom ops."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tmoe
from tmoe.library import operator
from tmoe.options import current

E, K, H, I = 6, 2, 16, 8
ROUTING = tmoe.Routing(E, K, "Renormalize")


class Layer(nn.Module):
    """A router and experts by hand: every public function, with its checks, is traced."""

    def __init__(self, **keywords):
        super().__init__()
        self.router = nn.Linear(H, E, bias=False)
        self.gate_up_proj = nn.Parameter(torch.randn(E, 2 * I, H) / 4)
        self.down_proj = nn.Parameter(torch.randn(E, H, I) / 4)
        self.gate_up_bias = nn.Parameter(torch.randn(E, 2 * I) / 4)
        self.keywords = keywords

    def forward(self, x):
        return tmoe.moe(
            x, self.router(x), self.gate_up_proj, self.down_proj, ROUTING,
            gate_up_bias=self.gate_up_bias, **self.keywords,
        )  # fmt: skip


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def num_compiles() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("compiler", ["inductor", "aot_eager"])
@pytest.mark.parametrize("training", [False, True])
def test_any_number_of_tokens_compiles_at_most_twice(training, compiler):
    """CG11, SH08, EM07: no graph break; results and gradients equal eager's."""
    layer = Layer(activation="swiglu_oai", interleaved=True)
    compiled = torch.compile(layer, fullgraph=True, backend=compiler)
    parameters = list(layer.parameters())
    with torch.set_grad_enabled(training):
        for T in (64, 7, 1):
            x = torch.randn(T, H, requires_grad=training)
            torch._dynamo.mark_dynamic(x, 0)
            got, want = compiled(x), layer(x)
            torch.testing.assert_close(got, want)
            if training:
                for mine, theirs in zip(
                    torch.autograd.grad(got.square().sum(), [x, *parameters]),
                    torch.autograd.grad(want.square().sum(), [x, *parameters]),
                    strict=True,
                ):
                    torch.testing.assert_close(mine, theirs)
    assert num_compiles() <= 2


def test_without_a_mark_it_compiles_at_most_twice():
    compiled = torch.compile(Layer(), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for T in (64, 7, 33, 65):
            assert compiled(torch.randn(T, H)).shape == (T, H)
    assert num_compiles() <= 2


def test_zero_tokens_compiled():
    compiled = torch.compile(Layer(), fullgraph=True, backend="aot_eager")
    assert compiled(torch.randn(0, H)).shape == (0, H)


def test_grouped_gemm_and_out_compile():
    b, bias = torch.randn(3, 5, H, requires_grad=True), torch.randn(3, 5)
    offsets = torch.tensor([0, 2, 2, 6], dtype=torch.int32)

    @torch.compile(fullgraph=True)
    def gemm(a, b):
        return tmoe.grouped_gemm(a, b, offsets, bias=bias)

    @torch.compile(fullgraph=True)
    def gemm_out(a, b, out):
        return tmoe.grouped_gemm(a, b, offsets, bias=bias, out=out) + 1

    a = torch.randn(6, H)
    want = tmoe.grouped_gemm(a, b, offsets, bias=bias)
    torch.testing.assert_close(gemm(a, b), want)
    torch.testing.assert_close(
        torch.autograd.grad(gemm(a, b).sum(), b), torch.autograd.grad(want.sum(), b)
    )
    out = torch.zeros(6, 5)
    torch.testing.assert_close(gemm_out(a, b.detach(), out), want.detach() + 1)
    torch.testing.assert_close(out, want.detach())


def test_autocast_compiles():
    layer, x = Layer(), torch.randn(4, H)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(compiled(x), layer(x)) and layer(x).dtype == torch.bfloat16


def test_options_count_when_compiled_code_runs():
    """The dispatcher runs inside the op: it is never traced, so nothing about it is frozen."""
    layer, x = Layer(), torch.randn(4, H)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        compiled(x)
        with tmoe.options(batch_invariant=True, backend="torch"):
            assert current().batch_invariant
            with pytest.raises(tmoe.NoBackendError, match="not batch invariant"):
                compiled(x)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    """For any number of tokens; the program chooses its backend as eager inference does."""
    layer = Layer()
    tokens = torch.export.Dim("tokens", min=1, max=1024)
    program = torch.export.export(
        layer, (torch.randn(4, H),), dynamic_shapes=({0: tokens},), strict=strict
    )
    nodes = {node.target: node for node in program.graph.nodes if node.op == "call_function"}
    needs_grad = nodes[operator("fused_experts")].args[-1]
    assert needs_grad is False
    for T in (1, 9):
        x = torch.randn(T, H)
        torch.testing.assert_close(program.module()(x), layer(x))


def _samples():
    x, gate_up, down = torch.randn(4, H), torch.randn(E, 2 * I, H), torch.randn(E, H, I)
    weights, ids = tmoe.route(torch.randn(4, E), ROUTING)
    experts = (x, gate_up, down, weights, ids, None, torch.randn(E, H), "swiglu", 1.0, float("inf"),
               False, False, 0, E, False)  # fmt: skip
    gemm = (torch.randn(6, H), gate_up, torch.tensor([0, 2, 2, 5, 6, 6, 6]).int(), None)
    # MXFP4: its parts are bytes, and opcheck has no arithmetic for float8.
    codes = [tmoe.quantize(w, "mxfp4").parts() for w in (gate_up, down)]
    quantized = (x, *codes, *experts[3:7], None, None, "mxfp4_a16", "mxfp4", 0,
                 *experts[7:])  # fmt: skip
    quantized_gemm = (gemm[0], codes[0], *gemm[2:], None, "mxfp4_a16", "mxfp4", 0)
    rule = tmoe.RoutingRule(score="sigmoid", takes_bias=True, takes_expert_scale=True)
    recipe = tmoe.Routing(E, K, rule).json
    logits = (torch.randn(4, E), torch.randn(E), torch.rand(E), None, recipe, torch.float64,
              torch.int64, True, True)  # fmt: skip
    router = (torch.randn(4, H), torch.randn(E, H), torch.randn(E), *logits[1:7])
    quantize = (torch.randn(4, H), None, torch.tensor(0.01), "nvfp4", 0, "")
    return {
        "fused_experts": experts,
        "grouped_gemm": gemm,
        "route": logits,
        "router": router,
        "quantize": quantize,
        "quantized_experts": quantized,
        "quantized_grouped_gemm": quantized_gemm,
    }


QUANTIZED = ["quantized_experts", "quantized_grouped_gemm"]
OPS = ["fused_experts", "grouped_gemm", "route", "router", "quantize"]


@pytest.mark.parametrize(
    "op, needs_grad",
    [*((op, False) for op in OPS + QUANTIZED), *((op, True) for op in OPS)],
)
def test_opcheck(op, needs_grad):
    """torch's own check: schema, fake kernel, autograd registration, dynamic shapes."""
    args = _samples()[op]
    if needs_grad and op != "quantize":
        selection_bias = {"route": 1, "router": 3}.get(op)
        for i, arg in enumerate(args):
            if isinstance(arg, torch.Tensor) and arg.is_floating_point() and i != selection_bias:
                arg.requires_grad_()
    torch.library.opcheck(operator(op), (*args, needs_grad))


def test_quantize_compiles():
    """Traced code takes the parts; what they mean was decided while tracing."""
    x = torch.randn(6, 64)
    for format, options in (("fp8_block", {}), ("mxfp4", {"scale_rule": "ceil"}), ("nvfp4", {})):

        def parts(x, format=format, options=options):
            return tmoe.quantize(x, format, **options).parts()

        compiled = torch.compile(parts, fullgraph=True, backend="aot_eager")
        for got, want in zip(compiled(x), parts(x), strict=True):
            assert torch.equal(
                got.reshape(-1).view(torch.uint8), want.reshape(-1).view(torch.uint8)
            )


@pytest.mark.parametrize("op", ["fused_experts", "grouped_gemm", *QUANTIZED])
def test_opcheck_of_the_out_variant(op):
    args = _samples()[op]
    want = operator(op)(*args, False)
    torch.library.opcheck(operator(f"{op}_out"), (torch.zeros_like(want), *args))
