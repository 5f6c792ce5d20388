"""The guide: links that lead somewhere, and figures that are those of the results."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from riglstm.lab.cli.bench import speed_tables

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def text(page: Path) -> str:
    """A page without its code, which may look like a link."""
    return CODE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """What a link can name on a page: its headings, as GitHub spells them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.strip().lower()).replace(" ", "-") for h in headings}


def broken(page: Path) -> list[str]:
    """The relative links of a page that lead nowhere."""
    found = []
    for link in LINK.findall(text(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_relative_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    assert not broken(page)


def test_a_link_to_nothing_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    links = "[a](no.md) [b](page.md#no) [c](#no) [d](page.md#a-page-of-x) `[e](no)`"
    page.write_text(f"# A page, of `x`\n\n{links}\n", encoding="utf-8")
    assert broken(page) == ["no.md", "page.md#no", "#no"]


def test_the_page_of_kernels_has_the_tables_of_every_bench_on_a_gpu() -> None:
    page = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    for path in (ROOT / "results" / "bench").glob("*.json"):
        bench = json.loads(path.read_text())
        for table in speed_tables(bench):
            assert table in page
            assert bench["commit"][:7] in page
