"""What the files in results/ say, for readers: README's table, a page beside them, and figures.

Figures are known by a digest of what they were drawn from, of their words and of their files, which
`sources.json` holds beside them: whether they are up to date can be told without drawing, and on
any machine.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from riglstm.lab.report import cells, curves
from riglstm.lab.report.curves import Axis
from riglstm.lab.report.readme import block, inserted, page
from riglstm.lab.report.style import Picture, png
from riglstm.lab.tables.finished import finished
from riglstm.lab.tables.paper import value
from riglstm.lab.tables.render import number
from riglstm.lab.tables.sheet import Line, Sheet
from riglstm.lab.tables.summary import read_all, sheets
from riglstm.lab.tables.tables import TABLES
from riglstm.lab.tasks.files import DataError, data_folder
from riglstm.lab.tasks.images import SequentialImages
from riglstm.lab.train.folder import aside

SIZE, STEP = 24, 289
"""Of the digits that are drawn, and where their scores are, as in the paper."""
SOURCES = "sources.json"
SHIFT = "-shift.png"
"""What the names of figures end in that are drawn from rows; all others are of weights."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]*\.png")
"""Of a figure's file."""
SAID = ("digest", "source", "title", "caption", "alt")
"""What `sources.json` has of a figure."""
WAY_OUT = "delete it, and the figures are drawn anew"


class Wanted(NamedTuple):
    """A figure that there should be."""

    name: str
    """Of its file, as `NAME` has it."""
    source: str
    """A digest of what it is drawn from."""
    draw: Callable[[], Picture]

    def is_there(self, folder: Path, said: Mapping[str, str]) -> bool:
        """Whether the file and what is said of it are those that were drawn from the source."""
        return said.get("source") == self.source and _is_drawn(folder / self.name, said)


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
    if they read images. Figures that are as they were drawn from their source are left alone;
    `show` hears of each that cannot be drawn.
    """
    found, folder = sheets(read_all(results)), results / "figures"
    known, changed = _sources(folder), []
    say = show or (lambda line: None)
    inserted(readme, "")  # A README without its marks is refused before anything is written.
    lost = [name for name in known if not name.endswith(SHIFT)]
    if lost and not weights.is_dir():
        raise ValueError(
            f"{weights} must be the folder of the weights that {', '.join(lost)} were drawn from, "
            "got none; name it by --weights, or make an empty one, and these figures go"
        )
    kept: dict[str, Any] = {}
    for wanted in _wanted(found, weights, device, data_dir):
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
    for name in sorted(known.keys() - kept.keys()):
        if _is_drawn(folder / name, known[name]):
            (folder / name).unlink()
        elif (folder / name).is_symlink() or (folder / name).exists():
            say(f"{folder / name} is no figure of these results, nor as it was drawn; left there")
    if kept or known:
        changed += _write(folder / SOURCES, f"{json.dumps(kept, indent=1)}\n".encode())
    changed += _write(results / "README.md", page(found, kept).encode())
    return [*changed, *_write(readme, inserted(readme, block(found)).encode())]


def outdated(results: Path, readme: Path, weights: Path) -> list[str]:
    """What `publish` would change; nothing is drawn or written."""
    found, folder = sheets(read_all(results)), results / "figures"
    known = _sources(folder)
    wanted = {figure.name: figure for figure in _wanted(found, weights)}
    stale = [
        str(folder / name)
        for name in dict.fromkeys((*wanted, *known))
        if name not in wanted or not wanted[name].is_there(folder, known.get(name, {}))
    ]
    texts = {readme: inserted(readme, block(found)), results / "README.md": page(found, known)}
    return stale + [str(path) for path, text in texts.items() if _differs(path, text.encode())]


def strange(results: Path, weights: Path) -> list[str]:
    """Exported networks whose figures are not those of their run's last rows, in words."""
    recorded: dict[str, dict[tuple[str, str], float]] = {}
    for row in read_all(results):
        recorded.setdefault(row.run, {})[row.metric, row.chosen_on] = row.value
    said = []
    for file in sorted(weights.glob("*.safetensors")):
        result = finished(file).result
        there = recorded.get(result.get("run", ""), {})
        for row in result["rows"]:
            metric = f"{row['metric']}@{row['condition']}"
            expected = there.get((metric, row["chosen_on"]))
            if expected != row["value"]:
                said.append(f"{file.name}: {metric} is {row['value']}, in the results {expected}")
    return said


def _wanted(
    found: Sequence[Sheet], weights: Path, device: str = "cpu", data_dir: Path | None = None
) -> Iterator[Wanted]:
    for sheet in found:
        for setting in sheet.trained_on:
            if _drawn(sheet, setting):
                yield _shift(sheet, setting)
    for file in sorted(weights.glob("*.safetensors")):
        if isinstance(finished(file).spec.task_config(), SequentialImages):
            yield from _looks(file, device, data_dir)


