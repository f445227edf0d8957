# %% [markdown]
# # 4 · Sort and offsets
#
# A GPU multiplies large matrices well. So all tokens of one expert should lie next to each other: then each expert is one
# product of matrices. Bringing them together is called *sorting*, though nothing is compared: it is counting.
#
# You get to know four small arrays here. All later steps read them.

# %%
# Needs Linux, Python 3.10 or newer, and in the repository's folder: pip install -e ".[notebooks]". No GPU.
import lesson

device = lesson.start()

# %%
import torch

import pictures

# %% [markdown]
# ## Slots
#
# Five tokens, four experts, two experts per token. `topk_ids` is what the router chose. Each entry is a **slot**. Slots are
# numbered row by row: slot `t * K + k` is the k-th choice of token t. There are S = T · K slots.

# %%
E, K = 4, 2
topk_ids = torch.tensor([[2, 0], [2, 3], [0, 2], [3, 2], [0, 3]])
T = len(topk_ids)
expert_of_slot = topk_ids.flatten()
S = len(expert_of_slot)

print("slot   ", *range(S))
print("expert ", *expert_of_slot.tolist())
print("token  ", *[slot // K for slot in range(S)])

# %% [markdown]
# What we want is a **row** for each slot, such that the rows of expert 0 come first, then those of expert 1, and so on.
# Within an expert the slots should keep their order. The picture has the goal; one colour is one expert.

# %%
row_to_slot = torch.argsort(expert_of_slot, stable=True)

figure = pictures.sorted_slots(expert_of_slot.tolist(), row_to_slot.tolist())
pictures.show(figure, "ten slots in token order above, the same ten in expert order below")

# %% [markdown]
# ## Step 1: count
#
# How many slots does each expert get? Expert 1 gets none, which has to work too.

# %%
counts = torch.bincount(expert_of_slot, minlength=E)
print("counts:", counts.tolist())

# %% [markdown]
# ## Step 2: offsets
#
# Where do an expert's rows begin? Behind those of all experts before it. So add up the counts of the experts *before*
# this one. That is an **exclusive** sum: it leaves out the expert's own count. One more number at the end says where
# everything ends.

# %%
expert_offsets = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)])
print("offsets:", expert_offsets.tolist())

for e in range(E):
    begin, end = expert_offsets[e].item(), expert_offsets[e + 1].item()
    print(f"expert {e} has rows {list(range(begin, end))}")

# %% [markdown]
# ### The mistake that everybody makes once
#
# `cumsum` is *inclusive*: its first number is the first count, not 0. Used as it is, every expert begins where it should
# end:

# %%
wrong = counts.cumsum(0)
for e in range(E):
    rows = list(range(wrong[e].item(), wrong[e].item() + counts[e].item()))
    outside = [r for r in rows if r >= S]
    print(
        f"expert {e} would take rows {rows}" + (f", and {outside} don't exist" if outside else "")
    )

# %% [markdown]
# On a GPU rows that don't exist are somebody else's memory. Often there is no error, only wrong numbers.
#
# ## Step 3: each slot's row
#
# A slot's row is its expert's offset plus the slot's **rank**: how many earlier slots chose the same expert.

# %%
seen = [0] * E
slot_to_row = []
for e in expert_of_slot.tolist():
    slot_to_row.append(expert_offsets[e].item() + seen[e])
    seen[e] += 1

print("slot_to_row:", slot_to_row)
print("row_to_slot:", row_to_slot.tolist())

# %% [markdown]
# The two arrays undo each other. `row_to_slot` says what to load into a row; `slot_to_row` says where a token's answers are
# when it is time to add them up.

# %%
print([slot_to_row[s] for s in row_to_slot.tolist()])

# %% [markdown]
# ## Ranks without a loop
#
# That loop goes slot by slot, and a GPU wants to do all slots at once. The kernel compares every slot of its block with every
# other one: *is it the same expert, and does it come earlier?* The number of yeses in a line is the rank.

