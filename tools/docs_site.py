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
PAGES, PICTURES = (".md", ".ipynb"), (".png", ".svg")
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
    if top in ("docs", "notebooks") and path.endswith(PAGES):
        return posixpath.join(PLACES[top], re.sub(r"\.ipynb$", ".md", rest))
    if top == "docs" and not path.endswith(".py"):
        return rest
    return path if path.endswith(PICTURES) else f"source/{path}.md"


def _relative(place: str, page: str) -> str:
    return posixpath.relpath(place, posixpath.dirname(page) or ".")


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
        """A link of the page `path`, from where that is on the site to where its target is."""
        name, hash_, anchor = target.partition("#")
        wanted = posixpath.normpath(posixpath.join(posixpath.dirname(path), name))
        if not (ROOT / wanted).exists():
            return target  # mkdocs says so, with the page
        return _relative(self._bring(wanted), place(path)) + hash_ + anchor

    def _bring(self, path: str) -> str:
        """Where a file or folder is on the site, after seeing to it that it is there."""
        if (ROOT / path / "README.md").exists():
            path = f"{path}/README.md"
        where = place(path)
        if where.startswith("source/") and where not in self.texts:
            name = PurePosixPath(path).name
            self.texts[where] = (
                f"---\ntitle: {name}\nsearch: {{exclude: true}}\n---\n\n# `{path}`\n\n"
            )
            self.texts[where] += self._shown(path, where)
        elif path.endswith(PICTURES):
            self.contents[where] = (ROOT / path).read_bytes()
        return where

    def _shown(self, path: str, where: str) -> str:
        """A file as a block, or a folder as a list of the texts in it."""
        if (ROOT / path).is_dir():
            files = [f for f in sorted((ROOT / path).iterdir()) if f.suffix in (*WORDS, *PAGES)]
            places = {file.name: self._bring(f"{path}/{file.name}") for file in files}
            return "".join(f"* [{name}]({_relative(to, where)})\n" for name, to in places.items())
        word = WORDS.get(PurePosixPath(path).suffix, "text")
        return f"````{word}\n{(ROOT / path).read_text(encoding='utf-8').rstrip()}\n````\n"

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