def _drawn(sheet: Sheet, setting: str) -> list[Line]:
    """Lines that have figures, and not only runs that failed."""
    lines = [line for line in sheet.lines if line.setting == setting]
    return [line for line in lines if any(cell.values for cell in line.ours.values())]


def _shift(sheet: Sheet, setting: str) -> Wanted:
    """The metric against the shift, for all models trained in a setting."""
    home, axis = sheet.trained_on[setting], Axis(TABLES[sheet.name].measure, sheet.higher_is_better)
    lines = _drawn(sheet, setting)
    models = {
        line.label: {c: list(cell.values) for c, cell in line.ours.items() if cell.values}
        for line in lines
    }
    paper = {
        line.label: {c: value(text) for c, text in line.paper.items()}
        for line in lines
        if line.paper
    }
    conditions = [home, *(c for c in sheet.conditions if c != home)]
    counts = ", ".join(
        f"{label} {max(map(len, values.values()))}" for label, values in models.items()
    )
    words = {
        "title": f"{sheet.head(setting)}: {axis.name} against the shift",
        "caption": f"Means over runs ({counts}), bars of one standard deviation of three runs or "
        "more, dots for runs; "
        f"trained on {home}, which chose the checkpoints. Hollow: the paper's figures.",
        "alt": "Means. "
        + "; ".join(
            f"{line.label}: "
            + ", ".join(f"{c} {number(cell.mean)}" for c, cell in line.ours.items() if cell.values)
            for line in lines
        ),
    }

    def draw() -> Picture:
        figure = curves.draw_shift(conditions, home, models, axis, paper)
        return Picture(words["title"], words["caption"], words["alt"], png(figure))

    name = sheet.name if sheet.settings is None else f"{sheet.name}-{setting.replace('=', '')}"
    source = _digest([conditions, home, models, paper, axis, words])
    return Wanted(f"{name}{SHIFT}", source, draw)


def _looks(file: Path, device: str, data_dir: Path | None) -> Iterator[Wanted]:
    """When the cells of a network were awake, and what they scored, on three test images.

    Of a network that has such cells.
    """
    known = finished(file).spec
    model, average = known.model, known.fit.average
    # The seed is in the caption already, with the update.
    averaged = "" if average is None else f" Weights averaged over updates, by {average:g}."
    content = hashlib.sha256(file.read_bytes()).hexdigest()

    def seen() -> tuple[cells.Loaded, cells.Look]:
        run = cells.open_run(known.name, file, device, data_folder(data_dir))
        digits = cells.first_of_each_class(cells.image_task(run))
        return run, cells.look(run, f"{SIZE}x{SIZE}", digits)

    kinds: dict[str, Callable[[cells.Loaded, cells.Look], Picture]] = {}
    if model in cells.SLEEPING:
        kinds["cells"] = cells.activation_picture
    if model in cells.SCORING:
        kinds["scores"] = lambda run, look: cells.score_pictures(run, look, STEP)[0]
    for kind, draw in kinds.items():
        yield Wanted(
            re.sub(r"^[^A-Za-z0-9]+|[^A-Za-z0-9._=+-]", "", f"{file.stem}-{kind}.png"),
            _digest([content, kind, SIZE, STEP, averaged]),
            lambda draw=draw: _with(draw(*seen()), averaged),  # type: ignore[misc]
        )


def _with(picture: Picture, more: str) -> Picture:
    return picture._replace(caption=f"{picture.caption}{more}")


def _sources(folder: Path) -> dict[str, Any]:
    """What is said of each figure, by the name of its file; raises ValueError for other content.

    Files that are no longer wanted are removed by these names: they are of this folder alone.
    """
    path = folder / SOURCES
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} must be a JSON file, got: {error}; {WAY_OUT}") from error
    for name, said in found.items() if isinstance(found, dict) else [("", found)]:
        if not NAME.fullmatch(name):
            raise ValueError(
                f"{path} must hold names of figures in its folder, such as mnist{SHIFT}, got "
                f"{name!r}; {WAY_OUT}"
            )
        if not isinstance(said, dict) or not all(isinstance(said.get(k), str) for k in SAID):
            raise ValueError(f"{path} must say {', '.join(SAID)} of {name} in words; {WAY_OUT}")
    return dict(found)


def _digest(data: object) -> str:
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()


def _seal(said: Mapping[str, str], picture: bytes) -> str:
    """A digest of a figure: its words, its source, its file."""
    return _digest([[said[name] for name in SAID[1:]], hashlib.sha256(picture).hexdigest()])


def _is_drawn(path: Path, said: Mapping[str, str]) -> bool:
    """Whether a file is the one that was drawn with these words, and no link to another."""
    if path.is_symlink() or not path.is_file() or not said:
        return False
    return said["digest"] == _seal(said, path.read_bytes())


def _differs(path: Path, content: bytes) -> bool:
    return path.is_symlink() or not path.is_file() or path.read_bytes() != content


def _write(path: Path, content: bytes) -> list[Path]:
    """The path, where its content was another."""
    if not _differs(path, content):
        return []
    with aside(path) as file:
        file.write(content)
    return [path]
