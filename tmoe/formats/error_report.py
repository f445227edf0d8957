"""How well a format holds a tensor, in numbers and as a picture."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..checks import expect
from .compute import quantize_parts
from .format import FORMATS, Format
from .layouts import unpack_e2m1
from .quantized_tensor import QuantizedTensor
from .recipe import Recipe, check_input, given_global_scale, given_scale

_BINS_PER_OCTAVE, _SMALLEST, _LARGEST = 2, -14, 1  # of the relative error, as powers of two


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """What rounding to a format did to a tensor's values. It prints well."""

    name: str  # the format and the choices that aren't its defaults
    bits_per_value: float  # codes, scales and global scales
    snr_db: float  # 10 · log10(sum of x² / sum of errors²); infinite without an error
    max_relative_error: float  # the largest |error| / |x| of values that didn't become 0
    saturated: float  # share of values clipped by more than a rounding step
    flushed: float  # share of values that became 0 without being 0
    histogram: tuple[float, ...] = field(repr=False)  # share of values by log2(|error| / |x|)

    def __str__(self) -> str:
        return "\n".join((_HEADER, self._row()))

    def _row(self) -> str:
        shares = f"{self.saturated:>10.2%}{self.flushed:>10.2%}"
        numbers = f"{self.bits_per_value:>6.2f}{self.snr_db:>9.2f}{self.max_relative_error:>10.3f}"
        return f"{self.name:<{_NAME_WIDTH}}{numbers}{shares}"

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the distribution of the relative error to `path` (.png, .svg, …)."""
        plot_error_reports([self], path)


_NAME_WIDTH = 32
_HEADER = f"{'format':<{_NAME_WIDTH}}{'bits':>6}{'SNR dB':>9}{'max rel.':>10}" + (
    f"{'saturated':>10}{'flushed':>10}"
)


@dataclass(frozen=True, slots=True)
class ErrorSums:
    """How far quantised values are off, as sums, which add up over the experts of a layer."""

    signal: float = 0.0  # sum of x²
    noise: float = 0.0  # sum of errors²

    @classmethod
    def of(cls, x: Tensor, q: QuantizedTensor) -> ErrorSums:
        """Of `q`, made from `x`. It reads results back, so on a GPU it waits for the device."""
        values = x.double()
        noise = (q.dequantize() - values).square().sum()
        return cls(values.square().sum().item(), noise.item())

    def __add__(self, other: ErrorSums) -> ErrorSums:
        return ErrorSums(self.signal + other.signal, self.noise + other.noise)

    @property
    def snr_db(self) -> float:
        """10 · log10(signal / noise); infinite without an error."""
        if self.noise == 0:
            return math.inf
        return 10 * math.log10(self.signal / self.noise) if self.signal else -math.inf

    @property
    def relative(self) -> float:
        """|error| / |x|, both as vectors."""
        return math.sqrt(self.noise / self.signal) if self.signal else math.sqrt(self.noise)

    def __str__(self) -> str:
        return f"{self.snr_db:.1f} dB ({self.relative:.2%} error)"


@dataclass(frozen=True, slots=True)
class FormatComparison:
    """Reports on one tensor; prints as a table."""

    reports: tuple[ErrorReport, ...]

    def __str__(self) -> str:
        return "\n".join((_HEADER, *(report._row() for report in self.reports)))

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the distributions of the relative error to `path` (.png, .svg, …)."""
        plot_error_reports(self.reports, path)


@torch.no_grad()
def error_report(
    tensor: Tensor,
    format: str | Format,
    *,
    scale: Tensor | float | None = None,
    global_scale: Tensor | float | None = None,
    block_shape: Sequence[int] | None = None,
    scale_rule: str | None = None,
) -> ErrorReport:
    """Quantise `tensor` (all of it finite) and report what that did; arguments as for
    `tmoe.quantize`.

    It reads results back, so on a GPU it waits for the device.

    Raises:
        TypeError, ValueError: as `tmoe.quantize`; an empty tensor, or one with NaN or Inf in it.
    """
    op = "error_report"
    recipe = Recipe.of(op, format, block_shape, scale_rule)
    check_input(op, tensor, recipe.format, arg="tensor")
    expect(tensor.numel() > 0, op, "tensor", "not empty", tuple(tensor.shape))
    finite = bool(torch.isfinite(tensor).all())
    expect(finite, op, "tensor", "finite everywhere", "a tensor with NaN or Inf")
    parts = quantize_parts(
        tensor,
        recipe,
        given_scale(op, scale, tensor, recipe),
        given_global_scale(op, global_scale, tensor, recipe.format),
    )
    q = QuantizedTensor(*parts, recipe.format.name, recipe.block_shape, tensor.shape, tensor.dtype)
    options = {
        "block_shape": block_shape,
        "scale_rule": scale_rule,
        "scale": "given" if isinstance(scale, Tensor) else scale,
        "global_scale": "given" if isinstance(global_scale, Tensor) else global_scale,
    }
    given = [f"{key}={value}" for key, value in options.items() if value is not None]
    return _measure(tensor.double(), q, ", ".join((recipe.format.name, *given)))


def compare_formats(
    tensor: Tensor, formats: Iterable[str | Format] = tuple(FORMATS)
) -> FormatComparison:
    """An `error_report` for each format, with the format's defaults."""
    return FormatComparison(tuple(error_report(tensor, format) for format in formats))


def _measure(x: Tensor, q: QuantizedTensor, name: str) -> ErrorReport:
    element = FORMATS[q.format].element
    values = q.dequantize().double()
    error, magnitude = (values - x).abs(), x.abs()
    sums = ErrorSums(x.square().sum().item(), error.square().sum().item())

    flushed = (values == 0) & (x != 0)
    codes = unpack_e2m1(q.data) & 7 if FORMATS[q.format].is_packed else q.data.float().abs()
    at_top = codes == (7 if FORMATS[q.format].is_packed else element.max)
    clipped = magnitude > values.abs() * (1 + element.last_step / 2 / element.max)
    relative = torch.where(x == 0, 0.0, error / magnitude)
    kept = relative.masked_fill(flushed, 0.0)
    return ErrorReport(
        name=name,
        bits_per_value=q.bits_per_value,
        snr_db=sums.snr_db,
        max_relative_error=kept.max().item(),
        saturated=(at_top & clipped).double().mean().item(),
        flushed=flushed.double().mean().item(),
        histogram=_histogram(relative),
    )


def _histogram(relative: Tensor) -> tuple[float, ...]:
    """Shares by log2; the first bin takes all that is smaller, the last all that is larger."""
    steps = ((relative.log2() - _SMALLEST) * _BINS_PER_OCTAVE).clamp(min=0).floor()
    bins = (_LARGEST - _SMALLEST) * _BINS_PER_OCTAVE
    counts = torch.bincount(steps.clamp(max=bins - 1).long().flatten(), minlength=bins)
    return tuple((counts / relative.numel()).tolist())


def plot_error_reports(reports: Sequence[ErrorReport], path: str | os.PathLike[str]) -> None:
    """Draw the distribution of the relative error of each report to `path` (.png, .svg, …).

    Needs matplotlib (``pip install matplotlib``).
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    edges = [
        2.0 ** (_SMALLEST + i / _BINS_PER_OCTAVE) for i in range(len(reports[0].histogram) + 1)
    ]
    for report in reports:
        label = f"{report.name}: {report.snr_db:.1f} dB, {report.bits_per_value:.2f} bits"
        axes.stairs(report.histogram, edges, label=label, linewidth=1.8)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("|error| / |value|   (leftmost: this or less; 1: became zero)")
    axes.set_ylabel("share of values")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
