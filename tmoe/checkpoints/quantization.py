"""What a checkpoint's configuration says about the number formats of its weights.

`methods.describe` reads the `quantization_config` of config.json, or hf_quant_config.json, into a
`Quantization`: for each linear layer, the format of the weights, what its inputs are rounded to,
and so the scheme of tmoe that computes the same. It guesses nothing: a method, an algorithm or an
option that tmoe doesn't know is an error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..checks import expect
from ..formats import SCHEMES
from .names import Names

# The scheme for weights of a format with inputs of a kind. "static": per tensor, by a scale in the
# checkpoint; "tensor", "token", "block" (1 x 128), "mxfp8" and "nvfp4": by the values that come;
# None: not rounded. One scale per matrix with one per token is fp8_channel: each row's scale is its
# matrix', which changes no value.
_SCHEMES = {
    ("fp8_tensor", "static"): "fp8_tensor",
    ("fp8_tensor", "tensor"): "fp8_tensor",
    ("fp8_tensor", "token"): "fp8_channel",
    ("fp8_tensor", None): "fp8_a16",
    ("fp8_channel", "token"): "fp8_channel",
    ("fp8_channel", None): "fp8_a16",
    ("fp8_block", "block"): "fp8_block",
    ("fp8_block", None): "fp8_a16",
    ("mxfp8", "mxfp8"): "mxfp8",
    ("mxfp4", "mxfp8"): "mxfp4_a8",
    ("mxfp4", None): "mxfp4_a16",
    ("nvfp4", "nvfp4"): "nvfp4",
    ("nvfp4", None): "nvfp4_a16",
}


@dataclass(frozen=True, slots=True)
class LinearFormat:
    """How the weight of a linear layer is stored, and what its inputs are rounded to."""

    format: str  # a name of tmoe.formats.FORMATS
    inputs: str | None
    static: bool = False  # the checkpoint has scales of the inputs

    @property
    def block_shape(self) -> tuple[int, int] | None:
        return (128, 128) if self.format == "fp8_block" else None

    def scheme(self, wanted: str | None, op: str) -> str:
        """The scheme that computes what the checkpoint says; or the one that is `wanted` instead,
        which has to take these weights."""
        if wanted is None:
            scheme = _SCHEMES.get((self.format, self.inputs))
            fitting = [name for name in SCHEMES if self.stored_as(name) is not None]
            got = f"{self.format} weights with {self.inputs or 'unquantised'} inputs"
            can = f"given for this checkpoint, one of {', '.join(fitting)}"
            expect(scheme is not None, op, "scheme", can, f"None: tmoe has none for {got}")
            assert scheme is not None
            return scheme
        expect(wanted in SCHEMES, op, "scheme", f"one of {', '.join(SCHEMES)}", repr(wanted))
        forms = " or ".join(dict.fromkeys(r.format.name for r in SCHEMES[wanted].weights))
        fits = self.stored_as(wanted) is not None
        expect(fits, op, "scheme", f"one for {self.format} weights", f"{wanted}, for {forms}")
        return wanted

    def stored_as(self, scheme: str) -> str | None:
        """The format that the scheme has these weights in, or None if it doesn't take them."""
        forms = [r.format.name for r in SCHEMES[scheme].weights]
        if self.format in forms:
            return self.format
        return "fp8_channel" if self.format == "fp8_tensor" and "fp8_channel" in forms else None


@dataclass(frozen=True, slots=True)
class Quantization:
    """The quantised layers of a checkpoint.

    Attributes:
        method: `fp8`, `mxfp8`, `modelopt`, `compressed-tensors`, `fbgemm_fp8` or `mxfp4`.
        groups: patterns of layers' names, and their format; the first that matches counts.
        ignored: patterns of the layers that aren't quantised, as the configuration has them. What
            is quantised shows in the tensors themselves; these are for the reader.
        names: what the tensors of a layer are called.
    """

    method: str
    groups: tuple[tuple[str, LinearFormat], ...]
    ignored: tuple[str, ...]
    names: Names

    def of(self, module: str) -> LinearFormat | None:
        """The format of a linear layer, by its name in the checkpoint; None if no group has it."""
        for pattern, linear in self.groups:
            if matches(pattern, module):
                return linear
        return None

    def __str__(self) -> str:
        formats = dict.fromkeys(
            f"{linear.format} weights, {linear.inputs or 'unquantised'} inputs"
            for _, linear in self.groups
        )
        return f"{self.method}: {'; '.join(formats)}"


def matches(pattern: str, module: str) -> bool:
    """Whether a target of a configuration means this layer: "re:" and a regular expression, a name
    with wildcards, a layer or what contains it, or the class of all linear layers."""
    if pattern in ("Linear", "*"):
        return True
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    if "*" in pattern:
        return re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), module) is not None
    return module == pattern or module.startswith(f"{pattern}.") or module.endswith(f".{pattern}")
