"""Models of transformers whose experts are divided; each function runs on every rank."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils.parametrize import register_parametrization

import tmoe
from tests.checking import assert_matches
from tests.integrations.families import FAMILIES
from tests.integrations.family import DEVICE
from tests.parallel.cases import Case, mesh_of
from tmoe.integrations.transformers import record_input_ranges
from tmoe.parallel import DivideExperts, Placement, parallelize, rebalance

NEW_TOKENS = 5
PLACED = Placement(8, ((7, 0, 3), (1, 2, 4, 5, 6)))


def world() -> Any:
    return mesh_of(Case("", (dist.get_world_size(),), ("x",), ()))


def build(name: str) -> nn.Module:
    try:
        return next(family for family in FAMILIES if family.name == name).build()
    except pytest.skip.Exception as skipped:
        raise NotImplementedError(str(skipped)) from None


def prompt(seed: int = 5, length: int = 7) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 120, (2, length), generator=generator).to(DEVICE)


@torch.no_grad()
def said(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Greedy tokens, always as many, and logits; of a model without a head its hidden states."""
    if not hasattr(model, "generate"):
        hidden = model(ids).last_hidden_state
        return hidden.argmax(-1), hidden
    count = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
    return model.generate(ids, do_sample=False, **count), model(ids).logits


def compare(
    rank: int, name: str, scheme: str | None, spread: dict[str, Any], own_tokens: bool = False
) -> dict[str, Any]:
    """The same tokens as before, from a part of the experts' weights."""
    model = build(name)
    report = tmoe.replace_moe(model, scheme, progress=False)
    ids = prompt(5 + rank, 4 + 3 * rank) if own_tokens else prompt()
    tokens, logits = said(model, ids)
    before = {name: tensor.detach() for name, tensor in model.named_parameters()}
    parallelize(model, world(), **spread)
    got_tokens, got_logits = said(model, ids)
    assert torch.equal(got_tokens, tokens)
    torch.testing.assert_close(got_logits, logits)
    changed = {}
    for name, tensor in model.named_parameters():
        if tensor.shape != before[name].shape:
            changed[name] = tensor.nbytes / before[name].nbytes
        else:
            assert tensor.data_ptr() == before[name].data_ptr()
    assert list(before) == [name for name, _ in model.named_parameters()]
    layers, bias = len(report.replaced), sum(name.endswith("_bias") for name in before)
    assert len(changed) == layers * (2 if bias == 0 else 3 if "tp" in spread else 4)
    assert all(".experts." in name for name in changed)
    return {"held": max(changed.values())}


def gradients(rank: int) -> None:
    """Of a model that is trained, with copies of experts and tokens of each rank."""
    whole = build("gpt_oss").train()
    tmoe.replace_moe(whole)
    model, true = copy.deepcopy(whole), copy.deepcopy(whole).double()
    placement = Placement(8, ((0, 1, 2, 3, 7), (4, 5, 6, 7, 0)))
    parallelize(model, world(), ep="x", dp="x", placement=placement)
    for one in (whole, true):
        for r in range(2):
            one(prompt(r, 6)).logits.square().sum().backward()
    model(prompt(rank, 6)).logits.square().sum().backward()
    for name, parameter in model.named_parameters():
        mine = list(placement.ranks[rank]) if ".experts." in name else slice(None)
        grad = parameter.grad
        if ".experts." not in name:  # what data parallelism does to replicated parameters
            dist.all_reduce(grad)
        assert_matches(
            grad, true.get_parameter(name).grad[mine], whole.get_parameter(name).grad[mine]
        )


@torch.no_grad()
def different_lengths(rank: int) -> None:
    """Each rank generates as many tokens as it likes; one that is done goes on taking part."""
    model: Any = build("qwen3_moe")
    tmoe.replace_moe(model)
    options = {"max_new_tokens": 2 + 3 * rank, "do_sample": False}
    ids = prompt(5 + rank, 4 + 3 * rank)
    tokens = model.generate(ids, **options)
    parallelize(model, world(), ep="x", dp="x")
    assert torch.equal(model.generate(ids, synced_gpus=True, **options), tokens)


@torch.no_grad()
def rebalanced(rank: int, name: str, scheme: str | None) -> int:
    """Experts change places between two calls; one layer's alone, then those of all."""
    model = build(name)
    tmoe.replace_moe(model, scheme, progress=False)
    tokens, logits = said(model, prompt())
    parallelize(model, world(), ep="x", placement=PLACED)
    layers = [n for n, _ in model.named_modules() if n.endswith(".experts")]
    other = Placement(8, ((1, 2, 7), (0, 6, 5, 4, 3)))
    sent = rebalance(model, {layers[0]: other})[layers[0]].sent
    torch.testing.assert_close(said(model, prompt())[1], logits)
    moves = rebalance(model, other)
    assert list(moves) == layers and moves[layers[0]].sent == 0
    got_tokens, got_logits = said(model, prompt())
    assert torch.equal(got_tokens, tokens)
    torch.testing.assert_close(got_logits, logits)
    return sent


