"""What `quantize_checkpoint` did, to print or as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..formats import ErrorSums


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """The result of `quantize_checkpoint`; it prints well.

    Attributes:
        out, scheme, format: where it is, and what it was written as.
        errors: for each layer of experts the error of its two projections.
        left_alone: layers of experts that keep their weights, with the reason.
        not_copied: files of the source that were left out: weights in other formats.
        written, kept: how many files of tensors were written, and found finished.
        bytes_before, bytes_after: of all tensors.
        note: what a user should know, or "".
    """

    out: str
    scheme: str
    format: str
    errors: dict[str, dict[str, ErrorSums]]
    left_alone: dict[str, str]
    not_copied: list[str]
    written: int
    kept: int
    bytes_before: int
    bytes_after: int
    note: str

    def to_dict(self) -> dict[str, Any]:
        """For JSON; errors as signal to noise and relative to the weights."""
        result = {name: getattr(self, name) for name in self.__slots__}
        result["errors"] = {
            layer: {
                name: {"snr_db": error.snr_db, "relative": error.relative}
                for name, error in each.items()
            }
            for layer, each in self.errors.items()
        }
        return result

    def __str__(self) -> str:
        gb = f"{self.bytes_before / 1e9:.3f} GB became {self.bytes_after / 1e9:.3f} GB"
        files = f"{self.written} files written, {self.kept} found finished"
        lines = [f"{self.out}: experts as {self.scheme}, format {self.format}; {gb}; {files}"]
        if self.note:
            lines.append(f"note: {self.note}")
        for layer, each in self.errors.items():
            errors = ", ".join(f"{name} {error}" for name, error in each.items())
            lines.append(f"  {layer}: {errors}")
        lines += [f"  {layer} left alone: {reason}" for layer, reason in self.left_alone.items()]
        if self.not_copied:
            lines.append(f"not copied: {', '.join(self.not_copied)}")
        return "\n".join(lines)


def by_projection(errors: dict[str, dict[str, ErrorSums]]) -> dict[str, dict[str, ErrorSums]]:
    """Gate and up together, as models hold them."""
    result = {}
    for layer, roles in errors.items():
        first = "gate_up_proj" if {"gate", "gate_up"} & set(roles) else "up_proj"
        parts = [roles.get(role, ErrorSums()) for role in ("gate", "up", "gate_up")]
        result[layer] = {
            first: sum(parts, ErrorSums()),
            "down_proj": roles.get("down", ErrorSums()),
        }
    return result
