"""Hook of `make site`: adds the pages that stand outside docs, and leads links to pages, or else to the repository.

Pages are written for GitHub: their links are relative to where they lie in the tree.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SDK = "edge/outrider/edge/__init__.py"
WIRE = "proto/outrider/proto/v1/decoding.proto"
# Pages by the files outside docs that they are made of.
OUTSIDE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "deploy/grafana/METRICS.md": "metrics.md",
    SDK: "api.md",
    WIRE: "wire.md",
}
FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!\w+:|#)([^)\s#]+)(#[^)\s]*)?\)")
ROW = re.compile(r"^\|.*$", re.MULTILINE)
DECLARED = re.compile(r"^((?://.*\n)*(?:message|service|enum) (\w+) \{)", re.MULTILINE)
CODE = re.compile(r"`[^`]+`")


def place_in_site(source: str) -> str | None:
    """Path in the site of a file of the tree; None where the site does not have it."""
    return source.removeprefix("docs/") if source.startswith("docs/") else OUTSIDE.get(source)


def for_the_site(markdown: str, source: str, repository: str) -> str:
    """Lead the links of the file `source` into the site, or else to the repository; unescape bars in code of tables."""
    folder = posixpath.dirname(place_in_site(source) or "") or "."

    def link(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[1]))
        place = place_in_site(target)
        address = posixpath.relpath(place, folder) if place else f"{repository}/blob/main/{target}"
        return f"]({address}{match[2] or ''})"

    def row(match: re.Match[str]) -> str:
        return CODE.sub(lambda code: code[0].replace("\\|", "|"), match[0])

    parts = FENCED.split(markdown)  # fenced blocks have the odd places
    return "".join(part if i % 2 else ROW.sub(row, LINK.sub(link, part)) for i, part in enumerate(parts))


def outside_page(source: str) -> str:
    """Markdown of the page that is made of the file `source` outside docs."""
    text = (ROOT / source).read_text(encoding="utf-8")
    if source == WIRE:
        line = "This page holds the contract: what edge, verifier and coordinator say to each other."
        sections = DECLARED.sub(r"```\n\n## \2\n\n```proto\n\1", text)
        return f"# Wire\n\n{line}\n\n```proto\n{sections}```\n"
    if source == SDK:
        examples = "[From Python](../../../docs/python.md)"
        line = f"This page lists what `outrider.edge` offers to a program; {examples} shows it in use."
        (names,) = re.findall(r"^__all__ = (\[.*?\])$", text, re.MULTILINE | re.DOTALL)
        return "\n\n".join(("# Python API", line, *(f"::: outrider.edge.{name}" for name in ast.literal_eval(names))))
    return text


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that stand outside docs."""
    from mkdocs.structure.files import File

    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=outside_page(source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Rewrite a page for the site."""
    uri = page.file.src_uri
    sources = {place: source for source, place in OUTSIDE.items()}
    return for_the_site(markdown, sources.get(uri, f"docs/{uri}"), config.repo_url.rstrip("/"))
