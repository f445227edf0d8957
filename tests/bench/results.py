"""Made-up results, as files of them look."""

from __future__ import annotations

import json

H200 = "NVIDIA H200"


def layer(
    shape, tokens, backend, us, *, floor_us=10.0, device=H200, scheme=None, spread=0.0, routing=None
):
    """One benchmark; `spread` of its rounds, relative. Files of before had no routing."""
    labels = {"scheme": scheme} if scheme else {}
    labels |= {"routing": routing} if routing else {}
    shown = [label for label in labels.values() if label != "random"]
    operation = "quantized_layer" if scheme else "layer"
    seconds = 1e-6 * us
    return {
        "group": " ".join([operation, *shown, shape, f"T={tokens}"]),
        "extra_info": {
            "operation": operation,
            **labels,
            **{"shape": shape, "tokens": tokens, "backend": backend, "us": us},
            **{"floor_us": floor_us, "device": device, "dtype": "bfloat16"},
            **{"tflops": 100.0, "gbs": 1000.0},
        },
        "stats": {
            "min": seconds * (1 - spread / 2),
            "max": seconds * (1 + spread / 2),
            "median": seconds,
            "rounds": 10,
        },
    }


def results(*benchmarks, device=H200, clocks=(800.0, 799.0), **more):
    """A whole file."""
    machine = {"device": device, "driver": "580.1", "versions": {"torch": "2.11.0", "tmoe": "0.1"}}
    machine |= {"commit": "abc123", "kernels_hash": "f00d"}
    machine |= {"matmul_tflops_at_start": clocks[0], "matmul_tflops_at_end": clocks[1]}
    stamp = {"datetime": "2026-11-30T12:00:00+00:00", "command": "made up"}
    return {"machine_info": machine, **stamp, "benchmarks": [*benchmarks], **more}


def write(path, found):
    path.write_text(json.dumps(found))
    return str(path)
