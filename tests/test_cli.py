"""The ``tmoe`` command: in this process, in a real one, and on crafted machines."""

import json
import os
import re
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from matplotlib.image import imread
from typer.testing import CliRunner

import tmoe
from tests.processes import python_path
from tmoe import doctor
from tmoe.cli import app
from tmoe.command_errors import said_by
from tmoe.dispatch.problem import Machine
from tmoe.dispatch.resolve import NoBackendError

LAYER = ["--experts", "8", "--top-k", "2", "--hidden", "4096", "--intermediate", "14336"]


def invoke(*args):
    return CliRunner().invoke(app, list(args))


def python(*args, path=(), **env):
    """Run Python in a process of its own that finds tmoe and whatever is in `path`."""
    return subprocess.run(
        [sys.executable, *args],
        env={**os.environ, "PYTHONPATH": python_path(*path), **env},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def without(*modules):
    """Source of a program that runs ``tmoe`` as if `modules` were not installed."""
    hide = f"import sys; sys.modules.update(dict.fromkeys({modules!r}))"
    return f"{hide}; from tmoe.cli import app; app()"


def test_module_and_command_are_the_same():
    done = python("-m", "tmoe", "--help")
    assert done.returncode == 0
    for command in ("demo", "doctor", "explain"):
        assert command in done.stdout


def test_help_is_light():
    done = python(
        "-c", "import sys, tmoe.cli; print({'transformers', 'matplotlib'} & {*sys.modules})"
    )
    assert done.stdout.strip() == "set()", done.stderr


def test_demo_runs_and_draws(tmp_path):
    out = tmp_path / "pictures"
    done = invoke(
        "demo", "--bytes", "1024", "--new-bytes", "8", "--out", str(out), "--device", "cpu"
    )
    assert done.exit_code == 0, done.output
    assert "FAIL" not in done.output
    for said in (
        "4 of 4 MoE layers run on tmoe",
        "the same 8 bytes",
        "bit for bit",
        "bits per byte",
    ):
        assert said in " ".join(done.output.split())
    assert "Triton, interpreted, bfloat16" in done.output
    assert imread(out / "experts.png")[..., :3].std() > 0.05


def test_demo_that_finds_a_difference_exits_with_one(monkeypatch):
    from tmoe.demo import run

    monkeypatch.setattr(run, "run_demo", lambda *args, **kwargs: False)
    assert invoke("demo").exit_code == 1


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--device", "tpu", "--device must be cpu"),
        ("--device", "cuda:99", "--device must be cpu"),
        ("--out", __file__, "File exists"),
    ],
)
def test_demo_refuses_what_it_cannot_use(option, value, said):
    """Before the model is loaded."""
    done = invoke("demo", option, value)
    assert done.exit_code == 2 and said in " ".join(done.output.replace("│", "").split())


@pytest.mark.parametrize("command", ["explain", "tune", "quantize", "plan"])
def test_help_wraps_paragraphs_as_a_whole(command, monkeypatch):
    """On a terminal narrower than the lines of a docstring."""
    monkeypatch.setenv("COLUMNS", "72")
    shown = invoke(command, "--help").output
    text = re.split("[╭┌+]", shown.partition("Usage")[2])[0].splitlines()[2:]
    for line, following in pairwise(line.strip() for line in text):
        if line and following:
            assert len(line) + 1 + len(following.split()[0]) > 68, (line, following)


@pytest.mark.parametrize("missing", ["transformers", "matplotlib"])
def test_demo_says_what_to_install(missing, tmp_path):
    done = python("-c", without(missing), "demo", "--bytes", "512", "--out", str(tmp_path))
    assert done.returncode == 2
    assert f"tmoe demo needs {missing}: pip install 'tmoe[demo]'" in done.stderr


def test_doctor_prints_and_dumps():
    shown = invoke("doctor")
    assert shown.exit_code == 0 and "cache folder" in shown.output
    found = json.loads(invoke("doctor", "--json").output)
    assert found["versions"]["torch"] == torch.__version__
    for operation in ("route", "quantize to nvfp4", "grouped_gemm, bf16", "fused_experts, nvfp4"):
        backends = found["operations"][operation]
        assert [backend["name"] for backend in backends if backend["accepted"]]
        assert all(backend["reason"] for backend in backends)


def test_doctor_writes_to_the_folder_it_is_given(tmp_path, monkeypatch):
    monkeypatch.setenv("TMOE_CACHE_DIR", str(tmp_path / "cache"))
    found = doctor.diagnose()
    assert found.cache_dir == str(tmp_path / "cache") and found.cache_problem is None
    assert list((tmp_path / "cache").iterdir()) == []


