# %% [markdown]
# # 13 · A real model
#
# So far tensors were random. The repository comes with a small model that was really trained: a Qwen3-MoE of 7.2 million
# parameters that writes Python. It reads and writes single bytes. It has 4 layers of 8 experts, and a byte goes to 2 of them.
#
# We look at who goes to which expert, run it on tmoe's layers, and measure what small number formats cost it.

# %%
# Needs Linux, Python 3.10 or newer, and in the repository's folder: pip install -e ".[notebooks]". No GPU.
import lesson

device = lesson.start("transformers")

# %%
import json

import torch
from transformers.utils import logging

import pictures
import tmoe
from tmoe.demo.checkpoint import load

logging.disable_progress_bar()
model = load(device, torch.float32)
print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} million parameters")

# %% [markdown]
# ## What it can do
#
# Give it the beginning of a program, and let it write the likeliest next byte, again and again.

# %%
from tmoe.demo.observe import generate
from tmoe.demo.text import as_bytes

prompt = as_bytes(b"def read_lines(path):\n    with open(path) as ").long().to(device)
before = generate(model, prompt, 60)
print(bytes(before.tolist()).decode())

# %% [markdown]
# It hasn't understood much, but it has learned what Python looks like.
#
# ## Who goes where
#
# Here is one line of text. Each column is a byte, each row an expert, and a cell is coloured if the byte goes to that expert: the
# brighter, the larger its weight.

# %%
from tmoe.demo.observe import routing_weights

line = b"    def take_back(self, title, today=None):\n        book = "
shares = routing_weights(model, as_bytes(line).long().to(device)).cpu()  # (layers, bytes, experts)

shown = [chr(b) if 32 < b < 127 else ("↵" if b == 10 else "·") for b in line]
figure, four = pictures.panels(10.0, 6.2, 4, 1, sharex=True)
for number, axes in enumerate(four):
    pictures.heat_map(
        axes, shares[number].T, "", f"layer {number}\nexpert", form=None, largest=1.0, blank=0.0
    )
four[-1].set_xticks(range(len(shown)), shown, family="monospace", fontsize=8)
pictures.show(figure, "which of 8 experts each byte of a line of Python goes to, in 4 layers")

# %% [markdown]
# Look at the runs of spaces and at the letters within a word: neighbours of the same kind often go to the same experts. Is that
# chance? Count it, over a whole file that the model hasn't seen.

# %%
text = (lesson.REPOSITORY / "notebooks" / "sample.py").read_bytes()[:3584]
everything = as_bytes(text).view(-1, 512)  # pieces of 512 bytes
print(len(text), "bytes in", len(everything), "pieces")

kinds = {
    "letters": lambda c: c.isalpha(),
    "digits": lambda c: c.isdigit(),
    "spaces": lambda c: c == " ",
    "line ends": lambda c: c == "\n",
    "brackets": lambda c: c in "()[]{}",
    "other": lambda c: c in "_.,:=\"'+-<>/@!?",
}
routes = torch.cat(
    [routing_weights(model, piece.long().to(device)).cpu() for piece in everything], dim=1
)

# %%
figure, both = pictures.panels(9.4, 3.2, 1, 2)
for axes, layer in zip(both, (0, 3), strict=True):
    table = []
    for is_kind in kinds.values():
        rows = torch.tensor([is_kind(chr(b)) for b in text])
        table.append((100 * routes[layer][rows].mean(0)).tolist())  # weights of a byte add up to 1
    pictures.heat_map(axes, table, "expert", "", form="{:.0f}")
    axes.set_yticks(range(len(kinds)), kinds if layer == 0 else [])
    axes.set_title(f"layer {layer}: % of the weight")
pictures.show(
    figure,
    "share of each expert by kind of character: far from even, in the first layer and in the last",
)

# %% [markdown]
# Without specialisation every cell would be 12 or 13. The experts have divided the work, though nobody told them how. It isn't
# "one for letters, one for digits": several share what is frequent, and what is rare goes to a few.
#
# ## Balance
#
# How even is the load? 1 is perfect; 8 would be one expert doing everything (notebook 3).

# %%
for layer in range(4):
    counts = (routes[layer] > 0).sum(0)
    print(f"layer {layer}: {(counts.max() / counts.float().mean()).item():.1f}")

# %% [markdown]
# The model was trained with a balancing loss. On a single file there is still a difference, and on a batch of many the layer
# waits for its busiest expert.
#
# ## Onto tmoe
#
# One line replaces the expert layers. No weight is copied, moved or renamed. The text stays the same.

# %%
report = tmoe.replace_moe(model)
print(len(report.replaced), "modules run on tmoe")

after = generate(model, prompt, 60)
print("same text:", torch.equal(before, after))
report.restore()

# %% [markdown]
# ## What quantising costs
#
# The measure is **bits per byte**: how many bits the model would need to write the file down, if good guesses are short. Fewer
# are better. A model that knows nothing needs 8.

# %%
from tmoe.demo.text import bits_per_byte

plain = bits_per_byte(model, everything)
print(f"as trained: {plain:.3f} bits per byte")

# %% [markdown]
# Now with the weights of the experts in other formats (notebooks 7 and 8). Each line loads the model, quantises its experts in
# place, and reads the file again.

# %%
found = {}
for scheme in ("fp8_block", "mxfp8", "nvfp4_a16", "mxfp4_a16", "nvfp4"):
    small = load(device, torch.float32)
    tmoe.replace_moe(small, scheme=scheme)
    found[scheme] = bits_per_byte(small, everything)
    print(f"{scheme:10} {found[scheme]:.3f}")

# %% [markdown]
# `_a16` means: only the weights are small. In the others the experts' inputs are rounded to the same format as well.
#
# With 3584 bytes chance has a say in the last digit. The same was measured on 65536 bytes of Python's library, and
# recorded. This is how much *worse* each format is than the trained model:

# %%
with open(lesson.REPOSITORY / "docs" / "bits_per_byte.json") as file:
    record = json.load(file)["bits per byte"]
base = record["fp32"]["weights"]
names = ["fp8_tensor", "fp8_block", "mxfp8", "nvfp4", "mxfp4"]

worse = {
    what: [100 * (record[n][what] / base - 1) for n in names]
    for what in ("weights", "weights and activations")
}
figure, axes = pictures.panels(7.2, 3.0)
unit = "% more bits per byte than the trained model"
pictures.bar_pairs(axes, names, worse, unit, where="upper right")
pictures.show(
    figure,
    "8-bit formats cost a tenth of a per cent, 4-bit weights under one, 4-bit activations up to three",
)

# %% [markdown]
# 8 bits cost next to nothing. 4-bit weights cost less than 1 %. With 4 bits it is the *activations* that hurt: they change with every
# token and have outliers. That is why many models are served with 4-bit weights and 8- or 16-bit activations.
#
# A larger model has more numbers to spare and usually loses less. Measure yours: [docs/transformers.md](../docs/transformers.md).
#
# ## Exercises
#
# **1.** Bits per byte from what a model says: the chance that it gave to each byte that really came.


# %%
def bits(chances):
    """Probabilities of the true bytes, a list of numbers above 0 -> mean bits per byte, a float."""
    ...


lesson.check(bits)

# %% [markdown]
# **2.** How specialised is an expert? Its share among tokens of one kind, over its share among all tokens.


# %%
def specialisation(ids, is_kind, expert):
    """ids: experts of each token (a list of lists). is_kind: a bool for each token -> a float."""
    ...


lesson.check(specialisation)

# %% [markdown]
# **Next:** [14 · Training](14_training.ipynb): the way back.
