"""What the rows in results/ say, for readers: README's table, a page of all tables, and figures.

The tables themselves, their columns and bold figures, are made in `lab/tables/table.py`.

Figures are known by a digest of what they were drawn from, of their words and of their files, which
`sources.json` holds beside them: whether they are up to date can be told without drawing, and on
any machine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from riglstm.lab.report import cells
from riglstm.lab.report.cells import Loaded
from riglstm.lab.report.curves import (
    Picture,
    shift,
    shift_picture,
    slices,
    slices_picture,
)
from riglstm.lab.report.minigrid import relative, relative_picture
from riglstm.lab.tables import agents, complexity
from riglstm.lab.tables.recipes import SEARCHED, TABLES
from riglstm.lab.tables.result import ResultRow
from riglstm.lab.tables.rows import read_folder
from riglstm.lab.tables.run import finished, load
from riglstm.lab.tables.search import read_lines
from riglstm.lab.tables.table import RULES, Table, markdown, newest, plain, tables, text_table
from riglstm.lab.tasks import MINIGRID
from riglstm.lab.tasks.datasets import DataError, data_folder
from riglstm.lab.tasks.images import SequentialImages
from riglstm.lab.train.folder import atomic_write

SIZE, STEP = 16, 129
"""Of the digits that are drawn, and where their scores are: as in the paper the first pixel of the
lower half, but not at 24x24, where these networks read few digits."""
SOURCES = "sources.json"
COMPLEXITY = "complexity.json"
NOTES = "NOTES.md"
"""What is to be said of the rows, by hand: it stands above the tables."""

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
"""Around what is generated in README."""
NOTHING = (
    "No runs at the paper's sizes yet: `riglstm reproduce` makes them, `riglstm report` this table."
)
DOCS = "docs/reproducing.md"
"""What describes the recipes."""
FOUND = {
    "tuned": "The recipe was chosen on validation data of all conditions, the shifted ones "
    "included ([how]({}docs/recipes.md)).",
    SEARCHED: "Models in a search had the same number of trials; a recipe was chosen on the same "
    "validation data as its checkpoint ([how]({}docs/protocol.md)).",
}
"""Recipes that were looked for, and how; in the braces, the way to the root."""


class Results(NamedTuple):
    """What the folder of results holds, read."""

    folder: Path
    tables: Sequence[Table]
    grids: Sequence[ResultRow]
    """Rows of agents on MiniGrid that tables show."""
    weights: Path
    """Folder of exported networks, whose cells are drawn if they read images."""


class Wanted(NamedTuple):
    """A figure that there should be."""

    name: str
    """Of its file."""
    source: str
    """A digest of what it is drawn from."""
    draw: Callable[[], Picture]

    def is_there(self, folder: Path, said: Mapping[str, str]) -> bool:
        """Whether the file and what is said of it are those that were drawn from the source."""
        path = folder / self.name
        if said.get("source") != self.source or not path.is_file():
            return False
        return said["digest"] == _seal(said, path.read_bytes())


def read(results: Path, weights: Path) -> Results:
    """What there is; raises ValueError for rows that cannot be."""
    rows = read_folder(results)
    grids = [row for row in newest(rows) if row.table == MINIGRID]
    return Results(results, tables(rows), grids, weights)


def publish(
    results: Path,
    readme: Path,
    weights: Path,
    *,
    device: str = "cpu",
    data_dir: Path | None = None,
    show: Callable[[str], None] = lambda line: None,
) -> list[Path]:
    """Write README's table, the page of all tables and the figures anew; returns what changed.

    `results`: the folder of the CSV files; `weights`: of exported networks. Figures that are as
    they were drawn from their source are left alone; `show` hears of each that cannot be drawn.
    """
    found, folder = read(results, weights), results / "figures"
    known, changed = _sources(folder), list[Path]()
    inserted(readme, "")  # A README without its marks is refused before anything is written.
    kept: dict[str, Any] = {}
    for wanted in _wanted(found, device, data_dir):
        said = known.get(wanted.name, {})
        if not wanted.is_there(folder, said):
            try:
                picture = wanted.draw()
            except DataError as error:
                show(f"{wanted.name} is not drawn: {error}")
                continue
            said = {"source": wanted.source, "title": picture.title, "caption": picture.caption}
            said["digest"] = _seal(said, picture.png)
            changed += _write(folder / wanted.name, picture.png)
        kept[wanted.name] = said
    if kept or known:
        changed += _write(folder / SOURCES, f"{json.dumps(kept, indent=1)}\n".encode())
    changed += _write(results / "README.md", page(found, kept).encode())
    return [*changed, *_write(readme, inserted(readme, block(found.tables)).encode())]


def outdated(results: Path, readme: Path, weights: Path) -> list[str]:
    """What `publish` would change; nothing is drawn or written."""
    found, folder = read(results, weights), results / "figures"
    known, wanted = _sources(folder), {one.name: one for one in _wanted(found)}
    stale = [folder / n for n, w in wanted.items() if not w.is_there(folder, known.get(n, {}))]
    texts = {readme: inserted(readme, block(found.tables))}
    texts[results / "README.md"] = page(found, {n: known[n] for n in wanted if n in known})
    stale += [path for path, text in texts.items() if _differs(path, text.encode())]
    return list(map(str, stale))


def inserted(readme: Path, text: str) -> str:
    """README with the text between its two marks."""
    content = readme.read_text(encoding="utf-8")
    before, begin, rest = content.partition(f"{BEGIN}\n")
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{readme} must have a line {BEGIN} and after it {END}, got not both")
    return f"{before}{begin}{text}{end}{after}"


def block(found: Sequence[Table]) -> str:
    """README's one table, the first that has rows: means, the best in bold."""
    if not found:
        return f"{NOTHING}\n"
    table = found[0]
    said = (
        "Means over runs; the best is bold. Checkpoints are chosen on validation data of the "
        f"training condition. {recipes([table])}\n"
    )
    return f"{markdown(text_table(table, brief=True))}\n{said}"


