# %% [markdown]
# # 14 · Training: the way back
#
# In PyTorch you call `backward()`, and autograd finds the gradients. It can do that since each of PyTorch's operations
# knows its own derivative. A Triton kernel doesn't: whoever writes one has to write the way back too.
#
# This notebook goes back through an MoE layer step by step. Most kernels on the way are those that you have met already.

# %%
# Needs Linux, Python 3.10 or newer, and in the repository's folder: pip install -e ".[notebooks]". No GPU.
import lesson

device = lesson.start()

# %%
import json

import torch
import torch.nn.functional as F

import pictures
import tmoe
from tmoe.kernels import activation_gradient
from tmoe.kernels.activation_backward import activation_backward
from tmoe.kernels.backward_tiles import GradientTile
from tmoe.kernels.combine import combine
from tmoe.kernels.grouped_gemm import grouped_gemm
from tmoe.kernels.permute import permute
from tmoe.kernels.sort import sort_tokens
from tmoe.kernels.tiles import Tile
from tmoe.kernels.weight_gradient import _weight_gradient_kernel, weight_gradient

# %% [markdown]
# ## Three products in one picture
#
# Nearly all of the time goes into products of matrices. Take one: `y = x · wᵀ`, with x (S, D), w (N, D) and y (S, N). Going
# back, autograd hands us `dy`, the gradient of y. We owe two gradients:
#
#     dx = dy · w        dw = dyᵀ · x
#
# You needn't learn that by heart. Draw a box that is S high, D wide and N deep: **each matrix is one of its faces**. Of the
# three faces two are read, and the third is what comes out: all that lies behind one another, seen from it, is added up.

# %%
figure = pictures.three_products([3, 1, 0, 2])  # rows of four experts
pictures.show(figure, "boxes: forward fills their sides, dx their fronts, dw their tops")

# %% [markdown]
# A colour is an expert, and each expert has a box of its own, since it has weights of its own. The solid face is the result, the
# arrow the direction of the sum.
#
# * **Forward** (left): sums over D. All boxes are equally wide.
# * **Input gradient** (middle): sums over N. All boxes are equally deep. It is the same kind of product with the same rows, only that w is
#   read in the other direction. So the *same kernel* does it, given `w.transpose(1, 2)`.
# * **Weight gradient** (right): sums over the *rows*, and experts have different numbers of them. The sum itself is **ragged**. That
#   needs a kernel of its own.
# * An expert without rows, the third one, has a box of no height. Its weight gradient is a sum of nothing: **zero**, and not "missing".
#
# An MoE layer has two such products, `gate_up` and `down`. So a step of training has six: two forward, and four on the way back.
#
# ## What autograd says
#
# Here is the layer of notebook 1, for six tokens that leave one expert alone. Autograd's gradients are the truth that we compare with.

# %%
E, K, T, H, I = 4, 2, 6, 64, 48
S = T * K
ids = torch.tensor([[0, 1], [0, 3], [0, 3], [1, 0], [0, 3], [3, 0]])  # nobody goes to expert 2

torch.manual_seed(0)
x, dy, weights = torch.randn(T, H), torch.randn(T, H), torch.rand(T, K)
gate_up, down = torch.randn(E, 2 * I, H) / H**0.5, torch.randn(E, H, I) / I**0.5


def layer(x, weights, gate_up, down):
    y = torch.zeros_like(x)
    for e in range(E):
        token, slot = (ids == e).nonzero(as_tuple=True)
        gate, up = (x[token] @ gate_up[e].T).chunk(2, dim=-1)
        y[token] += weights[token, slot, None] * ((F.silu(gate) * up) @ down[e].T)
    return y


leaves = [t.clone().requires_grad_() for t in (x, weights, gate_up, down)]
truth = [t.to(device) for t in torch.autograd.grad(layer(*leaves), leaves, dy)]

# %% [markdown]
# ## Forward, and what it keeps
#
# The forward is that of notebooks 4 to 9. In training the first product also stores what it activates, gate and up: `before=h`.

