"""What the dispatcher costs a call, on the CPU's clock: `python -m bench.dispatch_overhead`.

A call is described and its backend looked up. Device and sizes don't matter. "held": some backend
holds a layout of the weights, which then have to be recognised, as they were when it was made.
"""

from __future__ import annotations

import math
import timeit
from collections.abc import Iterator

import torch
from rich.console import Console
from rich.table import Table

import tmoe
from tmoe.dispatch import prepared
from tmoe.library.experts import experts_facts, plain_weights
from tmoe.library.operation import _choose
from tmoe.library.quantized_experts import quantized_facts, quantized_weights
from tmoe.options import current

E, K, H, I, T = 8, 2, 64, 32, 4
SPEC = ("swiglu", 1.0, math.inf, False, False, 0, E, False)


def overheads(calls: int = 20000) -> Iterator[tuple[str, bool, float]]:
    """(scheme, held, microseconds), the best of five times `calls`."""
    weights = torch.randn(E, 2 * I, H), torch.randn(E, H, I)
    x, topk = torch.randn(T, H), (torch.rand(T, K), torch.zeros(T, K, dtype=torch.int32))
    parts = [tmoe.quantize(w, "nvfp4").parts() for w in weights]
    plain = (x, *weights, *topk, None, None, *SPEC)
    fp4 = (x, *parts, *topk, None, None, None, None, "nvfp4_a16", "nvfp4", 0, *SPEC)
    for scheme, arguments, facts, weights_of in (
        ("bf16", plain, experts_facts, plain_weights),
        ("nvfp4_a16", fp4, quantized_facts, quantized_weights),
    ):
        for held in (False, True):
            if held:
                prepared.hold("flashinfer_trtllm", None, weights_of(*arguments), None, [])

            def decide(facts=facts, arguments=arguments):
                return _choose(x.device, current(), facts(*arguments), False)

            decide()
            assert facts(*arguments).prepared == ("flashinfer_trtllm",) * held
            yield scheme, held, 1e6 * min(timeit.repeat(decide, number=calls, repeat=5)) / calls
        tmoe.release()


def main() -> None:
    table = Table("scheme", "weights", "µs per call")
    for scheme, held, us in overheads():
        table.add_row(scheme, "held" if held else "", f"{us:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
