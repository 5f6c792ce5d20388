"""What the rows in results/ say, for readers: README's table, a page of all tables, and figures.

Figures are known by a digest of what they were drawn from, of their words and of their files, which
`sources.json` holds beside them: whether they are up to date can be told without drawing, and on
any machine.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from riglstm.lab.minigrid import table as minigrid
from riglstm.lab.report import cells
from riglstm.lab.report.curves import Picture, Shift, draw_shift, png, shift
from riglstm.lab.report.trials import Slices, draw_slices, slices
from riglstm.lab.tables.recipes import SEARCHED, TABLES
from riglstm.lab.tables.rows import read_folder
from riglstm.lab.tables.run import finished
from riglstm.lab.tables.search import read_lines
from riglstm.lab.tables.table import RULES, Table, markdown, plain, tables, text_table
from riglstm.lab.tasks.datasets import DataError, data_folder
from riglstm.lab.tasks.images import SequentialImages
from riglstm.lab.train.folder import atomic_write

SIZE, STEP = 16, 129
"""Of the digits that are drawn, and where their scores are: as in the paper the first pixel of the
lower half, but not at 24x24, where these networks read few digits."""
SOURCES = "sources.json"
SHIFT, TRIALS = "-shift.png", "-trials.png"
"""What the names of figures end in that are drawn from rows and from trials; all others are of
weights."""
SAID = ("digest", "source", "title", "caption", "alt")
"""What `sources.json` has of a figure."""

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
    SEARCHED: "The models shown had the same number of trials; a recipe was chosen on the same "
    "validation data as its checkpoint ([how]({}docs/protocol.md)).",
}
"""Recipes that were looked for, and how; in the braces, the way to the root."""


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


def publish(
    results: Path,
    readme: Path,
    weights: Path,
    *,
    device: str = "cpu",
    data_dir: Path | None = None,
    show: Callable[[str], None] | None = None,
) -> list[Path]:
    """Write README's table, the page of all tables and the figures anew; returns what changed.

    `results`: the folder of the CSV files; `weights`: of exported networks, whose cells are drawn
    if they read images. Figures that are as they were drawn from their source are left alone, and
    none is removed; `show` hears of each that cannot be drawn, or that is no longer wanted.
    """
    found, folder = tables(read_folder(results)), results / "figures"
    known, changed = _sources(folder), []
    say = show or (lambda line: None)
    inserted(readme, "")  # A README without its marks is refused before anything is written.
    lost = [name for name in known if not name.endswith((SHIFT, TRIALS))]
    if lost and not weights.is_dir():
        raise ValueError(
            f"{weights} must be the folder of the weights that {', '.join(lost)} were drawn from, "
            "got none; name it by --weights, or make an empty one, and these figures go"
        )
    kept: dict[str, Any] = {}
    for wanted in _wanted(results, found, weights, device, data_dir):
        kept[wanted.name] = known.get(wanted.name, {})
        if wanted.is_there(folder, kept[wanted.name]):
            continue
        try:
            picture = wanted.draw()
        except DataError as error:
            del kept[wanted.name]
            say(f"{wanted.name} is not drawn: {error}")
            continue
        said = {"title": picture.title, "caption": picture.caption, "alt": picture.alt}
        said["source"] = wanted.source
        kept[wanted.name] = {"digest": _seal(said, picture.png), **said}
        changed += _write(folder / wanted.name, picture.png)
    for path in _unwanted(folder, kept):
        say(f"{path} is no figure of these results; remove it")
    if kept or known:
        changed += _write(folder / SOURCES, f"{json.dumps(kept, indent=1)}\n".encode())
    changed += _write(results / "README.md", page(results, found, kept).encode())
    return [*changed, *_write(readme, inserted(readme, block(found)).encode())]


def outdated(results: Path, readme: Path, weights: Path) -> list[str]:
    """What `publish` would change, and figures that nobody wants; nothing is drawn or written."""
    found, folder = tables(read_folder(results)), results / "figures"
    known = _sources(folder)
    wanted = list(_wanted(results, found, weights))
    stale = [
        folder / one.name for one in wanted if not one.is_there(folder, known.get(one.name, {}))
    ]
    stale += _unwanted(folder, {one.name: {} for one in wanted})
    texts = {
        readme: inserted(readme, block(found)),
        results / "README.md": page(results, found, known),
    }
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


def page(results: Path, found: Sequence[Table], sources: Mapping[str, Mapping[str, str]]) -> str:
    """All tables and figures, as Markdown; agents have theirs from the folders of their runs."""
    parts = [
        "# Results",
        "`riglstm report --results results` makes this page from the CSV files of this folder, "
        "which have one line for each figure of each run, and from `trials/`. Each "
        "table shows the recipe and precision of its newest run. `bench/` has measured speeds.",
        f"{RULES} {recipes(found, '../')}" if found else NOTHING,
    ]
    parts += [markdown(text_table(table)).rstrip() for table in found]
    there = {table.name for table in found}
    if rest := ", ".join(table.title for name, table in TABLES.items() if name not in there):
        parts.append(f"Not run yet: {rest}.")
    for name, said in sources.items():
        alt, title, caption = (plain(said[part]) for part in ("alt", "title", "caption"))
        parts.append(f"![{alt}](figures/{name})\n\n**{title}.** {caption}")
    runs = [minigrid.read(path.parent) for path in results.glob("minigrid/*/config.json")]
    if runs:
        shown, notes = minigrid.tables(sorted(runs, key=lambda run: run.path))
        parts += ["## MiniGrid", *notes]
        parts += [markdown(text_table(table)).rstrip() for table in shown]
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


def _wanted(
    results: Path,
    found: Sequence[Table],
    weights: Path,
    device: str = "cpu",
    data_dir: Path | None = None,
) -> Iterator[Wanted]:
    first: dict[str, Table] = {}
    for table in found:
        # Of two tables with one name the first was searched.
        if first.setdefault(table.name, table) is not table:
            continue
        for setting in table.trained_on:
            # Not of runs that have all failed.
            if (what := shift(table, setting)) is not None:
                yield _shift(table, setting, what)
    for file in sorted(results.glob("trials/*.jsonl")):
        if (trials := slices(read_lines(file))) is not None:
            yield _slices(file.stem, trials)
    for file in sorted(weights.glob("*.safetensors")):
        if isinstance(finished(file).spec.task_config(), SequentialImages):
            yield from _looks(file, device, data_dir)


def _shift(table: Table, setting: str, what: Shift) -> Wanted:
    """The metric against the shift, for all models trained in a setting."""
    counts = ", ".join(
        f"{label} {max(map(len, values.values()))}" for label, values in what.models.items()
    )
    title, name = TABLES[table.name].title, table.name
    if table.settings is not None:
        title, name = f"{title}, {setting}", f"{name}-{setting.replace('=', '')}"
    words = {
        "title": f"{title}: {what.measure} against the shift",
        "caption": f"Means over runs ({counts}), bars of one standard deviation of three runs or "
        "more, dots for runs; "
        f"trained on {what.trained_on}, which chose the checkpoints. Hollow: the paper's figures.",
        "alt": what.alt,
    }
    axis = (what.measure, what.higher_is_better)
    source = _digest([what.conditions, what.trained_on, what.models, what.paper, axis, words])
    return Wanted(f"{name}{SHIFT}", source, lambda: Picture(**words, png=png(draw_shift(what))))


def _slices(space: str, what: Slices) -> Wanted:
    """The score of a search's trials against each option."""
    words = {
        "title": f"Search {space}: {len(what.trials)} trials by the options that were drawn",
        "caption": "A mark is a trial, with its score on validation data of the training "
        "condition; a model's best is large. Trials without a score or these options: "
        f"{what.left_out}.",
        "alt": f"Panels: {', '.join(what.options)}.",
    }
    source = _digest([what, words])
    return Wanted(f"{space}{TRIALS}", source, lambda: Picture(**words, png=png(draw_slices(what))))


