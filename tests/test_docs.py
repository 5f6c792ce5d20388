"""The guide: links that lead somewhere, and figures that are those of the results."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

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


def test_the_table_of_speed_has_the_figures_of_the_bench() -> None:
    bench = json.loads((ROOT / "results" / "bench" / "h200.json").read_text())
    ratios: dict[str, dict[str, float]] = {}
    for row in bench["rows"]:
        if row["name"] == "RigLSTM triton":
            N, d, B, T = re.findall(r"= (\d+)(?:,|$)", row["table"])
            work, precision = row["work"].split(", ")
            key = f"{N} × {d} | {int(B):,} | {int(T):,} | {precision}"
            ratios.setdefault(key, {})[work] = row["ratio"]["median"]
    page = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    said = {}
    for line in page.splitlines():
        cells = [cell.strip(" *") for cell in line.strip("|").split("|")]
        if len(cells) == 12 and "×" in cells[0]:
            pair = {"inference": cells[6], "training": cells[9]}
            said[" | ".join(cells[:4])] = {work: r for work, r in pair.items() if r != "–"}
    assert bench["commit"][:7] in page
    assert said == {
        key: {work: f"{r:.2f}" for work, r in pair.items()} for key, pair in ratios.items()
    }
