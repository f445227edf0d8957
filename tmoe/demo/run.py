"""`tmoe demo`: the shipped model before and after `tmoe.replace_moe`, with everything checked."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import torch
from rich.columns import Columns
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from torch import Tensor
from transformers import Qwen3MoeForCausalLM
from transformers.utils.logging import disable_progress_bar

import tmoe

from . import heatmap, layer_table
from .checkpoint import load
from .interpreted import Layer, run_interpreted
from .observe import (
    Observation,
    logits_of,
    moe_blocks,
    moe_inputs,
    observe,
    routing_weights,
    true_logits,
)
from .text import as_bytes, held_out_windows, read_text, stdlib_dir
from .verdict import Check, error_and_bound

PROMPT_BYTES = 144
INTERPRETED_TOKENS = 8  # under the interpreter every program costs milliseconds


def run_demo(
    console: Console, *, out: Path, held_out_bytes: int, new_bytes: int, device: torch.device
) -> bool:
    """Show the whole demo on `console` and write ``experts.png`` to `out`; whether it all held."""
    disable_progress_bar()  # transformers', which would break up the report
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    console.rule(f"tmoe demo on {name}, float32")
    # In 16 bits two logits can be equal, and then the texts may part for no fault of anyone. What
    # people run on a GPU is 16 bits, though, so that is what is timed there.
    model = load(device, torch.float32)
    timed = load(device, torch.bfloat16) if device.type == "cuda" else model
    text = held_out_prompt()
    prompt = as_bytes(text).long().to(device)
    windows = held_out_windows(stdlib_dir(), held_out_bytes)

    before = observe(model, timed, prompt, windows, new_bytes)
    logits_before = logits_of(model, before.generated)
    report = tmoe.replace_moe(model)
    tmoe.replace_moe(timed)
    after = observe(model, timed, prompt, windows, new_bytes)
    logits_after = logits_of(model, before.generated)
    truth = true_logits(before.generated)

    console.print(str(report))
    show_text(console, before, after, len(text))
    show_numbers(console, before, after, windows.numel(), timed.dtype)
    checks = [
        check_replaced(report.replaced, model),
        *check_outputs(before, after, logits_before, logits_after, truth, len(text)),
    ]
    weights = routing_weights(model, prompt).cpu()
    picture = out / "experts.png"
    heatmap.save_png(weights, text, picture)
    console.print("\nThe strongest expert for each byte of the prompt, layer by layer")
    console.print(heatmap.terminal_map(weights, text, console.width))
    console.print(f"picture: {picture}\n")

    if device.type == "cuda":
        checks.append(show_model_shapes(console, device))
    else:
        checks += show_interpreted(console, model, prompt)

    report.restore()
    same = torch.equal(logits_of(model, before.generated), logits_before)
    verb = "are" if same else "are not"
    checks.append(Check("restore", same, f"logits {verb} bit for bit those of the start"))
    for check in checks:
        mark = "[green]ok  [/]" if check.ok else "[bold red]FAIL[/]"
        console.print(mark, f"{check.name}: {check.detail}", highlight=False)
    return all(check.ok for check in checks)


def held_out_prompt() -> bytes:
    """The first function of the held-out text that starts at the left margin, cut to size."""
    text = read_text(stdlib_dir(), held_out=True)
    start = text.index(b"\ndef ") + 1
    return text[start : start + PROMPT_BYTES]


def show_text(console: Console, before: Observation, after: Observation, prompt: int) -> None:
    """Prompt and continuation of both, side by side."""
    panels = []
    for title, side in (("transformers", before), ("tmoe", after)):
        text = bytes(side.generated.tolist()).decode("utf-8", errors="replace")
        shown = Text(text[:prompt], style="dim", overflow="fold")
        shown.append(text[prompt:], style="bold")
        panels.append(Panel(shown, title=title, width=max(30, console.width // 2 - 1)))
    console.print(Columns(panels))


def show_numbers(
    console: Console, before: Observation, after: Observation, scored: int, timed: torch.dtype
) -> None:
    """Bits per byte, and the time of each MoE block in the dtype `timed`."""
    table = Table("", "transformers", "tmoe", title="before and after tmoe.replace_moe")
    label = f"bits per byte, {scored:,} held-out bytes"
    table.add_row(label, f"{before.bits:.4f}", f"{after.bits:.4f}", end_section=True)
    in_dtype = str(timed).removeprefix("torch.")
    for what, name in (("one_token_ms", "1 token"), ("prompt_ms", f"{PROMPT_BYTES} tokens")):
        rows = zip(getattr(before, what), getattr(after, what), strict=True)
        for layer, (old, new) in enumerate(rows):
            label = f"MoE layer {layer}, {name}, {in_dtype}, ms"
            table.add_row(label, f"{old:.3f}", f"{new:.3f}")
    console.print(table)


def check_replaced(replaced: list[str], model: Qwen3MoeForCausalLM) -> Check:
    """Every layer's experts must run on tmoe."""
    wanted = len(moe_blocks(model))
    detail = f"{len(replaced)} of {wanted} MoE layers run on tmoe"
    return Check("replace_moe", len(replaced) == wanted, detail)


