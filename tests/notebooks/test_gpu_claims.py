"""What notebooks/interpreter_and_gpu.md says that a GPU says."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.notebooks.folder import NOTEBOOKS

PAGE = (NOTEBOOKS / "interpreter_and_gpu.md").read_text()


@pytest.mark.gpu
def test_the_examples_on_a_gpu(tmp_path):
    """The page's own code, with its tensors on the GPU and kernels compiled."""
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL))
    code = code.replace('os.environ["TRITON_INTERPRET"] = "1"', "")
    code = code.replace("import torch\n", "import torch\n\ntorch.set_default_device('cuda')\n")
    (tmp_path / "page.py").write_text(code)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = [sys.executable, "page.py"]
    done = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True)
    total, casts, loaded, count = done.stdout.splitlines()
    words = " ".join(PAGE.split())
    assert total == "4.5" and "A GPU says 4.5." in words
    assert casts == "[128.0, 1000.0] [128.0, 448.0]"
    assert "A GPU says 128 and 1000, and 128 and 448, the largest FP8 number." in words
    assert loaded.startswith("[5.0, 6.0, ") and "a GPU whatever was there before" in words
    assert 0 < float(count) < 1000 and "On a GPU they don't." in words
