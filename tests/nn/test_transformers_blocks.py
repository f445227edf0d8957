"""transformers' MoE blocks: their state dicts load strictly and the outputs agree."""

import pytest
import torch

import tmoe

transformers = pytest.importorskip("transformers")

H, I, E, K = 32, 24, 6, 2


def block(family, **config):
    """A block of `family` with random weights of ordinary size."""
    module = getattr(transformers.models, family)
    config_class, block_class = BLOCKS[family]
    sizes = dict(
        hidden_size=H, num_experts_per_tok=K, hidden_act="silu",
        num_attention_heads=4, num_key_value_heads=4, experts_implementation="eager",
    )  # fmt: skip
    made = getattr(module, config_class)(**(sizes | config))
    modeling = getattr(module, f"modeling_{family}")
    result = getattr(modeling, block_class)(made).eval()
    with torch.no_grad():
        for tensor in result.state_dict().values():
            tensor.uniform_(-0.5, 0.5)
    return result


BLOCKS = {
    "mixtral": ("MixtralConfig", "MixtralSparseMoeBlock"),
    "qwen2_moe": ("Qwen2MoeConfig", "Qwen2MoeSparseMoeBlock"),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeSparseMoeBlock"),
    "olmoe": ("OlmoeConfig", "OlmoeSparseMoeBlock"),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3MoE"),
    "granitemoe": ("GraniteMoeConfig", "GraniteMoeMoE"),
    "gpt_oss": ("GptOssConfig", "GptOssMLP"),
    "llama4": ("Llama4TextConfig", "Llama4TextMoe"),
}

CASES = {
    "mixtral": ("mixtral", dict(num_local_experts=E, intermediate_size=I), "Renormalize", {}),
    "qwen2_moe": (
        "qwen2_moe",
        dict(num_experts=E, moe_intermediate_size=I, shared_expert_intermediate_size=40),
        "Default",
        dict(shared_intermediate_size=40, shared_expert_gate=True),
    ),
    "qwen3_moe": (
        "qwen3_moe",
        dict(num_experts=E, moe_intermediate_size=I, norm_topk_prob=True),
        "Renormalize",
        {},
    ),
    "qwen3_moe-no-norm": (
        "qwen3_moe",
        dict(num_experts=E, moe_intermediate_size=I, norm_topk_prob=False),
        "Default",
        {},
    ),
    "olmoe": ("olmoe", dict(num_experts=E, intermediate_size=I), "Default", {}),
    "deepseek_v3": (
        "deepseek_v3",
        dict(n_routed_experts=E, moe_intermediate_size=I, n_shared_experts=2, n_group=2,
             topk_group=1, routed_scaling_factor=2.5, norm_topk_prob=True),
        tmoe.Routing(E, K, "DeepSeekV3", n_group=2, topk_group=1, scaling_factor=2.5),
        dict(shared_intermediate_size=2 * I),
    ),
    "granitemoe": ("granitemoe", dict(num_local_experts=E, intermediate_size=I), "Renormalize", {}),
}  # fmt: skip


@pytest.mark.parametrize("family, config, routing, kwargs", CASES.values(), ids=CASES)
def test_state_dict_loads_and_outputs_agree(family, config, routing, kwargs):
    theirs = block(family, **config)
    if isinstance(routing, str):
        routing = tmoe.Routing(E, K, routing)
    ours = tmoe.MoE(H, I, routing, **kwargs).eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x = torch.randn(2, 9, H)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x), atol=1e-5, rtol=1e-5)


TRANSPOSED = {
    "gpt_oss": (
        dict(num_local_experts=E, intermediate_size=I, head_dim=8),
        tmoe.Routing(E, K, "Renormalize"),
        dict(activation="swiglu_oai", bias=True, router_bias=True, interleaved=True),
    ),
    "llama4": (
        dict(num_local_experts=E, intermediate_size=I, num_experts_per_tok=1),
        tmoe.Routing(E, 1, "Llama4"),
        dict(shared_intermediate_size=I),
    ),
}


@pytest.mark.parametrize("family", TRANSPOSED)
def test_transposed_projections_load_once_they_are_turned(family):
    config, routing, kwargs = TRANSPOSED[family]
    theirs = block(family, **config)
    ours = tmoe.MoE(H, I, routing, **kwargs).eval()
    state = theirs.state_dict()
    for name in ("experts.gate_up_proj", "experts.down_proj"):
        state[name] = state[name].transpose(1, 2)
    ours.load_state_dict(state, strict=True)
    x = torch.randn(2, 9, H)
    with torch.no_grad():
        want = theirs(x)[0].reshape(x.shape)
        torch.testing.assert_close(ours(x), want, atol=1e-5, rtol=1e-5)


def test_a_block_inside_a_model_loads():
    theirs = block("deepseek_v3", **CASES["deepseek_v3"][1])
    routing, kwargs = CASES["deepseek_v3"][2:]
    ours = torch.nn.ModuleDict({"mlp": tmoe.MoE(H, I, routing, **kwargs)})
    ours.load_state_dict(torch.nn.ModuleDict({"mlp": theirs}).state_dict(), strict=True)
    x = torch.randn(4, 3, H)
    torch.testing.assert_close(ours["mlp"](x), theirs(x), atol=1e-5, rtol=1e-5)


def test_missing_and_unknown_names_are_still_reported():
    ours = tmoe.MoE(H, I, tmoe.Routing(E, K, "Renormalize"))
    state = ours.state_dict() | {"shared_experts.up_proj.weight": torch.zeros(1)}
    del state["gate.weight"]
    with pytest.raises(
        RuntimeError, match=r'Missing.*"gate.weight"(.|\n)*Unexpected.*shared_expert'
    ):
        ours.load_state_dict(state)
