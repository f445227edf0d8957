"""notebooks/interpreter_and_gpu.md: its examples print what their comments say."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from tests.notebooks.folder import NOTEBOOKS

PAGE = (NOTEBOOKS / "interpreter_and_gpu.md").read_text()


def test_examples_print_what_they_say(tmp_path):
    """In a process of their own, and from a file: Triton reads the source of kernels."""
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL))
    wanted = re.findall(r"^print\(.*\)  # (.*)$", code, flags=re.MULTILINE)
    assert len(wanted) == code.count("print(") == 4
    (tmp_path / "page.py").write_text(code)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "page.py"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == wanted, done.stderr


def test_links_lead_somewhere():
    words = re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL)
    links = re.findall(r"\]\(([^)]+)\)", words)
    assert links and not [link for link in links if not (NOTEBOOKS / link).exists()]
