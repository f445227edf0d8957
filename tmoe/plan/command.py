"""`tmoe plan`: print which layout of a cluster a model should have, and why."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..command_errors import said_by

SHOWN = 12  # layouts in the table


def gbit_of(text: str) -> float:
    """ "400G", "800" or "3.2T" in Gbit/s."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([gGtT]?)(?:b|bit|bps|bit/s)?", text.strip())
    if match is None:
        raise typer.BadParameter(f"--net must be Gbit/s of each GPU's card, as 400G, got {text!r}")
    return float(match[1]) * (1000 if match[2] in "tT" and match[2] else 1)


def plan(
    model: Annotated[str, typer.Option(help="deepseek-v3, ..., or the path of a config.json.")],
    gpus: Annotated[int, typer.Option(min=1, help="GPUs in all.")],
    gpu: Annotated[str, typer.Option(help="H200, H100, ...")] = "H200",
    nvlink: Annotated[int, typer.Option(min=1, help="GPUs that NVLink joins.")] = 8,
    net: Annotated[str, typer.Option(help="Each GPU's network card: 400G.")] = "400G",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each GPU in a step.")] = 128,
    scheme: Annotated[str, typer.Option(help="bf16, fp8_block, ...")] = "bf16",
    routing: Annotated[str, typer.Option(help="random, balanced, zipf or one_expert.")] = "random",
    redundant: Annotated[
        int, typer.Option(min=0, help="Slots of each EP rank for copies of popular experts.")
    ] = 0,
    reserve_gb: Annotated[
        float, typer.Option(min=0, help="Of each GPU, for CUDA, NCCL and PyTorch.")
    ] = 4.0,
    everything: Annotated[bool, typer.Option("--all", help="Every layout that fits.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Predict a layer's time and memory for each way to spread a model, and rank them.

    Measures nothing and needs no GPU. Exits with 1 if no layout fits.
    """
    from ..parallel.communication_model import Cluster
    from . import known_model, model_from_config
    from . import plan as make_plan

    try:
        is_path = "/" in model or model.endswith(".json") or Path(model).is_dir()
        asked = model_from_config(model) if is_path else known_model(model)
        cluster = Cluster.of(gpu, nvlink, gbit_of(net))
        found = make_plan(
            asked, gpus, cluster, tokens=tokens, scheme=scheme, routing=routing,
            redundant=redundant, reserve_gb=reserve_gb,
        )  # fmt: skip
    except (ValueError, OSError, ImportError) as error:
        raise typer.BadParameter(said_by("plan", error)) from error
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=2))
        raise typer.Exit(0 if found.ranked else 1)
    console = Console(width=max(120, Console().width))
    if found.ranked:
        grid = found.table()
        shown = grid.rows if everything else grid.rows[:SHOWN]
        console.print(type(grid)(grid.title, grid.columns, shown).as_rich())
        if len(shown) < len(grid.rows):
            console.print(f"{len(grid.rows) - len(shown)} more with --all\n", highlight=False)
    else:
        console.print(found.title, style="bold", highlight=False, markup=False)
    lines = [found.reason, "", *(f"can't be  {line}" for line in found.refusals), ""]
    lines += [f"known     {line}" for line in found.calibration]
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    raise typer.Exit(0 if found.ranked else 1)
