"""PEFT's adapters on parameters of experts: on a replaced model they train, merge and are saved."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import tmoe
from tests.checking import assert_matches
from tests.integrations.families import BY_NAME
from tests.integrations.family import outputs
from tests.integrations.test_training import NOT_IN_FP64, gradients

peft = pytest.importorskip("peft")

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
TARGETS = {
    **dict.fromkeys(("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "olmoe"), EXPERTS),
    "llama4_text": EXPERTS,  # stored transposed, and PEFT isn't told
    "jetmoe": ["mlp.input_linear.weight", "mlp.output_linear.weight"],  # modules that nobody calls
}
SIX = list(TARGETS)[:6]
# Experts that aren't stacked, a model that PEFT can't wrap, and those that mix fp32 into fp64.
OUT_OF_REACH = {"dbrx", "qwen3_omni_moe_talker_text"} | NOT_IN_FP64
OUT_OF_REACH |= set() if BY_NAME["aria_text"].on_interface else {"aria_text"}
OTHERS = [name for name in BY_NAME if name not in TARGETS and name not in OUT_OF_REACH]


def adapted(name: str, *, replaced: str = "") -> tuple[nn.Module, nn.Module]:
    """A tiny model with random adapters on the experts and LoRA on attention; and the model that is
    inside. It is replaced "before" or "after" PEFT wraps it, or not."""
    torch.manual_seed(0)
    model = BY_NAME[name].build()
    if BY_NAME[name].on_interface:
        model.set_experts_implementation("eager")
    if replaced == "before":
        tmoe.replace_moe(model)
    config = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        target_parameters=TARGETS[name],
        target_modules=["q_proj", "o_proj"] if TARGETS[name] is EXPERTS else None,
        init_lora_weights=False,
    )
    torch.manual_seed(1)
    wrapped = peft.get_peft_model(model, config)
    if replaced == "after":
        tmoe.replace_moe(wrapped)
    return wrapped, model


def flat(grads: dict[str, Tensor], scale: dict[str, Tensor]) -> Tensor:
    """All of them, each divided by its largest true value."""
    parts = [(grad / scale[name].to(grad.dtype)).flatten() for name, grad in grads.items()]
    return torch.cat(parts)


@pytest.mark.parametrize("replaced", ["before", "after"])
@pytest.mark.parametrize("name", TARGETS)
def test_every_adapter_gets_its_gradient(name, replaced):  # GR01
    eager, _ = adapted(name)
    want = gradients(eager)
    truth = gradients(eager.double())
    model, _ = adapted(name, replaced=replaced)
    got = gradients(model)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert got.keys() == want.keys() == trained and any("experts" in n or "mlp" in n for n in got)
    assert all(grad.any() for grad in got.values())
    scale = {name: grad.abs().max() for name, grad in truth.items()}
    assert_matches(flat(got, scale), flat(truth, scale), flat(want, scale))


def of_experts(model: nn.Module) -> list[str]:
    """Whatever the family calls the stacked weights of its experts, in the order of their use."""
    stacked = {
        ".".join(name.split(".")[-2:])
        for name, p in model.named_parameters()
        if p.ndim == 3 and name.endswith(("gate_up_proj", "up_proj", "down_proj"))
    }
    return sorted(stacked, reverse=True)


@pytest.mark.parametrize("name", OTHERS)
def test_every_other_family(name):
    """One of its projections or both, by turns; then merged for good, as PEFT merges into eager."""
    turn = OTHERS.index(name) % 3

    def build(replace: bool) -> nn.Module:
        torch.manual_seed(0)
        model = BY_NAME[name].build()
        if BY_NAME[name].on_interface:
            model.set_experts_implementation("eager")
        names = of_experts(model)
        assert len(names) >= 2
        if replace:
            tmoe.replace_moe(model)
        torch.manual_seed(1)
        config = peft.LoraConfig(
            r=4,
            use_rslora=turn == 1,
            target_parameters=[names, names[:1], names[-1:]][turn],
            target_modules=[],
            init_lora_weights=False,
        )
        return peft.get_peft_model(model, config)

    eager, model, exact = build(False), build(True), build(False).double()
    want, got, truth = (gradients(each) for each in (eager, model, exact))
    assert got.keys() == want.keys() and len(got) > 0
    scale = {key: grad.abs().max().clamp(min=1e-30) for key, grad in truth.items()}
    assert_matches(flat(got, scale), flat(truth, scale), flat(want, scale))
    with torch.no_grad():
        merged = (outputs(each.merge_and_unload()) for each in (model, exact, eager))
        assert_matches(*merged)


@pytest.mark.parametrize("name", SIX)
def test_merge_unmerge_save_and_load(name, tmp_path):
    eager, _ = adapted(name)
    model, inner = adapted(name, replaced="before")
    with torch.no_grad():
        want = outputs(eager)
        truth = outputs(copy.deepcopy(eager).double())
        for wrapped in (eager, model):
            wrapped.merge_adapter()
        merged_eager = outputs(eager)
        assert_matches(outputs(model), truth, merged_eager)
        model.unmerge_adapter()
        eager.unmerge_adapter()
        assert_matches(outputs(model), truth, outputs(eager))
        with model.disable_adapter(), eager.disable_adapter():
            torch.testing.assert_close(outputs(model), outputs(eager))
            assert (outputs(model) - want).abs().max() > 0.1
        model.save_pretrained(tmp_path / "adapter")
        plain = BY_NAME[name].build()
        plain.load_state_dict({k: v for k, v in inner_state(inner).items()})
        loaded = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter")
        assert_matches(
            outputs(loaded), truth, want
        )  # adapters of a replaced model fit the original
        tmoe.replace_moe(loaded)
        assert_matches(outputs(loaded), truth, want)


def inner_state(model: nn.Module) -> dict[str, Tensor]:
    """Of the model without its adapters, under its own names."""
    return {
        name.replace("base_layer.", ""): tensor
        for name, tensor in model.state_dict().items()
        if "lora_" not in name
    }


def test_two_adapters_switch():
    """Each is trained by itself, and the other one is left alone."""
    model, _ = adapted("qwen3_moe", replaced="before")
    model.add_adapter("second", copy.deepcopy(model.peft_config["default"]))
    first = outputs(model)
    model.set_adapter("second")
    got = gradients(model)
    assert got and all("second" in name for name in got) and all(g.any() for g in got.values())
    assert not torch.equal(outputs(model), first)
    model.set_adapter("default")
    assert torch.equal(outputs(model), first)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    """The adapted weights are built again, inside the backward pass."""
    model, inner = adapted("mixtral", replaced="before")
    model.train()
    want = gradients(model)
    inner.enable_input_require_grads()
    inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    got = gradients(model)
    for name, gradient in want.items():
        torch.testing.assert_close(got[name], gradient)


def test_frozen_experts_are_given_no_gradient():
    model, inner = adapted("mixtral", replaced="before")
    gradients(model)
    frozen = [p for name, p in inner.named_parameters() if "lora_" not in name]
    assert frozen and all(p.grad is None for p in frozen)
