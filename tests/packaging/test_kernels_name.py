"""`kernels/` is tmoe.kernels however tmoe got there, and the PyPI package `kernels` stays itself.

transformers imports that package with every model, so hiding it breaks all of them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

PROBE = """
import json
import kernels, tmoe, tmoe.kernels.sort
from transformers import MixtralForCausalLM
from transformers.utils import is_kernels_available
assert is_kernels_available()
print(json.dumps([kernels.__file__, tmoe.kernels.sort.__file__]))
"""


def _probe(environment, cwd: Path) -> tuple[Path, Path]:
    found = json.loads(environment.run("-c", PROBE, cwd=cwd))
    return tuple(Path(name).resolve() for name in found)


@pytest.mark.parametrize("installed", ["wheel", "editable"])
def test_from_another_folder(installed, environments, checkout, tmp_path):
    environment = environments[installed]
    kernels, ours = _probe(environment, cwd=tmp_path)
    assert kernels.is_relative_to(environment.site_packages.resolve())
    home = {"wheel": environment.site_packages, "editable": checkout}[installed]
    assert ours.is_relative_to(home.resolve())


@pytest.mark.parametrize("installed", ["wheel", "editable", "nothing"])
def test_from_the_root_of_a_checkout(installed, environments, checkout):
    """`python -c` puts the current folder first on sys.path, so the checkout's tmoe is used."""
    environment = environments[installed]
    kernels, ours = _probe(environment, cwd=checkout)
    assert kernels.is_relative_to(environment.site_packages.resolve())
    assert ours == checkout.resolve() / "kernels" / "sort.py"


def test_under_pytest_at_the_root_of_a_checkout(environments, checkout, tmp_path):
    environment = environments["editable"]
    test = tmp_path / "test_probe.py"
    test.write_text(
        "def test_probe():\n"
        "    import kernels, tmoe.kernels.sort\n"
        f"    assert kernels.__file__.startswith({str(environment.site_packages)!r})\n"
    )
    environment.run("-m", "pytest", "-q", "-p", "no:cacheprovider", str(test), cwd=checkout)


def test_without_that_package_a_checkout_does_not_pass_for_it(environments, checkout):
    code = (
        "import sys, importlib.util as u\n"
        "sys.path = [p for p in sys.path if 'site-packages' not in p]\n"
        "spec = u.find_spec('kernels')\n"
        "assert spec is None or spec.origin is None, spec\n"
    )
    environments["nothing"].run("-c", code, cwd=checkout)
