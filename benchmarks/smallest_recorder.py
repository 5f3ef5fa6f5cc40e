"""The smallest recorder: a yardstick for the bands, which no recorder can go below.

It keeps references to the output and the attention call of each layer, and the newest row of
logits. A thread writes the function, the shapes and the mask's type of each call, the best ten
tokens, the entropy and the time of each step into SQLite, several steps in one transaction. It has
no records and no rules, and checks nothing: neither masks nor values, inputs, memory or failures.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flexinspect_hooks.capture.recorder import LINGER_S
from flexinspect_hooks.python_internals.patching import patch

BEST = 10

Call = tuple[str, tuple[int, ...], tuple[int, ...], str]
"""An attention call: its function, the shapes of queries and keys, the type of its mask."""

Step = tuple[float, npt.NDArray[np.float32], list[Call]]
"""When a step ended, its newest row of logits (V,), its attention calls."""


class SmallestRecorder:
    """Records the forwards of a model into a file."""

    def __init__(self, model: Any, path: Path) -> None:
        self._model, self._path = model, path
        self._outputs: list[Any] = []
        self._calls: list[tuple[str, Any, Any, Any]] = []
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
        unwrap = self._wrap_attention()
        writer = threading.Thread(target=self._write)
        writer.start()
        try:
            yield
        finally:
            self._is_over = True
            self._wake.set()
            writer.join()
            unwrap()
            for handle in handles:
                handle.remove()

    def _wrap_attention(self) -> Callable[[], None]:
        """Keep a reference to each attention call; returns a function that ends it."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as REGISTRY

        original, calls, wrapped = REGISTRY.get_interface, self._calls, dict[int, Any]()
        own = set(map(id, self._model.modules()))  # other models call the same function

        def get_interface(name: str, default: Any) -> Any:
            function = original(name, default)
            if id(function) not in wrapped:

                def attention(module: Any, query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
                    if id(module) in own:
                        mask = args[1] if len(args) > 1 else kwargs.get("attention_mask")
                        calls.append((name, query, key, mask))
                    return function(module, query, key, *args, **kwargs)

                wrapped[id(function)] = attention
            return wrapped[id(function)]

        return patch(REGISTRY, "get_interface", get_interface)

    def _ended(self, _module: Any, _args: Any, output: Any) -> None:
        self._outputs.clear()
        calls = [
            (name, (*query.shape,), (*key.shape,), type(mask).__name__)
            for name, query, key, mask in self._calls
        ]
        self._calls.clear()
        row = output.logits[0, -1].detach().clone().float().numpy()
        self._waiting.append((time.time(), row, calls))

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


def _described(ended: float, row: npt.NDArray[np.float32], calls: list[Call]) -> tuple[float, str]:
    best = np.argpartition(row, -BEST)[-BEST:]
    shifted = row - row.max()
    weights = np.exp(shifted)
    total = weights.sum()
    entropy = np.log(total) - (weights @ shifted) / total
    report = {"best": best.tolist(), "logits": row[best].tolist(), "entropy": float(entropy)}
    report["calls"] = calls
    return ended, json.dumps(report)
