"""A layout's time and memory: the cost model of a rank, and what its ranks send one another.

GPUs are numbered node by node. `tp` neighbours share every expert's slices; `ep` such groups, side
by side, divide the experts; `dp` of these, each with all experts, go their own ways. Every GPU
brings T tokens of its own to the layer and takes their outputs from it, so that all layouts compute
the same T · gpus tokens. Exchanges:

    all_gather    all tokens to all tp · ep ranks, reduce_scatter of their partial sums
    all_to_all    each token to the ranks with its experts, and the sums back; within the tp ranks
                  all_gather of what arrived, and reduce_scatter before it goes back
    deepep        for comparison, not tmoe's own: a token goes to each node once, and from there
                  over NVLink, which is what node-limited routing (DeepSeek's groups) is for

Rows go as the scheme quantises them, with ids and weights, and come back in bf16. Nothing is
overlapped, and attention, router and shared experts aren't counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ..bench.cases import multiplies_fp8
from ..bench.cost_model import Prediction, RankLayer, fitted, predict_with, weight_bytes
from ..bench.loads import Load, chances
from ..bench.roofline import ROOFS, Roof
from ..checks import expect
from ..formats import SCHEMES
from ..parallel.balance import balance, heaviest
from ..parallel.communication_model import NOTHING, Cluster, Transfer, gpu_named
from .models import PlanModel
from .traffic import chance_of_any

MEASURED = "H200"  # the GPU whose kernels were timed
NOT_OURS = ("deepep",)
BACK = 2  # bytes of an output's value on its way back
ROUTE = 8  # bytes of an expert's id and weight
RESERVE_GB = 4.0  # CUDA, NCCL and PyTorch; the rest is weights, tokens and the KV cache


@dataclass(frozen=True, slots=True)
class Layout:
    """tp · ep · dp GPUs."""

    tp: int = 1
    ep: int = 1
    dp: int = 1

    @property
    def gpus(self) -> int:
        return self.tp * self.ep * self.dp

    def __str__(self) -> str:
        sizes = {"TP": self.tp, "EP": self.ep, "DP": self.dp}
        return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "1 GPU"


@dataclass(frozen=True, slots=True)
class Question:
    """What a plan is asked about.

    Attributes:
        tokens: T, of each GPU and layer.
        redundant: slots of each EP rank for copies of popular experts.
    """

    model: PlanModel
    cluster: Cluster
    gpus: int
    tokens: int
    scheme: str = "bf16"
    routing: str = "random"
    redundant: int = 0
    reserve_gb: float = RESERVE_GB


@dataclass(frozen=True, slots=True)
class Estimate:
    """Of one layer on the busiest GPU; gigabytes are 10^9 bytes, of all layers on one GPU."""

    layout: Layout
    exchange: str  # "none", "all_gather" or "all_to_all"
    us: float
    compute: Prediction
    transfer: Transfer
    other_exchanges: dict[str, float]  # name -> its us
    experts_gb: float
    other_gb: float
    tokens_gb: float
    left_gb: float

    @property
    def parts(self) -> dict[str, float]:
        """What the time consists of, in µs."""
        gemms = self.compute.us - self.compute.start_us
        name = "reading weights" if self.compute.bound == "memory" else "arithmetic"
        wire = self.transfer.us - self.transfer.start_us
        link = "network" if self.transfer.network_us > self.transfer.nvlink_us else "NVLink"
        return {
            name: gemms, "kernel starts": self.compute.start_us,
            link: wire, "exchange starts": self.transfer.start_us,
        }  # fmt: skip

    @property
    def bound(self) -> str:
        """What takes most of the time, and how much of it."""
        name = max(self.parts, key=self.parts.__getitem__)
        return f"{name} {100 * self.parts[name] / self.us:.0f} %"


def layouts(gpus: int) -> Iterator[Layout]:
    """All that use every GPU."""
    for tp in (n for n in range(1, gpus + 1) if gpus % n == 0):
        for ep in (n for n in range(1, gpus // tp + 1) if gpus // tp % n == 0):
            yield Layout(tp, ep, gpus // (tp * ep))


def why_not(layout: Layout, ask: Question) -> str | None:
    """Why a layout can't be, with the numbers, memory aside; None if it can."""
    shape, tp, ep = ask.model.shape, layout.tp, layout.ep
    E, I = shape.num_experts, shape.intermediate
    if I % tp:
        return f"an expert's {I} columns can't be divided by TP {tp}"
    if block := scale_block(ask.scheme):
        if I // tp % block:
            legal = [n for n in range(1, I // block + 1) if I % (n * block) == 0]
            return (
                f"TP {tp} leaves an expert {I // tp} columns, which cuts {ask.scheme}'s scale "
                f"blocks of {block}; possible: TP {', '.join(map(str, legal))}"
            )
    if ep > E:
        return f"EP {ep} is more than the {E} experts"
    most = E - -(-E // ep)
    if ask.redundant > most:
        return f"{ask.redundant} redundant slots are more than the {most} experts of other ranks"
    return None


def scale_block(scheme: str) -> int | None:
    """The columns of an expert that share a scale, so that ranks can't divide them."""
    if scheme == "bf16":
        return None
    rows, columns = SCHEMES[scheme].weights[0].block_shape
    both = [size for size in (rows, columns) if size is not None and size > 1]
    return max(both, default=2 if SCHEMES[scheme].weights[0].format.is_packed else None)


def estimate(layout: Layout, ask: Question) -> Estimate:
    """Time and memory of a layout that can be."""
    model, shape = ask.model, ask.model.shape
    group = layout.tp * layout.ep
    layer = RankLayer(shape, ask.tokens * group, ask.scheme, ask.routing, layout.tp, layout.ep)
    load = busiest_load(layer, ask.redundant)
    compute = predict_with(
        fitted()[ask.scheme], layer, roof(ask.cluster.gpu.name, ask.scheme), load
    )
    choices = exchanges(layout, ask, load)
    ours = [choice for choice in choices if choice not in NOT_OURS]
    name = min(ours, key=lambda choice: choices[choice].us)
    slots = -(-shape.num_experts // layout.ep) + (ask.redundant if layout.ep > 1 else 0)
    per_expert = 3 * shape.hidden * shape.intermediate * weight_bytes(shape, ask.scheme)
    experts = slots * per_expert / layout.tp * model.layers
    other = 2 * model.other / layout.tp
    rows = load.rows * (2 * shape.intermediate / layout.tp + shape.hidden)
    tokens = 2 * (rows + 2 * ask.tokens * group * shape.hidden)
    left = 1e9 * (ask.cluster.gpu.memory_gb - ask.reserve_gb) - experts - other - tokens
    return Estimate(
        layout, name, compute.us + choices[name].us, compute, choices[name],
        {choice: choices[choice].us for choice in choices if choice != name},
        experts / 1e9, other / 1e9, tokens / 1e9, left / 1e9,
    )  # fmt: skip


def busiest_load(layer: RankLayer, redundant: int = 0) -> Load:
    """What the busiest rank gets, with experts and copies placed by how popular they are."""
    shape = layer.shape
    popular = chances(shape.num_experts, shape.top_k, layer.routing)
    if layer.ep == 1:
        return layer.load
    placement = balance(popular, layer.ep, redundant=redundant)
    share = [chance / len(s) for chance, s in zip(popular, placement.expert_slots, strict=True)]
    most = heaviest(popular, placement)
    ranks = [[share[e] for e in own] for own in placement.ranks]
    return layer.load_of(min(ranks, key=lambda own: abs(sum(own) - most)))


def exchanges(layout: Layout, ask: Question, load: Load) -> dict[str, Transfer]:
    """The time of each exchange that the layout can have."""
    model, cluster = ask.model, ask.cluster
    H, K, T = model.shape.hidden, model.shape.top_k, ask.tokens
    sent, back = row_bytes(model, ask.scheme), BACK * H
    group = layout.tp * layout.ep
    if group == 1:
        return {"none": NOTHING}
    together = cluster.span(group)
    found = {
        "all_gather": cluster.gather("all_gather", T * sent, together)
        + cluster.gather("reduce_scatter", T * back, together)
    }
    if layout.ep == 1:
        return found
    span = cluster.span(layout.ep, layout.tp)
    E = model.shape.num_experts
    hit = chance_of_any(E, K, layout.ep, model.n_group, model.topk_group)
    busiest = max(1.0, load.rows * layout.ep / (T * group * K))
    near = T * hit * (span.per_node - 1) * busiest
    far = T * hit * (layout.ep - span.per_node) * busiest
    arrived = T * hit * layout.ep * busiest
    within = cluster.span(layout.tp)
    found["all_to_all"] = (
        cluster.all_to_all(near * sent, far * sent, span)
        + cluster.gather("all_gather", arrived * sent, within)
        + cluster.gather("reduce_scatter", arrived * back, within)
        + cluster.all_to_all(near * back, far * back, span)
    )
    if span.nodes > 1 and layout.tp == 1:
        node = chance_of_any(E, K, span.nodes, model.n_group, model.topk_group)
        once, inside = T * node * (span.nodes - 1) * busiest, arrived - T * hit * busiest
        found["deepep"] = cluster.all_to_all(inside * sent, once * sent, span) + cluster.all_to_all(
            inside * back, once * back, span
        )
    return found


def row_bytes(model: PlanModel, scheme: str) -> float:
    """Of a token on its way to experts: its values as the scheme has them, ids and weights."""
    H = model.shape.hidden
    recipe = None if scheme == "bf16" else SCHEMES[scheme].inputs
    bits = 16.0 if recipe is None else recipe.format.bits_per_value((1, H), recipe.block_shape)
    return H * bits / 8 + ROUTE * model.shape.top_k


def roof(gpu: str, scheme: str) -> Roof:
    """Peak and bandwidth; of GPUs that weren't measured, what an H200 reaches of its data sheet."""
    dtype = torch.float8_e4m3fn if multiplies_fp8(scheme) else torch.bfloat16
    known, sheet, base = ROOFS["NVIDIA H200", dtype], gpu_named(gpu), gpu_named(MEASURED)
    peak, base_peak = sheet.bf16_tflops, base.bf16_tflops
    if dtype.itemsize == 1:
        assert base.fp8_tflops is not None
        wanted = f"one with FP8 units for {scheme}"
        expect(sheet.fp8_tflops is not None, "plan", "gpu", wanted, gpu)
        peak, base_peak = sheet.fp8_tflops or 0.0, base.fp8_tflops
    if gpu == MEASURED:
        return known
    scaled = known.tflops * peak / base_peak, known.gbs * sheet.memory_gbs / base.memory_gbs
    return replace(known, tflops=scaled[0], gbs=scaled[1], source="data sheet, reached as on H200")
