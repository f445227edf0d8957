# %% [markdown]
# # 11 · Tuning and the roofline
#
# "It takes 300 µs." Is that good? To know, one must know how fast it could possibly be. This notebook computes that limit, puts
# measured times beside it, and shows which knobs lead towards it.
#
# The times were recorded on an H200, and are in the repository. With a GPU of your own you can measure at the end.

# %%
# Needs Linux, Python 3.10 or newer, and in the repository's folder: pip install -e ".[notebooks]". No GPU.
import lesson

device = lesson.start()

# %%
import json

import torch

import pictures
import tmoe

# %% [markdown]
# ## Two limits
#
# A GPU can do two things at a time: move bytes from its memory, and multiply. An H200 was measured at
# %%
from tmoe.bench.roofline import ROOFS, experts_work

roof = ROOFS["NVIDIA H200", torch.bfloat16]
print(f"{roof.tflops} TFLOP/s in bf16: 10^12 multiplications and additions per second")
print(f"{roof.gbs} GB/s from memory")

# %% [markdown]
# No kernel can be faster than the **floor**: the larger of the time to move what must be moved, and the time to multiply what must
# be multiplied.
#
#     floor = max(flops / peak, bytes / bandwidth)
#
# Which of the two is larger? Divide them. The **intensity** is flops per byte. Where the two limits meet, the intensity is

# %%
ridge = 1e12 * roof.tflops / (1e9 * roof.gbs)
print(f"{ridge:.0f} flops per byte")

# %% [markdown]
# Below that, memory decides; above, arithmetic. A number that is loaded has to be used in 171 operations before multiplying
# becomes the bottleneck.
#
# ## An MoE layer
#
# A weight in bf16 has 2 bytes, and each row that uses it needs 2 flops. So the intensity is about **the number of rows per expert**.
# With 128 experts and 8 per token, 64 tokens are 4 rows per expert: far below 171.

# %%
from tmoe.shapes import layer_shape

qwen = layer_shape("qwen3-30b-a3b")
for tokens in (1, 16, 256, 4096):
    _, ids = tmoe.simulate_routing(tokens, qwen.num_experts, qwen.top_k)
    touched = ids.unique().numel()
    work = experts_work(qwen, tokens, touched, itemsize=2)
    limit = "memory" if work.flops / work.bytes < ridge else "arithmetic"
    print(
        f"{tokens:5} tokens: {touched:3} experts, {work.flops / work.bytes:6.1f} flops per byte, "
        f"floor {work.floor_us(roof):6.1f} µs by {limit}"
    )

# %% [markdown]
# 16 times as many tokens, 256 instead of 16, raise the floor by half only: the weights are read once for all of them. That is
# why serving many people at once is cheap.
#
# ## What was measured
#
# Routed experts of one layer, bf16, recorded on one H200. A picture of this kind is called a **roofline**: the roof is the
# limit, a point is a measurement, from 1 token on the left to 8192 on the right. Qwen3's are numbered.

# %%
with open(lesson.REPOSITORY / "bench" / "results" / "h200_beside.json") as file:
    everybody = [b["extra_info"] for b in json.load(file)["benchmarks"]]
recorded = [cell for cell in everybody if cell["backend"] == "triton"]


def cells(shape):
    return sorted((c for c in recorded if c["shape"] == shape), key=lambda c: c["tokens"])


points = {
    name: [(1000 * c["tflops"] / c["gbs"], c["tflops"], c["tokens"]) for c in cells(name)]
    for name in ("mixtral-8x7b", "qwen3-30b-a3b", "gpt-oss-120b")
}
figure, axes = pictures.panels(7.6, 4.2)
pictures.roofline(axes, roof.tflops, roof.gbs, points, numbered="qwen3-30b-a3b")
pictures.show(
    figure,
    "measured points of three models lie on the slanted roof with few tokens, and below the flat one",
)

# %% [markdown]
# With few tokens the points lie on the roof: memory is as busy as it can be. With thousands they are below the flat part.
# Part of that is padding (notebook 5); part is that a chip under full load lowers its clock.
#
# The same as times. Both axes are logarithmic, so a constant gap is a constant factor.

# %%
points = cells("qwen3-30b-a3b")
times = {
    "measured": [c["us"] for c in points],
    "floor": [c["floor_us"] for c in points],
}
figure, axes = pictures.panels(6.0, 3.2)
pictures.lines(axes, [c["tokens"] for c in points], times, "tokens", "µs per call", powers=True)
axes.set_yscale("log")
axes.set_yticks([10, 100, 1000], ["10", "100", "1000"])
pictures.show(
    figure, "measured time and floor of Qwen3's layer; close together except at one token"
)

for c in points:
    print(
        f"{c['tokens']:5} tokens: {c['us']:6.1f} µs, floor {c['floor_us']:6.1f} µs, {c['percent_of_floor']:3.0f} %"
    )

