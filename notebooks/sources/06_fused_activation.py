# %% [markdown]
# # 6 · Fusing the activation
#
# A GPU computes faster than it reads and writes. So a good way to be fast is not to write things down. *Fusing* two steps
# means: one kernel does both, and what passes between them stays inside the GPU's chip.
#
# The step between an expert's two matrix products is a fine example. This notebook counts what fusing it saves.

# %%
# Needs Linux, Python 3.10 or newer, and in the repository's folder: pip install -e ".[notebooks]". No GPU.
import lesson

device = lesson.start()

# %%
import torch

import pictures
import tmoe

# %% [markdown]
# ## Two ways
#
# The first product gives 2·I numbers in each row: I gate and I up. SwiGLU makes I of them.
#
# * **In two kernels:** the product writes (S, 2I) to memory. The activation reads that and writes (S, I).
# * **Fused:** the product's program has gate and up in its *registers*, the numbers that it holds on the chip. It activates them and writes (S, I).
#
# In numbers that pass through memory, for S rows: 2I + 2I + I = 5I against I.

# %%
T, K, I = 8192, 2, 14336  # Mixtral 8x7B reads a long prompt
S = T * K
gb = 2 * S * I / 1e9  # S · I numbers of two bytes
apart = {"product writes 2I": 2 * gb, "activation reads 2I": 2 * gb, "activation writes I": gb}

print(f"in two kernels: {sum(apart.values()):.2f} GB, fused: {gb:.2f} GB")
print(f"saved at 4.35 TB/s: {1000 * (sum(apart.values()) - gb) / 4350:.2f} ms in each layer")

# %%
figure, axes = pictures.panels(7.4, 1.9)
unit = "GB through memory, one layer, 8192 tokens"
pictures.stacked_bars(axes, {"two kernels": apart, "fused": {"fused writes I": gb}}, unit)
pictures.show(figure, "in two kernels 2.35 GB pass through memory, fused 0.47 GB")

# %% [markdown]
# 4.35 TB/s is what an H200's memory was measured to give. Mixtral's whole layer takes 9.0 ms there with
# 8192 tokens ([recorded](../docs/performance.md)), so this one step is 5 % of it.
#
# ## The catch: gate and up must meet
#
# `silu(gate) * up` needs gate column n *and* up column n. But the gate rows of the weights come first and the up rows behind
# them, I rows further down. A tile of neighbouring columns has only one of the two.
#
# So a tile of the gated product takes block_n gate rows of the weights and the block_n up rows that belong to them. Then it
# multiplies with all 2·block_n at once. This function says which rows those are:

# %%
from tmoe.kernels import activation, gemm_tile

lesson.show(gemm_tile.weight_rows)

# %% [markdown]
# To see what it gives, call it from a small kernel. Eight columns (I = 8) in tiles of four:

# %%
import triton
import triton.language as tl


@triton.jit
def rows_kernel(out_ptr, N, BLOCK_N: tl.constexpr):
    tile = tl.program_id(0)
    column = tl.arange(0, 2 * BLOCK_N)
    rows = gemm_tile.weight_rows(tile, column, N, True, False, BLOCK_N)  # gated, not interleaved
    tl.store(out_ptr + tile * 2 * BLOCK_N + column, rows)


rows = torch.empty(2, 8, dtype=torch.int32, device=device)
rows_kernel[(2,)](rows, 8, BLOCK_N=4)
for tile in range(2):
    print(f"tile {tile}: weight rows {rows[tile].tolist()}")

# %%
figure = pictures.gate_and_up(rows.tolist())
pictures.show(
    figure, "tile 0 takes gate rows 0 to 3 and up rows 8 to 11, tile 1 the other four of each"
)

# %% [markdown]
# ## In the kernel
#
# When the sums are finished, the tile is split in two halves, gate and up, and activated. All of it in 32 bits.

# %%
lesson.show(gemm_tile.finish_tile, "if GATED:", "y = activate_gated")
lesson.show(activation.activate_gated, "def activate_gated", "swiglu_step")

# %% [markdown]
# `limit` is a clamp that some models have: gate is cut above it, up on both sides. `swiglu_oai` is gpt-oss' variant.
#
# ## The same numbers?
#
# Both ways on the project's kernels: once a plain product and the activation after it, once fused.

# %%
from tmoe.kernels.activation_ref import activate_ref
from tmoe.kernels.grouped_gemm import grouped_gemm
from tmoe.kernels.sort import sort_tokens
from tmoe.kernels.tiles import Tile

