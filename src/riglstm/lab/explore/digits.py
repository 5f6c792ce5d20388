"""Ten digits to start from, drawn as strokes: pictures that need no data set.

A stroke is a line through points of a 28 × 28 picture, of the size and place of MNIST's digits.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor

SIDE = 28
"""Of the pictures that are drawn, as MNIST's."""
RADIUS = 1.25
"""Half the width of the pen, in pixels."""

Stroke: TypeAlias = list[tuple[float, float]]


def arc(x: float, y: float, across: float, down: float, start: int, end: int) -> Stroke:
    """Points of an ellipse from one angle to another, in degrees: 0 is right, 90 is down."""
    count = abs(end - start) // 10
    angles = (math.radians(start + (end - start) * i / count) for i in range(count + 1))
    return [(x + across * math.cos(a), y + down * math.sin(a)) for a in angles]


STROKES: dict[str, list[Stroke]] = {
    "0": [arc(14, 14, 5.5, 8.5, -60, 300)],
    "1": [[(16, 5), (13.5, 14), (12, 23)]],
    "2": [[*arc(13.5, 9.5, 5, 4.5, 190, 390), (8, 22), (12, 21), (21, 22)]],
    "3": [[*arc(13, 9.2, 5, 4.2, 210, 450), *arc(13, 18, 6, 4.8, -90, 150)]],
    "4": [[(10, 5), (8, 14), (19, 14)], [(18.5, 6), (17, 14), (16, 23)]],
    "5": [[(20, 6), (11, 6), (10, 12.5), *arc(12.5, 17, 6, 5, -80, 140)]],
    "6": [[(15, 4.5), (11, 10), (9, 15), (9, 19), *arc(13.5, 19, 4.6, 3.8, 180, -180)]],
    "7": [[(7, 7), (20, 7), (17, 13), (13, 23)]],
    "8": [arc(14, 9, 4.5, 4, 90, 450), arc(14, 18, 5, 4.8, -90, 270)],
    "9": [arc(13.5, 10, 4.8, 4.5, 0, 360), [(18.3, 10), (17.5, 16), (15.5, 23)]],
}


def drawn(strokes: list[Stroke]) -> Tensor:
    """The picture of strokes, (28, 28) uint8: 255 where the pen was, else 0."""
    y, x = torch.meshgrid(*[torch.arange(SIDE) + 0.5] * 2, indexing="ij")
    ink = torch.zeros(SIDE, SIDE, dtype=torch.bool)
    for stroke in strokes:
        for (x0, y0), (x1, y1) in pairwise(stroke):
            dx, dy = x1 - x0, y1 - y0
            # The nearest point of the line, for every pixel.
            along = ((x - x0) * dx + (y - y0) * dy) / (dx * dx + dy * dy)
            along = along.clamp(0, 1)
            ink |= (x - x0 - along * dx) ** 2 + (y - y0 - along * dy) ** 2 <= RADIUS**2
    return 255 * ink.to(torch.uint8)
