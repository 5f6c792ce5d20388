"""`report`: run folders in, one HTML page out.

The page needs nothing else: styles and pictures inside, no script, no network. Every function that
makes HTML takes plain text and escapes it; `Html` is text that is markup already.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import NamedTuple, NewType

from riglstm import __version__
from riglstm.lab.minigrid.table import GridRun
from riglstm.lab.report import cells, minigrid
from riglstm.lab.report.cells import SCORING, SLEEPING, UNABLE, Loaded, open_run
from riglstm.lab.report.curves import Picture, shift_picture, training_picture
from riglstm.lab.report.runs import Group, find, group, read, without_copies
from riglstm.lab.tables.result import Record
from riglstm.lab.tables.table import TextTable, text_table
from riglstm.lab.tasks.balls import Balls
from riglstm.lab.tasks.copying import Copying
from riglstm.lab.tasks.datasets import data_folder
from riglstm.lab.tasks.images import SequentialImages
from riglstm.lab.train.config import Fit, pick
from riglstm.lab.train.folder import atomic_write

Html = NewType("Html", str)


class Section(NamedTuple):
    """A part of the page, with its place in the contents."""

    title: str
    body: Sequence[Html]


@dataclass
class Draft:
    """A page in the making: what is to be drawn from weights, see `report`, and what there is."""

    digits: Sequence[int] | None
    size: int
    step: int
    sequence: int
    models: Sequence[str] | None
    device: str
    data_dir: Path
    show: Callable[[str], None]
    sections: list[Section] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def figure(self, picture: Picture) -> Html:
        """The markup of a picture, which is also kept as a file of its own."""
        self.pictures.append(picture)
        return figure(picture)


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
    figures: Path | None = None,
    show: Callable[[str], None] | None = None,
    warn: Callable[[str], None] | None = None,
) -> Path:
    """Draw everything that run folders hold, in one page; returns its path.

    `out`: the file, or a folder for report.html; `show` hears in a line of what takes long, `warn`
    of each run that cannot be read. The other options are those of `riglstm report --help`.
    """
    for name, least, given in (
        ("size", 1, [size]),
        ("sequence", 0, [sequence]),
        ("digits", 0, digits or ()),
    ):
        if any(one < least for one in given):
            said = " ".join(map(str, given))
            raise ValueError(f"--{name} must be from {least} on, got {said}")
    pick(Fit(device=device))
    if not 1 <= step <= size**2:
        raise ValueError(
            f"the step must be from 1 to size² = {size**2}, the pixels of an image, got {step}; "
            "give another --step, or a larger --size"
        )
    out, found = _file_of(Path(out)), find(paths)
    # A folder that is named is only read: a page of what is there downloads nothing.
    here, silent = data_folder(data_dir), lambda line: None
    draft = Draft(digits, size, step, sequence, models, device, here, show or silent)
    known, grids = _read_all(found, draft.missing)
    if warn is not None:
        for line in draft.missing:
            warn(line)
    known, copies = without_copies(known)
    grids, grid_copies = without_copies(grids)
    draft.missing += [*grid_copies, *copies]
    draft.missing += [record.describe() for record in known if record.state != "done"]
    there = dict.fromkeys([*(run.spec.name for run in known), *(run.spec.name for run in grids)])
    for name in models or ():
        if name not in there:
            raise ValueError(f"--models must be some of {', '.join(there)}, got {name!r}")
    for one in group(known) if known else ():
        _add_group(draft, one)
    if grids:
        found_tables, notes, pictures = minigrid.results(
            grids, models, device, draft.show, draft.missing
        )
        body = [html for one in found_tables for html in _table_and_notes(text_table(one))]
        body += map(paragraph, notes)
        draft.sections.append(Section("MiniGrid", [*body, *map(draft.figure, pictures)]))
    done = sum(run.state == "done" for run in (*known, *grids))
    chosen = "weights are those chosen on validation data of the training condition"
    text = render_page(
        "RigLSTM: report of runs",
        f"{len(found)} runs, {done} of them done. Drawn by riglstm {__version__} "
        f"from the runs' folders alone{f'; {chosen}' if known else ''}.",
        [
            *([Section("What is missing", [missing_list(draft.missing)])] if draft.missing else []),
            *draft.sections,
            Section("Run records", [run_record(record) for record in known]),
        ],
    )
    with atomic_write(out) as file:
        # A folder's name may hold bytes that are no text.
        file.write(text.encode(errors="replace"))
    if figures is not None:
        for i, picture in enumerate(draft.pictures, start=1):
            name = re.sub(r"[^a-z0-9]+", "-", picture.title.lower()).strip("-")[:80]
            with atomic_write(figures / f"{i:02}-{name}.png") as file:
                file.write(picture.png)
    return out


def _read_all(found: Sequence[Path], missing: list[str]) -> tuple[list[Record], list[GridRun]]:
    """The runs on tasks and those on MiniGrid; adds to `missing` those that cannot be read."""
    known: list[Record] = []
    grids: list[GridRun] = []
    for path in found:
        try:
            run = read(path)
        except ValueError as error:
            missing.append(f"{path} cannot be read: {error}")
            continue
        if isinstance(run, Record):
            known.append(run)
        else:
            grids.append(run)
    if not known and not grids:
        raise ValueError(f"expected runs, got none that can be read: {'; '.join(missing)}")
    return known, grids


def _file_of(out: Path) -> Path:
    """The file of the page; a place that cannot be is refused before anything is drawn."""
    file = out if out.suffix in (".html", ".htm") else out / "report.html"
    if file.is_dir():
        raise ValueError(f"out must be a file, or a folder for report.html, got the folder {file}")
    for above in file.parents:
        if above.exists() and not above.is_dir():
            raise ValueError(
                f"out must be a file that ends in .html, or a folder for report.html, got {out}, "
                f"and {above} is a file; give another"
            )
    return file


def _add_group(draft: Draft, one: Group) -> None:
    """Add a table, its figures, and what its weights show."""
    if one.table.missing:
        draft.missing.append(f"{one.table.title}: not run yet: {one.table.missing}")
    shown = text_table(one.table)
    body = [*_sequences(draft, one), *_table_and_notes(shown)]
    for setting in one.table.trained_on:
        for picture in (shift_picture(one, setting), training_picture(one, setting)):
            if picture is not None:
                body.append(draft.figure(picture))
    body += _from_weights(draft, one)
    draft.sections.append(Section(shown.title, body))


def _table_and_notes(shown: TextTable) -> list[Html]:
    return [
        table(shown.title, shown.heads, shown.lines, shown.best),
        *map(paragraph, shown.notes),
    ]


def _first_done(draft: Draft, one: Group) -> Iterator[tuple[str, str, Record]]:
    """The first seed that is done of each model that is to be drawn: setting, label, record."""
    for (setting, label), runs in one.runs.items():
        done = [record for record in runs if record.state == "done"]
        if done and (draft.models is None or done[0].spec.name in draft.models):
            yield setting, label, done[0]


def _open(draft: Draft, setting: str, label: str, record: Record) -> Loaded | None:
    """A run with its network; one that cannot be opened is noted, and None."""
    draft.show(f"drawing {label}, trained on {setting}")
    try:
        return open_run(label, record.path, draft.device, draft.data_dir, draft.show)
    except UNABLE as error:
        draft.missing.append(f"pictures of {label} ({record.path}): {error}")
        return None


def _sequences(draft: Draft, one: Group) -> Iterator[Html]:
    """When cells wake while they copy."""
    for setting, label, record in _first_done(draft, one):
        if record.spec.model in SLEEPING and isinstance(record.spec.task_config(), Copying):
            run = _open(draft, setting, label, record)
            if run is not None:
                yield draft.figure(cells.sequence_picture(run))


def _from_weights(draft: Draft, one: Group) -> Iterator[Html]:
    """The pictures of images and balls that need a network."""
    balls: dict[str, list[Loaded]] = {}
    unable: dict[str, None] = {}
    for setting, label, record in _first_done(draft, one):
        task = record.spec.task_config()
        if isinstance(task, SequentialImages) and record.spec.model not in SCORING:
            unable[label] = None
        if not isinstance(task, Balls | SequentialImages) or label in unable:
            continue
        run = _open(draft, setting, label, record)
        if run is None:
            continue
        if isinstance(task, Balls):
            balls.setdefault(setting, []).append(run)
        else:
            yield from _images(draft, run)
    if unable:
        yield paragraph(
            f"{', '.join(unable)}: no activation images and no score maps, as only "
            f"{', '.join(SLEEPING)} have cells that sleep, and only {', '.join(SCORING)} score "
            "both their input and their cells."
        )
    for opened in balls.values():
        for condition in opened[0].task.conditions:
            try:
                picture = cells.rollout_picture(opened, condition, draft.sequence)
            except ValueError as error:
                paths = ", ".join(str(run.path) for run in opened)
                draft.missing.append(f"roll-outs of {paths} (--sequence {draft.sequence}): {error}")
                break
            yield draft.figure(picture)


def _images(draft: Draft, run: Loaded) -> Iterator[Html]:
    """What the cells of a network do on test images."""
    task, condition = cells.image_task(run), f"{draft.size}x{draft.size}"
    digits = cells.first_of_each_class(task) if draft.digits is None else tuple(draft.digits)
    try:
        drawn = cells.look(run, condition, digits)
    except ValueError as error:
        given = f"--size {draft.size}"
        if draft.digits is not None:
            given = f"--digits {' '.join(map(str, digits))} {given}"
        draft.missing.append(f"pictures of {run.label} ({run.path}; {given}): {error}")
        return
    if run.spec.model in SLEEPING:
        yield draft.figure(cells.activation_picture(run, drawn))
    for picture in cells.score_pictures(run, drawn, draft.step):
        yield draft.figure(picture)


# The policy makes a browser hold to it: nothing is loaded, nothing runs.
HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
"""

