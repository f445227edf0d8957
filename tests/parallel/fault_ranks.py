"""What the ranks of `test_faults.py` do; each function runs on every rank."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import tmoe
from tests.parallel.cases import Case, make_whole, mesh_of
from tmoe.parallel import Layout, Placement, expert_parallel, fixed_tokens, parallelize

E, K, H, I = 6, 2, 64, 96


def layer(hidden: int = H, top_k: int = K, scheme: str | None = None, **options: Any) -> tmoe.MoE:
    torch.manual_seed(1)
    made = tmoe.MoE(hidden, I, tmoe.Routing(E, top_k, "Renormalize"), **options).eval()
    made.requires_grad_(False)
    return made if scheme is None else tmoe.MoE.quantized(made, scheme)


def world(*names: str) -> DeviceMesh:
    shape = (dist.get_world_size(),) if len(names) == 1 else (2, dist.get_world_size() // 2)
    return mesh_of(Case("", shape, names, ()))


def words(error: BaseException) -> tuple[str, str]:
    return type(error).__name__, str(error)


def mismatch(rank: int, what: str) -> tuple[str, str]:
    """Rank 1 comes with something else; what each rank is told, and that they go on afterwards."""
    odd, mesh = rank == 1, world("x")
    build: dict[str, Any] = {}
    spread: dict[str, Any] = {"exchange": "all_gather", "ep": "x", "dp": "x"}
    tokens, fixed, options = 4, None, {}
    if what == "fixed number of tokens":
        fixed = fixed_tokens()
        tokens += odd
    elif what == "capacity":
        fixed = fixed_tokens(3 + odd)
        spread["exchange"] = "all_to_all"
    elif what == "the same tokens":
        del spread["dp"]
        tokens += odd
    elif odd:
        build = {
            "hidden size": {"hidden": 32}, "top_k": {"top_k": 3}, "scheme": {"scheme": "mxfp4_a16"},
            "activation": {"activation": "geglu"}, "bias": {"bias": True},
        }.get(what, {})  # fmt: skip
        if what == "placement":
            spread["placement"] = Placement(E, ((5, 0), (1, 2), (3,), (4,)))
        elif what == "exchange":
            spread["exchange"] = "all_to_all"
        elif what == "sums":
            spread["sums"] = torch.bfloat16
        elif what == "deterministic":
            options = {"deterministic": True}
    version = expert_parallel.__version__
    if odd and what == "version":
        expert_parallel.__version__ = "0.0.1"
    whole = layer(**build)
    if odd and what == "adapters":
        tmoe.lora.add(whole, rank=2)
        whole.requires_grad_(False)
    made = parallelize(whole, mesh, **spread)
    made.experts.requires_grad_(odd and what == "experts that are trained")
    expert_parallel.__version__ = version
    x = torch.randn(tokens, made.hidden_size)
    if odd and what == "dtype":
        made, x = made.bfloat16(), x.bfloat16()
    if odd and what == "gradients":
        x.requires_grad_()
    if what == "gradients of some":
        made.gate.requires_grad_()
        x.requires_grad_(not odd)
    try:
        with tmoe.options(**options), fixed or torch.enable_grad():
            made(x)
        said = ("no error", "")
    except (RuntimeError, ValueError) as error:
        said = words(error)
    # Nothing was sent: the group can go on.
    right = parallelize(layer(), mesh, ep="x", dp="x")
    y = right(torch.ones(3, H))
    torch.testing.assert_close(y, layer()(torch.ones(3, H)))
    return said


def killed(rank: int, when: str, exchange: str) -> tuple[str, str, float]:
    """The last rank is killed before the call, or while the others wait for its sums."""
    made = parallelize(layer(), world("x"), ep="x", dp="x", exchange=exchange)
    x = torch.randn(4, H)
    made(x)
    if rank == dist.get_world_size() - 1:
        if when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        made.experts.local_experts = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        made(x)
    except RuntimeError as error:
        return *words(error), time.monotonic() - start
    return "no error", "", 0.0


def killed_in_backward(rank: int, exchange: str) -> tuple[str, str, float]:
    """The last rank is killed when its gradient comes in."""
    made = parallelize(layer(), world("x"), ep="x", dp="x", exchange=exchange)
    x = torch.randn(4, H, requires_grad=True)
    y = made(x)
    if rank == dist.get_world_size() - 1:
        y.register_hook(lambda gradient: os.kill(os.getpid(), signal.SIGKILL))
    start = time.monotonic()
    try:
        y.sum().backward()
    except RuntimeError as error:
        return *words(error), time.monotonic() - start
    return "no error", "", 0.0


def killed_at_init(rank: int) -> tuple[str, str, float]:
    """The last rank is killed before groups of ranks are made."""
    mesh = world("a", "b")
    made = layer()
    dist.barrier()  # torch makes groups for the mesh, and waits for five minutes
    if rank == dist.get_world_size() - 1:
        time.sleep(0.5)  # until what it said in the barrier has come to all
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        parallelize(made, mesh, ep=("a", "b"), dp="a")
    except RuntimeError as error:
        return *words(error), time.monotonic() - start
    return "no error", "", 0.0


def different_calls(rank: int) -> tuple[str, str, float]:
    """Rank 1 brings a fixed number of tokens, the others ask for it."""
    made = parallelize(layer(), world("x"), ep="x", dp="x", exchange="all_gather")
    start = time.monotonic()
    try:
        if rank == 1:
            with fixed_tokens():
                made(torch.randn(4, H))
        else:
            made(torch.randn(4, H))
    except RuntimeError as error:
        return *words(error), time.monotonic() - start
    return "no error", "", 0.0


def refused(rank: int, what: str) -> list[str]:
    """What rank 0 is told, alone: it would wait for the others if anything were sent."""
    one, two = world("x"), world("a", "b")
    half = DeviceMesh("cpu", [2, 3], mesh_dim_names=("x",), _init_backend=False)
    nameless = DeviceMesh("cpu", list(range(dist.get_world_size())), _init_backend=False)
    if rank:
        return []
    block = {"hidden": 128, "intermediate": 256, "experts": E, "top_k": K, "grads": False}

    def quantized(scheme: str, **changes: Any) -> tmoe.MoE:
        case = Case("", (4,), ("x",), (), scheme=scheme, **block | changes)
        return make_whole(case)

    dynamic = tmoe.MoE.quantized(layer(), "fp8_tensor")
    divided = layer()
    divided.experts.__class__ = type("OfSomeoneElse", (tmoe.nn.Experts,), {})
    calls: dict[str, Any] = {
        "unknown dimension": lambda: parallelize(layer(), one, ep="experts"),
        "nothing given": lambda: parallelize(layer(), one, dp="x"),
        "both tp and ep": lambda: parallelize(layer(), one, tp="x", ep="x"),
        "both tp and dp": lambda: parallelize(layer(), one, tp="x", dp="x"),
        "order": lambda: parallelize(layer(), two, ep=("b", "a")),
        "twice": lambda: parallelize(layer(), two, ep=("a", "a")),
        "no names": lambda: parallelize(layer(), nameless, ep="x"),
        "not in the mesh": lambda: parallelize(layer(), half, ep="x"),
        "no mesh": lambda: parallelize(layer(), "x", ep="x"),
        "an int": lambda: parallelize(layer(), one, ep=0),
        "exchange": lambda: parallelize(layer(), one, ep="x", exchange="nvlink"),
        "ranks of a placement": lambda: parallelize(
            layer(), two, ep=("a", "b"), placement=Placement.contiguous(E, 3)
        ),
        "experts of a placement": lambda: parallelize(
            layer(), two, ep=("a", "b"), placement=Placement.contiguous(8, 4)
        ),
        "a layer that isn't there": lambda: parallelize(
            layer(), one, ep="x", placement={"layers.9": Placement.contiguous(E, 4)}
        ),
        "more ranks than experts": lambda: parallelize(
            tmoe.nn.Experts(3, H, I), two, ep=("a", "b")
        ),
        "no experts": lambda: parallelize(torch.nn.Linear(2, 2), one, ep="x"),
        "someone else's experts": lambda: parallelize(divided, one, ep="x"),
        "narrow": lambda: parallelize(tmoe.nn.Experts(2, H, 3), one, tp="x"),
        "blocks": lambda: parallelize(quantized("fp8_block"), two, tp=("a", "b")),
        "half a block": lambda: parallelize(
            quantized("fp8_block", intermediate=192), two, tp="a"
        ),
        "mxfp4": lambda: parallelize(quantized("mxfp4_a16", intermediate=96), one, tp="x"),
        "dynamic scale": lambda: parallelize(dynamic, one, ep="x"),
    }  # fmt: skip
    try:
        calls[what]()
    except (ValueError, TypeError) as error:
        return list(words(error))
    return ["no error"]


REFUSED = {
    "unknown dimension": "ep must be of the mesh's dimensions x, got 'experts'",
    "nothing given": "tp, ep must be given, at least one",
    "both tp and ep": "tp must be other dimensions than ep: along tp ranks have the same experts",
    "both tp and dp": "tp must be other dimensions than dp: along tp ranks have the same tokens",
    "order": "ep must be in the mesh's order, each once, ('a', 'b')",
    "twice": "ep must be in the mesh's order, each once, ('a',)",
    "no names": "mesh must be one with names for its dimensions",
    "not in the mesh": "rank 0, and the mesh has [2, 3]",
    "no mesh": "mesh must be a DeviceMesh, got str",
    "an int": "ep must be a Iterable, got int",
    "exchange": "one of all_gather, all_to_all, symmetric_memory, got 'nvlink'",
    "ranks of a placement": "placement must be of 4 ranks, got 3",
    "experts of a placement": "placement must be of 6 experts, got 8",
    "a layer that isn't there": "placement must be for layers of experts, got ['layers.9']",
    "more ranks than experts": "ep must be at most the 3 experts, or a placement with replicas",
    "no experts": "model must be one with a tmoe.MoE or tmoe.Experts in it",
    "someone else's experts": "model must be not divided already, got OfSomeoneElse 'experts'",
    "narrow": "tp must be at most 3: I=3 is 3 units of 1 numbers, got 4",
    "blocks": "tp must be at most 2: I=256 is 2 units of 128 numbers, which share a scale in",
    "half a block": "tp must be 1: I=192 isn't a multiple of 128, so gate and up share a block",
    "mxfp4": "tp must be at most 3: I=96 is 3 units of 32 numbers, which share a scale in mxfp4",
    "dynamic scale": "experts must be with input_scale and hidden_scale for fp8_tensor",
}


def sub_group(rank: int) -> Any:
    """EP13: a mesh over some ranks of the world; the others have nothing to do with it."""
    rows = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    mesh = rows["b"]
    layout = Layout.of(mesh, None, "b", "b")
    made = parallelize(layer(), mesh, ep="b", dp="b")
    x = torch.randn(3 + rank, H, generator=torch.Generator().manual_seed(rank))
    torch.testing.assert_close(made(x), layer()(x))
    return layout.everyone.ranks, layout.experts.rank
