"""Checks of notebook 5."""

from __future__ import annotations

from .judging import ask, compare


def padded_rows(answer):
    for counts, block_m in (([3, 0, 4], 2), ([1, 1, 1], 16), ([16, 32], 16)):
        tiles = [-(-count // block_m) for count in counts]
        mistakes = {
            "Each expert is padded by itself: round up before you add.": -(-sum(counts) // block_m)
            * block_m,
            "Those are the tiles. A tile has block_m rows.": sum(tiles),
            "An expert without rows has no tile.": sum(max(n, 1) for n in tiles) * block_m,
        }
        wanted = sum(tiles) * block_m
        compare(
            ask(answer, counts, block_m), wanted, f"counts {counts}, block_m={block_m}", mistakes
        )


def tiles_of(answer):
    for offsets, block_m in (([0, 3, 3, 7], 2), ([0, 16, 33], 16)):
        wanted = _tiles(offsets, block_m)
        across = [
            (
                next(e for e in range(len(offsets) - 1) if r < offsets[e + 1]),
                r,
                min(r + block_m, offsets[-1]),
            )
            for r in range(0, offsets[-1], block_m)
        ]
        mistakes = {
            "An expert's last tile ends where its rows end: use min.": [
                (e, first, first + block_m) for e, first, _ in wanted
            ],
            "A tile must not reach into the next expert: start anew for each one.": across,
        }
        compare(ask(answer, offsets, block_m), wanted, f"{offsets}, block_m={block_m}", mistakes)


def _tiles(offsets: list[int], block_m: int) -> list[tuple[int, int, int]]:
    return [
        (e, first, min(first + block_m, end))
        for e, (begin, end) in enumerate(zip(offsets[:-1], offsets[1:], strict=True))
        for first in range(begin, end, block_m)
    ]


def busy_share(answer):
    for tiles, workers in ((33, 4), (132, 132), (133, 132), (5, 8)):
        rounds = -(-tiles // workers)
        mistakes = {
            "Round the rounds up: the last, partial one takes as long as a full one.": tiles
            / (max(tiles // workers, 1) * workers),
            "That is the number of rounds. Wanted is tiles / (rounds · workers).": rounds,
            "That is the idle share; take it from 1.": 1 - tiles / (rounds * workers),
        }
        case = f"{tiles} tiles, {workers} workers"
        compare(ask(answer, tiles, workers), tiles / (rounds * workers), case, mistakes)
