"""Solutions of notebook 5."""


def padded_rows(counts, block_m):
    return sum(-(-count // block_m) * block_m for count in counts)


def tiles_of(expert_offsets, block_m):
    tiles = []
    for expert in range(len(expert_offsets) - 1):
        begin, end = expert_offsets[expert], expert_offsets[expert + 1]
        for first in range(begin, end, block_m):
            tiles.append((expert, first, min(first + block_m, end)))
    return tiles


def busy_share(num_tiles, workers):
    rounds = -(-num_tiles // workers)  # the last round may be half empty, and takes as long
    return num_tiles / (rounds * workers)