def _looks(file: Path, device: str, data_dir: Path | None) -> Iterator[Wanted]:
    """When the cells of a network were awake, and what they scored, on three test images.

    Of a network that has such cells.
    """
    known = finished(file).spec
    model, average = known.model, known.fit.average
    # The seed is in the caption already, with the update.
    averaged = "" if average is None else f" Weights averaged over updates, by {average:g}."
    content = hashlib.sha256(file.read_bytes()).hexdigest()

    def drawn(draw: Callable[[cells.Loaded, cells.Look], Picture]) -> Picture:
        run = cells.open_run(known.name, file, device, data_folder(data_dir))
        digits = cells.first_of_each_class(cells.image_task(run))
        picture = draw(run, cells.look(run, f"{SIZE}x{SIZE}", digits))
        return picture._replace(caption=f"{picture.caption}{averaged}")

    kinds: dict[str, Callable[[cells.Loaded, cells.Look], Picture]] = {}
    if model in cells.SLEEPING:
        kinds["cells"] = cells.activation_picture
    if model in cells.SCORING:
        kinds["scores"] = lambda run, look: cells.score_pictures(run, look, STEP)[0]
    for kind, draw in kinds.items():
        yield Wanted(
            f"{file.stem}-{kind}.png",
            _digest([content, kind, SIZE, STEP, averaged]),
            functools.partial(drawn, draw),
        )


def _sources(folder: Path) -> dict[str, dict[str, str]]:
    """What is said of each figure, by the name of its file."""
    path = folder / SOURCES
    found: dict[str, dict[str, str]] = json.loads(path.read_bytes()) if path.exists() else {}
    return found


def _unwanted(folder: Path, wanted: Mapping[str, object]) -> list[Path]:
    """Pictures in the folder of figures that are none of these."""
    return [path for path in sorted(folder.glob("*.png")) if path.name not in wanted]


def _digest(data: object) -> str:
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()


def _seal(said: Mapping[str, str], picture: bytes) -> str:
    """A digest of a figure: its words, its source, its file."""
    return _digest([[said[name] for name in SAID[1:]], hashlib.sha256(picture).hexdigest()])


def _differs(path: Path, content: bytes) -> bool:
    return not path.is_file() or path.read_bytes() != content


def _write(path: Path, content: bytes) -> list[Path]:
    """The path, where its content was another."""
    if not _differs(path, content):
        return []
    with atomic_write(path) as file:
        file.write(content)
    return [path]
