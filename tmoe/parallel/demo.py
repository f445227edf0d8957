"""The trained demo model over several ranks: `torchrun --nproc-per-node 2 -m tmoe.parallel.demo`.

Every rank continues a text of its own. First alone, with all experts; then with its part of them,
exchanging tokens with the others at every MoE layer. The bytes have to be the same. On GPUs if each
rank has one, else on CPUs, in float32.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import tmoe

from ..demo.checkpoint import load
from ..demo.observe import generate, moe_blocks
from ..demo.text import as_bytes, read_text, stdlib_dir
from .choose import EXCHANGES
from .parallelize import parallelize

PROMPT_BYTES = 96


def prompt_of(rank: int) -> bytes:
    """The beginning of one of the functions that the model didn't learn from; lengths differ."""
    text = read_text(stdlib_dir(), held_out=True)
    start = -1
    for _ in range(rank + 1):
        start = text.index(b"\ndef ", start + 1)
    return text[start + 1 : start + 1 + PROMPT_BYTES + 8 * (rank % 4)]


def as_layer(block: Any, config: Any) -> tmoe.MoE:
    """A block of transformers as tmoe's layer: the parameters have the same names."""
    routing = tmoe.Routing.from_transformers(config)
    layer = tmoe.MoE(config.hidden_size, config.moe_intermediate_size, routing)
    layer.load_state_dict(block.state_dict())
    return layer.to(block.experts.down_proj.device).requires_grad_(False).eval()


def run(new_bytes: int, exchange: str | None, device: torch.device) -> list[str]:
    """What to print, on the first rank; raises SystemExit on all if a byte differs."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (size,), mesh_dim_names=("ep",))
    model = load(device, torch.float32)
    prompt = as_bytes(prompt_of(rank)).long().to(device)
    alone = generate(model, prompt, new_bytes)
    for decoder in model.model.layers:
        decoder.mlp = as_layer(decoder.mlp, model.config)
    parallelize(model, mesh, ep="ep", dp="ep", exchange=exchange)
    together = generate(model, prompt, new_bytes)

    layer: Any = moe_blocks(model)[0]
    differ = int((together != alone).sum())
    weights = sum(p.nbytes for block in moe_blocks(model) for p in block.experts.parameters())
    mine = {"differ": differ, "text": shown(together, len(prompt)), "bytes": weights}
    said: list[Any] = [None] * size
    dist.all_gather_object(said, mine)
    lines = [f"tmoe on {size} ranks, {device.type}, {dist.get_backend()}, float32"]
    placement, layers = layer.experts.parallel.placement, len(moe_blocks(model))
    for other, (experts, one) in enumerate(zip(placement.ranks, said, strict=True)):
        numbers = ", ".join(map(str, experts))
        held = f"experts {numbers} of each of {layers} layers, {one['bytes'] / 1e6:.1f} MB"
        lines.append(f"rank {other} holds {held}")
    for what, tokens in ((f"{len(prompt)} tokens", len(prompt)), ("one token", 1)):
        lines.append(f"\n{what} on each rank:\n{tmoe.explain(layer, num_tokens=tokens).exchange}")
    for other, one in enumerate(said):
        lines.append(f"\nrank {other} writes:\n{one['text']}")
    wrong = [other for other, one in enumerate(said) if one["differ"]]
    if wrong:
        raise SystemExit(f"FAIL  rank {wrong[0]}: {said[wrong[0]]['differ']} bytes differ")
    lines.append(f"\nok    each rank's {new_bytes} tokens are the same as on one rank")
    return lines


def shown(ids: Tensor, prompt: int) -> str:
    """What was given, a mark, and what was written."""
    given, written = (bytes(part.tolist()) for part in (ids[:prompt], ids[prompt:]))
    return f"{given.decode(errors='replace')}▸{written.decode(errors='replace')}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="torchrun -m tmoe.parallel.demo", description=__doc__)
    parser.add_argument("--new-bytes", type=int, default=48)
    parser.add_argument("--exchange", choices=list(EXCHANGES), help="instead of the chosen one")
    options = parser.parse_args(arguments)
    if "RANK" not in os.environ:
        sys.exit("start it with: torchrun --nproc-per-node 2 -m tmoe.parallel.demo")
    local, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cpu")
    if torch.cuda.device_count() >= ranks:
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    try:
        lines = run(options.new_bytes, options.exchange, device)
        if dist.get_rank() == 0:
            print("\n".join(lines), flush=True)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