STYLE = """
:root { --ink: #1b1b1b; --faint: #5c5c5c; --paper: #ffffff; --card: #f5f6f7; --line: #d4d7da;
  --link: #005a8e; --warn: #8a3b00; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e8; --faint: #a9adb1; --paper: #16181a;
  --card: #212427; --line: #3a3f44; --link: #6cb8ea; --warn: #ffb380; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 68rem; padding: 1.5rem 1rem 4rem; color: var(--ink);
  background: var(--paper); font: 1rem/1.5 system-ui, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.8rem; line-height: 1.2; margin: 0 0 .5rem; }
h2 { font-size: 1.35rem; margin: 2.5rem 0 .5rem; border-top: 1px solid var(--line);
  padding-top: 1.2rem; }
h3 { font-size: 1.08rem; margin: 1.6rem 0 .4rem; }
a { color: var(--link); }
nav ul { padding-left: 1.2rem; margin: .3rem 0; }
.lead, figcaption, caption { color: var(--faint); }
.missing { border-left: 4px solid var(--warn); background: var(--card); padding: .6rem 1rem; }
.missing p { margin: .2rem 0; font-weight: 600; color: var(--warn); }
.missing ul { margin: .2rem 0; padding-left: 1.2rem; }
figure { margin: 1.2rem 0; }
figure img { display: block; max-width: 100%; height: auto; background: #ffffff; padding: .6rem;
  border: 1px solid var(--line); border-radius: 6px; }
figcaption { font-size: .92rem; margin-top: .5rem; max-width: 60rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .92rem; margin: .8rem 0; }
caption { text-align: left; padding-bottom: .4rem; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line); text-align: right;
  font-variant-numeric: tabular-nums; vertical-align: top; }
th[scope="row"], thead th:first-child { text-align: left; }
thead th { border-bottom: 2px solid var(--line); }
td.text { text-align: left; }
details { margin: .4rem 0; }
summary { cursor: pointer; }
pre { background: var(--card); padding: .7rem 1rem; overflow-x: auto; font-size: .85rem;
  border-radius: 6px; }
@media print { details > * { display: block; } body { max-width: none; } }
"""


