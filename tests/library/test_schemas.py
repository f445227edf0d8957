"""The version in the ops' names, which keeps torch.compile from another tmoe's code on disk."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

from tests.library.schemas import RECORD, must_bump, schemas
from tmoe.library import define


def test_schemas_are_those_of_their_version():
    """CG11: code compiled before must not be found once it would call an op of today wrongly."""
    recorded = RECORD.read_text().splitlines()
    assert not must_bump(recorded, schemas()), "bump OVERLOAD in tmoe/library/define.py"
    assert schemas() == recorded, "python -m tests.library.schemas records them"


@pytest.mark.parametrize(
    "now, bump",
    [
        ("tmoe::f.v1(Tensor x) -> Tensor", False),
        ("tmoe::f.v1(Tensor x, int n) -> Tensor", True),
        ("tmoe::f.v2(Tensor x, int n) -> Tensor", False),
        ("tmoe::g.v1(Tensor x) -> Tensor", True),
    ],
)
def test_a_changed_schema_asks_for_another_version(now, bump):
    assert must_bump(["tmoe::f.v1(Tensor x) -> Tensor"], [now]) is bump


def test_every_op_has_one_version():
    """A profiler shows `tmoe::fused_experts`, and torch.ops.tmoe.fused_experts can be called."""
    names = {schema.partition("(")[0].removeprefix("tmoe::") for schema in schemas()}
    assert {name.partition(".")[2] for name in names} == {define.OVERLOAD}
    for name in names:
        packet = getattr(torch.ops.tmoe, name.partition(".")[0])
        assert packet.overloads() == [define.OVERLOAD]


def _compile_and_run(monkeypatch, version: str, with_factor: bool) -> torch.Tensor:
    """Of an op of this version of tmoe, whose backward takes another argument, the gradient."""
    torch._dynamo.reset()
    counters.clear()
    library = torch.library.Library("tmoe", "FRAGMENT")
    monkeypatch.setattr(define, "_LIBRARY", library)
    monkeypatch.setattr(define, "OVERLOAD", version)
    more, tail = ((2,), ", int factor") if with_factor else ((), "")

    def backward(ctx, grad):
        return define.operator("example_backward")(grad, *more)

    def double(x, *more):
        return x * 2

    like = torch.empty_like
    define.implement("example(Tensor x) -> Tensor", double, lambda x: like(x))
    define.implement(f"example_backward(Tensor x{tail}) -> Tensor", double, lambda x, *_: like(x))
    define.implement_autograd("example", backward, lambda ctx, inputs, output: None)
    op, x = define.operator("example"), torch.ones(3, requires_grad=True)
    try:
        torch.compile(lambda x: op(x), fullgraph=True)(x).sum().backward()
    finally:
        library._destroy()
    return x.grad


def test_compiled_code_of_another_version_is_not_found(monkeypatch):
    with fresh_cache():
        for version, with_factor in (("before", False), ("after", True)):
            gradient = _compile_and_run(monkeypatch, version, with_factor)
            assert torch.equal(gradient, torch.full((3,), 2.0))
            assert counters["aot_autograd"]["autograd_cache_miss"] == 1
