"""Every block of Python and every command of every page runs, and prints what the page says.

`blocks.py` finds pages and blocks; `run_page.py`, `run_python.py` and `run_console.py` say what
running means; `exceptions.py` has the few things that are different here, `tiny_hub.py` the models
that stand in for large ones, `checks.py` what is looked at afterwards.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch.distributed as dist

from tests.docs import tiny_hub
from tests.docs.blocks import ROOT, Block, agrees, blocks_of, pages
from tests.docs.checks import AFTERWARDS, look_at
from tests.docs.exceptions import NOT_RUN, NOT_STARTED, REPLACED
from tests.docs.run_console import commands_of, not_started, parts_of, run_console
from tests.docs.run_page import run_on_a_rank, run_page
from tests.docs.run_python import run_block
from tests.parallel.ranks import RankError, ranks
from tests.processes import python_path
from tmoe.dispatch import measure

BLOCKS = {page: blocks_of(page) for page in pages()}


def _python(page: str) -> str:
    code = "\n".join(block.text for block in BLOCKS[page] if block.language == "python")
    for old, new in REPLACED.get(page, {}).items():
        code = code.replace(old, new)
    return code


# A page says on how many ranks it runs by the mesh that it makes, and that it wants a process of
# its own by setting what Triton reads when it is imported.
MESHES = {page: re.findall(r'init_device_mesh\("cpu", \((\d+),', _python(page)) for page in BLOCKS}
RANKS = {page: max(map(int, sizes)) for page, sizes in MESHES.items() if sizes}
ON_TWO_RANKS = [page for page, size in RANKS.items() if size == 2]
ALONE = [page for page in BLOCKS if "TRITON_INTERPRET" in _python(page)]
HERE = [
    page
    for page, blocks in BLOCKS.items()
    if any(b.language in ("python", "console") for b in blocks)
]


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    tiny_hub.fill(folder)
    return folder


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*saw no tokens")
@pytest.mark.parametrize("page", HERE)
def test_a_page_runs(page, hub, tmp_path, monkeypatch, request):
    # nobody looks at the times that autotune takes, and an interpreted layer needs seconds
    monkeypatch.setattr(measure, "WARM_UPS", 1)
    monkeypatch.setattr(measure, "REPEATS", 1)
    if RANKS.get(page) == 1:
        request.getfixturevalue("one_rank")
    elsewhere = page in ON_TWO_RANKS or page in ALONE
    languages = ("console",) if elsewhere else ("python", "console")
    run = run_page(page, tmp_path, hub, languages)
    skipped = sum(name == page for name, _ in NOT_RUN)
    assert run.blocks == sum(block.language in languages for block in BLOCKS[page]) - skipped
    if not elsewhere:
        look_at(run)


def test_pages_about_ranks_run_on_two(hub, tmp_path):
    failed = []
    with ranks(2) as two:
        for page in ON_TWO_RANKS:
            try:
                two.run(run_on_a_rank, page, tmp_path / page.replace("/", "-"), hub)
            except RankError as error:
                failed.append(f"{page}: {error}")
    assert not failed, "\n".join(failed)
    assert set(RANKS.values()) <= {1, 2}


def test_pages_about_the_interpreter_run_in_a_process_of_their_own(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = python_path()
    command = [sys.executable, "-m", "tests.docs.run_page", *ALONE]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines() == [f"ran {page}" for page in ALONE], done.stderr


def test_every_exception_is_needed():
    for page, replaced in REPLACED.items():
        text = "\n".join(block.text for block in BLOCKS[page] if block.language == "python")
        assert not [old for old in replaced if old not in text], page
    first_lines = {
        (b.page, b.text.partition("\n")[0]) for blocks in BLOCKS.values() for b in blocks
    }
    assert set(NOT_RUN) <= first_lines
    commands = [
        words
        for blocks in BLOCKS.values()
        for block in blocks
        if block.language == "console"
        for command, _ in commands_of(block)
        for words in parts_of(command)
    ]
    assert {not_started(words) for words in commands} >= set(NOT_STARTED)
    tests = {
        path for reason in NOT_STARTED.values() for path in re.findall(r"tests/[\w/.]+", reason)
    }
    assert all((ROOT / path).exists() for path in tests)
    assert set(AFTERWARDS) <= set(BLOCKS)


# The tests above would pass if nothing were compared, so here is what must fail.


def _block(text: str, language: str = "python") -> Block:
    return Block("README.md", 1, language, text)


@pytest.mark.parametrize(
    "code",
    [
        "print(1 + 1)  # 3",
        "for i in range(3):\n    print(i)  # 0, 1",
        "print(\n    [1, 2]\n)  # [1, 3]",
        "print(1)  # the number one",
        "if False:\n    print(1)  # 1",
    ],
)
def test_a_wrong_comment_is_noticed(code):
    with pytest.raises(AssertionError, match="says it prints"):
        run_block(_block(code), {}, {})


def test_a_right_comment_passes():
    code = (
        "for i in range(3):\n    print(i)  # 0, 1, 2\nprint('a long tale')  # a … tale\nprint(5)\n"
    )
    assert run_block(_block(code), {}, {}) == "0\n1\n2\na long tale\n5\n"
    assert agrees("one\n…\nfour", "one \ntwo\nthree\nfour\n") and not agrees("one", "one\ntwo")


@pytest.mark.parametrize(
    "command",
    [
        "$ tmoe explain --modle deepseek-v3",
        "$ tmoe explain --model no-such-model",
        "$ tmoe tune qwen3-30b-a3b --slowly",
        "$ tmoe bench compare before.json",
        "$ python -m bench.training --no-such-option",
        "$ python -m bench.no_such_module",
        "$ make no-such-target",
        '$ pip install "tmoe[everything]"',
        "$ rm -rf everything",
        "tmoe doctor",
        "$ tmoe bench predict mixtral-8x7b\nno such output",
    ],
)
def test_a_wrong_command_is_noticed(command):
    with pytest.raises((AssertionError, subprocess.CalledProcessError)):
        run_console(_block(command, "console"))


@pytest.mark.parametrize("text", ["```py\n1\n```\n", "```python\n1\n", "~~~\n1\n~~~\n"])
def test_a_block_that_nobody_would_run_is_noticed(text):
    with pytest.raises(ValueError, match="README.md"):
        blocks_of("README.md", text)
