"""One of two ranks that autotune the same layers: what it found, and what it chose.

Forked from a server that has imported this module, so that a rank starts at once.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
import torch.distributed as dist

import tmoe
from tests.interpreter import speed_up
from tmoe.backends import triton_backend
from tmoe.backends.triton_tiles import parse_tiles, tiles_name
from tmoe.dispatch import measure
from tmoe.dispatch.problem import Machine, Problem
from tmoe.dispatch.tuned import load_tuned, settings_key
from tmoe.library import operation

speed_up()
E, K, H, I = 4, 2, 32, 16
NAMES = ["16x16x32 w4 s2", "16x32x32 w4 s2", "16x16x64 w4 s2"]
# The two ranks disagree about both: rank 0 finds the torch backend and the first tiles fastest.
TILES = [dict(zip(NAMES, ms, strict=True)) for ms in ([1, 4, 3], [9, 2, 3])]
BACKENDS = [{"triton": 5.0, "torch": 4.0}, {"triton": 5.0, "torch": 6.0}]
MACHINE = Machine.of("cpu")


def problem(tokens):
    return Problem(
        "fused_experts", tokens, H, I, E, K, torch.float32, MACHINE,
        activation=tmoe.Activation.swiglu(),
    )  # fmt: skip


def pretend_times(rank):
    """Returns the list of what was timed, which grows."""
    timed = []

    def milliseconds(run, device_type):
        run()
        (backend,) = run.args
        tiles = backend._tiles.tuned.values() if backend.name == "triton" else []
        tuned = [tiles_name(tiles) for tiles in tiles]
        timed.append(tuned[0] if tuned else backend.name)
        if tuned and len(timed) <= 4:  # before the backends
            return TILES[rank][tuned[0]]
        return BACKENDS[rank][backend.name] if len(timed) > 4 or backend.name == "torch" else 20.0

    measure._milliseconds = milliseconds
    triton_backend.candidates = lambda *_: ([parse_tiles(name) for name in NAMES], [])
    return timed


def choices():
    return {
        T: (tmoe.explain(problem(T)).chosen, load_tuned("triton", problem(T)).settings,
            dict(measure.known_times(problem(T))))
        for T in (8, 2)
    }  # fmt: skip


def main(rank, folder, state):
    """`state` is what the ranks know, or how they differ."""
    timed = pretend_times(rank)
    torch.manual_seed(0)
    gate_up, down = torch.randn(E, 2 * I, H), torch.randn(E, H, I)

    def layer(tokens):
        ids = torch.stack([torch.randperm(E)[:K] for _ in range(tokens)] or [torch.zeros(K).long()])
        tmoe.fused_experts(
            torch.randn(tokens, H), gate_up, down, torch.rand(tokens, K), ids[:tokens]
        )

    if state in ("a store on rank 0", "no tiles asked for") and rank == 0:
        p = problem(8)
        tiles = {"plain, rows: table": 2.0, "plain, rows: " + NAMES[2]: 1.0}
        measure.keep(MACHINE, settings_key(p, "triton"), tiles)
        measure.keep(MACHINE, p.key, {"triton": 1.0, "torch": 2.0})

    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    tokens = {"other batches": [(5, 2), (2, 0)]}.get(state, [(5,), (5,)])[rank]
    with tmoe.autotune(tiles=state != "no tiles asked for"):
        for count in tokens:
            layer(count)

    here = choices()
    gather, dist.all_gather_object = dist.all_gather_object, None
    layer(5)  # nothing outside of the block may communicate
    dist.all_gather_object = gather
    dist.barrier()
    measure._times.cache_clear()
    measure._store.cache_clear()
    operation._choose.cache_clear()
    found = {"here": here, "next process": choices(), "timed": len(timed)}
    dist.destroy_process_group()
    return found
