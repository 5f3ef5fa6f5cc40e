"""What drawing and verifying masks costs: a picture of 4096², a verification of 131 072²."""

from __future__ import annotations

import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from flexinspect.masks.mask_expressions import parse_mask
from flexinspect.masks.mask_reduction import reduce_mask
from flexinspect.masks.size_presets import MaskConfig
from flexinspect.masks.verification import verify_mask

ROUNDS = 5
THREADS = 2
PICTURE = MaskConfig(32, 126, 2, 2)  # 4096 tokens
VERIFIED = MaskConfig(1024, 126, 2, 2)  # 131 072 tokens
MOST_DRAW_S, MOST_VERIFY_S, MOST_MB = 1.0, 60.0, 1024
SIZE = 400
"""Rows and keys of the picture."""


def measure() -> dict[str, Any]:
    """Return wall time and peak memory, with the bounds that they must keep."""
    assert (PICTURE.length, VERIFIED.length) == (4096, 131_072)
    masks = ("segment-isolation", "causal", "dilated(3)")
    drawing = {text: _draw_s(text) for text in masks}
    verifying = {text: _seconds(partial(_verify, text)) for text in masks[:2]}
    against = _seconds(lambda: _verify("segment-isolation", "segment-isolation"))
    scale = 1 if sys.platform == "darwin" else 1024  # bytes there, kilobytes elsewhere
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale / 2**20
    return {
        "threads": THREADS,
        "load_before": round(os.getloadavg()[0], 1),
        "draw_4096_s": drawing,
        "verify_131072_s": verifying,
        "verify_131072_against_s": against,
        "peak_mb": round(peak),
        "bounds": {"draw_s": MOST_DRAW_S, "verify_s": MOST_VERIFY_S, "peak_mb": MOST_MB},
    }


def _draw_s(text: str) -> float:
    segments, n = PICTURE.segments(), PICTURE.length
    mask = parse_mask(text, segments)

    def draw() -> None:
        reduce_mask(mask, n, n, SIZE, SIZE, segments=segments, threads=THREADS)

    return round(statistics.median(_seconds(draw) for _ in range(ROUNDS)), 3)


def _verify(text: str, declared: str | None = None) -> None:
    segments = VERIFIED.segments()
    other = None if declared is None else parse_mask(declared, segments)
    result = verify_mask(parse_mask(text, segments), segments, declared=other, threads=THREADS)
    assert result.passed == (text == "segment-isolation")


def _seconds(function: Callable[[], None]) -> float:
    started = time.perf_counter()
    function()
    return round(time.perf_counter() - started, 3)
