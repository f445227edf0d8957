"""Whole models of transformers on two GPUs, side by side with one."""

import pytest

from tests.gpu.conftest import NEEDS_TWO
from tests.parallel import load_ranks, model_ranks

pytest.importorskip("transformers")
pytestmark = [pytest.mark.gpu, NEEDS_TWO]


@pytest.mark.parametrize("spread", [{"ep": "x"}, {"tp": "x"}, {"ep": "x", "dp": "x"}], ids=str)
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_a_model_on_two_gpus_says_the_same(two, name, spread):
    two.run(model_ranks.compare, name, None, spread, own_tokens="dp" in spread)


@pytest.mark.parametrize("scheme", [None, "fp8_block"])
def test_a_gpu_reads_its_experts_alone(two, tmp_path, scheme):
    load_ranks.save("qwen3_moe", scheme, tmp_path / "model")
    for found in two.run(load_ranks.load, str(tmp_path / "model"), {"ep": "x", "dp": "x"}):
        assert found["read"] < found["files"] - 0.4 * found["experts"]
