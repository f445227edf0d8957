"""The benchmarks: they run on any machine, what they write down, the floor, the comparison."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from bench.roofline import ROOFS, Roof, Work, experts_work
from bench.shapes import GPU_SHAPES, SHAPES, TINY, routing_of

from bench import compare
from bench.dispatch_overhead import overheads
from tmoe.formats import SCHEMES

ROOT = Path(__file__).parents[1]
H200 = ROOFS["NVIDIA H200", torch.bfloat16]


def run_benchmarks(*arguments):
    # A worker of xdist would tell pytest-benchmark through PYTEST_XDIST_WORKER not to measure.
    left_out = ("TRITON_INTERPRET", "PYTEST_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(left_out)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What pytest-benchmark writes for every benchmark, at one tiny shape."""
    path = tmp_path_factory.mktemp("bench") / "results.json"
    done = run_benchmarks("bench", "--shapes=tiny", "--tokens=1", f"--benchmark-json={path}")
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(path.read_text())


def test_every_operation_is_measured_and_written_down(results):
    infos = [bench["extra_info"] for bench in results["benchmarks"]]
    operations = {path.stem.removeprefix("bench_") for path in (ROOT / "bench").glob("bench_*.py")}
    assert {info["operation"] for info in infos} == operations and len(operations) == 9
    for bench, info in zip(results["benchmarks"], infos, strict=True):
        assert (info["shape"], info["tokens"]) == ("tiny", 1)
        assert {"backend", "dtype", "device", "roof"} <= info.keys()
        assert {"torch", "python", "tmoe"} <= info["versions"].keys()
        assert info["us"] == pytest.approx(1e6 * bench["stats"]["median"]) and info["us"] > 0
        assert info["percent_of_floor"] == pytest.approx(100 * info["floor_us"] / info["us"])
        assert min(info["floor_us"], info["gbs"]) > 0 and info["tflops"] >= 0
        assert info["operation"] in bench["group"]
    machine = results["machine_info"]
    assert machine["matmul_tflops_at_start"] > 0 < machine["matmul_tflops_at_end"]


def test_a_wrong_result_fails_and_is_not_timed(tmp_path):
    """A copy of a benchmark whose layer makes every routing weight a hundredth larger."""
    source = (ROOT / "bench" / "bench_layer.py").read_text()
    right, wrong = "down_proj, topk_weights,", "down_proj, topk_weights * 1.01,"
    assert source.count(right) == 1
    (tmp_path / "bench_layer.py").write_text(source.replace(right, wrong))
    done = run_benchmarks(
        *("-p", "bench.conftest", "-c", str(ROOT / "pyproject.toml"), f"--rootdir={ROOT}"),
        *(str(tmp_path), "--shapes=tiny", "--tokens=1"),
        f"--benchmark-json={tmp_path / 'results.json'}",
    )
    assert done.returncode == 1 and "largest error" in done.stdout, done.stdout + done.stderr
    assert not (tmp_path / "results.json").exists()


@pytest.mark.parametrize(
    "option, said",
    [
        ("--shapes=mixtral", "mixtral is none of mixtral-8x7b,"),
        ("--tokens=0", "must be numbers from 1 on"),
        ("--tokens=many", "must be numbers from 1 on"),
        ("--backends=cuda", "cuda is none of triton, torch,"),
    ],
)
def test_a_wrong_option_is_refused(option, said):
    done = run_benchmarks("bench/bench_route.py", option)
    assert done.returncode != 0 and said in done.stderr


def test_floor_is_the_larger_of_arithmetic_and_traffic():
    roof = Roof(tflops=100, gbs=1000, source="made up")
    assert Work(flops=2e9, bytes=1e6).floor_us(roof) == pytest.approx(20)  # 2e9 / 100e12 s
    assert Work(flops=2e9, bytes=3e7).floor_us(roof) == pytest.approx(30)  # 3e7 / 1000e9 s


def test_work_of_a_layer_by_hand():
    # Mixtral, 16 tokens, all 8 experts: 8 · 3 · 4096 · 14336 weights, x and y of 16 · 4096; 2 bytes
    work = experts_work(SHAPES["mixtral-8x7b"], 16, 8, 2)
    assert work.bytes == 2 * (1_409_286_144 + 131_072)
    assert work.flops == 2 * 16 * 2 * 176_160_768
    assert work.floor_us(H200) == pytest.approx(648, abs=0.5)
    # 8192 tokens: 5.77 TFLOP decide
    work = experts_work(SHAPES["mixtral-8x7b"], 8192, 8, 2)
    assert work.floor_us(H200) == pytest.approx(7738, abs=0.5)


def test_every_shape_has_a_routing():
    for shape in SHAPES.values():
        assert routing_of(shape).top_k == shape.top_k
    assert TINY not in GPU_SHAPES and len(GPU_SHAPES) == 7


def layer(shape, tokens, backend, us, floor_us=10.0, device="NVIDIA H200"):
    return {
        "extra_info": {
            "operation": "layer",
            **{"shape": shape, "tokens": tokens, "backend": backend, "us": us},
            **{"floor_us": floor_us, "device": device, "dtype": "bfloat16"},
        }
    }


def test_recorded_peers_are_complete():
    counts = (6 * 5 * 3, 2 * (6 * 5 + 6 * 3) + 5 * 5 * 2 + 12 + 5 * 2)
    for path, count in zip(compare.RECORDED, counts, strict=True):
        recorded = json.loads(path.read_text())
        rows = recorded["rows"]
        cells = {(row.get("scheme"), row["shape"], row["tokens"], row["peer"]) for row in rows}
        assert len(cells) == len(rows) == count
        assert {row["shape"] for row in rows} <= SHAPES.keys()
        assert {row["peer"] for row in rows} == recorded["peers"].keys()
        assert {row["scheme"] for row in rows if "scheme" in row} <= SCHEMES.keys()