# %%
x_, dy_, weights_, gate_up_, down_ = (t.to(device) for t in (x, dy, weights, gate_up, down))
order = sort_tokens(ids.to(device), num_experts=E, block_m=16)
tile = Tile(block_m=16, block_n=32, block_d=32, num_warps=4, num_stages=2)
empty = x_.new_empty
h, a = empty(S, 2 * I), empty(S, I)
grouped_gemm(a, x_, gate_up_, order, tile, gather=True, before=h, activation="swiglu", gated=True)
print("rows per expert:", order.expert_offsets.diff().tolist())

# %% [markdown]
# ## Step 1: back through `down`
#
# The gradient of the activated rows is the middle picture: `g = dy · down`, with each row's token fetched while loading
# (`gather`), as in the forward.

# %%
g = grouped_gemm(empty(S, I), dy_, down_.transpose(1, 2), order, tile, gather=True)

# %% [markdown]
# The routing weight is missing in g on purpose. The output is y[t] = Σ weight · (a · downᵀ), so **the weight's own gradient** is
#
#     d_weight = <dy, a · downᵀ> = <dy · down, a> = <g, a>
#
# The first form needs the rows that `down` made, S · H numbers that would have to be kept. The last one needs g and a, which are at hand.
#
# ## Step 2: back through the activation
#
# SwiGLU is `silu(gate) * up`. By the product rule
#
#     d_gate = d · up · silu'(gate)        d_up = d · silu(gate)        silu'(z) = s + z · s · (1 − s),  s = sigmoid(z)
#
# The kernel computes both from the stored gate and up. It needs the same sigmoid for the value and for the slope:

# %%
lesson.show(activation_gradient._silu)
lesson.show(activation_gradient.activate_gated_gradient, "y_gate, slope", "        )")

# %% [markdown]
# (`_not_above` and `_within` are for models that clamp: what was cut off gets no gradient.)
#
# One pass over the rows makes three things: the gradient of gate and up, the activated rows *times their weight* (for step 4), and the gradient of the
# routing weights. The first two are written **over** what isn't needed any more, h and g.

# %%
d_weights = torch.zeros(T, K, device=device)
activation_backward(h, g, order, d_hidden=h, activated=g, d_weight=d_weights, row_weight=weights_)
d_h, weighted = h, g  # what these pieces of memory hold now
print("gradient of the routing weights:", torch.allclose(d_weights, truth[1], atol=1e-4))

# %% [markdown]
# ## Step 3: the gradient of x
#
# The middle picture again, for `gate_up`. It gives a row for each slot. A token went to K experts, so its gradient is the sum of
# K rows: that is *combine* (notebook 9), which brings this sum into a fixed order here too.

# %%
d_rows = grouped_gemm(empty(S, H), d_h, gate_up_.transpose(1, 2), order, tile)
d_x = combine(d_rows, order.slot_to_row, torch.empty(T, H, device=device))
print("gradient of x:", torch.allclose(d_x, truth[0], atol=1e-4))

# %% [markdown]
# ## Step 4: the weight gradients
#
# Now the right picture. A program has one tile of one expert's matrix, and walks *down* along that expert's rows. This is its loop:

# %%
lesson.show(_weight_gradient_kernel, "acc = tl.zeros", "acc = add_product")

# %% [markdown]
# `first_row` and `end_row` are the expert's offsets (notebook 4). If they are equal, the loop doesn't run at all, and the zeros of the first line are
# stored. (`ROWS_ARE_DESC`: newer GPUs copy whole blocks by an engine of their own; what is left over comes by pointers.)
#
# Its operands have to stand in expert order, and dy and x don't yet. Gathering them on the way would fetch each row once for every tile
# that is side by side, so here it pays to copy them once. The copy goes where the rows of step 3 were.

# %%
gradient_tile = GradientTile(block_n=16, block_d=32, block_s=16, num_warps=4, num_stages=2)


def gradient_of(weight, left, right):
    out = torch.full_like(weight, torch.nan)  # what isn't written would show
    return weight_gradient(out, left, right, order.expert_offsets, gradient_tile)


