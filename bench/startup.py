"""How long a layer's first calls take: `python -m bench.startup [--shape NAME] [--out FILE]`.

Three fresh processes, one after the other: one with an empty Triton cache, where everything that
the layer needs for 1 to 16384 tokens is compiled, and two with the cache that it left. Wanted on a
GPU: all of it compiled in less than 60 s, and a first call with a warm cache in less than 2 s. This
file imports tmoe inside functions only, since importing it is part of what is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MOST_COLD_SECONDS, MOST_WARM_SECONDS = 60, 2


def calls(shape_name: str, tokens: list[int]) -> dict[str, Any]:
    """Seconds of `import tmoe`, and of the first call at each number of tokens, in this process."""
    import torch

    started = time.perf_counter()
    import tmoe

    imported = time.perf_counter() - started
    from tmoe.bench.shapes import SHAPES, routing_of

    gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
    shape = SHAPES[shape_name]
    layer = tmoe.MoE(
        shape.hidden, shape.intermediate, routing_of(shape), device=device, dtype=dtype
    ).requires_grad_(False)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    seconds = {}
    for count in tokens:
        x = torch.randn(count, shape.hidden, device=device, dtype=dtype)
        _wait(gpu)
        started = time.perf_counter()
        y = layer(x)
        _wait(gpu)
        seconds[str(count)] = time.perf_counter() - started
        assert y.isfinite().all()
    return {"import_s": imported, "first_call_s": seconds}


def _wait(gpu: bool) -> None:
    import torch

    if gpu:
        torch.cuda.synchronize()


def in_a_fresh_process(shape_name: str, tokens: list[int], cache: Path) -> dict[str, Any]:
    """`calls` there, with this folder as Triton's cache."""
    command = [sys.executable, "-m", "bench.startup", "--here", "--shape", shape_name]
    command += ["--tokens", ",".join(map(str, tokens))]
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(shape_name: str, tokens: list[int]) -> dict[str, Any]:
    """Cold, then warm twice, of which the faster counts: the first fills the disk's cache too."""
    with tempfile.TemporaryDirectory() as folder:
        cold = in_a_fresh_process(shape_name, tokens, Path(folder))
        warm = [in_a_fresh_process(shape_name, tokens, Path(folder)) for _ in range(2)]
    first = str(tokens[0])
    return {
        "shape": shape_name,
        "cold_all_s": sum(cold["first_call_s"].values()),
        "cold_first_call_s": cold["first_call_s"][first],
        "warm_all_s": min(sum(run["first_call_s"].values()) for run in warm),
        "warm_first_call_s": min(run["first_call_s"][first] for run in warm),
        "import_s": min(run["import_s"] for run in warm),
        "runs": {"cold": cold, "warm": warm},
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.startup", description=__doc__)
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--tokens", default=",".join(str(2**power) for power in range(15)))
    parser.add_argument("--out", type=Path, help="write JSON here too")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    tokens = [int(text) for text in options.tokens.split(",")]
    if options.here:
        print(json.dumps(calls(options.shape, tokens)))
        return
    import torch

    from tmoe.bench.machine import machine_info
    from tmoe.bench.shapes import SHAPES

    if options.shape not in SHAPES:
        parser.error(f"--shape: {options.shape} is none of {', '.join(SHAPES)}")

    found = measure(options.shape, tokens)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    command = " ".join(["python", "-m", "bench.startup", *sys.argv[1:]])
    result = {"machine_info": machine_info(device), "command": command, **found}
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for name, most in (
        ("import_s", None),
        ("cold_first_call_s", None),
        ("cold_all_s", MOST_COLD_SECONDS),
        ("warm_first_call_s", MOST_WARM_SECONDS),
        ("warm_all_s", None),
    ):
        wanted = "" if most is None else f"   wanted: below {most}"
        print(f"{name:18} {found[name]:8.2f}{wanted}")


if __name__ == "__main__":
    main()
