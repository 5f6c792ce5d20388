"""`report`: run folders in, one HTML page out.

The page needs nothing else: styles and pictures inside, no script, no network. `page.html` beside
this file is its template.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from riglstm import __version__
from riglstm.lab.report import cells, minigrid
from riglstm.lab.report.cells import SLEEPING, Loaded
from riglstm.lab.report.curves import Picture, shift, shift_picture, training_picture
from riglstm.lab.report.runs import Group, group, read, without_copies
from riglstm.lab.tables.recipes import chosen
from riglstm.lab.tables.result import Record
from riglstm.lab.tables.run import load
from riglstm.lab.tables.table import TextTable, text_table
from riglstm.lab.tasks import MINIGRID
from riglstm.lab.tasks.balls import Balls
from riglstm.lab.tasks.copying import Copying
from riglstm.lab.tasks.datasets import data_folder
from riglstm.lab.tasks.images import SequentialImages
from riglstm.lab.train.config import Fit, pick
from riglstm.lab.train.folder import atomic_write

TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    undefined=StrictUndefined,
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)

Part: TypeAlias = "str | list[str] | Picture | TextTable | Record"
"""What a section has: a paragraph, a list, a figure, a table with its notes, or a run's files."""


class Section(NamedTuple):
    """A part of the page, with its place in the contents."""

    title: str
    parts: Sequence[Part]


@dataclass(frozen=True)
class Networks:
    """What is to be drawn from weights, see `report`, and what cannot be."""

    digits: Sequence[int] | None
    size: int
    step: int
    sequence: int
    models: Sequence[str] | None
    device: str
    data_dir: Path
    show: Callable[[str], None]
    missing: list[str]

    def pictures(self, group: Group) -> Iterator[Picture]:
        """What the networks of a table do: of each model the first seed that is done."""
        balls: dict[str, list[Loaded]] = {}
        for (setting, label), runs in group.runs.items():
            first = next((record for record in runs if record.state == "done"), None)
            if first is None or (self.models is not None and first.spec.name not in self.models):
                continue
            task, model = first.spec.task_config(), first.spec.model
            kinds = cells.pictures(model, self.step) if isinstance(task, SequentialImages) else {}
            copying = isinstance(task, Copying) and model in SLEEPING
            if not (kinds or copying or isinstance(task, Balls)):
                continue
            self.show(f"drawing {label}, trained on {setting}")
            try:
                opened = load(first.path, self.device, self.data_dir, self.show)
                run = Loaded(label, first.path, *opened)
                if copying:
                    yield cells.sequence_picture(run)
                elif kinds:
                    seen = cells.read_images(run, f"{self.size}x{self.size}", self.digits)
                    yield from (draw(run, seen) for draw in kinds.values())
                else:
                    balls.setdefault(setting, []).append(run)
            # What a network raises that cannot be built or run as its folder says.
            except (ValueError, TypeError, RuntimeError, OSError) as error:
                self.missing.append(f"pictures of {label} ({first.path}): {error}")
        for runs_on_balls in balls.values():
            try:
                for condition in runs_on_balls[0].task.conditions:
                    yield cells.rollout_picture(runs_on_balls, condition, self.sequence)
            except ValueError as error:
                said = ", ".join(str(run.path) for run in runs_on_balls)
                self.missing.append(f"roll-outs of {said} (--sequence {self.sequence}): {error}")


def report(
    paths: Sequence[Path | str],
    out: Path | str,
    *,
    digits: Sequence[int] | None = None,
    size: int = 24,
    step: int = 289,
    sequence: int = 0,
    models: Sequence[str] | None = None,
    device: str = "cpu",
    data_dir: Path | None = None,
    figures: Path | str | None = None,
    show: Callable[[str], None] = lambda line: None,
    warn: Callable[[str], None] = lambda line: None,
) -> Path:
    """Draw everything that run folders hold, in one page; returns its path.

    `out`: the file, or a folder for report.html; `show` hears in a line of what takes long, `warn`
    of each run that cannot be read. The other options are those of `riglstm report --help`.
    """
    pick(Fit(device=device))
    if not 1 <= step <= size**2:
        raise ValueError(
            f"the step must be from 1 to size² = {size**2}, the pixels of an image, got {step}; "
            "give another --step, or a larger --size"
        )
    (found, unread), out = read(paths), Path(out)
    chosen("--models", dict.fromkeys(run.spec.name for run in found), models or ())
    if out.suffix not in (".html", ".htm"):
        out /= "report.html"
    # A place that cannot be is refused before anything is drawn.
    out.parent.mkdir(parents=True, exist_ok=True)
    for line in unread:
        warn(line)
    runs, copies = without_copies(found)
    known = [run for run in runs if run.spec.task != MINIGRID]
    grids = [run for run in runs if run.spec.task == MINIGRID]
    missing = [*unread, *copies, *(run.describe() for run in runs if run.state != "done")]
    # A folder that is named is only read: a page of what is there downloads nothing.
    here = data_folder(data_dir)
    networks = Networks(digits, size, step, sequence, models, device, here, show, missing)
    sections = [_section(one, networks) for one in (group(known) if known else ())]
    if grids:
        sections.append(Section("MiniGrid", minigrid.results(grids, missing)))
    done = sum(run.state == "done" for run in runs)
    weights = "; weights are those chosen on validation data of the training condition"
    text = render_page(
        "RigLSTM: report of runs",
        f"{len(found) + len(unread)} runs, {done} of them done. Drawn by riglstm {__version__} "
        f"from the runs' folders alone{weights if known else ''}.",
        [
            *([Section("What is missing", [missing])] if missing else []),
            *sections,
            Section("Run records", runs),
        ],
    )
    with atomic_write(out) as file:
        # A folder's name may hold bytes that are no text.
        file.write(text.encode(errors="replace"))
    if figures is not None:
        drawn = (part for one in sections for part in one.parts if isinstance(part, Picture))
        for i, picture in enumerate(drawn, start=1):
            name = re.sub(r"[^a-z0-9]+", "-", picture.title.lower()).strip("-")[:80]
            with atomic_write(Path(figures) / f"{i:02}-{name}.png") as file:
                file.write(picture.png)
    return out


def _section(one: Group, networks: Networks) -> Section:
    """A table, its figures, and what its weights show."""
    if one.table.missing:
        networks.missing.append(f"{one.table.title}: not run yet: {one.table.missing}")
    shown = text_table(one.table)
    parts: list[Part] = [shown]
    for setting in one.table.trained_on:
        if (what := shift(one.table, setting)) is not None:
            parts.append(shift_picture(what))
        if (curves := training_picture(one, setting)) is not None:
            parts.append(curves)
    drawn = list(networks.pictures(one))
    # The cells are what a page on copying is about, and are few.
    copying = one.table.name == "copying"
    return Section(shown.title, [*drawn, *parts] if copying else [*parts, *drawn])


def render_page(title: str, lead: str, sections: Sequence[Section]) -> str:
    """The whole HTML file; the template escapes what it is given."""
    page = TEMPLATES.get_template("page.html")
    return page.render(title=title, lead=lead, sections=sections, base64=_base64, files=_files)


def _base64(file: bytes) -> str:
    return base64.b64encode(file).decode()


def _files(record: Record) -> list[tuple[str, str]]:
    """The name and the text of each of a run's files."""
    chosen = {name: value for name, value in record.result.items() if name != "rows"}
    files = {
        "config.json": record.spec.resolved(),
        "run.json": record.run,
        "result.json, without its rows": chosen,
    }
    return [(name, json.dumps(content, indent=1)) for name, content in files.items() if content]