def render_page(title: str, lead: str, sections: Sequence[Section]) -> str:
    """The whole HTML file."""
    links = "".join(
        f'<li><a href="#part-{i}">{escape(section.title)}</a></li>\n'
        for i, section in enumerate(sections)
    )
    parts = [
        HEAD.format(title=escape(title), style=STYLE),
        f'<header>\n<h1>{escape(title)}</h1>\n<p class="lead">{escape(lead)}</p>\n</header>\n',
        f'<nav aria-label="Contents">\n<ul>\n{links}</ul>\n</nav>\n<main>\n',
    ]
    for i, section in enumerate(sections):
        parts.append(f'<section id="part-{i}">\n<h2>{escape(section.title)}</h2>\n')
        parts += section.body
        parts.append("</section>\n")
    return "".join([*parts, "</main>\n</body>\n</html>\n"])


def paragraph(text: str) -> Html:
    """A paragraph of text."""
    return Html(f"<p>{escape(text)}</p>\n")


def figure(picture: Picture) -> Html:
    """A picture with its caption, the file inside the page."""
    data = f"data:image/png;base64,{base64.b64encode(picture.png).decode()}"
    return Html(
        f'<figure>\n<img alt="{escape(picture.alt)}" src="{data}">\n'
        f"<figcaption><strong>{escape(picture.title)}.</strong> {escape(picture.caption)}"
        "</figcaption>\n</figure>\n"
    )


