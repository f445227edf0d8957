"""Stands in for the Hub, and for folders with its models: tiny random models under their names.

Nothing of transformers is replaced: it finds these models in its cache, and it is told that there
is no network. They are also in the folder where a page runs, under the last part of their names.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

from huggingface_hub import constants
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.checkpoints.tiny_models import qwen3_moe
from tests.docs.blocks import ROOT
from tmoe.checkpoints import quantize_checkpoint

QWEN = "Qwen/Qwen3-30B-A3B"  # four experts of 128 in each of two layers
QWEN_FP8 = "Qwen/Qwen3-30B-A3B-FP8"  # the same model, experts in FP8 blocks
NAMES = (QWEN, QWEN_FP8)
COMMIT = "0" * 40


def _tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=words)


def snapshot(hub: Path, name: str) -> Path:
    return hub / f"models--{name.replace('/', '--')}" / "snapshots" / COMMIT


def fill(hub: Path) -> None:
    """Write the models in the layout of the Hub's cache."""
    for name in NAMES:
        refs = snapshot(hub, name).parents[1] / "refs"
        refs.mkdir(parents=True)
        (refs / "main").write_text(COMMIT)
    plain = snapshot(hub, QWEN)
    qwen3_moe(vocab_size=10_000).save_pretrained(plain)
    _tokenizer().save_pretrained(plain)
    quantize_checkpoint(plain, snapshot(hub, QWEN_FP8), "fp8_block")


@contextlib.contextmanager
def at_work(hub: Path, folder: Path) -> Iterator[None]:
    """Inside, the working directory is `folder`, with the models, the benchmarks' records and
    nothing else in it, and the Hub is `hub`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        (folder / name.rpartition("/")[2]).symlink_to(snapshot(hub, name))
    (folder / "bench").symlink_to(ROOT / "bench")
    before = Path.cwd()
    os.chdir(folder)
    try:
        with (
            patch.object(constants, "HF_HUB_CACHE", str(hub)),
            patch.object(constants, "HF_HUB_OFFLINE", True),
        ):
            yield
    finally:
        os.chdir(before)