# %%
same = expert_of_slot[None, :] == expert_of_slot[:, None]
earlier = torch.arange(S)[None, :] < torch.arange(S)[:, None]
rank = (same & earlier).sum(1)
print("rank:", rank.tolist())

figure = pictures.earlier_slots(same & earlier, rank.tolist(), expert_of_slot.tolist())
pictures.show(
    figure, "a triangle of comparisons; the filled cells of a line, counted, are the slot's rank"
)

# %% [markdown]
# ## The kernel
#
# You know all of it now. `counts` come from `tl.histogram`, `first_rows` are the exclusive offsets, and this is the step to
# the rows:

# %%
from tmoe.kernels.sort import _sort_kernel, sort_tokens

lesson.show(_sort_kernel, "first_rows = tl.cumsum", "row_to_slot_ptr + row")

# %% [markdown]
# `tl.cumsum(counts, 0) - counts` is the trick for an exclusive sum. `counts_before` are the slots of the blocks that
# other programs place: each program handles one block of slots.
#
# The launcher returns everything at once. `block_m` is explained below.

# %%
order = sort_tokens(topk_ids.to(device), num_experts=E, block_m=2)

print("expert_offsets", order.expert_offsets.tolist())
print("row_to_slot   ", order.row_to_slot.tolist())
print("slot_to_row   ", order.slot_to_row.flatten().tolist())
print("as by hand:   ", order.slot_to_row.flatten().tolist() == slot_to_row)

# %% [markdown]
# ## Tiles
#
# The matrix product of the next notebook works on **tiles**: up to `block_m` rows of *one* expert. A tile never mixes two
# experts, since they have different weights. A tile is three numbers: expert, first row, and the row behind the
# last one.

# %%
num_tiles = order.num_tiles.item()
for expert, first, end in order.tiles[:num_tiles].tolist():
    print(f"expert {expert}: rows {first} to {end - 1}")

# %%
figure = pictures.tiles(order.tiles[:num_tiles].tolist(), order.block_m)
pictures.show(figure, "six tiles of two rows; two of them are half empty, which is hatched")

# %% [markdown]
# The hatched places are **padding**. They cost time and give nothing. Notebook 5 measures how much.
#
# How large may the list of tiles get? The launcher has to know that *before* the kernel runs, without looking at the data:
# asking the GPU would make the CPU wait. So it takes the most that could happen.

# %%
from tmoe.kernels.sort import max_tiles

print("tiles in this case:", num_tiles, "- room for:", max_tiles(S, E, 2))
lesson.show(max_tiles)

# %% [markdown]
# ## Experts that aren't here
#
# On several GPUs each holds some of the experts (notebook 12). Slots of the others get the row −1. Here is the rank that
# holds experts 2 and 3:

# %%
local = sort_tokens(topk_ids.to(device), num_experts=2, block_m=2, first_expert=2)
print("slot_to_row   ", local.slot_to_row.flatten().tolist())
print("expert_offsets", local.expert_offsets.tolist())

# %% [markdown]
# ## Exercises
#
# **1.** Exclusive offsets, with the end at the end. Take a list of counts, return a list that is one longer.


# %%
def exclusive_offsets(counts):
    """[3, 0, 4] -> [0, 3, 3, 7]"""
    ...


lesson.check(exclusive_offsets)

# %% [markdown]
# **2.** The whole sort: from the experts of all slots to the row of each slot. Experts outside 0 … E − 1 get −1.


# %%
def rows_of_slots(experts, num_experts):
    """A list with the expert of each slot -> a list with the row of each slot."""
    ...


lesson.check(rows_of_slots)

# %% [markdown]
# **3.** How many tiles do these counts make?


# %%
def count_tiles(counts, block_m):
    """Tiles of up to block_m rows, none of which mixes two experts; an int."""
    ...


lesson.check(count_tiles)

# %% [markdown]
# **Next:** [5 · Grouped GEMM](05_grouped_gemm.ipynb), what the tiles are for.
