"""Every unquantised MoE family of transformers: a table to build tiny random models from."""

from __future__ import annotations

from typing import Any

from packaging.version import Version

from tests.integrations.family import TRANSFORMERS, Family

HYBRID = ["linear_attention", "full_attention"]
SPARSE_LAST = ["dense", "sparse"]


def mrope(*sections: int, **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections), **more}


FAMILIES = [
    Family("afmoe", "AfmoeForCausalLM", layers=1),
    Family(
        "aria_text",
        "AriaTextForCausalLM",
        module="aria",
        on_interface=Version("5.18") <= TRANSFORMERS,
        routes="experts" if Version("5.18") <= TRANSFORMERS else "router",
    ),
    Family("axk1", "AXK1ForCausalLM", layers=1),
    Family("axk2", "AXK2ForCausalLM", layers=1),
    Family(
        "bailing_hybrid",
        "BailingHybridForCausalLM",
        dict(layer_group_size=2),
        layers=1,
        since="5.24",
    ),
    Family(
        "beam",
        "BeamForCausalLM",
        dict(num_hidden_layers=3, mlp_layer_types=["dense", "sparse", "sparse"]),
        since="5.24",
    ),
    Family("cohere2_moe", "Cohere2MoeForCausalLM"),
    Family(
        "dbrx",
        "DbrxForCausalLM",
        dict(
            d_model=64,
            n_heads=4,
            n_layers=2,
            max_seq_len=256,
            # rope_theta: 5.24's own default config lacks it and can't be built
            attn_config=dict(rope_theta=10000.0, kv_n_heads=2, clip_qkv=8.0),
            ffn_config=dict(hidden_size=64, ffn_hidden_size=48, moe_num_experts=8, moe_top_k=4),
        ),
        ops=6,  # gate, up and down of two layers
        on_interface=False,
    ),
    Family(
        "deepseek_ocr2_text",
        "DeepseekOcr2TextModel",
        dict(mlp_layer_types=SPARSE_LAST),
        layers=1,
        module="deepseek_ocr2",
    ),
    Family("deepseek_v2", "DeepseekV2ForCausalLM", layers=1),
    Family("deepseek_v3", "DeepseekV3ForCausalLM", layers=1),
    Family("deepseek_v32", "DeepseekV32ForCausalLM", layers=1),
    Family(
        "deepseek_v4",
        "DeepseekV4ForCausalLM",
        routes="experts" if Version("5.24") <= TRANSFORMERS else "",  # 5.17 can't run it in bf16
    ),
    Family("diffusion_gemma_text", "DiffusionGemmaEncoderTextModel", module="diffusion_gemma"),
    Family("dots1", "Dots1ForCausalLM", dict(n_shared_experts=1), layers=1),
    Family("dots3_note_text", "Dots3NoteForCausalLM", layers=1, module="dots3_note", since="5.24"),
    Family("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", layers=1),
    Family(
        "ernie4_5_vl_moe_text",
        "Ernie4_5_VLMoeTextModel",
        dict(moe_intermediate_size=[48, 32], rope_parameters=mrope(2, 2, 4)),
        ops=1,  # the vision experts idle on text
        routers=1,
        module="ernie4_5_vl_moe",
    ),
    Family("exaone_moe", "ExaoneMoeForCausalLM", layers=1),
    Family("flex_olmo", "FlexOlmoForCausalLM"),
    Family("flint", "FlintForCausalLM", dict(num_hidden_layers=3), layers=1, since="5.24"),
    Family(
        "gemma4_text",
        "Gemma4ForCausalLM",
        dict(enable_moe_block=True, hidden_size_per_layer_input=0, vocab_size_per_layer_input=128),
        module="gemma4",
    ),
    Family("glm4_moe", "Glm4MoeForCausalLM", layers=1),
    Family("glm4_moe_lite", "Glm4MoeLiteForCausalLM", layers=1),
    Family(
        "glm4v_moe_text",
        "Glm4vMoeTextModel",
        dict(rope_parameters=mrope(1, 1, 2, partial_rotary_factor=0.5)),
        layers=1,
        module="glm4v_moe",
    ),
    Family(
        "glm5_next_text",
        "Glm5NextTextModel",
        dict(
            qk_rope_head_dim=0,
            layer_types=HYBRID,
            mlp_layer_types=SPARSE_LAST,
            linear_num_heads=2,
            linear_head_dim=16,
            index_kpool=4,
            index_topk=32,
        ),
        layers=1,
        module="glm5_next",
    ),
    Family("glm_moe_dsa", "GlmMoeDsaForCausalLM", layers=1),
    Family("gpt_oss", "GptOssForCausalLM"),
    Family("granitemoe", "GraniteMoeForCausalLM"),
    Family("granitemoe_swa", "GraniteMoeSWAForCausalLM"),
    Family(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        dict(
            layer_types=HYBRID,
            mamba_n_heads=4,
            mamba_d_head=32,
            mamba_d_state=16,
            mamba_chunk_size=16,
        ),
    ),
    Family("granitemoeshared", "GraniteMoeSharedForCausalLM"),
    Family("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM"),
    Family("hy_v3", "HYV3ForCausalLM", layers=1),
    Family("hy_v4", "HYV4ForCausalLM", layers=1),
    Family(
        "hy_v4_vl_text",
        "HYV4VLTextModel",
        dict(rope_parameters=mrope(2, 1, 1)),
        layers=1,
        module="hy_v4_vl",
        since="5.24",
    ),
    Family("inkling_text", "InklingForCausalLM", module="inkling"),
    Family(
        "inkling2_text",
        "Inkling2ForCausalLM",
        dict(unpadded_vocab_size=128),
        ops=4,
        module="inkling2",
        since="5.24",
    ),
    Family(
        "inkling2_loop_text",
        "Inkling2LoopForCausalLM",
        dict(unpadded_vocab_size=128),
        ops=4,
        module="inkling2_loop",
        since="5.24",
    ),
    Family(
        "jamba",
        "JambaForCausalLM",
        dict(
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=1,
            expert_layer_offset=0,
            mamba_d_state=8,
            mamba_dt_rank=4,
            use_mamba_kernels=False,
        ),
    ),
    Family("jetmoe", "JetMoeForCausalLM", on_interface=False, routes="router"),
    Family(
        "kimi_linear",
        "KimiLinearForCausalLM",
        dict(
            layer_types=HYBRID,
            mlp_layer_types=["sparse", "sparse"],
            linear_num_heads=2,
            linear_head_dim=16,
        ),
    ),
    Family("kolibri1", "Kolibri1ForCausalLM", since="5.24"),
    Family("laguna", "LagunaForCausalLM", layers=1),
    Family("lara_mini", "LaraMiniForCausalLM", since="5.24"),
    Family(
        "lfm2_moe",
        "Lfm2MoeForCausalLM",
        dict(layer_types=["conv", "full_attention"], num_dense_layers=0),
    ),
    Family(
        "llama4_text", "Llama4ForCausalLM", module="llama4", on_interface=False, routes="router"
    ),
    Family(
        "longcat_flash",
        "LongcatFlashForCausalLM",
        dict(head_dim=8, zero_expert_num=3),
        on_interface=False,
    ),
    Family("mellum", "MellumForCausalLM"),
    Family("mimo_v2_flash", "MiMoV2FlashForCausalLM", dict(num_key_value_heads=2), layers=1),
    Family("minimax", "MiniMaxForCausalLM"),
    Family("minimax_m2", "MiniMaxM2ForCausalLM"),
    Family("minimax_m3_vl_text", "MiniMaxM3VLForCausalLM", module="minimax_m3_vl"),
    Family("mistral4", "Mistral4ForCausalLM", layers=1),
    Family(
        "mistral_large4_text",
        "MistralLarge4TextModel",
        layers=1,
        module="mistral_large4",
        since="5.24",
    ),
    Family("mixtral", "MixtralForCausalLM"),
    Family(
        "muse_spark_text",
        "MuseSparkTextModel",
        dict(moe_hidden_size=48),
        ops=4,
        module="muse_spark",
        since="5.24",
    ),
    Family(
        "nemotron_h", "NemotronHForCausalLM", dict(layers_block_type=["attention", "moe"]), layers=1
    ),
    Family(
        "nemotron_h_latent",
        "NemotronHForCausalLM",
        dict(layers_block_type=["attention", "moe"], moe_latent_size=40),
        layers=1,
        module="nemotron_h",
    ),
    Family("olmoe", "OlmoeForCausalLM"),
    Family("openai_privacy_filter", "OpenAIPrivacyFilterModel"),
    Family("phimoe", "PhimoeForCausalLM", dict(num_experts_per_tok=2)),
    Family("qwen2_moe", "Qwen2MoeForCausalLM"),
    Family(
        "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", dict(layer_types=HYBRID), module="qwen3_5_moe"
    ),
    Family("qwen3_moe", "Qwen3MoeForCausalLM"),
    Family("qwen3_next", "Qwen3NextForCausalLM", dict(layer_types=HYBRID)),
    Family(
        "qwen3_omni_moe_talker_text",
        "Qwen3OmniMoeTalkerModel",
        dict(shared_expert_intermediate_size=32),
        module="qwen3_omni_moe",
    ),
    Family("qwen3_omni_moe_text", "Qwen3OmniMoeThinkerTextModel", module="qwen3_omni_moe"),
    Family("qwen3_vl_moe_text", "Qwen3VLMoeTextModel", module="qwen3_vl_moe"),
    Family(
        "qwen4_exp_text",
        "Qwen4ExpForCausalLM",
        dict(
            layer_types=HYBRID,
            hc_lowrank=16,
            indexer_n_heads=2,
            indexer_kv_heads=1,
            indexer_head_dim=16,
            indexer_budget=32,
            indexer_compress_ratio=4,
        ),
        module="qwen4_exp",
    ),
    Family(
        "sarvam_mla",
        "DeepseekV3ForCausalLM",
        layers=1,
        module="deepseek_v3",
        config="SarvamMLAConfig",
        since="5.24",
    ),
    Family(
        "sarvam_moe",
        "Glm4MoeForCausalLM",
        layers=1,
        module="glm4_moe",
        config="SarvamMoEConfig",
        since="5.24",
    ),
    Family("solar_open", "SolarOpenForCausalLM"),
    Family(
        "step3p7_text",
        "Step3p7TextModel",
        # three sparse layers: no limit, one that clamps, and "0.0 means none"
        dict(
            num_hidden_layers=3,
            sliding_window=8,
            mlp_layer_types=["sparse"] * 3,
            swiglu_limits=[None, 0.5, 0.0],
        ),
        layers=3,
        module="step3p7",
        on_interface=False,
    ),
    Family(
        "unlimited_ocr_text",
        "UnlimitedOcrTextModel",
        layers=1,
        module="unlimited_ocr",
        since="5.24",
    ),
    Family("zaya", "ZayaForCausalLM", dict(num_experts_per_tok=1), routers=0),
]
BY_NAME = {family.name: family for family in FAMILIES}
