"""Every router class of transformers, and the configs that change what it does."""

from __future__ import annotations

from typing import Any

from tests.routing import run
from tests.routing.case import Case, K
from tests.routing.run import HIDDEN, E


def dbrx_config(p: float | None) -> dict[str, Any]:
    """Without rope_theta, 5.24's own default can't be built."""
    ffn = dict(hidden_size=HIDDEN, ffn_hidden_size=8, moe_num_experts=E, moe_top_k=K)
    ffn["moe_normalize_expert_weights"] = p
    return dict(attn_config=dict(rope_theta=10000.0), ffn_config=ffn)


# fmt: off
GROUPS = dict(n_group=4, topk_group=2)
NORM = (dict(norm_topk_prob=True), dict(norm_topk_prob=False))
GREEDY = (
    dict(topk_method="greedy", routed_scaling_factor=1.0),
    dict(topk_method="greedy", routed_scaling_factor=2.5),
    dict(topk_method="group_limited_greedy", routed_scaling_factor=16.0, **GROUPS),
)
IN_GROUPS = (
    dict(norm_topk_prob=True, routed_scaling_factor=2.5, **GROUPS),
    dict(norm_topk_prob=False, routed_scaling_factor=1.5),
)
MORE_GROUPS = (
    dict(norm_topk_prob=True, routed_scaling_factor=1.0),
    dict(norm_topk_prob=False, routed_scaling_factor=1.5, **GROUPS),
)
OTHER_NAMES = (  # of the same fields
    dict(moe_renormalize=True, routed_scaling_factor=2.5, num_expert_group=4, topk_group=2),
    dict(moe_renormalize=False, routed_scaling_factor=1.5),
)
OR_ZERO = (
    dict(n_group=None, topk_group=None),
    dict(norm_topk_prob=True, **GROUPS),
    dict(norm_topk_prob=False, **GROUPS),
)
NORM_MIN = (dict(moe_norm_min=1e-12), dict(moe_norm_min=0.25))
FUNCTIONS = (
    dict(expert_selection_fn="softmax"),
    dict(expert_selection_fn="sigmoid", norm_topk_prob=True),
    dict(expert_selection_fn="sigmoid", norm_topk_prob=False),
)
PERHAPS_BIAS = (
    dict(use_expert_bias=True, norm_topk_prob=True, routed_scaling_factor=2.5),
    dict(use_expert_bias=False, norm_topk_prob=False),
)

# In a model in bf16, the dtypes of logits, scores and weights. What isn't said is in fp32.
SCORES_FP32 = ("model", "fp32", "fp32")
SELECTION_FP32 = ("fp32", "fp32", "model")
INSIDE_FP32 = ("model", "fp32", "model")
MODEL = ("model", "model", "model")

