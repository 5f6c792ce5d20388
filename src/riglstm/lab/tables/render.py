"""A table of text as Markdown, CSV and LaTeX, on the screen and in files."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from riglstm.lab.train.folder import atomic_write


@dataclass(frozen=True)
class Grid:
    """A table whose cells are ready to be printed."""

    name: str
    title: str
    heads: Sequence[str]
    lines: Sequence[Sequence[str]]
    lead: int
    """Columns before the figures, set to the left."""
    notes: Sequence[str] = ()
    """Plain text, as the cells are."""
    best: frozenset[tuple[int, int]] = frozenset()
    """Line and column of the cells that are set in bold."""


@dataclass(frozen=True)
class Rendered:
    """One table in three formats."""

    markdown: str
    csv: str
    latex: str

    def write(self, folder: Path, name: str) -> tuple[Path, ...]:
        """Files `name`.md, .csv and .tex, each whole or not at all; as `check`."""
        self.check(folder, name)
        for path, content in self._files(folder, name).items():
            with atomic_write(path) as file:
                file.write(content.encode())
        return tuple(self._files(folder, name))

    def check(self, folder: Path, name: str) -> None:
        """Raise ValueError where a file of these names is another's: it begins otherwise."""
        for path, content in self._files(folder, name).items():
            # The rest of a title has sizes, which may change.
            start = content.partition("\n")[0][:12]
            if path.exists() and not path.read_bytes().startswith(start.encode()):
                raise ValueError(
                    f"{path} must be a new file, or this table's, which begins with {start!r}, "
                    "got another; move it away, or give another folder"
                )

    def _files(self, folder: Path, name: str) -> dict[Path, str]:
        contents = {"md": self.markdown, "csv": self.csv, "tex": self.latex}
        return {folder / f"{name}.{suffix}": content for suffix, content in contents.items()}


def render(grid: Grid, head: Sequence[str], records: Sequence[Sequence[object]]) -> Rendered:
    """The grid for readers, and for programs its figures as records under a head."""
    return Rendered(markdown(grid), csv_text(head, records), latex(grid))


def number(x: float, digits: int = 1) -> str:
    """Rounded, thousands set apart."""
    return f"{x:,.{digits}f}"


def markdown(grid: Grid) -> str:
    """Its title above it and its notes below."""
    heads = [plain(cell) for cell in grid.heads]
    lines = [
        [f"**{plain(c)}**" if (i, j) in grid.best else plain(c) for j, c in enumerate(cells)]
        for i, cells in enumerate(grid.lines)
    ]
    # Columns of one width each, as the text is read in a terminal, too.
    widths = [max(3, *map(len, column)) for column in zip(heads, *lines, strict=True)]
    sides = "<" * grid.lead + ">" * (len(grid.heads) - grid.lead)
    rule = [
        "-" * width if side == "<" else "-" * (width - 1) + ":"
        for width, side in zip(widths, sides, strict=True)
    ]
    body = [
        " | ".join(f"{c:{s}{w}}" for c, s, w in zip(cells, sides, widths, strict=True))
        for cells in (heads, rule, *lines)
    ]
    body = [f"| {line} |" for line in body]
    notes = [f"- {plain(note)}" for note in grid.notes]
    parts = [f"**{plain(grid.title)}**", "\n".join(body), "\n".join(notes)]
    return "\n\n".join(part for part in parts if part) + "\n"


def plain(said: str) -> str:
    """Text as Markdown prints it: no markup, no cell and no line ends in it."""
    # An underscore inside a word is none of Markdown's.
    marks = r"[\\|<>*\[\]$~]|(?<![^\W_])_|_(?![^\W_])|^[#+-](?=\s)"
    return re.sub(marks, r"\\\g<0>", " ".join(said.split()))


def csv_text(head: Sequence[str], records: Sequence[Sequence[object]]) -> str:
    """Lines of a CSV file; None is an empty field."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows((head, *records))
    return out.getvalue()


_SIGNS = {
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    **{"±": r"$\pm$", "–": "--", "×": r"$\times$", "−": r"$-$", "√": r"$\surd$"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
}


def escape(said: str) -> str:
    """Text as LaTeX prints it."""
    return "".join(_SIGNS.get(sign, sign) for sign in said)


def latex(grid: Grid) -> str:
    """A table environment, for documents with the packages booktabs and graphicx."""
    shown = [
        [
            rf"\textbf{{{escape(c)}}}" if (i, j) in grid.best else escape(c)
            for j, c in enumerate(cells)
        ]
        for i, cells in enumerate(grid.lines)
    ]
    lines = [" & ".join(cells) + r" \\" for cells in ([*map(escape, grid.heads)], *shown)]
    notes = [rf"\par {escape(note)}" for note in grid.notes]
    below = [r"\begin{minipage}{\linewidth}\footnotesize", *notes, r"\end{minipage}"]
    return "\n".join(
        (
            *(r"\begin{table*}", r"\centering"),
            *(rf"\caption{{{escape(grid.title)}}}", rf"\label{{tab:{grid.name}}}"),
            r"\resizebox{\linewidth}{!}{%",
            rf"\begin{{tabular}}{{{'l' * grid.lead}{'r' * (len(grid.heads) - grid.lead)}}}",
            *(r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule"),
            r"\end{tabular}}",
            *(below if notes else ()),
            *(r"\end{table*}", ""),
        )
    )
