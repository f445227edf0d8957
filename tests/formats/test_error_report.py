"""Error reports: their numbers against a computation by hand, their plot, what they refuse."""

from __future__ import annotations

import math
import sys

import pytest
import torch

from tmoe import quantize
from tmoe.formats import FORMATS, compare_formats, error_report, plot_error_reports


def test_exact_values_have_no_error():
    report = error_report(torch.tensor([[6.0, 0.0, -4.0, 0.5] * 8]), "mxfp4", scale_rule="ceil")
    assert report.snr_db == math.inf and report.max_relative_error == 0
    assert report.saturated == report.flushed == 0
    assert report.bits_per_value == 4.25
    assert report.histogram[0] == 1.0 and sum(report.histogram) == pytest.approx(1.0)


def test_the_numbers_by_hand():
    """Scale 1: 0.2 becomes 0, 1.2 becomes 1, 5.2 becomes 6 and 6 stays."""
    x = torch.tensor([[0.2, 1.2, 5.2, 6.0] * 8])
    report = error_report(x, "mxfp4", scale_rule="ceil")
    signal = 0.2**2 + 1.2**2 + 5.2**2 + 6.0**2
    noise = 0.2**2 + 0.2**2 + 0.8**2
    assert report.snr_db == pytest.approx(10 * math.log10(signal / noise), abs=1e-4)
    assert report.max_relative_error == pytest.approx(0.2 / 1.2, abs=1e-6)
    assert report.flushed == 0.25 and report.saturated == 0
    assert report.histogram[-2] == 0.25  # the error of what became 0 is all of it: 2^0


def test_a_value_is_saturated_when_rounding_alone_would_not_have_moved_it_so_far():
    """QN06: amax 500 with floor has scale 1. 500 is clipped to 448, as is 460, which rounds there
    anyway; ceil has scale 2 and clips nothing."""
    x = torch.tensor([[500.0, 460.0, *[1.0] * 30]])
    assert error_report(x, "mxfp8", scale_rule="floor").saturated == 1 / 32
    assert error_report(x, "mxfp8").saturated == 0
    scaled = error_report(torch.tensor([[1000.0, 1.0]]), "fp8_tensor", scale=1.0)
    assert scaled.saturated == 0.5 and scaled.name == "fp8_tensor, scale=1.0"


@pytest.mark.parametrize("format", FORMATS)
def test_the_report_describes_what_quantize_does(format):
    x = torch.randn(16, 256, dtype=torch.bfloat16)
    q = quantize(x, format)
    report = error_report(x, format)
    error = q.dequantize().double() - x.double()
    assert report.snr_db == pytest.approx(
        10 * math.log10(x.double().square().sum() / error.square().sum())
    )
    assert report.bits_per_value == q.bits_per_value
    assert report.flushed == ((q.dequantize() == 0) & (x != 0)).double().mean()


def test_a_zero_tensor_is_fine():
    report = error_report(torch.zeros(4, 32), "nvfp4")
    assert report.snr_db == math.inf and report.flushed == 0


def test_a_comparison_prints_as_a_table():
    lines = str(compare_formats(torch.randn(8, 256), ["mxfp8", FORMATS["mxfp4"]])).splitlines()
    assert [line.split()[0] for line in lines] == ["format", "mxfp8", "mxfp4"]
    assert len({len(line) for line in lines}) == 1
    report = str(error_report(torch.randn(8, 256), "fp8_block", block_shape=(128, 128)))
    assert "fp8_block, block_shape=(128, 128)" in report
    assert len(compare_formats(torch.randn(2, 32)).reports) == len(FORMATS)


def test_plots(tmp_path):
    pytest.importorskip("matplotlib")
    comparison = compare_formats(torch.randn(8, 256), ["mxfp8", "mxfp4"])
    comparison.plot(tmp_path / "all.png")
    comparison.reports[0].plot(tmp_path / "one.svg")
    plot_error_reports(comparison.reports, tmp_path / "again.png")
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")
    assert "</svg>" in (tmp_path / "one.svg").read_text()
    assert (tmp_path / "again.png").stat().st_size > 1000


def test_matplotlib_is_needed_for_plots_only(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    report = error_report(torch.randn(2, 32), "mxfp8")
    with pytest.raises(ImportError):
        report.plot(tmp_path / "plot.png")


def test_a_parameter_can_be_looked_at():
    weight = torch.nn.Parameter(torch.randn(4, 64))
    assert error_report(weight, "mxfp8").snr_db > 25


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_bad_input(value):
    with pytest.raises(ValueError, match="error_report: tensor must be finite everywhere"):
        error_report(torch.tensor([[1.0, value]]), "mxfp8")
    with pytest.raises(ValueError, match="error_report: tensor must be not empty"):
        error_report(torch.randn(0, 32), "mxfp8")
    with pytest.raises(ValueError, match="error_report: tensor must be of dtype float32"):
        error_report(torch.ones(2, 32, dtype=torch.int32), "mxfp8")
    with pytest.raises(ValueError, match="error_report: format must be one of"):
        error_report(torch.randn(2, 32), "fp4")