CASES = [
    Case("jamba", "JambaTopKRouter", dtypes=INSIDE_FP32),
    Case("mixtral", "MixtralTopKRouter", dtypes=SCORES_FP32),
    Case("minimax", "MiniMaxTopKRouter", dtypes=SCORES_FP32),
    Case("qwen3_5_moe_text", "Qwen3_5MoeTopKRouter", dtypes=INSIDE_FP32),
    Case("qwen3_vl_moe_text", "Qwen3VLMoeTextTopKRouter", dtypes=INSIDE_FP32),
    Case("hunyuan_v1_moe", "HunYuanMoEV1Gate", run=run.WithLayer()),
    Case("qwen2_moe", "Qwen2MoeTopKRouter", NORM, INSIDE_FP32),
    Case("qwen3_moe", "Qwen3MoeTopKRouter", NORM, INSIDE_FP32),
    Case("qwen3_next", "Qwen3NextTopKRouter", NORM, INSIDE_FP32),
    Case("qwen3_omni_moe_text", "Qwen3OmniMoeThinkerTextTopKRouter", NORM, INSIDE_FP32),
    Case("qwen3_omni_moe_talker_text", "Qwen3OmniMoeTalkerTextTopKRouter", NORM, INSIDE_FP32,
         folder="qwen3_omni_moe"),
    Case("qwen4_exp_text", "Qwen4ExpTextTopKRouter", NORM, INSIDE_FP32),
    Case("mellum", "MellumTopKRouter", NORM, INSIDE_FP32),
    Case("olmoe", "OlmoeTopKRouter", NORM, INSIDE_FP32),
    Case("flex_olmo", "FlexOlmoTopKRouter", NORM, INSIDE_FP32),
    Case("lara_mini", "LaraMiniTopKRouter", NORM, SELECTION_FP32),
    Case("dbrx", "DbrxFFN", (dbrx_config(1.0), dbrx_config(None)), MODEL, run=run.Dbrx()),
    Case("gemma4_text", "Gemma4TextRouter", dtypes=SCORES_FP32, run=run.Injected("proj"),
         overrides=dict(enable_moe_block=True)),
    Case("diffusion_gemma_text", "DiffusionGemmaTextRouter", dtypes=SCORES_FP32,
         run=run.Injected("proj")),
    Case("deepseek_v2", "DeepseekV2TopkRouter", GREEDY),
    Case("deepseek_ocr2_text", "DeepseekOcr2TextTopkRouter", GREEDY),
    Case("unlimited_ocr_text", "UnlimitedOcrTextTopkRouter", GREEDY),
    Case("mistral4", "Mistral4TopkRouter", IN_GROUPS + MORE_GROUPS, MODEL),
    Case("mistral_large4_text", "MistralLarge4TextTopkRouter",
         (dict(routed_scaling_factor=2.5, **GROUPS),)),
    Case("ernie4_5_moe", "Ernie4_5_MoeTopKRouter", NORM_MIN, SELECTION_FP32),
    Case("ernie4_5_vl_moe_text", "Ernie4_5_VLMoeMoeTopKRouter", NORM_MIN, SELECTION_FP32),
    Case("longcat_flash", "LongcatFlashTopkRouter",
         (dict(zero_expert_num=6, routed_scaling_factor=6.0), dict(zero_expert_num=0)),
         note="ids from `n_routed_experts` on hand the token through"),
    Case("zaya", "ZayaRouter", dtypes=MODEL, run=run.Zaya("router_mlp.out_proj", batched=True),
         overrides=dict(num_experts_per_tok=1),
         note="id `num_experts` skips the layer; the router then says id 0 with weight 0"),
    Case("gpt_oss", "GptOssTopKRouter", dtypes=MODEL),
    Case("granitemoe", "GraniteMoeTopKRouter", dtypes=INSIDE_FP32),
    Case("granitemoehybrid", "GraniteMoeHybridTopKRouter", dtypes=INSIDE_FP32,
         overrides=dict(mamba_n_heads=4)),
    Case("granitemoeshared", "GraniteMoeSharedTopKRouter", dtypes=INSIDE_FP32),
    Case("granitemoe_swa", "GraniteMoeSWATopKRouter", dtypes=INSIDE_FP32),
    Case("jetmoe", "JetMoeTopKGating", dtypes=INSIDE_FP32, run=run.JetMoe()),
    Case("aria_text", "AriaTextTopKRouter", dtypes=MODEL),
    Case("openai_privacy_filter", "OpenAIPrivacyFilterTopKRouter", note="block: sum × K"),
    Case("cohere2_moe", "Cohere2MoeTopKRouter", FUNCTIONS, INSIDE_FP32),
    Case("llama4_text", "Llama4Router",
         (dict(num_experts_per_tok=1), dict(num_experts_per_tok=K)), INSIDE_FP32, run=run.Llama4()),
    Case("kolibri1", "Kolibri1TopKRouter", NORM),
    Case("phimoe", "PhimoeTopKRouter",
         (dict(router_jitter_noise=0.01), dict(router_jitter_noise=0.3)), MODEL,
         overrides=dict(num_experts_per_tok=2), note="inference; training samples the experts"),
    Case("flint", "FlintTopKRouter", NORM),
    Case("minimax_m2", "MiniMaxM2TopKRouter", dtypes=SCORES_FP32),
    Case("minimax_m3_vl_text", "MiniMaxM3VLTopKRouter", dtypes=SCORES_FP32,
         note="block: sum × `routed_scaling_factor`"),
    Case("step3p5", "Step3p7TopKRouter", dtypes=SCORES_FP32, folder="step3p7",
         note="block: sum × `moe_router_scaling_factor`"),
    Case("laguna", "LagunaTopKRouter",
         (dict(moe_router_logit_softcapping=0.0), dict(moe_router_logit_softcapping=8.0)),
         INSIDE_FP32, note="block: sum × `moe_routed_scaling_factor`"),
    Case("afmoe", "AfmoeTokenChoiceRouter", (dict(route_scale=2.0),), SCORES_FP32,
         run=run.Plain(batched=True)),
    Case("hy_v3", "HYV3TopKRouter", (dict(router_scaling_factor=2.826),)),
    Case("dots3_note_vision_encoder", "Dots3NoteVisionTopKRouter",
         (dict(router_scaling_factor=2.5),), folder="dots3_note",
         overrides=dict(mlp_layer_types=["sparse"], adapter_in_dim=HIDDEN)),
    Case("muse_spark_text", "MuseSparkTopkRouter",
         (dict(output_multiplier=0.8, routed_scaling_factor=2.0),)),
    Case("lfm2_moe", "Lfm2MoeTopKRouter", PERHAPS_BIAS, MODEL),
    Case("inkling_text", "InklingTopkRouter", (dict(route_scale=8.0),), SELECTION_FP32,
         run=run.Inkling(), note="router: softmax of log-sigmoids, the same while σ(x) > 0 in fp32;"
         " and weights × `global_scale`, learned"),
    Case("deepseek_v3", "DeepseekV3TopkRouter", IN_GROUPS + MORE_GROUPS),
    Case("deepseek_v32", "DeepseekV32TopkRouter", IN_GROUPS),
    Case("axk1", "AXK1TopkRouter", IN_GROUPS),
    Case("bailing_hybrid", "BailingHybridTopkRouter", OTHER_NAMES),
    Case("dots1", "Dots1TopkRouter", IN_GROUPS),
    Case("dots3_note_text", "Dots3NoteTextTopkRouter", IN_GROUPS),
    Case("exaone_moe", "ExaoneMoeTopkRouter", IN_GROUPS),
    Case("glm4_moe", "Glm4MoeTopkRouter", IN_GROUPS),
    Case("glm4_moe_lite", "Glm4MoeLiteTopkRouter", IN_GROUPS),
    Case("glm4v_moe_text", "Glm4vMoeTextTopkRouter", IN_GROUPS),
    Case("glm5_next_text", "Glm5NextTextTopkRouter", IN_GROUPS),
    Case("glm_moe_dsa", "GlmMoeDsaTopkRouter", IN_GROUPS),
    Case("hy_v4", "HYV4TopkRouter", IN_GROUPS),
    Case("hy_v4_vl_text", "HYV4VLTopkRouter", IN_GROUPS),
    Case("kimi_linear", "KimiLinearTopkRouter", OTHER_NAMES),
    Case("mimo_v2_flash", "MiMoV2FlashTopkRouter", IN_GROUPS),
    Case("sarvam_mla", "DeepseekV3TopkRouter", IN_GROUPS, folder="deepseek_v3",
         config_folder="sarvam_mla"),
    Case("sarvam_moe", "Glm4MoeTopkRouter", IN_GROUPS, folder="glm4_moe",
         config_folder="sarvam_moe"),
    Case("solar_open", "SolarOpenTopkRouter", IN_GROUPS),
    Case("nemotron_h", "NemotronHTopkRouter", IN_GROUPS, overrides=dict(layers_block_type=["moe"])),
    Case("beam", "BeamTopKRouter", IN_GROUPS, note="block: sum × `routed_scaling_factor`"),
    Case("axk2", "AXK2TopkRouter", OR_ZERO),
    Case("deepseek_v4", "DeepseekV4TopKRouter",
         (dict(scoring_func="sqrtsoftplus"), dict(scoring_func="sigmoid")), MODEL,
         note="hash layers: ids from a table, given to `route` as `topk_ids`"),
    Case("inkling2_text", "Inkling2TopKRouter"),
    Case("inkling2_loop_text", "Inkling2LoopTopKRouter"),
]
HASH = Case("deepseek_v4", "DeepseekV4HashRouter", dtypes=MODEL, run=run.Hash())
