"""What ranks do to see what goes over the wire."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import tmoe
from tests.parallel.cases import Case, make_whole, mesh_of, spread, tokens_of
from tmoe.parallel import fixed_tokens, groups, modules, parallelize


class Sent:
    """Inside, counts the bytes that this rank sends to others."""

    def __enter__(self) -> Sent:
        self.to_all, self.gathered, self.calls = 0, 0, []
        self._to_all, self._gather = groups.all_to_all, groups._all_gather

        def all_to_all(x, send, receive, group, step, *rest):
            if not step.startswith("asking"):
                assert send[group.rank] == 0, "its own rows are sent"
                self.to_all += x[: sum(send)].nbytes
                self.calls.append(step)
            return self._to_all(x, send, receive, group, step, *rest)

        def gather(out, x, **options):
            self.gathered += x.nbytes * (dist.get_world_size() - 1)
            return self._gather(out, x, **options)

        groups.all_to_all, groups._all_gather = all_to_all, gather
        return self

    def __exit__(self, *error: Any) -> None:
        groups.all_to_all, groups._all_gather = self._to_all, self._gather


@torch.no_grad()
def coded(rank: int, case: Case) -> dict[str, Any]:
    """A layer whose tokens are quantised before they are sent, and after."""
    layer = spread(case, make_whole(case))
    x = tokens_of(case)[layer.experts.parallel.layout.owners.rank]
    weights = torch.rand(len(x), case.top_k).to(x.device)
    ids = torch.rand(len(x), case.experts).argsort(1)[:, : case.top_k].to(x.device)
    found: dict[str, Any] = {"codes": modules.codes_of(layer.experts) is not None}
    codes_of = modules.codes_of
    deterministic = case.deterministic
    with tmoe.options(backend=case.backend, deterministic=deterministic), fixed_tokens():
        for name, function in (("before", codes_of), ("after", lambda experts: None)):
            modules.codes_of = function
            try:
                layer.experts(x, ids, weights)  # the first agrees
                with Sent() as sent:
                    found[name] = layer.experts(x, ids, weights)
            finally:
                modules.codes_of = codes_of
            found[f"{name} sent"] = sent.to_all if case.exchange == "all_to_all" else sent.gathered
    return found


@torch.no_grad()
def goes_once(rank: int, exchange_fixed: bool) -> tuple[int, int, list[str]]:
    """Bytes sent by six tokens of which each has all K = 3 experts of one rank: (in all, of a
    message, steps)."""
    layer = tmoe.Experts(6, 16, 8)
    parallelize(layer, mesh_of(Case("", (2,), ("x",), ())), ep="x", dp="x", exchange="all_to_all")
    ids = torch.tensor([[0, 1, 2]] * 2 + [[3, 4, 5]] * 4)
    x, weights = torch.randn(6, 16), torch.rand(6, 3)
    call = (x, ids, weights)
    if exchange_fixed:
        with fixed_tokens(capacity=4):
            layer(*call)
            with Sent() as sent:
                layer(*call)
        assert layer.parallel.num_dropped() == 0
    else:
        with Sent() as sent:
            layer(*call)
    return sent.to_all, 128, sent.calls


@torch.no_grad()
def with_sums(rank: int, sums: torch.dtype) -> dict[str, Any]:
    """bf16 tokens, with sums that come back in `sums`."""
    case = Case("", (2,), ("x",), (4, 5), ep="x", dp="x", dtype=torch.bfloat16, grads=False)
    whole, layer = make_whole(case), make_whole(case)
    parallelize(layer, mesh_of(case), ep="x", dp="x", sums=sums)
    x = tokens_of(case)[rank]
    with Sent() as sent:
        y = layer(x)
    one, truth = whole(x), whole.double()(x.double())
    decision = tmoe.explain(layer, num_tokens=5)
    return {
        "sent": sent.to_all, "off": (y.double() - truth).norm().item(),
        "one": (one.double() - truth).norm().item(), "chosen": decision.exchange.chosen,
        "said": str(decision),
    }  # fmt: skip


def trained_with_sums(rank: int) -> tuple[float, float, bool]:
    """A gradient through sums in bfloat16: how far the output is off, and one rank's."""
    case = Case("", (2,), ("x",), (4, 5), ep="x", dp="x", dtype=torch.bfloat16)
    whole, layer = make_whole(case), make_whole(case)
    parallelize(layer, mesh_of(case), ep="x", dp="x", sums=torch.bfloat16)
    x = tokens_of(case)[rank].requires_grad_()
    y = layer(x)
    y.sum().backward()
    with torch.no_grad():
        one, truth = whole(x), whole.double()(x.double())
        off, usual = ((t.double() - truth).norm().item() for t in (y, one))
    return off, usual, bool(x.grad.abs().sum() > 0)


@torch.no_grad()
def overflowing(rank: int) -> tuple[list[int], str]:
    """Capacity for two of six tokens: what is counted, twice, and what is said."""
    layer = tmoe.Experts(4, 16, 8)
    parallelize(layer, mesh_of(Case("", (2,), ("x",), ())), ep="x", dp="x", exchange="all_to_all")
    x, ids, weights = torch.randn(6, 16), torch.zeros(6, 1, dtype=torch.int64), torch.ones(6, 1)
    found = []
    with fixed_tokens(capacity=2):
        for _ in range(2):
            y = layer(x, ids, weights)
            found.append(layer.parallel.num_dropped())
        assert y[:2].abs().sum() > 0 and y[2:].abs().sum() == 0
        try:
            layer.parallel.raise_if_dropped()
            said = "nothing"
        except RuntimeError as error:
            said = str(error)
    layer.parallel.reset_dropped()
    return [*found, layer.parallel.num_dropped()], said
