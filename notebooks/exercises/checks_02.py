"""Checks of notebook 2."""

from __future__ import annotations

import torch

from .judging import Wrong, ask, compare, expect, stopped


def programs_needed(answer):
    for n, block in ((10, 4), (8, 4), (1, 128), (1000, 64)):
        mistakes = {
            "The last, shorter block needs a program too: round up.": n // block,
            "That is one too many where n is a multiple of the block.": n // block + 1,
        }
        compare(ask(answer, n, block), -(-n // block), f"n={n}, block={block}", mistakes)


def places_of(answer):
    for pid, block, n in ((0, 4, 10), (1, 4, 10), (2, 4, 10), (0, 16, 3)):
        start = pid * block
        wanted = list(range(start, min(start + block, n)))
        mistakes = {
            "Places from n on don't exist: leave them out.": list(range(start, start + block)),
            "Program 1 starts at `block`, program 2 at 2 · block.": list(range(min(block, n))),
        }
        compare(ask(answer, pid, block, n), wanted, f"pid={pid}, block={block}, n={n}", mistakes)


def scale_kernel(answer):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    n, block, guard = 10, 4, -1.0
    x = torch.arange(1.0, 33.0, device=device)
    out = torch.full((32,), guard, device=device)
    expect(hasattr(answer, "fn"), "it isn't a kernel: keep the line @triton.jit above it.")
    try:
        answer[(-(-n // block),)](out, x, n, 3.0, BLOCK=block)
    except Exception as error:  # whatever may be wrong with the kernel
        raise Wrong(stopped(answer, error)) from error
    got, wanted = out.tolist(), [3.0 * (i + 1) for i in range(n)]
    if got == [guard] * 32:
        raise Wrong("it stores nothing yet. Put your code in place of `pass`, with a tl.store.")
    untouched = [i for i in range(n) if got[i] == guard]
    expect(
        not untouched,
        f"places {untouched} weren't written. Each program has its own block: add "
        "tl.program_id(0) * BLOCK to tl.arange(0, BLOCK).",
    )
    beyond = [i for i in range(n, 32) if got[i] != guard]
    expect(
        not beyond,
        f"it wrote to places {beyond}, behind the end at {n}. Give tl.load and tl.store a mask.",
    )
    compare(got[:n], wanted, "the numbers 1 to 10 and factor 3")
