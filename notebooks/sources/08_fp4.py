# %% [markdown]
# # 8 · FP4
#
# Four bits: sixteen numbers. It sounds absurd, and yet large models are served with them. The trick is again the
# scale, now one for every 32 or 16 numbers.
#
# Two formats matter. **MXFP4** is an open standard; gpt-oss is stored in it. **NVFP4** is NVIDIA's.

# %%
# Needs Linux, Python 3.10 or newer, and in the repository's folder: pip install -e ".[notebooks]". No GPU.
import lesson

device = lesson.start()

# %%
import torch

import pictures
import tmoe

# %% [markdown]
# ## The sixteen numbers
#
# The code is called **e2m1**: a sign, two bits of exponent, one of mantissa. No infinity, no NaN, and 0 twice.

# %%
values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
for code, value in enumerate(values):
    print(f"code {code:04b} is {value:3}    code {code + 8:04b} is -{value}")

# %%
figure, axes = pictures.panels(8.0, 1.9)
both_signs = sorted({sign * value for value in values for sign in (-1, 1)})
middles = [(a + b) / 2 for a, b in zip(both_signs[:-1], both_signs[1:], strict=True)]
label = "e2m1 numbers (blue) and the borders between them (dashed)"
pictures.number_line(axes, both_signs, label, borders=middles)
axes.set_xticks([-6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6])
pictures.show(figure, "the numbers from -6 to 6; dense near 0, two apart at the ends")

# %% [markdown]
# A number becomes the nearest of these. 2.6 becomes 3, and 4.9 becomes 4. On a border the *even code* wins: 2.5 lies between
# code 4 and code 5 and becomes code 4, which is 2.
#
# ## Rounding with one bent line
#
# The kernel has no table. Look at the code as a function of the value: it is a line with two bends. Each of the three pieces
# is a straight line, and the **lowest** of them counts. Rounding to a whole number does the rest.

# %%
from tmoe.kernels import rounding

lesson.show(rounding.encode_e2m1, "low = ", "code = ")

# %%
a = torch.linspace(0, 6, 400)
three = {"2a": 2 * a, "a + 2": a + 2, "a / 2 + 4": a / 2 + 4}
lowest = torch.minimum(torch.minimum(2 * a, a + 2), a / 2 + 4)

figure, axes = pictures.panels(5.4, 3.4)
pictures.curves(axes, a, {**three, "code": lowest.round()}, "magnitude a", "code")
axes.set_ylim(0, 8.5)
pictures.show(figure, "a staircase of eight codes along the lowest of three lines")

# %% [markdown]
# ## MXFP4
#
# 32 neighbours of a row share a **power of two**. It is stored as one byte: byte b means 2^(b − 127). So a number costs
# 4 + 8/32 = 4.25 bits.

# %%
block = torch.zeros(1, 32)
block[0, :4] = torch.tensor([0.3, -1.0, 2.0, 3.5])
q = tmoe.quantize(block.to(device), "mxfp4")

print("scale byte:", q.scale.item(), "which is 2 to the power", q.scale.item() - 127)
print("values:    ", q.dequantize()[0, :4].tolist())

# %% [markdown]
# Two codes share a byte. **The first one is the low half.** −1 is code 1010 and 0.5 is code 0001; together they are the byte
# 1010 0001. Swapping the halves is the classic mistake: the numbers still look plausible.

# %%
for number, byte in enumerate(q.data[0, :2].tolist()):
    print(f"byte {number}: {byte:08b} = {byte >> 4:04b} {byte & 15:04b}")

# %% [markdown]
# ### Which power of two?
#
# Take a block whose largest magnitude is 7. With scale 1 the 7 saturates at 6. With scale 2 it becomes 3.5 and fits, but all
# others have steps twice as large. Three rules are in use. `floor` looks at the exponent only; `ceil` never
# saturates; `even` rounds first and lies in between.

# %%
largest = [4.0 + 0.25 * n for n in range(17)]
block = torch.zeros(len(largest), 32)
block[:, 0] = torch.tensor(largest)
rules = ("floor", "even", "ceil")
by_rule = [tmoe.quantize(block, "mxfp4", scale_rule=rule) for rule in rules]

figure, (upper, lower) = pictures.panels(9.0, 3.4, 2, 1, sharex=True)
scales = [[2.0 ** (byte - 127) for byte in q.scale.flatten().tolist()] for q in by_rule]
pictures.heat_map(upper, scales, "", "", form="{:g}", largest=2.5)
upper.set_title("scale of the block")
pictures.heat_map(lower, [q.dequantize()[:, 0] for q in by_rule], "", "", form="{:g}", smallest=3)
lower.set_title("what becomes of its largest magnitude")
lower.set_xlabel("largest magnitude of the block")
for axes in (upper, lower):
    axes.set_yticks(range(3), rules)
    axes.set_xticks(range(17), [f"{value:g}" for value in largest], fontsize=8)
