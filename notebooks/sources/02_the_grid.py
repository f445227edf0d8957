# %% [markdown]
# # 2 · The grid in plain Python
#
# A GPU program is a small function that runs many times at once. Every run gets a number of its own and works on its
# own part of the data. Such a run is called a **program**, and all of them together the **grid**.
#
# That is nearly all of it. This notebook plays it through in ordinary Python first, and then reads a real kernel.

# %%
# Needs Linux, Python 3.10 or newer, and in the repository's folder: pip install -e ".[notebooks]". No GPU.
import lesson

device = lesson.start()

# %%
import random

import torch

import pictures

# %% [markdown]
# ## A program does one block
#
# We want `out = a + b` for 10 numbers. Let each program do a block of 4. Program 0 does the places 0 to 3, program 1 the
# places 4 to 7, and so on.

# %%
n, BLOCK = 10, 4
a, b = torch.arange(10.0), torch.full((10,), 100.0)


def add_program(pid, out, a, b, n):
    for lane in range(BLOCK):
        place = pid * BLOCK + lane
        if place < n:  # the last block is longer than what is left
            out[place] = a[place] + b[place]


# %% [markdown]
# How many programs are needed? 10 / 4, rounded **up**: 3. "Launching the kernel" means: call the function once for each
# number. On a GPU all calls run at the same time. Here a loop has to do.

