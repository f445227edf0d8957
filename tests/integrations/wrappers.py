"""Models that contain a Mixture-of-Experts model: vision, audio, several of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import nn
from transformers import AutoModel, AutoModelForImageTextToText, AutoModelForMultimodalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.integrations.families import BY_NAME
from tests.integrations.family import COMMON, TRANSFORMERS, randomized

# What a config of a vision or audio tower is given where it has the field.
TOWER = dict(
    hidden_size=32, d_model=32, embed_dim=32, depth=1, num_hidden_layers=1, num_layers=1,
    encoder_layers=1, num_attention_heads=2, num_heads=2, encoder_attention_heads=2,
    attention_heads=2, num_key_value_heads=2, intermediate_size=32, ffn_dim=32,
    encoder_ffn_dim=32, mlp_dim=32, out_hidden_size=64, output_dim=64, text_hidden_size=64,
    projection_dim=32, head_dim=16,
)  # fmt: skip
AUTO = (AutoModelForImageTextToText, AutoModelForMultimodalLM, AutoModel)


@dataclass(frozen=True)
class Wrapper:
    """A model type around others; `layers` MoE modules in it, on tmoe with as many routers.

    `runs` says whether it is small enough to be run, on text: most towers can be made tiny.
    """

    name: str
    layers: int
    towers: dict[str, dict[str, Any]] = field(default_factory=dict)  # by sub-config, overrides
    runs: bool = True
    since: str = "5.24"

    def __str__(self) -> str:
        return self.name

    def build(self) -> nn.Module:
        if Version(self.since) > TRANSFORMERS:
            pytest.skip(f"{self.name} is tested from transformers {self.since} on")
        config_class = CONFIG_MAPPING[self.name]
        default, parts = config_class(), {}
        for name in config_class.sub_configs:
            part = getattr(default, name)
            if part is not None:
                parts[name] = _tiny(name, part) | self.towers.get(name, {})
        config = config_class(**parts)
        auto = next(auto for auto in AUTO if type(config) in auto._model_mapping)
        if self.runs:
            return randomized(auto.from_config(config).eval())
        with torch.device("meta"):
            return auto.from_config(config).eval()


def _tiny(name: str, config: Any) -> dict[str, Any]:
    known = type(config).__dataclass_fields__
    common, family = TOWER, None
    if name == "text_config":
        common, family = COMMON, BY_NAME.get(config.model_type)
    tiny = {key: value for key, value in common.items() if key in known}
    return tiny | (family.overrides if family else {}) | {"model_type": config.model_type}


DOTS3 = {  # each layer of its vision tower has another number of experts
    "vision_config": dict(
        num_hidden_layers=3, mlp_layer_types=["dense", "sparse", "sparse"], num_local_experts=4,
        per_layer_config={1: dict(num_local_experts=3)}, moe_intermediate_size=32,
        adapter_in_dim=32, adapter_out_dim=64,
    ),
    "audio_config": dict(adapter_input_size=32, adapter_out_dim=64),
}  # fmt: skip
MUSE_SPARK = {"audio_config": dict(num_hidden_layers=4)}  # several lists have one entry each
OMNI = {
    "thinker_config": dict(text_config=dict(num_hidden_layers=2)),
    "talker_config": dict(
        spatial_merge_size=2,
        text_config=dict(num_hidden_layers=2, shared_expert_intermediate_size=32),
    ),
}
WRAPPERS = [
    Wrapper("aria", 2),
    Wrapper("deepseek_ocr2", 1, runs=False),
    Wrapper("diffusion_gemma", 4),
    Wrapper("dots3_note", 3, DOTS3),
    Wrapper("ernie4_5_vl_moe", 2),
    Wrapper("gemma4", 2),
    Wrapper("glm4v_moe", 1),
    Wrapper("glm5_next", 1),
    Wrapper("hy_v4_vl", 1),
    Wrapper("inkling2", 2),
    Wrapper("inkling2_loop", 2),
    Wrapper("kimi_k25", 1),
    Wrapper("llama4", 2, runs=False),  # without an image it fails in transformers
    Wrapper("minimax_m3_vl", 2),
    Wrapper("mistral_large4", 1),
    Wrapper("muse_spark", 2, MUSE_SPARK),
    Wrapper("nemo_speechlm", 1, runs=False),
    Wrapper("nemotron_h_omni", 1, {"vision_config": dict(video_temporal_patch_size=2)}),
    Wrapper("qwen3_5_moe", 2),
    Wrapper("qwen3_omni_moe", 4, OMNI, runs=False),
    Wrapper("qwen3_omni_moe_thinker", 2),
    Wrapper("qwen3_vl_moe", 2),
    Wrapper("qwen4_exp", 2),
    Wrapper("step3p7", 3, {"text_config": BY_NAME["step3p7_text"].overrides}),
    Wrapper("unlimited_ocr", 1, runs=False),
]