def test_doctor_on_a_read_only_home_and_a_flashinfer_that_breaks(tmp_path):
    """EN01, EN03"""
    package = tmp_path / "site"
    (package / "flashinfer").mkdir(parents=True)
    (package / "flashinfer" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    info = package / "flashinfer_python-0.6.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: flashinfer-python\nVersion: 0.6.5\n"
    )
    home = tmp_path / "home"
    home.write_text("a file: nothing can be made below it, by root neither")
    env = {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), "TMOE_CACHE_DIR": ""}
    done = python("-m", "tmoe", "doctor", "--json", path=[package], **env)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["versions"]["flashinfer"] == "0.6.5"
    assert any("FlashInfer 0.6.5 is outside" in hint for hint in found["hints"])
    assert found["cache_dir"].startswith(str(home)) and found["cache_problem"] == "Not a directory"


def test_doctor_without_triton_and_transformers():
    done = python("-c", without("triton", "transformers"), "doctor", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["versions"]["triton"] is None
    for backends in found["operations"].values():
        verdicts = {backend["name"]: backend["accepted"] for backend in backends}
        assert not verdicts["triton"]
    assert any("Triton isn't installed" in hint for hint in found["hints"])


def machine(
    torch_version="2.13.0+cpu", triton="3.7.1", device_type="cpu", interpreted=False,
    capability=None,
):  # fmt: skip
    return Machine(device_type, "a machine", capability, torch_version, triton, interpreted)


BLACKWELL = machine(device_type="cuda", capability=(10, 0))


@pytest.mark.parametrize(
    ("where", "versions", "said"),
    [
        (machine(), {}, None),
        (machine("2.11.0+cu130", "3.6.0"), {"numpy": "2.3.5"}, None),
        (machine("2.11.0+cu130", "3.6.0"), {"numpy": "2.4.0"}, "breaks with NumPy 2.4.0"),
        (machine("2.13.0", "3.6.0"), {"numpy": "2.3.5"}, "torch 2.13 goes with Triton 3.7"),
        (machine("2.14.1", "3.7.1"), {}, "torch 2.14 goes with Triton 3.8"),
        (machine("2.99.0", "3.9.9"), {}, None),
        (machine("2.99.0", "3.10.0"), {}, "newer than 3.9...aren't replayed"),
        (machine("2.13.0", None), {}, "pip install 'triton==3.7.*'"),
        (machine("2.99.0", None), {}, "pip install 'triton'"),
        (machine(device_type="cuda", interpreted=True), {}, "TRITON_INTERPRET=1 is set"),
        (machine(interpreted=True), {}, None),
        (machine(), {"flashinfer": "0.8.0"}, "FlashInfer 0.8.0 is outside"),
        (machine(), {"flashinfer": "0.7.4"}, None),
        (BLACKWELL, {"flashinfer": "0.7.4"}, None),
        (BLACKWELL, {"flashinfer": "0.6.16"}, "0.6.18 mended...pip install 'flashinfer-python>="),
        (BLACKWELL, {"flashinfer": None}, "pip install 'tmoe[flashinfer]'"),
        (machine(device_type="cuda", capability=(9, 0)), {"flashinfer": None}, None),
    ],
)
def test_hints(where, versions, said, monkeypatch, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    found = doctor.hints({"numpy": "2.4.6", "flashinfer": None, **versions}, where)
    if said is None:
        assert found == []
    else:
        (hint,) = found
        assert all(part in hint for part in said.split("..."))


def test_doctor_prints_brackets_as_they_are(monkeypatch, tmp_path):
    """A hint with an extra of pip's, a folder, which rich would take for styles."""
    monkeypatch.setenv("TMOE_CACHE_DIR", str(tmp_path / "[red]"))
    said = "pip install 'tmoe[flashinfer]'"
    monkeypatch.setattr(doctor, "hints", lambda versions, machine: [said])
    monkeypatch.setenv("COLUMNS", "250")
    shown = invoke("doctor").output
    assert f"hint {said}" in shown and str(tmp_path / "[red]") in shown


def test_a_hint_where_flashinfer_cannot_build(monkeypatch):
    """EN04"""
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    monkeypatch.setenv("PATH", "/nowhere")
    (said,) = doctor.hints({"numpy": "2.4.6", "flashinfer": "0.7.4"}, BLACKWELL)
    assert "finds no nvcc" in said


def test_explain_takes_bf16_for_a_scheme():
    plain, named = (invoke("explain", *LAYER, *more) for more in ([], ["--scheme", "bf16"]))
    assert named.exit_code == 0 and named.stdout == plain.stdout


def test_explain_names_the_backend_and_the_reasons():
    done = invoke("explain", *LAYER, "--tokens", "64", "--dtype", "bf16")
    assert done.exit_code == 0, done.output
    for said in ("H=4096", "I=14336", "E=8", "K=2", "bfloat16", "torch", "triton"):
        assert said in done.output


def test_explain_for_training_takes_a_backend_with_gradients():
    done = invoke("explain", *LAYER, "--needs-grad")
    assert done.exit_code == 0 and "-> torch" in done.output


def test_explain_a_model_on_another_gpu():
    done = invoke("explain", "--model", "gpt-oss-120b", "--gpu", "b200", "--scheme", "mxfp4_a8")
    assert done.exit_code == 0, done.output
    for said in ("on NVIDIA B200", "E=128", "swiglu_oai", "has bias", "block-scaled codes"):
        assert said in done.output
    slices = invoke("explain", "--model", "deepseek-v3", "--intermediate", "256", "--gpu", "A100")
    assert "E=256" in slices.output and "I=256" in slices.output
    old = invoke("explain", *LAYER, "--gpu", "H200", "--triton", "3.4.0")
    assert "needs Triton 3.6.0 or newer, got 3.4.0" in old.output


@pytest.mark.parametrize(
    ("gpu", "version", "scheme", "said"),
    [
        ("B200", "0.7.4", "fp8_block", "-> flashinfer_trtllm"),
        ("B200", "0.6.15", "fp8_block", "needs FlashInfer 0.6.16"),
        ("B200", "none", "fp8_block", "FlashInfer isn't installed"),
        ("B300", "0.7.4", "nvfp4", "-> flashinfer_trtllm"),
        ("H200", "0.7.4", "fp8_block", "-> triton"),
        ("RTX5090", "0.7.4", "nvfp4", "10.0 or 10.3, got 12.0"),
    ],
)
def test_explain_flashinfer_elsewhere(gpu, version, scheme, said):
    done = invoke("explain", "--model", "deepseek-v3", "--gpu", gpu, "--flashinfer", version,
                  "--scheme", scheme)  # fmt: skip
    assert done.exit_code == 0 and said in done.output


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "needs --model, or"),
        (LAYER[:6], "needs --model, or"),
        (["--model", "mixtral"], "mixtral-8x7b"),
        (["--model", "olmoe", "--gpu", "TPU"], "H200"),
        (["--model", "olmoe", "--scheme", "fp9"], "nvfp4"),
        (["--model", "olmoe", "--triton", "new"], "must be a version"),
        (["--model", "olmoe", "--experts", "4"], "at most --experts"),
    ],
)
def test_explain_wants_a_layer_and_a_machine_that_it_knows(args, said):
    done = invoke("explain", *args)
    assert done.exit_code == 2 and said in done.output


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (["--top-k", "9"], "at most --experts"),
        (["--activation", "tanh"], "swiglu"),
        (["--dtype", "fp8"], "bf16"),
        (["--hidden", "0"], "hidden"),
    ],
)
def test_explain_refuses_what_makes_no_sense(extra, said):
    done = invoke("explain", *LAYER, *extra)
    assert done.exit_code == 2
    assert said in done.output