# %%
num_programs = -(-n // BLOCK)  # rounded up
out = torch.zeros(n)
for pid in range(num_programs):
    add_program(pid, out, a, b, n)

print(num_programs, "programs")
print(out.tolist())

# %% [markdown]
# The last program has two places too many. They are **masked**: the `if` keeps it from touching memory that isn't
# there.

# %%
figure = pictures.blocks_of_places(n, BLOCK)
pictures.show(figure, "12 lanes of three programs over 10 places; the last two are masked")

# %% [markdown]
# ## Any order will do
#
# Nobody promises in which order programs run. That is fine as long as no two of them write to the same place.

# %%
order = list(range(num_programs))
random.Random(0).shuffle(order)

again = torch.zeros(n)
for pid in order:
    add_program(pid, again, a, b, n)

print("order:", order, "- same result:", torch.equal(again, out))

# %% [markdown]
# If they do write to the same place, results get lost. Say all programs add their block's sum to one number. Running at
# the same time they all *read* it before anyone has *written* it:

# %%
total = 0.0
read = [total for pid in range(num_programs)]  # everybody reads 0
for pid in range(num_programs):
    total = read[pid] + a[pid * BLOCK : (pid + 1) * BLOCK].sum().item()  # everybody writes

print("with a race:", total, "- what it should be:", a.sum().item())

# %% [markdown]
# There are three ways out: an *atomic* addition, which reads and writes as one step; a second kernel that adds up the parts;
# or a grid in which only one program writes each result. tmoe's kernels take the third one wherever a result is
# written, so that sums always run in the same order (notebook 9).
#
# ## A whole block at once
#
# In Triton you don't write the loop over the lanes. You write one expression for the whole block. In PyTorch it would
# look like this, and Triton looks nearly the same:


# %%
def add_block(pid, out, a, b, n):
    places = pid * BLOCK + torch.arange(BLOCK)
    mask = places < n
    there = places[mask]
    out[there] = a[there] + b[there]


out = torch.zeros(n)
for pid in range(num_programs):
    add_block(pid, out, a, b, n)
print(out.tolist())

# %% [markdown]
# | in this notebook | in Triton |
# | --- | --- |
# | `pid` | `tl.program_id(0)` |
# | `torch.arange(BLOCK)` | `tl.arange(0, BLOCK)` |
# | `a[places]` where the mask is true | `tl.load(a_ptr + places, mask=places < n, other=0.0)` |
# | `out[places] = value` where the mask is true | `tl.store(out_ptr + places, value, mask=places < n)` |
# | the loop over `pid` | `kernel[(num_programs,)](...)` |
#
# ## Tensors are addresses
#
# A kernel gets no tensors. It gets an **address**, the place of the first number in memory, and has to work out the rest.
# A matrix lies in memory as one long line. The **strides** say how far it is to the next row and to the next column.

# %%
matrix = torch.arange(12.0).reshape(3, 4)
print("in memory:", matrix.flatten().tolist())
print("strides:  ", matrix.stride())

row, column = 2, 1
address = row * matrix.stride(0) + column * matrix.stride(1)
print("row 2, column 1 is at", address, "and holds", matrix.flatten()[address].item())

# %% [markdown]
# A transposed matrix is the same memory with its strides swapped. So a kernel that uses strides can read it as it is.

# %%
print(matrix.T.stride(), "same memory:", matrix.T.data_ptr() == matrix.data_ptr())

# %% [markdown]
# ## A real kernel
#
# The last step of an MoE layer is called *combine*. Each token has K rows, the answers of its experts. They lie somewhere
# in a big matrix, and a table says where. The kernel adds them up. Here is its core, as it stands in the repository:

# %%
from tmoe.kernels.combine import _combine_kernel, combine, combine_ref

lesson.show(_combine_kernel, "t = tl.program_id(0)", "tl.store")

# %% [markdown]
# Read it line by line:
#
# * The grid has two numbers. `program_id(0)` is the token, `program_id(1)` which block of its H columns.
# * `offs_h` are the columns of this program, and `mask_h` says which of them exist.
# * For each of the K experts: load the row's number from the table, then that row's columns. `row >= 0` is part of the
#   mask, since −1 stands for "this expert isn't here". (`token` is None, unless a layer has one token only: its rows
#   need no table, since row k is the answer of its expert k.)
# * `other=0.0` is what masked lanes get in place of a number.
# * `tl.static_range(K)` is a loop that the compiler writes out K times. `widen` and `narrow` turn 16-bit numbers into
#   32-bit ones and back.
# * One store at the end, to places that no other program writes.
#
# The grid of this kernel for 3 tokens of 40 columns in blocks of 16:

# %%
T, H, BLOCK_H = 3, 40, 16
blocks = -(-H // BLOCK_H)

figure = pictures.grid_of_blocks(T, H, BLOCK_H)
pictures.show(
    figure, "nine programs: three tokens by three blocks of columns, the last block half masked"
)

# %% [markdown]
# ## The same in Python, then for real
#
# The table `slot_to_row` has a row number for each token and each of its K experts.

# %%
torch.manual_seed(0)
rows = torch.randn(6, H)
slot_to_row = torch.tensor([[3, 0], [4, 2], [1, -1]], dtype=torch.int32)  # token 2 lacks an expert


def combine_program(t, j, out):
    columns = j * BLOCK_H + torch.arange(BLOCK_H)
    columns = columns[columns < H]
    total = torch.zeros(len(columns))
    for k in range(slot_to_row.shape[1]):
        row = slot_to_row[t, k].item()
        if row >= 0:
            total += rows[row, columns]
    out[t, columns] = total


by_hand = torch.empty(T, H)
for t in range(T):
    for j in range(blocks):
        combine_program(t, j, by_hand)

# %% [markdown]
# Now the kernel itself. `combine` is its *launcher*: it chooses the grid and starts the kernel.

# %%
out = torch.empty(T, H, device=device)
combine(rows.to(device), slot_to_row.to(device), out)

print("same as by hand:       ", torch.equal(out.cpu(), by_hand))
print("same as the reference: ", torch.allclose(out.cpu(), combine_ref(rows, slot_to_row)))

# %% [markdown]
# The reference is the same in two lines of PyTorch. Each kernel of the project has one. Read it first when a kernel is
# new to you.

# %%
lesson.show(combine_ref)

# %% [markdown]
# ## Looking inside
#
# Without a GPU, kernels run in Triton's *interpreter*: ordinary Python, one program after the other. It is switched on by
# `TRITON_INTERPRET=1` in the environment, before Triton is imported; `lesson.start()` did that. Then a `print` inside
# a kernel prints, and `breakpoint()` stops there. Try it: put `print(t, row)` into the loop of
# `kernels/combine.py` and restart this notebook.
#
# What differs from a GPU is on [a page of its own](interpreter_and_gpu.md).
#
# ## Exercises
#
# **1.** How many programs does it take?


# %%
def programs_needed(n, block):
    """Programs needed for n places in blocks of `block`."""
    ...


lesson.check(programs_needed)

# %% [markdown]
# **2.** Which places does one program do? Leave out those that don't exist.


# %%
def places_of(pid, block, n):
    """The places of program `pid`, as a list of ints."""
    ...


lesson.check(places_of)

# %% [markdown]
# **3.** Your first kernel. Multiply n numbers by a factor. The check runs it with several programs, and looks whether
# anything behind the n-th number was touched.

# %%
import triton
import triton.language as tl


@triton.jit
def scale_kernel(out_ptr, x_ptr, n, factor, BLOCK: tl.constexpr):
    """out[i] = factor · x[i] for i < n. Grid: (n / BLOCK, rounded up)."""
    pass


lesson.check(scale_kernel)

# %% [markdown]
# **Next:** [3 · Routing](03_routing.ipynb), how a token chooses its experts.
