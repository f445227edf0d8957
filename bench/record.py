"""Record layers on a GPU within a time limit: `python -m bench.record OUT [--plans ...]`.

Writes OUT/<plan>.json for each plan, after every layer, so that what is measured stays. A plan that
the time limit ends is continued with another call's file: `tmoe bench report` takes several.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

from tmoe.bench.run import Results, Selection, measure
from tmoe.bench.shapes import ALL_TOKENS, GPU_SHAPES, GPU_TOKENS, SHAPES
from tmoe.formats import SCHEMES
from tmoe.shapes import MoEShape

SECONDS = 450
OTHERS = ("qwen3-235b-a22b", "glm-4.5", "gpt-oss-20b", "kimi-k2", "deepseek-v3", "llama4-maverick")
SKEWED = ("qwen3-30b-a3b", "deepseek-v3-ep8", "mixtral-8x7b", "gpt-oss-120b", "deepseek-v3-tp8")
ROUTES = ("balanced", "random", "zipf", "one_expert")
BESIDE = ("triton", "triton_kernels", "vllm")
FP8 = ("fp8_tensor", "fp8_channel", "fp8_block")
BESIDE_FP8 = ("triton", "vllm", "vllm_cutlass", "deepgemm")


def _shapes(*names: str) -> tuple[MoEShape, ...]:
    return tuple(SHAPES[name] for name in names)


# Name -> what it measures. The first two are what runs by default.
PLANS = {
    "shapes": Selection(_shapes(*OTHERS), GPU_TOKENS, ("bf16",), ("random",), ("triton",)),
    "routings": Selection(_shapes(*SKEWED), (16, 1024, 8192), ("bf16",), ROUTES, ("triton",)),
    "tokens": Selection(
        _shapes("qwen3-30b-a3b", "deepseek-v3-tp8"), ALL_TOKENS, ("bf16",), ("random",), ("triton",)
    ),
    "layer": Selection(GPU_SHAPES, GPU_TOKENS, ("bf16",), ("random",), ("triton",)),
    "beside": Selection(GPU_SHAPES, GPU_TOKENS, ("bf16",), ("random",), BESIDE),
    "beside_fp8": Selection(GPU_SHAPES, GPU_TOKENS, FP8, ("random",), BESIDE_FP8),
    "quantized": Selection(GPU_SHAPES, GPU_TOKENS, tuple(SCHEMES), ("random",), ("triton",)),
}


def record(
    name: str, plan: Selection, out: Path, stop_at: float, commit: str | None = None
) -> bool:
    """Measure a plan and write its file; whether it came to its end."""
    gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
    given = ["OUT" if argument == str(out) else argument for argument in sys.argv[1:]]
    command = " ".join(["python", "-m", "bench.record", *given])
    done, measured, cell = 0, 0, ""

    def show(text: str) -> None:
        nonlocal cell
        cell = text

    for found in measure(plan, torch.device(device), dtype, command, show):
        found.machine["commit"] = commit or found.machine["commit"]
        _write(found, out / f"{name}.json")
        if done == len(plan):  # the clock was read again, for the end
            return True
        done += 1
        what = found.failed.get(cell, "skipped")
        if len(found.benchmarks) > measured:
            info = found.benchmarks[-1]["extra_info"]
            what = f"{info['us']:.1f} µs, {info['percent_of_floor']:.0f} % of the floor"
        measured = len(found.benchmarks)
        print(f"{name} {done}/{len(plan)} {cell}: {what}", flush=True)
        all_measured = done % len(plan.backends) == 0  # of those that are timed in turn
        if all_measured and done < len(plan) and time.monotonic() > stop_at:
            print(f"{name}: out of time", flush=True)
            break
    return False


def _write(found: Results, path: Path) -> None:
    path.write_text(json.dumps(found.as_json(), indent=1) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.record", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=["shapes", "routings"])
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all plans together")
    parser.add_argument("--commit", help="written down where the machine has no git")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    stop_at = time.monotonic() + options.seconds
    ended = [
        record(name, PLANS[name], options.out, stop_at, options.commit) for name in options.plans
    ]
    sys.exit(0 if all(ended) else 1)


if __name__ == "__main__":
    main()
