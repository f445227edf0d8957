"""`plan`: all layouts of a cluster, the fastest first, and why the others can't be."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..bench.cost_model import FITTED, fitted
from ..bench.loads import chances
from ..bench.tables import Grid, Row, us_text
from ..checks import expect, expect_type
from ..parallel.communication_model import Cluster, sources
from .layouts import (
    MEASURED,
    NOT_OURS,
    Estimate,
    Layout,
    Question,
    estimate,
    layouts,
    roof,
    why_not,
)
from .models import OP, PlanModel
from .remedies import nothing_fits


@dataclass(frozen=True, slots=True)
class Plan:
    """What was asked, the layouts that fit, fastest first, and the reason for each that doesn't."""

    ask: Question
    ranked: tuple[Estimate, ...]
    refused: dict[Layout, str]

    def table(self) -> Grid:
        """A line per layout."""
        rows = []
        for found in self.ranked:
            texts = [str(found.layout), found.exchange, us_text(found.us)]
            texts += [us_text(found.compute.us), us_text(found.transfer.us)]
            texts += [f"{found.experts_gb + found.other_gb:.1f}", f"{found.left_gb:.1f}"]
            rows.append(Row((*texts, found.bound)))
        columns = ("layout", "exchange", "µs per layer", "compute", "exchange, µs", "weights, GB")
        return Grid(self.title, (*columns, "left, GB", "most of it"), tuple(rows))

    @property
    def title(self) -> str:
        ask = self.ask
        cluster, shape = ask.cluster, ask.model.shape
        copies = f", {ask.redundant} redundant slots a rank" if ask.redundant else ""
        return (
            f"{shape.name}, {ask.scheme}, {ask.routing} routing{copies}: {ask.gpus} × "
            f"{cluster.gpu.name}, NVLink of {cluster.domain}, {cluster.net_gbit:g} Gbit/s each, "
            f"{ask.tokens} tokens per GPU"
        )

    @property
    def reason(self) -> str:
        """Why the first is first; where nothing fits, what would have to change."""
        if not self.ranked:
            return nothing_fits(self.ask)
        best = self.ranked[0]
        parts = ", ".join(f"{name} {us_text(us)}" for name, us in best.parts.items() if us > 0)
        text = f"{best.layout} takes {us_text(best.us)} µs: {parts}."
        for name, us in best.other_exchanges.items():
            text += f" With {name} its exchange would take {us_text(us)} µs, not "
            text += f"{us_text(best.transfer.us)}."
            text += " That isn't tmoe's own." if name in NOT_OURS else ""
        if len(self.ranked) > 1:
            second = self.ranked[1]
            more = {kind: us - best.kinds[kind] for kind, us in second.kinds.items()}
            name = max(more, key=more.__getitem__)
            text += f" {second.layout} takes {us_text(second.us - best.us)} µs more: "
            text += f"{name} +{us_text(more[name])}."
        return text

    @property
    def refusals(self) -> list[str]:
        """The layouts that can't be, those with the same reason together."""
        groups: dict[str, list[str]] = {}
        for layout, reason in self.refused.items():
            groups.setdefault(reason, []).append(str(layout))
        return [f"{', '.join(names)}: {reason}" for reason, names in groups.items()]

    @property
    def calibration(self) -> list[str]:
        """What the numbers rest on."""
        gpu = self.ask.cluster.gpu.name
        kernels = f"kernels: measured, five numbers for {self.ask.scheme} fitted to 1 × H200"
        if gpu != MEASURED:
            kernels += f"; extrapolated to {gpu}: {roof(gpu, self.ask.scheme).source}"
        return [kernels, *(f"{name}: {kind}, {what}" for name, kind, what in sources())]

    def as_json(self) -> dict[str, Any]:
        """For programs; times in µs, memory in 10^9 bytes."""
        ask = self.ask
        asked = {
            "model": asdict(ask.model), "gpu": asdict(ask.cluster.gpu), "gpus": ask.gpus,
            "nvlink": ask.cluster.domain, "net_gbit": ask.cluster.net_gbit, "tokens": ask.tokens,
            "scheme": ask.scheme, "routing": ask.routing, "redundant": ask.redundant,
            "reserve_gb": ask.reserve_gb,
        }  # fmt: skip
        ranked = [
            {
                **asdict(found.layout), "exchange": found.exchange, "us": found.us,
                "compute_us": found.compute.us, "exchange_us": found.transfer.us,
                "parts_us": found.parts, "other_exchanges_us": found.other_exchanges,
                "experts_gb": found.experts_gb, "other_gb": found.other_gb,
                "tokens_gb": found.tokens_gb, "left_gb": found.left_gb, "bound": found.bound,
            }
            for found in self.ranked
        ]  # fmt: skip
        refused = [{**asdict(layout), "reason": why} for layout, why in self.refused.items()]
        return {
            "asked": asked, "ranked": ranked, "reason": self.reason, "refused": refused,
            "calibration": self.calibration, "fitted": FITTED.name,
        }  # fmt: skip


def plan(
    model: PlanModel,
    gpus: int,
    cluster: Cluster,
    *,
    tokens: int = 128,
    scheme: str = "bf16",
    routing: str = "random",
    redundant: int = 0,
    reserve_gb: float = 4.0,
) -> Plan:
    """Predict every layout of `gpus` GPUs.

    tokens: of each GPU in a step. redundant: slots of each EP rank for copies of popular experts,
    which help with ``routing="zipf"``. reserve_gb: of each GPU, for CUDA, NCCL and PyTorch.

    Raises ``ValueError``: a scheme, routing or GPU without numbers, gpus that fill no whole NVLink
    domains.
    """
    for name, size, least in (
        ("gpus", gpus, 1),
        ("tokens", tokens, 1),
        ("redundant", redundant, 0),
    ):
        expect_type(size, int, OP, name)
        expect(size >= least, OP, name, f"at least {least}", size)
    wanted = f"one of {', '.join(fitted())}, which were recorded"
    expect(scheme in fitted(), OP, "scheme", wanted, repr(scheme))
    chances(model.shape.num_experts, model.shape.top_k, routing)  # knows which there are
    fills = gpus <= cluster.domain or gpus % cluster.domain == 0
    wanted = f"a multiple of the {cluster.domain} that NVLink joins (--nvlink)"
    expect(fills, OP, "gpus", wanted, gpus)
    roof(cluster.gpu.name, scheme)
    ask = Question(model, cluster, gpus, tokens, scheme, routing, redundant, reserve_gb)
    found, refused = [], {}
    for layout in layouts(gpus):
        reason = why_not(layout, ask)
        if reason is None:
            one = estimate(layout, ask)
            if one.left_gb >= 0:
                found.append(one)
                continue
            reason = (
                f"needs {one.experts_gb:.1f} GB of experts, {one.other_gb:.1f} of other weights, "
                f"{one.tokens_gb:.1f} of tokens and {reserve_gb:g} in reserve on a GPU of "
                f"{cluster.gpu.memory_gb:g} GB"
            )
        refused[layout] = reason
    found.sort(key=lambda one: (one.us, str(one.layout)))
    return Plan(ask, tuple(found), refused)
