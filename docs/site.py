"""What the site has in addition to the pages of this folder; mkdocs loads it as a hook (mkdocs.yml).

The README is the first page, and `index.md` becomes the page "All pages". The changelog, CONTRIBUTING and the
examples, which are outside of this folder, become pages; links to them are changed to point there. The
reference is made from the docstrings by mkdocstrings, in the order of `api.md`.
"""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
OUTSIDE = {"README.md": "index.md", "docs/index.md": "all-pages.md", "CHANGELOG.md": "changelog.md",
           "CONTRIBUTING.md": "contributing.md", "examples": "examples/index.md"}
"""Files and folders of the repository -> pages of the site with other names."""
_LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
_CODE = re.compile(r"^(```.*?^```$)", re.M | re.S)
_NAME = re.compile(r"^### `(rkmate\.[\w.]+)`\n.*?(?=^#{2,3} |\Z)", re.M | re.S)


def page_of(path: str) -> str | None:
    """Return the page of the site for a file of the repository; None if it has none."""
    if path in OUTSIDE:
        return OUTSIDE[path]
    if path.startswith("examples/") and path.endswith(".py"):
        return f"{path.removesuffix('.py')}.md"
    return path.removeprefix("docs/") if path.startswith("docs/") else None


def path_of(page: str) -> str:
    """Return the file of the repository that a page of the site shows."""
    found = next((path for path, shown in OUTSIDE.items() if shown == page), None)
    return found or f"docs/{page}"


def linked(text: str, page: str) -> str:
    """Return a page's Markdown with its links, which are those of the file in the repository, as the site has
    them. Code stays as it is."""
    folder = PurePosixPath(path_of(page)).parent

    def moved(link: re.Match[str]) -> str:
        address, hash_, anchor = link[1].partition("#")
        if not address or "://" in address or address.startswith("mailto:"):
            return link[1]
        target = page_of(os.path.normpath(folder / address).replace(os.sep, "/"))
        if target is None:
            return link[1]                  # which mkdocs warns of
        return os.path.relpath(target, PurePosixPath(page).parent).replace(os.sep, "/") + hash_ + anchor
    return "".join(part if part.startswith("```") else _LINK.sub(moved, part) for part in _CODE.split(text))


def reference(text: str) -> str:
    """Return `api.md` with each public name as mkdocstrings shows it, below the anchor that links use."""
    text = text.replace("Made from the docstrings by `python docs/make_api.py`. ", "")
    return _NAME.sub(lambda m: f'[](){{#{m[1].replace(".", "").lower()}}}\n\n::: {m[1]}\n\n', text)


def examples() -> dict[str, str]:
    """Return the pages of the examples: one for each program, and a list."""
    pages, lines = {}, ["# Examples\n", "Programs in the folder `examples` of the repository.\n"]
    for path in sorted((ROOT / "examples").glob("*.py")):
        source = path.read_text(encoding="utf-8")
        about = (ast.get_docstring(ast.parse(source)) or "").split("\n\n")[0].replace("\n", " ")
        pages[f"examples/{path.stem}.md"] = f"# {path.name}\n\n{about}\n\n```python\n{source}```\n"
        lines.append(f"- [{path.name}]({path.stem}.md): {about}")
    return {**pages, "examples/index.md": "\n".join(lines) + "\n"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in this folder."""
    from mkdocs.structure.files import File, InclusionLevel

    made = {page: (ROOT / path).read_text(encoding="utf-8") for path, page in OUTSIDE.items()
            if path != "examples"} | examples()
    for page, text in made.items():
        known = files.get_file_from_path(page)
        if known is not None:
            files.remove(known)
        listed = InclusionLevel.INCLUDED if page.count("/") == 0 or page.endswith("index.md") else \
            InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, page, content=text, inclusion=listed))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Change a page's links and comments to what the site needs."""
    name = page.file.src_uri
    if name == "index.md":
        page.meta["hide"] = ["toc"]         # its table needs the room
    text = reference(markdown) if name == "api.md" else markdown
    text = re.sub(r"^(<!-- [^\n]* -->)\n(?=[-|])", r"\1\n\n", text, flags=re.M)
    return text if name.startswith("examples/") else linked(text, name)
