"""Draws the pictures of routing.md: `python docs/draw_routing.py` writes docs/images/routing-*.svg.

One token, eight experts, the ten methods. Scores, ids and weights are what `tmoe.route` returns. A
picture carries its numbers as text, so that a test can tell whether it still shows the truth.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import tmoe
from tmoe.routing import RULES

IMAGES = Path(__file__).parent / "images"
E, N_GROUP, TOPK_GROUP, FACTOR = 8, 4, 2, 2.5
LOGITS = [1.2, -0.4, 2.1, 0.3, -1.5, 1.6, 0.9, 0.1]
BIAS = [0.05, 0.3, -0.4, 0.1, 0.0, 0.1, 0.05, 0.35]

# From the palette of Okabe and Ito, which all kinds of colour vision tell apart.
CHOSEN, OTHER, BAND, LOST, INK = "#0072B2", "#C9CDD2", "#F6E3B4", "#ECECEC", "#222222"
RANKS = ("1st", "2nd")

SELECTS_BY = {"logit": "x", "softmax": "softmax(x)", "sigmoid": "sigmoid(x)"}
WEIGHT = {
    "Default": "softmax(x)",
    "Renormalize": "softmax over the 2 chosen",
    "RenormalizeNaive": "softmax(x) ÷ sum of the 2",
    "TopK": "x",
    "Sigmoid": "sigmoid(x)",
    "SigmoidRenorm": "sigmoid(x) ÷ sum of the 2",
    "TopKSigmoid": "sigmoid(x)",
    "Llama4": "sigmoid(x), on the expert's input",
    "MiniMax2": "2.5 · sigmoid(x) ÷ sum of the 2",
    "DeepSeekV3": "2.5 · sigmoid(x) ÷ sum of the 2",
}


@dataclass(frozen=True)
class Picture:
    """What one picture shows."""

    method: str
    logits: list[float]
    scores: list[float]  # of each expert, before the bias
    choices: list[float]  # what decides: scores, and the bias where the method takes one
    group_scores: list[float]  # empty without groups
    kept_groups: list[int]
    ids: list[int]
    weights: list[float]


def picture(method: str) -> Picture:
    """The numbers of `method`'s picture."""
    rule = RULES[tmoe.RoutingMethod[method]]
    logits = torch.tensor([LOGITS])
    options = {"scaling_factor": FACTOR} if rule.takes_scaling_factor else {}
    if rule.takes_groups:
        options |= {"n_group": N_GROUP, "topk_group": TOPK_GROUP}
    routing = tmoe.Routing(E, 1 if method == "Llama4" else 2, method, **options)
    bias = torch.tensor(BIAS) if rule.takes_bias else None
    weights, ids = tmoe.route(logits, routing, bias=bias)

    # All experts, each weighed by its score: a method that only scores says the score of each.
    only_scores = tmoe.Routing(E, E, tmoe.RoutingRule(score=rule.score))
    scores = tmoe.route(logits, only_scores, topk_ids=torch.arange(E)[None])[0][0]
    choices = scores if bias is None else scores + bias
    groups, kept = [], []
    if rule.takes_groups:
        groups = choices.view(N_GROUP, -1).topk(2).values.sum(-1)
        kept = sorted(groups.topk(TOPK_GROUP).indices.tolist())
    return Picture(
        method, LOGITS, _rounded(scores), _rounded(choices), _rounded(groups), kept,
        ids[0].tolist(), _rounded(weights[0]),
    )  # fmt: skip


def _rounded(values: torch.Tensor | list[float]) -> list[float]:
    return [round(float(value), 4) for value in values]


