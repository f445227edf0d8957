"""ExpertParallel: what a layer needs to run its experts on several ranks; the steps of one call."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..dispatch.problem import token_bucket
from ..low_rank import LowRank
from ..options import current
from ..version import __version__
from . import adapters
from .agreement import Agreement, Call
from .all_gather import AllGather
from .all_to_all import AllToAll
from .autograd import copy_to_all, first_only, wide
from .beside import Beside
from .choose import ExchangeDecision, ExchangeProblem, choose
from .codes import Codes, codes_for, needs_gradients
from .copies import sum_gradients
from .fixed import Fixed, fixed_now
from .layout import Layout
from .local import LocalExperts
from .peers import peers_of
from .placement import Placement
from .symmetric_memory import SymmetricMemory, verify


class ExpertParallel:
    """The experts of one layer on several ranks. `parallelize` makes it.

    Attributes:
        layout: which ranks divide what.
        placement: which rank has which experts.
        exchange: the name of the exchange to use; None: the one that should be fastest.
        sums: in which dtype the partial sums of an all-to-all come back; None: float32. They are
            added up in float32 in any case.
        part: where this rank's part of the width begins and ends.
        overlap: whether a shared expert has a stream of its own on a GPU; True.
        words: what else all ranks have to agree on: name, sizes, scheme of the layer.
    """

    def __init__(
        self,
        layout: Layout,
        placement: Placement,
        exchange: str | None,
        words: dict[str, Any],
        sums: torch.dtype | None = None,
        part: tuple[int, int] = (0, 0),
    ) -> None:
        self.layout, self.placement, self.exchange, self.sums = layout, placement, exchange, sums
        self.part = part
        self.words = {
            **words, **layout.words, "placement": placement.fingerprint,
            "exchange": exchange or "chosen", "sums": str(sums or "float32"),
            "tmoe": __version__, "torch": torch.__version__,
        }  # fmt: skip
        self.overlap = True
        self.captured = False  # whether a CUDA graph has this placement in it
        self._agreement = Agreement(layout, self.words)
        self._peers = peers_of(layout.experts, layout.everyone)
        self._dropped: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertParallel:
        return self  # process groups can't be copied, and a copy of the layer may share the rest

    def set_placement(self, placement: Placement) -> None:
        """After the weights were moved, on all ranks."""
        self.placement, self.captured = placement, False
        self._agreement.change(placement=placement.fingerprint)

    def run(
        self,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        experts: LocalExperts,
        beside: Callable[[], Tensor] | None = None,
        codes: Codes | None = None,
        *,
        trained: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """x (T, H), weights and ids (T, K), this rank's tokens -> (T, H) in float32, or rounded to
        the dtype of x already, and what `beside` returned: it is called while tokens are under way.
        `codes`: how x is to be quantised, if it is sent. `trained`: whether what `experts` return
        may need gradients."""
        weights = topk_weights.to(wide(x.dtype))
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            self.captured = True
        fixed, slot_by_slot = fixed_now(), current().deterministic
        sent = needs_gradients(x, weights)
        trained = trained and torch.is_grad_enabled()
        gradients = sent or trained
        call = self._words_of(x, weights, topk_ids, fixed, trained)
        if fixed is not None or self._asks_nothing(x):
            self._agreement.on_fixed(call)
            most = x.shape[0]
        else:
            most = self._agreement.on_tokens(x, call)
        if sent:
            codes = None
        problem = self.problem(x, topk_ids.shape[1], most, codes, gradients)
        chosen = choose(problem, self.exchange).chosen
        apart = self.overlap and not gradients and self.layout.width.size == 1
        aside = Beside(beside, x, own_stream=apart)
        inputs: tuple[Tensor, Tensor, Tensor] = (x, weights, topk_ids)
        if codes is not None and (chosen != "all_gather" or self.layout.owners.size > 1):
            inputs = (codes.of(x), weights, topk_ids)
        exchange: AllGather | AllToAll
        if chosen == "all_gather":
            exchange = AllGather(self.layout, self.placement, most, slot_by_slot=slot_by_slot)
            exchange.begin(*inputs)
        else:
            how: dict[str, Any] = {"slot_by_slot": slot_by_slot, "sums": self._sums(x)}
            if chosen == "all_to_all":
                exchange = AllToAll(self.layout, self.placement, **how)
            elif self._is_verified(problem, inputs, most, how):
                kind = self._agreement.number(call) + most
                exchange = SymmetricMemory(self.layout, self.placement, self._peers, kind, **how)
            else:  # it is out of the choice from now on
                return self.run(
                    x, topk_weights, topk_ids, experts, beside, codes, trained=trained
                )  # fmt: skip
            if chosen == "all_to_all" and fixed is None:
                counts = exchange.place(*inputs, 0, None)
                exchange.begin(*self._agreement.on_rows(counts))
            else:
                room = self._room(most)
                exchange.place(*inputs, room, self._counter(room, most, x.device))
                exchange.begin([room] * self.layout.experts.size, [room] * self.layout.experts.size)
        aside.start()
        y = exchange.end(experts)
        return y, aside.result()

    def codes(self, scheme: str | None, scale: Tensor | None, weight_on_input: bool) -> Any:
        """How tokens for experts of that scheme, with that input scale, are quantised before they
        are sent; None: they aren't."""
        return codes_for(scheme, scale, weight_on_input)

    def weight(self, weight: Tensor) -> Tensor:
        """A parameter of this rank, to be computed with; its gradient is right where experts have
        copies on other ranks."""
        return sum_gradients(weight, self.placement, self.layout.experts)

    @property
    def adapters(self) -> ModuleType:
        """What `tmoe.lora` does with a module's adapters: `begin`, `own`, `whole`."""
        return adapters

    def adapter(self, lora: LowRank | None, *, first: bool) -> LowRank | None:
        """That of a projection, likewise: of its two factors the width divides one, and ranks that
        divide the width have the other in common."""
        if lora is None:
            return None
        a, b, width = self.weight(lora.a), self.weight(lora.b), self.layout.width
        if first:
            return LowRank(copy_to_all(a, width), b, lora.scaling)
        return LowRank(a, copy_to_all(b, width), lora.scaling)

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
        self, x: Tensor, top_k: int, most_tokens: int, codes: Codes | None, gradients: bool
    ) -> ExchangeProblem:
        layout, fixed, H = self.layout, fixed_now(), x.shape[1]
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
            gradients,
            self._peers.reason,
        )

    def explain(
        self, num_tokens: int, hidden_size: int, top_k: int, dtype: torch.dtype,
        codes: Codes | None = None, gradients: bool = False,
    ) -> ExchangeDecision:  # fmt: skip
        """Which exchange would run where the fullest rank has `num_tokens`, and why;
        `tmoe.explain(layer, num_tokens)` says it beside what the experts run on."""
        x = torch.empty(0, hidden_size, dtype=dtype, device="meta")
        return choose(self.problem(x, top_k, num_tokens, codes, gradients), self.exchange)

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

    def _room(self, most: int) -> int:
        """Rows for each rank: the fullest share's, or the capacity."""
        everything, fixed = -(-most // self.layout.shares.size), fixed_now()
        if fixed is None or fixed.capacity is None:
            return everything
        return min(fixed.capacity, everything)

    def _counter(self, room: int, most: int, device: torch.device) -> Tensor | None:
        """Where rows that find no room are counted; None: all find some."""
        if room * self.layout.shares.size >= most:
            return None
        if self._dropped is None:
            self._dropped = torch.zeros(1, dtype=torch.int64, device=device)
        return self._dropped

    def _is_verified(
        self, problem: ExchangeProblem, inputs: tuple[Tensor, Tensor, Tensor], most: int,
        how: dict[str, Any],
    ) -> bool:  # fmt: skip
        """Whether peers' memory may be used, which the first call of a kind finds out."""
        peers = self._peers
        if current().verify and problem not in peers.verified:
            verify(self.layout, self.placement, peers, inputs, self._room(most), **how)
            peers.verified.add(problem)
        return not peers.reason

    def _words_of(
        self, x: Tensor, weights: Tensor, ids: Tensor, fixed: Fixed | None, trained: bool
    ) -> Call:
        """What all ranks have to have in common in a call, beside the layer. What one sends forward
        and needs the gradient of, the others have to send back."""
        sent = {"tokens": x, "weights": weights} if torch.is_grad_enabled() else {}
        needed = [name for name, tensor in sent.items() if tensor.requires_grad]
        return (
            ("hidden", x.shape[1]),
            ("dtype of x", str(x.dtype).removeprefix("torch.")),
            ("top_k", ids.shape[1]),
            ("gradients", ", ".join([*needed, *(["experts"] if trained else [])]) or "none"),
            ("deterministic", current().deterministic),
            ("verify", current().verify),
            ("fixed", fixed is not None),
            ("capacity", fixed.capacity if fixed else None),
            ("tokens", x.shape[0] if fixed is not None or self._asks_nothing(x) else "any"),
        )

    def _asks_nothing(self, x: Tensor) -> bool:
        """Whether a call sends its tokens unasked: where all ranks have the same ones, on a GPU.
        To ask would make the host wait."""
        return x.is_cuda and self.layout.owners.size == 1