def test_compare_reads_recorded_and_measured_peers():
    recorded = compare.read_recorded()
    results = {
        "benchmarks": [
            layer("mixtral-8x7b", 1, "triton", 200.0),
            layer("mixtral-8x7b", 1, "vllm", 250.0),  # recorded: 186.4
            layer("mixtral-8x7b", 1, "torch", 1.0),  # ours too, so no peer
            {"extra_info": {"operation": "route"}},
        ]
    }
    (cell,) = compare.read_cells(results, recorded, "triton")
    assert cell.peers == {"vllm": 250.0, "grouped_mm": 383.7, "triton_kernels": 219.9}
    assert cell.best_peer == "triton_kernels" and not cell.loses
    assert cell.speedup == pytest.approx(219.9 / 200)


def test_compare_keeps_schemes_apart():
    """The same shape and tokens with FP8 blocks meet FP8 blocks: FlashInfer's 113 here."""
    mine = layer("mixtral-8x7b", 1, "triton", 100.0)
    mine["extra_info"] |= {"operation": "quantized_layer", "scheme": "fp8_block"}
    results = {"benchmarks": [mine, layer("mixtral-8x7b", 1, "triton", 200.0)]}
    cells = compare.read_cells(results, compare.read_recorded(), "triton")
    assert [cell.scheme for cell in cells] == ["fp8_block", "bfloat16"]
    assert [cell.best_peer for cell in cells] == ["flashinfer", "vllm"]
    assert cells[0].speedup == pytest.approx(113 / 100, abs=0.01)


def test_compare_takes_no_record_of_another_device():
    recorded = compare.read_recorded()
    results = {"benchmarks": [layer("mixtral-8x7b", 1, "triton", 200.0, device="NVIDIA L4")]}
    (cell,) = compare.read_cells(results, recorded, "triton")
    assert cell.peers == {} and cell.speedup is None and not cell.loses


def test_compare_prints_and_plots(results, tmp_path, capsys):
    """One cell that wins by 186.4 / 93.2 = 2 and one that loses by 663.2 / 1326.4 = 0.5."""
    mine = [
        layer("mixtral-8x7b", 1, "triton", 93.2, floor_us=46.6),
        layer("mixtral-8x7b", 16, "triton", 1326.4, floor_us=648.0),
        layer("olmoe", 1, "triton", 60.0),
    ]
    machine = results["machine_info"] | {"device": "NVIDIA H200"}
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"benchmarks": mine, "machine_info": machine}))
    compare.main([str(path), "--plot", str(tmp_path / "plots")])
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "mixtral-8x7b 1 46.6 93.2 50 vllm 186.4 2.00" in lines
    assert "mixtral-8x7b 16 648.0 1326 49 vllm 663.2 0.50 ✗" in lines
    assert "over the best 2.00 0.50 1.00" in lines
    assert "a peer is faster in 1 of 2 cells" in lines
    pictures = sorted(path.name for path in (tmp_path / "plots").iterdir())
    assert pictures == ["mixtral-8x7b.png", "olmoe.png"]


def test_compare_prints_operations(results, tmp_path, capsys):
    """vLLM's 1.8 over 0.9 is 2; a group without a record and another backend are left out."""
    mine = []
    for group, backend in (
        ("route Renormalize mixtral-8x7b T=1", "triton"),
        ("route Renormalize mixtral-8x7b T=64", "torch"),
        ("route Renormalize unknown T=1", "triton"),
    ):
        info = {"backend": backend, "device": "NVIDIA H200", "us": 0.9, "floor_us": 0.09}
        mine.append({"group": group, "extra_info": info})
    machine = results["machine_info"] | {"device": "NVIDIA H200"}
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"benchmarks": mine, "machine_info": machine}))
    compare.main([str(path)])
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "route Renormalize mixtral-8x7b T=1 0.1 0.90 10 1.80 2.00" in lines
    assert not any("T=64" in line or "unknown" in line for line in lines)


def test_recorded_operations_are_groups_that_exist(results):
    """What a benchmark calls its group, with another shape and number of tokens."""
    recorded = json.loads(compare.RECORDED_OPERATIONS.read_text())
    kinds = {row["group"].rsplit(" ", 2)[0] for row in recorded["rows"]}
    assert {kind.split(" ")[0] for kind in kinds} == {"route", "sort", "quantize"}
    measured = {bench["group"].rsplit(" ", 2)[0] for bench in results["benchmarks"]}
    assert {kind for kind in kinds if kind.split(" ")[0] == "sort"} <= measured
    assert "route Renormalize" in kinds & measured


def test_compare_says_when_there_is_nothing_to_show(tmp_path, capsys):
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"benchmarks": [layer("tiny", 1, "torch", 1.0)]}))
    with pytest.raises(SystemExit):
        compare.main([str(path)])
    assert "no layer that the triton backend ran" in capsys.readouterr().err


@pytest.mark.gpu
def test_device_timer_measures_one_call():
    """A round of three copies takes three times as long as one; a call is what counts."""
    from bench.timing import DeviceTimer

    timer = DeviceTimer()
    source = torch.zeros(2**28, device="cuda")
    target = source.clone()
    times = []
    for timer.calls in (1, 3):
        target.copy_(source)
        start = timer()
        for _ in range(timer.calls):
            target.copy_(source)
        times.append(timer() - start)
    assert times[1] == pytest.approx(times[0], rel=0.3)


def test_dispatch_overhead_measures_what_it_says():
    found = [(scheme, held) for scheme, held, us in overheads(calls=10) if us > 0]
    assert found == [(s, h) for s in ("bf16", "nvfp4_a16") for h in (False, True)]
