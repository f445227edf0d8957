"""Train the demo's model: a byte-level Qwen3-MoE on the standard library's source files.

    python -m tmoe.demo.train --out DIR --minutes 4                           one GPU
    python -m tmoe.demo.train --out DIR --device cpu --steps 20 --batch 4     a smoke run

Writes config.json, model.safetensors (bf16) and training.json. Nothing is downloaded. The experts
and routers train on tmoe. On a GPU the model is bf16 throughout, and the optimizer works on an fp32
copy of the weights.
"""

from __future__ import annotations

import json
import math
import platform
import time
from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils.logging import disable_progress_bar

import tmoe

from .checkpoint import load
from .text import (
    HELD_OUT_BYTES,
    WINDOW,
    as_bytes,
    bits_per_byte,
    held_out_windows,
    read_text,
    stdlib_dir,
)

WARMUP = 0.03  # share of the budget
LOG_EVERY = 20  # steps; each log waits for the device


def model_config() -> Qwen3MoeConfig:
    """7.2 M parameters, 2.4 M of them active per byte; the expert width suits every format."""
    return Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=1024,  # of dense layers, which this model has none of
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=256,
        norm_topk_prob=True,
        router_aux_loss_coef=0.01,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
    )


def balance_loss(router_logits: tuple[Tensor, ...], top_k: int) -> Tensor:
    """E · Σ_e (share of slots sent to e) · (mean probability of e), averaged over the layers.

    1 when all experts are used evenly. transformers sums over the layers first, where one layer's
    dead expert can hide behind another's busy one; here layers stay apart. `router_logits`: one
    (T, E) per layer.
    """
    losses = []
    for logits in router_logits:
        num_experts = logits.shape[-1]
        probs = logits.float().softmax(-1)
        chosen = F.one_hot(logits.topk(top_k).indices, num_experts).sum(1).float()
        losses.append(num_experts * (chosen.mean(0) / top_k * probs.mean(0)).sum())
    return torch.stack(losses).mean()


def learning_rate(progress: float, peak: float) -> float:
    """Linear warm-up, then a cosine down to zero; `progress` runs from 0 to 1."""
    decay = 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0)))
    return peak * min(1.0, progress / WARMUP) * decay


