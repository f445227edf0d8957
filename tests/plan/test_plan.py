"""`tmoe plan`: every layout is there once, with numbers that add up and that records bear out."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from tmoe.bench.shapes import SHAPES
from tmoe.cli import app
from tmoe.parallel.communication_model import Cluster, gpu_names
from tmoe.plan import known_model, placement_gain, plan
from tmoe.plan.layouts import layouts

H200 = Cluster.of("H200", 8, 400)
DEEPSEEK = known_model("deepseek-v3")

# 10^9 parameters in all, as the models' cards have it.
TOTALS = {
    "mixtral-8x7b": 46.7, "olmoe": 6.92, "qwen3-30b-a3b": 30.5, "qwen3-235b-a22b": 235,
    "glm-4.5": 355, "deepseek-v3": 671, "kimi-k2": 1026, "llama4-scout": 109,
    "llama4-maverick": 400, "gpt-oss-20b": 20.9, "gpt-oss-120b": 116.8,
}  # fmt: skip


@pytest.fixture(scope="module")
def deepseek():
    return plan(DEEPSEEK, 64, H200, tokens=128, scheme="fp8_block")


def run(*arguments):
    return CliRunner().invoke(app, ["plan", *arguments])


def test_every_layout_is_ranked_or_refused(deepseek):
    seen = [found.layout for found in deepseek.ranked] + [*deepseek.refused]
    assert len(seen) == len({*seen}) == 28  # 2^6 into three factors, in order
    assert {*seen} == {*layouts(64)} and all(layout.gpus == 64 for layout in seen)
    times = [found.us for found in deepseek.ranked]
    assert times == sorted(times) and len(times) > 10


def test_parts_add_up(deepseek):
    for found in deepseek.ranked:
        assert sum(found.parts.values()) == pytest.approx(found.us)
        assert sum(found.kinds.values()) == pytest.approx(found.us)
        assert found.transfer.us <= min(
            [us for name, us in found.other_exchanges.items() if name != "deepep"] or [1e9]
        )
        held = found.experts_gb + found.other_gb + found.tokens_gb + found.left_gb
        assert held == pytest.approx(141 - 4)


def test_all_ranks_hold_the_model_once(deepseek):
    """FP8 in blocks of 128 × 128: a byte and a little for a weight."""
    for found in deepseek.ranked:
        copies = found.experts_gb * found.layout.tp * found.layout.ep
        assert copies == pytest.approx(1.00025 * DEEPSEEK.expert_parameters / 1e9, rel=1e-4)


def test_few_tokens_want_few_weights_and_many_tokens_little_traffic():
    decode = plan(DEEPSEEK, 16, H200, tokens=1, scheme="fp8_block").ranked
    prefill = plan(DEEPSEEK, 16, H200, tokens=4096, scheme="fp8_block").ranked
    assert "reading weights" in decode[0].bound or "starts" in decode[0].bound
    by_layout = {str(found.layout): found for found in prefill}
    assert "arithmetic" in by_layout["EP8 DP2"].bound
    assert by_layout["EP8 DP2"].us < by_layout["TP8 DP2"].us


def test_slow_networks_keep_groups_inside_a_node():
    fast = plan(DEEPSEEK, 64, H200, tokens=1024, scheme="fp8_block")
    slow = plan(DEEPSEEK, 64, Cluster.of("H200", 8, 25), tokens=1024, scheme="fp8_block")
    across = {str(found.layout): found for found in slow.ranked}["EP64"]
    assert "network" in across.bound
    assert slow.ranked[0].layout.tp * slow.ranked[0].layout.ep == 8
    assert across.us > {str(found.layout): found for found in fast.ranked}["EP64"].us


def test_groups_keep_tokens_off_the_network():
    """Node-limited routing: four of eight nodes. Without groups a token's experts are on five."""
    free = replace(DEEPSEEK, n_group=1, topk_group=1)

    def network(model, name):
        ranked = plan(model, 64, Cluster.of("H200", 8, 50), tokens=4096, scheme="fp8_block").ranked
        found = next(found for found in ranked if str(found.layout) == "EP64")
        return {found.exchange: found.transfer.us, **found.other_exchanges}[name]

    assert network(DEEPSEEK, "all_to_all") < network(free, "all_to_all")
    assert network(DEEPSEEK, "deepep") < 0.75 * network(free, "deepep")
    assert network(DEEPSEEK, "deepep") < 0.6 * network(DEEPSEEK, "all_to_all")


