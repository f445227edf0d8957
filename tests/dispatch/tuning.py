"""A small layer, its problem, and times of it that are known."""

from __future__ import annotations

import torch

import tmoe
from tmoe.backends.triton_tiles import parse_tiles, tiles_name
from tmoe.dispatch import measure
from tmoe.dispatch.problem import Machine, Problem
from tmoe.dispatch.tuned import settings_key

E, K, H, I = 4, 2, 32, 16
BEST = "16x16x32 w4 s2 + 16x32x32 w4 s2"
LAYER_TILES = parse_tiles(BEST)


def layer(device, tokens=5, *, transposed=False):
    def weight(rows, columns):
        if transposed:
            return torch.randn(E, columns, rows, device=device).transpose(1, 2)
        return torch.randn(E, rows, columns, device=device)

    x, w = torch.randn(tokens, H, device=device), torch.rand(tokens, K, device=device)
    ids = torch.stack([torch.randperm(E)[:K] for _ in range(tokens)]).to(device)
    return x, weight(2 * I, H), weight(H, I), w, ids


def problem(device, tokens=8, **more):
    machine = Machine.of(device)
    more = {"activation": tmoe.Activation.swiglu(), "dtype": torch.float32, **more}
    return Problem("fused_experts", tokens, H, I, E, K, machine=machine, **more)


def know(device, tiles, backends=None, way="plain, rows", **more):
    """Put times into this process and its store, as an earlier one would have measured them."""
    p = problem(device, **more)
    named = {f"{way}: {name}": ms for name, ms in tiles.items()}
    measure.keep(p.machine, settings_key(p, "triton"), named)
    measure.keep(p.machine, p.key, backends or {"triton": 1.0, "torch": 2.0})


def pretend_times(monkeypatch, times, otherwise):
    """Let everything that is timed run, and take what `times` says for its tuned tiles, or for its
    backend's name. Returns the list of what was timed, which grows."""
    seen = []

    def milliseconds(run, machine):
        run()
        (backend,) = run.args
        tuned = backend._tiles.tuned if backend.name == "triton" else {}
        seen.append(next(map(tiles_name, tuned.values()), backend.name))
        return times.get(seen[-1], otherwise)

    monkeypatch.setattr(measure, "_milliseconds", milliseconds)
    return seen
