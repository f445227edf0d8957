"""What `replace_moe` does to a model, says about it, and undoes."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import tmoe
from tests.integrations.counting import CountOps
from tests.integrations.families import BY_NAME
from tests.integrations.family import outputs
from tmoe.integrations.transformers.families import LEFT_ALONE
from tmoe.integrations.transformers.router_kinds import LEFT_ALONE as ROUTERS_LEFT_ALONE

SWAPPED = ["llama4_text", "dbrx", "jetmoe", "longcat_flash", "step3p7_text"]


def classes(model: nn.Module) -> dict[str, type]:
    return {name: type(module) for name, module in model.named_modules()}


def count_ops(model: nn.Module) -> int:
    with torch.no_grad(), CountOps() as ops:
        outputs(model)
    return ops.calls.total()


@pytest.mark.parametrize("name", ["mixtral", "afmoe", "gemma4_text", "inkling_text", *SWAPPED])
def test_copies_and_pickles_stay_replaced(name):
    model = BY_NAME[name].build()
    with torch.no_grad():
        before = outputs(model)
        tmoe.replace_moe(model)
        want = outputs(model)
        saved = io.BytesIO()
        torch.save(model, saved)
        saved.seek(0)
        for other in (
            copy.deepcopy(model),
            pickle.loads(pickle.dumps(model)),
            torch.load(saved, weights_only=False),
        ):
            assert classes(other) == classes(model)
            assert torch.equal(outputs(other), want)
            assert count_ops(other) == BY_NAME[name].expected_ops
            tmoe.replace_moe(other).restore()
            assert count_ops(other) == 0
            if BY_NAME[name].on_interface:
                other.set_experts_implementation("grouped_mm")
            assert torch.equal(outputs(other), before)
        assert torch.equal(outputs(model), want)  # restoring a copy leaves the model alone


@pytest.mark.parametrize("name", SWAPPED)
def test_swapped_classes(name):
    """Names keep the original's ending, subclass it, and come back."""
    model = BY_NAME[name].build()
    before, keys = classes(model), list(model.state_dict())
    report = tmoe.replace_moe(model)
    after = classes(model)
    for module_name in report.replaced:
        assert after[module_name].__name__ == f"Tmoe{before[module_name].__name__}"
        assert issubclass(after[module_name], before[module_name])
    assert list(model.state_dict()) == keys
    report.restore()
    assert classes(model) == before


@pytest.mark.parametrize("name", ["mixtral", "llama4_text", "jetmoe", "dbrx"])
def test_twice(name):
    """Either report restores; restoring twice is fine; and one can go back and forth."""
    model = BY_NAME[name].build()
    with torch.no_grad():
        before = outputs(model)
        for restorer in (0, 1):
            reports = [tmoe.replace_moe(model), tmoe.replace_moe(model)]
            assert reports[0].replaced == reports[1].replaced
            assert reports[0].skipped == reports[1].skipped
            assert reports[0].routers == reports[1].routers != []
            assert str(reports[0]) == str(reports[1])
            assert count_ops(model) == BY_NAME[name].expected_ops
            reports[restorer].restore()
            reports[1 - restorer].restore()
            assert count_ops(model) == 0
            assert torch.equal(outputs(model), before)


def test_restores_what_was_set():
    model = BY_NAME["mixtral"].build()
    for implementation in ("eager", "batched_mm"):
        model.set_experts_implementation(implementation)
        report = tmoe.replace_moe(model)
        assert model.get_experts_implementation()[""] == "tmoe"
        report.restore()
        assert model.get_experts_implementation()[""] == implementation


def test_set_by_transformers_stays_set():
    """What transformers itself was told to run on tmoe is not for `restore` to undo."""
    model = BY_NAME["mixtral"].build()
    tmoe.integrations.transformers.register()
    model.set_experts_implementation("tmoe")
    report = tmoe.replace_moe(model)
    assert len(report.replaced) == 2
    report.restore()
    assert model.get_experts_implementation()[""] == "tmoe"


def test_config_copies_per_layer():
    """Each experts module's own config decides, whether or not it is the model's."""
    model = BY_NAME["mixtral"].build()
    for layer in model.model.layers:
        layer.mlp.experts.config = copy.deepcopy(layer.mlp.experts.config)
    model.model.layers[1].mlp.experts.config._experts_implementation_internal = "eager"
    report = tmoe.replace_moe(model)
    assert count_ops(model) == BY_NAME["mixtral"].expected_ops
    report.restore()
    configs = [layer.mlp.experts.config._experts_implementation for layer in model.model.layers]
    assert configs == ["grouped_mm", "eager"]


