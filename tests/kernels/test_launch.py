"""What the launchers ask torch and the device."""

import pytest
import torch
import triton

from tmoe.kernels.launch import cdiv, fp32_precision, next_power_of_2


@pytest.fixture
def matmul(monkeypatch):
    """torch's matmul settings, put back after the test."""
    before = torch.backends.cuda.matmul.fp32_precision
    yield torch.backends.cuda.matmul
    torch.backends.cuda.matmul.fp32_precision = before


def test_fp32_is_ieee_unless_asked_for(matmul):
    assert fp32_precision() == "ieee"


def test_tf32_by_the_newer_setting(matmul):
    """GR06. After it, torch refuses to read the older one."""
    matmul.fp32_precision = "tf32"
    assert fp32_precision() == "tf32"


def test_tf32_by_the_older_setting(matmul):
    matmul.allow_tf32 = True
    assert fp32_precision() == "tf32"
    matmul.allow_tf32 = False
    assert fp32_precision() == "ieee"


def test_sizes_are_rounded_as_triton_rounds_them():
    for n in [1, 2, 3, 127, 128, 129, 65535, 65536, 65537, 2**31 - 1]:
        assert next_power_of_2(n) == triton.next_power_of_2(n)
        for step in (1, 16, 128):
            assert cdiv(n, step) == triton.cdiv(n, step)
    assert cdiv(0, 16) == 0
