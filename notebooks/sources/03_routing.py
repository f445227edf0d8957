# %% [markdown]
# # 3 · Routing
#
# The router gives each token a number for each expert. A *routing method* makes of these numbers K experts and K
# weights. There are many methods, and they look alike. A model that was trained with one and runs with another still
# writes fluent text, only worse text. So the details matter.

# %%
# Needs Linux, Python 3.10 or newer, and in the repository's folder: pip install -e ".[notebooks]". No GPU.
import lesson

device = lesson.start()

# %%
import torch

import pictures
import tmoe

# %% [markdown]
# ## One token, eight experts
#
# These are the logits of one token. The two largest are those of experts 2 and 5.

# %%
logits = torch.tensor([[1.2, -0.4, 2.1, 0.3, -1.5, 1.6, 0.9, 0.1]])


def route(method, top_k=2, **options):
    routing = tmoe.Routing(8, top_k, method, **options)
    weights, ids = tmoe.route(logits.to(device), routing)
    return ids[0].tolist(), [round(w, 4) for w in weights[0].tolist()]


print(route("Renormalize"))

# %% [markdown]
# ## Scores
#
# A logit can be any number. A **score** makes it comparable. *Softmax* gives shares: all scores together are 1, so each
# depends on all logits. *Sigmoid* looks at one logit alone and gives a number between 0 and 1.

# %%
one = logits[0]
panels = {"logits": one, "softmax": one.softmax(-1), "sigmoid": one.sigmoid()}
figure = pictures.scores({name: s.tolist() for name, s in panels.items()}, chosen=(2, 5))
pictures.show(
    figure, "logits, softmax and sigmoid of eight experts; experts 2 and 5 are the largest in each"
)

# %% [markdown]
# Both keep the order, so they choose the same experts. The *weights* differ:

# %%
for method in ("Default", "Renormalize", "Sigmoid", "SigmoidRenorm"):
    ids, weights = route(method)
    print(f"{method:14} experts {ids}  weights {weights}  sum {sum(weights):.4f}")

# %% [markdown]
# * `Default`: the shares of all experts. What goes to the others is lost, so the sum is below 1.
# * `Renormalize`: softmax over the two chosen. The sum is 1. Most models do this.
# * `Sigmoid`: each by itself. The sum can be anything up to K.
# * `SigmoidRenorm`: the same, divided by the sum.
#
# A layer whose weights add up to 0.59 instead of 1 is not broken. It is another layer.
#
# ## Ties
#
# What if two logits are equal? Somebody has to decide, always in the same way, or two GPUs will disagree. The rule here:
# **the lower expert wins**. You may think that ties are rare. In 16 bits they aren't:

# %%
close = torch.tensor([[2.011, 2.014, 2.009, 2.012]])
print("in 32 bits:", close[0].tolist())
print("in 16 bits:", close[0].bfloat16().tolist())

routing = tmoe.Routing(4, 2, "Renormalize")
_, ids = tmoe.route(close.bfloat16().to(device), routing)
print("chosen:    ", ids[0].tolist())

# %% [markdown]
# bf16 numbers between 2 and 4 are 1/64 apart. Whatever is closer than that becomes the same.
#
# ## How the kernel chooses
#
# The kernel takes the largest, notes it, strikes it out, and does so K times. `min` over the places that reach the
# maximum is the rule for ties.

# %%
from tmoe.kernels import select

lesson.show(select._take_best)

# %% [markdown]
# It does so on whole numbers, not on floats, since the maximum of whole numbers is one instruction. This works because the
# bits of floats, read as whole numbers, are in the right order already; only negative ones have to be turned round.

# %%
lesson.show(select._key)

numbers = torch.tensor([-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0])
bits = numbers.view(torch.int32)
key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
print("bits in order:", bool((bits.diff() > 0).all()))
print("keys in order:", bool((key.diff() > 0).all()))

# %% [markdown]
# ## DeepSeek-V3: a bias that nobody sees
#
# Routers like to send everything to a few experts. DeepSeek-V3 counters that with a **bias** for each expert: an expert
# with too much work gets a lower one. The trick: the bias decides *who* is chosen, but does not enter the *weight*.

# %%
bias = torch.tensor([0.05, 0.3, -0.4, 0.1, 0.0, 0.1, 0.05, 0.35])
routing = tmoe.Routing(8, 2, "DeepSeekV3")

for name, b in (("without", torch.zeros(8)), ("with", bias)):
    weights, ids = tmoe.route(logits.to(device), routing, bias=b.to(device))
    shown = [round(w, 4) for w in weights[0].tolist()]
    print(f"{name:7} bias: experts {ids[0].tolist()}, weights {shown}")

# %% [markdown]
# Expert 2 has the largest logit and is out. The weights of 5 and 7 are their sigmoids without the bias, divided by
# their sum:

# %%
pair = logits[0, [5, 7]].sigmoid()
print([round(w, 4) for w in (pair / pair.sum()).tolist()])

# %% [markdown]
# ## Groups
#
# DeepSeek-V3 has 256 experts in 8 groups of 32, made to live on a machine each. A token may use 4 groups only, so it
# travels to 4 machines at most. A group's score is the **sum of its two best** choices. Then 8 experts are chosen among
# those of the kept groups.