d_down = gradient_of(down_, permute(d_rows, dy_, order), weighted)
d_gate_up = gradient_of(gate_up_, d_h, permute(d_rows, x_, order))

print("gradient of down:   ", torch.allclose(d_down, truth[3], atol=1e-4))
print("gradient of gate_up:", torch.allclose(d_gate_up, truth[2], atol=1e-4))
print("largest of expert 2:", d_gate_up[2].abs().max().item())
print("same bits again:    ", torch.equal(gradient_of(gate_up_, d_h, d_rows), d_gate_up))

# %% [markdown]
# Every number has one program, which adds in a fixed order: so these gradients have the same bits in every run. (Adding rows to tokens by atomic
# additions, the usual way on a GPU, gives other bits each time: notebook 9.) That is the whole way back;
# [triton_training.py](../tmoe/backends/triton_training.py) does these steps in this order.
#
# ## What has to be kept
#
# Between forward and backward memory is occupied: autograd *saves* what the way back needs. PyTorch tells what it saves if it is asked.
# Count the numbers, except for the weights:


# %%
def kept(run):
    """How many floats autograd saves in `run`, weights aside."""
    sizes = {}

    def look(tensor):
        if tensor.is_floating_point():
            memory = tensor.untyped_storage()
            sizes[memory.data_ptr()] = memory.nbytes() // 4
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(look, lambda tensor: tensor):
        run()
    return sum(sizes.values()) - E * 3 * H * I


leaves = [t.detach().to(device).requires_grad_() for t in leaves]


def tmoe_layer():
    x, weights, gate_up, down = leaves
    return tmoe.fused_experts(x, gate_up, down, weights, ids.to(device))


with tmoe.options(backend="triton"):
    print("tmoe:             ", kept(tmoe_layer), "= T·H + T·K + S·2I")
with tmoe.options(backend="triton", recompute=True):
    print("tmoe, recomputing:", kept(tmoe_layer), " = T·H + T·K")
print("PyTorch:          ", kept(lambda: layer(*leaves)), "= S · (2H + 4I + 1)")

# %% [markdown]
# tmoe keeps x, the routing weights, and h. The activated rows are computed again from h, which costs next to nothing: the kernel of step 2
# has the sigmoid at hand. With `recompute=True` not even h is kept, and the first product runs twice.
#
# Plain PyTorch keeps the operands of *every* step. For each row these are the gathered x (H), gate and up (2I), silu(gate) (I), the
# activated numbers (I), the answer before it is weighed (H), and its weight.
#
# ## What it takes at most
#
# The way back needs memory of its own: three pieces, each used for one thing after the other. Here with Qwen3's sizes.

# %%
figure = pictures.backward_memory(I=768, H=2048)
pictures.show(figure, "2I numbers per row for h and d_h, I for g, H for rows and copies")

# %% [markdown]
# So it is 3I + H numbers per row at most. What is *kept* (the first column) is there once for every layer of the model; the rest for one layer at a time.
#
# ## What an H200 says
#
# Forward and backward of the experts alone, 16384 tokens, bf16, recorded. `grouped_mm` is what transformers uses: PyTorch's grouped product, and autograd.
# The bytes that tmoe kept are those of our count, x and 2I numbers for each of the K rows of a token.

# %%
with open(lesson.REPOSITORY / "bench" / "results" / "h200_training.json") as file:
    recorded = {(r["shape"], r["tokens"], r["way"]): r for r in json.load(file)["rows"]}

models = ("qwen3-30b-a3b", "deepseek-v3-ep8", "mixtral-8x7b")
ways = ("tmoe", "tmoe, recompute", "grouped_mm")
time, memory = (
    {way: [recorded[m, 16384, way][key] / unit for m in models] for way in ways}
    for key, unit in (("us", 1e3), ("kept_bytes", 2**20))
)

