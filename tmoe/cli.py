"""The ``tmoe`` command."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from packaging.version import VERSION_PATTERN
from rich.console import Console

from .bench.command import app as bench
from .command_errors import said_by
from .plan.command import plan

if TYPE_CHECKING:
    import torch

    from .dispatch.known import Layer

app = typer.Typer(
    help="Mixture-of-Experts layers for PyTorch, Triton first.",
    no_args_is_help=True,
    rich_markup_mode="markdown",  # or each line of a docstring would be wrapped on its own
    pretty_exceptions_show_locals=False,
)
app.add_typer(bench, name="bench")
app.command()(plan)


class DType(str, Enum):
    """The dtypes of unquantised layers."""

    fp32 = "fp32"
    fp16 = "fp16"
    bf16 = "bf16"


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the picture.")] = Path("tmoe-demo"),
    held_out_bytes: Annotated[
        int, typer.Option("--bytes", min=512, help="Held-out bytes to score, twice.")
    ] = 32 * 1024,
    new_bytes: Annotated[int, typer.Option(min=1, max=512, help="Bytes to generate.")] = 96,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; a GPU if there is one.")] = None,
) -> None:
    """Run a small trained model before and after tmoe.replace_moe and check that nothing changed.

    Exits with 1 if anything did.
    """
    missing = [name for name in ("transformers", "matplotlib") if find_spec(name) is None]
    if missing:
        typer.echo(f"tmoe demo needs {' and '.join(missing)}: pip install 'tmoe[demo]'", err=True)
        raise typer.Exit(2)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the model ships with the package
    where = _device(device)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"--out: {error}") from error
    from .demo.run import run_demo

    good = run_demo(
        Console(), out=out, held_out_bytes=held_out_bytes, new_bytes=new_bytes, device=where
    )
    raise typer.Exit(0 if good else 1)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Say what this machine has, which backends can run here, and what is known not to work."""
    from .doctor import diagnose

    found = diagnose()
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=2))
    else:
        Console().print(found.as_rich())


@app.command()
def explain(
    model: Annotated[str | None, typer.Option(help="mixtral-8x7b, deepseek-v3, ...")] = None,
    experts: Annotated[int | None, typer.Option(min=1, help="Number of experts, E.")] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="Experts per token, K.")] = None,
    hidden: Annotated[int | None, typer.Option(min=1, help="Hidden size, H.")] = None,
    intermediate: Annotated[int | None, typer.Option(min=1, help="Of an expert, I.")] = None,
    tokens: Annotated[int, typer.Option(min=0, help="Tokens per call, T.")] = 64,
    dtype: Annotated[DType, typer.Option(help="Of weights and activations.")] = DType.bf16,
    scheme: Annotated[
        str | None, typer.Option(help="Of quantised weights: fp8_block, nvfp4, ...")
    ] = None,
    activation: Annotated[str | None, typer.Option(help="swiglu, geglu, silu, ...")] = None,
    needs_grad: Annotated[bool, typer.Option("--needs-grad", help="For training.")] = False,
    gpu: Annotated[str | None, typer.Option(help="Another GPU than here: H200, B200, ...")] = None,
    triton: Annotated[str | None, typer.Option(help="Another version of Triton.")] = None,
    flashinfer: Annotated[
        str | None, typer.Option(help="Another version of FlashInfer: 0.7.4, or none.")
    ] = None,
) -> None:
    """Say which backend would run a layer, here or on another GPU, and why the others would not.

    The layer is a model's (--model), or --experts, --top-k, --hidden and --intermediate; given
    beside a model, they replace its sizes.
    """
    import torch

    from . import NoBackendError
    from . import explain as explain_problem
    from .dispatch.known import machine_with, problem_of
    from .dispatch.problem import Machine
    from .formats.scheme import Scheme

    sizes = {
        "num_experts": experts, "top_k": top_k, "hidden": hidden, "intermediate": intermediate,
    }  # fmt: skip
    here = "cuda" if torch.cuda.is_available() else "cpu"
    dtypes = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    try:
        layer = _layer(model, {name: size for name, size in sizes.items() if size}, activation)
        if scheme not in (None, "bf16"):
            Scheme.of(scheme, "explain", or_bf16=True)
        machine = Machine.of(here) if gpu is None else machine_with(gpu)
    except ValueError as error:
        raise typer.BadParameter(said_by("explain", error)) from error
    if triton is not None:
        if re.fullmatch(VERSION_PATTERN, triton, re.VERBOSE | re.IGNORECASE) is None:
            raise typer.BadParameter(f"--triton must be a version, as 3.6.0, got {triton!r}")
        machine = replace(machine, triton_version=triton)
    if flashinfer is not None:
        version = None if flashinfer == "none" else flashinfer
        machine = replace(machine, flashinfer_version=version)
    problem = problem_of(
        layer, machine, num_tokens=tokens, dtype=dtypes[dtype.value],
        scheme=None if scheme == "bf16" else scheme, needs_grad=needs_grad,
    )  # fmt: skip
    try:
        typer.echo(str(explain_problem(problem)))
    except NoBackendError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error


