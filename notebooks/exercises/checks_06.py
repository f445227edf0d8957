"""Checks of notebook 6."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .judging import ask, ask_list, compare, compare_tensors, expect


def bytes_saved(answer):
    for S, I, size in ((16384, 14336, 2), (10, 48, 4)):
        mistakes = {
            "What is written is read again by the activation: that counts too.": 2 * S * I * size,
            "Gate and up are two numbers for each of the I columns.": 2 * S * I * size // 2,
            "The I activated columns are written in both ways; only 2I + 2I is saved.": 5
            * S
            * I
            * size,
            "That counts numbers; each has `itemsize` bytes.": 4 * S * I,
        }
        compare(
            ask(answer, S, I, size), 4 * S * I * size, f"S={S}, I={I}, itemsize={size}", mistakes
        )


def rows_of_tile(answer):
    for tile, block_n, I, interleaved in ((0, 4, 8, False), (1, 4, 8, False), (1, 4, 8, True)):
        columns = range(tile * block_n, (tile + 1) * block_n)
        usual = [*columns, *(I + n for n in columns)]
        pairs = list(range(2 * tile * block_n, 2 * (tile + 1) * block_n))
        case = f"tile {tile}, block_n={block_n}, I={I}, {'' if interleaved else 'not '}interleaved"
        got = ask_list(answer, tile, block_n, I, interleaved)
        whole = all(isinstance(row, (int, float)) for row in got)
        expect(whole, f"it should be a list of rows, and is {got} ({case})")
        got = sorted(got)
        expect(
            len(got) == 2 * block_n,
            f"a tile has 2 · block_n rows, but these are {len(got)} ({case})",
        )
        mistakes = {
            "Those are neighbours. The up row of gate row n is row I + n.": pairs,
            "Interleaved, gate and up row n are the rows 2n and 2n + 1.": sorted(usual),
        }
        mistakes = dict([list(mistakes.items())[interleaved]])
        compare(got, pairs if interleaved else sorted(usual), case, mistakes)


def clamped_swiglu(answer):
    gate = torch.tensor([-20.0, -3.0, 0.5, 9.0, 9.0])
    up = torch.tensor([1.0, -12.0, 30.0, 2.0, -1.0])
    limit = 7.0
    gate_down = gate.clamp(-limit, limit)
    mistakes = {
        "Gate is cut above only; below it stays.": F.silu(gate_down) * up.clamp(-limit, limit),
        "Up is cut on both sides.": F.silu(gate.clamp(max=limit)) * up.clamp(max=limit),
        "Clamp gate and up before the activation, not what comes out.": (F.silu(gate) * up).clamp(
            -limit, limit
        ),
        "Nothing is clamped.": F.silu(gate) * up,
    }
    wanted = F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
    # silu(-20) and silu(-7) differ by 6e-3, more than what counts as rounding
    compare_tensors(ask(answer, gate, up, limit), wanted, f"gate {gate.tolist()}", mistakes)
