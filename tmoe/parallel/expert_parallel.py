"""ExpertParallel: what a layer needs to run its experts on several ranks; the steps of one call."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..checks import expect, expect_type
from ..dispatch.problem import token_bucket
from ..options import current
from ..version import __version__
from . import groups
from .all_gather import AllGather
from .all_to_all import AllToAll
from .autograd import first_only, wide
from .choose import ExchangeDecision, ExchangeProblem, choose
from .codes import Codes, needs_gradients
from .copies import sum_gradients
from .faults import RankMismatchError, agree
from .layout import Layout
from .local import LocalExperts
from .placement import Placement


@dataclass(frozen=True, slots=True)
class Fixed:
    capacity: int | None


_fixed: ContextVar[Fixed | None] = ContextVar("tmoe_parallel_fixed", default=None)


@contextmanager
def fixed_tokens(capacity: int | None = None) -> Iterator[None]:
    """Inside, every rank brings the same number of tokens to a call, as a decoder that pads does.

    Then nothing has to be asked before tokens are sent, the host doesn't wait for the device, and a
    CUDA graph captures the call, after one call outside of it. Pad with ids of -1.

    `capacity`: of the all-to-all, rows for each rank; None: as many as there are tokens, with which
    none can be left out. With fewer, what doesn't fit contributes nothing and is counted:
    ``layer.experts.parallel.num_dropped()``.
    """
    if capacity is not None:
        expect_type(capacity, int, "fixed_tokens", "capacity")
        expect(capacity >= 1, "fixed_tokens", "capacity", "at least 1", capacity)
    token = _fixed.set(Fixed(capacity))
    try:
        yield
    finally:
        _fixed.reset(token)


class ExpertParallel:
    """The experts of one layer on several ranks. `parallelize` makes it.

    Attributes:
        layout: which ranks divide what.
        placement: which rank has which experts.
        exchange: the name of the exchange to use; None: the one that should be fastest.
        sums: in which dtype the partial sums of an all-to-all come back; None: float32. They are
            added up in float32 in any case.
        words: what else all ranks have to agree on: name, sizes, scheme of the layer.
    """

    def __init__(
        self,
        layout: Layout,
        placement: Placement,
        exchange: str | None,
        words: dict[str, Any],
        sums: torch.dtype | None = None,
    ) -> None:
        self.layout, self.placement, self.exchange, self.sums = layout, placement, exchange, sums
        self.words = {
            **words, **layout.words, "placement": placement.fingerprint,
            "exchange": exchange or "chosen", "sums": str(sums or "float32"),
            "tmoe": __version__, "torch": torch.__version__,
        }  # fmt: skip
        self.captured = False  # whether a CUDA graph has this placement in it
        self._agreed: set[tuple[Any, ...]] = set()
        self._hashes: dict[tuple[Any, ...], int] = {}
        self._dropped: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertParallel:
        return self  # process groups can't be copied, and a copy of the layer may share the rest

    def set_placement(self, placement: Placement) -> None:
        """After the weights were moved, on all ranks."""
        self.placement, self.captured = placement, False
        self.words["placement"] = placement.fingerprint
        self._agreed.clear()
        self._hashes.clear()

    def run(
        self,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        experts: LocalExperts,
        beside: Callable[[], Tensor] | None = None,
        codes: Codes | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """x (T, H), weights and ids (T, K), this rank's tokens -> (T, H) in float32, or rounded to
        the dtype of x already, and what `beside` returned: it is called while tokens are under way.
        `codes`: how x is to be quantised, if it is sent."""
        weights = topk_weights.to(wide(x.dtype))
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            self.captured = True
        fixed, slot_by_slot = _fixed.get(), current().deterministic
        call = self._words_of(x, weights, topk_ids, fixed)
        if fixed is not None or self._asks_nothing(x):
            self._agree_once(call)
            most = x.shape[0]
        else:
            most = self._ask(x, call)
        if needs_gradients(x, weights):
            codes = None
        problem = self.problem(x, topk_ids.shape[1], most, codes)
        chosen = choose(problem, self.exchange).chosen
        if codes is not None and (chosen == "all_to_all" or self.layout.owners.size > 1):
            x = codes.of(x)
        exchange: AllGather | AllToAll
        if chosen == "all_gather":
            exchange = AllGather(self.layout, self.placement, most, slot_by_slot=slot_by_slot)
            exchange.begin(x, weights, topk_ids)
        else:
            exchange = AllToAll(
                self.layout, self.placement, slot_by_slot=slot_by_slot, sums=self._sums(x)
            )
            inputs = (x, weights, topk_ids)
            if fixed is None:
                counts = exchange.place(*inputs, 0, None)
                exchange.begin(*self._ask_counts(counts))
            else:
                self._begin_fixed(exchange, inputs, fixed.capacity, most)
        other = beside() if beside else None
        return exchange.end(experts), other

    def weight(self, weight: Tensor) -> Tensor:
        """A parameter of this rank, to be computed with; its gradient is right where experts have
        copies on other ranks."""
        return sum_gradients(weight, self.placement, self.layout.experts)

    def bias(self, bias: Tensor | None) -> Tensor | None:
        """That of the first projection, likewise."""
        return None if bias is None else self.weight(bias)

    def bias_once(self, bias: Tensor | None) -> Tensor | None:
        """That of the second projection: of the ranks that divide the width, one adds it."""
        return first_only(self.bias(bias), self.layout.width)

    def _sums(self, x: Tensor) -> torch.dtype:
        """In which partial sums come back: never fewer bits than x has."""
        return wide(x.dtype) if self.sums is None else torch.promote_types(x.dtype, self.sums)

    def problem(
        self, x: Tensor, top_k: int, most_tokens: int, codes: Codes | None
    ) -> ExchangeProblem:
        layout, fixed, H = self.layout, _fixed.get(), x.shape[1]
        return ExchangeProblem(
            token_bucket(most_tokens),
            H,
            top_k,
            H * x.element_size() if codes is None else codes.row_bytes(H),
            self._sums(x).itemsize,
            wide(x.dtype).itemsize,
            layout.owners.size,
            layout.shares.size,
            layout.width.size,
            layout.everyone.nodes,
            fixed is not None,
            fixed.capacity if fixed else None,
            current().deterministic,
            "" if codes is None else codes.recipe.format.name,
        )

    def explain(
        self, num_tokens: int, hidden_size: int, top_k: int, dtype: torch.dtype,
        codes: Codes | None = None,
    ) -> ExchangeDecision:  # fmt: skip
        """Which exchange would run where the fullest rank has `num_tokens`, and why;
        `tmoe.explain(layer, num_tokens)` says it beside what the experts run on."""
        x = torch.empty(0, hidden_size, dtype=dtype, device="meta")
        return choose(self.problem(x, top_k, num_tokens, codes), self.exchange)

    def num_dropped(self) -> int:
        """How many rows didn't fit into the capacity since the last `reset_dropped`, on this rank.
        Waits for the device."""
        return 0 if self._dropped is None else int(self._dropped.item())

    def raise_if_dropped(self) -> None:
        """RuntimeError if rows didn't fit, with their number."""
        dropped = self.num_dropped()
        if dropped:
            name = self.words.get("layer", "a layer")
            raise RuntimeError(
                f"tmoe.parallel: {dropped} rows of {name} didn't fit into the capacity of "
                "fixed_tokens and contributed nothing; give it more, or None for all"
            )

    def reset_dropped(self) -> None:
        if self._dropped is not None:
            self._dropped.zero_()

    # What ranks tell each other before tokens are sent ----------------------------------------

    def _words_of(
        self, x: Tensor, weights: Tensor, ids: Tensor, fixed: Fixed | None
    ) -> tuple[Any, ...]:
        """What all ranks have to have in common in a call, beside the layer; hashable."""
        return (
            ("hidden", x.shape[1]),
            ("dtype of x", str(x.dtype).removeprefix("torch.")),
            ("top_k", ids.shape[1]),
            ("gradients", needs_gradients(x, weights)),
            ("deterministic", current().deterministic),
            ("fixed", fixed is not None),
            ("capacity", fixed.capacity if fixed else None),
            ("tokens", x.shape[0] if fixed is not None or self._asks_nothing(x) else "any"),
        )

    def _asks_nothing(self, x: Tensor) -> bool:
        """Whether a call sends its tokens unasked: where all ranks have the same ones, on a GPU.
        To ask would make the host wait."""
        return x.is_cuda and self.layout.owners.size == 1

    def _agree_once(self, call: tuple[Any, ...]) -> None:
        everyone = self.layout.everyone
        if everyone.handle is None or call in self._agreed:
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "tmoe.parallel: run the layer once before it is captured, with as many tokens: "
                "ranks agree on what they are about to do in the first call"
            )
        self._compare(call, "agree")
        self._agreed.add(call)

    def _compare(self, call: tuple[Any, ...], why: str) -> None:
        everyone = self.layout.everyone
        number = _numbers[everyone.handle] = _numbers.get(everyone.handle, 0) + 1
        mine = self.words | dict(call)
        what = f"experts of {self.words.get('layer', 'a layer')}"
        agree(everyone.handle, everyone.ranks, everyone.rank, f"{why}/{number}", what, mine)

    def _ask(self, x: Tensor, call: tuple[Any, ...]) -> int:
        """The most tokens that a rank has. All ranks tell what they are about to do, and theirs."""
        everyone = self.layout.everyone
        if everyone.handle is None:
            return x.shape[0]
        mine = torch.tensor([[self._hash(call), x.shape[0]]], device=x.device)
        said = groups.all_gather(mine, everyone, "asking for the number of tokens").tolist()
        if any(code != said[0][0] for code, _ in said):
            self._compare(call, "mismatch")
        tokens: dict[int, int] = {}
        for rank, owner, (_, count) in zip(everyone.ranks, self.layout.owner_of, said, strict=True):
            if tokens.setdefault(owner, count) != count:
                raise RankMismatchError(
                    f"tmoe.parallel: ranks with the same tokens have to bring as many: rank {rank} "
                    f"has {count}, another {tokens[owner]}, in {self.words.get('layer', 'a layer')}"
                )
        return max(tokens.values())

    def _hash(self, call: tuple[Any, ...]) -> int:
        if call not in self._hashes:
            text = json.dumps([self.words, call], sort_keys=True).encode()
            self._hashes[call] = int.from_bytes(hashlib.sha256(text).digest()[:7], "big")
        return self._hashes[call]

    def _ask_counts(self, counts: Tensor) -> tuple[list[int], list[int]]:
        """How many rows go to each rank, and come from each."""
        experts = self.layout.experts
        ones = [1] * experts.size
        step = "asking for the number of rows"
        come = groups.all_to_all(counts, ones, ones, experts, step)
        sent, received = torch.stack([counts, come]).tolist()
        return sent, received

    def _begin_fixed(
        self, exchange: AllToAll, inputs: tuple[Tensor, Tensor, Tensor], capacity: int | None,
        tokens: int,
    ) -> None:  # fmt: skip
        everything = -(-tokens // self.layout.shares.size)  # the fullest share
        room = everything if capacity is None else min(capacity, everything)
        dropped = None
        if room < everything:
            if self._dropped is None:
                self._dropped = torch.zeros(1, dtype=torch.int64, device=inputs[0].device)
            dropped = self._dropped
        exchange.place(*inputs, room, dropped)
        counts = [room] * self.layout.experts.size
        exchange.begin(counts, counts)


_numbers: dict[Any, int] = {}  # how often a group's ranks have compared what they are about to do
