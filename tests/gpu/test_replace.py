"""Models of transformers on a GPU, before and after `tmoe.replace_moe`; one of them has 30B."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import tmoe
from tests.checking import assert_matches
from tests.gpu.waiting import no_waiting
from tests.integrations.counting import CountOps
from tests.integrations.families import BY_NAME
from tests.integrations.family import IDS
from tests.integrations.family_run import run_family

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16

FAMILIES = [
    "mixtral", "qwen3_moe", "qwen2_moe", "deepseek_v3", "gpt_oss", "glm4_moe", "granitemoe",
    "llama4_text", "dbrx", "gemma4_text", "nemotron_h", "longcat_flash", "minimax_m2",
    "ernie4_5_moe", "hunyuan_v1_moe", "inkling_text", "lfm2_moe", "step3p7_text",
]  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_same_model(name, tmp_path):
    """fp32: logits within 1e-5 of their scale, or transformers' own difference, and same tokens.

    bf16: the error against fp32, on the routes that each run takes, is at most twice eager's.
    """
    run = run_family(BY_NAME[name], tmp_path)
    bound = 1e-5 * run.eager.abs().max()
    if run.family.on_interface:
        bound = torch.maximum(bound, (run.other - run.eager).abs().max())
    assert (run.tmoe - run.eager).abs().max() <= bound
    assert run.ops == run.family.expected_ops
    assert run.tokens is None or torch.equal(run.tokens, run.tokens_tmoe)
    assert torch.equal(run.restored, run.eager)
    assert all(before == after for before, after in run.files.values())
    if run.bf16 is not None:
        (ours, truth), (eager, eager_truth) = run.bf16, run.bf16_eager
        assert_matches(ours, truth.double(), truth + (eager - eager_truth))


@pytest.mark.parametrize(
    "name", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "glm4_moe", "longcat_flash"]
)
@torch.no_grad()
def test_a_decode_step_is_captured(name, device):
    """A whole model at one token per sequence: one warm-up call, a graph, replays that follow."""
    model = BY_NAME[name].build().to(BF16)
    tmoe.replace_moe(model)
    tokens = IDS[:2, :1].clone()
    mask = torch.zeros(2, 1, 1, 1, dtype=BF16, device=device)  # given, so that nothing looks for it

    def step() -> torch.Tensor:
        return model(input_ids=tokens, attention_mask=mask, use_cache=False).logits

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step()
    for other in (IDS[:2, 3:4], IDS[:2, 9:10]):
        tokens.copy_(other)
        graph.replay()
        replayed = logits.clone()
        assert replayed.isfinite().all()
        torch.testing.assert_close(replayed, step())


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_a_router_waits_for_nothing(name, device):
    """Every router of a replaced model, in bf16, at one token and at many."""
    model = BY_NAME[name].build().to(BF16)
    report = tmoe.replace_moe(model)
    inputs: dict[str, tuple] = {}
    for router in report.routers:
        model.get_submodule(router).register_forward_pre_hook(
            lambda module, args, router=router: inputs.__setitem__(router, args)
        )
    model(input_ids=IDS)
    for router, args in inputs.items():
        module = model.get_submodule(router)
        if type(module).__name__ in ("TmoeDbrxFFN", "TmoeJetMoeMoE"):
            continue  # blocks: their experts are more than a router
        for T in (1, None):
            flat = args[0].reshape(-1, args[0].shape[-1])[:T]
            module(flat, *args[1:])  # compiles
            with no_waiting():
                module(flat, *args[1:])


# The size that people run ------------------------------------------------------------------------


def qwen3_30b(device: torch.device, layers: int = 48, **sizes: int) -> nn.Module:
    """Qwen3-30B-A3B's shapes with random bf16 weights, each layer made on the device."""
    sizes = dict(hidden_size=2048, moe_intermediate_size=768, vocab_size=151936) | sizes
    config = Qwen3MoeConfig(
        num_hidden_layers=layers, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True,
        intermediate_size=6144, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        tie_word_embeddings=False, **sizes,
    )  # fmt: skip
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config).to(BF16).eval().requires_grad_(False)
    rest = [model.model.embed_tokens, model.model.norm, model.lm_head]
    for part in (*model.model.layers, *rest):
        part.to_empty(device=device)
        for parameter in part.parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)  # of a norm
            else:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    # Its buffers are computed when it is made, and not on meta.
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config).to(device)
    return model


def block_and_ids(block: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The output (T, H) of an MoE block and the experts of each token, sorted."""
    seen = []
    handle = block.experts.register_forward_pre_hook(lambda module, args: seen.append(args[1]))
    y = block(x)
    handle.remove()
    return y.reshape(-1, y.shape[-1]), seen[0].sort(-1).values


def test_replacing_a_30b_model(device, record_property):
    """Under 10 s and under one layer's memory; in fact no memory at all."""
    model = qwen3_30b(device)
    block = model.model.layers[0].mlp
    layer_bytes = sum(p.nbytes for p in model.model.layers[0].parameters())
    x = torch.randn(1, 64, 2048, device=device).to(BF16)
    tokens = torch.arange(64, device=device)[None]
    with torch.no_grad():
        want, want_ids = block_and_ids(block, x)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, start = torch.cuda.memory_allocated(), time.perf_counter()
        report = tmoe.replace_moe(model)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        extra = torch.cuda.max_memory_allocated() - before
        record_property("seconds", seconds)
        record_property("extra_bytes", extra)
        print(f"replace_moe of {len(report.replaced)} layers: {seconds:.2f} s, {extra} bytes")
        assert seconds < 10 and extra < layer_bytes
        assert len(report.replaced) == len(report.routers) == 48 and not report.skipped
        got, ids = block_and_ids(block, x)
        same = (ids == want_ids).all(-1)  # logits rounded to bf16 may order two experts otherwise
        assert same.float().mean() > 0.5
        torch.testing.assert_close(got[same], want[same], rtol=2e-2, atol=2e-2)

        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with CountOps() as ops:
            logits = model(input_ids=tokens).logits
        used = torch.cuda.max_memory_allocated() - before - logits.nbytes
        assert logits.isfinite().all()
        assert dict(ops.calls) == {"router": 48, "fused_experts": 48}
        assert used < layer_bytes  # no second copy of any weights
        report.restore()
        assert type(block.gate).__name__ == "Qwen3MoeTopKRouter"
