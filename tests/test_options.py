"""`tmoe.options`: nesting, isolation between threads and tasks, and what it refuses."""

from __future__ import annotations

import asyncio
import threading

import pytest

import tmoe
from tmoe.options import Options, current


def test_defaults():
    assert current() == Options(
        backend=None, deterministic=False, batch_invariant=False, verify=True
    )


def test_nesting_keeps_what_is_not_named():
    with tmoe.options(backend="torch", deterministic=True) as outer:
        assert current() is outer
        with tmoe.options(backend="triton"):
            assert (current().backend, current().deterministic) == ("triton", True)
            with tmoe.options(backend=None):
                assert current().backend is None
        assert current() == outer
    assert current() == Options()


def test_a_folder_may_be_a_string(tmp_path):
    with tmoe.options(cache_dir=str(tmp_path)) as asked:
        assert asked.cache_dir == tmp_path


def test_an_exception_restores():
    with pytest.raises(KeyError), tmoe.options(backend="torch"):
        raise KeyError
    assert current() == Options()


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"backand": "torch"}, TypeError, "'backand' is not an option; there are backend, determ"),
        ({"backend": "cuda"}, ValueError, "backend must be one of torch, triton, .*got 'cuda'"),
        ({"backend": 3}, TypeError, "backend must be a str, got int"),
        ({"deterministic": 1}, TypeError, "deterministic must be a bool, got int"),
        ({"verify": None}, TypeError, "verify must be a bool, got NoneType"),
        ({"cache_dir": 1}, TypeError, "cache_dir must be a str or PathLike, got int"),
    ],
)
def test_bad_options_are_refused_on_entry(changes, error, message):
    with pytest.raises(error, match=message), tmoe.options(**changes):
        raise AssertionError("entered")
    assert current() == Options()


def test_a_thread_starts_from_the_defaults_and_keeps_its_own():
    seen = []

    def work():
        seen.append(current())
        with tmoe.options(backend="triton"):
            inside.set()
            outside.wait(10)
            seen.append(current().backend)

    inside, outside = threading.Event(), threading.Event()
    with tmoe.options(backend="torch"):
        thread = threading.Thread(target=work)
        thread.start()
        assert inside.wait(10)
        assert current().backend == "torch"
        outside.set()
        thread.join()
    assert seen == [Options(), "triton"]


def test_tasks_do_not_see_each_others_options():
    async def task(name, mine, others):
        with tmoe.options(backend=name):
            mine.set()
            await others.wait()  # both are inside now
            assert current().backend == name

    async def both():
        first, second = asyncio.Event(), asyncio.Event()
        with tmoe.options(deterministic=True):
            await asyncio.gather(task("torch", first, second), task("triton", second, first))
            assert current() == Options(deterministic=True)

    asyncio.run(both())
