"""What a layer of experts costs: the floor, and a prediction for tmoe's Triton kernels.

    time  = start + gemm(gate_up) + gemm(down) + combine
    gemm  = (memory^n + arithmetic^n)^(1/n)
    memory     = (U N D b_w + bytes of its rows in and out) / (bandwidth · reach_memory)
    arithmetic = 2 P N (D + ramp) / (peak · reach_arithmetic)
    combine    = bytes of the rows in, y out / (bandwidth · reach_memory)

U experts are touched and P rows computed, padding to whole tiles included (`loads.py`); N × D is
the projection of one expert, b_w the bytes of a weight. Peak and bandwidth are those of the floor
(`roofline.py`). Five numbers per scheme are fitted to recorded times:

* start: launching four kernels or more, one after the other, and filling the GPU with each; µs.
* reach_memory, reach_arithmetic: the parts of bandwidth and peak that a busy kernel reaches.
* n: how well loading and multiplying overlap; infinite would be max(), 1 their sum.
* ramp: what it takes to start and end a tile's loop, in columns of its depth D.

Tokens enter through P and the rows' bytes, experts and K through U and P. Of `tp` ranks each has a
slice of every expert, I / tp; of `ep` ranks each has E / ep experts and the rows that chose them.
What ranks send one another isn't counted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import torch

from ..checks import expect
from ..formats import SCHEMES
from ..shapes import MoEShape
from .cases import multiplies_fp8
from .loads import Load, chances
from .roofline import ROOFS, Roof, Work, experts_work

FITTED = Path(__file__).parent / "cost_h200.json"


@dataclass(frozen=True, slots=True)
class Fit:
    """What is fitted for one scheme."""

    start_us: float
    reach_memory: float
    reach_arithmetic: float
    overlap: float  # n
    ramp: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of one call on one rank, in microseconds."""

    floor_us: float
    us: float
    start_us: float
    gate_up_us: float
    down_us: float
    combine_us: float
    bound: str  # what decides the floor: "memory" or "arithmetic"
    load: Load


@dataclass(frozen=True, slots=True)
class RankLayer:
    """What is asked about: a layer on one of `tp` · `ep` ranks."""

    shape: MoEShape  # whole
    tokens: int
    scheme: str = "bf16"
    routing: str = "random"
    tp: int = 1
    ep: int = 1

    @property
    def load(self) -> Load:
        """Of the busiest rank. Experts are dealt out by popularity, one to each rank in turn, and
        of `ep` ranks with m rows on average the busiest has about m + sqrt(2 m ln ep)."""
        return _load_of_busiest(self)

    def load_of(self, here: Sequence[float]) -> Load:
        """Of a rank whose slots are chosen with these chances; the busiest of its likes."""
        even = self.routing == "balanced"
        if not even:
            mean = self.tokens * sum(here)
            more = 1 + math.sqrt(2 * math.log(self.ep) / mean)
            here = [min(1.0, more * chance) for chance in here]
        return Load.of(here, self.tokens, even=even)


@cache  # a fit asks for each layer many times
def _load_of_busiest(layer: RankLayer) -> Load:
    here = chances(layer.shape.num_experts, layer.shape.top_k, layer.routing)[:: layer.ep]
    return layer.load_of(here)


def predict(
    shape: MoEShape,
    tokens: int,
    *,
    scheme: str = "bf16",
    routing: str = "random",
    tp: int = 1,
    ep: int = 1,
    device: str = "NVIDIA H200",
) -> Prediction:
    """Floor and predicted time of `tokens` tokens, those of all ranks together.

    Raises ``ValueError`` for a scheme or device without a record, and for ranks that leave a rest.
    """
    op, fits = "predict", fitted()
    devices = sorted({name for name, _ in ROOFS})
    expect(device in devices, op, "device", f"one of {', '.join(devices)}", repr(device))
    wanted = f"one of {', '.join(fits)}, which were recorded"
    expect(scheme in fits, op, "scheme", wanted, repr(scheme))
    expect(tokens >= 1, op, "tokens", "at least 1", tokens)
    for name, ranks, size in (("tp", tp, shape.intermediate), ("ep", ep, shape.num_experts)):
        expect(ranks >= 1 and size % ranks == 0, op, name, f"a divisor of {size}", ranks)
    layer = RankLayer(shape, tokens, scheme, routing, tp, ep)
    multiplies = torch.float8_e4m3fn if multiplies_fp8(scheme) else torch.bfloat16
    return predict_with(fits[scheme], layer, ROOFS[device, multiplies])


