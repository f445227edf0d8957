"""Write docs/reference/cli.md, the command line in its own words: see `written`.

python -m tools.write_cli_reference
"""

from __future__ import annotations

import html
import re
from pathlib import Path

from typer.testing import CliRunner

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "cli.md"
HEAD = """# Command line

`python -m tmoe` is the same command. `python -m tools.write_cli_reference` writes this page.

"""


def written() -> str:
    """The page, as typer documents `tmoe.cli`."""
    from typer.cli import app

    done = CliRunner().invoke(app, ["tmoe.cli", "utils", "docs", "--name", "tmoe"])
    if done.exit_code:
        raise RuntimeError(done.output)
    text = html.unescape(done.stdout).partition("\n\n")[2]
    usage = re.compile(r"\*\*Usage\*\*:\n\n```console\n\$ (.*)\n```")
    text = usage.sub(r"```text\n\1\n```", text)  # it is no command that can be run
    text = re.sub(r"^(\* `[^`]*)<([^>]*)>`", r"\1\2`", text, flags=re.M)
    return HEAD + text.strip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")
