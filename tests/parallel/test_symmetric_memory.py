"""Rows that ranks write into one another's memory: here files that both map, on GPUs NVLink."""

import ctypes
import inspect
import os
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from tests.parallel import symmetric_ranks
from tests.parallel.cases import Case
from tests.parallel.ranks import ranks
from tests.parallel.test_wire import problem
from tmoe.parallel import peers
from tmoe.parallel.choose import choose
from tmoe.parallel.groups import Group
from tmoe.parallel.peers import unlinked

DPEP = {"mesh": (2,), "dims": ("x",), "ep": "x", "dp": "x"}
CASES = [
    Case("uneven tokens", **DPEP, tokens=(7, 3)),
    Case("a rank without tokens", **DPEP, tokens=(0, 4)),
    Case("no tokens at all", **DPEP, tokens=(0, 0)),
    Case("K above experts per rank", **DPEP, tokens=(4, 3), top_k=5, layer={"bias": True}),
    Case("one expert takes all EP14", **DPEP, tokens=(9, 4), all_to=5),
    Case("same tokens", mesh=(2,), dims=("x",), ep="x", tokens=(5,)),
    Case("one token for two", mesh=(2,), dims=("x",), ep="x", tokens=(1,), fixed=True),
    Case("copies", **DPEP, tokens=(6, 3), placement=((5, 0, 3, 1), (1, 2, 4, 5))),
    Case("odd hidden size, bf16", **DPEP, tokens=(4, 3), hidden=13, dtype=torch.bfloat16),
    Case("shared expert", **DPEP, tokens=(5, 2), layer={"shared_intermediate_size": 10}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.why)
def test_two_ranks(two, case):
    two.run(symmetric_ranks.compared, replace(case, grads=False))


FOUR = [
    Case("own tokens", (4,), ("x",), (5, 0, 2, 9), ep="x", dp="x", top_k=3),
    Case("shares of the same tokens", (2, 2), ("a", "b"), (5, 2), ep=("a", "b"), dp="a"),
    Case("tp", (2, 2), ("a", "b"), (5, 2), tp="b", ep="a", dp="a", layer={"bias": True}),
    Case("deterministic", (4,), ("x",), (5, 0, 2, 9), ep="x", dp="x", deterministic=True, top_k=4),
]


@pytest.mark.parametrize("case", FOUR, ids=lambda c: c.why)
def test_four_ranks(four, case):
    for found in four.run(symmetric_ranks.compared, replace(case, grads=False)):
        assert found["same_bits"] or not case.deterministic


SAME = [
    Case("fixed", **DPEP, tokens=(6, 6), fixed=True),
    Case("room for some", **DPEP, tokens=(6, 6), fixed=2, top_k=1),
    Case("bf16 slot by slot", **DPEP, tokens=(5, 5), fixed=True, deterministic=True, top_k=3,
         dtype=torch.bfloat16),
    Case("codes", **DPEP, tokens=(5, 5), fixed=True, hidden=64, intermediate=48, experts=4,
         scheme="nvfp4", backend="triton"),
    Case("codes and their scales", **DPEP, tokens=(4, 4), fixed=True, hidden=256,
         intermediate=256, experts=4, scheme="fp8_block", backend="triton",
         dtype=torch.bfloat16),
]  # fmt: skip


@pytest.mark.parametrize("case", SAME, ids=lambda c: c.why)
@pytest.mark.parametrize("kernel", [False, True], ids=["torch", "triton"])
def test_the_bits_of_all_to_all_without_a_collective(two, case, kernel):
    """Call after call in the same buffers."""
    for found in two.run(symmetric_ranks.same_as_all_to_all, replace(case, grads=False), kernel):
        assert found == [True] * 3


@pytest.mark.parametrize("at", [0, 2])
def test_what_comes_out_otherwise_is_not_used(at):
    """Chosen: another one takes over, with a warning on every rank. Named: a refusal."""
    with ranks(3) as three:
        for found in three.run(symmetric_ranks.wrong_once, False, at):
            assert found["off"] < 1e-5
            assert "symmetric_memory isn't used: what it brought to rank " in found["warned"][0]
            assert "differed from all_to_all's" in found["said"]
        for found in three.run(symmetric_ranks.wrong_once, True, at):
            assert "one that can do it, got symmetric_memory: what it brought" in found["error"]


def test_a_rank_without_memory_is_named_on_all():
    with ranks(2) as two:
        for found in two.run(symmetric_ranks.no_memory):
            assert (found["before"], found["after"]) == ("symmetric_memory", "all_gather")
            reason = "no memory that other ranks can write: rank 1: CUDA driver error: out of mem"
            assert reason in found["warned"][0] and reason in found["said"]
            assert "more lines" not in found["said"]


@pytest.mark.parametrize("trained", ["experts", "tokens"])
def test_gradients_are_not_lost(trained):
    with ranks(2) as two:
        for has_grad, said in two.run(symmetric_ranks.with_gradients, trained):
            assert has_grad and "gradients are needed, and it has none" in said


def test_ranks_compare_or_none_does(two):
    for said in two.run(symmetric_ranks.unverified):
        assert "RankMismatchError" in said and "verify is true on rank 0 and false" in said


def test_kinds_of_calls_do_not_meet(two):
    """Both were compared once; mixed up they wait, and don't add up."""
    for said in two.run(symmetric_ranks.mixed_up):
        assert "ranks wait at" in said


def test_multicast_is_switched_off_and_left_as_it_was(two):
    assert two.run(symmetric_ranks.multicast)[0] == ["1", None, "1", "0", "1", "1"]


REFUSED = {
    "its ranks talk through gloo": {"no_peers": "its ranks talk through gloo"},
    r"experts aren't divided among ranks \(ep 1\)": {"owners": 1, "width": 2},
    "its ranks are on 2 hosts, and it writes over the NVLink of one": {"nodes": 2},
    "gradients are needed, and it has none": {"gradients": True},
    "its sums are in float32, and these are wanted in float64": {"wide_bytes": 8, "sum_bytes": 8},
    "it needs 1863 MiB of every GPU for 8192 rows from each rank; it may have 1024": {
        "tokens": 8192
    },
}


@pytest.mark.parametrize("words", REFUSED)
def test_why_not(words):
    with pytest.raises(ValueError, match=words):
        choose(problem(**REFUSED[words]), "symmetric_memory")


def test_cpus_never_take_it(two):
    """Nor does whoever names another one."""
    for said in two.run(symmetric_ranks.on_cpus):
        assert said["chosen"] == "all_gather"
        assert "symmetric_memory  no   its ranks talk through gloo" in said["why"]
        assert "us on H200s (" in said["why"]  # not on these CPUs
    usual = problem(tokens=64, fixed=True)
    assert choose(usual).chosen == "symmetric_memory"
    for name in ("all_gather", "all_to_all"):
        assert choose(usual, name).chosen == name


def test_what_torch_is_asked_for(monkeypatch):
    """With torch's own signatures, which its functions have without a GPU too."""
    symmetric = pytest.importorskip("torch.distributed._symmetric_memory")
    asked = inspect.signature(symmetric.rendezvous)
    own, other = (torch.zeros(1 << 21, dtype=torch.uint8) for _ in range(2))
    handle = SimpleNamespace(multicast_ptr=0, barrier=lambda *asked: waits.append(asked))
    handle.get_buffer = lambda rank, sizes, dtype: (other, own)[rank].view(dtype).view(sizes)
    waits: list[tuple[int, int]] = []

    def empty(size, stride, dtype, device):
        assert (size, stride, dtype) == ((1 << 21,), (1,), torch.uint8)
        return own

    def rendezvous(*args):
        asked.bind(*args)
        assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
        return handle

    told = symmetric._SymmetricMemory.empty_strided_p2p.__doc__
    assert "size" in told and "stride" in told and "dtype" in told and "device" in told
    stand_in = SimpleNamespace(empty_strided_p2p=empty, signal_pad_size=9216)
    monkeypatch.setattr(symmetric, "_SymmetricMemory", stand_in)
    monkeypatch.setattr(symmetric, "rendezvous", rendezvous)
    monkeypatch.setattr(peers, "time_out", lambda handle: timedelta(seconds=7))
    group = Group("a group", (4, 5), 1, "cuda")
    buffer = peers.allocate(group, 1 << 21, torch.device("cpu"))
    buffer.barrier(1000)
    assert buffer.mine is own and buffer.all[0].data_ptr() == other.data_ptr()
    assert waits == [(1000, 7000)] and buffer.channels == 9216 / 4 / 2
    assert buffer.addresses.tolist() == [other.data_ptr(), own.data_ptr()]
    handle.multicast_ptr = 1
    with pytest.raises(RuntimeError, match="torch bound NVLink multicast, though it was told not"):
        peers.allocate(group, 1 << 21, torch.device("cpu"))
    handle.multicast_ptr = 0
    with pytest.raises(RuntimeError, match="isn't where torch says that it is"):
        peers.allocate(Group("a group", (4, 5), 0, "cuda"), 1 << 21, torch.device("cpu"))


@pytest.mark.parametrize(
    ("near", "failed", "atomic", "sees"),
    [(True, 0, 1, True), (True, 0, 0, False), (True, 101, 1, False), (False, 0, 1, False)],
    ids=["NVLink", "PCIe", "the driver can't say", "apart"],
)
def test_a_gpu_is_seen_where_barriers_can_be(monkeypatch, near, failed, atomic, sees):
    """Writing over PCIe isn't enough: a barrier swaps a word in the other's memory."""

    def answer(value, attribute, device, other):
        assert (attribute, device, other) == (3, 0, 1)
        ctypes.cast(value, ctypes.POINTER(ctypes.c_int))[0] = atomic
        return failed

    driver = SimpleNamespace(cuDeviceGetP2PAttribute=answer)
    monkeypatch.setattr(peers.ctypes, "CDLL", {"libcuda.so.1": driver}.__getitem__)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, other: near)
    assert peers.sees_peer(0, 1) == sees


