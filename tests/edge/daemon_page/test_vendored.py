"""The page's libraries, which are files of npm packages."""

from __future__ import annotations

import hashlib
import re

from outrider.edge.daemon.app import PAGE, page_routes

VENDOR = PAGE / "vendor"
PUBLISHED = {
    "marked.esm.js": "5371fea86fd0656b4fc7bea7c94c663109d82789b69433eeee78d42895aa44de",
    "highlight.min.js": "1ed8fc5256b738b8875b74e4d3f0754f60d6411fb034d618dfbc4e6e6c9999d7",
}


def test_the_libraries_are_the_published_files_with_version_and_licence_beside_them() -> None:
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in VENDOR.glob("*.js")}
    assert files == PUBLISHED
    table = (VENDOR / "README.md").read_text(encoding="utf-8")
    for name in PUBLISHED:
        version, licence = re.search(rf"`{name}` \| \S+ ([\d.]+) .*`(LICENSE\.\w+)`", table).groups()
        assert f"v{version}" in (VENDOR / name).read_text(encoding="utf-8")[:200]
        assert "copyright notice" in (VENDOR / licence).read_text(encoding="utf-8")


def test_no_script_of_the_page_makes_markup_from_text() -> None:
    own = {path.name: path.read_text(encoding="utf-8") for path in PAGE.glob("*.js")}
    assert "markdown.js" in own
    makes_markup = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|srcdoc|\beval\(")
    assert [name for name, text in own.items() if makes_markup.search(text)] == []
    assert {route.path for route in page_routes()} == {"/", "/page/{name:path}"}
