"""docs/checkpoints.md: its table is what the descriptions say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoints.fused import FUSED
from tests.checkpoints.kinds import kinds
from tmoe.checkpoints.methods import describe

TEXT = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
TABLE = TEXT.partition("## What loads")[2].partition("\n\n## ")[0]
ROWS = [row.strip("| ").split(" | ") for row in TABLE.splitlines() if row.startswith("| `")]


def described():
    for kind in kinds():
        if kind.scheme is not None:
            yield kind.name, {"quantization_config": kind.config}, kind.scheme
    for name, (make, scheme) in FUSED.items():
        yield name, make(2, 128, 128)[1], scheme


@pytest.mark.parametrize("name, config, scheme", list(described()), ids=lambda v: str(v)[:40])
def test_the_table(name, config, scheme, tmp_path):
    """A row with the method, the format of the weights and the scheme."""
    quantization = describe(config, tmp_path)
    linear = quantization.of("model.layers.0.mlp.experts.0.up_proj")
    wanted = [f"`{quantization.method}`", f"`{linear.format}`", f"`{scheme}`"]
    found = [row for row in ROWS if all(any(w in cell for cell in row) for w in wanted)]
    assert found, f"docs/checkpoints.md has no row with {', '.join(wanted)}"
    assert linear.scheme(None, "test") == scheme
