"""One suite, two places: on a machine without a GPU the kernels run under Triton's interpreter.

`pytest -m gpu` is what needs a device: real shapes, several devices, CUDA graphs.
"""

import gc
import os
import tempfile

import pytest
import torch
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import _disable_current_modes

# `with torch.device("meta")` remembers the functions it is for; not those that `poisoned` makes.
_device_constructors()

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
    from tests.interpreter import speed_up

    speed_up()

# What was measured on this machine before must not decide what a test runs.
CACHE = tempfile.TemporaryDirectory(prefix="tmoe-tests-")
os.environ["TMOE_CACHE_DIR"] = CACHE.name


def pytest_collection_finish():
    gc.freeze()  # torch's objects stay: no search for garbage need go through them again


def pytest_collection_modifyitems(items, config):
    for item in items:
        if "slow" in item.keywords and "slow" not in config.getoption("markexpr"):
            item.add_marker(pytest.mark.skip(reason="slow; run it with -m slow"))
        if "gpu" in item.keywords and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
    items[:] = _long_ones_first(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)))


def _long_ones_first(items, processes):
    """To compile for a GPU takes a minute or more. Each process gets a stretch of the list, and the
    end of another's when it is through with its own: so the long tests are where a stretch starts.
    """
    long = [item for item in items if item.path.parent.name == "aot"]
    others = [item for item in items if item.path.parent.name != "aot"]
    ordered = []
    for process in range(processes):
        own = long[process::processes]
        stretch = max(0, len(items) // processes - len(own))
        ordered += own + others[:stretch]
        del others[:stretch]
    return ordered + others


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture(params=["torch", "triton"])
def backend(request):
    import tmoe  # after the environment above

    with tmoe.options(backend=request.param):
        yield request.param


@pytest.fixture(autouse=True)
def seeded():
    # Without a GPU, `torch.manual_seed` would note the stack of this call for each kind there is.
    (torch if HAS_GPU else torch.default_generator).manual_seed(0)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Memory that nobody wrote holds NaN (floats) or a large negative number (integers)."""

    @torch.no_grad()
    def poison(tensor):
        with _disable_current_modes():  # a call that is being recorded doesn't do this
            if tensor.is_floating_point():
                return tensor.fill_(float("nan"))
            if tensor.dtype in (torch.int32, torch.int64):
                return tensor.fill_(-(2**30))
        return tensor

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, _poisoning(getattr(torch, name), poison))
    for name in ("new_empty", "new_empty_strided"):
        monkeypatch.setattr(torch.Tensor, name, _poisoning(getattr(torch.Tensor, name), poison))


def _poisoning(allocate, poison):
    def allocate_poisoned(*args, **kwargs):
        tensor = allocate(*args, **kwargs)
        ours = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type != "meta"
        return poison(tensor) if ours else tensor

    return allocate_poisoned
