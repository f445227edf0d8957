"""Builds the distributions once and installs them into throw-away environments."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Environment:
    """A virtual environment that sees the packages of the running one, but not its tmoe."""

    python: Path
    site_packages: Path

    def run(self, *arguments: str, cwd: Path) -> str:
        """What `python *arguments` prints; fails with its error output."""
        return run(self.python, *arguments, cwd=cwd)


def run(python: Path | str, *arguments: str, cwd: Path, **variables: str) -> str:
    hidden = ("PYTHONPATH", "PYTHONSAFEPATH")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        [python, *arguments],
        cwd=cwd,
        env=environment | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def checkout(tmp_path_factory) -> Path:
    """A copy of the sources, so that building leaves nothing behind in the real ones."""
    copy = tmp_path_factory.mktemp("checkout")
    unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("kernels", "tmoe", "tests", "bench", "tools"):
        shutil.copytree(ROOT / name, copy / name, ignore=unwanted)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, copy)
    return copy


@pytest.fixture(scope="session")
def distributions(checkout, tmp_path_factory) -> Path:
    """The folder with the sdist and the wheel that was built from it."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), cwd=checkout)
    return out


@pytest.fixture(scope="session")
def wheel(distributions) -> Path:
    (path,) = distributions.glob("*.whl")
    return path


@pytest.fixture(scope="session")
def sdist(distributions) -> Path:
    (path,) = distributions.glob("*.tar.gz")
    return path


@pytest.fixture(scope="session")
def editable_wheel(checkout, tmp_path_factory) -> Path:
    """What `pip install -e` makes and installs."""
    out = tmp_path_factory.mktemp("editable")
    code = f"from setuptools import build_meta; build_meta.build_editable({str(out)!r})"
    run(sys.executable, "-c", code, cwd=checkout)
    (path,) = out.glob("*.whl")
    return path


def _environment(folder: Path, wheel: Path | None) -> Environment:
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    (site_packages,) = folder.glob("lib/python*/site-packages")
    if wheel is not None:
        pip = (
            "-m",
            "pip",
            "--python",
            str(python),
            "install",
            "--quiet",
            "--no-deps",
            "--no-index",
        )
        run(sys.executable, *pip, str(wheel), cwd=folder)
    # After pip, which would otherwise find the running environment's tmoe and think it installed.
    # The .pth files of a folder that a .pth file adds are not read: an editable tmoe stays out.
    (site_packages / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    _write_kernels_package(site_packages)
    return Environment(python, site_packages)


KERNELS = """
class Decorator:
    def __init__(self, *args, **kwargs):
        pass

    def __call__(self, decorated):
        return decorated


def __getattr__(name):
    return type(name, (Decorator,), {})
"""


def _write_kernels_package(site_packages: Path) -> None:
    """The PyPI package `kernels` as transformers uses it on import: version, names, decorators."""
    from transformers.utils.import_utils import KERNELS_MIN_VERSION as version

    (site_packages / "kernels").mkdir()
    (site_packages / "kernels" / "__init__.py").write_text(KERNELS)
    metadata = site_packages / f"kernels-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {version}\n")


@pytest.fixture(scope="session")
def environments(wheel, editable_wheel, tmp_path_factory) -> dict[str, Environment]:
    """How tmoe got there -> an environment: from the wheel, in editable mode, or not at all."""
    wheels = {"wheel": wheel, "editable": editable_wheel, "nothing": None}
    return {
        name: _environment(tmp_path_factory.mktemp(name), wheel) for name, wheel in wheels.items()
    }
