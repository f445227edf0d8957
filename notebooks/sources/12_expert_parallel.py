# %% [markdown]
# # 12 · Expert parallelism
#
# DeepSeek-V3's experts alone are 1.3 TB in bf16. No GPU holds that. In **expert parallelism** each GPU, called a
# **rank**, holds some of the experts. Tokens travel to the experts that they chose, and the answers travel back.
#
# This notebook plays two ranks in one process. The messages are lists; the rules of who sends what are those of `tmoe.parallel`.

# %%
# Needs Linux, Python 3.10 or newer, and in the repository's folder: pip install -e ".[notebooks]". No GPU.
import lesson

device = lesson.start()

# %%
import torch

import pictures
import tmoe

# %% [markdown]
# ## Who has what
#
# A **placement** says which rank holds which experts. The plain one puts them in order. Each rank also has tokens of its own,
# here three of them, and of each token the router has chosen two experts.
# %%
from tmoe.parallel import Placement

E, K, H, I = 4, 2, 32, 16
placement = Placement.contiguous(num_experts=E, num_ranks=2)
print(placement)

torch.manual_seed(0)
gate_up, down = (torch.randn(*s).to(device) / s[-1] ** 0.5 for s in ((E, 2 * I, H), (E, H, I)))
x = [torch.randn(3, H).to(device) for rank in range(2)]
ids = [torch.tensor([[0, 1], [1, 2], [3, 2]]), torch.tensor([[2, 0], [3, 2], [1, 3]])]
weights = [torch.tensor([[0.7, 0.3]] * 3) for rank in range(2)]

# %% [markdown]
# ## Where must a token go?
#
# To the ranks that have its experts. If both of its experts are on the same rank, it goes there **once**, not twice. A kernel of the
# project finds that out. Its program p looks through all tokens for those that go to rank p, and numbers them:

# %%
from tmoe.kernels.exchange_place import _place_kernel, place
from tmoe.parallel.routes import slots_on

lesson.show(_place_kernel, "goes = tl.max", "row = tl.where")

# %% [markdown]
# `slots` are the token's K experts, and this rank has those from `first` on, up to `end`. `tl.max` over them is an "or": does *one* of
# them live here? The exclusive sum (notebook 4) gives each token that does its row in the message.

# %%
places = [place(ids[rank].to(device), slots_on(placement, device)) for rank in range(2)]
goes_to = [(p.rows >= 0).cpu() for p in places]  # (tokens, ranks)

for rank in range(2):
    for t in range(3):
        there = [r for r in range(2) if goes_to[rank][t, r]]
        print(f"rank {rank}, token {t}: experts {ids[rank][t].tolist()}, goes to ranks {there}")

# %%
figure = pictures.exchange([chosen.tolist() for chosen in ids], placement.ranks)
pictures.show(
    figure, "tokens of two ranks with arrows to their experts; about half of the arrows cross over"
)

# %% [markdown]
# Count the rows that each rank sends to each one. This small table is exchanged first, since a rank has to know how much will
# come.

# %%
print("rows from rank (down) to rank (across):")
for p in places:
    print(p.counts.tolist())

# %% [markdown]
# ## Dispatch
#
# A message has the tokens themselves, and with them their ids and weights: the other rank has to know which of its experts are
# meant.

# %%
messages = {}
for source in range(2):
    for target in range(2):
        rows = goes_to[source][:, target]
        parts = (x[source][rows.to(device)], weights[source][rows], ids[source][rows])
        messages[source, target] = parts

for (source, target), (rows, _, chosen) in messages.items():
    print(f"rank {source} -> rank {target}: {len(rows)} rows, experts {chosen.tolist()}")

# %% [markdown]
# ## Each rank computes its share
#
# A rank knows its own experts only: it passes *their* weights, and says which ones they are. Ids of other experts
# contribute nothing. What comes out is a **partial sum** for each row.

# %%
answers = {}
with tmoe.options(backend="triton"):
    for target in range(2):
        first, count = placement.first_slots[target], placement.counts[target]
        mine = slice(first, first + count)
        for source in range(2):
            rows, w, chosen = messages[source, target]
            answers[source, target] = tmoe.fused_experts(
                rows, gate_up[mine], down[mine], w.to(device), chosen.to(device),
                first_expert=first, num_experts=E,
            )  # fmt: skip

print("rank 1 answers rank 0 with", tuple(answers[0, 1].shape))

# %% [markdown]
# ## Combine
#
# The answers go back the way the rows came. At home they are added up.

# %%
results = []
for source in range(2):
    y = torch.zeros(3, H, device=device)
    for target in range(2):
        y[goes_to[source][:, target].to(device)] += answers[source, target]
    results.append(y)