@pytest.mark.parametrize(
    "command, args, begins",
    [
        ("explain", ["--model", "mixtral"], "explain: model must be"),
        ("explain", ["--model", "olmoe", "--activation", "tanh"], "explain: activation must be"),
        ("plan", ["--model", "olmoe", "--gpus", "8", "--gpu", "TPU"], "plan: gpu must be"),
        ("plan", ["--model", "olmoe", "--gpus", "8", "--routing", "bad"], "plan: routing must be"),
        ("tune", ["olmoe", "--activation", "tanh"], "tune: activation must be"),
        ("quantize", ["nowhere", "out", "--scheme", "nvfp4"], "quantize: source must be"),
        ("bench", ["predict", "olmoe", "--routing", "bad"], "predict: routing must be"),
        ("bench", ["report", "nowhere.json"], "bench: nowhere.json can't be read"),
    ],
)
def test_an_error_names_the_command_and_no_function(command, args, begins):
    done = invoke(command, *args)
    assert done.exit_code in (1, 2) and begins in done.output


@pytest.mark.parametrize("sentence", ["needs --model", "config.json: a size must be given"])
def test_another_error_is_said_as_it_is(sentence):
    assert said_by("plan", ValueError(sentence)) == sentence


def test_explain_exits_with_one_when_nothing_can_run(monkeypatch):
    def refuse(problem):
        raise NoBackendError("no backend can run it\n  torch: too large")

    monkeypatch.setattr(tmoe, "explain", refuse)
    done = invoke("explain", *LAYER)
    assert done.exit_code == 1 and "torch: too large" in done.output
