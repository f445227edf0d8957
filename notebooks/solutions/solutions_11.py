"""Solutions of notebook 11."""


def floor_us(flops, num_bytes, tflops, gbs):
    return 1e6 * max(flops / (1e12 * tflops), num_bytes / (1e9 * gbs))


def tokens_at_the_ridge(num_experts, top_k, itemsize, ridge):
    # flops / bytes = 2 · rows / itemsize for a weight that is used by so many rows.
    rows_per_expert = ridge * itemsize / 2
    return rows_per_expert * num_experts / top_k


def most_stages(block_m, block_n, block_d, itemsize, kib):
    stage = (block_m + 2 * block_n) * block_d * itemsize
    return kib * 1024 // stage
