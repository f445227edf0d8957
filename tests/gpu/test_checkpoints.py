"""Quantised checkpoints onto a GPU: straight there, in the scheme's arithmetic, without waiting."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tmoe
from tests.checkpoints.kinds import finegrained, modelopt, nvfp4, nvfp4_truth
from tests.checkpoints.writing import PREFIX, matrices, stored, write
from tests.gpu.waiting import no_waiting
from tests.integrations.families import BY_NAME
from tests.integrations.family import outputs
from tests.integrations.saved import save
from tmoe.checkpoints import Checkpoint, read_experts

pytestmark = pytest.mark.gpu
BLOCKS = finegrained("deepseek-v3", "fp8_block")
NVFP4 = modelopt("NVFP4", nvfp4, nvfp4_truth, "nvfp4", ("input_scale", False))


def test_memory(device, tmp_path):
    """Beside the stacked tensors, at most one expert is on the GPU."""
    tensors, _ = stored(BLOCKS, matrices(E=16, H=1024, I=512))
    checkpoint = Checkpoint(write(tmp_path, tensors, {"quantization_config": BLOCKS.config}))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    got = read_experts(checkpoint, PREFIX, device=device)
    held = got.gate_up_proj.nbytes + got.down_proj.nbytes
    expert = held // 16
    assert torch.cuda.max_memory_allocated() - before <= held + expert
    on_cpu = read_experts(checkpoint, PREFIX)
    assert torch.equal(got.gate_up_proj.data.cpu().view(torch.uint8),
                       on_cpu.gate_up_proj.data.view(torch.uint8))  # fmt: skip
    assert torch.equal(got.down_proj.dequantize().cpu(), on_cpu.down_proj.dequantize())


@pytest.mark.parametrize("kind, scheme", [(BLOCKS, "fp8_a16"), (NVFP4, "nvfp4_a16")], ids=str)
def test_whole_models(kind, scheme, device, tmp_path):
    """fp32 logits of transformers' model with the dequantised weights, on the same GPU."""
    sizes = dict(hidden_size=128, moe_intermediate_size=128)
    family = replace(BY_NAME["qwen3_moe"], overrides=sizes)
    folder, reference = save(family, kind, tmp_path)
    model = tmoe.from_pretrained(folder, dtype=torch.float32, device=device, scheme=scheme)
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"cuda"}
    with torch.no_grad():
        got, want = outputs(model), outputs(reference.to(device))
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_fp8_experts_never_wait(device):
    """transformers' FP8 experts: no synchronisation, so that CUDA graphs capture them."""
    from tests.integrations.test_fp8_experts import build, inputs

    experts, arguments = build().to(device), inputs()
    with torch.no_grad():
        want = experts(*arguments)
        torch.cuda.synchronize()
        with no_waiting():
            got = experts(*arguments)
        assert torch.equal(got, want)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = experts(*arguments)
        graph.replay()
    assert torch.equal(captured, want)
