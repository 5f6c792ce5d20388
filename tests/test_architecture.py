"""The house rules that a machine can check."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from pathlib import Path

import pytest

import riglstm

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "riglstm"

MAY_IMPORT: dict[str, set[str]] = {
    "command": set(),
    "selection": set(),
    "checks": set(),
    "cuda_graphs": {"checks"},
    "cell": {"selection"},
    "parameters": {"cell", "checks"},
    "inputs": {"cell", "checks", "selection"},
    "scan": {"cell", "selection", "checks", "cuda_graphs", "inputs", "parameters"},
    "layer": {"scan", "cell", "selection", "checks", "inputs", "parameters"},
    "riglstm": {"command", "layer", "parameters", "scan"},
    "onnx": {"layer"},
    "plot": {"layer", "models"},
    "models": {"layer", "cell", "scan", "selection", "checks"},
    "lab": set(),
    "lab.tasks": {"models"},
    "lab.train": {"cuda_graphs", "lab.tasks", "models", "riglstm"},
    "lab.bench": {"lab.tasks", "lab.train", "checks", "layer", "scan"},
    "lab.minigrid": {"lab.tasks", "lab.train", "models"},
    "lab.tables": {
        *("lab.tasks", "lab.train", "lab.bench", "lab.minigrid"),
        *("models", "layer", "riglstm"),
    },
    "lab.report": {
        *("lab.tasks", "lab.train", "lab.tables", "lab.minigrid"),
        *("models", "plot", "riglstm"),
    },
    "lab.explore": {"lab.tasks", "lab.train", "lab.tables", "models", "plot"},
    "lab.cli": {
        *("lab.tasks", "lab.train", "lab.bench", "lab.tables", "lab.minigrid", "lab.report"),
        *("lab.explore", "models", "riglstm", "scan"),
    },
    "__main__": {"lab.cli"},
}
"""Who may import whom inside the package, from the lowest room to the highest; `riglstm` is the
package's own __init__. Nothing of the layer imports the lab."""

MOST_LINES = 600
"""Of a file: one with one subject reads better than five of 60 lines."""


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room(path: Path) -> str:
    """The first part of a module's name below the package; in the lab, the first two."""
    parts = [part for part in path.relative_to(PACKAGE).with_suffix("").parts if part != "__init__"]
    return room_of("riglstm", *parts)


def room_of(*parts: str) -> str:
    """The room of a dotted name, by its parts."""
    return ".".join(parts[1 : 3 if parts[1:2] == ("lab",) else 2]) or "riglstm"


ROOMS = {room(path) for path in modules()}


def imported_rooms(tree: ast.AST) -> set[str]:
    rooms: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "riglstm":
            parts = (node.module or "").split(".")
            if parts in (["riglstm"], ["riglstm", "lab"]):
                found = {room_of(*parts, alias.name) for alias in node.names}
                rooms |= {name if name in ROOMS else room_of(*parts) for name in found}
            else:
                rooms.add(room_of(*parts))
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            rooms |= {room_of(*parts) for parts in names if parts[0] == "riglstm"}
    return rooms


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_follow_the_map(path):
    rooms = imported_rooms(ast.parse(path.read_text()))
    assert room(path) in MAY_IMPORT, f"{room(path)} has no place in the map of imports"
    assert rooms <= MAY_IMPORT[room(path)] | {room(path)}


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_file_is_read_in_one_sitting(path):
    assert len(path.read_text().splitlines()) <= MOST_LINES


def test_the_layer_needs_torch_alone():
    allowed = {"torch", "riglstm", "__future__"}
    for path in modules():
        if room(path) in ("onnx", "__main__") or room(path).startswith("lab"):
            continue
        kernels = {"triton"} if "triton" in path.parts else set()
        tree = ast.parse(path.read_text())
        # What draws needs more, and imports it when it draws.
        for node in tree.body if room(path) == "plot" else ast.walk(tree):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                top = name.split(".")[0]
                known = top in allowed | kernels or top in sys.stdlib_module_names
                assert known, f"{path.name} imports {name}"


def test_every_equation_has_a_function_and_a_test():
    text = (ROOT / "docs" / "equations.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ") and "`" in line]
    assert len(rows) >= 10
    for row in rows:
        function, test = (re.findall(r"`([^`]+)`", cell) for cell in row.split("|")[3:5])
        module, name = function[0].split(".")
        path = PACKAGE / f"{module}.py"
        path = path if path.exists() else PACKAGE / module / "__init__.py"
        assert re.search(rf"^def {name}\(", path.read_text(), re.M), f"{function[0]} is gone"
        file, _, case = test[0].partition("::")
        source = (ROOT / "tests" / file).read_text()
        assert not case or f"def {case}(" in source, f"{test[0]} is gone"


def test_every_numbered_decision_in_the_code_is_written_down():
    notes = (ROOT / "docs" / "paper_notes.md").read_text()
    written = set(re.findall(r"\*\*P(\d+)\*\*", notes))
    used = set()
    for path in modules():
        used |= set(re.findall(r"\bP(\d+)\b", path.read_text()))
    assert used <= written
    assert len(written) == max(map(int, written))


def test_readme_is_short_and_the_guides_map_is_true():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
    text = (ROOT / "docs" / "README.md").read_text()
    block = text.split("## Map of the repository")[1].split("```")[1]
    listed = re.findall(r"^(\S+)\s{2,}\S", block, re.M)
    assert listed
    for entry in listed:
        assert (ROOT / entry).exists(), f"the map names {entry}, which is not there"


def test_citation_has_the_version_of_the_package():
    assert f"version: {riglstm.__version__}" in (ROOT / "CITATION.cff").read_text()


@pytest.mark.parametrize("file", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda p: p.name)
def test_every_study_can_be_imported(file):
    runpy.run_path(str(file), run_name="study")
