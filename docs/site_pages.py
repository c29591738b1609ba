"""A hook of mkdocs: what pages link to outside docs/ becomes part of the site, and their links lead there.

README.md is its first page; CONTRIBUTING.md and CHANGELOG.md are pages. Any other file is copied below files/, and a
folder becomes a page that shows its scripts and notebooks. On GitHub the same links lead to the files themselves.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.structure.files import Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
CODE = r"^```.*?^```|^ {4,}[^\s*-].*?$|`[^`\n]*`"
LINK = re.compile(rf"(?P<code>{CODE})|(?P<open>\]\()(?P<target>[^)\s#]+)(?P<rest>(?:#[^)\s]*)?\))", re.M | re.S)
EXTERNAL = re.compile(r"[a-z]+:")


def place(path: str) -> str:
    """Where a file or folder of the repository is in the sources of the site."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"files/{path}/index.md" if (ROOT / path).is_dir() else f"files/{path}"


def origin(uri: str) -> str:
    """The repository's file that a page of the site is made of."""
    return {page: path for path, page in PAGES.items()}.get(uri, f"docs/{uri}")


def target_of(page: str, link: str) -> str | None:
    """The file or folder, from the repository's root, that a link of a page leads to; None outside it."""
    path = os.path.normpath(os.path.join(os.path.dirname(page), link))
    return None if EXTERNAL.match(link) or path.startswith("..") else path


def linked(page: str, text: str) -> Iterator[str]:
    """The files and folders outside docs/ that a page links to, which are there and are no pages."""
    for found in LINK.finditer(text):
        path = None if found["code"] else target_of(page, found["target"])
        if path and path not in PAGES and not path.startswith("docs/") and (ROOT / path).exists():
            yield path


def relinked(page: str, text: str) -> str:
    """The text of a page of the repository with its links as the site has them."""
    here = os.path.dirname(place(page))

    def moved(found: re.Match[str]) -> str:
        path = None if found["code"] else target_of(page, found["target"])
        if path is None:
            return found[0]
        return f"{found['open']}{os.path.relpath(place(path), here or '.')}{found['rest']}"

    return LINK.sub(moved, text)


def folder_page(path: str) -> str:
    """A page that shows the scripts and notebooks of a folder."""
    parts = [
        f"## {file.name}\n\n{notebook_text(file) if file.suffix == '.ipynb' else fenced('python', file.read_text())}"
        for file in sorted((ROOT / path).iterdir())
        if file.suffix in (".py", ".ipynb")
    ]
    return "\n".join([f"# {path}\n", *parts])


def notebook_text(file: Path) -> str:
    """The cells of a notebook as Markdown, each with what it prints; pictures are left out."""
    parts = []
    for cell in json.loads(file.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(re.sub(r"^#", "##", source, flags=re.M) + "\n")
            continue
        printed = "".join("".join(output.get("text", "")) for output in cell["outputs"])
        parts.append(fenced("python", source) + (f"\n{fenced('text', printed)}" if printed.strip() else ""))
    return "\n".join(parts)


def fenced(language: str, text: str) -> str:
    """Text as a block of code."""
    return f"```{language}\n{text.rstrip()}\n```\n"


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages and files outside docs/."""
    from mkdocs.structure.files import File

    outside: set[str] = set()
    for page in [*PAGES, *(f"docs/{file.src_uri}" for file in files.documentation_pages())]:
        outside |= set(linked(page, (ROOT / page).read_text()))
    for page, uri in PAGES.items():
        files.append(File.generated(config, uri, content=(ROOT / page).read_text()))
    for path in sorted(outside):
        if (ROOT / path).is_dir():
            files.append(File.generated(config, place(path), content=folder_page(path)))
        else:
            files.append(File.generated(config, place(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Let the links of a page lead to their places in the site."""
    uri = page.file.src_uri
    return markdown if uri.startswith("files/") else relinked(origin(uri), markdown)
