"""`report`: run folders in, one HTML page out.

The page needs nothing else: styles and pictures inside, no script, no network. Every function that
makes HTML takes plain text and escapes it.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import NamedTuple, TypeAlias

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
<header>
<h1>{title}</h1>
<p>{lead}</p>
</header>
<nav aria-label="Contents">
<ul>
{links}</ul>
</nav>
<main>
"""

STYLE = """
:root { --ink: #1b1b1b; --paper: #ffffff; --card: #f5f6f7; --line: #d4d7da; --link: #005a8e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e8; --paper: #16181a; --card: #212427;
  --line: #3a3f44; --link: #6cb8ea; } }
body { margin: 0 auto; max-width: 68rem; padding: 1.5rem 1rem 4rem; color: var(--ink);
  background: var(--paper); font: 1rem/1.5 system-ui, "Segoe UI", Roboto, sans-serif; }
h2 { margin-top: 2.5rem; border-top: 1px solid var(--line); padding-top: 1.2rem; }
a { color: var(--link); }
figure { margin: 1.2rem 0; }
figure img { box-sizing: border-box; max-width: 100%; background: #ffffff; padding: .6rem;
  border: 1px solid var(--line); border-radius: 6px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption, th, td.lead { text-align: left; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line); }
td { text-align: right; }
pre { background: var(--card); padding: .7rem 1rem; overflow-x: auto; }
"""


def render_page(title: str, lead: str, sections: Sequence[Section]) -> str:
    """The whole HTML file."""
    links, body = "", ""
    for i, section in enumerate(sections):
        heading = escape(section.title)
        links += f'<li><a href="#part-{i}">{heading}</a></li>\n'
        parts = "".join(map(html, section.parts))
        body += f'<section id="part-{i}">\n<h2>{heading}</h2>\n{parts}</section>\n'
    head = HEAD.format(title=escape(title), lead=escape(lead), style=STYLE, links=links)
    return f"{head}{body}</main>\n</body>\n</html>\n"


def html(part: Part) -> str:
    """A part of a section as markup."""
    if isinstance(part, str):
        return f"<p>{escape(part)}</p>\n"
    if isinstance(part, list):
        items = "".join(f"<li>{escape(item)}</li>\n" for item in part)
        return f"<ul>\n{items}</ul>\n"
    if isinstance(part, Picture):
        data = f"data:image/png;base64,{base64.b64encode(part.png).decode()}"
        title, caption = escape(part.title), escape(part.caption)
        return (
            f'<figure>\n<img alt="{title}" src="{data}" />\n'
            f"<figcaption><strong>{title}.</strong> {caption}</figcaption>\n</figure>\n"
        )
    return _table(part) if isinstance(part, TextTable) else _run_record(part)


def _table(shown: TextTable) -> str:
    """A table whose first column names its rows, and its notes."""
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in shown.heads)
    body = ""
    for i, (first, *others) in enumerate(shown.lines):
        tds = ""
        for j, cell in enumerate(others, start=1):
            said = f"<strong>{escape(cell)}</strong>" if (i, j) in shown.best else escape(cell)
            tds += f"<td>{said}</td>" if j >= shown.lead else f'<td class="lead">{said}</td>'
        body += f'<tr><th scope="row">{escape(first)}</th>{tds}</tr>\n'
    title = escape(shown.title)
    # A region that scrolls has to be reached by the keyboard.
    return (
        f'<div class="scroll" role="region" aria-label="{title}" tabindex="0">\n'
        f"<table>\n<caption>{title}</caption>\n<thead><tr>{head}</tr></thead>\n"
        f"<tbody>\n{body}</tbody>\n</table>\n</div>\n{html(list(shown.notes))}"
    )


def _run_record(record: Record) -> str:
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
    return (
        f"<details>\n<summary>{escape(f'{record.path} ({record.state})')}</summary>\n{shown}"
        "</details>\n"
    )
