"""Layers on a machine that has FlashInfer, as far as tmoe can tell."""

from __future__ import annotations

from contextlib import contextmanager

import torch
import triton

import tmoe
from tests.backends.flashinfer import stand_in
from tmoe.activation import Activation
from tmoe.backends.flashinfer import installed
from tmoe.dispatch import measure, problem, verify
from tmoe.dispatch.problem import Machine
from tmoe.formats import SCHEMES
from tmoe.library import operation

TRTLLM, CUTLASS = "flashinfer_trtllm", "flashinfer_cutlass"
E, K, H, I, T = 4, 2, 256, 128, 3
SWIGLU, OAI = Activation("swiglu"), Activation.swiglu_oai(limit=3.0)


def relative_error(got, want):
    return ((got - want).float().norm() / want.float().norm()).item()


@contextmanager
def machine(monkeypatch, folder, version="0.7.4", faults=None, capability=(10, 0)):
    """A machine with this FlashInfer; yields the stand-in."""
    monkeypatch.setenv("TMOE_CACHE_DIR", str(folder))
    name = "NVIDIA H200" if capability == (9, 0) else "NVIDIA B200"
    here = Machine("cuda", name, capability, torch.__version__, triton.__version__, True, version)
    monkeypatch.setattr(problem, "_machine", lambda device: here)
    forget()
    with stand_in.installed(version, faults, capability) as fake:
        yield fake
    forget()


def forget():
    tmoe.release()
    verify.forget()
    installed.forget()
    for cached in (operation._choose, measure._times, measure._store):
        cached.cache_clear()


class Layer:
    """Weights of a scheme and a call's arguments."""

    def __init__(self, scheme=None, activation=SWIGLU, *, bias=False, window=None, on_input=False):
        count = E if window is None else window[1]
        rows = I * (2 if activation.gated else 1)
        self.scheme, self.window = scheme, window
        weights = torch.randn(count, rows, H) / 16, torch.randn(count, H, I) / 11
        weights = [w.bfloat16() for w in weights]
        if scheme is not None:
            recipe = SCHEMES[scheme].weights[0]
            block = recipe.block_shape if recipe.format.name == "fp8_block" else None
            weights = [tmoe.quantize(w, recipe.format.name, block_shape=block) for w in weights]
        self.weights = weights
        static = scheme is not None and SCHEMES[scheme].takes_scales
        scale = {"fp8_tensor": 4 / 448, "nvfp4": 4 / (6 * 448)}.get(scheme, 1.0)
        self.keywords = {
            "activation": activation, "scheme": scheme, "weight_on_input": on_input,
            "gate_up_bias": torch.randn(count, rows).bfloat16() if bias else None,
            "down_bias": torch.randn(count, H).bfloat16() if bias else None,
            "input_scale": torch.tensor(scale) if static else None,
            "hidden_scale": torch.tensor(scale) if static else None,
            "first_expert": 0 if window is None else window[0],
            "num_experts": E,
        }  # fmt: skip
        self.top_k = 1 if on_input else K

    def tensor(self, name):
        if name == "bias":
            return self.keywords["down_bias"]
        return self.weights[("gate_up", "down").index(name)]

    def tokens(self, count=T):
        ids = torch.rand(count, E).argsort(dim=1)[:, : self.top_k]
        return torch.randn(count, H).bfloat16(), 0.1 + torch.rand(count, self.top_k) / 2, ids.int()

    def __call__(self, x, topk_weights, topk_ids, **keywords):
        return tmoe.fused_experts(
            x, *self.weights, topk_weights, topk_ids, **self.keywords | keywords
        )

    def prepare(self, verify=False):
        """Verification runs interpreted kernels, so only tests of it ask for it."""
        with tmoe.prepare(), tmoe.options(verify=verify):
            return self(*self.tokens(1))


def problem_of(layer):
    """What a call of the layer asks for, its weights not prepared."""
    return problem.Problem(
        "fused_experts", T, H, I, E, layer.top_k, torch.bfloat16, Machine.of("cpu"),
        activation=layer.keywords["activation"], scheme=layer.scheme,
        has_bias=layer.keywords["down_bias"] is not None,
        weight_on_input=layer.keywords["weight_on_input"],
        has_static_scales=layer.keywords["input_scale"] is not None, window=layer.window,
    )  # fmt: skip


def said_of(layer, backend=TRTLLM):
    """What explain says of a backend after a call of the layer."""
    return next(c for c in tmoe.explain(problem_of(layer)).candidates if c.name == backend)
