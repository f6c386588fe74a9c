"""Links of pages lead to files and headings that exist, and paths of the product's files are right."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*/*.md"))
)
ROOTS = (ROOT, ROOT / "edgepipe", ROOT / "backends", ROOT / "backends/edgepipe_torch")
KINDS = (".py", ".cu", ".proto", ".md")


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def headings(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(page: Path) -> Iterator[str]:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in headings(target)):
            yield link


def missing_files(page: Path) -> Iterator[str]:
    """Paths with a folder whose first part is a folder of the product, but which lead to no file."""
    for span in re.findall(r"`([^`\s]+)`", prose(page)):
        if "/" not in span or not span.endswith(KINDS) or re.search(r"[*{<A-Z]", span):
            continue
        folders = [root for root in ROOTS if (root / span.partition("/")[0]).is_dir()]
        if folders and not any((root / span).is_file() for root in folders):
            yield span


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_headings(page: str) -> None:
    assert list(broken_links(ROOT / page)) == []


def test_pages_of_the_architecture_name_files_that_exist() -> None:
    pages = [ROOT / "docs/architecture.md", *ROOT.glob("docs/architecture/*.md")]
    assert {page.name: wrong for page in pages if (wrong := list(missing_files(page)))} == {}


def test_the_overview_links_every_page() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    pages = (path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/architecture/*.md"))
    assert [page for page in pages if f"]({page})" not in text] == []
