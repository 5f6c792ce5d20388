"""One HTML file that needs nothing else: styles and pictures inside, no script, no network.

Every function takes plain text and escapes it; `Html` is text that is markup already.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple, NewType

from riglstm.lab.report.style import Picture

Html = NewType("Html", str)

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


class Section(NamedTuple):
    """A part of the page, with its place in the contents."""

    title: str
    body: Sequence[Html]


def page(title: str, lead: str, sections: Sequence[Section]) -> str:
    """The whole file."""
    anchors = _anchors([section.title for section in sections])
    links = "".join(
        f'<li><a href="#{anchor}">{escape(section.title)}</a></li>\n'
        for anchor, section in zip(anchors, sections, strict=True)
    )
    parts = [
        HEAD.format(title=escape(title), style=STYLE),
        f'<header>\n<h1>{escape(title)}</h1>\n<p class="lead">{escape(lead)}</p>\n</header>\n',
        f'<nav aria-label="Contents">\n<ul>\n{links}</ul>\n</nav>\n<main>\n',
    ]
    for anchor, section in zip(anchors, sections, strict=True):
        parts.append(f'<section id="{anchor}">\n<h2>{escape(section.title)}</h2>\n')
        parts += section.body
        parts.append("</section>\n")
    return "".join([*parts, "</main>\n</body>\n</html>\n"])


def heading(text: str) -> Html:
    """A heading inside a section."""
    return Html(f"<h3>{escape(text)}</h3>\n")


def paragraph(text: str) -> Html:
    """Running text."""
    return Html(f"<p>{escape(text)}</p>\n")


def figure(picture: Picture) -> Html:
    """A picture with its caption, the file inside the page."""
    data = f"data:image/{picture.kind};base64,{base64.b64encode(picture.png).decode()}"
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
    for i, (first, *cells) in enumerate(rows):
        tds = "".join(
            f"<td{_kind(cell)}><strong>{escape(cell)}</strong></td>"
            if (i, j) in best
            else f"<td{_kind(cell)}>{escape(cell)}</td>"
            for j, cell in enumerate(cells, start=1)
        )
        body += f'<tr><th scope="row">{escape(first)}</th>{tds}</tr>\n'
    # A region that scrolls has to be reached by the keyboard.
    return Html(
        f'<div class="scroll" role="region" aria-label="{escape(caption)}" tabindex="0">\n'
        f"<table>\n<caption>{escape(caption)}</caption>\n<thead><tr>{head}</tr></thead>\n"
        f"<tbody>\n{body}</tbody>\n</table>\n</div>\n"
    )


def missing(items: Sequence[str]) -> Html:
    """What a reader may look for in vain, and why."""
    listed = "".join(f"<li>{escape(item)}</li>\n" for item in items)
    return Html(f'<div class="missing">\n<p>Missing</p>\n<ul>\n{listed}</ul>\n</div>\n')


def record(title: str, facts: Mapping[str, str], text: Mapping[str, str]) -> Html:
    """A run's facts as a table, and whole files of it, folded away."""
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td class="text">{escape(value)}</td></tr>\n'
        for name, value in facts.items()
    )
    files = "".join(
        f"<h3>{escape(name)}</h3>\n<pre>{escape(content)}</pre>\n" for name, content in text.items()
    )
    return Html(
        f"<details>\n<summary>{escape(title)}</summary>\n"
        f"<table>\n<tbody>\n{rows}</tbody>\n</table>\n{files}</details>\n"
    )


def _kind(cell: str) -> str:
    return "" if re.match(r"[-+−–±<]?\s*\d|^[–-]?$", cell) else ' class="text"'


def _anchors(titles: Sequence[str]) -> list[str]:
    """An id for each title, no two alike."""
    anchors: list[str] = []
    for title in titles:
        name = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "part"
        while name in anchors:
            name += "-"
        anchors.append(name)
    return anchors


def file_of(out: Path) -> Path:
    """Where the page goes; checked before anything is drawn."""
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
