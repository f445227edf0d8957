"""What the pages' blocks meet in the suite that a reader doesn't, each with its reason.

Everything else runs as it stands. The tests fail if an entry of these tables is no longer needed.
"""

from __future__ import annotations

# Text of a page's Python, and what stands in for it.
REPLACED: dict[str, dict[str, str]] = {
    "README.md": {
        'init_device_mesh("cuda", (8,)': 'init_device_mesh("cpu", (1,)',  # not 8 GPUs, one CPU
        '-FP8", device="cuda"': '-FP8", device="cpu"',
    },
}

# Python that can't run here, by its page and its first line.
NOT_RUN: dict[tuple[str, str], str] = {}

# Commands of which the words are checked (the options exist, what they name does) and that aren't
# started with the page (… stands for any end); and the test that runs them, or why none does.
NOT_STARTED: dict[str, str] = {
    "tmoe bench": "tests/bench/test_command.py",
    "tmoe tune qwen3-30b-a3b …": "tests/dispatch/test_tune_command.py, on a small layer",
    "tmoe bench E=64…": "tests/bench/test_command.py, on a small layer",
    "tmoe bench mixtral-8x7b …": "tests/bench/test_command.py, on a small layer",
    "tmoe bench qwen3-30b-a3b …": "tests/bench/test_command.py, on a small layer",
    "tmoe bench report …": "tests/bench/test_report.py; a minute of pictures",
    "tmoe bench compare …": "tests/bench/test_command.py, with files that differ",
    "tmoe quantize Qwen3-30B-A3B Qwen3-30B-A3B-FP8 --scheme fp8_block --device cuda": "tests/gpu",
    "torchrun --nproc-per-node 2 -m tmoe.parallel.demo": "tests/parallel/test_demo.py",
    "torchrun --nproc-per-node 2 -m bench.…": "two GPUs; bench/results has what they wrote",
    "python -m tmoe.integrations.lm_eval …": "tests/integrations/test_lm_eval.py, with lm_eval",
    "python -m bench.record…": "tests/bench/test_scripts.py, with a small plan",
    "python -m bench.startup…": "tests/bench/test_scripts.py, on a small layer",
    "python -m bench.decode_step…": "tests/bench/test_scripts.py, on a small model",
    "python -m bench.…": "a GPU, or what one recorded; bench/results has what they wrote",
    "python -m pytest …": "tests/bench/test_operations.py, with small cases",
    "pytest bench…": "tests/bench/test_operations.py, with small cases",
    "python -m tools.write_notebooks …": "tests/notebooks/test_notebooks.py",
    "make …": "make -n knows the target; .ci/run has lint and test",
    "pip install …": "needs a network; names and extras are those of pyproject.toml",
    "jupyter lab…": "a server",
    "cp …": "of a record that a GPU writes",
    ".venv/bin/pre-commit install": "changes the checkout's git",
}