class MasterWeights:
    """AdamW on fp32 copies of a model's parameters; the model itself may be bf16."""

    def __init__(self, model: torch.nn.Module, peak: float, weight_decay: float = 0.1) -> None:
        self.peak = peak
        self.params: list[Tensor] = list(model.parameters())
        self.masters = [p.detach().float().clone() for p in self.params]
        matrices = [m for m in self.masters if m.ndim > 1]
        norms = [m for m in self.masters if m.ndim == 1]
        groups = [
            {"params": matrices, "weight_decay": weight_decay},
            {"params": norms, "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=True)

    def step(self, progress: float) -> None:
        """Apply the parameters' gradients, which it takes away."""
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate(progress, self.peak)
        for master, param in zip(self.masters, self.params, strict=True):
            assert param.grad is not None
            master.grad, param.grad = param.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.adamw.step()
        with torch.no_grad():
            torch._foreach_copy_(self.params, self.masters)


def fit(
    model: Qwen3MoeForCausalLM,
    data: Tensor,  # (N,) uint8 on the model's device
    windows: Tensor,  # (W, 512) uint8, held out; watched, never used to choose anything
    *,
    steps: int,
    minutes: float | None,
    batch: int,
    lr: float,
    seed: int,
    console: Console,
) -> dict[str, object]:
    """Train `model` in place, for `minutes` if given, else for `steps`; the run's record."""
    draw = torch.Generator(data.device).manual_seed(seed)
    span, last = torch.arange(WINDOW, device=data.device), len(data) - WINDOW
    optimizer = MasterWeights(model, lr)
    top_k, aux_coef = model.config.num_experts_per_tok, model.config.router_aux_loss_coef
    curve: list[dict[str, float]] = []
    step, progress, started = 0, 0.0, time.perf_counter()
    text = TextColumn("{task.description}")
    columns = (BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), text)
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("first step", total=1.0)
        while progress < 1.0:
            starts = torch.randint(last, (batch, 1), device=data.device, generator=draw)
            ids = data[starts + span].long()
            output = model(input_ids=ids, use_cache=False, output_router_logits=True)
            logits = output.logits[:, :-1].float()
            nats = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            balance = balance_loss(output.router_logits, top_k)
            (nats + aux_coef * balance).backward()
            if step == 0:
                started = time.perf_counter()  # the first step also loads kernels
            step += 1
            elapsed = time.perf_counter() - started
            progress = elapsed / (60 * minutes) if minutes else step / steps
            optimizer.step(progress)
            if step % LOG_EVERY == 0:
                rate = f"{(step - 1) * batch * WINDOW / elapsed:,.0f} bytes/s"
                loss = f"{nats.item() / math.log(2):.3f} bits/byte, balance {balance.item():.3f}"
                bar.update(task, completed=progress, description=f"step {step}: {loss}, {rate}")
            if 10 * progress >= len(curve) + 1:
                bits = round(bits_per_byte(model, windows[:32]), 4)
                curve.append({"step": step, "bits_per_byte": bits})
                console.print(f"step {step}: {bits:.3f} bits/byte on 32 held-out windows")
    seconds = round(time.perf_counter() - started, 1)
    return {"steps": step, "batch": batch, "lr": lr, "seconds": seconds, "held_out_curve": curve}


@torch.no_grad()
def least_used_share(model: Qwen3MoeForCausalLM, windows: Tensor) -> float:
    """The smallest share of slots that any expert of any layer gets on `windows` (even: 1 / E)."""
    top_k, num_experts = model.config.num_experts_per_tok, model.config.num_experts
    ids = windows.to(model.device).long()
    output = model(input_ids=ids, use_cache=False, output_router_logits=True)
    chosen = (logits.topk(top_k).indices.flatten() for logits in output.router_logits)
    return min(torch.bincount(c, minlength=num_experts).min().item() / len(c) for c in chosen)


def round_to_bf16(model: torch.nn.Module) -> None:
    """Make the parameters bf16. ``model.bfloat16()`` would round RoPE's frequencies as well."""
    for param in model.parameters():
        param.data = param.data.bfloat16()


def save(model: Qwen3MoeForCausalLM, out: Path) -> None:
    """Write config.json and model.safetensors, in bf16 and with transformers' tensor names."""
    round_to_bf16(model)
    model.config.dtype = torch.bfloat16
    model.save_pretrained(out)
    (out / "generation_config.json").unlink(missing_ok=True)
    (out / "model.safetensors").chmod(0o644)  # it is written readable by its owner only


def main(
    out: Annotated[Path, typer.Option(help="Folder to write to.")],
    steps: Annotated[int, typer.Option(help="Number of steps, unless --minutes is given.")] = 5000,
    minutes: Annotated[float | None, typer.Option(help="Train for this long instead.")] = None,
    batch: Annotated[int, typer.Option(help="Windows of 512 bytes per step.")] = 128,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 2e-3,
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the windows.")] = 0,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; a GPU if there is one.")] = None,
    eval_bytes: Annotated[int, typer.Option(help="Held-out bytes to score.")] = HELD_OUT_BYTES,
    stdlib: Annotated[Path | None, typer.Option(help="Another standard library to read.")] = None,
) -> None:
    """Train the demo's byte-level Qwen3-MoE and score it on held-out text."""
    disable_progress_bar()  # transformers' own
    console = Console()
    root = stdlib or stdlib_dir()
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    data = as_bytes(read_text(root, held_out=False)).to(where)
    windows = held_out_windows(root, eval_bytes)
    console.print(f"{root}: {len(data):,} bytes to learn from, {windows.numel():,} held out")

    torch.manual_seed(seed)
    with where:
        model = Qwen3MoeForCausalLM(model_config()).train()
    tmoe.replace_moe(model)
    if where.type == "cuda":
        round_to_bf16(model)
    run = fit(
        model,
        data,
        windows,
        steps=steps,
        minutes=minutes,
        batch=batch,
        lr=lr,
        seed=seed,
        console=console,
    )
    save(model, out)
    # What is scored is what was written: bf16 weights, computed with in fp32 and in bf16.
    fp32 = bits_per_byte(load(where, torch.float32, out), windows)
    bf16 = bits_per_byte(load(where, torch.bfloat16, out), windows)
    record = {
        "seed": seed,
        **run,
        "parameters": model.num_parameters(),
        "train_bytes": len(data),
        "held_out_bytes": windows.numel(),
        "held_out_bits_per_byte": {"fp32": round(fp32, 4), "bf16": round(bf16, 4)},
        "least_used_expert_share": round(least_used_share(model, windows[:32]), 4),
        "device": torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    (out / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    size = (out / "model.safetensors").stat().st_size
    console.print(f"held out: {fp32:.4f} bits per byte in fp32, {bf16:.4f} in bf16")
    console.print(f"{out}: {size:,} bytes, {run['steps']} steps in {run['seconds']} s")


if __name__ == "__main__":
    typer.run(main)
