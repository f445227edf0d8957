# %% [markdown]
# # 9 · Combine, and why the order of a sum matters
#
# The experts' answers stand in expert order. The last step adds up, for each token, the K rows that belong to it. That is one
# addition per number. Yet here it is decided whether a model gives the same text twice.

# %%
# Needs Linux, Python 3.10 or newer, and in the repository's folder: pip install -e ".[notebooks]". No GPU.
import lesson

device = lesson.start()

# %%
from itertools import permutations

import torch

import pictures
import tmoe

# %% [markdown]
# ## Where a token's rows are
#
# `slot_to_row` (notebook 4) says it. Token t adds up the rows `slot_to_row[t, 0]` … `slot_to_row[t, K - 1]`.
# %%
from tmoe.kernels.combine import combine
from tmoe.kernels.sort import sort_tokens

topk_ids = torch.tensor([[2, 0], [2, 3], [0, 2], [3, 2]])
order = sort_tokens(topk_ids.to(device), num_experts=4, block_m=16)
slot_to_row = order.slot_to_row.cpu()
print(slot_to_row.tolist())

# %%
experts = topk_ids.flatten()[order.row_to_slot.cpu().long()].tolist()
figure = pictures.rows_to_tokens(slot_to_row.tolist(), experts)
pictures.show(
    figure, "eight rows in expert order; two arrows lead from them to each of four tokens"
)

# %% [markdown]
# ## Computers don't add like people
#
# On paper (a + b) + c is a + (b + c). Floating-point numbers are rounded after every step, and then it isn't:

# %%
a, b, c = torch.tensor([1e8, 1.0, -1e8])
print("(a + b) + c =", ((a + b) + c).item())
print("(a + c) + b =", ((a + c) + b).item())

# %% [markdown]
# 32-bit floats near 10^8 are 8 apart, so adding 1 changes nothing. That is an extreme case; a small one happens in every
# sum. Here are eight numbers in all 40320 orders:

# %%
torch.manual_seed(5)
numbers = (torch.rand(8) - 0.5) * 3.7
orders = torch.tensor(list(permutations(range(8))))
total = torch.zeros(len(orders))
for step in range(8):
    total += numbers[orders[:, step]]

results, how_often = total.unique(return_counts=True)
exact = numbers.double().sum()
print(len(orders), "orders,", len(results), "different results")

# %%
figure, axes = pictures.panels(7.0, 2.8)
off = [(r.double() - exact).item() * 1e7 for r in results]
axes.bar(off, how_often.tolist(), width=1.2, color=pictures.BLUE, edgecolor=pictures.INK)
axes.set(xlabel="difference from the exact sum, in units of 10⁻⁷", ylabel="orders", yscale="log")
pictures.show(
    figure, "seven results up to nine units from the exact sum; those near it come up most often"
)

# %% [markdown]
# None of them is wrong. But they aren't *equal*. And a model compares numbers all the time: which expert is best, which
# word is likeliest. One last bit can tip a comparison, and from that word on the text is another one.
#
# ## Who decides about the order?
#
# Suppose each expert's program adds its rows to the result by itself, with atomic additions. Whoever is ready first goes first.
# That depends on the clock, the load and the temperature of the chip. The same input gives other bits at every run.
# Let us play that with K = 8 and a random order each time:

# %%
torch.manual_seed(0)
rows = (torch.rand(8, 1000) - 0.5) * 3.7  # the answers of 8 experts, 1000 numbers each


def atomic_style(seed):
    out = torch.zeros(1000)
    for k in torch.randperm(8, generator=torch.Generator().manual_seed(seed)).tolist():
        out += rows[k]
    return out


first = atomic_style(0)
for run in range(1, 5):
    differ = (atomic_style(run) != first).sum().item()
    print(f"run {run}: {differ // 10} % of the numbers differ from the first run")

# %% [markdown]
# ## tmoe's way: one program, one order
#
# In tmoe each number of the result has **one** program, and that adds in the order of k. This is the loop; you read the whole
# kernel in notebook 2.

# %%
from tmoe.kernels.combine import _combine_kernel

lesson.show(_combine_kernel, "acc = tl.zeros", "acc +=")

# %%
table = torch.arange(8, dtype=torch.int32)[None]
runs = [
    combine(rows.to(device), table.to(device), torch.empty(1, 1000, device=device))
    for _ in range(3)
]
print("three runs, same bits:", all(torch.equal(runs[0], run) for run in runs))

# %% [markdown]
# It costs nothing: the rows have to be read anyway.
#
# ## Alone or in company
#
# Same input, same bits: that is *determinism*. There is a stronger wish. A server puts requests of several people into one
# batch. Does *my* token get the same bits whoever else is there? That is **batch invariance**. It fails when a kernel cuts its
# sums in other places for larger batches. `tmoe.options(batch_invariant=True)` promises it:

# %%
E, K, H, I = 4, 2, 32, 16
torch.manual_seed(0)
x, gate_up, down = (torch.randn(*s).to(device) for s in ((9, H), (E, 2 * I, H), (E, H, I)))
weights, ids = tmoe.simulate_routing(9, E, K, device=device)

with tmoe.options(backend="triton", batch_invariant=True):
    together = tmoe.fused_experts(x, gate_up, down, weights, ids)
    alone = tmoe.fused_experts(x[:1], gate_up, down, weights[:1], ids[:1])
print("token 0 has the same bits:", torch.equal(together[:1], alone))

# %% [markdown]
# ## Nothing times zero
#
# Experts that aren't here have row −1 (notebook 4). Their memory was never written, and may hold anything, even NaN.
# "Multiply by 0 to leave it out" doesn't work:

# %%
print("NaN times 0 is", (torch.tensor(float("nan")) * 0).item())

# %% [markdown]
# So a kernel must *select*: `tl.where`, or a mask that keeps the load from happening. The project's tests fill all memory
# that nobody wrote with NaN, and look whether one comes out.

# %%
rows = torch.tensor([[1.0, 2.0], [10.0, 20.0], [float("nan"), float("nan")]])
table = torch.tensor([[0, 1], [1, -1]], dtype=torch.int32)
out = combine(rows.to(device), table.to(device), torch.empty(2, 2, device=device))
print(out.tolist())

# %% [markdown]
# ## Small range, large numbers
#
# 16-bit floats of the kind *fp16* end at 65504. An expert may answer with 80000 and have the weight 0.1. In which order one
# rounds makes all the difference:

# %%
answer, weight = torch.tensor(80000.0), torch.tensor(0.1)
print("round, then weigh:", (answer.half() * weight.half()).item())
print("weigh, then round:", (answer * weight).half().item())

# %% [markdown]
# That is why the routing weight is applied in the second product, in 32 bits, before its result is rounded.
#
# ## Exercises
#
# **1.** Write combine in PyTorch. Rows that no table entry names may hold NaN. −1 contributes nothing.


# %%
def combine_rows(rows, slot_to_row):
    """rows (S, H), slot_to_row (T, K) with -1 -> (T, H)"""
    ...


lesson.check(combine_rows)

# %% [markdown]
# **2.** How far apart can the order put a sum? Add the numbers in 32 bits, one after the other, in every order.


# %%
def spread(numbers):
    """A list of up to 6 numbers -> largest minus smallest result, as a float."""
    ...


lesson.check(spread)

# %% [markdown]
# **Next:** [10 · The dispatcher](10_dispatcher.ipynb): who runs what, and why not.