with tmoe.options(backend="triton"):
    one_rank = [
        tmoe.fused_experts(x[r], gate_up, down, weights[r].to(device), ids[r].to(device))
        for r in range(2)
    ]
print(
    "as on one rank:",
    all(torch.allclose(a, b, atol=1e-5) for a, b in zip(results, one_rank, strict=True)),
)

# %% [markdown]
# That is all of expert parallelism: **all-to-all, compute, all-to-all**. In the library:
#
# | here | in tmoe |
# | --- | --- |
# | the lists of rows | `torch.distributed` collectives, packed into one message when they are small |
# | the two loops | every rank runs the same code at the same time |
# | our placement | `tmoe.parallel.parallelize(model, ...)` divides a model's experts |
#
# How to use it is in [docs/parallel.md](../docs/parallel.md).
#
# ## How much is sent
#
# With P ranks and K experts chosen at random, a token visits P · (1 − (1 − 1/P)^K) ranks. The other way to do it is to send every
# token to *everybody* (all-gather): more bytes, but simpler, and good for few tokens.

# %%
ranks = [2, 4, 8, 16, 32, 64]
sends = {
    "all-gather: to every rank": ranks,
    "all-to-all, K = 8": [p * (1 - (1 - 1 / p) ** 8) for p in ranks],
    "all-to-all, K = 2": [p * (1 - (1 - 1 / p) ** 2) for p in ranks],
}
figure, axes = pictures.panels(6.2, 3.3)
pictures.lines(axes, ranks, sends, "ranks", "ranks that a token visits", powers=True)
axes.set_yscale("log", base=2)
axes.set_yticks(ranks, ranks)
pictures.show(figure, "all-gather grows with the ranks; all-to-all stays below K")

# %% [markdown]
# ## The slowest rank decides
#
# Everybody waits for the rank with the most rows. Some experts are popular. Here are 64 experts on 8 ranks, with a load that a
# skewed router gives:

# %%
_, chosen = tmoe.simulate_routing(4096, 64, 4, "skewed", seed=3)
loads = torch.bincount(chosen.flatten().long(), minlength=64)


def rank_loads(placement):
    """Rows per rank; an expert's rows are divided among its copies."""
    copies = [len(slots) for slots in placement.expert_slots]
    return [sum(loads[e].item() / copies[e] for e in experts) for experts in placement.ranks]


# %% [markdown]
# There are two remedies. **Place** the experts such that heavy and light ones share a rank. And give the most popular ones **copies** on
# several ranks, each of which takes a part of the tokens.

# %%
from tmoe.parallel import balance

choices = {
    "in order": Placement.contiguous(64, 8),
    "placed by load": balance(loads, 8),
    "one copy more per rank": balance(loads, 8, redundant=1),
}
for name, p in choices.items():
    found = rank_loads(p)
    print(
        f"{name:23} busiest rank {max(found):5.0f} rows, {max(found) / (sum(found) / 8):.2f} × the mean"
    )

# %%
figure, three = pictures.panels(9.0, 2.6, 1, 3, sharey=True)
for axes, (name, p) in zip(three, choices.items(), strict=True):
    axes.bar(range(8), rank_loads(p), color=pictures.BLUE, edgecolor=pictures.INK)
    axes.axhline(loads.sum().item() / 8, color=pictures.RED, lw=1.2, ls="--", label="mean")
    axes.set_title(name)
    axes.set_xlabel("rank")
    axes.set_xticks(range(8))
three[0].set_ylabel("rows")
three[0].legend(loc="upper left")
pictures.show(
    figure,
    "rows per rank: very uneven in order, better placed by load, even with copies; mean dashed",
)

# %% [markdown]
# ## Exercises
#
# **1.** How many rows does a rank send to each rank? A token that has several experts on one rank goes there once.


# %%
def rows_to_send(ids, rank_of_expert, num_ranks):
    """ids: a list of experts for each token. rank_of_expert: a list -> a list of num_ranks counts."""
    ...


lesson.check(rows_to_send)

# %% [markdown]
# **2.** Seen from a rank: its experts are numbered from 0. Turn global ids into its own; −1 for experts of others.


# %%
def local_ids(ids, first_expert, num_local):
    """[5, 2, 8], 4, 4 -> [1, -1, -1]: this rank holds the experts 4 to 7."""
    ...


lesson.check(local_ids)

# %% [markdown]
# **3.** The load of the busiest rank. An expert's load is divided evenly among its copies.


# %%
def busiest(loads, ranks):
    """loads: one number per expert. ranks: for each rank the list of its experts -> a float."""
    ...


lesson.check(busiest)

# %% [markdown]
# **Next:** [13 · A real model](13_real_model.ipynb): everything at once, on text.