def predict_with(fit: Fit, layer: RankLayer, roof: Roof, load: Load | None = None) -> Prediction:
    """The formulas above, with these numbers. load: of the rank, if it isn't the layer's own."""
    load = layer.load if load is None else load
    H, I = layer.shape.hidden, layer.shape.intermediate // layer.tp
    weight, row = weight_bytes(layer.shape, layer.scheme), 1 if multiplies_fp8(layer.scheme) else 2
    tokens = min(layer.tokens, load.rows)  # those that have an expert here

    def memory(moved: float) -> float:
        return moved / (1e3 * roof.gbs * fit.reach_memory)

    def gemm(N: int, D: int, rows_moved: float) -> float:
        flops = 2 * load.padded_rows * N * (D + fit.ramp)
        arithmetic = flops / (1e6 * roof.tflops * fit.reach_arithmetic)
        both = memory(load.touched * N * D * weight + rows_moved), arithmetic
        longer = max(both)
        return longer * sum((part / longer) ** fit.overlap for part in both) ** (1 / fit.overlap)

    gate_up = gemm(2 * I, H, row * (tokens * H + load.rows * I))
    down = gemm(H, I, load.rows * (row * I + 2 * H))
    combine = 2 * H * (load.rows + tokens) + (3 * tokens * H if row == 1 else 0)  # and quantising
    parts = fit.start_us, gate_up, down, memory(combine)
    work = work_of(layer, load)
    bound = "memory" if work.bytes / roof.gbs > work.flops / (1e3 * roof.tflops) else "arithmetic"
    return Prediction(work.floor_us(roof), sum(parts), *parts, bound, load)


def work_of(layer: RankLayer, load: Load | None = None) -> Work:
    """What the rank can't avoid: the floor's flops and bytes."""
    load, shape = layer.load if load is None else load, layer.shape
    here = replace(
        shape,
        num_experts=shape.num_experts // layer.ep,
        intermediate=shape.intermediate // layer.tp,
    )
    moved = (
        3 * here.num_experts * here.hidden * here.intermediate * weight_bytes(shape, layer.scheme)
    )
    tokens = min(layer.tokens, load.rows)
    work = experts_work(here, layer.tokens, load.touched, 2, moved)
    flops = work.flops * load.rows / (layer.tokens * shape.top_k)
    return Work(flops, work.bytes - 4 * (layer.tokens - tokens) * shape.hidden)


def weight_bytes(shape: MoEShape, scheme: str) -> float:
    """Bytes of one weight, its share of the scales included."""
    if scheme == "bf16":
        return 2.0
    recipe = SCHEMES[scheme].weights[0]
    whole = (shape.num_experts, 2 * shape.intermediate, shape.hidden)
    return recipe.format.bits_per_value(whole, recipe.block_shape) / 8


@cache
def fitted() -> Mapping[str, Fit]:
    """What `python -m bench.fit_cost_model` found, by scheme."""
    schemes = json.loads(FITTED.read_text(encoding="utf-8"))["schemes"]
    return {name: Fit(**numbers) for name, numbers in schemes.items()}


def as_json(records: list[str], fits: Mapping[str, Fit], worst: Mapping[str, float]) -> str:
    """The file of fits: from which records, and the largest error on them."""
    rounded = {
        name: {key: float(f"{value:.4g}") for key, value in asdict(fit).items()}
        for name, fit in fits.items()
    }
    errors = {name: round(error, 3) for name, error in worst.items()}
    found = {"records": records, "schemes": rounded, "largest_error": errors}
    return json.dumps(found, indent=1) + "\n"