def draw(shown: Picture) -> Figure:
    """Three panels: logits, what the experts are chosen by, weights."""
    figure = Figure(figsize=(10, 2.9), dpi=100, facecolor="white", layout="constrained")
    logits, choices, weights = figure.subplots(1, 3)
    rule = RULES[tmoe.RoutingMethod[shown.method]]
    by = SELECTS_BY[rule.score] + (" + bias" if rule.takes_bias else "")

    _bars(logits, shown.logits, [], "1 · logits x")
    _bars(choices, shown.choices, shown.ids, f"2 · choose by {by}")
    if rule.takes_bias:
        places = [place for place in range(E) if shown.scores[place] != shown.choices[place]]
        choices.scatter(
            places, [shown.scores[place] for place in places],
            marker="_", s=170, linewidths=2, color="#D55E00", zorder=3, label="without the bias",
        )  # fmt: skip
        below = {"loc": "upper right", "bbox_to_anchor": (1.04, -0.07)}
        choices.legend(**below, frameon=False, fontsize=8, handletextpad=0.2)
    if shown.group_scores:
        _groups(choices, shown)
    row = [0.0] * E
    for expert, weight in zip(shown.ids, shown.weights, strict=True):
        row[expert] = weight
    _bars(weights, row, shown.ids, f"3 · weight = {WEIGHT[shown.method]}", only=shown.ids)
    return figure


def _bars(axes: Axes, values: list[float], chosen: list[int], title: str, only=range(E)) -> None:
    colours = [CHOSEN if expert in chosen else OTHER for expert in range(E)]
    axes.bar(range(E), values, width=0.72, color=colours, zorder=2)
    low, high = min(0.0, *values), max(0.0, *values)
    span = high - low
    for expert in only:
        value = values[expert]
        rank = f"{RANKS[chosen.index(expert)]}\n" if expert in chosen else ""
        text = f"{rank}{value:.2f}".replace("-", "−")
        place = value + (0.03 if value >= 0 else -0.03) * span
        axes.text(
            expert, place, text, ha="center", va="bottom" if value >= 0 else "top",
            fontsize=8, color=INK, weight="bold" if expert in chosen else "normal", zorder=4,
        )  # fmt: skip
    axes.set_ylim(low - (0.16 * span if low < 0 else 0), high + 0.34 * span)
    axes.set_title(title, fontsize=10, loc="left", color=INK)
    axes.set_xticks(range(E))
    axes.set_xlabel("expert", fontsize=9)
    axes.set_yticks([])
    axes.axhline(0, color=INK, linewidth=0.8, zorder=3, clip_on=False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


def _groups(axes: Axes, shown: Picture) -> None:
    """A band behind each group, its score above it."""
    size = E // N_GROUP
    top = axes.get_ylim()[1]
    axes.set_ylim(top=top * 1.32)
    for group, score in enumerate(shown.group_scores):
        kept = group in shown.kept_groups
        left = group * size - 0.5
        axes.axvspan(left + 0.03, left + size - 0.03, color=BAND if kept else LOST, zorder=0)
        axes.text(
            left + size / 2, top * 1.29, f"group {group}\n{score:.2f}\n{'kept' if kept else 'out'}",
            ha="center", va="top", fontsize=8, color=INK, weight="bold" if kept else "normal",
        )  # fmt: skip


def path_of(method: str) -> Path:
    return IMAGES / f"routing-{method}.svg"


def save(shown: Picture, path: Path) -> None:
    """The same bytes for the same numbers: no date, no random ids."""
    with matplotlib.rc_context({"svg.hashsalt": "tmoe", "font.family": "DejaVu Sans"}):
        numbers = json.dumps(asdict(shown))
        metadata = {"Date": None, "Creator": None, "Title": shown.method, "Description": numbers}
        draw(shown).savefig(path, metadata=metadata if path.suffix == ".svg" else None)


if __name__ == "__main__":
    suffix = sys.argv[1] if len(sys.argv) > 1 else ".svg"  # .png to look at them
    IMAGES.mkdir(exist_ok=True)
    for method in tmoe.RoutingMethod:
        save(picture(method.name), path_of(method.name).with_suffix(suffix))