def page(found: Results, sources: Mapping[str, Mapping[str, str]]) -> str:
    """All tables and figures, as Markdown."""
    parts = [
        "# Results",
        "`riglstm report --results results` makes this page from the CSV files of this folder, "
        "which have one line for each figure of each run, and from `trials/`. Each "
        "table shows the recipe and precision of its newest run. `bench/` has measured speeds.",
        f"{RULES} {recipes(found.tables, '../')}" if found.tables else NOTHING,
    ]
    if (above := found.folder / NOTES).is_file():
        parts.append(above.read_text(encoding="utf-8").strip())
    parts += [markdown(text_table(table)).rstrip() for table in found.tables]
    there = {table.name for table in found.tables}
    if rest := ", ".join(table.title for name, table in TABLES.items() if name not in there):
        parts.append(f"Not run yet: {rest}.")
    for name, said in sources.items():
        title, caption = plain(said["title"]), plain(said["caption"])
        parts.append(f"![{title}](figures/{name})\n\n**{title}.** {caption}")
    if measured := complexity.tables(complexity.read(found.folder / COMPLEXITY)):
        parts += ["## Complexity", *(markdown(table).rstrip() for table in measured)]
    if found.grids:
        parts += ["## MiniGrid", agents.NOTE]
        parts += [markdown(text_table(table)).rstrip() for table in agents.tables(found.grids)]
    return "\n\n".join(parts) + "\n"


def recipes(found: Sequence[Table], folder: str = "") -> str:
    """How the runs were trained; `folder`: the root of the repository, from the page."""
    names = dict.fromkeys(line.made["budget"] for table in found for line in table.lines)
    said = []
    for name in names:
        if name != SEARCHED:
            said.append(f"Recipe `{plain(name)}`: [{DOCS}]({folder}{DOCS}).")
        said += [FOUND[name].format(folder)] if name in FOUND else []
    return " ".join(said)


def _wanted(found: Results, device: str = "cpu", data_dir: Path | None = None) -> Iterator[Wanted]:
    first: dict[str, Table] = {}
    for table in found.tables:
        # Of two tables with one name the first was searched.
        if first.setdefault(table.name, table) is not table:
            continue
        for setting in table.trained_on:
            # Not of runs that have all failed.
            if (what := shift(table, setting)) is not None:
                of = "" if table.settings is None else f"-{setting.replace('=', '')}"
                draw = partial(shift_picture, what)
                yield Wanted(f"{table.name}{of}-shift.png", _digest(what), draw)
    if bars := relative(found.grids):
        yield Wanted("minigrid-relative.png", _digest(bars), partial(relative_picture, bars))
    for file in sorted(found.folder.glob("trials/*.jsonl")):
        if (trials := slices(file.stem, read_lines(file))) is not None:
            draw = partial(slices_picture, trials)
            yield Wanted(f"{file.stem}-trials.png", _digest(trials), draw)
    for file in sorted(found.weights.glob("*.safetensors")):
        spec, content = finished(file).spec, hashlib.sha256(file.read_bytes()).hexdigest()
        if isinstance(spec.task_config(), SequentialImages):
            for kind, picture in cells.pictures(spec.model, STEP).items():
                source = _digest([content, kind, SIZE, STEP])
                draw = partial(_draw_cells, picture, spec.name, file, device, data_dir)
                yield Wanted(f"{file.stem}-{kind}.png", source, draw)


def _draw_cells(
    picture: Callable[[Loaded, cells.Reading], Picture],
    label: str,
    file: Path,
    device: str,
    data_dir: Path | None,
) -> Picture:
    """What the cells of an exported network do with three test images."""
    run = Loaded(label, file, *load(file, device, data_folder(data_dir)))
    return picture(run, cells.read_images(run, f"{SIZE}x{SIZE}"))


def _sources(folder: Path) -> Any:
    """What is said of each figure, by the name of its file."""
    path = folder / SOURCES
    return json.loads(path.read_bytes()) if path.exists() else {}


def _digest(data: object) -> str:
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()


def _seal(said: Mapping[str, str], picture: bytes) -> str:
    """A digest of a figure: its words, its source, its file."""
    words = [said[name] for name in ("source", "title", "caption")]
    return _digest([words, hashlib.sha256(picture).hexdigest()])


def _differs(path: Path, content: bytes) -> bool:
    return not path.is_file() or path.read_bytes() != content


def _write(path: Path, content: bytes) -> list[Path]:
    """The path, where its content was another."""
    if not _differs(path, content):
        return []
    with atomic_write(path) as file:
        file.write(content)
    return [path]