E, K, T, H, I = 4, 2, 6, 64, 48
torch.manual_seed(0)
x = torch.randn(T, H).to(device)
gate_up = (torch.randn(E, 2 * I, H) / H**0.5).to(device)
_, ids = tmoe.simulate_routing(T, E, K, seed=2)
order = sort_tokens(ids.to(device), num_experts=E, block_m=16)
tile = Tile(block_m=16, block_n=32, block_d=32, num_warps=4, num_stages=2)


def product(columns, **options):
    out = torch.empty(T * K, columns, device=device)
    return grouped_gemm(out, x, gate_up, order, tile, gather=True, **options)


both = product(2 * I)
in_two_steps = activate_ref(*both.chunk(2, dim=-1), name="swiglu")
fused = product(I, activation="swiglu", gated=True)

print("written in two steps:", tuple(both.shape), "and", tuple(in_two_steps.shape))
print("written fused:       ", tuple(fused.shape))
print("same numbers:        ", torch.allclose(fused, in_two_steps, atol=1e-5))

# %% [markdown]
# In 16 bits the fused way is even a little *better*. In two steps gate and up are rounded to 16 bits on their way through
# memory, fused they aren't. Take the 32-bit numbers from above for the truth and round where each way rounds:

# %%
truth = in_two_steps.double()
gate, up = both.bfloat16().float().chunk(2, dim=-1)  # what memory would hold
apart = activate_ref(gate, up, name="swiglu").bfloat16()
once = fused.bfloat16()

error = [(y.double() - truth).square().mean().sqrt().item() for y in (apart, once)]
print(f"error in two steps / error fused: {error[0] / error[1]:.1f}")

# %% [markdown]
# ## What else isn't written
#
# The same idea twice more in this layer:
#
# * The rows of x are **gathered while they are loaded** (notebook 5). No permuted copy of x is written.
# * The routing weight is multiplied in **before the second product stores** its rows, so the last step only adds.
#
# All of it, counted for one layer. Weights are left out: both ways read them once.

# %%
from tmoe.dispatch.known import MODELS


def traffic(model, tokens, fuse):
    """GB through memory in 16 bits, except for weights."""
    m = MODELS[model]
    rows = tokens * m.top_k
    numbers = rows * m.intermediate  # the activated rows are written,
    numbers += rows * m.intermediate  # and read by the second product,
    numbers += rows * m.hidden * 2 + tokens * m.hidden  # whose rows are written, read and added up
    if fuse:
        numbers += tokens * m.hidden  # x, read once (by experts that share it: from the cache)
    else:
        numbers += 3 * rows * m.hidden  # x copied row by row (read, write), and read again
        numbers += 4 * rows * m.intermediate  # gate and up, written and read
        numbers += 2 * rows * m.hidden  # weighing in a step of its own: read, write
    return 2 * numbers / 1e9


names = ["mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3"]
for name in names:
    plain, fused_gb = traffic(name, 8192, False), traffic(name, 8192, True)
    print(f"{name:14} {plain:5.2f} GB -> {fused_gb:5.2f} GB")

# %%
figure, axes = pictures.panels(7.0, 2.6)
sizes = {
    "every step by itself": [traffic(name, 8192, False) for name in names],
    "fused": [traffic(name, 8192, True) for name in names],
}
unit = "GB through memory in one layer, 8192 tokens, without weights"
pictures.bar_pairs(axes, names, sizes, unit, where="center right")
pictures.show(figure, "fusing saves about two thirds of the traffic of three models")

# %% [markdown]
# ## Exercises
#
# **1.** How many bytes does fusing the activation save? S rows, I activated columns, `itemsize` bytes for a number.


# %%
def bytes_saved(S, I, itemsize):
    """Bytes that needn't pass through memory; an int."""
    ...


lesson.check(bytes_saved)

# %% [markdown]
# **2.** Some models store gate and up **interleaved**: row 0 is the first gate row, row 1 the first up row, row 2 the second
# gate row, and so on. Which weight rows does a tile need then? And in the usual layout? The order doesn't matter.


# %%
def rows_of_tile(tile, block_n, I, interleaved):
    """The 2 · block_n weight rows of tile number `tile`, as a list."""
    ...


lesson.check(rows_of_tile)

# %% [markdown]
# **3.** SwiGLU with a limit, as in the kernel: gate is cut above `limit`, up on both sides.


# %%
def clamped_swiglu(gate, up, limit):
    """Tensors of one shape -> silu(gate) * up, clamped first."""
    ...


lesson.check(clamped_swiglu)

# %% [markdown]
# **Next:** [7 · FP8](07_fp8.ipynb): if fewer bytes are faster, why not make the numbers smaller?