def table(
    caption: str,
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    best: Collection[tuple[int, int]] = (),
) -> Html:
    """A table whose first column names its rows; cells that are no figures stand on the left.

    `best`: row and column of cells in bold.
    """
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    body = ""
    for i, (first, *others) in enumerate(rows):
        tds = ""
        for j, cell in enumerate(others, start=1):
            said = f"<strong>{escape(cell)}</strong>" if (i, j) in best else escape(cell)
            tds += f"<td{_kind(cell)}>{said}</td>"
        body += f'<tr><th scope="row">{escape(first)}</th>{tds}</tr>\n'
    # A region that scrolls has to be reached by the keyboard.
    return Html(
        f'<div class="scroll" role="region" aria-label="{escape(caption)}" tabindex="0">\n'
        f"<table>\n<caption>{escape(caption)}</caption>\n<thead><tr>{head}</tr></thead>\n"
        f"<tbody>\n{body}</tbody>\n</table>\n</div>\n"
    )


def missing_list(items: Sequence[str]) -> Html:
    """A list of what is missing, and why."""
    listed = "".join(f"<li>{escape(item)}</li>\n" for item in items)
    return Html(f'<div class="missing">\n<p>Missing</p>\n<ul>\n{listed}</ul>\n</div>\n')


def run_record(record: Record) -> Html:
    """What leads from a figure back to its run: the run's own files, folded away."""
    chosen = {name: value for name, value in record.result.items() if name != "rows"}
    files = {
        "config.json": record.spec.resolved(),
        "run.json": record.run,
        "result.json, without its rows": chosen,
    }
    shown = "".join(
        f"<h3>{name}</h3>\n<pre>{escape(json.dumps(content, indent=1))}</pre>\n"
        for name, content in files.items()
        if content
    )
    return Html(
        f"<details>\n<summary>{escape(f'{record.path} ({record.state})')}</summary>\n{shown}"
        "</details>\n"
    )


def _kind(cell: str) -> str:
    return "" if re.match(r"[-+−–±<]?\s*\d|^[–-]?$", cell) else ' class="text"'
