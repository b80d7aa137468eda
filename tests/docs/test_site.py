"""The site: every page is in its navigation, every link leads somewhere, nothing is loaded from elsewhere."""

from __future__ import annotations

import html.parser
import importlib.util
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

import rkmate
import rkmate.dtr

ROOT = Path(__file__).parents[2]
MARKDOWN = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md",
            *sorted((ROOT / "docs").glob("*.md"))]
TABS = ["Start", "Trainers", "Distributed", "Smaller", "Faster", "Understand", "Reference"]
needs_mkdocs = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("mkdocs", "material", "mkdocstrings")),
    reason="mkdocs is not installed: pip install 'rkmate[docs]'")


@cache
def site() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "docs" / "site.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- Markdown, as a code host shows it ----------------------------------------------------

def prose(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)


@cache
def anchors(path: Path) -> frozenset[str]:
    """The anchors that a code host gives to the headings of a page."""
    found: dict[str, int] = {}
    names = []
    for heading in re.findall(r"^#+ (.*)$", prose(path.read_text(encoding="utf-8")), re.M):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        names.append(slug if slug not in found else f"{slug}-{found[slug]}")
        found[slug] = found.get(slug, 0) + 1
    return frozenset(names)


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda p: p.name)
def test_links_with_anchors_in_plain_markdown(page: Path) -> None:
    for address, anchor in re.findall(r"\]\(([^)#\s]*)#([^)]+)\)", prose(page.read_text(encoding="utf-8"))):
        if "://" not in address:
            target = page.parent / address if address else page
            assert anchor in anchors(target), f"{address}#{anchor}"


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 85 and text.count("](docs/") <= 8
    assert text.count("\n|---") == 1 and "![" in text


# -- pages of the site --------------------------------------------------------------------

@pytest.mark.parametrize(("path", "page"), [
    ("README.md", "index.md"), ("docs/index.md", "all-pages.md"), ("docs/offload.md", "offload.md"),
    ("docs/images/curve.svg", "images/curve.svg"), ("examples", "examples/index.md"),
    ("examples/gpt2.py", "examples/gpt2.md"), ("rkmate/api.py", None), ("LICENSE", None)])
def test_pages_of_files(path: str, page: str | None) -> None:
    assert site().page_of(path) == page


def test_links_are_moved_with_their_pages() -> None:
    linked = site().linked
    assert linked("[a](docs/tools.md#x) ![b](docs/images/b.svg)", "index.md") == \
        "[a](tools.md#x) ![b](images/b.svg)"
    assert linked("[a](../examples/gpt2.py) [b](../CHANGELOG.md) [c](index.md)", "tools.md") == \
        "[a](examples/gpt2.md) [b](changelog.md) [c](all-pages.md)"
    same = "[a](https://a.b/c) [b](#here) [c](mailto:a@b.c) [d](../rkmate/api.py)"
    assert linked(same, "tools.md") == same
    code = "```python\nx = f[0](docs)\n```"
    assert linked(code, "index.md") == code


def test_the_reference_has_every_public_name() -> None:
    text = site().reference((ROOT / "docs" / "api.md").read_text(encoding="utf-8"))
    names = re.findall(r"^::: (.*)$", text, re.M)
    assert {*(f"rkmate.{n}" for n in rkmate.__all__),
            *(f"rkmate.dtr.{n}" for n in rkmate.dtr.__all__)} <= {*names}
    assert len(names) == len(set(names)) and "### `" not in text
    assert "### Keywords of earlier versions" in text and "{#rkmateoptions}" in text


def test_the_navigation_has_every_page_once() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    nav = text[text.index("\nnav:"):]
    assert re.findall(r"^  - (\w+):$", nav, re.M) == TABS
    named = re.findall(r": ([\w/-]+\.md)$", nav, re.M)
    pages = {site().page_of(f"docs/{p.name}") for p in (ROOT / "docs").glob("*.md")}
    assert sorted(named) == sorted(pages | {*site().OUTSIDE.values()})


# -- the built site -----------------------------------------------------------------------

class _Page(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.text: list[str] = []
        self.inside: list[str] = []
        """What stands open of paragraphs, and code."""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given: dict[str, Any] = dict(attributes)
        self.ids |= {given[k] for k in ("id", "name") if given.get(k)}
        if tag in ("p", "pre", "code"):
            self.inside.append(tag)
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        elif tag == "link" and given.get("rel") not in ("canonical", "prev", "next"):
            self.loaded.append(given["href"])
        elif given.get("src"):
            self.loaded.append(given["src"])

    def handle_endtag(self, tag: str) -> None:
        if tag in self.inside:
            self.inside.remove(tag)

    def handle_data(self, data: str) -> None:
        if self.inside == ["p"]:
            self.text.append(data)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, _Page]:
    """The pages by their path, built as `make docs` does."""
    place = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(place)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False,
                          env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    assert "WARNING" not in done.stderr
    pages = {}
    for path in place.rglob("*.html"):
        page = pages[path.relative_to(place).as_posix()] = _Page()
        page.feed(path.read_text(encoding="utf-8"))
    pages["/"] = place                      # type: ignore[assignment]
    return pages


@needs_mkdocs
@pytest.mark.xdist_group("site")
def test_every_link_leads_somewhere(built: dict[str, _Page]) -> None:
    place: Any = built["/"]
    followed = 0
    for name, page in built.items():
        for link in [] if name in ("/", "404.html") else (*page.links, *page.loaded):
            parts = urlsplit(link)
            if parts.scheme in ("http", "https"):
                continue
            target = (place / name).parent / unquote(parts.path) if parts.path else place / name
            target = Path(os.path.normpath(target / "index.html" if target.is_dir() else target))
            assert target.exists(), f"{name}: {link}"
            if parts.fragment and target.suffix == ".html":
                ids = built[target.relative_to(place).as_posix()].ids
                assert unquote(parts.fragment) in ids | {"__skip"}, f"{name}: {link}"
            followed += 1
    assert followed > 2000


@needs_mkdocs
@pytest.mark.xdist_group("site")
def test_nothing_is_loaded_from_elsewhere(built: dict[str, _Page]) -> None:
    place: Any = built["/"]
    assert not [f"{name}: {link}" for name, page in built.items() if name != "/"
                for link in page.loaded if urlsplit(link).scheme or link.startswith("//")]
    for style in place.rglob("*.css"):
        text = style.read_text(encoding="utf-8")
        assert not re.findall(r"(?:@import|url\()\s*['\"]?(?:https?:)?//[^)]*", text), style


@needs_mkdocs
@pytest.mark.xdist_group("site")
def test_lists_are_lists_and_the_first_page_is_the_readme(built: dict[str, _Page]) -> None:
    for name, page in built.items():
        if name != "/":
            torn = [t for t in page.text if re.search(r"(^|\n)(- |\d+\. |\|)", t)]
            assert not torn, f"{name}: {torn[:2]}"
    place: Any = built["/"]
    first = (place / "index.html").read_text(encoding="utf-8")
    assert "Train any PyTorch model inside a memory budget" in first and "images/memory.svg" in first
    assert [tab for tab in TABS if tab not in first] == []


@needs_mkdocs
@pytest.mark.xdist_group("site")
def test_the_search_knows_pages_names_and_options(built: dict[str, _Page]) -> None:
    place: Any = built["/"]
    index = (place / "search" / "search_index.json").read_text(encoding="utf-8")
    for found in ("api.html#rkmate.doctor", "offload.html", "examples/gpt2.html", "limits.html#cuda-graphs",
                  "rkmate.Settings.chunked_loss"):
        assert found in index, found
