"""A layout's time and memory: the cost model of a rank, and what its ranks send one another.

GPUs are numbered node by node. `tp` neighbours have a part of every expert's width each, and the
same tokens; `ep` such groups, side by side, divide the experts, each with tokens of its own; `dp`
of these, each with all experts, go their own ways. There are T tokens for each GPU, so T · tp for
each group of tp, and all layouts compute the same T · gpus tokens. Exchanges:

    all_gather        all tokens to all ep ranks, reduce_scatter of their sums
    all_to_all        each token to the ranks with its experts, and the sums back
    symmetric_memory  the same, written over the NVLink of one host
    deepep            for comparison, not tmoe's own: a token goes to each node once, and from there
                      over NVLink, which is what node-limited routing (DeepSeek's groups) is for

and with tp an all_reduce of the sums in each. Tokens go in bf16, or as the codes of a scheme that
rounds its inputs, with ids and weights; sums come back in fp32. Nothing is overlapped, and
attention, router and shared experts aren't counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..bench.cases import multiplies_fp8
from ..bench.cost_model import Prediction, RankLayer, fitted, predict_with, weight_bytes
from ..bench.loads import Load, chances
from ..bench.roofline import ROOFS, Roof
from ..checks import expect
from ..dispatch.problem import token_bucket
from ..formats import SCHEMES
from ..parallel.balance import balance, heaviest
from ..parallel.choose import ROUTE
from ..parallel.codes import Codes
from ..parallel.communication_model import Cluster, Transfer, gpu_named
from ..parallel.exchange_model import (
    MOST_PEER_BYTES,
    all_gather,
    all_to_all,
    bytes_needed,
    symmetric_memory,
)
from ..parallel.shard import width_parts
from ..shapes import MoEShape
from .models import PlanModel
from .traffic import chance_of_any

MEASURED = "H200"  # the GPU whose kernels were timed
NOT_OURS = ("deepep",)
SENT, BACK = 2, 4  # bytes of a bf16 value on its way to experts, and of a sum on its way back
HOST = 8  # GPUs at most: NVLink domains of more are several hosts
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
        redundant: slots of each EP rank for copies of popular experts; none without EP.
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
    exchange: str  # "none", "all_reduce", "all_gather", "all_to_all" or "symmetric_memory"
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
        wire = self.transfer.us - self.transfer.start_us - self.transfer.copies_us
        link = "network" if self.transfer.network_us > self.transfer.nvlink_us else "NVLink"
        return {
            name: gemms, "kernel starts": self.compute.start_us,
            link: wire, "exchange starts": self.transfer.start_us,
            "exchange copies": self.transfer.copies_us,
        }  # fmt: skip

    @property
    def kinds(self) -> dict[str, float]:
        """The same, whatever it is that bounds experts and links."""
        experts, starts, links, *rest = self.parts.values()
        return {"experts": experts, "kernel starts": starts, "links": links,
                "exchange starts": rest[0], "exchange copies": rest[1]}  # fmt: skip

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
    E = ask.model.shape.num_experts
    try:
        widest_part(ask.model.shape, ask.scheme, layout.tp)
    except ValueError as error:
        return str(error)
    if layout.ep > E:
        return f"EP {layout.ep} is more than the {E} experts"
    most = E - -(-E // layout.ep)
    if layout.ep > 1 and ask.redundant > most:
        return f"{ask.redundant} redundant slots are more than the {most} experts of other ranks"
    return None


def widest_part(shape: MoEShape, scheme: str, tp: int) -> int:
    """Columns of an expert on the rank of `tp` with most. Raises ``ValueError`` as `parallelize`
    does where parts would cut a block of scales."""
    size = (1, shape.hidden, shape.intermediate)
    down: Tensor = torch.empty(size, device="meta")
    if scheme != "bf16":
        down = SCHEMES[scheme].weights[0].empty(size, device="meta")
    return max(end - start for start, end in width_parts(down, tp, gated_apart=True))


def estimate(layout: Layout, ask: Question) -> Estimate:
    """Time and memory of a layout that can be."""
    model, shape = ask.model, ask.model.shape
    group, width = layout.tp * layout.ep, widest_part(shape, ask.scheme, layout.tp)
    widened = replace(shape, intermediate=width * layout.tp)  # where parts differ
    layer = RankLayer(widened, ask.tokens * group, ask.scheme, ask.routing, layout.tp, layout.ep)
    load = busiest_load(layer, ask.redundant)
    compute = predict_with(
        fitted()[ask.scheme], layer, roof(ask.cluster.gpu.name, ask.scheme), load
    )
    choices = exchanges(layout, ask, load)
    ours = [choice for choice in choices if choice not in NOT_OURS]
    name = min(ours, key=lambda choice: choices[choice].us)
    slots = -(-shape.num_experts // layout.ep) + (ask.redundant if layout.ep > 1 else 0)
    experts = 3 * slots * shape.hidden * width * weight_bytes(shape, ask.scheme) * model.layers
    other = 2 * model.other / layout.tp
    rows = load.rows * (2 * width + shape.hidden)
    tokens = 2 * rows + (SENT + BACK) * ask.tokens * group * shape.hidden
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
    model, cluster, tp, ep = ask.model, ask.cluster, layout.tp, layout.ep
    E, K, tokens = model.shape.num_experts, model.shape.top_k, ask.tokens * tp
    sent, back = row_bytes(model.shape, ask.scheme), BACK * model.shape.hidden
    summed = cluster.all_reduce(tokens * back, cluster.span(tp))
    if ep == 1:
        return {"none" if tp == 1 else "all_reduce": summed}
    span, hidden = cluster.span(ep, tp), model.shape.hidden
    hit = chance_of_any(E, K, ep, model.n_group, model.topk_group)
    busiest = max(1.0, load.rows / (tokens * K))  # its rows over those of a rank on average
    rows = tokens * hit * busiest
    found = {
        "all_gather": all_gather(cluster, span, tokens, sent, back, hidden),
        "all_to_all": all_to_all(cluster, span, rows, sent, back, hidden),
    }
    on_one_host = span.nodes == 1 and cluster.domain <= HOST
    room = token_bucket(tokens)  # by which `choose` decides, too
    if on_one_host and bytes_needed(ep, room, sent, back, 1) <= MOST_PEER_BYTES:
        found["symmetric_memory"] = symmetric_memory(cluster, ep, rows, sent, back, hidden)
    if span.nodes > 1:
        node = chance_of_any(E, K, span.nodes, model.n_group, model.topk_group)
        once, inside = tokens * node * (span.nodes - 1) * busiest, rows * (ep - 1)
        found["deepep"] = cluster.all_to_all(inside * sent, once * sent, span) + cluster.all_to_all(
            inside * back, once * back, span
        )
    return {name: transfer + summed for name, transfer in found.items()}


def row_bytes(shape: MoEShape, scheme: str) -> int:
    """Of a token on its way to experts: its values, or the codes that they are sent as, ids and
    weights."""
    recipe = None if scheme == "bf16" else SCHEMES[scheme].inputs
    sent = SENT * shape.hidden if recipe is None else Codes(recipe, None).row_bytes(shape.hidden)
    return sent + ROUTE * shape.top_k


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
