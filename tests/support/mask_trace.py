"""A small trace with masks that are right, wrong, missing, per head, cut by a cache and forked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from flexinspect.drawing.theme import Theme
from flexinspect.masks import key_blocks, mask_presets
from flexinspect.panels.base import Picture, Request, TracePlace
from flexinspect.panels.mask.mask_data import MaskData
from flexinspect.panels.mask.mask_layout import MaskOptions
from flexinspect.panels.mask.mask_panel import MaskPanel
from flexinspect.panels.mask.mask_text import describe_cell
from flexinspect.panels.panel_source import Source
from flexinspect.records.prompt import Segment, SegmentKind
from flexinspect.records.step import (
    CallRecord,
    GenerationEnd,
    GenerationRecord,
    MaskRecord,
    StepRecord,
    TokenRecord,
)
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.reader import open_trace

Bools = npt.NDArray[np.bool_]

SEGMENTS = (
    Segment(0, 1, "bos", SegmentKind.BOS, 0),
    Segment(1, 6, "paraphrase 1", SegmentKind.PARAPHRASE, 1),
    Segment(6, 7, "separator 1", SegmentKind.SEPARATOR, 1),
    Segment(7, 12, "paraphrase 2", SegmentKind.PARAPHRASE, 3),
    Segment(12, 13, "separator 2", SegmentKind.SEPARATOR, 3),
    Segment(13, 15, "cue", SegmentKind.CUE, 5),
    Segment(15, 40, "generated", SegmentKind.GENERATED, 6),
)
TEXTS = (
    *("", "Which", " city", " is", " it", "?", "\n", "What", " is", " this", " place", "?", "\n"),
    *("Answer", ":"),
)
N_PROMPT = 15
RIGHT, WRONG, CAUSAL, HEADS, SLIDING, BARE, TABLES = range(7)
"""Layers: as declared, leaking and losing, no mask, a mask per head, a cache that drops keys, a
call without any mask, block tables without cells."""


def token(pos: int) -> TokenRecord:
    number = max(i for i, s in enumerate(SEGMENTS) if s.start <= pos)
    text = TEXTS[pos] if pos < len(TEXTS) else f" w{pos}"
    step = pos - N_PROMPT if pos >= N_PROMPT else None
    return TokenRecord(pos, pos, text or "<bos>", text, pos, number, pos == 0, step)


def tokens(n: int = N_PROMPT) -> tuple[TokenRecord, ...]:
    return tuple(map(token, range(n)))


def declared(spec: mask_presets.MaskSpec, separators: str = "attached") -> dict[str, Any]:
    return {
        "preset": spec.name,
        "separators": separators,
        "starts": spec.starts,
        "prefix_stops": spec.prefix_stops,
        "local_starts": spec.local_starts,
    }


@dataclass
class MaskedSteps:
    """Writes masks and remembers, per layer, what was executed: the dense mask."""

    spec: mask_presets.MaskSpec
    layers: Sequence[int] = tuple(range(7))
    lse_error: float | None = 3e-6
    compiled: bool = False

    def __post_init__(self) -> None:
        self.new: dict[str, MaskRecord] = {}

    def cells(self, layer: int, q_idx: int, n_rows: int) -> Bools:
        """Return what a layer executes, (heads, rows, keys up to the last row)."""
        dense = self.spec.dense(n_rows, q_offset=q_idx)
        if layer == WRONG:
            dense = dense.copy()
            for row, key, value in ((9, 2, True), (10, 8, False), (16, 3, False)):
                if q_idx <= row < q_idx + n_rows:
                    dense[row - q_idx, key] = value
        if layer == CAUSAL:
            dense = mask_presets.causal().dense(n_rows, q_offset=q_idx)
        if layer == HEADS:
            closed = dense.copy()
            closed[:, 1:3] = False
            return np.stack([dense, closed])
        return dense[None]

    def call(self, layer: int, step: int, q_idx: int, n_rows: int) -> CallRecord:
        n_keys = q_idx + n_rows
        name: str | None = f"L{layer}s{step}"
        offset = 0
        cells: Bools | None = self.cells(layer, q_idx, n_rows)
        assert cells is not None
        assert name is not None
        if layer == SLIDING and n_rows == 1:
            offset = n_keys - 6
            cells = cells[:, :, offset:]
        if layer == BARE:
            name = None
        else:
            kind = "none, causal" if layer == CAUSAL else "block"
            tables = key_blocks.stack_block_rows([cells.any(axis=0)])
            record = MaskRecord(
                *(name, kind, 1, len(cells), n_rows, n_keys - offset, q_idx, offset),
                *((None, None) if layer == CAUSAL else (128, 128)),
                None if layer == CAUSAL else "user.rule",
                None,
                self.compiled,
                cells=None if layer == TABLES else cells,
                partial=None if layer == CAUSAL else tables.partial[None],
            )
            self.new[name] = record
        path = "flex compiled" if self.compiled else "flex uncompiled"
        return CallRecord(
            *(layer, path, "flexinspect", name, 1, 2, 1, n_rows, n_keys - offset, 8, "float32"),
            *(0.25, self.lse_error, None if self.lse_error is None else "lse"),
        )

    def step(self, number: int, branch: int = 0, generation: int = 0) -> StepRecord:
        q_idx, n_rows = (0, N_PROMPT) if number == 0 else (N_PROMPT + number - 1, 1)
        self.new = {}
        calls = tuple(replace(self.call(layer, number, q_idx, n_rows)) for layer in self.layers)
        suffix = f"g{generation}b{branch}"
        calls = tuple(replace(c, mask=c.mask and c.mask + suffix) for c in calls)
        new = tuple(replace(m, fingerprint=m.fingerprint + suffix) for m in self.new.values())
        chosen = replace(token(N_PROMPT + number), step=number)
        phase = "decode" if number else "prefill"
        return StepRecord(
            *(generation, number, phase, n_rows, q_idx, q_idx + n_rows, 1.0 + number, 10.0, 0.1),
            branch=branch,
            tokens=(chosen,),
            calls=calls,
            masks=new,
        )


def write(
    path: Path,
    n_steps: int = 4,
    *,
    spec: mask_presets.MaskSpec | None = None,
    about: dict[str, Any] | None = None,
    lse_error: float | None = 3e-6,
    compiled: bool = False,
    n_generations: int = 1,
) -> Path:
    spec = spec or mask_presets.preset("segment-isolation", SEGMENTS)
    about = declared(spec) if about is None else about
    with TraceWriter.create(path, {"model": "synthetic"}) as writer:
        for number in range(n_generations):
            masked = MaskedSteps(spec, lse_error=lse_error, compiled=compiled)
            writer.begin_generation(
                GenerationRecord(
                    number, "demo", spec.name, "contiguous", SEGMENTS, tokens(), (), about, 1.0
                )
            )
            for step in range(n_steps):
                writer.write_step(masked.step(step, generation=number))
            writer.end_generation(GenerationEnd(number, "finished", "x", SEGMENTS, "eos", 9.0))
    return path


def dense_mask(layer: int, n_steps: int = 4, head: int = 0) -> Bools:
    """Return the dense mask that a layer of the trace executed, (rows, keys)."""
    masked = MaskedSteps(mask_presets.preset("segment-isolation", SEGMENTS))
    n = N_PROMPT + n_steps - 1
    whole = np.zeros((n, n), np.bool_)
    cells = masked.cells(layer, 0, N_PROMPT)
    whole[:N_PROMPT, :N_PROMPT] = cells[min(head, len(cells) - 1)]
    for step in range(1, n_steps):
        q_idx = N_PROMPT + step - 1
        row = masked.cells(layer, q_idx, 1)
        row = row[min(head, len(row) - 1), 0]
        if layer == SLIDING:
            row = row.copy()
            row[: q_idx + 1 - 6] = False
        whole[q_idx, : q_idx + 1] = row
    return whole


@dataclass
class Shown:
    """A panel over a trace, loaded at places."""

    path: Path

    def __post_init__(self) -> None:
        self.source = Source(open_trace(self.path))
        self.panel = MaskPanel()

    def request(
        self,
        layer: int = 0,
        step: int = 0,
        size: tuple[int, int] = (120, 40),
        *,
        at: TracePlace | None = None,
        **options: Any,
    ) -> Request[MaskOptions]:
        place = at or TracePlace(step=step, layer=layer)
        return Request(place, MaskOptions(**{"view": "executed", **options}), *size)

    def load(self, *args: Any, **kwargs: Any) -> MaskData:
        return self.panel.load(self.source, self.request(*args, **kwargs))

    def paint(self, *args: Any, look: Theme | None = None, **kwargs: Any) -> Picture:
        request = self.request(*args, **kwargs)
        data = self.panel.load(self.source, request)
        return self.panel.paint(data, request, look or Theme())

    def text(self, *args: Any, **kwargs: Any) -> list[str]:
        return [strip.text for strip in self.paint(*args, **kwargs).strips]

    def words(self, *args: Any, **kwargs: Any) -> str:
        return "\n".join(self.panel.describe(self.load(*args, **kwargs)))


def sentence(shown: Shown, layer: int, q: int, kv: int, step: int = 3, **options: Any) -> str:
    """Return the sentence of the cursor at (q, kv)."""
    description = describe_cell(shown.load(layer, step, q=q, kv=kv, **options))
    assert description is not None
    return description.sentence()
