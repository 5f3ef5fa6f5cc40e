"""`--max-size`: a trace that stays below a size, first by less detail and then by fewer steps.

The writer thread calls it. At `_THIN_AT` of the size the level is lowered by one, which applies
from the next step on; a step that would not fit, and those after it, are stored with their tokens,
distribution and memory only; at the size itself steps are no longer stored. The model goes on, and
an event says what is missing from where on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from flexinspect.core.text import plural
from flexinspect.inputs.model_sizes import human_bytes
from flexinspect.records.step import LEVELS, EventRecord, StepRecord

SIZE_EVENT: Final = "size-limit"
_THIN_AT: Final = {"extreme": 0.5, "advanced": 0.75}
"""The part of the size from which a level is too much."""
_BARE_AT: Final = 0.9
_CALL_BYTES: Final = 300
"""About the size of a row of the trace: of an attention call, a layer's statistics, a token."""


class SizeLimit:
    """Keeps the trace at `path` below `max_bytes`; `set_level` lowers the level of its sessions."""

    def __init__(
        self, path: Path, max_bytes: int, level: Callable[[], str], set_level: Callable[[str], None]
    ) -> None:
        self._path, self._max_bytes = path, max_bytes
        self._level, self._set_level = level, set_level
        self._is_bare = self._is_full = False
        self._n_dropped = 0
        self.events: list[EventRecord] = []
        """What changed since the last call, to be written."""

    def thin(self, records: Sequence[StepRecord]) -> list[StepRecord]:
        """Return what is to be stored of some steps."""
        kept: list[StepRecord] = []
        size = self._size()
        for record in records:
            if not self._is_full and size >= self._max_bytes:
                self._is_full = True
                text = f"no step is stored from step {record.step} on; the model goes on"
                self._report(record, text)
            if self._is_full:
                self._n_dropped += 1
                continue
            if not self._is_bare and size + _size_of(record) >= _BARE_AT * self._max_bytes:
                self._is_bare = True
                what = "only tokens, distributions and memory are stored"
                self._report(record, f"{what} from step {record.step} on")
            kept.append(_bare(record) if self._is_bare else record)
            size += _size_of(kept[-1])
        if records:
            self._lower_level(size, records[-1])
        return kept

    def final_event(self) -> EventRecord | None:
        """Return how many steps are missing, None if none are."""
        if not self._n_dropped:
            return None
        text = f"{plural(self._n_dropped, 'step')} of this run are not in the trace (--max-size)"
        return EventRecord(SIZE_EVENT, text, time.time(), data={"dropped": self._n_dropped})

    def _lower_level(self, size: int, record: StepRecord) -> None:
        level = self._level()
        share = _THIN_AT.get(level)
        if share is not None and size >= share * self._max_bytes:
            lower = LEVELS[LEVELS.index(level) - 1]
            self._set_level(lower)
            self._report(record, f"level {lower} instead of {level} after step {record.step}")

    def _report(self, record: StepRecord, what: str) -> None:
        share = f"{self._size() / self._max_bytes:.0%} of --max-size {human_bytes(self._max_bytes)}"
        text = f"the trace has {share}: {what}"
        place = (record.generation, record.step)
        self.events.append(EventRecord(SIZE_EVENT, text, time.time(), *place))

    def _size(self) -> int:
        """The bytes of the trace, with what is not folded into it yet."""
        size = 0
        for name in (str(self._path), f"{self._path}-wal"):
            try:
                size += os.stat(name).st_size  # noqa: PTH116 (two calls for each batch of steps)
            except OSError:
                continue
        return size


def _size_of(record: StepRecord) -> int:
    """About how many bytes a step takes, before compression."""
    arrays = sum(one.array.nbytes for one in record.arrays)
    cells = sum(one.cells.size // 8 for one in record.masks if one.cells is not None)
    rows = 1 + len(record.calls) + len(record.layer_stats) + len(record.tokens)
    return arrays + cells + rows * _CALL_BYTES


def _bare(record: StepRecord) -> StepRecord:
    nothing: dict[str, tuple[()]] = dict.fromkeys(
        ("calls", "builds", "layer_stats", "masks", "arrays"), ()
    )
    return replace(record, inputs=None, **nothing)