# %% [markdown]
# At one token a call takes 27 µs where 17 would be the floor. Four kernels are started one after the other, and starting
# takes time too.
#
# ## The knobs
#
# What can be tuned is the **tile** (notebook 5): its rows, columns and depth, and some numbers about how it is run.

# %%
from tmoe.kernels.tiles import Tile

lesson.show(Tile, "block_m: int", "persistent: bool")

# %% [markdown]
# * `num_warps`: how many groups of 32 threads share the tile.
# * `num_stages`: while one step is multiplied, the next ones are already being loaded. So many steps are on their way.
# * `persistent`: a program takes tile after tile (notebook 5) instead of one.
#
# The stages lie in *shared memory*, a small fast memory of each multiprocessor. It has 227 KiB on an H200, and sets a limit:


# %%
def shared_kib(tile, itemsize=2):
    """Of a gated projection: block_m rows of x, 2 · block_n rows of weights, for each stage."""
    numbers = (tile.block_m + 2 * tile.block_n) * tile.block_d * tile.num_stages
    return numbers * itemsize / 1024


from tmoe.kernels.tiles import HOPPER

for line in HOPPER:
    for_any_width = (line.min_intermediate, line.max_intermediate) == (0, float("inf"))
    if for_any_width and not line.gate_up.persistent:
        t = line.gate_up
        size = f"{t.block_m:3} × {t.block_n:3} × {t.block_d:3}"
        print(f"block {size}, {t.num_stages} stages: {shared_kib(t):3.0f} KiB")

# %% [markdown]
# Each of these takes more than half of it, so a program has its multiprocessor for itself. Which tile is fastest can't be
# computed, only measured. `tmoe tune` tries some dozens, checks each result, and remembers the best for your GPU.
#
# ## A formula for the time
#
# Some things can be said without measuring. The project has a small model of the time, fitted to its records:
# a start, both products as a mixture of the two limits, and the combine.

# %%
from tmoe.bench.cost_model import predict

print("tokens   measured  predicted")
for c in points:
    p = predict(qwen, c["tokens"])
    print(f"{c['tokens']:6} {c['us']:8.0f} {p.us:10.0f}")

# %% [markdown]
# With it one can ask what if. What does it cost to have twice as many experts of the same size?

# %%
from tmoe.shapes import MoEShape

twice = MoEShape("twice as many experts", 256, qwen.top_k, qwen.hidden, qwen.intermediate)
for tokens in (1, 64, 1024, 8192):
    ratio = predict(twice, tokens).us / predict(qwen, tokens).us
    print(f"{tokens:5} tokens: {ratio:.2f} times the time")

# %% [markdown]
# Nothing with one token, since it still reads 8 experts. Nearly twice as much with hundreds, since all are read. And little
# again with many, where arithmetic decides.
#
# ## Measure here
#
# With a GPU this cell measures a layer of OLMoE. Without one it shows what was recorded.


# %%
def measure(tokens):
    from tmoe.demo.timing import median_ms
    from tmoe.shapes import random_inputs, random_weights

    shape = layer_shape("olmoe")
    weights = random_weights(shape, device, torch.bfloat16)
    x, w, ids = random_inputs(shape, tokens, device, torch.bfloat16)
    call = lambda: tmoe.fused_experts(x, *weights, w, ids)  # noqa: E731
    return 1000 * median_ms([call], device)


for c in cells("olmoe"):
    if c["tokens"] in (16, 1024):
        us, where = (
            (measure(c["tokens"]), "measured here")
            if device.type == "cuda"
            else (c["us"], "recorded")
        )
        print(f"{c['tokens']:5} tokens: {us:6.0f} µs, {where}")

# %% [markdown]
# ## Exercises
#
# **1.** The floor in microseconds. Mind the units: TFLOP/s is 10¹² per second, GB/s 10⁹, and a second has 10⁶ microseconds.


# %%
def floor_us(flops, num_bytes, tflops, gbs):
    """The least time in microseconds, as a float."""
    ...


lesson.check(floor_us)

# %% [markdown]
# **2.** From how many tokens on does arithmetic decide? Count weights only (`itemsize` bytes each, read once) and 2 flops per weight
# and row; every expert has the same number of rows.


# %%
def tokens_at_the_ridge(num_experts, top_k, itemsize, ridge):
    """The number of tokens at which flops / bytes is `ridge`, as a float."""
    ...


lesson.check(tokens_at_the_ridge)

# %% [markdown]
# **3.** The most stages that fit: as `shared_kib` above, for any tile and size of shared memory.


# %%
def most_stages(block_m, block_n, block_d, itemsize, kib):
    """The largest num_stages of a gated tile within `kib` KiB; an int."""
    ...


lesson.check(most_stages)

# %% [markdown]
# All measurements: [docs/performance.md](../docs/performance.md).
#
# **Next:** [12 · Expert parallelism](12_expert_parallel.ipynb): when one GPU isn't enough.
