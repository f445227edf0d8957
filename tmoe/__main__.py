"""``python -m tmoe`` is ``tmoe``."""

from .cli import app

app(prog_name="tmoe")
