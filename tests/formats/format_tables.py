"""The tables of docs/formats.md, made from `FORMATS` and from measurements.

python -m tests.formats.format_tables      prints them, to be pasted into the document
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tmoe.formats import FORMATS, ElementType, Format, compare_formats, error_report
from tmoe.formats.format import E2M1, E4M3, E8M0

DOCS = Path(__file__).parents[2] / "docs"
EDGES = {
    "zeros": "a block of zeros",
    "subnormals": "values next to zero",
    "overflow": "values beyond the range",
    "nan": "NaN",
    "inf": "±Inf",
}


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _power(value: float) -> str:
    mantissa, exponent = torch.tensor(value, dtype=torch.float64).frexp()
    power = f"2^{exponent.item() - 1}"
    return power if mantissa == 0.5 and abs(exponent.item()) > 4 else f"{value:g}"


def elements_table() -> str:
    """The types of codes and scales."""

    def row(element: ElementType) -> list[str]:
        return [
            f"`{element.name}`",
            str(element.bits),
            _power(element.max),
            _power(element.smallest_normal),
            _power(element.smallest_subnormal) if element is not E8M0 else "none",
            "yes" if element.has_nan else "no",
            "yes" if element.has_inf else "no",
            f"`{str(element.storage).removeprefix('torch.')}`",
        ]

    header = ["type", "bits", "largest", "smallest normal", "smallest subnormal", "NaN", "Inf"]
    return _table([*header, "stored as"], [row(element) for element in (E4M3, E2M1, E8M0)])


def formats_table() -> str:
    """What each format is."""

    def block(shape: tuple[int | None, int | None]) -> str:
        rows, columns = ("all" if size is None else str(size) for size in shape)
        return "matrix" if (rows, columns) == ("all", "all") else f"{rows}×{columns}"

    def row(format: Format) -> list[str]:
        default = format.default_scale_rule
        rules = [f"**{rule}**" if rule == default else rule for rule in format.scale_rules]
        return [
            f"`{format.name}`",
            f"`{format.element.name}`",
            f"`{format.scale.name}`",
            " or ".join(map(block, format.block_shapes)),
            ", ".join(rules) or "–",
            "yes" if format.has_global_scale else "–",
            f"{format.bits_per_value((4096, 4096)):.2f}",
        ]

    header = ["format", "code", "scale", "block (rows×columns)", "scale rules", "global scale"]
    return _table([*header, "bits per value"], [row(format) for format in FORMATS.values()])


def edges_table() -> str:
    """What happens where a format ends."""
    names: dict[tuple[str, ...], list[str]] = {}
    for format in FORMATS.values():
        edges = tuple(getattr(format, edge) for edge in EDGES)
        names.setdefault(edges, []).append(f"`{format.name}`")
    columns = [*zip(*names, strict=True)]
    rows = [[title, *cells] for title, cells in zip(EDGES.values(), columns, strict=True)]
    return _table(["", *(", ".join(group) for group in names.values())], rows)


def scale_rules_table() -> str:
    """Signal to noise of the scale rules, in dB, on 2^17 random values."""
    torch.manual_seed(0)
    shape = (256, 512)
    samples = {
        "normal": torch.randn(shape),
        "Laplace": torch.distributions.Laplace(0.0, 1.0).sample(shape),
        "Student t, 3 degrees of freedom": torch.distributions.StudentT(3.0).sample(shape),
        "uniform": torch.rand(shape) * 2 - 1,
    }
    rows = []
    for name in ("mxfp8", "mxfp4"):
        for distribution, x in samples.items():
            rules = FORMATS[name].scale_rules
            snr = [error_report(x, name, scale_rule=rule).snr_db for rule in rules]
            rows.append([f"`{name}`", distribution, *(f"{value:.1f}" for value in snr)])
    return _table(["format", "values", *FORMATS["mxfp8"].scale_rules], rows)


def comparison_table() -> str:
    """What the document's example prints."""
    torch.manual_seed(0)
    return str(compare_formats(torch.randn(256, 1024)))


def bits_per_byte_table() -> str:
    """What each format costs the demo's model, as `tmoe.demo.bits_per_byte` recorded it."""
    scores = json.loads((DOCS / "bits_per_byte.json").read_text())["bits per byte"]
    rows = [[name, *(f"{score:.4f}" for score in row.values())] for name, row in scores.items()]
    return _table(["weights, activations", "weights only", "weights and activations"], rows)


def layers_table() -> str:
    """The same through the library's layers, beside what was done by hand."""
    scores = json.loads((DOCS / "bits_per_byte.json").read_text())["of layers"]
    rows = [
        [f"`{name}`", *(f"{score:.4f}" for score in row.values())] for name, row in scores.items()
    ]
    return _table(["scheme", "by hand", "tmoe"], rows)


TABLES = (
    bits_per_byte_table,
    layers_table,
    elements_table,
    formats_table,
    edges_table,
    scale_rules_table,
    comparison_table,
)

if __name__ == "__main__":
    for table in TABLES:
        print(f"{table()}\n")
