"""What mkdocs asks for while it builds the site: pages that stand beside the code, and links.

A text exists once, where it reads well on a code host: README.md, the notebooks with their outputs,
kernels/README.md. Here they become pages of the site. Every link of a page is taken as one to a
file of the repository and pointed at the page, the picture or the shown source that this file is on
the site; mkdocs then fails on what leads nowhere.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path, PurePosixPath
from typing import Any

import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbconvert import MarkdownExporter

ROOT = Path(__file__).parents[1]
# Files and folders of the repository, and where they are on the site.
PLACES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "bench/README.md": "benchmarks.md",
    "kernels/README.md": "kernels.md",
    "notebooks/README.md": "learn/index.md",
    "notebooks": "learn",
    "docs": "",
}
PICTURES = (".png", ".svg")
WORDS = {".py": "python", ".json": "json", ".jinja": "jinja", ".toml": "toml", ".yml": "yaml"}
# Code, where nothing is a link, or the target of a link or picture.
_LINK = re.compile(r"^ *```.*?^ *```$|`[^`\n]*`|(?<=\]\()[^)\s]+(?=\))", re.M | re.S)


def place(path: str) -> str:
    """Where a file of the repository is on the site. One without a page is shown as source."""
    if path in PLACES:
        return PLACES[path]
    if (ROOT / path).is_dir():
        return f"source/{path}.md"
    top, _, rest = path.partition("/")
    if top in ("docs", "notebooks") and path.endswith((".md", ".ipynb")):
        return posixpath.join(PLACES[top], re.sub(r"\.ipynb$", ".md", rest))
    if top == "docs" and not path.endswith(".py"):
        return rest
    return path if path.endswith(PICTURES) else f"source/{path}.md"


class Site:
    """The pages and files that the repository gives to the site, by their place there."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.contents: dict[str, bytes] = {}
        pages = [*PLACES, *(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]
        pages += [str(p.relative_to(ROOT)) for p in (ROOT / "notebooks").glob("*.md")]
        for path in sorted({page for page in pages if page.endswith(".md")}):
            self.add(path, (ROOT / path).read_text(encoding="utf-8"))
        for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
            self.add_notebook(notebook)

    def add(self, path: str, text: str) -> None:
        """A page made of the file `path` of the repository."""

        def moved(found: re.Match[str]) -> str:
            target = found[0]
            if target.startswith(("`", " ", "#")) or re.match(r"[a-z]+:", target):
                return target
            return self._link(path, target)

        self.texts[place(path)] = _LINK.sub(moved, text)

    def _link(self, path: str, target: str) -> str:
        """A link of the page, from where it is on the site to where its target is."""
        name, hash_, anchor = target.partition("#")
        wanted = posixpath.normpath(posixpath.join(posixpath.dirname(path), name))
        if (ROOT / wanted).is_dir() and (ROOT / wanted / "README.md").exists():
            wanted = f"{wanted}/README.md"
        if not (ROOT / wanted).exists():
            return target  # mkdocs says so, with the page
        where = place(wanted)
        if where.startswith("source/"):
            self._show(wanted)
        elif wanted.endswith(PICTURES):
            self.contents[where] = (ROOT / wanted).read_bytes()
        return posixpath.relpath(where, posixpath.dirname(place(path)) or ".") + hash_ + anchor

    def _show(self, path: str) -> None:
        """A page that shows a file, or lists the texts in a folder."""
        where, name = place(path), PurePosixPath(path).name
        if where in self.texts:
            return
        self.texts[where] = f"---\ntitle: {name}\nsearch: {{exclude: true}}\n---\n\n# `{path}`\n\n"
        if (ROOT / path).is_dir():
            for file in sorted((ROOT / path).iterdir()):
                if file.suffix in (*WORDS, ".md", ".ipynb"):
                    link = self._link(f"{path}/{name}", file.name)
                    self.texts[where] += f"* [{file.name}]({posixpath.join(name, link)})\n"
            return
        word = WORDS.get(PurePosixPath(path).suffix, "text")
        text = (ROOT / path).read_text(encoding="utf-8").rstrip()
        self.texts[where] += f"````{word}\n{text}\n````\n"

    def add_notebook(self, file: Path) -> None:
        """A notebook with the outputs that are committed; nothing runs."""
        exporter = MarkdownExporter()
        resources = {"output_files_dir": f"{file.stem}_files"}
        text, found = exporter.from_notebook_node(nbformat.read(file, as_version=4), resources)
        path = str(file.relative_to(ROOT))
        folder = posixpath.dirname(place(path))
        for name, data in found["outputs"].items():
            self.contents[posixpath.join(folder, name)] = data
        self.add(path, text)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Every page comes from `Site`; the rest of docs/ (pictures, records) is as mkdocs found it."""
    site = Site()
    contents: dict[str, Any] = {**site.contents, **site.texts}
    for uri, content in contents.items():
        if (old := files.get_file_from_path(uri)) is not None:
            files.remove(old)
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> None:
    """The front page needs no list of pages beside it."""
    if page.file.src_uri == "index.md":
        page.meta["hide"] = ["navigation"]