figure, (left, right) = pictures.panels(9.6, 3.4, 1, 2)
pictures.bar_pairs(left, models, time, "ms for a step", form="{:.0f}", where="upper right")
pictures.bar_pairs(right, models, memory, "MiB kept", form="{:.0f}")
right.set_yticks([])
right.get_legend().remove()
pictures.show(figure, "tmoe takes less time and memory, and with recompute keeps hardly any")

print("Qwen3, 4096 tokens:", recorded["qwen3-30b-a3b", 4096, "tmoe"]["kept_bytes"], "bytes kept")
print("counted:           ", 2 * 4096 * (2048 + 8 * 2 * 768))

# %% [markdown]
# ## Back to the router
#
# Gradients reach the router through the routing *weights* only. Which experts were chosen is a decision: it has no gradient. With
# `Renormalize` the weights are a softmax over the K chosen logits. Suppose the loss falls if the first weight shrinks:

# %%
logits = torch.tensor([[1.2, -0.4, 2.1, 0.3]], device=device, requires_grad=True)
w, chosen = tmoe.route(logits, tmoe.Routing(4, 2, "Renormalize"))
w.backward(torch.tensor([[1.0, 0.0]], device=device))

print("chosen:  ", chosen[0].tolist())
print("d_logits:", [round(v, 4) for v in logits.grad[0].tolist()])

# %% [markdown]
# One logit gets what the other loses, and experts that weren't chosen get 0: a router never learns from its loss that another expert would have been
# better. That is one reason for balancing losses and biases (notebook 3). With K = 1 the only weight is always 1, and there is no gradient at all.
#
# ## Frozen experts
#
# Who fine-tunes a large model often leaves its experts as they are, and gives each product a thin *adapter* (LoRA) beside it:
# `y = x · wᵀ + (x · Aᵀ) · Bᵀ`, where A and B have a handful of rows and columns. Nobody wants `dw` then, so two of the six
# products aren't computed. And w may be FP4 (notebook 8): codes have no gradient, but the gradient of x passes through them.
#
# tmoe adds the adapter's product to the sums of a tile before they are stored ([low_rank.py](../kernels/low_rank.py)); `w + B · A` is never made.

# %%
moe = tmoe.MoE(H, I, tmoe.Routing(E, K, "Renormalize")).to(device).requires_grad_(False)
small = tmoe.MoE.quantized(moe, "nvfp4")
tmoe.lora.add(small, rank=4)

small(x_).square().mean().backward()
for name, p in small.named_parameters():
    if p.requires_grad:
        print(f"{name:32} {tuple(p.shape)!s:12} gradient: {bool(p.grad.any())}")

# %% [markdown]
# B starts as zeros, so that an adapter changes nothing at first. That is why A has no gradient in the very first step: it is multiplied by B.
#
# ## Exercises
#
# **1.** Write the weight gradient in PyTorch: `left` is the gradient of the output, `right` the input, both in expert order.


# %%
def gradient_of_weights(left, right, expert_offsets):
    """left (S, N), right (S, D), expert_offsets: a list of E + 1 numbers -> (E, N, D)"""
    ...


lesson.check(gradient_of_weights)

# %% [markdown]
# **2.** Go back through SwiGLU, `silu(gate) * up`, without autograd.


# %%
def swiglu_backward(gate, up, d_y):
    """Tensors of one shape; d_y is the gradient of the result -> (d_gate, d_up)"""
    ...


lesson.check(swiglu_backward)

# %% [markdown]
# **3.** Go back through the router's softmax over the K chosen logits. Mind that each logit changes all K weights.


# %%
def router_gradient(weights, d_weights):
    """Both (T, K); each row of weights adds up to 1 -> the gradient of the chosen logits (T, K)"""
    ...


lesson.check(router_gradient)

# %% [markdown]
# ## What next?
#
# * Train something: [docs/training.md](../docs/training.md) has Trainer, LoRA, PEFT, FSDP and what is refused.
# * Run your own model: [docs/transformers.md](../docs/transformers.md).
# * Read a whole kernel ([kernels/README.md](../kernels/README.md) says in which order), and add one: [CONTRIBUTING.md](../CONTRIBUTING.md).
