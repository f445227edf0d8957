"""Text that every machine has: the standard library's source files, split by a fixed hash.

A file is held out when the SHA-256 of its path (relative to the library, with "/") says so. The
split is the same on every machine, and a file keeps its side from one Python version to the next.
The text itself differs a little between versions, so a number of bits per byte belongs to the
Python version that it was measured on.

The evaluation is fixed: held-out files in the order of their hash, joined, cut into windows of 512
bytes that do not overlap. In each window every byte but the first is predicted from those before.
"""

from __future__ import annotations

import hashlib
import math
import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

WINDOW = 512
HELD_OUT_BYTES = 256 * 1024  # the cap of the full evaluation

# Generated tables (codecs, help topics, build settings) are not source text that anyone wrote.
_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"}
# Many distributions leave the tests out, so they may be learnt from but never decide a score.
_TESTS = {"test", "tests", "idle_test"}


def stdlib_dir() -> Path:
    """The folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def source_files(root: Path) -> list[str]:
    """Paths of the .py files under `root`, relative to it, in the order of their hash."""
    paths = (path.relative_to(root) for path in root.rglob("*.py"))
    kept = (p.as_posix() for p in paths if not _SKIPPED.intersection(p.parts))
    return sorted((p for p in kept if not p.startswith("_sysconfigdata")), key=_digest)


def is_held_out(path: str) -> bool:
    """Whether the file at `path`, relative to the library, is kept from training: 1 in 20 is."""
    return int(_digest(path)[:8], 16) % 20 == 0 and not _TESTS.intersection(path.split("/"))


def read_text(root: Path, *, held_out: bool) -> bytes:
    """All bytes of one side of the split, file after file."""
    files = [p for p in source_files(root) if is_held_out(p) == held_out]
    return b"\n".join((root / p).read_bytes() for p in files)


def held_out_windows(root: Path, max_bytes: int = HELD_OUT_BYTES) -> Tensor:
    """(N, 512) uint8 windows of held-out text; N = max_bytes // 512, or what there is."""
    text = read_text(root, held_out=True)[:max_bytes]
    count = len(text) // WINDOW
    return as_bytes(text[: count * WINDOW]).view(count, WINDOW)


def as_bytes(text: bytes) -> Tensor:
    """(len(text),) uint8, a copy."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


@torch.no_grad()
def bits_per_byte(model: torch.nn.Module, windows: Tensor, batch: int = 32) -> float:
    """Mean bits that `model`, a causal language model over bytes, needs per byte of `windows`."""
    device = next(model.parameters()).device
    nats = torch.zeros((), dtype=torch.float64, device=device)
    for chunk in windows.split(batch):
        ids = chunk.to(device).long()
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        nats += losses.double().sum()
    return nats.item() / math.log(2) / windows[:, 1:].numel()


def _digest(path: str) -> str:
    return hashlib.sha256(path.encode()).hexdigest()