pictures.show(figure, "the scale goes from 1 to 2 at 8 by floor, at 7 by even, above 6 by ceil")

# %% [markdown]
# From 6.25 to 6.75 `even` and `ceil` give the largest magnitude the same value, but `even` keeps the smaller steps for
# the other 31 numbers. `tmoe` uses `even` for MXFP4 unless told otherwise, since its error is the smallest for most data.
#
# ## NVFP4
#
# Powers of two are coarse. NVFP4 uses blocks of **16** and an **e4m3** number as their scale, which follows the largest
# magnitude more closely. But e4m3 ends at 448 (notebook 7). So there is one more, **global** scale for the whole matrix, in
# 32 bits, which brings the block scales into range:
#
#     global = max |x| of the matrix / (448 · 6)
#     scale  = e4m3(max |x| of the block / (6 · global))
#     code   = e2m1(x / (scale · global))

# %%
x = torch.zeros(2, 16)
x[0, :4] = torch.tensor([0.3, -1.0, 2.0, 3.5])
x[1, 0] = 0.01  # a small block
q = tmoe.quantize(x.to(device), "nvfp4")

print(f"global scale: 3.5 / 2688 = {q.global_scale.item():.8f}")
print("block scales:", q.scale.float().flatten().tolist())
print("row 0:", [round(v, 4) for v in q.dequantize()[0, :4].tolist()])
print("row 1:", [round(v, 6) for v in q.dequantize()[1, :1].tolist()])

# %% [markdown]
# The block with the largest magnitude gets the largest scale, 448, and its largest number is exact. A number costs 4 + 8/16
# = 4.5 bits.
#
# ## How good is it?

# %%
from tmoe.formats import compare_formats

torch.manual_seed(0)
names = ["fp8_token", "mxfp8", "nvfp4", "mxfp4"]
reports = {r.name: r for r in compare_formats(torch.randn(128, 512), names).reports}
for name in names:
    r = reports[name]
    print(
        f"{name:10} {r.bits_per_value:.2f} bits  {r.snr_db:.1f} dB  {100 * r.flushed:4.1f} % became 0"
    )

# %%
figure, axes = pictures.panels(6.0, 2.2)
pictures.bars(axes, names, [reports[n].snr_db for n in names], "signal to noise, dB", form="{:.1f}")
pictures.show(figure, "8-bit formats have 31.5 dB, NVFP4 20 and MXFP4 19")

# %% [markdown]
# About 12 dB less than 8 bits: the error is four times as large. Of MXFP4's numbers one in ten becomes 0. What that does to a model
# is measured in notebook 13.
#
# ## The swizzle
#
# Blackwell GPUs multiply FP4 codes together with their scales in one instruction. It wants the scales in memory in an order
# of its own, the **128 × 4 swizzle**. Tiles of 128 rows and 4 columns are 512 bytes, and inside a tile row m stands next to
# the rows m + 32, m + 64 and m + 96.

# %%
from tmoe.formats import swizzle_scale, unswizzle_scale

scale = (
    torch.arange(128, dtype=torch.uint8)[:, None].expand(128, 4).contiguous()
)  # each row's number
line = swizzle_scale(scale).flatten()

print("the first 32 bytes are those of rows", line[:32:4].tolist())

# %%
figure = pictures.swizzle(line.tolist())
pictures.show(
    figure, "each line of 16 bytes holds four columns of rows m, m + 32, m + 64 and m + 96"
)

# %% [markdown]
# As a formula, for C columns rounded up to a multiple of 4, row m and column k are at byte
#
#     (m // 128) · C · 128 + (k // 4) · 512 + (m % 32) · 16 + (m % 128 // 32) · 4 + k % 4
#
# tmoe keeps scales in plain order and swizzles them where a GPU wants it. It can be undone exactly:

# %%
print(torch.equal(unswizzle_scale(swizzle_scale(scale), 128, 4), scale))

# %% [markdown]
# ## Exercises
#
# **1.** The nearest e2m1 code of a magnitude. On a border take the even code; beyond 6 take code 7.


# %%
def e2m1_code(a):
    """A magnitude, a >= 0 -> a code from 0 to 7."""
    ...


lesson.check(e2m1_code)

# %% [markdown]
# **2.** Pack codes two to a byte.


# %%
def pack(codes):
    """A list of 4-bit codes, an even number of them -> a list of bytes."""
    ...


lesson.check(pack)

# %% [markdown]
# **3.** Which power of two, by the rule `ceil`: the smallest e with largest ≤ 6 · 2^e.


# %%
def ceil_exponent(largest):
    """The largest magnitude of a block, > 0 -> e as an int."""
    ...


lesson.check(ceil_exponent)

# %% [markdown]
# **Next:** [9 · Combine](09_combine.ipynb): adding up, and why the order matters.
