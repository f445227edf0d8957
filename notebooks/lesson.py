"""What every notebook begins with and comes back to: `start`, `show` and `check`.

device = lesson.start()                    is everything there, and where do kernels run?
lesson.show(combine, "t = ", "tl.store")   the source of a function, or a part of it
lesson.check(my_function)                  is the answer to an exercise right?
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import platform
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
ALWAYS = ("torch", "triton", "numpy", "matplotlib", "packaging", "platformdirs", "filelock")
INSTALL = 'run `pip install -e ".[notebooks]"` in the repository\'s folder and restart the kernel'


class NotReady(Exception):
    """Something is missing. Jupyter shows the sentence alone, without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [f"This notebook can't run yet: {self}."]


def start(*also: str) -> Any:
    """Look for what the notebook needs, `also` these packages, and return the device to use.

    Without a GPU it sets TRITON_INTERPRET=1, which has to happen before Triton is imported: then
    kernels are ordinary Python, program after program, and can be stepped through. Where it is set
    already, that is done beside a GPU too.
    """
    if importlib.util.find_spec("tmoe") is None:
        sys.path.insert(0, str(REPOSITORY))  # a clone that isn't installed will do
    complain_about(missing((*ALWAYS, *also)))
    warnings.filterwarnings("ignore", message="IProgress not found")  # no bars of progress, then
    import torch

    on_gpu = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
    if not on_gpu:
        if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
            raise NotReady("Triton was imported before this cell; restart the kernel")
        os.environ["TRITON_INTERPRET"] = "1"
        # Lanes that a mask leaves out may divide 0 by 0, and NumPy, which interprets, would say so.
        warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton.runtime")
    device = torch.device("cuda" if on_gpu else "cpu")
    import self_test  # imports Triton

    problem = self_test.problem(device)
    if problem is not None:
        raise NotReady(problem)
    where = torch.cuda.get_device_name() if on_gpu else "the CPU, under Triton's interpreter"
    print(f"Kernels run on {where}.")
    return device


def missing(packages: Iterable[str]) -> list[str]:
    """Those that can't be imported."""
    return [name for name in packages if importlib.util.find_spec(name) is None]


def complain_about(packages: list[str]) -> None:
    """Raise `NotReady` with one sentence if there are any."""
    if not packages:
        return
    if "triton" in packages and platform.system() != "Linux":
        raise NotReady(
            "Triton is made for Linux only; on Windows use WSL 2, on a Mac a Linux container"
        )
    names = " and ".join([", ".join(packages[:-1]), packages[-1]] if packages[1:] else packages)
    raise NotReady(f"{names} can't be found; {INSTALL}")


def show(thing: Any, first: str | None = None, last: str | None = None) -> None:
    """Display the source of a function, kernel or class as it is in the repository.

    With `first` and `last` only from the line that contains the one to the line that contains the
    other. A text that isn't there is an error: then the source has changed.
    """
    thing = getattr(thing, "fn", thing)  # the function in a kernel
    lines = inspect.getsource(thing).splitlines()
    begin = 0 if first is None else _line_with(first, lines, 0, thing)
    end = len(lines) - 1 if last is None else _line_with(last, lines, begin, thing)
    part = textwrap.dedent("\n".join(lines[begin : end + 1]))
    path = Path(inspect.getsourcefile(thing) or "").resolve()
    name = path.relative_to(REPOSITORY) if path.is_relative_to(REPOSITORY) else path.name
    display({"text/markdown": f"`{name}`\n\n```python\n{part}\n```", "text/plain": part})


def _line_with(text: str, lines: list[str], begin: int, thing: Any) -> int:
    for number in range(begin, len(lines)):
        if text in lines[number]:
            return number
    raise ValueError(f"show: {thing.__name__} has no line with {text!r} from line {begin} on")


def check(answer: Callable[..., Any]) -> None:
    """Try out the answer to the exercise of its name; say that it is right, or why not."""
    from exercises import problem_with

    name = getattr(answer, "__name__", None)
    if name is None:
        raise TypeError(f"check: takes the function itself, as in check(answer), got {answer!r}")
    problem = problem_with(name, answer)
    print(f"✓ {name}: right!" if problem is None else f"✗ {name}: {problem}")


def display(bundle: dict[str, Any]) -> None:
    """In a notebook, whichever form of `bundle` it shows best; otherwise the plain text."""
    if "ipykernel" in sys.modules:
        import IPython.display

        IPython.display.display(bundle, raw=True)
    else:
        print(bundle["text/plain"])
