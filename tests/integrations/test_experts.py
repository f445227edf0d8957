"""The experts function by itself: every class in bf16, and what the interface may hand it."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize
from transformers.activations import ACT2FN
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation

import tmoe
from tests.checking import assert_matches
from tests.integrations.counting import CountOps
from tests.integrations.families import BY_NAME, FAMILIES
from tests.integrations.family import DEVICE, IDS, outputs
from tmoe.integrations.transformers.activations import activation_of
from tmoe.integrations.transformers.experts import experts_forward
from tmoe.integrations.transformers.switch import _dispatches


def experts_of(name: str) -> nn.Module:
    """The first experts module of a tiny model, on eager."""
    model = BY_NAME[name].build()
    if not BY_NAME[name].on_interface:
        pytest.skip(f"{name} is not on the interface of this transformers")
    module = next(module for module in model.modules() if _dispatches(module))
    module.config._experts_implementation_internal = "eager"
    return module


def arguments(experts: nn.Module, T: int = 23, K: int = 4, dtype: torch.dtype = torch.float32):
    """x (T, H), ids (T, K) distinct in a row, weights (T, K) that sum to one."""
    H = experts.down_proj.shape[2 if experts.is_transposed else 1]
    x, ids = torch.randn(T, H, dtype=dtype), torch.rand(T, 8).argsort(1)[:, :K]
    weights = torch.rand(T, K).softmax(1).to(dtype)
    return x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.on_interface], ids=str)
def test_bf16_against_fp32(family):
    """In bf16 whole models differ by whole routes; the experts alone must be as good as eager."""
    experts = experts_of(family.name).bfloat16()
    x, ids, weights = arguments(experts, dtype=torch.bfloat16)
    with torch.no_grad():
        eager, got = experts(x, ids, weights), experts_forward(experts, x, ids, weights)
        truth = copy.deepcopy(experts).float()(x.float(), ids, weights.float())
    assert got.dtype == torch.bfloat16 and got.is_contiguous()
    assert got.data_ptr() != x.data_ptr()
    assert_matches(got, truth, eager)


@pytest.mark.parametrize(
    "name", ["mixtral", "gpt_oss", "nemotron_h", "muse_spark_text", "llama4_text", "longcat_flash"]
)
def test_triton_kernels_agree(name):
    """The same call on the Triton backend (in its interpreter where there is no GPU), 6 tokens."""
    model = BY_NAME[name].build()
    tmoe.replace_moe(model)
    with torch.no_grad():
        with tmoe.options(backend="torch"):
            want = model(input_ids=IDS[:1, :6])[0]
        with tmoe.options(backend="triton"):
            torch.testing.assert_close(model(input_ids=IDS[:1, :6])[0], want)


@pytest.mark.parametrize(
    "name", ["mixtral", "gpt_oss", "aria_text", "nemotron_h", "muse_spark_text"]
)
def test_ids_out_of_range_are_skipped(name):
    """Zero rows, zero gradients, and no NaN from anything that a skipped route touches."""
    experts = experts_of(name).requires_grad_(True)
    x, ids, weights = arguments(experts)
    skipped = (torch.rand(ids.shape) < 0.5).to(DEVICE)
    skipped[0] = True
    ids = ids.masked_fill(skipped, 8)
    ids[1], skipped[1] = -1, True
    weights = weights.masked_fill(skipped, float("nan")).requires_grad_()
    x[:2] = float("nan")
    x.requires_grad_()
    got = experts_forward(experts, x, ids, weights)
    got.sum().backward()

    with torch.no_grad():
        keep_x, keep_weights = x.nan_to_num(0.0), weights.masked_fill(skipped, 0.0)
        want = experts_forward(experts, keep_x, ids.masked_fill(skipped, 0), keep_weights)
    assert got[:2].abs().max() == 0
    torch.testing.assert_close(got[2:], want[2:])
    assert weights.grad[skipped].abs().max() == 0
    assert x.grad[:2].abs().max() == 0
    for tensor in (x.grad, weights.grad, *(p.grad for p in experts.parameters())):
        assert torch.isfinite(tensor).all()


@pytest.mark.parametrize("name", ["mixtral", "muse_spark_text"])
def test_no_tokens_and_repeated_ids(name):
    experts = experts_of(name)
    x, ids, weights = arguments(experts, T=0)
    assert experts_forward(experts, x, ids, weights).shape == x.shape
    x, ids, weights = arguments(experts, T=5)
    ids = ids[:, :1].expand(-1, 4)
    with torch.no_grad():
        torch.testing.assert_close(
            experts_forward(experts, x, ids, weights), experts(x, ids, weights)
        )


@pytest.mark.parametrize("name", ["mixtral", "muse_spark_text"])
def test_input_in_another_dtype(name):
    """Under autocast an fp32 input may meet bf16 weights; the result has the input's dtype."""
    experts = experts_of(name).bfloat16()
    x, ids, weights = arguments(experts)
    with torch.no_grad():
        got = experts_forward(experts, x, ids, weights)
        want = experts_forward(experts, x.bfloat16(), ids, weights).float()
        assert got.dtype == torch.float32
        assert torch.equal(got, want)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            assert torch.equal(experts_forward(experts, x, ids, weights), want)


