# %% [markdown]
# # 1 · What a Mixture-of-Experts layer is
#
# A transformer block has a small neural network, the MLP, that every token goes through.
# A *Mixture-of-Experts* layer (MoE) has many of them, the **experts**, and a **router** that picks a few for each token.
#
# So the model can have many weights and yet use few of them per token. This notebook builds such a layer in plain
# PyTorch, counts what it costs, and ends with the same layer in one call of `tmoe`.
#
# You need to know PyTorch. Nothing about GPUs or Triton is assumed.

# %%
# Needs Linux, Python 3.10 or newer, and in the repository's folder: pip install -e ".[notebooks]". No GPU.
import lesson

device = lesson.start()

# %%
import torch
import torch.nn.functional as F

import pictures
import tmoe

# %% [markdown]
# ## The sizes
#
# All notebooks use the same letters.
#
# | letter | meaning | here |
# | --- | --- | --- |
# | T | tokens | 6 |
# | H | numbers in a token, the *hidden size* | 16 |
# | E | experts | 4 |
# | K | experts that a token goes to | 2 |
# | I | width of one expert, the *intermediate size* | 8 |

# %%
T, H, E, K, I = 6, 16, 4, 2, 8

torch.manual_seed(0)
x = torch.randn(T, H)
router = torch.randn(E, H) / H**0.5
gate_up = torch.randn(E, 2 * I, H) / H**0.5  # for each expert: I "gate" rows, then I "up" rows
down = torch.randn(E, H, I) / I**0.5

# %% [markdown]
# ## One expert
#
# An expert is two matrix products with a nonlinear function in between. The first product gives 2·I numbers, in two halves called
# *gate* and *up*. SwiGLU makes I numbers of them: `silu(gate) * up`. The second product leads back to H numbers.


# %%
def expert(e, rows):
    gate, up = (rows @ gate_up[e].T).chunk(2, dim=-1)
    return (F.silu(gate) * up) @ down[e].T


print("tokens in: ", tuple(x.shape))
print("tokens out:", tuple(expert(0, x).shape))

# %% [markdown]
# ## The router
#
# The router is one matrix. It gives each token a score for each expert, a *logit*. The K best experts are chosen, and a
# softmax over their K logits says how much each one's answer counts.

# %%
logits = x @ router.T  # (T, E)
best, ids = logits.topk(K, dim=-1)
weights = best.softmax(dim=-1)

for t in range(T):
    chosen = ", ".join(
        f"expert {e} with {w:.2f}"
        for e, w in zip(ids[t].tolist(), weights[t].tolist(), strict=True)
    )
    print(f"token {t}: {chosen}")

# %% [markdown]
# As a picture: a row for each token, a column for each expert. Two cells of each row are filled, and they add up to 1.

# %%
share = torch.zeros(T, E).scatter(1, ids, weights)

figure, axes = pictures.panels(4.2, 3.6)
pictures.heat_map(axes, share, "expert", "token", blank=0.0, largest=1.0)
pictures.show(figure, "weights of 6 tokens for 4 experts; two experts per token")

# %% [markdown]
# ## The simple way: everybody does everything
#
# Run every expert on every token and weigh the answers. The weights of experts that weren't chosen are 0.

# %%
y_dense = sum(share[:, e, None] * expert(e, x) for e in range(E))

# %% [markdown]
# This is right, and wasteful: E experts work for each token, and the work of all but K is multiplied by 0.
#
# ## The sparse way: each expert does its own tokens
#
# Go through the experts. Pick the tokens that chose this one, run it on those rows only, and add its answers, weighed,
# to the result.

# %%
y = torch.zeros_like(x)
for e in range(E):
    token, slot = (ids == e).nonzero(as_tuple=True)
    y[token] += weights[token, slot, None] * expert(e, x[token])
    print(f"expert {e} works for tokens {token.tolist()}")

print("same result as before:", torch.allclose(y, y_dense, atol=1e-6))

# %% [markdown]
# Each expert gets a different number of tokens. That is what makes MoE layers hard to run fast: a GPU likes one large
# product of matrices, and here are E small ones of uneven sizes. Most of these notebooks are about that.
#
# ## What it costs
#
# An expert has 3·H·I weights: gate, up and down. A token uses K experts of the E.
# Some real models, one layer each:

