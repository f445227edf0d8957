"""One decode step of a model of transformers: `python -m bench.decode_step [--out FILE]`.

Qwen3-30B-A3B's layers with random weights, one token for each of T sequences and no cache: on
transformers' own experts, with `experts_implementation="tmoe"`, and after `tmoe.replace_moe`. Once
as Python calls it, where at few tokens the host is what takes the time, and once as a CUDA graph.
Needs a GPU and transformers.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import tmoe
from bench.script import command_of, write_record
from tmoe.demo.timing import median_ms

WAYS = ("grouped_mm", "batched_mm", "tmoe", "replace_moe")
EAGER_STEPS, TURNS = 12, 5


def build(layers: int, device: torch.device) -> nn.Module:
    config = Qwen3MoeConfig(
        num_hidden_layers=layers, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True,
        hidden_size=2048, moe_intermediate_size=768, intermediate_size=6144, vocab_size=1024,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, tie_word_embeddings=False,
    )  # fmt: skip
    with device:
        model = Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16)
    return model.eval().requires_grad_(False)


@contextmanager
def on(model: nn.Module, way: str) -> Iterator[None]:
    """The model's experts run that way."""
    if way != "replace_moe":
        model.set_experts_implementation(way)
        yield
        return
    report = tmoe.replace_moe(model)
    yield
    report.restore()


def eager_ms(step: Callable[[], object]) -> list[float]:
    """Of steps that the host waits for."""
    found = []
    for _ in range(EAGER_STEPS + 3):  # three to warm up
        torch.cuda.synchronize()
        started = time.perf_counter()
        step()
        torch.cuda.synchronize()
        found.append(1e3 * (time.perf_counter() - started))
    return found[3:]


@torch.no_grad()
def measure(layers: int, counts: list[int]) -> list[dict[str, Any]]:
    """A row for each number of tokens and way to run the experts, which take turns: what the host
    takes varies from second to second."""
    device = torch.device("cuda")
    model, rows = build(layers, device), []
    tmoe.integrations.transformers.register()
    for count in counts:
        tokens = torch.arange(count, device=device)[:, None]
        # Given, so that transformers doesn't look at the tokens to find out what to mask.
        mask = torch.zeros(count, 1, 1, 1, dtype=torch.bfloat16, device=device)

        def step(tokens: torch.Tensor = tokens, mask: torch.Tensor = mask) -> object:
            return model(input_ids=tokens, attention_mask=mask, use_cache=False)

        eager: dict[str, list[float]] = {way: [] for way in WAYS}
        for way in WAYS * TURNS:
            with on(model, way):
                eager[way] += eager_ms(step)
        for way in WAYS:
            with on(model, way):
                graph_ms = median_ms([step], device)
            row = {"tokens": count, "experts": way, "eager_ms": median(eager[way])}
            rows.append(row | {"graph_ms": graph_ms})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.decode_step", description=__doc__)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--tokens", default="1,16")
    parser.add_argument("--out", type=Path, help="write JSON here too")
    options = parser.parse_args()
    rows = measure(options.layers, [int(text) for text in options.tokens.split(",")])
    for row in rows:
        print(
            "T={tokens:<4} {experts:12} eager {eager_ms:6.2f} ms   graph {graph_ms:6.3f} ms".format(
                **row
            )
        )
    if options.out is not None:
        command = command_of("python -m bench.decode_step", options.out)
        write_record(options.out, torch.device("cuda"), command, layers=options.layers, rows=rows)


if __name__ == "__main__":
    main()