@pytest.mark.parametrize("name", ["mixtral", "inkling_text", "muse_spark_text"])
def test_reads_each_weight_once(name):
    """PEFT's parametrisation rebuilds a weight for all experts at every read."""
    BY_NAME[name].need()
    experts = experts_of(name)
    x, ids, weights = arguments(experts)
    want = experts_forward(experts, x, ids, weights)
    reads = []

    class Recorded(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def forward(self, weight):
            reads.append(self.name)
            return weight

    for weight in ("gate_up_proj", "down_proj"):
        parametrize.register_parametrization(experts, weight, Recorded(weight), unsafe=True)
    reads.clear()
    assert type(experts).__name__.startswith("Parametrized")
    assert torch.equal(experts_forward(experts, x, ids, weights), want)
    assert sorted(reads) == ["down_proj", "gate_up_proj"]


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("mixtral", tmoe.Activation.swiglu()),
        ("lfm2_moe", tmoe.Activation.swiglu()),
        ("gemma4_text", tmoe.Activation("geglu_tanh")),
        ("gpt_oss", tmoe.Activation.swiglu_oai(1.702, 7.0)),
        ("minimax_m3_vl_text", tmoe.Activation.swiglu_oai(1.702, 7.0)),
        ("openai_privacy_filter", tmoe.Activation.swiglu_oai(1.702, 7.0)),
        ("deepseek_v4", tmoe.Activation.swiglu(10.0)),
        ("glm5_next_text", tmoe.Activation.swiglu(10.0)),
        ("hy_v4", tmoe.Activation.swiglu(10.0)),
        ("hy_v4_vl_text", tmoe.Activation.swiglu(10.0)),
        ("beam", tmoe.Activation.swiglu()),
        ("nemotron_h", tmoe.Activation("relu2")),
        ("inkling2_text", None),
        ("inkling2_loop_text", None),
    ],
)
def test_activation_is_read_off_the_module(name, want):
    assert activation_of(experts_of(name)) == want


def test_constants_come_from_the_module():
    experts = experts_of("gpt_oss")
    experts.limit, experts.alpha = 0.5, 1.1
    assert activation_of(experts) == tmoe.Activation.swiglu_oai(1.1, 0.5)
    x, ids, weights = arguments(experts)
    with torch.no_grad():
        torch.testing.assert_close(
            experts_forward(experts, x, ids, weights), experts(x, ids, weights)
        )


OURS = ["silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_python"]


@pytest.mark.parametrize("act", [*OURS, "quick_gelu", "relu2", "tanh", "mish"])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "ungated"])
def test_any_activation(act, gated):
    """An activation that tmoe has is fused, any other one is called; the numbers are right."""
    experts = experts_of("mixtral" if gated else "nemotron_h")
    experts.act_fn = ACT2FN[act]
    x, ids, weights = arguments(experts)
    with torch.no_grad(), CountOps() as ops:
        got = experts_forward(experts, x, ids, weights)
    with torch.no_grad():
        torch.testing.assert_close(got, experts(x, ids, weights))
    ours = act in OURS or (act == "relu2" and not gated)
    assert dict(ops.calls) == ({"fused_experts": 1} if ours else {"grouped_gemm": 2})


def test_unknown_gate_is_not_fused():
    """A class of somebody else with a gate of its own, under a name that tmoe knows."""

    @use_experts_implementation
    class GptOssExperts(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.num_experts = 8
            self.gate_up_proj = nn.Parameter(torch.randn(8, 96, 64) / 8)
            self.down_proj = nn.Parameter(torch.randn(8, 64, 48) / 8)

        def _apply_gate(self, gate_up):
            gate, up = gate_up.chunk(2, dim=-1)
            return torch.sin(gate) * up

        def forward(self, hidden_states, top_k_index, top_k_weights):
            raise AssertionError("the loop")

    tmoe.integrations.transformers.register()
    experts = GptOssExperts(SimpleNamespace(_experts_implementation="tmoe")).to(DEVICE)
    x, ids, weights = arguments(experts)
    with CountOps() as ops:
        got = experts(x, ids, weights)
    want = ALL_EXPERTS_FUNCTIONS["batched_mm"](experts, x, ids, weights)
    torch.testing.assert_close(got, want)
    assert dict(ops.calls) == {"grouped_gemm": 2}


def test_llama4_weights_scale_the_input_unfused_too():
    """An activation that isn't tmoe's, in the one family with the weight on the input."""
    model = BY_NAME["llama4_text"].build()
    block = model.model.layers[0].feed_forward
    block.experts.act_fn = ACT2FN["quick_gelu"]
    x = torch.randn(2, 9, 64, device=DEVICE)
    with torch.no_grad():
        want = block(x)
        tmoe.replace_moe(model)
        with CountOps() as ops:
            got = block(x)
    torch.testing.assert_close(got, want)
    assert dict(ops.calls) == {"router": 1, "grouped_gemm": 2}


class WeightsSeen(CountOps):
    """The storages of the weights that the operations are given."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "tmoe":
            weights = [a for a in args[1:3] if a is not None and a.ndim == 3]
            self.storages.update(weight.untyped_storage().data_ptr() for weight in weights)
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize(
    "name", ["mixtral", "gpt_oss", "llama4_text", "dbrx", "jetmoe", "longcat_flash"]
)
def test_no_second_copy_of_the_weights(name):
    model = BY_NAME[name].build()
    tmoe.replace_moe(model)
    with torch.no_grad(), WeightsSeen() as seen:
        outputs(model)
    assert seen.storages
    assert seen.storages <= {p.untyped_storage().data_ptr() for p in model.parameters()}


def test_silu_function_of_lfm2():
    assert experts_of("lfm2_moe").act_fn is F.silu
