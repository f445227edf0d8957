"""`tmoe bench` from an installed wheel, where there is no checkout and no folder bench/."""

from __future__ import annotations

import json


def test_from_a_wheel(environments, tmp_path):
    wheel, run = environments["wheel"], ("-m", "tmoe", "bench")
    shown = wheel.run(*run, "E=4,K=2,H=64,I=32", "--tokens", "1", "--out", "out", cwd=tmp_path)
    assert "routed experts, float32" in shown
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"results.json", "report.html", "roofline.png", "E=4,K=2,H=64,I=32.png"}
    machine = json.loads((tmp_path / "out" / "results.json").read_text())["machine_info"]
    assert machine["commit"] is None and machine["kernels_hash"]
    shown = wheel.run(*run, "--predict", "mixtral-8x7b", "--tokens", "16", cwd=tmp_path)
    assert "mixtral-8x7b, bf16, random routing" in shown
