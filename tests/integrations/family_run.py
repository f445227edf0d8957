"""Everything that the tests want to know of one family, from one tiny model built once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import tmoe
from tests.integrations.counting import CountOps
from tests.integrations.family import DEVICE, IDS, Family, outputs

NEW_TOKENS = 5
SETTINGS = dict(max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)


class NoOperations(TorchDispatchMode):
    """What runs under it runs no operation of torch, so that it makes, copies and moves nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} ran")


@dataclass
class Run:
    """One family on transformers, on tmoe, and after `restore`. All in fp32 but the last three."""

    family: Family
    eager: Tensor = field(init=False)
    other: Tensor = field(init=False)  # grouped_mm; off the interface, eager's formula in fp64
    tmoe: Tensor = field(init=False)
    restored: Tensor = field(init=False)
    report: tmoe.integrations.transformers.Report = field(init=False)
    text: str = field(init=False)  # the report, printed before `restore`
    ops: int = field(init=False)
    routers: int = field(init=False)
    moved: list[str] = field(init=False)  # entries of the state dict that aren't where they were
    tokens: Tensor | None = None  # greedy, of a family that generates; and on tmoe
    tokens_tmoe: Tensor | None = None
    files: dict[str, tuple[bytes, bytes]] = field(init=False)  # saved before and after
    plain: Tensor = field(init=False)  # of the saved model, loaded without tmoe
    loaded: Tensor | None = None  # and with experts_implementation="tmoe"
    loaded_ops: int = 0
    # In bf16, on tmoe and on transformers: (result, what fp32 makes of the same routes).
    bf16: tuple[Tensor, Tensor] | None = None
    bf16_eager: tuple[Tensor, Tensor] | None = None


def run_family(family: Family, folder: Path) -> Run:
    run, model = Run(family), family.build()
    with torch.no_grad():
        _in_fp32(run, model, folder)
        if family.routes:
            _in_bf16(run, type(model), folder)
    return run


def _in_fp32(run: Run, model: nn.Module, folder: Path) -> None:
    family = run.family
    if family.on_interface:
        model.set_experts_implementation("grouped_mm")
        run.other = outputs(model)
        model.set_experts_implementation("eager")
    run.eager = outputs(model)
    run.tokens = generate(model)
    model.save_pretrained(folder / "before")
    state = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    with NoOperations():
        run.report = report = tmoe.replace_moe(model)
    run.text = str(report)
    with CountOps() as ops:
        run.tmoe = outputs(model)
    run.routers = ops.calls["router"] + ops.calls["route"]
    run.ops = ops.calls.total()
    run.tokens_tmoe = generate(model)
    model.save_pretrained(folder / "after")
    run.files = {
        path.name: (path.read_bytes(), (folder / "after" / path.name).read_bytes())
        for path in (folder / "before").iterdir()
    }
    assert {p.name for p in (folder / "after").iterdir()} == set(run.files)
    after = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    run.moved = sorted(dict(state.items() ^ after.items()))
    assert list(after) == list(state)
    report.restore()
    run.restored = outputs(model)
    if not family.on_interface:
        run.other = outputs(copy.deepcopy(model).double())

    run.plain = outputs(type(model).from_pretrained(folder / "after").to(DEVICE).eval())
    if family.on_interface:
        tmoe.integrations.transformers.register()
        loaded = type(model).from_pretrained(folder / "after", experts_implementation="tmoe")
        with CountOps() as ops:
            run.loaded = outputs(loaded.to(DEVICE).eval())
        run.loaded_ops = ops.calls.total()


def generate(model: nn.Module) -> Tensor | None:
    """Greedy tokens, or None of a model without a head."""
    if not model.can_generate():
        return None
    model.generation_config.eos_token_id = None
    return model.generate(IDS, **SETTINGS)


# bf16 --------------------------------------------------------------------------------------------


def _in_bf16(run: Run, cls: type[nn.Module], folder: Path) -> None:
    """Run in bf16, and each time again in fp32 with the same weights and the same routes.

    A route that a rounding flips changes an output by more than all other roundings together, on
    transformers' own implementations too. So a run in bf16 is compared with one in fp32 that gets
    its ids and routing weights.
    """
    model = cls.from_pretrained(folder / "after", dtype=torch.bfloat16).to(DEVICE).eval()
    names, record, replay = run.report.replaced, _record_arguments, _replay_arguments
    if run.family.routes == "router":
        names = [name for name, _ in model.named_modules() if name.endswith("router")]
        record, replay = _record_result, _replay_result
    wide = copy.deepcopy(model).float()
    tmoe.replace_moe(wide)

    def both() -> tuple[Tensor, Tensor]:
        routes: dict[str, list[Any]] = {name: [] for name in names}
        with _hooked(model, routes, record):
            result = outputs(model)
        with _hooked(wide, routes, replay):
            return result, outputs(wide)

    if run.family.on_interface:
        model.set_experts_implementation("eager")
    run.bf16_eager = both()
    tmoe.replace_moe(model)
    run.bf16 = both()


@contextmanager
def _hooked(model: nn.Module, routes: dict[str, list[Any]], hook: Callable) -> Iterator[None]:
    """`hook` adds a handle to each named module, which sees that module's list of routes."""
    handles = [hook(model.get_submodule(name), taken) for name, taken in routes.items()]
    yield
    for handle in handles:
        handle.remove()


def _record_arguments(experts: nn.Module, routes: list[Any]) -> Any:
    return experts.register_forward_pre_hook(lambda module, args: routes.append(args[1:]))


def _replay_arguments(experts: nn.Module, routes: list[Any]) -> Any:
    def replay(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        ids, weights = routes.pop(0)
        return args[0], ids, weights.float()

    return experts.register_forward_pre_hook(replay)


def _record_result(router: nn.Module, routes: list[Any]) -> Any:
    return router.register_forward_hook(lambda module, args, out: routes.append(out))


def _replay_result(router: nn.Module, routes: list[Any]) -> Any:
    def replay(module: nn.Module, args: tuple[Tensor, ...], out: Any) -> Any:
        taken = routes.pop(0)
        if isinstance(taken, Tensor):
            return taken.float()
        return tuple(t.float() if _is_float(t) else t for t in taken)

    return router.register_forward_hook(replay)


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