# %%
torch.manual_seed(16)
deepseek = tmoe.Routing(256, 8, "DeepSeekV3", n_group=8, topk_group=4, scaling_factor=2.5)
token = torch.randn(1, 256)
weights, ids = tmoe.route(token.to(device), deepseek, bias=torch.zeros(256, device=device))

scores = token[0].sigmoid().view(8, 32)
group_scores = scores.topk(2).values.sum(-1)
kept = group_scores.topk(4).indices.tolist()
print("kept groups:   ", sorted(kept))
print("experts:       ", sorted(ids[0].tolist()))
print("without groups:", sorted(token[0].topk(8).indices.tolist()))
print("sum of weights:", round(weights.sum().item(), 4))

# %%
best = token[0].topk(8).indices.tolist()
figure = pictures.groups(scores, group_scores, kept, ids[0].tolist(), best)
pictures.show(
    figure, "scores of 8 groups of 32 experts; four groups are kept and 8 experts in them chosen"
)

# %% [markdown]
# Dots are the chosen experts. Crosses would be among the best eight too, but their groups are out.
#
# The weights add up to 2.5, the model's *scaling factor*. It is applied once, at the end. Forgetting it, or applying it
# twice, is a popular bug.
#
# ## Llama 4: the weight goes in front
#
# Llama 4 sends each token to one expert and multiplies the expert's **input** by the weight, not its output. That isn't
# the same, since an expert bends what comes in.

# %%
import torch.nn.functional as F

torch.manual_seed(0)
x, up, down = torch.randn(16), torch.randn(32, 16) / 4, torch.randn(16, 16) / 4


def expert(v):
    gate, rest = (up @ v).chunk(2)
    return down @ (F.silu(gate) * rest)


ids, (weight,) = route("Llama4", top_k=1)
print("weight", weight, "for expert", ids[0])
print("on the output:", [round(v, 3) for v in (weight * expert(x))[:3].tolist()])
print("on the input: ", [round(v, 3) for v in expert(weight * x)[:3].tolist()])

# %% [markdown]
# ## When something is wrong
#
# A NaN stays in its row, and counts as "never". Other tokens notice nothing.

# %%
nan = float("nan")
weights, ids = tmoe.route(
    torch.tensor([[nan, 1.0, 3.0], [0.0, 1.0, 2.0]]).to(device), tmoe.Routing(3, 2, "Renormalize")
)
print(ids.tolist(), [[round(v, 3) for v in row] for row in weights.tolist()])

# %% [markdown]
# And what a method doesn't use is refused, not ignored:

# %%
try:
    tmoe.Routing(8, 2, "Renormalize", n_group=4, topk_group=2)
except ValueError as error:
    print(error)

# %% [markdown]
# ## Balance
#
# Here is the bias at work. 512 tokens like some experts better than others. After each step the bias of every expert moves
# by 0.02, up for those with little work and down for those with much. *Imbalance* is the busiest expert's load over the mean.

# %%
torch.manual_seed(1)
liked = torch.randn(512, 16) + torch.linspace(-1, 1, 16)
routing = tmoe.Routing(16, 2, "DeepSeekV3")
bias, imbalance = torch.zeros(16), []
for _ in range(30):
    ids = tmoe.route(liked, routing, bias=bias)[1]
    counts = torch.bincount(ids.flatten().long(), minlength=16)
    imbalance.append((counts.max() / counts.float().mean()).item())
    tmoe.update_correction_bias(bias, counts, rate=0.02)

print(f"imbalance: {imbalance[0]:.2f} before, {imbalance[-1]:.2f} after 30 steps")

# %%
figure, axes = pictures.panels(5.6, 2.8)
pictures.lines(axes, range(30), {"imbalance": imbalance}, "step", "busiest expert / mean")
pictures.show(
    figure, "the imbalance falls from 3.1 to 1.3 within ten steps, and then swings a little"
)

# %% [markdown]
# It doesn't reach 1, since every step moves the biases by the same amount. A smaller rate gets closer, and takes longer.
#
# ## Exercises
#
# **1.** Choose k of some scores, the largest first; of equal scores the one with the lower index first.


# %%
def best_experts(scores, k):
    """[0.1, 0.7, 0.7, 0.2], 3 -> [1, 2, 3]"""
    ...


lesson.check(best_experts)

# %% [markdown]
# **2.** The weights with a bias: choose by score + bias, and weigh by the score alone, divided by the sum over the chosen.


# %%
def biased_weights(scores, bias, k):
    """Two lists of E numbers -> the weights of the k chosen experts, in the order of choice."""
    ...


lesson.check(biased_weights)

# %% [markdown]
# **3.** Which groups are kept? A group's score is the sum of its two best choices. Of equal groups the lower one wins.


# %%
def kept_groups(choices, n_group, topk_group):
    """A list of E choices -> the kept groups, in ascending order."""
    ...


lesson.check(kept_groups)

# %% [markdown]
# All ten methods with their formulas are in [docs/routing.md](../docs/routing.md).
#
# **Next:** [4 · Sort and offsets](04_sort.ipynb), how tokens of one expert come together.
