"""The routers of transformers, as data: what each class computes, reads and returns.

`ROUTERS` has a `Kind` for every class that runs on tmoe. The kind's recipe is that of
`tmoe.routing.routers`, fed with the numbers that the router itself holds (not with the model's
config: some models have a config per layer, and people change ``router.top_k``). The rest of a kind
says in which dtype the class multiplies and answers, which no recipe knows. Read off the sources of
transformers 5.17 to 5.24; tests/integrations/test_routers.py calls every class and its original.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tmoe.routing import Routing, routers
from tmoe.routing.routers import Fields

from .version import before


@dataclass(frozen=True)
class Kind:
    """How a router class of transformers goes about it.

    Dtypes are written as where they come from: "product" (of the logits as they leave the matrix),
    "input" (of the hidden states), "fp32", or "softmax": as "product", but fp32 under the autocast
    of a GPU, which widens softmax and softplus where the CPU's doesn't.
    """

    recipe: Callable[[Fields], Routing]
    numbers: tuple[str, ...] = ()  # attributes that the recipe needs besides E and K
    num_experts: str = "num_experts"
    top_k: str = "top_k"
    forward: str = "matrix"  # a function of router_forward.py
    method: str = "forward"  # what that function stands in for
    weight: str = "weight"  # where the matrix (E, H) is; for forward="layer" the linear layer
    linear_bias: bool = False
    in_fp32: bool = False  # the product is one of fp32, whatever the dtype of weight and input
    ignores_autocast: bool = False
    bias: str = ""  # where the selection bias is; "argument": the block passes it
    logits: str = "product"
    weights: str = "fp32"
    returns: tuple[str, ...] = ("logits", "weights", "ids")
    only_eval: bool = False  # in training the original runs, which samples


def kind(recipe: Callable[[Fields], Routing], *numbers: str, **how: object) -> Kind:
    return Kind(recipe, numbers, **how)  # type: ignore[arg-type]


OWN_BIAS = "e_score_correction_bias"
GROUPS = ("norm_topk_prob", "num_group", "topk_group")

_softmax = kind(routers.softmax_perhaps_divided, "norm_topk_prob", weights="product")
_divided = kind(routers.softmax_divided)
_scaled = kind(
    routers.softmax_scaled, "topk_method", "routed_scaling_factor", "num_group", "topk_group",
    in_fp32=True,
)  # fmt: skip
_ernie = kind(
    routers.softmax_bias, "norm_min", in_fp32=True, ignores_autocast=True,
    bias="moe_statics.e_score_correction_bias", weights="input",
)  # fmt: skip
_gemma = kind(
    routers.softmax_expert_scale, forward="normed", weight="proj",
    num_experts="config.num_experts", top_k="config.top_k_experts",
)  # fmt: skip
_top_logits = kind(routers.top_logits, weights="softmax")
_granite = kind(routers.top_logits, logits="fp32", weights="input")
_IDS_FIRST = ("ids", "weights", "logits")
_old_granite = replace(_granite, returns=_IDS_FIRST) if before("5.21") else _granite
_aria = replace(_top_logits, returns=_IDS_FIRST) if before("5.21") else _top_logits
_sigmoid = kind(routers.sigmoid_bias, bias=OWN_BIAS)
_given_bias = kind(
    routers.sigmoid_bias_scaled, "router_scaling_factor",
    in_fp32=True, bias="argument", weights="product",
)  # fmt: skip
_deepseek = kind(
    routers.sigmoid_groups, *GROUPS, "routed_scaling_factor",
    in_fp32=True, bias=OWN_BIAS, weights="product",
)  # fmt: skip
_scoring = kind(
    routers.scoring_func, "score_fn", "routed_scaling_factor", bias=OWN_BIAS, weights="softmax"
)
_inkling2 = replace(_scoring, in_fp32=True, weights="product")
_inkling = kind(
    routers.sigmoid_shared, "n_shared_experts", "route_scale", forward="shared", bias=OWN_BIAS,
    in_fp32=not before("5.23"), ignores_autocast=not before("5.23"), weights="input",
    returns=("logits", "weights", "ids", "shared"),
)  # fmt: skip

# By folder of transformers.models: the classes in its modeling file.
ROUTERS: dict[str, dict[str, Kind]] = {
    "afmoe": {
        "AfmoeTokenChoiceRouter": kind(
            routers.sigmoid_bias_scaled, "route_scale",
            forward="layer_given_expert_bias", weight="gate", logits="fp32",
        )
    },
    "aria": {"AriaTextTopKRouter": _aria},
    "axk1": {"AXK1TopkRouter": _deepseek},
    "axk2": {"AXK2TopkRouter": replace(_deepseek, recipe=routers.sigmoid_groups_or_zero)},
    "bailing_hybrid": {"BailingHybridTopkRouter": _deepseek},
    "beam": {
        "BeamTopKRouter": replace(
            _deepseek, recipe=routers.sigmoid_groups_unscaled, numbers=GROUPS
        )
    },
    "cohere2_moe": {
        "Cohere2MoeTopKRouter": kind(
            routers.top_logits_softmax_or_sigmoid, "expert_selection_fn", "norm_topk_prob",
            weights="input",
        )
    },
    "dbrx": {
        "DbrxFFN": kind(
            routers.softmax_p_norm, "moe_normalize_expert_weights",
            forward="select", method="route_tokens_to_experts",
            num_experts="experts.num_experts", weights="product", returns=("weights", "ids"),
        )
    },
    "deepseek_ocr2": {"DeepseekOcr2TextTopkRouter": _scaled},
    "deepseek_v2": {"DeepseekV2TopkRouter": _scaled},
    "deepseek_v3": {"DeepseekV3TopkRouter": _deepseek},
    "deepseek_v32": {"DeepseekV32TopkRouter": _deepseek},
    "deepseek_v4": {
        "DeepseekV4TopKRouter": _scoring,
        "DeepseekV4HashRouter": replace(_scoring, forward="hashed", bias=""),
    },
    "diffusion_gemma": {"DiffusionGemmaTextRouter": _gemma},
    "dots1": {"Dots1TopkRouter": _deepseek},
    "dots3_note": {
        "Dots3NoteTextTopkRouter": _deepseek,
        "Dots3NoteVisionTopKRouter": replace(_given_bias, forward="matrix_given_bias"),
    },
    "ernie4_5_moe": {"Ernie4_5_MoeTopKRouter": _ernie},
    "ernie4_5_vl_moe": {"Ernie4_5_VLMoeMoeTopKRouter": _ernie},
    "exaone_moe": {"ExaoneMoeTopkRouter": _deepseek},
    "flex_olmo": {"FlexOlmoTopKRouter": _softmax},
    "flint": {
        "FlintTopKRouter": kind(
            routers.sigmoid, "norm_topk_prob", in_fp32=True, ignores_autocast=True
        )
    },
    "gemma4": {"Gemma4TextRouter": _gemma},
    "glm4_moe": {"Glm4MoeTopkRouter": _deepseek},
    "glm4_moe_lite": {"Glm4MoeLiteTopkRouter": _deepseek},
    "glm4v_moe": {"Glm4vMoeTextTopkRouter": _deepseek},
    "glm5_next": {"Glm5NextTextTopkRouter": _deepseek},
    "glm_moe_dsa": {"GlmMoeDsaTopkRouter": _deepseek},
    "gpt_oss": {
        "GptOssTopKRouter": kind(routers.top_logits, linear_bias=True, weights="product")
    },
    "granitemoe": {"GraniteMoeTopKRouter": _old_granite},
    "granitemoe_swa": {"GraniteMoeSWATopKRouter": _granite},
    "granitemoehybrid": {"GraniteMoeHybridTopKRouter": _old_granite},
    "granitemoeshared": {"GraniteMoeSharedTopKRouter": _old_granite},
    "hunyuan_v1_moe": {
        "HunYuanMoEV1Gate": kind(
            routers.softmax_divided, forward="layer", weight="wg", weights="product"
        )
    },
    "hy_v3": {"HYV3TopKRouter": replace(_given_bias, forward="matrix_given_bias")},
    "hy_v4": {"HYV4TopkRouter": _deepseek},
    "hy_v4_vl": {"HYV4VLTopkRouter": _deepseek},
    "inkling": {"InklingTopkRouter": _inkling},
    "inkling2": {"Inkling2TopKRouter": _inkling2},
    "inkling2_loop": {"Inkling2LoopTopKRouter": _inkling2},
    "jamba": {
        "JambaTopKRouter": kind(routers.softmax, weights="input"),
        # Until 5.20 its router is a linear layer, and the block selects.
        "JambaSparseMoeBlock": kind(
            routers.softmax, forward="select_of_input", method="route_tokens_to_experts",
            weights="input", returns=("ids", "weights"),
        ),
    },
    "kimi_linear": {"KimiLinearTopkRouter": _deepseek},
    "kolibri1": {
        "Kolibri1TopKRouter": kind(
            routers.top_biased_logits, "norm_topk_prob",
            in_fp32=True, bias=OWN_BIAS, weights="product",
        )
    },
    "laguna": {
        "LagunaTopKRouter": kind(
            routers.sigmoid_bias_softcap, "router_logit_softcapping",
            bias=OWN_BIAS, logits="capped", weights="input",
        )
    },
    "lara_mini": {"LaraMiniTopKRouter": replace(_softmax, in_fp32=True, weights="input")},
    "lfm2_moe": {
        "Lfm2MoeTopKRouter": kind(
            routers.sigmoid_perhaps_bias, "routed_scaling_factor", "use_expert_bias",
            "norm_topk_prob", forward="matrix_given_expert_bias", bias="argument",
            weights="product",
        )
    },
    "llama4": {
        "Llama4Router": kind(
            routers.top_logits_on_input,
            forward="dense", weights="product", returns=("scores", "logits"),
        )
    },
    "longcat_flash": {
        "LongcatFlashTopkRouter": kind(
            routers.softmax_zero_experts, "routed_scaling_factor",
            num_experts="n_routed_experts", weight="classifier.weight", in_fp32=True,
            bias=OWN_BIAS, weights="product",
            returns=("weights", "ids") if before("5.19") else ("logits", "weights", "ids"),
        )
    },
    "mellum": {"MellumTopKRouter": _softmax},
    "mimo_v2_flash": {"MiMoV2FlashTopkRouter": _deepseek},
    "minimax": {"MiniMaxTopKRouter": _divided},
    "minimax_m2": {
        "MiniMaxM2TopKRouter": replace(_sigmoid, forward="matrix_given_bias", bias="argument")
    },
    "minimax_m3_vl": {"MiniMaxM3VLTopKRouter": _sigmoid},
    "mistral4": {
        "Mistral4TopkRouter": kind(
            routers.softmax_groups, *GROUPS, "routed_scaling_factor", weights="softmax"
        )
    },
    "mistral_large4": {
        "MistralLarge4TextTopkRouter": kind(
            routers.softmax_groups, "num_group", "topk_group", "routed_scaling_factor",
            in_fp32=True, weights="softmax",
        )
    },
    "mixtral": {"MixtralTopKRouter": _divided},
    "muse_spark": {
        "MuseSparkTopkRouter": kind(
            routers.sigmoid_bias_multiplier, "routed_scaling_factor", "output_multiplier",
            in_fp32=True, bias=OWN_BIAS, logits="multiplied", weights="product",
        )
    },
    "nemotron_h": {"NemotronHTopkRouter": _deepseek},
    "olmoe": {"OlmoeTopKRouter": _softmax},
    "openai_privacy_filter": {
        "OpenAIPrivacyFilterTopKRouter": kind(
            routers.top_logits_over_k, linear_bias=True, in_fp32=True, weights="product"
        )
    },
    "phimoe": {
        "PhimoeTopKRouter": kind(
            routers.sparsemixer, "router_jitter_noise", weights="softmax", only_eval=True
        )
    },
    "qwen2_moe": {"Qwen2MoeTopKRouter": _softmax},
    "qwen3_5_moe": {"Qwen3_5MoeTopKRouter": replace(_divided, weights="product")},
    "qwen3_moe": {"Qwen3MoeTopKRouter": _softmax},
    "qwen3_next": {"Qwen3NextTopKRouter": _softmax},
    "qwen3_omni_moe": {
        "Qwen3OmniMoeThinkerTextTopKRouter": _softmax,
        "Qwen3OmniMoeTalkerTextTopKRouter": _softmax,
    },
    "qwen3_vl_moe": {"Qwen3VLMoeTextTopKRouter": replace(_divided, weights="product")},
    "qwen4_exp": {"Qwen4ExpTextTopKRouter": _softmax},
    "solar_open": {"SolarOpenTopkRouter": _deepseek},
    "step3p7": {"Step3p7TopKRouter": _sigmoid},
    "unlimited_ocr": {"UnlimitedOcrTextTopkRouter": _scaled},
}  # fmt: skip

# Router classes that stay as they are inside a layer that runs on tmoe.
LEFT_ALONE = {
    "JetMoeTopKGating": (
        "it returns the experts' counts as Python numbers, for which it waits for the GPU; the "
        "block selects from its logits again, on tmoe"
    ),
    "ZayaRouter": "an MLP with a state that goes from layer to layer; little of it is a selection",
}

# Classes that are called routers and only make logits: their block selects, on tmoe.
ONLY_LOGITS = {"DbrxRouter"}
