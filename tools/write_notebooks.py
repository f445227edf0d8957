"""Run the notebooks' sources and write them with their outputs: `python -m tools.write_notebooks`.

    notebooks/sources/NN_name.py    what people edit: text in the percent format
    notebooks/NN_name.ipynb         what people read: the same with outputs; made by this script

Numbers as arguments choose some: `python -m tools.write_notebooks 01 05`. All run in one process,
one after the other with their names forgotten in between, since importing torch takes longer than
most of them. The tests run them in the same way and compare the outputs' texts.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import jupytext
import nbformat
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
SOURCES = sorted((NOTEBOOKS / "sources").glob("*.py"))
TIMEOUT = 120  # seconds of a cell
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def written(source: Path) -> Path:
    """Where the notebook of a source is."""
    return NOTEBOOKS / f"{source.stem}.ipynb"


def read_source(source: Path) -> NotebookNode:
    """The cells without outputs, with ids and metadata that are the same on every machine."""
    notebook = jupytext.read(source)
    notebook.metadata = nbformat.from_dict(METADATA)
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{number:02}", nbformat.from_dict({})
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


@contextmanager
def running_kernel() -> Iterator[KernelManager]:
    """A Python process that notebooks run in, one after the other."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}  # cell 1 sets it
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(ROOT), environment.get("PYTHONPATH")))
    )
    with tempfile.TemporaryDirectory() as folder:  # for sockets that nobody else can open
        manager = KernelManager(kernel_name="python3", transport="ipc", ip=f"{folder}/kernel")
        manager.start_kernel(cwd=str(NOTEBOOKS), env=environment)
        try:
            yield manager
        finally:
            manager.shutdown_kernel(now=True)


def execute(notebook: NotebookNode, kernel: KernelManager) -> NotebookNode:
    """Run all cells and return the notebook with its outputs; an error in a cell is raised."""
    forget = nbformat.v4.new_code_cell("%reset -f")
    notebook.cells.insert(0, forget)
    client = NotebookClient(notebook, km=kernel, timeout=TIMEOUT, coalesce_streams=True)
    try:
        client.execute()
    finally:
        if client.kc is not None:
            client.kc.stop_channels()  # the kernel goes on; this end of it is no longer needed
        notebook.cells.remove(forget)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for number, cell in enumerate(code, 1):
        cell.execution_count = number
        cell.metadata.pop("execution", None)  # times
        # What libraries complain about while they are imported differs from machine to machine.
        cell.outputs = [o for o in cell.outputs if o.get("name") != "stderr"]
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = number
    return notebook


def main(wanted: Sequence[str]) -> None:
    with running_kernel() as kernel:
        for source in SOURCES:
            if wanted and source.name[:2] not in wanted:
                continue
            started = time.perf_counter()
            notebook = execute(read_source(source), kernel)
            nbformat.validate(notebook)
            text = nbformat.writes(notebook, indent=1)
            written(source).write_text(text.rstrip("\n") + "\n", encoding="utf-8")
            print(f"{source.stem}  {time.perf_counter() - started:.1f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
