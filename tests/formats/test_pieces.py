"""Cuts along rows and columns, and joins: the same values as of the dequantised tensors."""

from __future__ import annotations

import pytest
import torch

from tmoe import quantize
from tmoe.formats import QuantizedTensor

E, M, K = 3, 384, 256
WEIGHTS = {
    "fp8_tensor": {},
    "fp8_channel": {},
    "fp8_block": {"block_shape": (128, 128)},
    "fp8_block of rows": {"block_shape": (1, 128)},
    "mxfp8": {},
    "mxfp4": {},
    "nvfp4": {},
}


@pytest.fixture(params=WEIGHTS)
def q(request):
    name, options = request.param.split()[0], WEIGHTS[request.param]
    x = torch.randn(E, M, K) * 2.0 ** torch.randint(
        -3, 3, (E, M // 128, K // 128)
    ).repeat_interleave(128, 1).repeat_interleave(128, 2)
    return quantize(x, name, **options)


CUTS = {
    "rows": lambda t: t[:, 128:256],
    "rows to the end": lambda t: t[:, 256:],
    "no rows": lambda t: t[:, 128:128],
    "rows past the end": lambda t: t[:, 256:999],
    "rows from the end": lambda t: t[:, -128:],
    "all": lambda t: t[:, :],
    "columns": lambda t: t[..., 128:],
    "rows and columns": lambda t: t[:, :128, :128],
    "of experts": lambda t: t[1:, :128],
    "of one expert": lambda t: t[2][128:],
    "narrow": lambda t: t.narrow(1, 128, 128),
    "chunk": lambda t: t.chunk(3, dim=1)[1],
    "split": lambda t: t.split(128, dim=-1)[1],
    "split unevenly": lambda t: t.split(256, dim=1)[1],
}


@pytest.mark.parametrize("name", CUTS)
def test_a_cut_has_the_values_of_the_whole(q, name):
    got, want = CUTS[name](q), CUTS[name](q.dequantize())
    assert isinstance(got, QuantizedTensor) and got.shape == want.shape
    assert torch.equal(got.dequantize(), want)


def test_a_cut_is_a_view(q):
    q[:, :128].data.view(torch.uint8).zero_()
    assert (q.dequantize()[:, :128] == 0).all()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_experts_and_rows_joined_again(q, count):
    experts = torch.cat([q[e : e + 1] for e in range(count)])
    assert torch.equal(experts, q[:count])
    assert torch.equal(torch.stack([q[e] for e in range(count)]), q[:count])
    if q.format in ("fp8_tensor", "nvfp4") and count == 3:  # a scale for each: no such format
        with pytest.raises(ValueError, match=r"two of as many rows, .* got rows \[128, 128, 128\]"):
            torch.cat(q.split(128, 1), 1)
    else:
        rows = torch.cat([q[:, 128 * i : 128 * (i + 1)] for i in range(count)], dim=1)
        assert torch.equal(rows.dequantize(), q.dequantize()[:, : 128 * count])


def test_gate_and_up_of_different_scales_become_halves():
    """What a checkpoint has as w1 and w3 (ModelOpt: one scale for each)."""
    for name in ("fp8_tensor", "nvfp4"):
        gate, up = quantize(torch.randn(E, 64, K), name), quantize(9 * torch.randn(E, 64, K), name)
        both = torch.cat([gate, up], dim=1)
        scale = both.scale if name == "fp8_tensor" else both.global_scale
        assert scale.shape == (E, 2)
        assert torch.equal(both.dequantize(), torch.cat([gate.dequantize(), up.dequantize()], 1))
        assert torch.equal(both.chunk(2, 1)[1], up) and torch.equal(both[:, :64], gate)
        assert torch.equal(both[:, 70:80].dequantize(), up.dequantize()[:, 6:16])
        with pytest.raises(ValueError, match="within one half of 128 rows.* got 60:70"):
            both[:, 60:70]
        with pytest.raises(ValueError, match="one, or one for each half, everywhere"):
            torch.cat([both, quantize(torch.randn(E, 128, K), name)])


REFUSED = {
    "rows must be cut at multiples of 128 for fp8_block, got 64:128": (
        "fp8_block", lambda q: q[:, 64:128]
    ),
    "rows must be cut at multiples of 128 for fp8_block, got 128:200": (
        "fp8_block", lambda q: q[:, 128:200]
    ),
    "columns must be cut at multiples of 128 for fp8_block, got 0:64": (
        "fp8_block", lambda q: q[..., :64]
    ),
    "columns must be cut at multiples of 32 for mxfp4, got 16:256": (
        "mxfp4", lambda q: q[..., 16:]
    ),
    "columns must be cut at multiples of 16 for nvfp4, got 8:16": ("nvfp4", lambda q: q[..., 8:16]),
    "rows must be a multiple of 128 for fp8_block": (
        "fp8_block", lambda q: torch.cat([q[:, 256:], quantize(
            torch.randn(E, 200, K), "fp8_block", block_shape=(128, 128)), q], 1)
    ),
    "all tensors must be alike but for dimension 0": (
        "mxfp8", lambda q: torch.cat([q, q[..., :128]])
    ),
    "all tensors must be like": ("mxfp8", lambda q: torch.stack([q[0], q[0][:128]])),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_a_cut_through_a_block_is_refused_with_the_numbers(message):
    name, run = REFUSED[message]
    q = quantize(torch.randn(E, M, K), name, **WEIGHTS[name])
    with pytest.raises(ValueError, match=message):
        run(q)


def test_a_partial_last_block_can_be_cut_off_and_stays_last():
    q = quantize(torch.randn(E, 200, 320), "fp8_block", block_shape=(128, 128))
    assert torch.equal(q[:, 128:].dequantize(), q.dequantize()[:, 128:])
    assert torch.equal(q[..., 256:].dequantize(), q.dequantize()[..., 256:])
    assert torch.equal(torch.cat([q[:, :128], q[:, 128:]], 1), q)
