"""What `import tmoe` costs and touches, each in a fresh process."""

from __future__ import annotations

import os
import sys
import textwrap

import pytest

from tests.packaging.conftest import ROOT, run

# One forward pass on the torch backend, as small as it gets.
FORWARD = """
import torch, tmoe
routing = tmoe.Routing(num_experts=4, top_k=2, method="Renormalize")
layer = tmoe.MoE(32, 16, routing)
for parameter in layer.parameters():
    torch.nn.init.normal_(parameter)
with torch.no_grad():
    y = layer(torch.randn(5, 32))
assert y.shape == (5, 32) and y.isfinite().all()
"""


def _python(code: str, **variables: str) -> str:
    return run(sys.executable, "-c", textwrap.dedent(code), cwd=ROOT, **variables)


def test_takes_less_than_a_second_and_a_half_beyond_torch():
    code = """
        import time, torch
        start = time.perf_counter()
        import tmoe
        print(time.perf_counter() - start)
        """
    assert min(float(_python(code)) for _ in range(2)) < 1.5


def test_leaves_optional_packages_alone():
    _python("""
        import sys, tmoe
        loaded = {"flashinfer", "transformers", "matplotlib", "triton"} & set(sys.modules)
        assert not loaded, loaded
        """)


def test_does_not_touch_the_gpu():
    """Even `is_available` can start CUDA, after which a fork is broken."""
    _python("""
        import types, torch
        def refuse(*args, **kwargs):
            raise AssertionError("import tmoe touched the GPU")
        for name, value in vars(torch.cuda).items():
            if isinstance(value, types.FunctionType) and not name.startswith("__"):
                setattr(torch.cuda, name, refuse)
        torch._C._cuda_getDeviceCount = torch._C._cuda_init = refuse
        import tmoe
        """)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_survives_a_fork():
    """The child uses the GPU where there is one: that works only if the parent never did."""
    child = textwrap.indent(FORWARD.replace("import torch, tmoe", ""), "    ")
    _python(f"""
import os, torch, tmoe
pid = os.fork()
if pid == 0:
    torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
{child}
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
""")


def test_a_flashinfer_that_cannot_be_imported_is_as_good_as_none(tmp_path):
    (tmp_path / "flashinfer.py").write_text("raise RuntimeError('cubin version mismatch')\n")
    _python(FORWARD, PYTHONPATH=str(tmp_path))


def test_works_without_a_home_to_write_to(tmp_path):
    nowhere = str(tmp_path / "file")
    (tmp_path / "file").touch()  # a folder cannot be made here, by root neither
    _python(FORWARD, HOME=nowhere, XDG_CACHE_HOME=nowhere, TMPDIR=str(tmp_path))


def test_works_without_triton():
    """As on a Mac: the torch backend does the work; Triton, if asked for, says what is missing."""
    _python(
        "import sys; sys.modules['triton'] = None\n"
        + FORWARD
        + textwrap.dedent("""
            try:
                with tmoe.options(backend="triton"), torch.no_grad():
                    layer(torch.randn(5, 32))
            except RuntimeError as error:
                assert "triton" in str(error).lower(), error
            else:
                raise AssertionError("ran Triton without Triton")
            """)
    )


def test_works_without_transformers():
    _python(
        "import sys; sys.modules['transformers'] = None\n"
        + FORWARD
        + textwrap.dedent("""
            try:
                tmoe.replace_moe(layer)
            except ImportError as error:
                assert "transformers" in str(error), error
            else:
                raise AssertionError("replaced without transformers")
            """)
    )
