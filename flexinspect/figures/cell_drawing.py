"""The cells of a mask figure: squares with signs, or one image where they are small."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from flexinspect.figures.sheet import POINTS
from flexinspect.figures.themes import FigureTheme, sign_color
from flexinspect.masks.mask_picture import MaskPicture
from flexinspect.masks.mask_presets import BoolArray
from flexinspect.masks.viewport import APPLIED, BOTH, CLOSED, LEAKED, LOST, OPEN, UNKNOWN, States

SIGNS = {LOST: "_", LEAKED: "+", BOTH: "x", APPLIED: "|"}
"""matplotlib's markers in cells of these states, so that colour is not their only difference."""

_SIGN_SIZE = 4.0  # points of a sign on an image

MIN_DOTTED_PITCH = 3.0
"""Points from cell to cell below which cells are drawn without gaps and dots, as one image."""

MAX_DOTTED_CELLS = 25_000
"""Cells above which they are drawn as one image too: each dot is an object of an SVG."""

MIN_CELL = 0.6
"""Points of a cell, below which cells are joined: a thinner line cannot be seen in print."""


def join_cells(picture: MaskPicture, limit: int) -> MaskPicture:
    """Return a picture with at most `limit` cells per axis.

    A joined cell is open or closed only if all of its parts are; a single lost or leaked part makes
    it lost or leaked.
    """
    states, edges, flags = picture.states, [], []
    for axis, (all_edges, flag) in enumerate(
        ((picture.row_edges, picture.empty_rows), (picture.key_edges, picture.unseen_keys))
    ):
        n = states.shape[axis]
        starts = np.arange(0, n, max(-(-n // limit), 1))
        is_joined = len(starts) < n
        states = _join_states(states, starts, axis) if is_joined else states
        edges.append(np.append(all_edges[starts], all_edges[-1]))
        flags.append(np.logical_or.reduceat(flag, starts) if is_joined else flag)
    if states is picture.states:
        return picture
    return replace(
        picture,
        states=states,
        row_edges=edges[0],
        key_edges=edges[1],
        empty_rows=flags[0],
        unseen_keys=flags[1],
    )


def _join_states(states: States, starts: npt.NDArray[Any], axis: int) -> States:
    low, high = (each.reduceat(states, starts, axis) for each in (np.minimum, np.maximum))
    shares = np.where(states <= OPEN, states, OPEN // 2).astype(np.uint16)
    sizes = np.diff(np.append(starts, states.shape[axis]))
    mean = np.add.reduceat(shares, starts, axis, dtype=np.int32) // np.expand_dims(sizes, 1 - axis)
    joined = np.where(low == high, low, np.clip(mean, 1, OPEN - 1)).astype(np.uint8)
    if high.max(initial=0) >= LOST:
        lost, leaked = (
            np.logical_or.reduceat((states == kind) | (states == BOTH), starts, axis)
            for kind in (LOST, LEAKED)
        )
        joined[lost], joined[leaked], joined[lost & leaked] = LOST, LEAKED, BOTH
    return joined


def draw_cells(axes: Any, states: States, theme: FigureTheme, cell: float) -> None:
    """Draw the cells on axes whose unit is the cell; the shorter side of one is `cell` inches."""
    if is_dotted(cell, states.size):
        _draw_squares(axes, states, theme, cell * POINTS)
    else:
        _draw_image(axes, states, theme, cell * POINTS)


def is_dotted(cell: float, n_cells: int) -> bool:
    """Return whether so many cells of `cell` inches have gaps, and dots where they are closed."""
    return cell * POINTS >= MIN_DOTTED_PITCH and n_cells <= MAX_DOTTED_CELLS


def state_colors(states: States, theme: FigureTheme) -> npt.NDArray[np.uint8]:
    """Return the colour of each cell, uint8 (rows, keys, 3)."""
    table = np.zeros((max(UNKNOWN, *SIGNS) + 1, 3), np.uint8)
    for state in range(len(table)):
        color = theme.state_color(state)
        table[state] = [int(color[at : at + 2], 16) for at in (1, 3, 5)]
    colors: npt.NDArray[np.uint8] = table[states]
    return colors


def _draw_image(axes: Any, states: States, theme: FigureTheme, pitch: float) -> None:
    """Draw the cells as an image, with a sign on some of the cells that differ."""
    from matplotlib.patheffects import withStroke

    n_rows, n_keys = states.shape
    axes.imshow(
        state_colors(states, theme),
        extent=(0, n_keys, n_rows, 0),
        aspect="auto",
        interpolation="none",
    )
    for state in (LOST, LEAKED, BOTH):
        rows, keys = _spread(states == state, max(round(2 * _SIGN_SIZE / pitch), 1))
        if len(rows):
            color = theme.state_color(state)
            style = {"s": _SIGN_SIZE**2, "linewidths": 0.9, "color": sign_color(color)}
            axes.scatter(
                keys + 0.5,
                rows + 0.5,
                marker=SIGNS[state],
                zorder=2,
                path_effects=[withStroke(linewidth=2.2, foreground=color)],
                **style,
            )


def _spread(cells: BoolArray, distance: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return the rows and keys of one cell of each square of `distance` cells that has any.

    It is the one nearest to the square's middle.
    """
    rows, keys = np.nonzero(cells)
    middle = (distance - 1) / 2
    nearest = np.argsort(np.hypot(rows % distance - middle, keys % distance - middle))
    rows, keys = rows[nearest], keys[nearest]
    squares = np.stack((rows // distance, keys // distance), axis=1)
    _, first = np.unique(squares, axis=0, return_index=True)
    return rows[first], keys[first]


def _draw_squares(axes: Any, states: States, theme: FigureTheme, pitch: float) -> None:
    """Draw each cell as a square with a gap around it, and with a sign besides its colour."""
    axes.set_facecolor(theme.background)
    gap = min(0.06, 0.5 / pitch)
    square = ((gap, gap), (1 - gap, gap), (1 - gap, 1 - gap), (gap, 1 - gap))
    for state in map(int, np.unique(states)):
        cells = states == state
        is_partly = CLOSED < state < OPEN
        color = theme.closed if is_partly else theme.state_color(state)
        sign = sign_color(color)
        _fill(axes, cells, square, color, sign if state in SIGNS else "none")
        if is_partly:
            _fill(axes, cells, (square[0], square[2], square[3]), theme.open, "none")
        style: dict[str, Any] = {}
        if state == CLOSED:
            style = {"marker": "o", "facecolors": theme.dot, "edgecolors": theme.dot_edge}
            style |= {"s": (0.38 * pitch) ** 2, "linewidths": min(0.5, pitch / 12)}
        elif state in SIGNS:
            style = {"marker": SIGNS[state], "color": sign}
            style |= {"s": (0.5 * pitch) ** 2, "linewidths": min(1.2, pitch / 8)}
        if style:
            rows, keys = np.nonzero(cells)
            axes.scatter(keys + 0.5, rows + 0.5, zorder=2, **style)


def _fill(
    axes: Any, cells: BoolArray, corners: Sequence[tuple[float, float]], color: str, edge: str
) -> None:
    """Fill the same polygon in many cells, as one path."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    polygon = np.array([*corners, corners[0]])
    rows, keys = np.nonzero(cells)
    points = np.stack((keys, rows), axis=1)[:, None] + polygon[None]
    codes = np.full(len(polygon), Path.LINETO, Path.code_type)
    codes[0], codes[-1] = Path.MOVETO, Path.CLOSEPOLY
    outline = Path(points.reshape(-1, 2), np.tile(codes, len(rows)))
    axes.add_patch(PathPatch(outline, facecolor=color, edgecolor=edge, linewidth=0.4, zorder=1))
