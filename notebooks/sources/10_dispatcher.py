# %% [markdown]
# # 10 · The dispatcher: who runs what, and why not
#
# There is more than one implementation of each operation. Plain PyTorch runs anywhere. The Triton kernels want a GPU.
# FlashInfer's kernels want a certain GPU, a certain version, certain shapes. A **backend** is one of these, and the
# **dispatcher** picks one for each call.
#
# Two rules make it pleasant. Nothing is ignored: a backend that can't do what you ask says so, with the number that stands in
# the way. And nothing falls back in silence.

# %%
# Needs Linux, Python 3.10 or newer, and in the repository's folder: pip install -e ".[notebooks]". No GPU.
import lesson

device = lesson.start()

# %%
from dataclasses import replace

import torch

import pictures
import tmoe

# %% [markdown]
# ## Describe
#
# A call is first written down as a **problem**: sizes, dtype, machine, and what is asked for. Nothing else is looked at afterwards.
# So you can ask about a machine that you don't have. Let us describe an H200 and one layer of Qwen3:
# %%
from tmoe.dispatch.known import MODELS, problem_of
from tmoe.dispatch.problem import Machine

h200 = Machine("cuda", "NVIDIA H200", (9, 0), torch_version="2.11.0", triton_version="3.6.0")
problem = problem_of(MODELS["qwen3-30b-a3b"], h200, num_tokens=64, dtype=torch.bfloat16)
print(problem)

# %% [markdown]
# ## Filter and rank
#
# Now every backend is asked: *why not?* It answers with nothing, which means yes, or with one sentence. Those who can are put
# in order by a table, and the first one runs. `tmoe.explain` shows it all.

# %%
print(tmoe.explain(problem))

# %% [markdown]
# ## Break it on purpose
#
# Change one thing at a time and read the answer. First: numbers of 64 bits.


# %%
def answer_of(backend, problem):
    (candidate,) = (c for c in tmoe.explain(problem).candidates if c.name == backend)
    return "yes" if candidate.accepted else candidate.reason


print("triton:", answer_of("triton", replace(problem, dtype=torch.float64)))

# %% [markdown]
# The kernels don't round to 32 bits and pretend. They say no, and PyTorch, which computes in 64 bits, takes over. More ways to
# hear a no:

# %%
asked = {
    "fp16 with NVFP4": replace(problem, dtype=torch.float16, scheme="nvfp4"),
    "an old GPU": replace(problem, machine=replace(h200, name="Tesla T4", capability=(7, 5))),
    "no Triton": replace(problem, machine=replace(h200, triton_version=None)),
    "no GPU": replace(problem, machine=Machine("cpu", triton_version="3.6.0")),
}
for name, changed in asked.items():
    print(f"{name:16} {answer_of('triton', changed)}")

# %% [markdown]
# Each answer names what was wanted and what came. That is the difference between five minutes and an afternoon.
#
# ## Everything at once
#
# Here is what each backend says to eight machines. Blue runs; a pale cell could run but another one comes first.

# %%
from tmoe.dispatch.known import GPUS

shown = ["A100", "L40S", "H200", "B200", "B300", "RTX5090", "MI300X"]
machines = {
    gpu: Machine("cuda", *GPUS[gpu], "2.11.0", "3.6.0", flashinfer_version="0.7.4") for gpu in shown
}
machines["no GPU"] = Machine("cpu", torch_version="2.11.0", triton_version="3.6.0")
backends = ["triton", "torch", "flashinfer_trtllm", "flashinfer_cutlass"]


def word(candidate, decision):
    if not candidate.accepted:
        return "no"
    return "runs" if candidate.name == decision.chosen else "could"


decisions = [tmoe.explain(replace(problem, machine=machine)) for machine in machines.values()]
words = [
    [word(c, decision) for decision in decisions for c in decision.candidates if c.name == backend]
    for backend in backends
]
figure, axes = pictures.panels(8.6, 2.6)
colours = {"runs": pictures.BLUE, "could": pictures.SKY}
pictures.table(axes, words, list(machines), backends, colours)
pictures.show(
    figure, "Triton runs on most GPUs, FlashInfer's trtllm on Blackwell ones, PyTorch without a GPU"
)

# %% [markdown]
# (FlashInfer also has to have the weights in a layout of its own, and to agree with Triton's result, before it gets a layer:
# [docs/flashinfer.md](../docs/flashinfer.md).)
#
# ## Why, in code
#
# This is how the Triton backend answers. Sentences, made from the numbers at hand:

# %%
from tmoe.backends.triton_backend import TritonBackend

lesson.show(TritonBackend.why_not, "if machine.device_type", "needs compute capability")

# %% [markdown]
# And this is the choice. It is a pure function: same problem, same answer, nothing measured, nothing remembered.

# %%
from tmoe.dispatch import resolve

lesson.show(resolve.resolve, "if forced is None", "return Decision(problem, chosen")

# %% [markdown]
# ## Force one
#
# `tmoe.options(backend=...)` asks for one backend. If that can't do it, you get an error, not another backend.

# %%
layer = tmoe.MoE(32, 16, tmoe.Routing(4, 2, "Renormalize")).to(device).requires_grad_(False)
x = torch.randn(3, 32, device=device)

try:
    with tmoe.options(backend="triton"):
        layer.double()(x.double())
except tmoe.NoBackendError as error:
    print(str(error).rpartition(": ")[2])

# %% [markdown]
# In 32 bits both can, and they agree:

# %%
layer = layer.float()
with tmoe.options(backend="triton"):
    y = layer(x)
with tmoe.options(backend="torch"):
    y_torch = layer(x)
print("same result:", torch.allclose(y, y_torch, atol=1e-5))

# %% [markdown]
# ## When nobody can
#
# Then the error has everyone's reason, so that you see what the smallest change would be. Here is an imaginary library with
# two backends; `resolve` takes any.


# %%
class OnlyShort:
    def why_not(self, problem):
        if problem.tokens > 16:
            return f"takes up to 16 tokens, got {problem.tokens}"


class OnlyHalf:
    def why_not(self, problem):
        if problem.dtype != torch.float16:
            return f"multiplies fp16, got {str(problem.dtype).removeprefix('torch.')}"


imaginary = {"short": OnlyShort(), "half": OnlyHalf()}
try:
    resolve.resolve(problem, backends=imaginary)
except tmoe.NoBackendError as error:
    print(error)

# %%
for changed in (replace(problem, tokens=8), replace(problem, dtype=torch.float16)):
    print(resolve.resolve(changed, backends=imaginary).chosen)

# %% [markdown]
# ## Exercises
#
# **1.** Write a backend's answer. It multiplies bf16 and fp16, and its tiles want a hidden size that is a multiple of 128. Return
# `None` if it can, otherwise a sentence in which the value that came is to be found.


# %%
def why_not(problem):
    """None, or why this backend can't run a problem with .dtype and .hidden."""
    ...


lesson.check(why_not)

# %% [markdown]
# **2.** Choose. `answers` are (name, reason) pairs in the order of preference; the reason is `None` if the backend can. If nobody
# can, raise a `RuntimeError` that has every name and every reason.


# %%
def choose(answers):
    """[("a", "too old"), ("b", None)] -> "b" """
    ...


lesson.check(choose)

# %% [markdown]
# **Next:** [11 · Tuning and the roofline](11_roofline.ipynb): how fast could it be?
