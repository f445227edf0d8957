"""docs/flashinfer.md: its table is the library's."""

from __future__ import annotations

from pathlib import Path

from tmoe.backends.flashinfer.support import USES

TEXT = (Path(__file__).parents[3] / "docs" / "flashinfer.md").read_text()


def test_the_table_is_up_to_date():
    rows = [
        f"| `{scheme}` | `{backend}` | `{use.entry.name}` | {use.entry.promoted_from} | "
        + ", ".join("{}.{}".format(*c) for c in use.capabilities)
        + " |"
        for backend, uses in USES.items()
        for scheme, use in uses.items()
    ]
    wanted = "\n".join(rows)
    assert wanted in TEXT, f"paste this into docs/flashinfer.md:\n\n{wanted}"
