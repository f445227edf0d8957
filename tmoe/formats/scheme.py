"""Which formats meet in an expert layer: a scheme names that of the weights and of their inputs.

scheme        weights                              inputs of both projections
fp8_tensor    fp8_tensor                           fp8_tensor, static or dynamic
fp8_channel   fp8_channel                          fp8_token
fp8_block     fp8_block 128×128                    fp8_block 1×128
mxfp8         mxfp8                                mxfp8
mxfp4_a8      mxfp4                                mxfp8
nvfp4         nvfp4                                nvfp4, static or dynamic
fp8_a16       fp8_tensor, fp8_channel, fp8_block   as they come
mxfp4_a16     mxfp4                                as they come
nvfp4_a16     nvfp4                                as they come
"""

from __future__ import annotations

from dataclasses import dataclass

from ..checks import expect, expect_type
from .recipe import Recipe


def _recipe(format: str, *block_shape: int) -> Recipe:
    return Recipe.of("Scheme", format, block_shape or None)


@dataclass(frozen=True, slots=True)
class Scheme:
    """A row of the table above, hashable."""

    name: str
    weights: tuple[Recipe, ...]  # what the weights may be; the first is what they are made by
    inputs: Recipe | None  # None: they aren't quantised
    takes_scales: bool = False  # static scales of the inputs may be given

    @classmethod
    def of(cls, name: str, op: str, *, or_bf16: bool = False) -> Scheme:
        """The scheme of that name. `op` is whom an error names; `or_bf16`: it takes None and bf16
        too, which are none."""
        expect_type(name, str, op, "scheme")
        wanted = f"{'None, bf16 or ' if or_bf16 else ''}one of {', '.join(SCHEMES)}"
        expect(name in SCHEMES, op, "scheme", wanted, name)
        return SCHEMES[name]

    def accepts(self, format: str, block_shape: tuple[int | None, int | None]) -> bool:
        """Whether weights of this format and block shape belong to the scheme."""
        return any((r.format.name, r.block_shape) == (format, block_shape) for r in self.weights)


_FP8 = (_recipe("fp8_tensor"), _recipe("fp8_channel"), _recipe("fp8_block", 128, 128))
_MXFP4, _NVFP4 = (_recipe("mxfp4"),), (_recipe("nvfp4"),)

SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme("fp8_tensor", _FP8[:1], _recipe("fp8_tensor"), takes_scales=True),
        Scheme("fp8_channel", _FP8[1:2], _recipe("fp8_token")),
        Scheme("fp8_block", _FP8[2:], _recipe("fp8_block", 1, 128)),
        Scheme("mxfp8", (_recipe("mxfp8"),), _recipe("mxfp8")),
        Scheme("mxfp4_a8", _MXFP4, _recipe("mxfp8")),
        Scheme("nvfp4", _NVFP4, _recipe("nvfp4"), takes_scales=True),
        Scheme("fp8_a16", _FP8, None),
        Scheme("mxfp4_a16", _MXFP4, None),
        Scheme("nvfp4_a16", _NVFP4, None),
    )
}
