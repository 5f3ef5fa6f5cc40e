"""Reads the masks of a branch as planes: the views of the mask panel, one for each head at most.

Layers that received the same masks at every step share their planes, and equal planes are stored
once, so a model of 28 layers with one mask for all has four planes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct

from flexinspect.core.text import plural, printable
from flexinspect.exports.report import contents
from flexinspect.exports.report.branch_columns import BranchSpan
from flexinspect.masks.counting import PositionGroups
from flexinspect.masks.mask_presets import declared_spec
from flexinspect.masks.viewport import SCALES, PixelGrid
from flexinspect.panels.mask.mask_data import load_states
from flexinspect.panels.mask.mask_grid import MAX_STEPS, MaskLoader, MaskView, load_blocks
from flexinspect.panels.mask.mask_layout import MaskViewMode
from flexinspect.records.prompt import Segment
from flexinspect.trace import queries

MAX_PLANE_CELLS = 4 << 20
"""Cells of a plane; a larger mask is reduced until it has as many pixels."""

MAX_VIEWS = 96
"""Pairs of a layer and a head whose planes are read; of more, the first ones."""


class MaskReading(Struct, frozen=True):
    """The masks of a branch, None if it has none, with the reason or what was left out."""

    columns: contents.MaskColumns | None
    missing: str = ""
    left_out: tuple[str, ...] = ()


def read_masks(
    span: BranchSpan, segments: Sequence[Segment], progress: Callable[[], None]
) -> MaskReading:
    """Return the planes of every layer and head as far as they are recorded.

    `progress` is called for every layer and head. Raises `TraceError`.
    """
    reader = span.source.reader
    generation = queries.generation_in_branch(
        reader, reader.generation(span.generation), span.branch
    )
    spec = declared_spec(generation.declared)
    groups = PositionGroups(tuple(segment.start for segment in segments) or (0,))
    # A branch sees its parents' keys unless it computed them again; its own steps decide.
    step = span.stop - 1 if span.stop <= MAX_STEPS else span.start
    planes = _Planes()
    every = [(0, span.stop)]
    for layers in queries.layers_by_mask(reader, span.generation, every, span.branch) or [[0]]:
        head = 0
        while len(planes.views) < MAX_VIEWS:
            place = span.place(step, layers[0], head)
            view = MaskLoader(span.source, place, spec, groups).load()
            progress()
            if view is None or not view.n_keys or not planes.add(view, layers):
                break
            head += 1
            if head >= view.heads:
                break
    if not planes.views:
        hint = "Level advanced and above record the cells that ran; level basic records none."
        return MaskReading(None, f"No mask was recorded. {hint}")
    return MaskReading(planes.columns(printable(spec.name) if spec else ""), "", planes.left_out())


class _Planes:
    """The planes read so far, each once, and the first view, whose rows are those of all."""

    def __init__(self) -> None:
        self.first: MaskView | None = None
        self.grid = PixelGrid(0, 0, 0, 0)
        self.views: list[contents.MaskViews] = []
        self._planes: list[contents.Bytes] = []
        self._numbers: dict[bytes, int] = {}

    def add(self, view: MaskView, layers: list[int]) -> bool:
        """Add the planes of a layer's head; False if it has none."""
        if self.first is None:
            self.first, self.grid = view, _grid_of(view)
        planes: dict[str, int] = {mode: self._number(states) for mode, states in self._states(view)}
        if planes:
            notes = _difference_notes(view)
            self.views.append(contents.MaskViews(layers, view.head, view.heads, planes, notes))
        return bool(planes)

    def _states(self, view: MaskView) -> Iterator[tuple[MaskViewMode, contents.Bytes]]:
        blocks = tuple(load_blocks(view.source, part, view.head) for part in view.parts)
        modes: list[MaskViewMode] = []
        modes += ["executed"] if view.n_known() else []
        modes += ["received"] if any(part.blocks for part in blocks) else []
        modes += ["declared"] if view.spec is not None else []
        modes += ["difference"] if view.spec is not None and view.n_known() else []
        for mode in modes:
            yield mode, load_states(view, blocks, self.grid, mode)

    def _number(self, states: contents.Bytes) -> int:
        key = hashlib.blake2b(states.tobytes()).digest()
        if key not in self._numbers:
            self._numbers[key] = len(self._planes)
            self._planes.append(states)
        return self._numbers[key]

    def columns(self, spec_name: str) -> contents.MaskColumns:
        """Return all planes with the rows that they show."""
        assert self.first is not None
        view = self.first
        steps = [own.step for part in view.parts for own in part.steps for _ in range(own.n_rows)]
        return contents.MaskColumns(
            scale=self.grid.row_scale,
            n_keys=view.n_keys,
            pos=contents.int_column(view.positions.tolist()),
            step=contents.int_column(steps),
            spec=spec_name,
            planes=self._planes,
            views=self.views,
        )

    def left_out(self) -> tuple[str, ...]:
        """Return what the trace holds and the planes do not show, as sentences."""
        assert self.first is not None
        view, found = self.first, []
        if self.grid.row_scale > 1:
            size = f"{self.grid.row_scale} x {self.grid.row_scale}"
            found.append(
                f"The mask has {view.n_rows} rows and {view.n_keys} keys, so one pixel of its "
                f"picture stands for {size} cells."
            )
        if view.is_truncated:
            found.append(
                f"The mask shows the prefill and the steps {view.first_step} to {view.last_step} "
                f"of {view.n_steps}."
            )
        if len(self.views) >= MAX_VIEWS:
            found.append(f"The masks of {plural(MAX_VIEWS, 'layer and head')} are shown.")
        return tuple(found)


def _grid_of(view: MaskView) -> PixelGrid:
    """Return the grid of the whole mask, with as small a scale as `MAX_PLANE_CELLS` allows."""
    scale = next(
        one
        for one in SCALES
        if math.ceil(view.n_rows / one) * math.ceil(view.n_keys / one) <= MAX_PLANE_CELLS
    )
    size = math.ceil(view.n_rows / scale), math.ceil(view.n_keys / scale)
    return PixelGrid(0, 0, *size, scale, scale)


def _difference_notes(view: MaskView) -> list[str]:
    """Return what the executed mask opens, and how it differs from the declared one, in words."""
    n_known = view.n_known()
    if not n_known:
        return ["The cells that ran were not recorded."]
    n_cells, n_open = n_known * view.n_keys, view.count("open")
    notes = [f"{n_open} of {n_cells} cells are open ({100 * n_open / n_cells:.1f} %)."]
    if n_known < view.n_rows:
        notes.append(f"The cells of {plural(view.n_rows - n_known, 'row')} were not recorded.")
    if view.spec is None:
        return [*notes, "No mask was declared, so there is nothing to compare it with."]
    lost, leaked = view.count("lost"), view.count("leaked")
    if not lost and not leaked:
        return [*notes, f"The declared mask, {printable(view.spec.name)}, is the same."]
    counts = f"{plural(leaked, 'cell')} leaked and {plural(lost, 'cell')} lost"
    return [*notes, f"It differs from the declared mask, {printable(view.spec.name)}: {counts}."]
