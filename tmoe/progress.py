"""A progress bar on stderr for work that takes minutes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Step = Callable[[str], None]  # called when the part of that name begins


@contextmanager
def progress_bar(total: int, what: str, show: bool | None = None) -> Iterator[Step]:
    """``with progress_bar(len(parts), "layers") as step: for part in parts: step(part.name); ...``

    Args:
        show: None shows it on a terminal only.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True, force_terminal=True if show else None)
    hidden = not console.is_terminal if show is None else not show
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(what),
        TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, disable=hidden) as bar:
        task = bar.add_task("", total=total)
        begun = 0

        def step(name: str) -> None:
            nonlocal begun
            bar.update(task, description=name, completed=begun)
            begun += 1

        yield step
        bar.update(task, completed=total)
