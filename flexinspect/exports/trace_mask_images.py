"""Pictures of the masks of a branch, for some of its steps and for each layer that differs."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from flexinspect.core.text import format_numbers
from flexinspect.panels.base import TracePlace
from flexinspect.panels.mask.cell_states import load_mask_view
from flexinspect.panels.mask.mask_data import load_states
from flexinspect.panels.mask.mask_layout import MaskViewMode, whole_grid
from flexinspect.panels.mask.mask_pixels import mask_palette
from flexinspect.panels.panel_source import Source
from flexinspect.records.step import StepRecord
from flexinspect.trace.queries import layers_by_mask, step_bounds
from flexinspect.trace.reader import TraceReader

N_STEPS = 8
"""Steps with pictures: the first, the last, and evenly spread ones between them."""

MAX_PIXELS = 512
"""Pixels of a side. A larger mask is reduced; a single open or closed cell stays visible."""

MIN_PIXELS = 256
"""A smaller mask is enlarged until one side has as many pixels."""


class MaskImages:
    """Draws the executed mask of a branch up to a step, once for all layers that share it.

    Colours are those of the mask panel: differences from a declared mask stand out.
    """

    def __init__(self, reader: TraceReader, generation: int, branch: int) -> None:
        self._source, self._place = Source(reader), (generation, branch)
        first, last = step_bounds(reader, generation, branch) or (0, -1)
        spread = np.linspace(first, last, min(N_STEPS, last - first + 1)).round().astype(int)
        self._steps = {*spread.tolist()}
        drawn = [(step, step + 1) for step in sorted(self._steps)]
        self._layers = layers_by_mask(reader, generation, drawn, branch)

    def of_step(self, step: StepRecord) -> Iterator[tuple[str, bytes, int, int]]:
        """Yield (tag, PNG, height, width) of the step's pictures, none for most steps."""
        if step.step not in self._steps or not step.calls:
            return
        generation, branch = self._place
        for layers in self._layers:
            place = TracePlace(generation, branch, step.step, layers[0])
            view = load_mask_view(self._source, place)
            rows = view.rows_of_step(step.step) if view is not None else None
            if view is None or rows is None:
                continue
            shape = (rows.stop, min(step.kv_after, view.n_keys))
            grid = whole_grid(shape, MAX_PIXELS // 2, MAX_PIXELS)
            mode: MaskViewMode = "executed" if view.spec is None else "difference"
            rgb = np.array(mask_palette().rgb, np.uint8)[load_states(view, (), grid, mode)]
            zoom = max(MIN_PIXELS // max(rgb.shape[:2]), 1)
            large = rgb.repeat(zoom, axis=0).repeat(zoom, axis=1)
            yield f"mask/{format_numbers('layer', layers)}", encode_png(large), *large.shape[:2]


def encode_png(rgb: npt.NDArray[np.uint8]) -> bytes:
    """Return uint8 (height, width, 3) as a PNG (https://www.w3.org/TR/png-3/)."""
    height, width, _ = rgb.shape
    lines = np.zeros((height, 1 + 3 * width), np.uint8)  # the first byte of a line: no filter
    lines[:, 1:] = rgb.reshape(height, 3 * width)
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(lines.tobytes())),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
