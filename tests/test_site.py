"""The site of `make site`: its navigation has every page once, and links of the tree lead to the right places."""

from __future__ import annotations

import re

import pytest

from website import site_pages

REPOSITORY = "https://host/outrider"


def test_every_page_is_in_the_navigation_exactly_once(root) -> None:
    navigation = (root / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2].partition("\n\n")[0]
    named = re.findall(r": (\S+\.md)$", navigation, re.MULTILINE)
    pages = [page.relative_to(root / "docs").as_posix() for page in (root / "docs").rglob("*.md")]
    assert len(pages) > 20
    assert sorted(named) == sorted([*pages, *site_pages.OUTSIDE.values()])


@pytest.mark.parametrize(
    ("source", "link", "place"),
    [
        ("docs/load.md", "faults.md#networks", "faults.md#networks"),
        ("docs/load.md", "#in-order", "#in-order"),
        ("docs/load.md", "https://host/page.md", "https://host/page.md"),
        ("docs/load.md", "../README.md#install", "index.md#install"),
        ("docs/load.md", "../deploy/grafana/METRICS.md", "metrics.md"),
        ("docs/load.md", "../tests/conftest.py#L1", f"{REPOSITORY}/blob/main/tests/conftest.py#L1"),
        ("docs/figures/architectures.md", "../models.md", "../models.md"),
        ("docs/figures/architectures.md", "pair.json", "pair.json"),
        ("docs/figures/architectures.md", "../../SECURITY.md", "../security.md"),
        ("README.md", "docs/figures/pair.png", "figures/pair.png"),
        ("deploy/grafana/METRICS.md", "alerts.yaml", f"{REPOSITORY}/blob/main/deploy/grafana/alerts.yaml"),
    ],
)
def test_a_link_leads_to_its_place(source, link, place) -> None:
    code = f"```\n[same]({link})\n```\n"
    assert site_pages.for_the_site(f"[a]({link})\n{code}", source, REPOSITORY) == f"[a]({place})\n{code}"


def test_a_bar_in_the_code_of_a_row_needs_no_escape() -> None:
    assert site_pages.for_the_site("| `a\\|b` | c\\|d |\n`e\\|f`", "README.md", "") == "| `a|b` | c\\|d |\n`e\\|f`"


def test_the_python_api_has_every_public_name() -> None:
    import outrider.edge

    page = site_pages.outside_page(site_pages.SDK)
    assert re.findall(r"^::: outrider\.edge\.(\w+)$", page, re.MULTILINE) == outrider.edge.__all__
