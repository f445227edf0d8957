"""Checkpoints with all experts of a layer in one tensor, and what those tensors mean."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.checkpoints import kinds
from tests.checkpoints.writing import PREFIX

Fused = tuple[dict[str, Tensor], dict[str, Any], Tensor, Tensor]  # tensors, config, (E, N, K) both


def named(**tensors: Tensor) -> dict[str, Tensor]:
    return {f"{PREFIX}.{name}": tensor for name, tensor in tensors.items()}


def gpt_oss(E: int, H: int, I: int) -> Fused:
    """Truth: transformers' own conversion, which gives the transpose. Rows and biases alternate."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors, truths = {}, []
    for name, N, K in (("gate_up_proj", 2 * I, H), ("down_proj", H, I)):
        blocks = torch.randint(0, 256, (E, N, K // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 128, (E, N, K // 32), dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        tensors[f"{name}_bias"] = torch.randn(E, N).bfloat16()
        values = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        truths.append(values.transpose(1, 2))
    config = dict(model_type="gpt_oss", quantization_config=dict(quant_method="mxfp4"))
    return named(**tensors), config, *truths


def fbgemm(E: int, H: int, I: int) -> Fused:
    """Llama 4: stored (E, K, N). Both scales are per output, of down_proj as (E, H, 1)."""
    gate_up, down = torch.randn(E, 2 * I, H), torch.randn(E, H, I)
    scales = [w.abs().amax(-1) / 448 for w in (gate_up, down)]  # (E, 2I), (E, H)
    codes = [
        kinds.e4m3(w, scale[..., None]) for w, scale in zip((gate_up, down), scales, strict=True)
    ]
    tensors = named(
        gate_up_proj=codes[0].transpose(1, 2),
        gate_up_proj_scale=scales[0][:, None],
        down_proj=codes[1].transpose(1, 2),
        down_proj_scale=scales[1][..., None],
    )
    # the products as transformers' FbgemmFp8Llama4TextExperts has them
    truths = [c.float() * scale[..., None] for c, scale in zip(codes, scales, strict=True)]
    config = dict(quantization_config=dict(quant_method="fbgemm_fp8", activation_scale_ub=1200.0))
    return tensors, config, *truths


def modelopt_nvfp4(E: int, H: int, I: int) -> Fused:
    """Codes and scales of blocks both transposed; one global scale and one scale of the inputs."""
    tensors, truths = {}, []
    for name, N, K in (("gate_up_proj", 2 * I, H), ("down_proj", H, I)):
        parts = kinds.nvfp4(torch.randn(E, N, K))
        truths.append(kinds.nvfp4_truth(parts))
        tensors |= {
            name: parts["weight"].transpose(1, 2),
            f"{name}_weight_scale": parts["weight_scale"].transpose(1, 2),
            f"{name}_weight_scale_2": parts["weight_scale_2"],
            f"{name}_input_scale": torch.tensor(0.5 if name == "down_proj" else 0.25),
        }
    config = dict(quantization_config=dict(quant_method="modelopt", quant_algo="NVFP4"))
    return named(**tensors), config, *truths


def fp8_blocks(E: int, H: int, I: int) -> Fused:
    """As transformers' FP8Experts saves them: one grid of scales over gate and up."""
    tensors, truths = {}, []
    for name, N, K in (("gate_up_proj", 2 * I, H), ("down_proj", H, I)):
        codes = torch.randn(E, N, K).to(torch.float8_e4m3fn)
        scale = torch.rand(E, -(-N // 128), -(-K // 128)) + 0.5
        tensors |= {name: codes, f"{name}_scale_inv": scale}
        truths.append(codes.float() * kinds.spread(scale, 128, 128)[:, :N, :K])
    config = dict(quant_method="fp8", weight_block_size=[128, 128], activation_scheme="dynamic")
    return named(**tensors), dict(quantization_config=config), *truths


def fp8_tensors(E: int, H: int, I: int) -> Fused:
    """FP8Experts without blocks: gate and up with a scale each, and static scales of the inputs."""
    gate_up, down = (torch.randn(E, *s).to(torch.float8_e4m3fn) for s in ((2 * I, H), (H, I)))
    first, second = torch.rand(E, 2, 1) + 0.5, torch.rand(E, 1, 1) + 0.5
    tensors = named(
        gate_up_proj=gate_up,
        gate_up_proj_scale_inv=first,
        gate_up_proj_activation_scale=torch.full((E,), 0.25),
        down_proj=down,
        down_proj_scale_inv=second,
        down_proj_activation_scale=torch.full((E,), 0.5),
    )
    truths = gate_up.float() * first.repeat_interleave(I, 1), down.float() * second
    config = dict(quant_method="fp8", weight_block_size=None, activation_scheme="static")
    return tensors, dict(quantization_config=config), *truths


FUSED = {
    "gpt-oss": (gpt_oss, "mxfp4_a16"),
    "fbgemm": (fbgemm, "fp8_channel"),
    "modelopt-nvfp4": (modelopt_nvfp4, "nvfp4"),
    "fp8-blocks": (fp8_blocks, "fp8_block"),
    "fp8-tensors": (fp8_tensors, "fp8_tensor"),
}