def check_outputs(
    before: Observation,
    after: Observation,
    logits_before: Tensor,
    logits_after: Tensor,
    truth: Tensor,
    prompt: int,
) -> list[Check]:
    """Same text, and logits at most twice as far from fp64 as they were."""
    error_before, _ = error_and_bound(logits_before, truth, logits_before)
    error, allowed = error_and_bound(logits_after, truth, logits_before)
    moved = (logits_after.double() - logits_before.double()).abs().max().item()
    detail = (
        f"largest change {moved:.2e}; off fp64 by {error_before:.2e} before and {error:.2e} after, "
        f"allowed {allowed:.2e}"
    )
    logits = Check("logits", error <= allowed, detail)
    differs = (before.generated != after.generated).nonzero()
    new = len(before.generated) - prompt
    if len(differs) == 0:
        return [Check("text", True, f"the same {new} bytes, greedy"), logits]
    at = int(differs[0])
    detail = f"byte {at - prompt} of {new} is the first to differ"
    return [Check("text", False, detail), logits]


def show_interpreted(console: Console, model: Qwen3MoeForCausalLM, prompt: Tensor) -> list[Check]:
    """The Triton kernels on this CPU: layer 0 for the prompt's first tokens."""
    if importlib.util.find_spec("triton") is None:
        console.print("Triton isn't installed: its kernels are not shown")
        return []
    block = moe_blocks(model)[0]
    x = moe_inputs(model, prompt[:INTERPRETED_TOKENS])[0][0]
    _, topk_weights, topk_ids = block.gate(x)
    gate_up_proj = block.experts.get_parameter("gate_up_proj")
    down_proj = block.experts.get_parameter("down_proj")
    layer = Layer(x, gate_up_proj, down_proj, topk_weights, topk_ids)
    try:
        with console.status("Triton's kernels in its CPU interpreter"):
            rows = run_interpreted(layer)
    except subprocess.CalledProcessError as error:
        return [Check("Triton, interpreted", False, error.stderr.strip().splitlines()[-1])]
    return [
        Check(
            f"Triton, interpreted, {row.dtype}",
            row.error <= row.allowed,
            f"layer 0, {INTERPRETED_TOKENS} tokens: largest error {row.error:.2e}, "
            f"allowed {row.allowed:.2e} (twice torch's), {row.seconds:.1f} s",
        )
        for row in rows
    ]


def show_model_shapes(console: Console, device: torch.device) -> Check:
    """The table of real models' layers; every cell is checked before it is timed."""
    table = Table(
        *("model", "tokens", "grouped_mm ms", "tmoe ms", "speedup"),
        title="one MoE layer, bf16, SwiGLU: transformers' grouped_mm and tmoe (CUDA graph, median)",
    )
    wrong = []
    with console.status("layers of real models") as status:
        for row in layer_table.measure(device):
            status.update(f"{row.shape.name}, {row.tokens} tokens")
            speedup = f"{row.peer_ms / row.tmoe_ms:.2f}x"
            last = row.tokens == layer_table.TOKENS[-1]
            table.add_row(
                *(row.shape.name, str(row.tokens)),
                *(f"{row.peer_ms:.4f}", f"{row.tmoe_ms:.4f}", speedup),
                end_section=last,
            )
            if row.error > row.allowed:
                cell = f"{row.shape.name} at {row.tokens} tokens"
                wrong.append(f"{cell}: error {row.error:.2e}, allowed {row.allowed:.2e}")
    console.print(table)
    detail = "; ".join(wrong) or "every layer within twice grouped_mm's error against fp64"
    return Check("model shapes", not wrong, detail)
