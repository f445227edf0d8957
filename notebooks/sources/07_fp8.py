# %% [markdown]
# # 7 · FP8
#
# A model that writes text reads its weights from memory again for every token. With half as many bytes per number it
# could be twice as fast. FP8 numbers have 8 bits, one byte. That is 256 different numbers and no more. This notebook is about
# making do with them.

# %%
# Needs Linux, Python 3.10 or newer, and in the repository's folder: pip install -e ".[notebooks]". No GPU.
import lesson

device = lesson.start()

# %%
import torch

import pictures
import tmoe

# %% [markdown]
# ## All the numbers there are
#
# The format is called **e4m3**: one bit for the sign, four for the exponent, three for the mantissa. Here are all positive
# ones. Between two powers of two there are always eight steps.

# %%
codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
positive = codes[(codes > 0) & codes.isfinite()].sort().values

print(len(positive), "positive numbers")
print("smallest:", positive[:4].tolist())
print("around 1:", positive[(positive >= 1) & (positive <= 2)].tolist())
print("largest: ", positive[-4:].tolist())

# %%
figure, (upper, lower) = pictures.panels(8.0, 2.7, 2, 1)
pictures.number_line(upper, positive.tolist(), "all of them (logarithmic)")
upper.set_xscale("log", base=2)
between = positive[(positive >= 8) & (positive <= 64)]
pictures.number_line(lower, between.tolist(), "from 8 to 64 (as they lie)")
pictures.show(figure, "the positive e4m3 numbers; the gap doubles at each power of two")

# %% [markdown]
# So rounding moves a number by at most 1/16 of itself, whatever its size, as long as it lies between 2^-6 and 448. That is
# what a *floating point* does.
#
# ## What is too large
#
# 448 is the end. There is no infinity. What should become of 500? Some casts make a NaN of it, and in a model one NaN spreads
# to everything. `tmoe` **saturates**: too large becomes 448, on every machine.

# %%
x = torch.tensor([[100.0, 448.0, 460.0, 500.0, -10000.0]])
q = tmoe.quantize(x.to(device), "fp8_tensor", scale=1.0)
print(q.dequantize().tolist()[0])

# %% [markdown]
# 100 has become 96, by the way. Between 64 and 128 the steps are 8, and 100 lies in the middle of two.
#
# ## Scales
#
# Weights are often around 0.02 and activations may reach 1000. So numbers are divided by a **scale** first, such that the
# largest becomes 448, and multiplied by it again afterwards:
#
#     scale = max |x| / 448        code = e4m3(x / scale)        value = code · scale

# %%
x = torch.tensor([[0.3, -1.0, 2.0, 3.5]])
q = tmoe.quantize(x.to(device), "fp8_token")

print("scale: ", q.scale.item(), "= 3.5 / 448 = 1/128")
print("codes: ", q.data.float().tolist()[0])
print("values:", q.dequantize().tolist()[0])

# %% [markdown]
# 0.3 · 128 is 38.4. Between 32 and 64 the steps are 4, so 38.4 becomes 40, and 0.3 becomes 0.3125. The others are exact.
#
# ## One scale for how many numbers?
#
# Few scales are cheap. But one large number, an *outlier*, makes the scale large for all that share it, and small
# numbers vanish. Real activations do have outliers. Here are 8 tokens; token 5 is large, and so is column 100 of token 2.

# %%
torch.manual_seed(0)
x = torch.randn(8, 256)
x[5] *= 2000
x[2, 100] = 2e6

choices = {
    "fp8_tensor: one scale": {"format": "fp8_tensor"},
    "fp8_token: one per row": {"format": "fp8_token"},
    "fp8_block: one per 128": {"format": "fp8_block", "block_shape": (1, 128)},
}
for name, choice in choices.items():
    q = tmoe.quantize(x, **choice)
    zeros = (q.dequantize() == 0).float().mean().item()
    print(f"{name:24} {q.scale.numel():2} scales, {100 * zeros:4.1f} % of the numbers became 0")

# %%
figure, three = pictures.panels(9.0, 2.7, 1, 3, sharey=True)
for axes, (name, choice) in zip(three, choices.items(), strict=True):
    y = tmoe.quantize(x, **choice).dequantize()
    error = ((y - x).abs() / x.abs()).view(8, 16, 16).mean(-1)  # means over 16 columns
    pictures.heat_map(
        axes, error, "columns, 16 each", "token" if axes is three[0] else "", form=None, largest=1.0
    )
    axes.set_title(name, fontsize=9)
    axes.set_xticks([0, 5, 10, 15])
pictures.show(
    figure,
    "mean relative error: with one scale most is lost, per token only row 2, per block half of it",
)

