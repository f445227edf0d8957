"""Inputs that are hard to quantise, and what "the same bits" means."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from tmoe.kernels.quantize_ref import Rows

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()  # 0 … 448
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def same_bits(got: Tensor, want: Tensor) -> bool:
    """Same type, shape and bits, -0 included. Any NaN is as good as another."""
    if (got.dtype, got.shape) != (want.dtype, want.shape):
        return False
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[want.element_size()]
    got, want = got.cpu().contiguous(), want.cpu().contiguous()
    equal = got.view(integer) == want.view(integer)
    if want.is_floating_point():
        equal |= got.float().isnan() & want.float().isnan()
    return bool(equal.all())


def assert_same(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for number, (one, other) in enumerate(zip(got, want, strict=True)):
        kinds = (one.dtype, one.shape), (other.dtype, other.shape)
        assert kinds[0] == kinds[1], f"result {number}: {kinds[0]}, not {kinds[1]}"
        differ = (one.cpu().float() != other.cpu().float()).sum()
        assert same_bits(one, other), f"result {number}: {differ} of {one.numel()} differ"


def on_cpu(how: dict[str, object]) -> dict[str, object]:
    """Options of a quantiser, for a reference on the CPU; their tensors may be within `Rows`."""

    def move(value: object) -> object:
        if isinstance(value, Rows):
            fields = ("index", "weight", "count")
            return replace(value, **{name: move(getattr(value, name)) for name in fields})
        return value.cpu() if isinstance(value, Tensor) else value

    return {name: move(value) for name, value in how.items()}


def neighbours(values: Tensor) -> Tensor:
    """Each value, the fp32 numbers next to it, and the negatives of all."""
    infinity = torch.full_like(values, math.inf)
    values = torch.cat(
        (torch.nextafter(values, -infinity), values, torch.nextafter(values, infinity))
    )
    return torch.cat((values, -values))


def midpoints(values: Tensor) -> Tensor:
    """The ties of rounding to `values`, and their neighbours."""
    return neighbours((values[:-1] + values[1:]) / 2)


def in_rows(values: Tensor, K: int, every: int = 0, largest: float = 0.0) -> Tensor:
    """`values` as rows of K, filled up with zeros. Each `every`-th element of a row is `largest`,
    so that it decides the scale."""
    step = every - 1 if every else K
    values = torch.cat((values, values.new_zeros(-len(values) % step))).view(-1, step)
    if every:
        values = torch.cat((values.new_full((len(values), 1), largest), values), dim=1)
    values = values.flatten()
    return torch.cat((values, values.new_zeros(-len(values) % K))).view(-1, K)


def numbers(K: int = 96) -> dict[str, Tensor]:
    """fp32 matrices (M, K) without NaN and infinities."""
    exponents = torch.ldexp(torch.ones(277), torch.arange(-149, 128))
    outliers = torch.randn(6, K)
    outliers[torch.rand(6, K) < 0.03] *= 1e4
    wide = torch.randn(6, K) * torch.exp(4 * torch.randn(6, K))
    subnormal = torch.randint(-(2**23), 2**23, (4, K)).float() * 2.0**-149
    zeros = torch.zeros(4, K)
    zeros[1] = -0.0
    zeros[2, K // 2 :] = torch.randn(K - K // 2)  # a block of zeros beside others
    zeros[3, ::3] = -0.0
    zeros[3, 1::3] = 2.0
    return {
        "random": torch.randn(6, K),
        "outliers": outliers,
        "wide": wide,
        "every-exponent": in_rows(neighbours(exponents[:-1]), K),
        "one-exponent-a-row": exponents[::9, None] * torch.randn(31, K),
        "subnormal": subnormal,
        "least": torch.randint(-3, 4, (4, K)).float() * 2.0**-149,
        "tiny (QN01)": torch.randn(4, K) * 1e-38,
        "small (QN13)": torch.randn(4, K) * 1e-4,
        "large": (torch.randn(4, K) * 1e38).clamp(-3.4e38, 3.4e38),
        "largest": torch.full((2, K), torch.finfo(torch.float32).max),
        "zeros (QN01, QN02)": zeros,
        "all-zero": torch.zeros(2, K),
        "constant (QN07)": torch.full((2, K), 3.0),
    }


def not_numbers(K: int = 96) -> dict[str, Tensor]:
    """The same with NaN and infinities in some blocks."""
    nan, infinite, both = torch.randn(3, 6, K).unbind()
    nan[1, 3] = math.nan
    nan[4, ::16] = -math.nan
    infinite[1, 3] = math.inf
    infinite[4, K - 1] = -math.inf
    both[2, 0], both[2, 1] = math.inf, math.nan
    return {"nan": nan, "infinite": infinite, "both": both, "all-nan": torch.full((2, K), math.nan)}
