"""The words of the command line as what they name; `typer.BadParameter` for others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from ..shapes import MoEShape


def shapes_of(texts: list[str] | None, gpu: bool) -> list[MoEShape]:
    """Layers by name or by their sizes; the usual ones if there are none."""
    from ..shapes import MoEShape
    from ..tune import parse_layer
    from .shapes import GPU_SHAPES, SHAPES, TINY

    if not texts:
        return [*GPU_SHAPES] if gpu else [TINY]
    found: list[MoEShape] = []
    for text in texts:
        if text == "all":
            found += SHAPES.values()
        elif "=" in text:
            try:
                layer = parse_layer(text, op="bench", arg="SHAPES")
            except ValueError as error:
                raise typer.BadParameter(str(error)) from error
            sizes = (layer.num_experts, layer.top_k, layer.hidden, layer.intermediate)
            found.append(MoEShape(text, *sizes))
        else:
            found += [SHAPES[name] for name in names_of("SHAPES", text, SHAPES)]
    return found


def tokens_of(text: str | None, default: Iterable[int]) -> list[int]:
    """ "1,16", or all powers of two."""
    from .shapes import ALL_TOKENS

    if text is None or text == "all":
        return [*(default if text is None else ALL_TOKENS)]
    from ..tune import parse_tokens

    try:
        return parse_tokens(text, op="bench")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def names_of(option: str, text: str, known: Iterable[str]) -> list[str]:
    """ "a,b", or all of `known`."""
    if text == "all":
        return [*known]
    names = text.split(",")
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"{option}: {name} is none of {', '.join(known)}")
    return names