def afterwards(rank: int, name: str) -> dict[str, str]:
    """What a divided model refuses."""
    model: Any = build(name)
    before = model.config._experts_implementation
    report = tmoe.replace_moe(model)
    parallelize(model, world(), ep="x")
    told = {}
    config = model.config.get_text_config()
    calls = {
        "restore": report.restore,
        "save": lambda: model.save_pretrained("nowhere"),
        "again": lambda: parallelize(model, world(), ep="x"),
        "record": lambda: record_input_ranges(model).__enter__(),
        "another implementation": lambda: model(prompt()),
    }
    for call, function in calls.items():
        if call == "another implementation":
            config._experts_implementation_internal = before
        try:
            function()
            told[call] = "no error"
        except (RuntimeError, ValueError) as error:
            told[call] = f"{type(error).__name__}: {error}"
    config._experts_implementation_internal = "tmoe"
    told["quantise"] = str(tmoe.replace_moe(model, "fp8_channel", progress=False))
    return told


def refused(rank: int, name: str, replaced: bool, spread: dict[str, Any]) -> str:
    if name == "fp8":
        from tests.integrations.test_fp8_experts import build as build_fp8

        model: Any = nn.ModuleDict({"experts": build_fp8()})
    else:
        model = build("mixtral" if name == "lora" else name)
    if replaced:
        tmoe.replace_moe(model)
    if name == "lora":
        experts = model.model.layers[1].mlp.experts
        register_parametrization(experts, "down_proj", nn.Identity())
    try:
        parallelize(model, world(), **spread)
    except ValueError as error:
        return str(error)
    return "no error"


@torch.no_grad()
def styled(rank: int) -> None:
    """In a plan of torch's, beside its own style for attention."""
    model = build("qwen3_moe")
    tmoe.replace_moe(model)
    tokens, logits = said(model, prompt())
    attention = "model.layers.*.self_attn"
    plan = {
        "model.layers.*.mlp": DivideExperts(ep="x", placement=PLACED),
        **{f"{attention}.{name}_proj": ColwiseParallel() for name in "qkv"},
        f"{attention}.o_proj": RowwiseParallel(),
    }
    parallelize_module(model, world(), plan)
    layer = model.model.layers[0].mlp.experts
    assert layer.down_proj.shape[0] == len(PLACED.ranks[rank])
    got_tokens, got_logits = said(model, prompt())
    assert torch.equal(got_tokens, tokens)
    torch.testing.assert_close(got_logits, logits)


@torch.no_grad()
def by_transformers(rank: int, path: str, how: str, own: bool) -> Any:
    """Divided by transformers itself, run by tmoe: its tokens, shapes, and how often tmoe ran."""
    import transformers
    from transformers.distributed import DistributedConfig
    from transformers.integrations import accelerate

    from tmoe.integrations.transformers import experts

    # transformers wants it installed for any device map, and needs nothing of it for a plan.
    accelerate.is_accelerate_available = lambda *_: True
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost"}
    os.environ.update({name: str(value) for name, value in where.items()})
    auto = transformers.AutoModelForCausalLM
    whole = auto.from_pretrained(path, dtype=torch.float32)
    tokens, logits = said(whole, prompt())
    if how == "tp":
        spread: dict[str, Any] = {"tp_plan": "auto"}
    else:
        new = hasattr(DistributedConfig(), "ep_size")
        size = (
            {"ep_size": 2, "tp_plan": "auto"} if new else {"enable_expert_parallel": True}
        )  # fmt: skip
        spread = {"distributed_config": DistributedConfig(tp_size=2, **size)}
    tmoe.integrations.transformers.register()
    if own:
        spread["experts_implementation"] = "tmoe"
    model = auto.from_pretrained(path, dtype=torch.float32, **spread)
    if not own:
        tmoe.replace_moe(model)
    calls, run = [], experts._run
    experts._run = lambda *args, **keywords: (calls.append(1), run(*args, **keywords))[1]
    try:
        got_tokens, got_logits = said(model, prompt())
    finally:
        experts._run = run
    assert torch.equal(got_tokens, tokens)
    torch.testing.assert_close(got_logits, logits)
    weight = next(p for name, p in model.named_parameters() if name.endswith("experts.down_proj"))
    local = weight.to_local() if hasattr(weight, "to_local") else weight
    try:  # where its plan left the experts whole, tmoe may divide them
        parallelize(model, world(), ep="x")
        assert torch.equal(said(model, prompt())[0], tokens)
        told = "right"
    except ValueError as error:
        told = str(error)
    return {"calls": len(calls), "shape": tuple(local.shape), "told": told}
