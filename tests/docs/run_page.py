"""Run all of a page: its Python in one namespace, its commands, in the order in which they stand.

`python -m tests.docs.run_page PAGE ...` runs the Python of pages in a process that has imported
nothing that imports Triton.
"""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.docs.blocks import Block, agrees, blocks_of
from tests.docs.exceptions import NOT_RUN, REPLACED
from tests.docs.run_python import run_block


@dataclass
class Run:
    """What a page did."""

    page: str
    folder: Path  # the working directory
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "__main__"})
    printed: str = ""
    blocks: int = 0


def runs_as_python(block: Block) -> bool:
    first = block.text.partition("\n")[0]
    return block.language == "python" and (block.page, first) not in NOT_RUN


def run_page(page: str, folder: Path, hub: Path | None, languages: tuple[str, ...]) -> Run:
    """Run the blocks of these languages, in `folder`, with the models of `hub` at hand.

    Raises:
        AssertionError: a block prints something else than the page says.
    """
    here: Any = contextlib.nullcontext()
    if hub is not None:
        from tests.docs.tiny_hub import at_work

        here = at_work(hub, folder)
    run, last = Run(page, folder), ""
    with here:
        for block in blocks_of(page):
            if block.language == "python" and "python" in languages and runs_as_python(block):
                last = run_block(block, run.names, REPLACED.get(page, {}))
            elif block.language == "console" and "console" in languages:
                from tests.docs.run_console import run_console

                last = run_console(block)
            else:
                said = block.language == "output" and block.follows and last
                assert not said or agrees(block.text, last), f"{block.where}: it prints\n{last}"
                last = ""
                continue
            run.printed += last
            run.blocks += 1
    return run


def run_on_a_rank(rank: int, page: str, folder: Path, hub: Path) -> str:
    """The Python of a page on one of two ranks, as torchrun starts it; returns what it printed."""
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost"}
    os.environ.update({name: str(value) for name, value in where.items()})
    torch.manual_seed(rank)  # a process that torchrun starts has other random numbers than the rest
    return run_page(page, folder / str(rank), hub, ("python",)).printed


if __name__ == "__main__":
    for name in sys.argv[1:]:
        run_page(name, Path.cwd(), None, ("python",))
        print("ran", name)
