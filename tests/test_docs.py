"""The guide: links that lead somewhere, code that runs, figures that are those of the results."""

from __future__ import annotations

import functools
import json
import re
import runpy
from pathlib import Path

import pytest
import torch

from helpers import guide_blocks
from riglstm.lab.cli.bench import speed_tables
from riglstm.lab.cli.main import main
from riglstm.lab.tasks import TASKS

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
def test_every_relative_link_leads_to_a_file_and_a_heading(page):
    assert not broken(page)


ELSEWHERE = {
    "frameworks.md": "test_sb3.py test_torchrl.py",
    "many-gpus.md": "test_frameworks.py",
    "own-tasks.md": "test_examples.py",
    "gallery.md": "test_plot.py",
}
"""Pages whose code needs other packages or several processes, and the tests that run it."""
SLOW = {"deploying.md"}
WITH_CODE = [
    pytest.param(page, marks=[pytest.mark.slow] * (page.name in SLOW), id=page.name)
    for page in PAGES
    if guide_blocks(page) and page.name not in ELSEWHERE
]


# torch's exporters warn of their own code.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*LeafSpec:FutureWarning")
@pytest.mark.parametrize("page", WITH_CODE)
def test_the_code_of_a_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights").symlink_to(ROOT / "weights")
    # Whether a graph is whole is the question here; building it takes the compiler long.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    names = {"__name__": "guide", "torch": torch}
    for block in guide_blocks(page):
        exec(block, names)


def test_code_that_is_not_run_here_is_run_elsewhere():
    for page, tests in ELSEWHERE.items():
        assert guide_blocks(ROOT / "docs" / page)
        for test in tests.split():
            assert page.removesuffix(".md") in (ROOT / "tests" / test).read_text()


FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^[^#\n]*?\briglstm ([a-z]+)(?: ([a-z]+))?\b([^#\n]*)", re.MULTILINE)


def test_every_flag_of_a_command_is_one_of_its_verb(capsys):
    helps: dict[tuple[str, ...], set[str]] = {}
    for page in PAGES:
        fences = FENCE.findall(page.read_text(encoding="utf-8"))
        shell = "".join(code for language, code in fences if language in ("", "bash"))
        for verb, task, rest in COMMAND.findall(shell.replace("\\\n", "")):
            asked = (verb, task) if task in {*TASKS, "minigrid"} else (verb,)
            if asked == ("train",):  # a task from another package
                continue
            if asked not in helps:
                assert main([*asked, "--help"]) == 0
                helps[asked] = set(re.findall(r"--[a-z][\w-]*", capsys.readouterr().out))
            unknown = set(re.findall(r"(?<!\S)--[\w-]+", rest)) - helps[asked]
            assert not unknown, f"{page.name}: riglstm {' '.join(asked)}"
    assert len(helps) >= 10


def test_the_table_of_settings_is_that_of_the_study():
    study = runpy.run_path(str(ROOT / "benchmarks" / "choosing.py"))
    page = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    said = page.split("<!-- choosing: begin -->\n")[1].split("\n<!-- choosing: end -->")[0]
    assert said == study["table"](study["read"](ROOT / study["RESULTS"]))


def test_the_small_table_of_speed_is_that_of_the_bench():
    rows = json.loads((ROOT / "results" / "bench" / "h200.json").read_text())["rows"]
    lines = ["| precision | work | `nn.LSTM` | RigLSTM | ratio |", "|---|---|--:|--:|--:|"]
    for row in rows:
        if (row["table"], row["B"], row["hidden_size"]) == ("speed", 64, 600):
            theirs, ours = (
                row["us"][f"{who} captured"]["median"] for who in ("nn.LSTM", "RigLSTM")
            )
            figures = f"{theirs:.1f} | {ours:.1f} | {ours / theirs:.2f}"
            lines.append(f"| {row['precision']} | {row['work']} | {figures} |")
    page = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
    said = page.split("<!-- speed: begin -->\n")[1].split("\n<!-- speed: end -->")[0]
    assert said == "\n".join(lines)


def test_the_guide_and_the_site_name_every_page():
    listed, site = ((ROOT / name).read_text() for name in ("docs/README.md", "mkdocs.yml"))
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert [page for page in sorted(pages) if f"]({page})" not in listed] == []
    assert [page for page in PAGES if f" {page.relative_to(ROOT)}\n" not in site] == []


def test_the_site_has_every_file_that_its_pages_link_to():
    (line,) = re.findall(r"^PAGES := (.*)$", (ROOT / "Makefile").read_text(), re.M)
    copied = set(line.split())
    for page in PAGES:
        for link in LINK.findall(text(page)):
            path = (page.parent / link.partition("#")[0]).resolve()
            if not re.match(r"[a-z]+:|#", link):
                assert path.relative_to(ROOT).parts[0] in copied, f"{page.name}: {link}"


def test_the_page_of_kernels_has_the_tables_of_the_bench_on_a_gpu():
    page = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    bench = json.loads((ROOT / "results" / "bench" / "h200.json").read_text())
    assert bench["commit"][:7] in page
    for table in speed_tables(bench):
        assert table in page


def test_the_ratios_on_a_cpu_are_those_of_the_bench():
    rows = json.loads((ROOT / "results" / "bench" / "cpu.json").read_text())["rows"]
    ratios = {
        (row["hidden_size"], row["B"], row["work"]): row["us"]["RigLSTM"]["median"]
        / row["us"]["nn.LSTM"]["median"]
        for row in rows
    }
    page = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\| (\d+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \|$", page, re.M)
    assert len(shown) == len(rows) / 2
    for width, batch, *figures in shown:
        for work, figure in zip(("inference", "training"), figures, strict=True):
            assert figure == f"{ratios[int(width), int(batch), work]:.2f}"
