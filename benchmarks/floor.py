"""What the least of recorders costs: a yardstick for the bands, which no recorder can go below.

It keeps a reference per layer and the newest row of logits, and a thread writes the best ten, the
entropy and the time of each step into SQLite, several steps in one transaction. It knows nothing of
masks, paths, segments, memory, failures or rules.
"""

from __future__ import annotations

import json
import sqlite3
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from benchmarks.capture import decode_ms
from benchmarks.common import Timing, bench_prompt, compared, sandwiched
from benchmarks.engine import time_generate
from flexinspect_hooks.capture.recorder import LINGER_S

BEST = 10

Step = tuple[float, npt.NDArray[np.float32]]
"""When a step ended, and its newest row of logits (V,)."""


class Least:
    """Records the forwards of a model into a file."""

    def __init__(self, model: Any, path: Path) -> None:
        self._model, self._path = model, path
        self._outputs: list[Any] = []
        self._waiting: deque[Step] = deque()
        self._wake = threading.Event()
        self._is_over = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record while entered; leaving waits until all is written."""
        handles = [
            layer.register_forward_hook(lambda _m, _a, output: self._outputs.append(output))
            for layer in self._model.model.layers
        ]
        handles.append(self._model.register_forward_hook(self._ended))
        writer = threading.Thread(target=self._write)
        writer.start()
        try:
            yield
        finally:
            self._is_over = True
            self._wake.set()
            writer.join()
            for handle in handles:
                handle.remove()

    def _ended(self, _module: Any, _args: Any, output: Any) -> None:
        self._outputs.clear()
        row = output.logits[0, -1].detach().clone().float().numpy()
        self._waiting.append((time.time(), row))

    def _write(self) -> None:
        with sqlite3.connect(self._path) as db:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute("CREATE TABLE steps (step INTEGER PRIMARY KEY, ended REAL, about TEXT)")
            while not self._is_over or self._waiting:
                self._wake.wait(LINGER_S)
                rows = [_described(*self._waiting.popleft()) for _ in range(len(self._waiting))]
                db.executemany("INSERT INTO steps (ended, about) VALUES (?, ?)", rows)
                db.commit()
        db.close()


def _described(ended: float, row: npt.NDArray[np.float32]) -> tuple[float, str]:
    best = np.argpartition(row, -BEST)[-BEST:]
    shifted = row - row.max()
    weights = np.exp(shifted)
    total = weights.sum()
    entropy = np.log(total) - (weights @ shifted) / total
    report = {"best": best.tolist(), "logits": row[best].tolist(), "entropy": float(entropy)}
    return ended, json.dumps(report)


def measure(model: Any, seconds: float, tokens: int) -> dict[str, Any]:
    """Return the ratio of `model.generate` under SDPA with and without the least of recorders."""
    model.set_attn_implementation("sdpa")
    prompt = bench_prompt(tokens)

    def recorded() -> Timing:
        with tempfile.TemporaryDirectory() as folder:
            with Least(model, Path(folder) / "least.sqlite").recording():
                timing = time_generate(model, prompt, tokens)
                written = time.perf_counter()
            return replace(timing, written=time.perf_counter() - written)

    def plain() -> Timing:
        return time_generate(model, prompt, tokens)

    blocks = sandwiched(plain, {"least": recorded}, seconds=seconds)
    return {
        "decode_ms_without": decode_ms(blocks),
        "ratio": compared(blocks["least"], "total"),
        "decode_ratio": compared(blocks["least"], "decode", "total"),
    }