@app.command()
def tune(
    model_or_shape: Annotated[
        str, typer.Argument(help="mixtral-8x7b, deepseek-v3, ..., or E=8,K=2,H=4096,I=14336")
    ],
    tokens: Annotated[
        str, typer.Option(help="Tokens per call, T; each is rounded up to a power of two.")
    ] = "1,16,128,1024",
    dtype: Annotated[DType, typer.Option(help="Of weights and activations.")] = DType.bf16,
    scheme: Annotated[
        str | None, typer.Option(help="Of quantised weights: fp8_block, nvfp4, ...")
    ] = None,
    activation: Annotated[str | None, typer.Option(help="swiglu, geglu, silu, ...")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Try fewer tiles.")] = False,
    again: Annotated[bool, typer.Option("--again", help="Also what was measured before.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Time a layer's tiles and backends on this machine, and keep the times for later processes.

    From then on tmoe takes the fastest for such layers. What is known already isn't measured, and
    what was measured is kept after each number of tokens, so the command can be stopped and started
    again. Weights are random and laid out as in tmoe.MoE; for others, call the layer inside
    tmoe.autotune(tiles=True). Exits with 1 if the times can't be kept, or memory is too small.
    """
    import torch

    from . import NoBackendError
    from .formats.scheme import Scheme
    from .tune import parse_layer, parse_tokens, run_tune

    try:
        layer, counts = parse_layer(model_or_shape, activation), parse_tokens(tokens)
        if scheme not in (None, "bf16"):
            Scheme.of(scheme, "tune", or_bf16=True)
    except ValueError as error:
        raise typer.BadParameter(said_by("tune", error)) from error
    dtypes = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    try:
        good = run_tune(
            layer, counts, dtype=dtypes[dtype.value], scheme=None if scheme == "bf16" else scheme,
            quick=quick, again=again, as_json=as_json,
        )  # fmt: skip
    except (ValueError, NoBackendError) as error:  # the sizes don't suit the scheme
        typer.echo(said_by("tune", error), err=True)
        raise typer.Exit(1) from error
    raise typer.Exit(0 if good else 1)


@app.command()
def quantize(
    model_dir: Annotated[Path, typer.Argument(help="A folder with config.json and safetensors.")],
    out_dir: Annotated[Path, typer.Argument(help="A new folder, or one that this run began.")],
    scheme: Annotated[str, typer.Option(help="fp8_block, fp8_channel, nvfp4, mxfp4_a16, ...")],
    format: Annotated[
        str | None,
        typer.Option(help="deepseek (usual for fp8_block), compressed-tensors, modelopt, gpt-oss."),
    ] = None,
    input_ranges: Annotated[
        Path | None, typer.Option(help="Recorded ranges of the inputs, for nvfp4 and fp8_tensor.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda; the result is the same.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Quantise the experts of a model on disk into a checkpoint that vLLM and others read.

    Routers, attention, shared experts and all other files are copied byte for byte. One expert at a
    time is in memory. A run that was stopped goes on when it is started again with the same
    arguments. Exits with 1 if the model can't be quantised so, and says why.
    """
    from .checkpoints import quantize_checkpoint
    from .checkpoints.write_formats import written_format

    try:
        written_format(scheme, format, input_ranges is not None)
    except ValueError as error:
        raise typer.BadParameter(said_by("quantize", error)) from error
    where = _device(device)
    try:
        report = quantize_checkpoint(
            model_dir, out_dir, scheme, format=format, input_ranges=input_ranges, device=where
        )
    except (ValueError, OSError) as error:
        typer.echo(said_by("quantize", error), err=True)
        raise typer.Exit(1) from error
    typer.echo(json.dumps(report.to_dict(), indent=2) if as_json else str(report))


def _device(name: str | None) -> torch.device:
    """A device of this machine; without a name a GPU if there is one."""
    import torch

    num_gpus = torch.cuda.device_count()
    if name is None:
        return torch.device("cuda" if num_gpus else "cpu")
    known = ["cpu", *(["cuda"] if num_gpus else []), *(f"cuda:{i}" for i in range(num_gpus))]
    if name not in known:
        wanted = f"{' or '.join(known)} on this machine"
        raise typer.BadParameter(f"--device must be {wanted}, got {name!r}")
    return torch.device(name)


def _layer(model: str | None, sizes: dict[str, Any], activation: str | None) -> Layer:
    from .activation import Activation
    from .dispatch.known import Layer, model_layer

    if model is not None:
        layer = replace(model_layer(model), **sizes)
    elif len(sizes) == 4:
        layer = Layer(**sizes)
    else:
        raise ValueError("needs --model, or --experts, --top-k, --hidden and --intermediate")
    if activation is not None:
        layer = replace(layer, activation=Activation.of(activation))
    if layer.top_k > layer.num_experts:
        raise ValueError(
            f"--top-k must be at most --experts, got {layer.top_k} of {layer.num_experts}"
        )
    return layer
