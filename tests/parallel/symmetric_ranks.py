"""What the ranks of `test_symmetric_memory.py` do."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from typing import Any

import torch

import tmoe
from tests.parallel import cases
from tests.parallel.cases import Case, make_whole, spread, tokens_of
from tests.parallel.shared_memory import allocate, shared_memory
from tmoe.parallel import exchange_steps, fixed_tokens, groups, symmetric_memory

NAME = "symmetric_memory"


def compared(rank: int, case: Case) -> dict[str, Any]:
    """`cases.run`, over memory that ranks share."""
    with shared_memory():
        return cases.run(rank, replace(case, exchange=NAME))


@torch.no_grad()
def same_as_all_to_all(rank: int, case: Case, through_kernel: bool) -> list[bool]:
    """Several calls, one after the other, each with other tokens; without a collective of tokens.
    Are the bits those of all-to-all with as many rows for each rank?"""
    from tmoe.kernels.exchange_push import push

    usual = exchange_steps.push_rows
    if through_kernel:
        exchange_steps.push_rows = lambda peers, addresses, *rest, **where: push(
            addresses, *rest, **where
        )
        symmetric_memory.push_rows = exchange_steps.push_rows
    found = []
    try:
        with shared_memory(), tmoe.options(backend=case.backend, deterministic=case.deterministic):
            layers = [
                spread(replace(case, exchange=name), make_whole(case))
                for name in ("all_to_all", NAME)
            ]
            for factor in (1.0, -2.0, 0.5):
                x = tokens_of(case)[layers[0].experts.parallel.layout.owners.rank] * factor
                with fixed_tokens(None if case.fixed is True else case.fixed):
                    right = layers[0](x)
                    layers[1](x)  # compares
                    to_all, groups.all_to_all = groups.all_to_all, None
                    try:
                        got = layers[1](x)
                    finally:
                        groups.all_to_all = to_all
                found.append(torch.equal(got, right))
            parallel = [layer.experts.parallel for layer in layers]
            assert parallel[0].num_dropped() * 2 == parallel[1].num_dropped()
    finally:
        exchange_steps.push_rows = symmetric_memory.push_rows = usual
    return found


@torch.no_grad()
def wrong_once(rank: int, forced: bool, at: int) -> dict[str, Any]:
    """On rank `at` a byte of a row that it writes is lost, or of a sum."""
    case = Case("", (3,), ("x",), (4, 2, 5), ep="x", dp="x", grads=False)
    usual = symmetric_memory.push_rows

    def losing(peers: Any, addresses: Any, rows: Any, *rest: Any, **where: Any) -> None:
        rows = rows.clone()
        if rank == at and rows.numel():
            rows.view(torch.uint8)[:, 7] += 1
        usual(peers, addresses, rows, *rest, **where)

    symmetric_memory.push_rows = losing
    found: dict[str, Any] = {}
    try:
        with shared_memory():
            layer = spread(replace(case, exchange=NAME if forced else None), make_whole(case))
            x = tokens_of(case)[rank]
            one = make_whole(case)(x)
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                try:
                    found["off"] = (layer(x) - one).abs().max().item()
                except ValueError as error:
                    found["error"] = str(error)
            found["warned"] = [str(w.message) for w in warned]
            found["said"] = str(layer.experts.parallel._peers.reason)
    finally:
        symmetric_memory.push_rows = usual
    return found


@torch.no_grad()
def no_memory(rank: int) -> dict[str, Any]:
    """One rank can't have any: all of them are told, and go on."""

    def failing(group: Any, size: int, device: Any) -> Any:
        buffer = allocate(group, size, device)
        if rank == 1:
            raise RuntimeError("CUDA driver error: out of memory\nmore lines")
        return buffer

    case = Case("", (2,), ("x",), (4, 2), ep="x", dp="x", grads=False)
    with shared_memory(allocate=failing):
        layer = spread(replace(case, exchange=None), make_whole(case))
        x = tokens_of(case)[rank]
        before = tmoe.explain(layer, num_tokens=4).exchange.chosen
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            y = layer(x)
        torch.testing.assert_close(y, make_whole(case)(x))
        after = tmoe.explain(layer, num_tokens=4)
    return {
        "before": before, "after": after.exchange.chosen, "said": str(after),
        "warned": [str(w.message) for w in warned],
    }  # fmt: skip


@torch.no_grad()
def on_cpus(rank: int) -> dict[str, str]:
    """What is chosen where nobody named an exchange, and why."""
    case = Case("", (2,), ("x",), (4, 2), ep="x", dp="x", grads=False)
    layer = spread(case, make_whole(case))
    with fixed_tokens():
        found = tmoe.explain(layer, num_tokens=4).exchange
    return {"chosen": found.chosen, "why": str(found)}


def with_gradients(rank: int, trained: str) -> tuple[bool, str]:
    """Gradients of experts or of tokens: by another exchange, or refused where it is asked for."""
    case = Case("", (2,), ("x",), (4, 2), ep="x", dp="x")
    with shared_memory():
        layer = spread(replace(case, exchange=None), make_whole(case).requires_grad_(False))
        forced = spread(replace(case, exchange=NAME), make_whole(case).requires_grad_(False))
        x = tokens_of(case)[rank]
        for one in (layer, forced):
            if trained == "experts":
                one.experts.requires_grad_()
        x.requires_grad_(trained == "tokens")
        assert tmoe.explain(layer, num_tokens=4).exchange.chosen != NAME or trained == "tokens"
        layer(x).sum().backward()
        grad = x.grad if trained == "tokens" else layer.experts.down_proj.grad
        try:
            forced(x)
            said = ""
        except ValueError as error:
            said = str(error)
    return bool(grad.abs().sum() > 0), said


@torch.no_grad()
def unverified(rank: int) -> str:
    """Options differ between ranks: one would compare, the other not."""
    case = Case("", (2,), ("x",), (4, 2), ep="x", dp="x", grads=False)
    with shared_memory(), tmoe.options(verify=rank == 0):
        layer = spread(replace(case, exchange=NAME), make_whole(case))
        try:
            layer(tokens_of(case)[rank])
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"
    return ""


@torch.no_grad()
def mixed_up(rank: int) -> str:
    """Calls of two kinds, on which ranks agreed, and then each rank takes another one."""
    case = Case("", (2,), ("x",), (6, 6), ep="x", dp="x", grads=False)
    with shared_memory(), fixed_tokens():
        layer = spread(replace(case, exchange=NAME), make_whole(case))
        x = tokens_of(case)[rank]
        for tokens in (6, 4):
            layer(x[:tokens])
        try:
            layer(x[: (6, 4)[rank]])
        except TimeoutError as error:
            return str(error)
    return ""


def multicast(rank: int) -> list[str | None]:
    """What torch is told while it maps memory, and what is left of that."""
    from tmoe.parallel.peers import _NO_MULTICAST, _without_multicast

    found: list[str | None] = []
    for before in (None, "0", "1"):
        os.environ.pop(_NO_MULTICAST, None)
        if before is not None:
            os.environ[_NO_MULTICAST] = before
        with _without_multicast():
            found.append(os.environ[_NO_MULTICAST])
        found.append(os.environ.pop(_NO_MULTICAST, None))
    return found
