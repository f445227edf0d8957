"""What ranks tell each other before a call's tokens are sent: what they are about to do, and how
many tokens they have."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import Tensor

from . import groups
from .faults import RankMismatchError, agree, next_number
from .layout import Layout

Call = tuple[tuple[str, Any], ...]  # what all ranks have to have in common in a call


class Agreement:
    """Of the ranks of one layer.

    Attributes:
        layout: which ranks.
        words: what all of them have to have in common, beside what each call says.
    """

    def __init__(self, layout: Layout, words: dict[str, Any]) -> None:
        self.layout, self.words = layout, words
        self._agreed: set[Call] = set()
        self._hashes: dict[Call, int] = {}

    def change(self, **words: Any) -> None:
        """On all ranks."""
        self.words |= words
        self._agreed.clear()
        self._hashes.clear()

    def on_fixed(self, call: Call) -> None:
        """Compare a call whose number of tokens is among its words; once. RankMismatchError says
        what differs."""
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

    def on_tokens(self, x: Tensor, call: Call) -> int:
        """The most tokens that a rank has; each tells its own, and what it is about to do."""
        everyone = self.layout.everyone
        if everyone.handle is None:
            return x.shape[0]
        mine = torch.tensor([[self.number(call), x.shape[0]]], device=x.device)
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

    def on_rows(self, counts: Tensor) -> tuple[list[int], list[int]]:
        """counts (P,): rows for each rank -> how many go to each rank, and come from each."""
        experts = self.layout.experts
        ones = [1] * experts.size
        step = "asking for the number of rows"
        come = groups.all_to_all(counts, ones, ones, experts, step)
        sent, received = torch.stack([counts, come]).tolist()
        return sent, received

    def _compare(self, call: Call, why: str) -> None:
        everyone = self.layout.everyone
        number = next_number(everyone.handle, "calls")
        mine = self.words | dict(call)
        what = f"experts of {self.words.get('layer', 'a layer')}"
        agree(everyone.handle, everyone.ranks, everyone.rank, f"{why}/{number}", what, mine)

    def number(self, call: Call) -> int:
        """Of a call of this layer; the same on ranks that are about to do the same."""
        if call not in self._hashes:
            text = json.dumps([self.words, call], sort_keys=True).encode()
            self._hashes[call] = int.from_bytes(hashlib.sha256(text).digest()[:7], "big")
        return self._hashes[call]
