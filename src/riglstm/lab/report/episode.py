"""An episode of an agent: its frames, and beside them what each cell did, as PNG and as GIF.

Shapes: T steps, N cells.
"""

from __future__ import annotations

import io
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from riglstm.lab.minigrid.levels import Level
from riglstm.lab.minigrid.network import ActorCritic
from riglstm.lab.minigrid.testing import SEED
from riglstm.lab.minigrid.worker import solved
from riglstm.lab.report.style import LOOKS, Array, new_figure, picture_axes, png, styled

SHOWN = 12
"""Frames in a picture, at most."""
TILE = 24
"""Pixels of a tile."""
MILLISECONDS = 250
"""Of a frame in a GIF."""


class Episode(NamedTuple):
    """What was seen and done."""

    level: str
    frames: list[Array]
    """T images of the world, with what the agent sees lit up."""
    strength: Array
    """(T, N): what each cell took in of its new state, 0 to 1; 0 where it slept."""
    solved: bool


@torch.inference_mode()
def play(net: ActorCritic, level: Level) -> Episode:
    """The first test episode, by the most probable actions, with what the memory's cells did."""
    import gymnasium
    import minigrid  # noqa: F401  registers the levels

    device = next(net.parameters()).device
    env: Any = gymnasium.make(level.id, render_mode="rgb_array", tile_size=TILE)
    start = np.random.SeedSequence((SEED, 0, 0)).generate_state(1)
    seen, _ = env.reset(seed=int(start[0]))
    state = net.core.initial_state(1)
    frames, inputs, reward, done = [], [], 0.0, False
    while not done:
        frames.append(env.render())
        inputs.append(net.encode(torch.from_numpy(seen["image"]).to(device).unsqueeze(0)))
        y, state = net.core(inputs[-1].unsqueeze(0), state)
        action = int(net.logits(y[0, 0]).argmax())
        seen, reward, terminated, truncated, _ = env.step(action)
        done = terminated or truncated
    env.close()
    strength = _strength(net, torch.stack(inputs))
    return Episode(level.id, frames, strength, bool(solved(reward)))


def _strength(net: ActorCritic, x: Tensor) -> Array:
    """(T, N) for the memory's first layer, from x (T, 1, D)."""
    trace = getattr(net.core, "trace", None)
    if trace is None:
        raise ValueError(f"{type(net.core).__name__} does not say what its cells do")
    seen = trace(x)[0]
    if seen.active is None:
        raise ValueError(f"{type(net.core).__name__} has no cells that sleep")
    taken = seen.active[:, 0].float()
    if seen.keep is not None:
        taken = taken * (1 - seen.keep[:, 0])
    return np.asarray(taken.cpu().numpy())


@styled()
def draw_episode(episode: Episode) -> bytes:
    """Some of the frames in a row, and the cells of all steps below them; a PNG file."""
    T, N = episode.strength.shape
    picked = np.unique(np.linspace(0, T - 1, min(T, SHOWN)).round().astype(int))
    figure = new_figure(max(6.4, 1.05 * len(picked)), 1.6 + 0.28 * N)
    rows = figure.add_gridspec(2, len(picked), height_ratios=[1.0, 0.24 * N])
    for i, t in enumerate(picked):
        axes = picture_axes(figure.add_subplot(rows[0, i]))
        axes.imshow(episode.frames[t])
        axes.set_title(f"{t + 1}", fontsize=9)
    below = figure.add_subplot(rows[1, :])
    below.imshow(
        *(episode.strength.T,),
        aspect="auto",
        cmap="Greens",
        vmin=0,
        vmax=1,
        interpolation="nearest",
        extent=(0.5, T + 0.5, N - 0.5, -0.5),
    )
    below.set_yticks(range(N), [f"cell {j}" for j in range(N)])
    below.set_xlabel("step")
    return png(figure)


def gif(episode: Episode) -> bytes:
    """Each frame with the cells beside it: this step's as bars, all steps' so far as a strip."""
    from PIL import Image

    images = [Image.fromarray(_panel(episode, t)) for t in range(len(episode.frames))]
    buffer = io.BytesIO()
    images[0].save(
        buffer,
        format="GIF",
        save_all=True,
        append_images=images[1:],
        duration=MILLISECONDS,
        loop=0,
    )
    return buffer.getvalue()


def _panel(episode: Episode, t: int) -> Array:
    """(height, width, 3) uint8: frame t, and a row for each cell on its right."""
    frame = episode.frames[t]
    T, N = episode.strength.shape
    height, bar, strip, gap = frame.shape[0], 60, min(320, max(120, 4 * T)), 6
    colour = np.array([int(LOOKS["riglstm"].colour[i : i + 2], 16) for i in (1, 3, 5)])
    right = np.full((height, gap + bar + gap + strip + gap, 3), 255, np.uint8)
    edges = np.linspace(gap, height - gap, N + 1).astype(int)
    for j in range(N):
        top, bottom = edges[j], edges[j + 1] - 3
        right[top:bottom, gap : gap + bar] = 235
        right[top:bottom, gap : gap + round(bar * float(episode.strength[t, j]))] = colour
        columns = np.arange(strip) * T // strip
        shown = np.where(columns <= t, episode.strength[columns, j], 0.0)[:, None]
        ink = 255 - shown * (255 - colour)
        ink[columns > t] = 235
        start = gap + bar + gap
        right[top:bottom, start : start + strip] = ink.astype(np.uint8)
    return np.concatenate((frame, right), axis=1)
