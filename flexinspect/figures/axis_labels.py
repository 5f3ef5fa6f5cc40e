"""The tick labels of a mask figure: words or positions, as many as fit without overlapping."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from flexinspect.figures.sheet import POINTS, Typesetter
from flexinspect.masks.mask_picture import MaskPicture

TURNED_PAD = 0.55
"""Distance of turned labels from the axis in sizes of text: the first one is below the last row's
label, half a line of which is below the cells."""

Places = npt.NDArray[np.float64]


class AxisLabels(Struct, frozen=True):
    """The labels of an axis of `n_cells`: `places` in cells, `depth` in inches across the axis.

    `is_turned` tells that they are written upwards.
    """

    places: list[float]
    texts: list[str]
    depth: float
    n_cells: int
    is_turned: bool = False


def row_labels(
    picture: MaskPicture, type_: Typesetter, points: float, height: Callable[[float], float]
) -> AxisLabels:
    """Return the labels of the rows.

    `height` returns the length of the axis in inches beside labels of a depth. Words that do not
    all fit have their positions before them, which takes more room.
    """
    edges = picture.row_edges
    need = type_.line_height(points) * 0.92
    number = type_.size(str(int(edges[-1])), points)
    for is_numbered in (False, True):
        shown = _words(picture, edges, is_numbered)
        depth = max([number, *(type_.size(text, points) for text in shown)]) + 0.06
        stride = _stride(edges, height(depth) / (len(edges) - 1), need)
        if stride == 1:
            break
    positions = _positions(edges, stride)
    texts = [_text(picture, position, stride) for position in positions]
    return AxisLabels(_places(edges, positions), texts, depth, len(edges) - 1)


def key_labels(picture: MaskPicture, type_: Typesetter, points: float, width: float) -> AxisLabels:
    """Return the labels of the keys along `width` inches, turned if words stand there."""
    edges = picture.key_edges
    n = len(edges) - 1
    cell = width / n
    line = type_.line_height(points)
    if picture.words:
        stride = _stride(edges, cell, line * 0.92)
        positions = _positions(edges, stride)
        texts = [_text(picture, p, stride) for p in positions]
        depth = _turned_depth(texts, type_, points)
        return AxisLabels(_places(edges, positions), texts, depth, n, is_turned=True)
    widest = type_.size(str(int(edges[-1])), points)
    positions = _positions(edges, _stride(edges, cell, widest * 1.25 + 0.03))
    return AxisLabels(_places(edges, positions), [str(p) for p in positions], line + 0.03, n)


def max_key_depth(picture: MaskPicture, type_: Typesetter, points: float) -> float:
    """Return the greatest depth in inches that labels of the keys may have."""
    numbered = list(_words(picture, picture.key_edges, True))
    return _turned_depth(numbered, type_, points) if numbered else type_.line_height(points) + 0.03


def _turned_depth(texts: Sequence[str], type_: Typesetter, points: float) -> float:
    longest = max(type_.size(text, points) for text in texts)
    return longest + 0.04 + TURNED_PAD * points / POINTS


def _words(
    picture: MaskPicture, edges: npt.NDArray[np.integer], is_numbered: bool
) -> Iterator[str]:
    low, high = int(edges[0]), int(edges[-1])
    for position, word in picture.words.items():
        if low <= position < high:
            yield f"{position} {word}" if is_numbered else word


def _text(picture: MaskPicture, position: int, stride: int) -> str:
    """Return the label of a position; between words that are left out it has its number."""
    word = picture.words.get(position)
    if word is None:
        return str(position)
    return word if stride == 1 else f"{position} {word}"


def _strides() -> Iterator[int]:
    """Yield 1, 2, 5, 10, 20, 50, ..."""
    scale = 1
    while True:
        yield from (scale, 2 * scale, 5 * scale)
        scale *= 10


def _positions(edges: npt.NDArray[np.integer], stride: int) -> list[int]:
    first = -(-int(edges[0]) // stride) * stride
    return list(range(first, int(edges[-1]), stride)) or [int(edges[0])]


def _places(edges: npt.NDArray[np.integer], positions: list[int]) -> list[float]:
    """Return the places of the middles of positions, in cells."""
    middles = np.array(positions) + 0.5
    return [float(x) for x in np.interp(middles, edges, np.arange(len(edges)))]


def _stride(edges: npt.NDArray[np.integer], cell: float, need: float) -> int:
    """Return the smallest stride of positions whose labels are `need` inches apart."""
    for stride in _strides():
        places = _places(edges, _positions(edges, stride))
        if len(places) < 2 or np.diff(places).min() * cell >= need:
            return stride
    raise AssertionError("unreachable: a stride beyond the axis leaves one label")
