"""Which experts got which tokens, as a picture and in the terminal."""

from __future__ import annotations

from pathlib import Path

from rich.text import Text
from torch import Tensor

_COLOURS = ("red", "green", "yellow", "blue", "magenta", "cyan", "white", "bright_black")
_BARS = "▁▂▃▄▅▆▇█"


def printable(text: bytes) -> str:
    """One visible character per byte: · for a space, ↵ for a line end, ¤ without a glyph."""
    shown = {0x20: "·", 0x0A: "↵", 0x09: "→"}
    return "".join(shown.get(b, chr(b) if 0x20 < b < 0x7F else "¤") for b in text)


def save_png(weights: Tensor, text: bytes, path: Path) -> None:
    """Draw `weights` (L, T, E), routing weights or 0, above the characters of `text`."""
    from matplotlib.figure import Figure  # a Figure of its own draws with Agg and needs no display

    num_layers, num_tokens, num_experts = weights.shape
    figure = Figure(figsize=(2 + 0.11 * num_tokens, 1 + 1.2 * num_layers), layout="constrained")
    axes = figure.subplots(num_layers, 1, sharex=True, squeeze=False)[:, 0]
    for layer, (axis, image) in enumerate(zip(axes, weights.float().cpu().numpy(), strict=True)):
        drawn = axis.imshow(image.T, aspect="auto", cmap="viridis", vmin=0, vmax=1)
        axis.set_ylabel(f"layer {layer}\nexpert")
        axis.set_yticks(range(num_experts))
    axes[-1].set_xticks(range(num_tokens), list(printable(text)), fontsize=7, family="monospace")
    figure.suptitle("Routing weight of each expert for each byte of the prompt")
    figure.colorbar(drawn, ax=list(axes), label="routing weight")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def terminal_map(weights: Tensor, text: bytes, width: int) -> Text:
    """`weights` (L, T, E) as lines: each byte's strongest expert, then each expert's share.

    At most `width` characters wide. It reads without colours too.
    """
    num_experts = weights.shape[2]
    label = "layer 0  "
    shown = min(len(text), max(8, width - 2 * len(label) - num_experts))
    out = Text(no_wrap=True)
    out.append(" " * len(label) + printable(text)[:shown] + "  share of slots\n", style="bold")
    for layer, rows in enumerate(weights):
        out.append(f"layer {layer}  ")
        for expert in rows[:shown].argmax(-1).tolist():
            colour = _COLOURS[expert % len(_COLOURS)]
            out.append(f"{expert % 10}", style=f"black on {colour}")
        out.append("  ")
        share = (rows > 0).float().mean(0)  # of the tokens, per expert
        for level in (share / share.max() * (len(_BARS) - 1)).round().int().tolist():
            out.append(_BARS[level])
        out.append("\n")
    return out
