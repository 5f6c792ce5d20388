"""Draw the pictures of gallery.md by the code that stands on that page.

Usage, in the root of the repository: python docs/gallery.py [FOLDER]
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import torch

DOCS = Path(__file__).resolve().parent


def draw(folder: Path) -> None:
    """Run every block of Python on the page; what it writes goes to the folder."""
    page = (DOCS / "gallery.md").read_text(encoding="utf-8")
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    weights, here = str(DOCS.parent / "weights"), Path.cwd()
    names: dict[str, Any] = {"torch": torch}
    torch.manual_seed(0)
    os.chdir(folder)
    try:
        for block in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S):
            with torch.no_grad():
                exec(block.replace('"weights/', f'"{weights}/'), names)
    finally:
        os.chdir(here)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        draw(Path(sys.argv[1]))
    else:
        draw(DOCS / "gallery")
        (DOCS / "gallery" / "trace.json").unlink()
