"""What each number format costs the shipped model: `python -m tmoe.demo.bits_per_byte`.

Its expert weights are rounded to a format, and in a second run the experts' inputs too, before both
projections, as a layer that multiplies quantised operands has them. All arithmetic is in fp32, so
that nothing but the rounding changes. Then the same through the library's own layers, scheme by
scheme. Fewer bits per byte of held-out text are better.
"""

from __future__ import annotations

import argparse
import json
import platform
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.integrations.moe import ExpertsInterface
from transformers.utils.logging import disable_progress_bar

import tmoe

from .checkpoint import load
from .text import bits_per_byte, held_out_windows, stdlib_dir

# name: weights, activations. A choice is a format and its options.
SCHEMES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp8_tensor": ({"format": "fp8_tensor"}, {"format": "fp8_tensor"}),
    "fp8_channel, fp8_token": ({"format": "fp8_channel"}, {"format": "fp8_token"}),
    "fp8_block": (
        {"format": "fp8_block", "block_shape": (128, 128)},
        {"format": "fp8_block", "block_shape": (1, 128)},
    ),
    "fp8_block, powers of two": (
        {"format": "fp8_block", "block_shape": (128, 128), "scale_rule": "ceil"},
        {"format": "fp8_block", "block_shape": (1, 128), "scale_rule": "ceil"},
    ),
    "mxfp8": ({"format": "mxfp8"}, {"format": "mxfp8"}),
    "mxfp4": ({"format": "mxfp4"}, {"format": "mxfp4"}),
    "mxfp4, mxfp8": ({"format": "mxfp4"}, {"format": "mxfp8"}),
    "nvfp4": ({"format": "nvfp4"}, {"format": "nvfp4"}),
}


# scheme: the row above that it should come to, and the column
BY_HAND = {
    "fp8_tensor": ("fp8_tensor", "weights and activations"),
    "fp8_channel": ("fp8_channel, fp8_token", "weights and activations"),
    "fp8_block": ("fp8_block", "weights and activations"),
    "mxfp8": ("mxfp8", "weights and activations"),
    "mxfp4_a8": ("mxfp4, mxfp8", "weights and activations"),
    "nvfp4": ("nvfp4", "weights and activations"),
    "fp8_a16": ("fp8_tensor", "weights"),
    "mxfp4_a16": ("mxfp4", "weights"),
    "nvfp4_a16": ("nvfp4", "weights"),
}


def rounded(x: Tensor, choice: dict[str, Any]) -> Tensor:
    """`x` as a format holds it."""
    return tmoe.quantize(x, **choice).dequantize(x.dtype)


def quantise_weights(model: nn.Module, choice: dict[str, Any]) -> None:
    """Round the expert weights of `model` in place."""
    for name, weight in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            weight.copy_(rounded(weight, choice))


def experts_forward(
    choice: dict[str, Any], self: Any, x: Tensor, topk_ids: Tensor, topk_weights: Tensor
) -> Tensor:
    """The experts of transformers, whose inputs are rounded before both projections."""
    (T, K), I = topk_ids.shape, self.down_proj.shape[2]
    x = rounded(x, choice)
    hidden = x.new_empty(T, K, I)
    for e, weight in enumerate(self.gate_up_proj):
        token, slot = (topk_ids == e).nonzero(as_tuple=True)
        gate, up = F.linear(x[token], weight).chunk(2, dim=-1)
        hidden[token, slot] = F.silu(gate) * up
    hidden = rounded(hidden.view(T * K, I), choice).view(T, K, I)
    y = torch.zeros_like(x)
    for e, weight in enumerate(self.down_proj):
        token, slot = (topk_ids == e).nonzero(as_tuple=True)
        y.index_add_(
            0, token, topk_weights[token, slot, None] * F.linear(hidden[token, slot], weight)
        )
    return y


def measure(num_bytes: int, device: torch.device) -> dict[str, dict[str, float]]:
    """Bits per byte of the model as it is ("fp32"), and of each scheme, by what is quantised."""
    windows = held_out_windows(stdlib_dir(), num_bytes)
    score = bits_per_byte(load(device, torch.float32), windows)
    scores = {"fp32": {"weights": score, "weights and activations": score}}
    for name, (weights, activations) in SCHEMES.items():
        model = load(device, torch.float32)
        quantise_weights(model, weights)
        scores[name] = {"weights": bits_per_byte(model, windows)}
        ExpertsInterface.register("tmoe_quantised", partial(experts_forward, activations))
        model.set_experts_implementation("tmoe_quantised")
        scores[name]["weights and activations"] = bits_per_byte(model, windows)
    return scores


def layer_forward(
    scheme: str, weights: dict[int, list[tmoe.QuantizedTensor]], self: Any, x: Tensor,
    topk_ids: Tensor, topk_weights: Tensor,
) -> Tensor:  # fmt: skip
    """The experts of transformers by `tmoe.fused_experts`; `weights` keeps what it quantised."""
    if id(self) not in weights:
        choice = SCHEMES[BY_HAND[scheme][0]][0]
        weights[id(self)] = [
            tmoe.quantize(w, **choice) for w in (self.gate_up_proj, self.down_proj)
        ]
    gate_up, down = weights[id(self)]
    return tmoe.fused_experts(x, gate_up, down, topk_weights, topk_ids, scheme=scheme)


def measure_layers(num_bytes: int, device: torch.device) -> dict[str, float]:
    """Bits per byte of the model with its experts computed by each scheme."""
    windows = held_out_windows(stdlib_dir(), num_bytes)
    model = load(device, torch.float32)
    scores = {}
    for scheme in BY_HAND:
        ExpertsInterface.register("tmoe_scheme", partial(layer_forward, scheme, {}))
        model.set_experts_implementation("tmoe_scheme")
        scores[scheme] = bits_per_byte(model, windows)
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tmoe.demo.bits_per_byte", description=__doc__)
    parser.add_argument("--bytes", type=int, default=2**16, help="of held-out text")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args()
    disable_progress_bar()  # transformers', of loading weights
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    scores = measure(options.bytes, device)
    table = Table("format of weights, activations", "weights only", "weights and activations")
    for name, row in scores.items():
        table.add_row(name, *(f"{value:.4f}" for value in row.values()))
    Console().print(table)
    layers = {
        scheme: {"by hand": scores[BY_HAND[scheme][0]][BY_HAND[scheme][1]], "tmoe": score}
        for scheme, score in measure_layers(options.bytes, device).items()
    }
    table = Table("scheme", "by hand", "tmoe")
    for scheme, row in layers.items():
        table.add_row(scheme, *(f"{value:.4f}" for value in row.values()))
    Console().print(table)
    if options.json is not None:
        record = {
            "bytes": options.bytes,
            "text": f"Python {platform.python_version()}'s library",
            "bits per byte": scores,
            "of layers": layers,
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
