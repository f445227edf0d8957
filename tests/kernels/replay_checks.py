"""What replays launch; `test_replay.py` runs this: `python -m tests.kernels.replay_checks`.

Prints JSON: the name of each check, here and in `no_replay_checks.py`, and "" or what went wrong.
"""

from __future__ import annotations

import json
import sys
import traceback

import torch
from torch import Tensor

import tmoe
from tests.kernels import no_replay_checks, off_device
from tests.kernels.replaying import (
    BF16,
    Case,
    E,
    H,
    I,
    adapted,
    check_replay,
    experts,
    moved,
    tensors,
)
from tmoe.formats import SCHEMES
from tmoe.ops import router

ROUTING = tmoe.Routing(E, 2, "Renormalize")


def check_sizes():
    """1 and multiples of 16 are what Triton compiles specially; and no call's numbers are another
    call's."""
    for dtype in (BF16, torch.float16, torch.float32):
        for T in (1, 15, 16, 17, 33, 600):
            check_replay(lambda T=T, dtype=dtype: experts(T, dtype))


def check_alignment():
    """Of a tensor after another was recorded that differs in nothing else, and back again."""
    for T in (1, 17):
        for name in tensors(1):
            for elements in (0, 1, 2, 8, 0):
                change = {name: lambda x, n=elements: moved(x, n)}
                check_replay(lambda T=T, change=change: experts(T, change=change))


def check_layouts():
    transposed = {
        name: lambda w: w.transpose(1, 2).contiguous().transpose(1, 2)
        for name in ("gate_up_proj", "down_proj")
    }
    wide = {"x": lambda x: torch.cat([x, x], 1)[:, :H]}
    narrow = {"topk_ids": lambda x: x.long(), "topk_weights": lambda w: w.bfloat16()}
    in_columns = {"topk_ids": lambda ids: ids.T.contiguous().T}
    for change in (transposed, wide, narrow, in_columns):
        check_replay(lambda change=change: experts(9, change=change))


def check_keywords():
    for keywords in (
        {"activation": "geglu"},
        {"activation": tmoe.Activation.swiglu(3.0)},
        {"activation": tmoe.Activation.swiglu(4.0)},
        {"activation": "swiglu_oai", "interleaved": True},
        {"weight_on_input": True},
        {"first_expert": 3, "num_experts": 64},
        {"first_expert": 3, "num_experts": 64, "out_dtype": torch.float32},
        {"gate_up_bias": torch.randn(E, 2 * I).to(BF16), "down_bias": torch.randn(E, H).to(BF16)},
    ):

        def case(keywords=keywords) -> Case:
            call, inputs = experts(5, **keywords)
            return call, inputs + [x for x in keywords.values() if isinstance(x, Tensor)]

        check_replay(case)


def check_quantised():
    """Tuples of pointers, scales, and the Gluon kernel among them."""
    for name, scheme in SCHEMES.items():
        for T in (1, 260):
            form = scheme.weights[0]

            def case(name=name, form=form, T=T) -> Case:
                given = tensors(T)
                for arg in ("gate_up_proj", "down_proj"):
                    given[arg] = tmoe.quantize(
                        given[arg], form.format.name, block_shape=form.block_shape
                    )
                plain = [
                    part
                    for x in given.values()
                    for part in (x.parts() if isinstance(x, tmoe.QuantizedTensor) else [x])
                ]
                return lambda: tmoe.fused_experts(**given, scheme=name), plain

            check_replay(case)


def check_adapters():
    for T in (1, 17):
        check_replay(lambda T=T: adapted(T))


def check_routers_and_gemm():
    def route(T: int, **keywords) -> Case:
        logits = torch.randn(T, E)
        return lambda: tmoe.route(logits, ROUTING, **keywords), [logits]

    def of_input(T: int, weight_dtype: torch.dtype) -> Case:
        x, weight = torch.randn(T, H).to(BF16), torch.randn(E, H).to(weight_dtype)
        return lambda: router(x, weight, ROUTING), [x, weight]

    def gemm(S: int) -> Case:
        a, b = torch.randn(S, H).to(BF16), torch.randn(E, I, H).to(BF16)
        offsets = torch.zeros(E + 1, dtype=torch.int32)
        return lambda: tmoe.grouped_gemm(a, b, offsets), [a, b, offsets]

    for T in (1, 16, 17):
        check_replay(lambda T=T: route(T))
        check_replay(lambda T=T: route(T, return_probs=True, weights_dtype=BF16))
    probs, counts = (route(1, **{name: True})[0] for name in ("return_probs", "return_counts"))
    assert probs()[2].dtype == torch.float32 and counts()[2].dtype == torch.int32
    for T in (1, 16, 17):
        check_replay(lambda T=T: of_input(T, BF16))
        check_replay(lambda T=T: of_input(T, torch.float32))
        check_replay(lambda T=T: gemm(T))


def check_behind_the_operation():
    """Where the public function makes other tensors of its own, or writes to the caller's."""

    def with_more_dimensions() -> Case:
        given = tensors(6)
        given["x"] = given["x"].view(2, 3, H)
        return lambda: tmoe.fused_experts(**given), list(given.values())

    def with_out() -> Case:
        given, out = tensors(6), torch.empty(6, H).to(BF16)
        return lambda: tmoe.fused_experts(**given, out=out), [*given.values(), out]

    check_replay(with_more_dimensions)
    check_replay(with_out)


CHECKS = {
    name: check
    for name, check in {**vars(), **vars(no_replay_checks)}.items()
    if name.startswith("check_") and name != "check_replay"
}


def main() -> None:
    off_device.pretend()
    torch.set_num_threads(1)
    found = {}
    for name, check in CHECKS.items():
        try:
            check()
        except Exception:  # noqa: BLE001  whatever it is, the test shows it
            found[name] = traceback.format_exc()
        else:
            found[name] = ""
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    with torch.no_grad():
        main()