def test_a_driver_is_not_asked_where_there_is_a_reason_already(monkeypatch):
    """AMD's has another name."""
    heard = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(peers, "_said", lambda everyone, what, mine: heard.append(mine) or [mine])
    monkeypatch.setattr(peers, "sees_peer", lambda device, other: True)
    alone = Group(None, (0,), 0)
    assert peers._why_not_there(alone, alone, "these are AMD's") == "these are AMD's"
    assert peers._why_not_there(alone, alone, "") == ""
    assert [mine["sees"] for mine in heard] == [[], [1]]


def said(**changes):
    return {"reason": "", "host": "a", "device": 0, "sees": [1], "group": [0, 1]} | changes


def test_ranks_that_do_not_see_each_other():
    other = said(device=1, sees=[0])
    assert unlinked([0, 1], [said(), other]) == ""
    assert unlinked([0, 1], [said(), other | {"host": "b"}]).endswith("on two hosts, a and b")
    assert "both call their GPU cuda:0" in unlinked([0, 1], [said(), said()])
    assert "cuda:1 of rank 1 can't reach cuda:0 of rank 0 over NVLink" in unlinked(
        [0, 1], [said(), other | {"sees": []}]
    )
    assert unlinked([0, 1], [said(), other | {"reason": "no Triton"}]) == "no Triton (rank 1)"
    # Ranks of another group needn't be near.
    apart = [said(group=[0]), other | {"host": "b", "group": [1]}]
    assert unlinked([0, 1], apart) == ""
