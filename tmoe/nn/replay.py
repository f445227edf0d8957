"""RoutingReplay: send tokens to the experts that another run sent them to.

Two runs of a model choose other experts wherever two scores are close: another dtype, batch or
backend rounds differently. In reinforcement learning that makes the trainer's probabilities differ
from those of the engine that generated the text. Replaying the engine's choices takes it away; the
weights are still computed, with gradients, from the trainer's own logits.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .hooks import backward_node, next_number, refuse_compile, routers_of
from .router import Router

OP = "RoutingReplay"


class _Call(NamedTuple):
    """A call of a router in a forward pass."""

    number: int  # autograd's next one when it began: its own nodes have this one or later ones
    ids: Tensor | None  # what it was made to choose; None: nothing
    forgotten: bool = False  # it was made to choose, by a replay that is over


@dataclass(slots=True)
class _Followed:
    """What there is to know about one router."""

    replayed: int = 0  # calls of this replay
    calls: list[_Call] = field(default_factory=list)  # by number
    recomputed_by: tuple[int, int] | None = None  # backward pass and node of the last recompute

    def note(self, call: _Call) -> None:
        """Append `call`. Of a run of calls without ids the first and the last say all."""
        last_two = [(c.ids, c.forgotten) for c in self.calls[-2:]]
        if call.ids is None and last_two == 2 * [(None, call.forgotten)]:
            self.calls.pop()
        self.calls.append(call)

    def forget(self) -> None:
        """Let go of the ids, but not of when there were some."""
        calls, self.calls = self.calls, []
        for call in calls:
            self.note(_Call(call.number, None, call.forgotten or call.ids is not None))


class RoutingReplay:
    """Records which experts every `tmoe.Router` of a model chooses, and makes it choose them again.

        replay = tmoe.RoutingReplay(model)
        with replay.record(), torch.no_grad():
            model(tokens)
        with replay.replay():
            loss = model(tokens).loss
        loss.backward()  # inside the `with` or after it
        replay.remove()

    ``ids`` holds the recording: for the name of each router a list of (T, K) integer tensors, one
    per call, in the order of the calls. It can be saved, and filled from elsewhere: on any device,
    int32 or int64.

    Under gradient checkpointing, a part that the backward pass recomputes gets the ids that its
    forward pass had, also when several passes are under way. That holds until the next `record` or
    `replay` begins: one of these spans all micro-batches of a pipeline schedule. What cannot be
    served raises.

    Raises:
        ValueError: the model has no `tmoe.Router`; a call has another number of tokens than the
            recorded one.
        RuntimeError: a router is called more often than the recording says; none was called, as in
            compiled code and CUDA graphs, which call no hooks; a router inside a new compilation.
    """

    def __init__(self, model: nn.Module) -> None:
        """Hook the routers of `model`, until `remove`."""
        routers = routers_of(model, OP)
        self.ids: dict[str, list[Tensor]] = {name: [] for name in routers}
        self._mode: str | None = None
        self._ran = False
        self._followed = {name: _Followed() for name in routers}
        self._handles = []
        for name, router in routers.items():
            before = router.register_forward_pre_hook(partial(self._before, name), with_kwargs=True)
            after = router.register_forward_hook(partial(self._after, name))
            self._handles += [before, after]

    def remove(self) -> None:
        """Take the hooks off, once all backward passes are done. The recording stays."""
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> RoutingReplay:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()

    @contextmanager
    def record(self) -> Iterator[None]:
        """Keep the ids of every call inside the ``with``, in place of an earlier recording."""
        with self._as("record"):
            self.ids = {name: [] for name in self._followed}
            yield

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Give every call inside the ``with`` the ids that were recorded, from the first one on."""
        with self._as("replay"):
            yield

    @contextmanager
    def _as(self, mode: str) -> Iterator[None]:
        if self._mode is not None:
            raise RuntimeError(f"{OP}: {mode} inside {self._mode}")
        for router in self._followed.values():
            router.replayed = 0
            router.forget()
        self._mode, self._ran = mode, False
        try:
            yield
        finally:
            self._mode = None
        if not self._ran:
            why = "compiled code and CUDA graphs call no hooks"
            raise RuntimeError(f"{OP}: no router of the model ran inside {mode} ({why})")

    def _before(self, name: str, router: Router, args: Any, kwargs: Any) -> Any:
        refuse_compile(OP)
        node = backward_node()
        ids = self._next(name) if node is None else self._again(name, node)
        if node is None:
            self._ran = True
            self._followed[name].note(_Call(next_number(), ids))
        if ids is None:
            return None
        x = args[0] if args else kwargs["x"]
        wanted = (x.shape[:-1].numel(), router.routing.top_k)
        if ids.shape != wanted:
            raise ValueError(
                f"{OP}: {name} has {wanted[0]} tokens and top_k {wanted[1]} in this call, "
                f"and ids of shape {tuple(ids.shape)} were recorded"
            )
        return args[:1], {**kwargs, "topk_ids": ids.to(x.device)}

    def _after(self, name: str, router: Router, args: Any, output: Any) -> None:
        if self._mode == "record" and backward_node() is None:
            shared_come_last = output[2][:, : router.routing.top_k]
            self.ids[name].append(shared_come_last)

    def _next(self, name: str) -> Tensor | None:
        """The ids for a call in a forward pass."""
        if self._mode != "replay":
            return None
        router, recorded = self._followed[name], self.ids.get(name, [])
        if router.replayed >= len(recorded):
            called = f"{name} is called {router.replayed + 1} times"
            raise RuntimeError(f"{OP}: {called}, and {len(recorded)} calls were recorded")
        router.replayed += 1
        return recorded[router.replayed - 1]

    def _again(self, name: str, node: Any) -> Tensor | None:
        """The ids for a call that a backward pass recomputes because `node` asks for it."""
        router, number = self._followed[name], node._sequence_nr()
        at = bisect_right(router.calls, number, key=lambda call: call.number)
        # A node asks for the part that it is in, so the call was before it. Of a part that was
        # checkpointed with use_reentrant=True the only node is one made before its calls.
        if node.name() != "CheckpointFunctionBackward":
            at -= 1
        call = router.calls[at] if 0 <= at < len(router.calls) else _Call(number, None)
        if call.forgotten:
            raise RuntimeError(
                f"{OP}: the backward pass recomputes a call of {name} from before the latest "
                "record() or replay(); span all passes whose backward is still to come with one"
            )
        if call.ids is None:
            return None
        by = (torch._C._current_graph_task_id(), number)
        if by == router.recomputed_by:
            raise RuntimeError(
                f"{OP}: {name} is called more than once within one checkpointed part, or is in "
                "one inside another; checkpoint a smaller part"
            )
        router.recomputed_by = by
        return call.ids
