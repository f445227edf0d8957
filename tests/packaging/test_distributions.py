"""What the wheel and the sdist hold."""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path, PurePosixPath

from setuptools.config.pyprojecttoml import load_file


def _sources(checkout: Path, folder: str) -> set[str]:
    return {path.relative_to(checkout).as_posix() for path in (checkout / folder).rglob("*.py")}


def test_packages_listed_are_the_folders_on_disk(checkout):
    listed = load_file(checkout / "pyproject.toml")["tool"]["setuptools"]["packages"]
    folders = {str(PurePosixPath(path).parent) for path in _sources(checkout, "tmoe")}
    folders |= {"tmoe/" + str(PurePosixPath(path).parent) for path in _sources(checkout, "kernels")}
    assert sorted(listed) == sorted(folder.replace("/", ".") for folder in folders)


def test_wheel_holds_every_module_and_only_ours(checkout, wheel):
    names = zipfile.ZipFile(wheel).namelist()
    modules = {name for name in names if name.endswith(".py")}
    assert modules == _sources(checkout, "tmoe") | {
        "tmoe/" + name for name in _sources(checkout, "kernels")
    }
    tops = {name.split("/")[0] for name in names}
    assert tops == {"tmoe", f"tmoe-{wheel.name.split('-')[1]}.dist-info"}


def test_wheel_holds_the_data(checkout, wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert "tmoe/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    model = {path.name for path in (checkout / "tmoe" / "demo" / "model").iterdir()}
    assert {name.rsplit("/", 1)[1] for name in names if "/demo/model/" in name} == model != set()
    bench = checkout / "tmoe" / "bench"
    data = {path.relative_to(checkout).as_posix() for path in bench.rglob("*.j*")}
    assert len(data) == 5 and data <= set(names)  # recorded peers, what was fitted, the page


def test_wheel_has_the_command(wheel):
    archive = zipfile.ZipFile(wheel)
    (entry_points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
    assert "tmoe = tmoe.cli:app" in archive.read(entry_points).decode()


def test_sdist_holds_what_a_contributor_needs(checkout, sdist):
    names = {name.split("/", 1)[-1] for name in tarfile.open(sdist).getnames()}
    files = {"Makefile", "constraints.txt", "README.md", "LICENSE", "tests/conftest.py"}
    assert files | _sources(checkout, "tmoe") | _sources(checkout, "kernels") <= names
