"""The first cell explains itself in one sentence; `show` shows what the repository has."""

from __future__ import annotations

import platform
import sys

import pytest
import torch

import lesson
from tmoe.kernels.combine import _combine_kernel


def test_nothing_is_missing_here():
    assert lesson.missing(lesson.ALWAYS) == []


def test_what_is_missing_is_named():
    found = lesson.missing(["torch", "no_such_package", "nor_this_one"])
    assert found == ["no_such_package", "nor_this_one"]
    with pytest.raises(lesson.NotReady) as caught:
        lesson.complain_about(found)
    (line,) = caught.value._render_traceback_()
    assert line.startswith("This notebook can't run yet: no_such_package and nor_this_one can't")
    assert "pip install" in line and line.count("\n") == 0


def test_without_linux_triton_cannot_be_installed(monkeypatch):
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    with pytest.raises(lesson.NotReady, match="Linux only"):
        lesson.complain_about(["triton"])


def test_triton_that_came_too_early(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "triton" in sys.modules
    with pytest.raises(lesson.NotReady, match="imported before this cell; restart"):
        lesson.start()


@pytest.mark.skipif("torch.cuda.is_available()", reason="kernels are interpreted or they aren't")
@pytest.mark.parametrize("has_gpu", [False, True])
def test_the_interpreter_can_be_asked_for_beside_a_gpu(has_gpu, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert lesson.start() == torch.device("cpu")
    assert capsys.readouterr().out == "Kernels run on the CPU, under Triton's interpreter.\n"


def test_versions_that_compute_wrongly(monkeypatch, device):
    import self_test

    assert self_test.problem(device) is None
    monkeypatch.setattr(self_test, "_loops_break", lambda: True)
    assert device.type == "cuda" or "numpy<2.4" in self_test.problem(device)


def test_a_part_of_a_source(monkeypatch):
    shown = []
    monkeypatch.setattr(lesson, "display", shown.append)
    lesson.show(_combine_kernel, "acc = tl.zeros", "acc +=")
    lines = shown[0]["text/plain"].splitlines()
    assert lines[0].startswith("acc = tl.zeros") and lines[-1].strip().startswith("acc += ")
    assert shown[0]["text/markdown"].startswith("`kernels/combine.py`\n")


def test_a_part_that_is_gone():
    with pytest.raises(ValueError, match="_combine_kernel has no line with 'renamed'"):
        lesson.show(_combine_kernel, "renamed")
