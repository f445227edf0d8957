"""Rules about the source text itself: file lengths, who imports whom, masked loads, local paths."""

from __future__ import annotations

import ast
import re
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIBRARY = sorted([*(ROOT / "kernels").rglob("*.py"), *(ROOT / "tmoe").rglob("*.py")])
OTHERS = ("tests", "bench", "tools", "notebooks")
SOURCES = sorted([*LIBRARY, *(path for name in OTHERS for path in (ROOT / name).rglob("*.py"))])
SOFT_CAP, HARD_CAP = 300, 400  # lines

# Each room (a folder, or a module of tmoe/) and the rooms it may import. A room stands below all it
# imports, so that no arrow goes back. `*` is everything public: `import tmoe`.
WORDS = ("checks", "activation", "low_rank", "routing", "formats")
ROOMS = {
    "kernels": (),
    "checks": (),
    "activation": ("kernels", "checks"),
    "low_rank": (),
    "routing": ("checks",),
    "registry": (),
    "options": ("checks", "registry"),
    "environment": (),
    "progress": (),
    "version": (),
    "whole_file": (),
    "command_errors": (),
    "formats": ("kernels", "checks"),
    "dispatch": (*WORDS, "registry", "options", "environment", "whole_file"),
    "backends": (*WORDS, "registry", "options", "kernels", "dispatch"),
    "library": (*WORDS, "registry", "options", "dispatch", "backends"),
    "arguments": WORDS,
    "ops": (*WORDS, "options", "arguments", "library"),
    "nn": (*WORDS, "arguments", "ops"),
    "checkpoints": ("checks", "formats", "progress", "version", "whole_file"),
    "integrations": (*WORDS, "progress", "arguments", "ops", "nn", "checkpoints"),
    "lora": ("checks", "formats", "nn", "integrations", "low_rank", "whole_file"),
    "doctor": ("*",),
    "shapes": ("checks", "dispatch"),
    "demo": ("*", "shapes"),
    "parallel": ("*", "demo"),
    "tune": ("*", "shapes"),
    "bench": ("*", "doctor", "shapes", "demo", "tune", "command_errors"),
    "plan": ("*", "shapes", "bench", "command_errors"),
    "cli": ("*", "doctor", "demo", "tune", "bench", "plan", "command_errors"),
    "__main__": ("cli",),
}
PACKAGE = "__init__"  # tmoe/__init__.py shows the names of all rooms

# Packages that a plain install may lack, and the only rooms that import them.
OPTIONAL = {
    "flashinfer": ("backends",),
    "jinja2": ("bench",),
    "markupsafe": ("bench",),
    "matplotlib": ("demo", "formats", "bench"),
    "lm_eval": ("integrations",),
    "transformers": ("demo", "integrations"),
}


def _room(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[0] if parts[0] == "kernels" else parts[1]


def _imports(path: Path) -> set[str]:
    """Full names of all modules that `path` imports, inside functions too."""
    package = ("tmoe", *path.relative_to(ROOT / "tmoe").parts[:-1]) if "tmoe" in path.parts else ()
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from tmoe import ops` and `from . import ops` name modules, not things of a module
            found |= {f"{module}.{a.name}" for a in node.names} if module == "tmoe" else {module}
    return found


def _rooms_imported(path: Path) -> set[str]:
    names = [name.split(".") for name in _imports(path)]
    rooms = {"*" if len(name) == 1 else name[1] for name in names if name[0] == "tmoe"}
    return {room if room in ROOMS else "*" for room in rooms} - {_room(path)}


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_every_room_stands_below_what_it_imports():
    order = list(ROOMS)
    for room, allowed in ROOMS.items():
        assert all(order.index(other) < order.index(room) for other in allowed if other != "*")


def test_a_room_imports_only_the_rooms_it_may():
    inside = [path for path in LIBRARY if _room(path) != PACKAGE]
    unnamed = {_room(path) for path in inside} - set(ROOMS)
    assert not unnamed, f"name what {unnamed} may import in ROOMS"
    unwanted = {
        _name(path): rooms
        for path in inside
        if "*" not in ROOMS[_room(path)]
        and (rooms := _rooms_imported(path) - set(ROOMS[_room(path)]))
    }
    assert not unwanted


def test_a_room_imports_only_the_packages_it_may():
    misplaced = {}
    for path in LIBRARY:
        packages = {name.split(".")[0] for name in _imports(path)} - sys.stdlib_module_names
        if _room(path) == "kernels":
            wrong = packages - {"tmoe", "torch", "triton"}
        else:
            wrong = {p for p in packages & set(OPTIONAL) if _room(path) not in OPTIONAL[p]}
        if wrong:
            misplaced[_name(path)] = wrong
    assert not misplaced


def test_a_file_can_be_read_in_one_sitting():
    lines = {_name(path): len(path.read_text().splitlines()) for path in SOURCES}
    assert not {name: count for name, count in lines.items() if count > HARD_CAP}
    long = {name: count for name, count in lines.items() if count > SOFT_CAP}
    if long:
        warnings.warn(f"is each of these still one idea? {long}", stacklevel=1)


def test_kernels_is_no_package_of_its_own():
    """With an `__init__.py`, a checkout would hide the PyPI package that is named kernels too."""
    assert not list((ROOT / "kernels").rglob("__init__.py"))


def test_a_masked_load_says_what_fills_the_rest():
    """PD11: the interpreter fills in 0 where a GPU leaves anything, so no other test notices."""
    unfilled = []
    for path in (ROOT / "kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.load":
                given = {keyword.arg for keyword in node.keywords}
                masked = "mask" in given or len(node.args) > 1
                if masked and "other" not in given and len(node.args) < 3:
                    unfilled.append(f"{_name(path)}:{node.lineno}")
    assert not unfilled


def test_kernels_use_no_block_pointers():
    """IN09: the interpreter's were wrong, and Triton is giving them up for descriptors."""
    texts = {_name(path): path.read_text() for path in (ROOT / "kernels").rglob("*.py")}
    assert not [name for name, text in texts.items() if "make_block_ptr" in text]


def test_no_file_names_a_path_of_one_machine():
    local = re.compile(r"(?<![\w.:/-])(/(home|root|work|workspace|mnt|opt|Users)/\w|~/\w)")
    folders = ("kernels", "tmoe", *OTHERS, ".ci", ".github")
    texts = [*ROOT.iterdir(), *(path for name in folders for path in (ROOT / name).rglob("*"))]
    suffixes = (".py", ".ipynb", ".md", ".toml", ".txt", ".yml", ".yaml", ".json", ".in", "")
    texts = [path for path in texts if path.suffix in suffixes and path.is_file()]
    assert not [_name(path) for path in texts if local.search(path.read_text())]
