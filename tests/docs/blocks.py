"""The pages that people read, and the fenced blocks in them. A new page is picked up by itself."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "notebooks", "kernels", "bench")  # and the pages at the root
SAID = frozenset({"python", "console", "output"})  # what is run, and what that must print
SHOWN = frozenset({"", "text"})  # drawings and formulas: nothing to run

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<text>.*?)^(?P=indent)```$", re.M | re.S
)


@dataclass(frozen=True)
class Block:
    """A fenced block: where it stands, its language, its text without the indent of a list."""

    page: str  # from the root: docs/formats.md
    line: int  # of its first line of text, from 1
    language: str
    text: str
    follows: bool = False  # nothing but empty lines between it and the block before

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """All Markdown files at the root and in `FOLDERS`, as paths from the root."""
    found = [*ROOT.glob("*.md"), *(p for name in FOLDERS for p in (ROOT / name).rglob("*.md"))]
    return sorted(str(path.relative_to(ROOT)) for path in found if ".ipynb_" not in str(path))


def blocks_of(page: str, text: str | None = None) -> list[Block]:
    """The blocks of a page in their order, of the languages that `SAID` and `SHOWN` have."""
    if text is None:
        text = (ROOT / page).read_text(encoding="utf-8")
    blocks, behind = [], 0
    for found in _FENCE.finditer(text):
        follows = bool(blocks) and not text[behind : found.start()].strip()
        line = text.count("\n", 0, found.start("text")) + 1
        language = found["info"].strip()
        block = Block(page, line, language, textwrap.dedent(found["text"]), follows)
        if language not in SAID | SHOWN:
            raise ValueError(
                f"{block.where}: a block of {language!r}; python and console are run, output is "
                "what the block before prints, text and no word are shown"
            )
        blocks.append(block)
        behind = found.end()
    if len(re.findall(r"^ *(```|~~~)", text, re.M)) != 2 * len(blocks):
        raise ValueError(f"{page}: a fence that isn't closed, or is inside of another")
    return blocks


def as_pattern(said: str) -> re.Pattern[str]:
    """What a page says is printed, where … stands for anything."""
    lines = "\n".join(line.rstrip() for line in said.strip().splitlines())
    return re.compile(re.escape(lines).replace("…", ".*"), re.S)


def agrees(said: str, printed: str) -> bool:
    """Whether something printed what the page says."""
    printed = "\n".join(line.rstrip() for line in printed.strip().splitlines())
    return as_pattern(said).fullmatch(printed) is not None
