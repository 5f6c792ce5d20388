"""`report`: run folders in, one HTML page out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from riglstm import __version__
from riglstm.lab.minigrid.runs import GridRun
from riglstm.lab.report import gallery, minigrid, page, probe, records
from riglstm.lab.report.activations import Summary, number
from riglstm.lab.report.groups import Group, group
from riglstm.lab.report.page import Html, Section
from riglstm.lab.report.probe import SCORING, SLEEPING, UNABLE, Loaded, open_run
from riglstm.lab.report.style import Picture
from riglstm.lab.tables.read_run import Record
from riglstm.lab.tables.render import text_table
from riglstm.lab.tasks.balls import Balls
from riglstm.lab.tasks.datasets import data_folder
from riglstm.lab.tasks.images import SequentialImages
from riglstm.lab.train.config import Fit
from riglstm.lab.train.devices import pick
from riglstm.lab.train.folder import atomic_write


@dataclass(frozen=True)
class Wanted:
    """What is drawn from weights; see `report`."""

    digits: Sequence[int] | None
    size: int
    step: int
    sample: int
    sequence: int
    models: Sequence[str] | None
    device: str
    data_dir: Path


@dataclass
class Draft:
    """A page in the making."""

    sections: list[Section]
    pictures: list[Picture]
    missing: list[str]
    show: Callable[[str], None]


def report(
    paths: Sequence[Path | str],
    out: Path | str,
    *,
    digits: Sequence[int] | None = None,
    size: int = 24,
    step: int = 289,
    sample: int = 64,
    sequence: int = 0,
    models: Sequence[str] | None = None,
    device: str = "cpu",
    data_dir: Path | None = None,
    figures: Path | None = None,
    show: Callable[[str], None] | None = None,
    warn: Callable[[str], None] | None = None,
) -> Path:
    """Draw everything that run folders hold, in one page; returns its path.

    Args:
        paths: folders of runs, or folders of such folders.
        out: the file, or a folder for report.html.
        digits: numbers of test images whose cells and scores are drawn; None: the first three
            that are of different classes.
        size: side of these images; 24 in the paper.
        step: where scores are drawn, counted from 1; 289 in the paper.
        sample: test images over which each cell's activity is averaged.
        sequence: number of the test sequence of balls that is rolled out.
        models: those of which weights are drawn, by name; None: all.
        device: as for training.
        data_dir: as for training, but nothing is downloaded.
        figures: a folder that takes every picture as a PNG file, too.
        show: hears in a line what takes long.
        warn: hears in a line of each run that cannot be read; the page names these, too.
    """
    for name, least, given in (
        ("size", 1, [size]),
        ("sample", 1, [sample]),
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
    out = page.file_of(Path(out))
    found = records.find(paths)
    draft = Draft([], [], [], show or (lambda line: None))
    known: list[Record] = []
    grids: list[GridRun] = []
    for path in found:
        try:
            run = records.read(path)
        except ValueError as error:
            draft.missing.append(f"{path} cannot be read: {error}")
            continue
        if isinstance(run, Record):
            known.append(run)
        else:
            grids.append(run)
    if not known and not grids:
        raise ValueError(f"expected runs, got none that can be read: {'; '.join(draft.missing)}")
    if warn is not None:
        for line in draft.missing:
            warn(line)
    known, copies = records.without_copies(known)
    grids = minigrid.once(grids, draft.missing)
    draft.missing += copies
    draft.missing += [record.describe() for record in known if record.state != "done"]
    there = dict.fromkeys(record.spec.name for record in known)
    there |= dict.fromkeys(grid.spec.name for grid in grids)
    for name in models or ():
        if name not in there:
            raise ValueError(f"--models must be some of {', '.join(there)}, got {name!r}")
    # A folder that is named is only read: a page of what is there downloads nothing.
    here = data_folder(data_dir)
    wanted = Wanted(digits, size, step, sample, sequence, models, device, here)
    for one in group(known) if known else ():
        _section(draft, one, wanted)
    states = [run.state for run in known] + [run.state for run in grids]
    if grids:
        body, pictures = minigrid.section(grids, models, device, draft.show, draft.missing)
        draft.sections.append(body)
        draft.pictures += pictures
    chosen = "weights are those chosen on validation data of the training condition"
    lead = (
        f"{len(found)} runs, {states.count('done')} of them done. Drawn by riglstm {__version__} "
        f"from the runs' folders alone{f'; {chosen}' if known else ''}."
    )
    text = page.page(
        "RigLSTM: report of runs",
        lead,
        [
            *([Section("What is missing", [page.missing(draft.missing)])] if draft.missing else []),
            *draft.sections,
            Section("Run records", [_record(record) for record in known]),
        ],
    )
    with atomic_write(out) as file:
        # A folder's name may hold bytes that are no text.
        file.write(text.encode(errors="replace"))
    if figures is not None:
        _write_figures(figures, draft.pictures)
    return out


def _section(draft: Draft, one: Group, wanted: Wanted) -> None:
    """A table, its figures, and what its weights show."""
    draft.missing += one.absent
    shown = text_table(one.table)
    body = [page.table(shown.title, shown.heads, shown.lines, shown.best)]
    body += [page.paragraph(note) for note in shown.notes]
    for setting in one.table.trained_on:
        for picture in (gallery.shift(one, setting), gallery.training(one, setting)):
            if picture is not None:
                body.append(_add(draft, picture))
    body += _from_weights(draft, one, wanted)
    draft.sections.append(Section(shown.title, body))


def _from_weights(draft: Draft, one: Group, wanted: Wanted) -> Iterator[Html]:
    """Pictures that need a network: of each model, its first seed that is done."""
    balls: dict[str, list[Loaded]] = {}
    unable: dict[str, None] = {}
    for (setting, label), runs in one.runs.items():
        done = [record for record in runs if record.state == "done"]
        if not done or (wanted.models is not None and done[0].spec.name not in wanted.models):
            continue
        task = done[0].spec.task_config()
        if isinstance(task, SequentialImages) and done[0].spec.model not in SCORING:
            unable[label] = None
        if not isinstance(task, Balls | SequentialImages) or label in unable:
            continue
        draft.show(f"drawing {label}, trained on {setting}")
        try:
            run = open_run(label, done[0].path, wanted.device, wanted.data_dir, draft.show)
        except UNABLE as error:
            draft.missing.append(f"pictures of {label} ({done[0].path}): {error}")
            continue
        if isinstance(task, Balls):
            balls.setdefault(setting, []).append(run)
        else:
            yield from _images(draft, run, wanted)
    if unable:
        yield page.paragraph(
            f"{', '.join(unable)}: no activation images and no score maps, as only "
            f"{', '.join(SLEEPING)} have cells that sleep, and only {', '.join(SCORING)} score "
            "both their input and their cells."
        )
    for opened in balls.values():
        for condition in opened[0].task.conditions:
            try:
                picture = gallery.balls(opened, condition, wanted.sequence)
            except ValueError as error:
                paths = ", ".join(str(run.path) for run in opened)
                draft.missing.append(
                    f"roll-outs of {paths} (--sequence {wanted.sequence}): {error}"
                )
                break
            yield _add(draft, picture)


def _images(draft: Draft, run: Loaded, wanted: Wanted) -> Iterator[Html]:
    task, condition = probe.image_task(run), f"{wanted.size}x{wanted.size}"
    digits = probe.first_of_each_class(task) if wanted.digits is None else tuple(wanted.digits)
    # All in one pass: a sequence of pixels takes long, more of them at a time hardly longer.
    more = range(min(wanted.sample, probe.test_size(task)))
    try:
        seen = probe.look(run, condition, (*digits, *more))
    except ValueError as error:
        given = f"--size {wanted.size}"
        if wanted.digits is not None:
            given = f"--digits {' '.join(map(str, digits))} {given}"
        draft.missing.append(f"pictures of {run.label} ({run.path}; {given}): {error}")
        return
    drawn = seen.take(slice(len(digits)))
    if run.spec.model in SLEEPING:
        yield _add(draft, gallery.cells(run, drawn))
        start = probe.before_training(run, wanted.data_dir)
        yield _summary_table(
            f"{run.label}: each cell over {len(more)} test images at {condition}, mean ± standard "
            "deviation over images; r is the correlation of being awake with the pixel",
            gallery.summaries(run, seen.take(slice(len(digits), None))),
            gallery.summaries(start, probe.look(start, condition, more)),
        )
    for picture in gallery.score_maps(run, drawn, wanted.step):
        yield _add(draft, picture)


Cells: TypeAlias = Sequence[tuple[str, list[Summary]]]
"""By layer, its name and its cells."""


def _summary_table(caption: str, after: Cells, before: Cells) -> Html:
    """The network before training stands beside: what it has is not learned."""
    rows = []
    for (name, learned), (_, drawn) in zip(after, before, strict=True):
        for j, (a, b) in enumerate(zip(learned, drawn, strict=True)):
            rows.append((f"{name} {j}".strip(), *_awake_and_r(a), *_awake_and_r(b)))
    head = ("cell", "awake", "r", "awake, untrained", "r, untrained")
    return page.table(caption, head, rows)


def _awake_and_r(cell: Summary) -> tuple[str, str]:
    (share, spread), (r, r_spread) = cell
    said = number(r) if number(r) == "–" else f"{number(r)} ± {r_spread:.2f}"
    return f"{100 * share:.1f} ± {100 * spread:.1f} %", said


def _add(draft: Draft, picture: Picture) -> Html:
    draft.pictures.append(picture)
    return page.figure(picture)


def _record(record: Record) -> Html:
    return page.record(
        f"{record.path.name} ({record.state})",
        {"folder": str(record.path), **records.facts(record)},
        {"config.json": records.config_text(record)},
    )


def _write_figures(folder: Path, pictures: Sequence[Picture]) -> None:
    for i, picture in enumerate(pictures, start=1):
        name = re.sub(r"[^a-z0-9]+", "-", picture.title.lower()).strip("-")[:80]
        with atomic_write(folder / f"{i:02}-{name}.{picture.kind}") as file:
            file.write(picture.png)
