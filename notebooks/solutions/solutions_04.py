"""Solutions of notebook 4."""


def exclusive_offsets(counts):
    offsets = [0]
    for count in counts:
        offsets.append(offsets[-1] + count)
    return offsets


def rows_of_slots(experts, num_experts):
    counts = [experts.count(e) for e in range(num_experts)]
    next_row = exclusive_offsets(counts)
    rows = []
    for e in experts:
        if 0 <= e < num_experts:
            rows.append(next_row[e])
            next_row[e] += 1  # the next slot of this expert goes one row further
        else:
            rows.append(-1)
    return rows


def count_tiles(counts, block_m):
    return sum(-(-count // block_m) for count in counts)
