"""Every Python block of the README and of the documentation runs, page by page, in order.

A comment before a block says what it needs: ``<!-- needs: transformers -->`` skips the rest of the page
without the package, ``<!-- warns -->`` lets other packages warn.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import sys
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from rkmate.show.draw import has_dot

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LONG = ("guide-huggingface.md", "tutorial.md", "compile.md")
"""Pages that train or compile for long; other tests do what they show, too."""
_BLOCK = re.compile(r"^(?:<!-- (?P<note>.*?) -->\n)?```python\n(?P<code>.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    line: int
    code: str
    needs: str | None
    warns: bool


def blocks(text: str) -> Iterator[Block]:
    for found in _BLOCK.finditer(text):
        notes = [n.strip() for n in (found["note"] or "").split(";")]
        needs = next((n.removeprefix("needs:").strip() for n in notes if n.startswith("needs:")), None)
        line = text[:found.start("code")].count("\n")
        yield Block(line, found["code"], needs, "warns" in notes)


def run(block: Block, page: Path, namespace: dict[str, Any]) -> None:
    code = compile("\n" * block.line + block.code, str(page), "exec", dont_inherit=True)
    with warnings.catch_warnings() if block.warns else contextlib.nullcontext():
        if block.warns:
            warnings.simplefilter("ignore")
        exec(code, namespace)


def _cases() -> Iterator[Any]:
    """Pages with Python; where one needs a library of trainers, with the tests that import it too."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if "```python" in text:
            marks = [pytest.mark.xdist_group("trainers")] * ("needs: lightning" in text)
            marks += [pytest.mark.slow] * (page.name in LONG)
            yield pytest.param(page, id=page.name, marks=marks)


@pytest.mark.parametrize("page", list(_cases()))
def test_code_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = page.read_text(encoding="utf-8")
    if ".draw(" in text and not has_dot():
        pytest.skip("Graphviz (the program dot) is not installed")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    module = types.ModuleType("page")           # classes look up the module that they stand in
    monkeypatch.setitem(sys.modules, "page", module)
    for block in blocks(text):
        if block.needs and importlib.util.find_spec(block.needs) is None:
            pytest.skip(f"{block.needs} is not installed: stopped before line {block.line}")
        run(block, page, vars(module))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_pictures_and_links_are_there(page: Path) -> None:
    for address in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        if not address.startswith("http"):
            assert (page.parent / address).exists(), address


def test_blocks_are_found_with_their_notes() -> None:
    text = "a\n<!-- needs: torch; warns -->\n```python\nx = 1\n```\n\n```python\ny = 2\n```\n```sh\nls\n```\n"
    assert list(blocks(text)) == [Block(3, "x = 1\n", "torch", True), Block(7, "y = 2\n", None, False)]


def test_the_api_page_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("make_api", ROOT / "docs" / "make_api.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / "api.md").read_text(encoding="utf-8") == module.api_text(), \
        "run: python docs/make_api.py"