def test_no_moe():
    report = tmoe.replace_moe(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    assert report.replaced == [] and report.skipped == {}
    assert "no MoE" in str(report)
    report.restore()


def test_bad_arguments():
    with pytest.raises(TypeError, match="replace_moe: model must be a Module, got str"):
        tmoe.replace_moe("mistralai/Mixtral-8x7B-v0.1")
    with pytest.raises(ValueError, match="replace_moe: scheme must be None, bf16.*got nvfp5"):
        tmoe.replace_moe(nn.Linear(2, 2), scheme="nvfp5")


def test_printed_report():
    model = BY_NAME["jetmoe"].build()
    text = str(tmoe.replace_moe(model))
    assert text.splitlines() == [
        "2 MoE layers run on tmoe:",
        "  model.layers.0.mlp: experts; routing in it",
        "  model.layers.1.mlp: experts; routing in it",
        "4 left alone:",
        f"  model.layers.0.self_attention.experts: {LEFT_ALONE['JetMoeMoA']}",
        f"  model.layers.1.self_attention.experts: {LEFT_ALONE['JetMoeMoA']}",
        f"  model.layers.0.mlp.router: {ROUTERS_LEFT_ALONE['JetMoeTopKGating']}",
        f"  model.layers.1.mlp.router: {ROUTERS_LEFT_ALONE['JetMoeTopKGating']}",
    ]
    assert str(tmoe.replace_moe(BY_NAME["deepseek_v3"].build())).splitlines() == [
        "1 MoE layer runs on tmoe:",
        "  model.layers.1.mlp: experts; router gate; shared_experts stays the model's own",
    ]


def test_report_holds_no_weights():
    model = BY_NAME["mixtral"].build()
    report, alive = tmoe.replace_moe(model), weakref.ref(model.model.layers[0].mlp.experts)
    del model
    gc.collect()
    assert alive() is None
    report.restore()


def legacy(module: str, cls: str, config: dict) -> nn.Module:
    from importlib import import_module

    file = import_module(f"transformers.models.{module}.modeling_{module}")
    model_class = getattr(file, cls)
    return model_class(model_class.config_class(**config))


ENCODER_DECODER = dict(
    vocab_size=64, d_model=32, num_layers=2, num_decoder_layers=2, num_heads=2, d_kv=16, d_ff=32,
    encoder_layers=2, decoder_layers=2, encoder_ffn_dim=32, decoder_ffn_dim=32, num_experts=4,
    encoder_attention_heads=2, decoder_attention_heads=2,
    encoder_sparse_step=2, decoder_sparse_step=2,
)  # fmt: skip


@pytest.mark.parametrize(
    ("module", "cls", "config", "reason"),
    [
        ("switch_transformers", "SwitchTransformersModel", ENCODER_DECODER, "drops tokens"),
        ("nllb_moe", "NllbMoeModel", ENCODER_DECODER, "drops tokens"),
        (
            "doge",
            "DogeModel",
            dict(
                vocab_size=64,
                hidden_size=32,
                intermediate_size=32,
                num_hidden_layers=2,
                is_moe=True,
                num_attention_heads=2,
                num_experts=16,
                num_experts_per_tok=2,
                pad_token_id=0,
            ),  # fmt: skip
            "no expert GEMM",
        ),
    ],
)
def test_left_alone_with_a_reason(module, cls, config, reason):
    model = legacy(module, cls, config)
    before = classes(model)
    report = tmoe.replace_moe(model)
    assert report.replaced == [] and len(report.skipped) == 2
    assert all(reason in why for why in report.skipped.values())
    assert classes(model) == before
    assert str(report).startswith("warning: no MoE module was replaced")


class HomemadeMoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = HomemadeExperts()


class HomemadeExperts(nn.Module):
    pass


def test_unknown_class_is_reported_once():
    report = tmoe.replace_moe(nn.Sequential(HomemadeMoE(), nn.Linear(2, 2)))
    assert list(report.skipped) == ["0"]
    assert "HomemadeMoE is not a class that tmoe knows" in report.skipped["0"]


def test_a_part_is_a_model_too():
    block = BY_NAME["mixtral"].build().model.layers[0].mlp
    assert tmoe.replace_moe(block).replaced == ["experts"]
    assert tmoe.replace_moe(block.experts).replaced == [""]


@pytest.mark.parametrize("name", ["mixtral", "llama4_text", "step3p7_text"])
def test_other_weight_dtypes_are_left_alone(name):
    model = BY_NAME[name].build()
    for parameter_name, parameter in model.named_parameters():
        if "experts.down_proj" in parameter_name:
            parameter.data = parameter.data.to(torch.float8_e4m3fn)
    report = tmoe.replace_moe(model)
    assert report.replaced == []
    assert all("float8_e4m3fn" in reason for reason in report.skipped.values())


def test_fp8_experts_that_tmoe_cannot_run():
    """They are left alone, and what shares their config too: the name on it chooses for both."""
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts
    from transformers.integrations.moe import use_experts_implementation

    model = BY_NAME["mixtral"].build()
    own = type("FP8Experts", (FP8Experts,), {})
    decorated = use_experts_implementation(own, experts_interface=ALL_FP8_EXPERTS_FUNCTIONS)
    model.model.layers[0].mlp.experts = decorated(model.config, block_size=(16, 16))
    report = tmoe.replace_moe(model)
    assert report.replaced == []
    assert "block_size is (16, 16)" in report.skipped["model.layers.0.mlp.experts"]
    assert "shares its config" in report.skipped["model.layers.1.mlp.experts"]
    assert model.get_experts_implementation()[""] == "grouped_mm"


class OwnForward:
    """What a hook library does to an instance."""

    @staticmethod
    def install(module: nn.Module, keep_old: bool) -> None:
        old = module.forward
        if keep_old:  # accelerate
            module._old_forward = old

            def forward(module, *args, **kwargs):
                return module._old_forward(*args, **kwargs)

            module.forward = partial(forward, module)
        else:
            module.forward = lambda *args, **kwargs: old(*args, **kwargs)


@pytest.mark.parametrize(
    "name", ["mixtral", "llama4_text", "step3p7_text", "dbrx", "hunyuan_v1_moe", "deepseek_v3"]
)
def test_accelerate_hooks(name):
    """accelerate keeps a bound method of the old class on the instance; ours must replace it."""
    model = BY_NAME[name].build()
    with torch.no_grad():
        for module in model.modules():
            if type(module).__name__.endswith(("Experts", "Moe", "Router", "FFN", "Gate")):
                OwnForward.install(module, keep_old=True)
        before = outputs(model)
        report = tmoe.replace_moe(model)
        assert count_ops(model) == BY_NAME[name].expected_ops
        report.restore()
        assert count_ops(model) == 0
        assert torch.equal(outputs(model), before)


@pytest.mark.parametrize("name", ["llama4_text", "step3p7_text"])
def test_foreign_forward_is_left_alone(name):
    model = BY_NAME[name].build()
    for module in model.modules():
        if type(module).__name__.endswith("Experts"):
            OwnForward.install(module, keep_old=False)
    report = tmoe.replace_moe(model)
    assert report.replaced == []
    assert all("another library" in reason for reason in report.skipped.values())
    routers = BY_NAME[name].expected_routers  # which run on tmoe whatever the experts do
    assert count_ops(model) == len(report.routers) == routers
    assert f"{routers} routers run on tmoe, their experts don't:" in str(report)


def test_parametrised_before_and_after():
    """torch's parametrisation changes a module's class too; each change must survive the other."""

    class Double(nn.Module):
        def forward(self, weight):
            return 2 * weight

    model = BY_NAME["step3p7_text"].build()
    experts = model.layers[1].mlp.experts
    plain = type(experts)
    with torch.no_grad():
        parametrize.register_parametrization(experts, "down_proj", Double())
        want = outputs(model)
        report = tmoe.replace_moe(model)
        torch.testing.assert_close(outputs(model), want)
        assert count_ops(model) == BY_NAME["step3p7_text"].expected_ops
        report.restore()
        assert torch.equal(outputs(model), want) and count_ops(model) == 0
        report = tmoe.replace_moe(model)
        parametrize.remove_parametrizations(experts, "down_proj", leave_parametrized=True)
        torch.testing.assert_close(outputs(model), want)
        report.restore()
    assert type(experts) is plain
