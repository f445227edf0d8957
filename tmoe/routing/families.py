"""Which router a Mixture-of-Experts family of transformers has, by model type.

Only fields of the config are read: transformers isn't imported, and any object with these fields
will do. What each family computes, formula by formula, is in ``docs/routing-families.md``.

A routing is what a family's router returns. What else scales or sums up stays with the layer:
  * a factor on the sum over the experts: beam, laguna, minimax_m3_vl_text and step3p5, and
    openai_privacy_filter, whose block multiplies by the K that its router divided by;
  * a learned factor of all weights: Inkling's `global_scale`;
  * ids that are no experts: LongCat's from n_routed_experts on hand the token through, ZAYA's last
    one skips the layer;
  * shared experts that the router doesn't weigh; it does weigh Inkling's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import routers
from .recipe import Routing
from .routers import Fields

FAMILIES: dict[Callable[[Fields], Routing], tuple[str, ...]] = {
    routers.softmax: ("jamba",),
    routers.softmax_divided: (
        "mixtral", "minimax", "qwen3_5_moe_text", "qwen3_vl_moe_text", "hunyuan_v1_moe"
    ),
    routers.softmax_perhaps_divided: (
        "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_omni_moe_text", "qwen3_omni_moe_talker_text",
        "qwen4_exp_text", "mellum", "olmoe", "flex_olmo", "lara_mini"
    ),
    routers.softmax_p_norm: ("dbrx",),
    routers.softmax_expert_scale: ("gemma4_text", "diffusion_gemma_text"),
    routers.softmax_scaled: ("deepseek_v2", "deepseek_ocr2_text", "unlimited_ocr_text"),
    routers.softmax_groups: ("mistral4", "mistral_large4_text"),
    routers.softmax_bias: ("ernie4_5_moe", "ernie4_5_vl_moe_text"),
    routers.softmax_zero_experts: ("longcat_flash",),
    routers.softmax_skip: ("zaya",),
    routers.top_logits: (
        "gpt_oss", "granitemoe", "granitemoehybrid", "granitemoeshared", "granitemoe_swa",
        "jetmoe", "aria_text"
    ),
    routers.top_logits_over_k: ("openai_privacy_filter",),
    routers.top_logits_softmax_or_sigmoid: ("cohere2_moe",),
    routers.top_logits_on_input: ("llama4_text",),
    routers.top_biased_logits: ("kolibri1",),
    routers.sparsemixer: ("phimoe",),
    routers.sigmoid: ("flint",),
    routers.sigmoid_bias: ("minimax_m2", "minimax_m3_vl_text", "step3p5"),
    routers.sigmoid_bias_softcap: ("laguna",),
    routers.sigmoid_bias_scaled: ("afmoe", "hy_v3", "dots3_note_vision_encoder"),
    routers.sigmoid_bias_multiplier: ("muse_spark_text",),
    routers.sigmoid_perhaps_bias: ("lfm2_moe",),
    routers.sigmoid_shared: ("inkling_text",),
    routers.sigmoid_groups: (
        "deepseek_v3", "deepseek_v32", "axk1", "bailing_hybrid", "dots1", "dots3_note_text",
        "exaone_moe", "glm4_moe", "glm4_moe_lite", "glm4v_moe_text", "glm5_next_text",
        "glm_moe_dsa", "hy_v4", "hy_v4_vl_text", "kimi_linear", "mimo_v2_flash", "sarvam_mla",
        "sarvam_moe", "solar_open"
    ),
    routers.sigmoid_groups_hybrid: ("nemotron_h",),
    routers.sigmoid_groups_unscaled: ("beam",),
    routers.sigmoid_groups_or_zero: ("axk2",),
    routers.scoring_func: ("deepseek_v4", "inkling2_text", "inkling2_loop_text"),
}  # fmt: skip

REFUSED = {
    "switch_transformers": "an expert takes so many tokens and drops the rest; tmoe drops none",
    "nllb-moe": "an expert takes so many tokens and drops the rest; tmoe drops none",
    "doge": "its experts are rows of an embedding, found by product keys, and no matrices",
    "vitpose_backbone": "the data set selects the expert, there is no router",
}

_ROUTERS = {name: router for router, names in FAMILIES.items() for name in names}


def routing_of(config: Any) -> Routing:
    """The routing of `config`, or of its text model's config.

    Raises ``ValueError`` that names the family and says why there is none.
    """
    name = getattr(config, "model_type", type(config).__name__)
    try:
        return _routing_of(config)
    except ValueError as error:
        raise ValueError(f"Routing.from_transformers: {name}: {error}") from error


def _routing_of(config: Any) -> Routing:
    model_type = getattr(config, "model_type", None)
    if model_type in _ROUTERS:
        return _ROUTERS[model_type](Fields(config))
    if model_type in REFUSED:
        raise ValueError(REFUSED[model_type])
    text = getattr(config, "text_config", None)
    if text is None and hasattr(config, "get_text_config"):
        text = config.get_text_config()
    if text is None or text is config:
        raise ValueError(f"{model_type} is no Mixture-of-Experts family that tmoe knows")
    return _routing_of(text)