# %% [markdown]
# Dark is a small error. Yellow means that (nearly) everything there became 0.
#
# * One scale for all: the huge number in token 2 ruins the others.
# * One per token: the damage stays in token 2.
# * One per 128 neighbours: only the half of token 2 that holds the huge number is lost.
#
# ## How good is good?
#
# The usual measure is *signal to noise* in decibel: 10 · log10(sum of squares / sum of squared errors). 6 dB more means half
# the error. On well-behaved numbers all three are alike:

# %%
from tmoe.formats import error_report

torch.manual_seed(0)
tame = torch.randn(64, 256)
for name, choice in choices.items():
    report = error_report(tame, **choice)
    print(f"{name:24} {report.snr_db:.1f} dB at {report.bits_per_value:.2f} bits per number")

# %% [markdown]
# ## A scale that was measured before
#
# Computing the largest |x| takes a pass over all numbers. A **static** scale was measured once, on sample texts, and is then
# given. It saves the pass. What turns out larger than the samples saturates:

# %%
x = torch.linspace(-6, 6, 241)[None]
y = tmoe.quantize(x, "fp8_tensor", scale=4 / 448).dequantize()

figure, axes = pictures.panels(5.4, 3.0)
values = {"exact": x[0].tolist(), "FP8, scale 4 / 448": y[0].tolist()}
pictures.curves(axes, x[0].tolist(), values, "x", "value")
pictures.show(figure, "values follow x from -4 to 4 and are cut there")

# %% [markdown]
# ## In the kernel
#
# The maximum of a block, the scale from it, and the codes:

# %%
from tmoe.kernels import rounding

lesson.show(rounding.e4m3_scale)
lesson.show(rounding.e4m3_codes)

# %% [markdown]
# Newer GPUs have an instruction that rounds to e4m3. For all others, and for the interpreter, there is a nice trick. 32-bit
# floats near 1.5 · 2^23 are exactly 1 apart. So adding that number *rounds to whole numbers*, and taking it away again leaves
# the result. Multiplied by the step, it rounds to any step:

# %%
magic = torch.tensor(1.5 * 2**23)
x = torch.tensor([0.4, 0.5, 1.5, 2.5, 38.4])

print("whole numbers:    ", ((x + magic) - magic).tolist())
print("multiples of 4:   ", ((x + 4 * magic) - 4 * magic).tolist())

# %% [markdown]
# 0.5 became 0, 1.5 became 2 and 2.5 became 2: when two are equally near, the *even* one wins. Otherwise rounding would push
# everything up a little. This is that trick in the kernel; `steps` is the magic number for the step of each x:

# %%
lesson.show(rounding.encode_e4m3, "a = at_most", "return tl.where")

# %% [markdown]
# ## Where the scale goes
#
# A product of matrices can use codes directly, if the scale comes out of the sum: Σ (a·sa)(w·sw) = sa·sw · Σ a·w. With one
# scale per row that works for the whole depth. With blocks of 128 each block is summed by itself, multiplied by its two
# scales, and added to the total.

# %%
torch.manual_seed(1)
a, w = torch.randn(4, 256), torch.randn(8, 256)
qa = tmoe.quantize(a, "fp8_token")
qw = tmoe.quantize(w, "fp8_channel")

sums = qa.data.float() @ qw.data.float().T  # of codes alone
y = sums * qa.scale[:, None] * qw.scale[None, :]
print(
    "same as with the values:",
    torch.allclose(y, qa.dequantize() @ qw.dequantize().T, rtol=1e-4, atol=1e-3),
)
error = (y - a @ w.T).norm() / (a @ w.T).norm()
print(f"error against unquantised: {100 * error.item():.0f} %")

# %% [markdown]
# A few per cent in one product sounds like much. The errors are random and largely cancel in a model: notebook 13 measures
# that a trained model hardly notices.
#
# ## Exercises
#
# **1.** One scale per token. A row of zeros gets the scale 1, so that nobody divides by 0.


# %%
def token_scales(x):
    """(T, H) -> (T,): the largest magnitude of each row becomes 448."""
    ...


lesson.check(token_scales)

# %% [markdown]
# **2.** Round to multiples of a step with the magic number, to the even multiple in a tie. Don't use `torch.round`.


# %%
def round_to_step(x, step):
    """A tensor of 32-bit floats, |x| < 1000 steps -> the nearest multiples of `step`, a power of two."""
    ...


lesson.check(round_to_step)

# %% [markdown]
# **3.** Multiply codes that have a scale per block of the depth: sum each block by itself, as a kernel does.


# %%
def blockwise_product(a, a_scale, w, w_scale, block):
    """a (T, D), a_scale (T, D / block), w (N, D), w_scale (N, D / block) -> (T, N)"""
    ...


lesson.check(blockwise_product)

# %% [markdown]
# All formats with worked examples: [docs/formats.md](../docs/formats.md).
#
# **Next:** [8 · FP4](08_fp4.ipynb), half of that again.
