# %% [markdown]
# # 5 · Grouped GEMM
#
# GEMM is the old name for a product of matrices. A *grouped* GEMM is many of them at once: each expert's rows times that
# expert's weights, in one launch. It takes nearly all of the time of an MoE layer.
#
# First one tile, then who computes which tile when, then what padding costs.

# %%
# Needs Linux, Python 3.10 or newer, and in the repository's folder: pip install -e ".[notebooks]". No GPU.
import lesson

device = lesson.start()

# %%
import torch

import pictures
import tmoe

# %% [markdown]
# ## What is computed
#
# Rows stand in expert order, as notebook 4 left them: expert e owns the rows from `expert_offsets[e]` to
# `expert_offsets[e + 1]`. Weights are (E, N, D): N output columns for each expert, D numbers deep. The reference is a
# loop over experts:
# %%
from tmoe.kernels.grouped_gemm import grouped_gemm, grouped_gemm_ref

lesson.show(grouped_gemm_ref, "bounds =", "y = a[start:end]")

# %% [markdown]
# ## One tile
#
# A program of the kernel computes one **tile** of the result: up to `block_m` rows of one expert and `block_n` columns. It
# walks along the depth in steps of `block_d`. In each step it loads a block of a and a block of w, multiplies them, and adds
# to its sums. The sums stay in the program until the end.


# %%
def compute_tile(a_rows, w_columns, block_d):
    """a_rows (rows, D) times w_columns (columns, D), step by step."""
    D = a_rows.shape[1]
    sums = torch.zeros(len(a_rows), len(w_columns))
    for d in range(0, D, block_d):
        sums += a_rows[:, d : d + block_d] @ w_columns[:, d : d + block_d].T
    return sums


torch.manual_seed(0)
a_rows, w_columns = torch.randn(4, 12), torch.randn(6, 12)
same = torch.allclose(compute_tile(a_rows, w_columns, 4), a_rows @ w_columns.T, atol=1e-5)
print("same as one product:", same)

# %%
figure = pictures.tile_step()
pictures.show(
    figure, "a step of the loop: a block of a times a block of w is added to the tile's sums"
)

# %% [markdown]
# Why tiles? Each number that is loaded should be used often. In a step, block_m · block_d + block_n · block_d numbers are
# loaded and block_m · block_n · block_d products computed. With 128 × 128 that is 64 products for a number, with 16 × 16 only 8.
#
# ## In the kernel
#
# This is the step of the real kernel. `tl.dot` multiplies two blocks on the GPU's matrix units, and everything is summed
# in 32 bits, whatever the numbers are stored in.

# %%
from tmoe.kernels import gemm_loop, gemm_tile

lesson.show(gemm_loop.add_product)

# %% [markdown]
# Where a tile's rows are was written down by the sort (notebook 4), so a program needs one load to know its job:

# %%
lesson.show(gemm_tile.load_tile)

# %% [markdown]
# Let us run it: 9 tokens, 4 experts, two per token, and tiles of 16 rows.

# %%
from tmoe.kernels.sort import sort_tokens
from tmoe.kernels.tiles import Tile

E, K, T, D, N = 4, 2, 9, 96, 80
weights, ids = tmoe.simulate_routing(T, E, K, "skewed", seed=1)
order = sort_tokens(ids.to(device), num_experts=E, block_m=16)

x = torch.randn(T, D).to(device)
w = (torch.randn(E, N, D) / D**0.5).to(device)
tile = Tile(block_m=16, block_n=32, block_d=32, num_warps=4, num_stages=2)

y = grouped_gemm(torch.empty(T * K, N, device=device), x, w, order, tile, gather=True)
print("rows per expert:", order.expert_offsets.diff().tolist())

# %% [markdown]
# `gather=True` means that x is in token order. The kernel looks up each row's token while it loads, so nobody has to write a
# permuted copy of x. The reference gets one:

