"""The site is built, strictly, and shows what a code host shows of the same files."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.docs.blocks import ROOT, pages

# What builds the site isn't installed on Python 3.10.
markdown_it = pytest.importorskip("markdown_it")
docs_site = pytest.importorskip("tools.docs_site")

SEEN = ("h1", "h2", "h3", "h4", "li", "ol", "table", "tr", "td", "pre", "img", "p", "code", "em")
# Renders Markdown as code hosts do.
HOST = markdown_it.MarkdownIt("commonmark").enable(["table", "strikethrough"])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with the site. A link, an anchor or a picture that isn't there stops the build."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    return out


@pytest.fixture(scope="module")
def texts():
    return docs_site.Site().texts


def _html(site: Path, uri: str) -> str:
    return (site / uri).with_suffix(".html").read_text(encoding="utf-8")


def test_every_page_and_notebook_is_there(site):
    notebooks = [str(p.relative_to(ROOT)) for p in (ROOT / "notebooks").glob("*.ipynb")]
    assert len(notebooks) == 14
    for path in [*pages(), *notebooks]:
        title = re.search(r"<h1[^>]*>(.*?)<", _html(site, docs_site.place(path)))
        assert title and title[1].strip(), path


def _tags(html: str) -> Counter[str]:
    return Counter(re.findall(r"<(\w+)[ >/]", html))


def test_a_page_shows_what_a_code_host_shows(site, texts):
    """Lists, tables and blocks that one of two dialects of Markdown doesn't take for such."""
    different = {}
    for uri, text in texts.items():
        if uri.startswith(("source/", "reference/")):
            continue
        article = _html(site, uri).partition("<article")[2].partition("</article>")[0]
        host, ours = _tags(HOST.render(text)), _tags(article)
        wrong = {tag: (host[tag], ours[tag]) for tag in SEEN if host[tag] != ours[tag]}
        if wrong:
            different[uri] = wrong
    assert not different, f"on a code host, on the site: {different}"


def test_every_link_and_picture_leads_somewhere(site):
    """Also those that mkdocs doesn't look at, in navigation, notebooks and the reference."""
    pages = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    anchors = {path: set(re.findall(r'\bid="?([^"\s>]+)', text)) for path, text in pages.items()}
    missing = []
    for path, text in pages.items():
        for link in set(re.findall(r'(?:href|src)="([^"]+)"', text)):
            url = urlsplit(link)
            if url.scheme or url.netloc or path.name == "404.html":  # that one has no place
                continue
            target = (path.parent / unquote(url.path)).resolve() if url.path else path
            target = target / "index.html" if target.is_dir() else target
            anchor = unquote(url.fragment)
            if not target.exists() or anchor and anchor not in anchors[target]:
                missing.append(f"{path.relative_to(site)}: {link}")
    assert not missing


def test_nothing_is_fetched_from_elsewhere(site):
    for path in site.rglob("*.html"):
        head = path.read_text(encoding="utf-8").partition("<article")[0]
        assert not re.search(r'<(script|link|img)[^>]*(src|href)="(https?:)?//', head), path


def test_search_finds_texts_names_and_outputs(site):
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    found = " ".join(f"{entry['title']} {entry['text']}" for entry in index["docs"])
    for words in ("replace_moe", "tmoe.kernels.sort.sort_tokens", "global scale", "padding"):
        assert words in found, words


def test_a_picture_has_words_for_those_who_do_not_see_it(texts):
    for uri, text in texts.items():
        assert not re.search(r"!\[\s*\]\(", text), uri
