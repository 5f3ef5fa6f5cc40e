"""A trace with attention that is made here, independently of what is tested with it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from flexinspect.drawing.theme import Theme
from flexinspect.masks.mask_presets import preset
from flexinspect.panels.attention.attention_data import AttentionData, AttentionOptions
from flexinspect.panels.attention.attention_panel import AttentionPanel
from flexinspect.panels.base import Picture, Request, TracePlace
from flexinspect.panels.panel_source import Source
from flexinspect.records.prompt import Segment, SegmentKind
from flexinspect.records.step import (
    ArrayRecord,
    CallRecord,
    GenerationRecord,
    MaskRecord,
    StepRecord,
    TokenRecord,
)
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.reader import TraceReader

PANEL = AttentionPanel()
PLAIN, COLOR = Theme("none"), Theme("truecolor")
N_PROMPT = 10
SCALE = 0.5


def segments() -> tuple[Segment, ...]:
    kinds = SegmentKind
    return (
        Segment(0, 1, "bos", kinds.BOS, 0),
        Segment(1, 4, "paraphrase 1", kinds.PARAPHRASE, 1),
        Segment(4, 5, "separator 1", kinds.SEPARATOR, 1),
        Segment(5, 8, "paraphrase 2", kinds.PARAPHRASE, 3),
        Segment(8, 9, "separator 2", kinds.SEPARATOR, 3),
        Segment(9, 10, "cue", kinds.CUE, 5),
        Segment(10, 40, "generated", kinds.GENERATED, 6),
    )


@dataclass
class SyntheticGeneration:
    """A generation whose attention is made here, independently of what is tested."""

    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    width: int = 8
    n_steps: int = 4
    window: int | None = None
    softcap: float | None = None
    level: str = "extreme"
    stored: tuple[int, ...] | None = None
    lse_error: float | None = 3e-6
    check_kind: str | None = "lse"
    change: Callable[[StepRecord], StepRecord] = field(default=lambda step: step)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(5)
        n = N_PROMPT + self.n_steps - 1
        shape = (self.layers, self.heads, n, self.width)
        self.q = rng.normal(size=shape).astype(np.float32) * 2
        self.k = rng.normal(size=(self.layers, self.kv_heads, n, self.width)).astype(np.float32)

    def cells(self, q_idx: int) -> npt.NDArray[np.bool_]:
        """Return the open keys of a row among all keys up to it."""
        cells = preset("segment-isolation", segments()).dense(1, q_idx + 1, q_offset=q_idx)[0]
        if self.window is not None:
            cells = cells & (np.arange(q_idx + 1) > q_idx - self.window)
        return cells

    def scores(self, layer: int, head: int, q_idx: int) -> npt.NDArray[np.float64]:
        key = self.k[layer, head // (self.heads // self.kv_heads), : q_idx + 1].astype(float)
        scores = key @ self.q[layer, head, q_idx].astype(float) * SCALE
        return self.softcap * np.tanh(scores / self.softcap) if self.softcap else scores

    def weights(self, layer: int, head: int, q_idx: int) -> npt.NDArray[np.float64]:
        parts = np.where(self.cells(q_idx), np.exp(self.scores(layer, head, q_idx)), 0.0)
        return np.asarray(parts / parts.sum())

    def _each(self, make: Callable[[int, int], Any]) -> npt.NDArray[np.float32]:
        rows = [[make(layer, head) for head in range(self.heads)] for layer in range(self.layers)]
        return np.asarray(rows, np.float32)

    def _arrays(self, start: int, stop: int) -> tuple[ArrayRecord, ...]:
        if self.level == "basic":
            return ()
        q_idx = stop - 1

        def mass(layer: int, head: int) -> list[float]:
            weights = self.weights(layer, head, q_idx)
            return [float(weights[s.start : s.stop].sum()) for s in segments()]

        def lse(layer: int, head: int) -> float:
            return math.log(np.exp(self.scores(layer, head, q_idx))[self.cells(q_idx)].sum())

        def entropy(layer: int, head: int) -> float:
            weights = self.weights(layer, head, q_idx)
            return float(-sum(w * math.log(w) for w in weights if w > 0))

        arrays = [
            ArrayRecord("attention.mass", self._each(mass)),
            ArrayRecord("attention.lse", self._each(lse)),
            ArrayRecord("attention.entropy", self._each(entropy)),
        ]
        layers = range(self.layers) if self.stored is None else self.stored
        for layer in layers if self.level == "extreme" else ():
            arrays.append(ArrayRecord("q", self.q[layer, :, start:stop], layer))
            arrays.append(ArrayRecord("k", self.k[layer, :, start:stop], layer))
        return tuple(arrays)

    def step(self, number: int) -> StepRecord:
        start = 0 if number == 0 else N_PROMPT + number - 1
        stop = N_PROMPT + number
        dropped = max(stop - self.window, 0) if self.window and number else 0
        rows = [np.pad(self.cells(q), (0, stop - 1 - q))[dropped:] for q in range(start, stop)]
        name = f"mask{number}"
        call = CallRecord(
            *(0, "flex uncompiled", "flexinspect", name, 1, self.heads, self.kv_heads),
            *(stop - start, stop - dropped, self.width, "float32", SCALE),
            *(self.lse_error, self.check_kind),
        )
        mask = MaskRecord(
            *(name, "block", 1, 1, stop - start, stop - dropped, start, dropped),
            cells=np.stack(rows)[None],
        )
        record = StepRecord(
            *(0, number, "decode" if number else "prefill", stop - start, start, stop),
            *(1000.0 + number, 10.0, 0.1),
            tokens=(token(stop, number),),
            calls=tuple(replace(call, layer=layer) for layer in range(self.layers)),
            masks=(mask,),
            arrays=self._arrays(start, stop),
        )
        return self.change(record)


def token(pos: int, step: int | None = None) -> TokenRecord:
    segment = next(i for i, s in enumerate(segments()) if s.start <= pos < s.stop)
    return TokenRecord(pos, pos, f"Ġw{pos}", f" w{pos}", pos, segment, step=step)


def write(path: Path, synthetic: SyntheticGeneration) -> Source:
    tokens = (
        TokenRecord(0, 0, "<bos>", "", 0, 0, True),
        *(token(pos) for pos in range(1, N_PROMPT)),
    )
    tokens = (*tokens[:4], replace(tokens[4], text="\n", token="Ċ"), *tokens[5:])
    with TraceWriter.create(path, {"model": "made"}) as writer:
        writer.begin_generation(
            GenerationRecord(0, "s", "segment-isolation", "contiguous", segments(), tokens)
        )
        for number in range(synthetic.n_steps):
            writer.write_step(synthetic.step(number))
    return Source(TraceReader(path))


Made = Callable[..., tuple[SyntheticGeneration, Source]]


def request(
    width: int = 100, height: int = 30, *, measure: str = "", row: int | None = None, **place: int
) -> Request[AttentionOptions]:
    return Request(TracePlace(**place), AttentionOptions(measure, row), width, height)


def load(source: Source, **changes: Any) -> AttentionData:
    return PANEL.load(source, request(**changes))


def paint(
    source: Source, width: int, height: int, look: Theme = PLAIN, **changes: Any
) -> tuple[list[str], Picture]:
    drawn_request = request(width, height, **changes)
    picture = PANEL.paint(PANEL.load(source, drawn_request), drawn_request, look)
    assert len(picture.strips) <= height
    assert {strip.cell_length for strip in picture.strips} == {width}
    return [strip.text for strip in picture.strips], picture


def described(data: AttentionData) -> str:
    return "\n".join(PANEL.describe(data))
