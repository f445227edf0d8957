"""Packed ids, read back by a hand-written parser of the 32 bits."""

from __future__ import annotations

import struct

import pytest
import torch

import tmoe
from tmoe.routing.packing import pack_topk, unpack_topk

VALUES = [0.0, -0.0, 1.0, -0.5, -1.0, 3.1415926, -65504.0, 1e-40, torch.inf, -torch.inf, torch.nan]
IDS = [0, 1, 3, 255, 256, 32767, -1]


def by_hand(packed):
    """(id, weight) of an int32: two little-endian halves; a bfloat16 is half a float32."""
    low, high = struct.unpack("<Hh", struct.pack("<i", packed))
    return high, struct.unpack("<f", struct.pack("<HH", 0, low))[0]


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_id_with_every_weight(dtype, ids_dtype):
    ids = torch.tensor(IDS, dtype=ids_dtype)[:, None].expand(-1, len(VALUES))
    weights = torch.tensor(VALUES).to(dtype).expand(len(IDS), -1)
    packed = pack_topk(ids, weights)
    assert packed.dtype == torch.int32 and packed.shape == ids.shape
    rounded = weights.to(torch.bfloat16)
    for i, row in enumerate(packed.tolist()):
        for j, word in enumerate(row):
            expert, weight = by_hand(word)
            assert expert == IDS[i]
            got = torch.tensor([weight, rounded[i, j].item()])
            assert torch.equal(got[0], got[1]) or got.isnan().all()
            assert got[0].signbit() == got[1].signbit()
    back_ids, back_weights = unpack_topk(packed)
    assert torch.equal(back_ids, ids.int())
    assert torch.equal(back_weights.view(torch.int16), rounded.view(torch.int16))


def test_a_negative_weight_leaves_the_id_alone():
    """The example of the trap: without the mask, id 3 comes back as -1."""
    weights = torch.tensor([-0.5])
    unmasked = (torch.tensor([3]) << 16) | weights.bfloat16().view(torch.int16).int()
    assert by_hand(int(unmasked)) == (-1, -0.5)
    assert by_hand(int(pack_topk(torch.tensor([3]), weights))) == (3, -0.5)


def test_what_route_returns_packs():
    routing = tmoe.Routing(512, 8, "TopK")  # raw logits as weights: some are negative
    weights, ids = tmoe.route(torch.randn(16, 512) - 4, routing)
    assert (weights < 0).any()
    back_ids, back_weights = unpack_topk(pack_topk(ids, weights))
    assert torch.equal(back_ids, ids) and torch.equal(back_weights, weights.bfloat16())


def test_all_bit_patterns_survive():
    every = torch.arange(2**16).to(torch.int16).view(torch.bfloat16)
    ids = torch.arange(2**16) % 2**15
    packed = pack_topk(ids, every)
    assert torch.equal(unpack_topk(packed)[1].view(torch.int16), every.view(torch.int16))
    assert torch.equal(unpack_topk(packed)[0], ids.int())
    words = torch.arange(2**16, dtype=torch.int32) * 65521  # any int32 with a small negative id or
    kept = unpack_topk(words)[0] >= -1  # a real one
    assert torch.equal(pack_topk(*unpack_topk(words))[kept], words[kept])


def test_other_negative_ids_are_dropped_slots_too():
    packed = pack_topk(torch.tensor([-7, -(2**40)]), torch.ones(2))
    assert unpack_topk(packed)[0].tolist() == [-1, -1]


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (2, 3, 4), ()])
def test_any_shape(shape):
    ids, weights = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
    assert pack_topk(ids, weights).shape == shape


def test_strided_input_and_gradients():
    ids = torch.arange(12, dtype=torch.int32).view(3, 4).T
    weights = torch.rand(3, 4, requires_grad=True).T
    got_ids, got_weights = unpack_topk(pack_topk(ids, weights))
    assert torch.equal(got_ids, ids) and torch.equal(got_weights, weights.detach().bfloat16())


def test_under_torch_compile_a_large_id_is_dropped():
    """As on a GPU, where nobody looks at the value: never another expert."""
    compiled = torch.compile(pack_topk, fullgraph=True, backend="aot_eager")
    ids = torch.tensor([5, 32768, 65536 + 3, 2**40])
    assert unpack_topk(compiled(ids, torch.ones(4)))[0].tolist() == [5, -1, -1, -1]


@pytest.mark.gpu
def test_same_bits_on_the_gpu():
    ids, weights = torch.tensor(IDS), torch.tensor(VALUES[: len(IDS)])
    assert torch.equal(pack_topk(ids.cuda(), weights.cuda()).cpu(), pack_topk(ids, weights))
    assert unpack_topk(pack_topk(ids.cuda() + 32767, weights.cuda()))[0].tolist() == (
        [32767, -1, -1, -1, -1, -1, 32766]
    )


def test_refused():
    ids, weights = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, 3)
    with pytest.raises(ValueError, match="pack_topk: topk_ids must be at most 32767, got 32768"):
        pack_topk(torch.tensor([0, 32768]), torch.ones(2))
    with pytest.raises(TypeError, match="topk_ids must have dtype int32 or int64"):
        pack_topk(weights, ids)
    with pytest.raises(TypeError, match="topk_weights must have a floating-point dtype"):
        pack_topk(ids, ids)
    with pytest.raises(ValueError, match=r"of shape \(2, 3\), as topk_ids, got \(2, 1\)"):
        pack_topk(ids, weights[:, :1])
    with pytest.raises(TypeError, match="packed must have dtype int32, got torch.int64"):
        unpack_topk(ids.long())
