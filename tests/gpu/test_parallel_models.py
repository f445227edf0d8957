"""Whole models of transformers on two GPUs, side by side with one."""

import pytest
import torch

from tests.parallel import load_ranks, model_ranks
from tests.parallel.ranks import ranks

pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.fixture(scope="module")
def two():
    with ranks(2, device="cuda") as started:
        yield started


@pytest.mark.parametrize("spread", [{"ep": "x"}, {"tp": "x"}, {"ep": "x", "dp": "x"}], ids=str)
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_a_model_on_two_gpus_says_the_same(two, name, spread):
    two.run(model_ranks.compare, name, None, spread, own_tokens="dp" in spread)


@pytest.mark.parametrize("scheme", [None, "fp8_block"])
def test_a_gpu_reads_its_experts_alone(two, tmp_path, scheme):
    load_ranks.save("qwen3_moe", scheme, tmp_path / "model")
    for found in two.run(load_ranks.load, str(tmp_path / "model"), {"ep": "x", "dp": "x"}):
        assert found["read"] < found["files"] - 0.4 * found["experts"]