def test_copies_help_where_routing_is_skewed():
    def best(**options):
        return plan(DEEPSEEK, 32, H200, tokens=1024, scheme="fp8_block", **options).ranked

    def ep32(ranked):
        return next(found for found in ranked if str(found.layout) == "EP32")

    skewed, copied = ep32(best(routing="zipf")), ep32(best(routing="zipf", redundant=1))
    assert copied.compute.us < 0.35 * skewed.compute.us and copied.us < 0.8 * skewed.us
    assert copied.experts_gb == pytest.approx(skewed.experts_gb * 9 / 8)


@pytest.mark.parametrize(
    "layout, words",
    [
        ("TP64", "tp must be at most 16: I=2048 is 16 units of 128 numbers, which share a scale"),
        ("DP64", "needs 654.1 GB of experts, 34.2 of other weights"),
    ],
)  # fmt: skip
def test_what_cannot_be_says_why_with_numbers(deepseek, layout, words):
    reasons = {str(found): why for found, why in deepseek.refused.items()}
    assert words in reasons[layout]
    assert any(words in line for line in deepseek.refusals)


@pytest.mark.parametrize(
    "name, gpus, options, words",
    [
        ("olmoe", 128, {}, "EP 128 is more than the 64 experts"),
        ("gpt-oss-120b", 4, {"scheme": "mxfp4_a16"}, None),
        ("gpt-oss-120b", 128, {"scheme": "mxfp4_a16"}, "at most 90: I=2880 is 90 units of 32"),
        ("gpt-oss-120b", 4, {"scheme": "fp8_block"}, "gate and up share a block of scales"),
        ("mixtral-8x7b", 8, {"redundant": 5}, "5 redundant slots are more than the 4 experts of"),
    ],
)
def test_other_refusals(name, gpus, options, words):
    found = plan(known_model(name), gpus, H200, **options)
    if words is None:
        assert not found.refused
    else:
        assert any(words in why for why in found.refused.values()), found.refused


def test_other_gpus_are_extrapolated_and_say_so():
    h100 = plan(known_model("qwen3-30b-a3b"), 8, Cluster.of("H100"), tokens=16)
    h200 = plan(known_model("qwen3-30b-a3b"), 8, H200, tokens=16)
    assert h100.ranked[0].us > h200.ranked[0].us  # less bandwidth
    assert "extrapolated to H100: data sheet, reached as on H200" in h100.calibration[0]
    assert "extrapolated" not in h200.calibration[0]
    with pytest.raises(ValueError, match="gpu must be one with FP8 units for fp8_block, got A100"):
        plan(DEEPSEEK, 8, Cluster.of("A100"), scheme="fp8_block")


@pytest.mark.parametrize("name", TOTALS)
def test_models_have_as_many_parameters_as_they_say(name):
    model = known_model(name)
    total = (model.expert_parameters + model.other) / 1e9
    assert total == pytest.approx(TOTALS[name], rel=0.02) and model.shape is SHAPES[name]


def test_the_command_prints_ranking_and_reason():
    done = run("--model", "deepseek-v3", "--gpus", "64", "--nvlink", "8", "--net", "400G",
               "--scheme", "fp8_block")  # fmt: skip
    assert done.exit_code == 0, done.output
    assert (
        "deepseek-v3, fp8_block, random routing: 64 × H200, NVLink of 8, 400 Gbit/s" in done.output
    )
    assert "reading weights" in done.output and "most of it" in done.output
    assert "can't be  TP64: parallelize: tp must be at most 16: I=2048" in done.output
    assert "known     kernels: measured" in done.output and "DeepEP" in done.output


def test_the_command_prints_json(deepseek):
    done = run("--model", "deepseek-v3", "--gpus", "64", "--scheme", "fp8_block", "--json")
    found = json.loads(done.output)
    assert [row["us"] for row in found["ranked"]] == [one.us for one in deepseek.ranked]
    assert len(found["ranked"]) + len(found["refused"]) == 28
    assert found["asked"]["net_gbit"] == 400 and found["reason"] == deepseek.reason