# %%
permuted = x[order.row_to_slot.long() // K]
print(
    "as the reference:",
    torch.allclose(y, grouped_gemm_ref(permuted, w, order.expert_offsets), atol=1e-4),
)

# %% [markdown]
# ## Who computes which tile, and when
#
# A GPU computes in some hundred places at once, its *multiprocessors* (an H200 has 132). There are more tiles than that. Each multiprocessor takes a
# tile, finishes it, and takes the next. So a schedule looks like this one for 4 workers. Rows are uneven, since experts are: each colour is an expert, and a number in a
# bar counts the tiles in the order in which they are taken.

# %%
counts = [70, 10, 33, 5, 0, 16]  # rows of six experts
block_m, column_tiles, workers = 16, 3, 4
tiles = [
    (e, m, n)
    for e, c in enumerate(counts)
    for m in range(-(-c // block_m))
    for n in range(column_tiles)
]


def schedule(tiles, workers):
    """(worker, start, end, tile): each tile goes to the worker who is free first."""
    free = [0] * workers
    plan = []
    for tile in tiles:
        worker = free.index(min(free))
        plan.append((worker, free[worker], free[worker] + 1, tile))  # all tiles take equally long
        free[worker] += 1
    return plan


plan = schedule(tiles, workers)
print(len(tiles), "tiles in", max(end for _, _, end, _ in plan), "rounds of", workers, "workers")

# %%
figure, axes = pictures.panels(8.2, 2.6)
jobs = [
    (w, start, end, pictures.colour_of(tile[0]), str(i))
    for i, (w, start, end, tile) in enumerate(plan)
]
pictures.gantt(axes, jobs, "time, in tiles")
pictures.show(
    figure, "33 tiles on four workers; in the last round three workers have nothing to do"
)

# %% [markdown]
# Two things to see. An expert with few rows still costs whole tiles. And in the last round only one of four workers
# has something to do: the GPU waits. That is the *tail*. Smaller tiles make it shorter, and each of them less
# efficient.
#
# ## The order of tiles
#
# Tiles that are computed at the same time should share what they load. All tiles in one *row* of tiles need the same
# rows of a, those in one *column* the same weights. The kernel takes `GROUP_M` row tiles together through all columns:

# %%
lesson.show(gemm_tile.tile_position)

# %% [markdown]
# To draw what it does, this little kernel calls it for every number. You may call a `@triton.jit` function from a
# kernel of your own like any other function.

# %%
import triton
import triton.language as tl


@triton.jit
def positions_kernel(out_ptr, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    index = tl.program_id(0)
    tile_m, tile_n = gemm_tile.tile_position(index, tiles_m, tiles_n, GROUP_M)
    tl.store(out_ptr + tile_m * tiles_n + tile_n, index)


def positions(tiles_m, tiles_n, group_m):
    out = torch.zeros(tiles_m, tiles_n, dtype=torch.int32, device=device)
    positions_kernel[(tiles_m * tiles_n,)](out, tiles_m, tiles_n, GROUP_M=group_m)
    return out.tolist()


figure, both = pictures.panels(7.4, 3.2, 1, 2)
for axes, group_m in zip(both, (1, 4), strict=True):
    numbers = positions(4, 6, group_m)
    pictures.heat_map(axes, numbers, "column tile", "row tile", form="{:.0f}")
    axes.set_title(f"GROUP_M = {group_m}")
pictures.show(
    figure, "the order of 4 by 6 tiles: row by row, and in groups of four rows column by column"
)

# %% [markdown]
# Count what the first 8 tiles have to load, in blocks of a and of w:

# %%
for group_m in (1, 4):
    numbers = positions(4, 6, group_m)
    first = [(m, n) for m in range(4) for n in range(6) if numbers[m][n] < 8]
    rows, columns = {m for m, _ in first}, {n for _, n in first}
    print(f"GROUP_M = {group_m}: {len(rows)} row blocks + {len(columns)} column blocks")

# %% [markdown]
# Weights are the larger part, so fewer column blocks are a gain: they are found in the GPU's cache instead of in its memory.
#
# ## Padding waste
#
# A tile has room for block_m rows, and an expert's last tile is rarely full. How many rows are computed for each one that is
# wanted? Here for 128 experts and 8 experts per token, as Qwen3 has it, with tokens that choose at random.

# %%
token_counts = [1, 4, 16, 64, 256, 1024, 4096]
waste = {f"block_m = {m}": [] for m in (16, 32, 64, 128)}
for tokens in token_counts:
    _, ids = tmoe.simulate_routing(tokens, 128, 8)
    counts = torch.bincount(ids.flatten().long(), minlength=128)
    for m in (16, 32, 64, 128):
        computed = ((counts + m - 1) // m * m).sum()
        waste[f"block_m = {m}"].append((computed / counts.sum()).item())

figure, axes = pictures.panels(6.6, 3.6)
pictures.lines(axes, token_counts, waste, "tokens", "rows computed per row wanted", powers=True)
axes.set_yscale("log", base=2)
axes.set_yticks([1, 2, 4, 8, 16, 32, 64, 128], ["1", "2", "4", "8", "16", "32", "64", "128"])
pictures.show(
    figure,
    "with few tokens nearly everything is padding: 128 rows computed for one, with block_m 128",
)

# %% [markdown]
# With one token each expert that is used has one row, and a tile of 128 rows computes 127 of them for nothing. With thousands of tokens
# the waste is small, and large tiles win since they load less. So `block_m` has to follow the number of rows per expert. The
# project keeps that choice as data. These are rows of its table for Hopper GPUs, with the mean number of rows per
# expert up to which each is used (inf: any number):

# %%
from tmoe.kernels.tiles import HOPPER

for line in HOPPER:
    if (line.min_intermediate, line.max_intermediate) == (0, float("inf")):  # for any width
        t = line.gate_up
        sizes = f"block_m={t.block_m:3}, block_n={t.block_n:3}, block_d={t.block_d:3}"
        print(f"up to {line.max_rows:3} rows per expert: {sizes}")

# %% [markdown]
# ## Exercises
#
# **1.** How many rows are computed in all, padding included?


# %%
def padded_rows(counts, block_m):
    """Rows of all tiles, if expert e has counts[e] rows; an int."""
    ...


lesson.check(padded_rows)

# %% [markdown]
# **2.** Write the list of tiles, in expert order.


# %%
def tiles_of(expert_offsets, block_m):
    """[0, 3, 3, 7], 2 -> [(0, 0, 2), (0, 2, 3), (2, 3, 5), (2, 5, 7)]: expert, first row, end row."""
    ...


lesson.check(tiles_of)

# %% [markdown]
# **3.** How many rounds does the schedule take, and how busy are the workers? All tiles cost the same.


# %%
def busy_share(num_tiles, workers):
    """The share of all workers' time in which they compute, from 0 to 1."""
    ...


lesson.check(busy_share)

# %% [markdown]
# **Next:** [6 · Fusing the activation](06_fused_activation.ipynb): what never gets written needn't be read.
