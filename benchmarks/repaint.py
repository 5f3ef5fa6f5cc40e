"""`python -m benchmarks.repaint`: processor time of one repaint of a heatmap of 200 × 60 cells.

All of it is counted: levels into strips, the widget, the compositor, the terminal's bytes and
their encoding, and what the app's loop does besides. Only the terminal itself is not there. Every
cell changes from one repaint to the next. Making the levels is not counted: a panel does that
when it loads.
"""

from __future__ import annotations

import asyncio
import io
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from rich.console import Console, RenderableType
from textual.app import App, ComposeResult
from textual.drivers.headless_driver import HeadlessDriver
from textual.screen import Screen

from flexinspect.drawing.heatmap import CIVIDIS, Levels, heat
from flexinspect.drawing.text_lines import Canvas
from flexinspect.drawing.theme import Theme
from flexinspect.tui.terminal_output import TerminalCells

WIDTH, HEIGHT = 200, 60
N_WARM, N_FRAMES = 10, 60
REST_S = 0.02
"""Waited after each frame, so that all its work is done and counted."""
WANTED_MS = 4.0

Frames = Callable[[int], Levels]
LOOK = Theme("truecolor")


def mask_frames() -> Frames:
    """Return frames of a mask: causal, a window, a sink, and four levels that change places."""
    q_idx, kv_idx = np.mgrid[0 : 2 * HEIGHT, 0:WIDTH]
    causal = kv_idx <= q_idx * WIDTH // (2 * HEIGHT)
    near = q_idx * WIDTH // (2 * HEIGHT) - kv_idx < 48
    kinds = np.where(causal, np.where(kv_idx < 4, 3, np.where(near, 2, 1)), 0)
    return lambda frame: (((kinds + frame) % 4) * 10).astype(np.uint8)


def noise_frames() -> Frames:
    """Return frames in which each cell is random, and never what it was before."""
    random = np.random.default_rng(0)
    levels = random.integers(0, CIVIDIS.size, (2 * HEIGHT, WIDTH))

    def frame(_: int) -> Levels:
        nonlocal levels
        levels = (levels + random.integers(1, CIVIDIS.size, levels.shape)) % CIVIDIS.size
        return levels.astype(np.uint8)

    return frame


class CountingDriver(HeadlessDriver):
    """Takes what a terminal would get, as bytes, and counts it."""

    n_bytes = 0

    @property
    def is_headless(self) -> bool:
        """Return False: a headless app stops before the bytes are made."""
        return False

    def write(self, data: str) -> None:
        """Count the bytes."""
        CountingDriver.n_bytes += len(data.encode())


class RepaintApp(App[dict[str, float]]):
    """Shows frame after frame, then exits with the figures."""

    def __init__(self, frames: Frames) -> None:
        super().__init__(driver_class=CountingDriver)
        self.console = Console(color_system="truecolor", force_terminal=True, file=io.StringIO())
        self._frames = frames
        self._terminal_cells = TerminalCells()

    def _display(self, screen: Screen[Any], renderable: RenderableType | None) -> None:
        """Write what changed, as the interface does."""
        super()._display(screen, self._terminal_cells.limit(renderable))

    def compose(self) -> ComposeResult:
        """Make the screen."""
        yield Canvas()

    def on_ready(self) -> None:
        """Begin."""
        self.run_worker(self._measure())

    async def _measure(self) -> None:
        samples = [await self._one(number) for number in range(N_WARM + N_FRAMES)][N_WARM:]
        cpu, drawing, sizes = ([sample[part] for sample in samples] for part in range(3))
        self.exit(
            {
                "cpu_ms": _median(cpu),
                "cpu_ms_p95": round(statistics.quantiles(cpu, n=20)[-1], 2),
                "of_it_strips_ms": _median(drawing),
                "kib_per_frame": round(statistics.median(sizes) / 1024, 1),
            }
        )

    async def _one(self, number: int) -> tuple[float, float, float]:
        """Return ms CPU of the whole repaint, ms CPU of making strips, and bytes written."""
        canvas, levels = self.query_one(Canvas), self._frames(number)
        await asyncio.sleep(REST_S)
        before = CountingDriver.n_bytes
        started = time.process_time()
        strips = heat(levels, CIVIDIS, LOOK)
        drawn = time.process_time()
        canvas.show(strips)
        while CountingDriver.n_bytes - before < WIDTH:  # less than a frame
            await asyncio.sleep(REST_S)
        await asyncio.sleep(REST_S)
        ended = time.process_time()
        written = CountingDriver.n_bytes - before
        return (ended - started) * 1e3, (drawn - started) * 1e3, float(written)


def measure() -> dict[str, object]:
    """Return the figures per picture: medians of milliseconds of CPU, KiB written per frame."""
    facts: dict[str, object] = {"cells": [WIDTH, HEIGHT], "frames": N_FRAMES}
    for name, frames in (("mask", mask_frames()), ("noise", noise_frames())):
        found = RepaintApp(frames).run(size=(WIDTH, HEIGHT))
        if found is None:
            raise RuntimeError(f"the app of the picture {name!r} ended before its last frame")
        facts[name] = found
    return {**facts, "mask_wanted_ms": WANTED_MS}


def _median(values: Sequence[float]) -> float:
    return round(statistics.median(values), 2)


if __name__ == "__main__":
    print(json.dumps(measure(), indent=1))
