"""What is shown of results: tables in the terminal, pictures, and one HTML page with everything."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .records import (
    PEER_OPERATIONS,
    ROOFLINE,
    Cell,
    picture_cells,
    read_cells,
    read_recorded,
)
from .tables import Grid, all_tables

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NEEDED = ("matplotlib", "jinja2")  # for pictures and the page
TEMPLATE = Path(__file__).parent / "page.html.jinja"


class Report:
    """Results of one machine, by one of tmoe's backends, beside peers."""

    def __init__(
        self, results: dict[str, Any], backend: str, recorded: dict[str, Any] | None = None
    ) -> None:
        self.results = results
        recorded = read_recorded() if recorded is None else recorded
        self.cells: list[Cell] = read_cells(results, recorded, backend)
        operations = json.loads(PEER_OPERATIONS.read_text(encoding="utf-8"))
        self.tables: list[Grid] = all_tables(results, self.cells, operations, backend)
        self._provenance = f"recorded peers: {recorded['provenance']}"
        self._peers_of = recorded["device"]

    @property
    def device(self) -> str:
        return str(self.results["machine_info"]["device"])

    @property
    def facts(self) -> list[str]:
        """Where, with what and when; how hot the GPU was; where peers come from."""
        machine = self.results["machine_info"]
        names = {"commit": "commit", "kernels_hash": "kernels"}
        versions = [f"{name} {version}" for name, version in machine["versions"].items()]
        versions += [f"{text} {machine[name]}" for name, text in names.items() if machine.get(name)]
        driver = f", driver {machine['driver']}" if machine.get("driver") else ""
        found = [f"{machine['device']}{driver}; {', '.join(versions)}"]
        start, end = (machine.get(f"matmul_tflops_at_{when}") for when in ("start", "end"))
        after = "" if end is None else f", {end:.3g} after"  # None: it was interrupted
        found.append(f"torch's matmul: {start:.3g} TFLOP/s before{after}")
        if "command" in self.results:
            found.append(f"{self.results['command']}, {self.results['datetime'][:19]}")
        compared = [cell for cell in self.cells if cell.peers]
        if compared:
            lost = sum(cell.loses for cell in compared)
            found.append(f"a peer is faster in {lost} of {len(compared)} cells")
        if self.device == self._peers_of:
            found.append(self._provenance)
        else:
            found.append(f"{self._provenance}; left out, since this is another device")
        return found

    @property
    def reasons(self) -> Mapping[str, str]:
        """What wasn't measured, and why."""
        return {**self.results.get("skipped", {}), **self.results.get("failed", {})}

    def pictures(self) -> dict[str, Figure]:
        """The roofline and time over tokens, of random routing. Needs matplotlib."""
        from .plots import draw

        return draw(picture_cells(self.cells), self.device)

    def write(self, folder: Path) -> Iterator[Path]:
        """`<picture>.png`, and `report.html`, which holds all there is. Yields their paths."""
        from .plots import as_svg, save_png

        folder.mkdir(parents=True, exist_ok=True)
        pictures = self.pictures()
        for name, picture in pictures.items():
            save_png(picture, folder / f"{name}.png")
            yield folder / f"{name}.png"
        page = folder / "report.html"
        svgs = {name: as_svg(picture) for name, picture in pictures.items()}
        page.write_text(self.page(svgs), encoding="utf-8")
        yield page

    def page(self, svgs: Mapping[str, str]) -> str:
        """The HTML, which needs no other file."""
        from jinja2 import Environment
        from markupsafe import Markup

        rooflines = [Markup(svg) for name, svg in svgs.items() if name.startswith(ROOFLINE)]
        others = [Markup(svg) for name, svg in svgs.items() if not name.startswith(ROOFLINE)]
        environment = Environment(autoescape=True, trim_blocks=True)
        template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
        return template.render(
            title=f"tmoe on {self.device}", facts=self.facts, tables=self.tables,
            rooflines=rooflines, pictures=others, reasons=self.reasons,
        )  # fmt: skip


def why_no_pictures(packages: Sequence[str] = NEEDED) -> str | None:
    """A sentence if what pictures and the page need isn't installed."""
    missing = [name for name in packages if find_spec(name) is None]
    if not missing:
        return None
    return f"no pictures and no page without {' and '.join(missing)}: pip install 'tmoe[bench]'"