# %%
from tmoe.dispatch.known import MODELS

names = ["mixtral-8x7b", "qwen3-30b-a3b", "gpt-oss-120b", "deepseek-v3"]
stored, used = [], []
for name in names:
    m = MODELS[name]
    one = 3 * m.hidden * m.intermediate
    stored.append(m.num_experts * one / 1e6)
    used.append(m.top_k * one / 1e6)
    print(
        f"{name:14} E={m.num_experts:3} K={m.top_k}: {stored[-1]:6.0f} M weights, {used[-1]:4.0f} M per token"
    )

# %%
figure, (left, right) = pictures.panels(8.4, 2.6, 1, 2)
pictures.bars(left, names, stored, "million weights stored", colours=pictures.BLUE, form="{:.0f}")
pictures.bars(
    right, names, used, "million weights used by a token", colours=pictures.ORANGE, form="{:.0f}"
)
pictures.show(
    figure, "DeepSeek-V3 stores 11274 million weights in a layer, a token uses 352 million"
)

# %% [markdown]
# Arithmetic goes with the weights that are *used*. Memory goes with those that are *stored*.
#
# ## The catch: one token is cheap, many tokens touch everything
#
# Reading weights from memory takes time too. With one token, only K experts have to be read. With many tokens nearly
# every expert is chosen by somebody. If tokens choose at random, an expert stays unread with chance (1 − K/E)^T.

# %%
tokens = [2**n for n in range(11)]
chances = {
    "mixtral-8x7b: 2 of 8": 2 / 8,
    "qwen3-30b-a3b: 8 of 128": 8 / 128,
    "deepseek-v3: 8 of 256": 8 / 256,
}
read = {name: [100 * (1 - (1 - chance) ** t) for t in tokens] for name, chance in chances.items()}

figure, axes = pictures.panels(6.4, 3.4)
pictures.lines(axes, tokens, read, "tokens in the batch", "experts that are read, %", powers=True)
pictures.show(figure, "share of experts read: from K/E with one token to 100 % with hundreds")

# %% [markdown]
# So a model that writes one token at a time is limited by memory, and a model that reads a long prompt by arithmetic.
# Notebook 11 puts numbers on that.
#
# ## The same layer in tmoe
#
# `tmoe.route` chooses, `tmoe.fused_experts` does the rest. `backend="triton"` runs the project's GPU kernels; without a
# GPU they run here as Python, slowly, but with the same result.

# %%
routing = tmoe.Routing(num_experts=E, top_k=K, method="Renormalize")
on_device = [tensor.to(device) for tensor in (x, logits, gate_up, down)]
x_, logits_, gate_up_, down_ = on_device

with tmoe.options(backend="triton"):
    w_, ids_ = tmoe.route(logits_, routing)
    y_ = tmoe.fused_experts(x_, gate_up_, down_, w_, ids_, activation="swiglu")

print("same experts:", torch.equal(ids_.cpu().long(), ids))
print("same result: ", torch.allclose(y_.cpu(), y, atol=1e-5))

# %% [markdown]
# ## Exercises
#
# Replace the dots, run the cell, and read what the check says. Solutions are in the folder `solutions`.
#
# **1.** How many expert weights does one token use? Write it for any layer.


# %%
def active_parameters(num_experts, top_k, hidden, intermediate):
    """Weights of the SwiGLU experts that work for one token, as an int."""
    ...


lesson.check(active_parameters)

# %% [markdown]
# **2.** How many experts are read by T tokens that choose at random, on average? The formula is above, but here the
# answer is a number of experts, not a share.


# %%
def experts_read(tokens, num_experts, top_k):
    """How many of the experts at least one token chooses, on average, as a float."""
    ...


lesson.check(experts_read)

# %% [markdown]
# **3.** Write the whole layer, the sparse way. `Renormalize` is the routing from above: the K largest logits, and a
# softmax over those K.


# %%
def moe_layer(x, router, gate_up, down, top_k):
    """x (T, H), router (E, H), gate_up (E, 2I, H), down (E, H, I) -> y (T, H)."""
    ...


lesson.check(moe_layer)

# %% [markdown]
# **Next:** [2 · The grid in plain Python](02_the_grid.ipynb), the one idea that all GPU programs are built on.