def test_the_reason_names_what_the_second_one_lacks(deepseek):
    best, second = deepseek.ranked[:2]
    kind, more = re.search(r"µs more: ([a-z ]+) \+([\d.]+)\.$", deepseek.reason).groups()
    assert second.kinds[kind] - best.kinds[kind] == pytest.approx(float(more), abs=0.06)
    assert all(us - best.kinds[name] < float(more) + 0.06 for name, us in second.kinds.items())


def test_layouts_without_ep_have_no_copies():
    """And aren't refused for them."""
    model = known_model("qwen3-30b-a3b")
    found = plan(model, 2, H200, routing="zipf", redundant=1)
    plain = plan(model, 2, H200, routing="zipf")
    times = [{str(one.layout): one.us for one in p.ranked}["TP2"] for p in (found, plain)]
    assert times[0] == times[1] and not found.refused


def test_nothing_fits():
    """A sentence instead of an empty table; each option that it names is enough."""
    arguments = ["--model", "deepseek-v3", "--gpus", "8"]
    done = run(*arguments)
    assert done.exit_code == 1 and "can't be  TP8: needs 163.5 GB of experts" in done.output
    assert "most of it" not in done.output  # a column of the table
    said = " ".join(done.output.split())
    assert "no layout fits: TP8 needs least, 171.9 GB on each GPU, 4 in reserve included" in said
    assert "and the H200 has 141. What would do: --gpus 16, or --scheme fp8_tensor|" in said
    offered = re.findall(r"(--[a-z]+) ([\w|]+)(?:,|\.)", said.partition("What would do: ")[2])
    assert [option for option, _ in offered] == ["--gpus", "--scheme", "--gpu"]
    for option, values in offered:
        for value in values.split("|"):
            assert run(*arguments, option, value).exit_code == 0, (option, value)


def test_nothing_fits_and_no_option_alone_would_do():
    done = run("--model", "olmoe", "--gpus", "1", "--reserve-gb", "200")
    said = " ".join(done.output.split())
    assert done.exit_code == 1 and "213.9 GB on each GPU, 200 in reserve included" in said
    assert "and no --gpus up to 1024 would do alone; --tokens and --reserve-gb take" in said


def test_a_gpu_without_fp8_is_not_offered_fp8():
    found = plan(DEEPSEEK, 16, Cluster.of("A100"))
    assert not found.ranked and "--scheme mxfp4_a16|nvfp4_a16" in found.reason, found.reason


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("--gpu", "V100"), f"one of {', '.join(gpu_names())}, got 'V100'"),
        (("--model", "gpt-5"), "one of mixtral-8x7b, olmoe"),
        (("--model", "nowhere/config.json"), "the path of a config.json, got 'nowhere"),
        (("--net", "fast"), "--net must be Gbit/s of each GPU's card, as 400G, got 'fast'"),
        (("--scheme", "nvfp4"), "which were recorded, got 'nvfp4'"),
        (("--gpus", "12"), "must be a multiple of the 8 that NVLink joins (--nvlink), got 12"),
        (("--routing", "odd"), "routing must be one of random"),
    ],
)
def test_bad_input_is_explained(arguments, words):
    usual = {"--model": "deepseek-v3", "--gpus": "16"} | dict([arguments])
    done = run(*(text for pair in usual.items() for text in pair))
    words_of = " ".join(done.output.replace("│", " ").split())
    assert done.exit_code == 2 and words in words_of, words_of


def test_what_an_error_names_helps():
    """12 GPUs are no whole domains of 8, but of others."""
    for domain in ("4", "72"):
        assert run("--model", "olmoe", "--gpus", "12", "--nvlink", domain).exit_code == 0


@pytest.mark.parametrize(
    "text, gbit", [("400G", 400), ("800", 800), ("3.2T", 3200), ("100gb", 100)]
)
def test_networks_are_read(text, gbit):
    from tmoe.plan.command import gbit_of

    assert gbit_of(text) == gbit


def test_placing_by_load_gains():
    grid = placement_gain(SHAPES["qwen3-30b-a3b"], 8, [1024, 8192])
    rows = {row.texts[0]: [float(text) for text in row.texts[1:]] for row in grid.rows}
    assert [*rows] == ["in order", *(f"by load, {r} redundant" for r in (0, 1, 2))]
    assert rows["in order"][0] > 2 and rows["by load, 1 redundant"][0] < 1.01
    assert rows["in order"][2] > 2 * rows["by load, 1 redundant"][2]
