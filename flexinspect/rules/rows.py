"""Rows of the executed mask that see no key at all, and who reads them.

A row without a key gets no attention output, and its hidden state goes to every row that has it
among its keys. Nothing is concluded from what was declared but whether the emptiness was meant. A
mask is looked at when it is new to the trace, and remembered by its fingerprint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from flexinspect.findings import Finding, Severity
from flexinspect.masks import BoolArray, row_chunks
from flexinspect.records import CallRecord, MaskRecord, StepRecord
from flexinspect.rules.base import FindingKind, Rule
from flexinspect.rules.scene import Scene
from flexinspect.rules.words import Positions, counted, listed

EMPTY_ROW = "mask.empty-row"

_CHUNK = 256
"""Rows looked at in one piece, so that a copy of a large mask takes a few MiB."""


@dataclass(frozen=True, slots=True)
class EmptyRows:
    """Rows of one mask that see no key, in all heads or only in `heads`.

    `mask` comes without its cells. `rows` counts from the mask's first row, ascending; `last` is
    the mask's last row. `readers` says for each of the rows how many other rows have it among their
    keys, in any head; None where cells were not recorded. `averaged` says of each row whether
    softmax gave all keys the same weight instead of none (None: of no row).
    """

    mask: MaskRecord
    rows: Positions
    last: int
    readers: npt.NDArray[np.int64] | None
    heads: tuple[int, ...] = ()
    n_heads: int = 1
    averaged: BoolArray | None = None

    def only(self, keep: BoolArray) -> EmptyRows:
        """Return some of the rows."""
        readers = None if self.readers is None else self.readers[keep]
        averaged = None if self.averaged is None else self.averaged[keep]
        return replace(self, rows=self.rows[keep], readers=readers, averaged=averaged)

    @property
    def has_newest(self) -> bool:
        """Whether the last row is one of them: the one whose output chooses the next token."""
        return int(self.rows[-1]) == self.last

    @property
    def n_read(self) -> int:
        """How many of the rows others read (0 where that is not known)."""
        return 0 if self.readers is None else int(np.count_nonzero(self.readers))


class RowsRule(Rule):
    """Says which rows see nothing: an error if they are read or newest, a note if not or if meant.

    Where only some heads see nothing it is a warning. From level advanced on, as cells are recorded
    there; at basic, and for masks too large to record, only what the block tables of a compiled
    call show: whole blocks of rows.
    """

    name: ClassVar[str] = "rows"
    findings: ClassVar[Mapping[str, FindingKind]] = {
        EMPTY_ROW: FindingKind(Severity.ERROR, "rows of the executed mask that see no key at all")
    }

    def __init__(self) -> None:
        self._known: dict[str, tuple[EmptyRows, ...]] = {}
        """By fingerprint and for the whole run, as a mask is in one step's record only."""
        self._declared: Mapping[str, Any] = {}
        self._told: dict[tuple[Any, ...], set[int]] = {}
        self._unread: set[int] = set()

    def begin(self, scene: Scene) -> None:
        """Begin with nothing told; masks stay known."""
        super().begin(scene)
        self._declared = scene.generation.declared
        self._told = {}
        self._unread = set()

    def look(self, step: StepRecord) -> Sequence[Finding]:
        """Return what is empty in the step's masks, in words, unless it was told of."""
        for mask in step.masks:
            parts = find_empty_rows(mask)
            if parts:
                self._known[mask.fingerprint] = parts
        if not self._known:
            return ()
        calls: dict[str, list[CallRecord]] = {}
        for call in step.calls:
            if call.mask is not None and call.mask in self._known:
                calls.setdefault(call.mask, []).append(call)
        found = []
        for fingerprint, received in calls.items():
            for part in self._known[fingerprint]:
                found += self._judge(step, part, received)
        if self._unread:
            found += self._newly_read(step)
        return found

    def _judge(
        self, step: StepRecord, part: EmptyRows, calls: Sequence[CallRecord]
    ) -> list[Finding]:
        part = part.only(self._not_told(step, part, calls))
        if not len(part.rows):
            return []
        meant = self._is_meant(step.kv_before + part.rows)
        if not part.heads and part.readers is not None:
            unread = part.rows[(part.readers == 0) & ~meant & (part.rows != part.last)]
            self._unread.update((step.kv_before + unread).tolist())
        found = []
        for keep, as_meant in ((~meant, False), (meant, True)):
            if keep.any():
                found.append(self._finding(step, part.only(keep), calls, as_meant))
        return found

    def _not_told(
        self, step: StepRecord, part: EmptyRows, calls: Sequence[CallRecord]
    ) -> BoolArray:
        """Return which of the rows are news; all rows of generated text count as one.

        Else a mask that is wrong for every decode row would be told of in every step.
        """
        key = (step.branch, part.heads != (), *(call.layer for call in calls))
        told = self._told.setdefault(key, set())
        n_prompt = self.scene.n_prompt or step.kv_after
        places = [min(pos, n_prompt) for pos in (step.kv_before + part.rows).tolist()]
        news = np.array([place not in told for place in places])
        told.update(places)
        return news

    def _is_meant(self, positions: Positions) -> BoolArray:
        """Say which rows the declared mask leaves empty (see `masks.MaskRule`)."""
        starts, head, low = (self._declared.get(name) for name in ("starts", "head", "low"))
        if not starts or not head or not low:
            return np.zeros(len(positions), np.bool_)
        region = np.searchsorted(starts, positions, side="right") - 1
        meant: BoolArray = (np.asarray(head)[region] == 0) & (np.asarray(low)[region] > positions)
        return meant

    def _finding(
        self, step: StepRecord, part: EmptyRows, calls: Sequence[CallRecord], meant: bool
    ) -> Finding:
        positions = step.kv_before + part.rows
        n_layers = len({call.layer for call in step.calls})
        layers = [call.layer for call in calls]
        asks = ""
        if meant:
            isolated = self._declared.get("separators") == "isolated"
            asks = f", as {'--separators isolated' if isolated else 'the declared mask'} asks"
        one = len(positions) == 1
        return Finding(
            id=EMPTY_ROW,
            severity=_severity(part, meant),
            sentence=(
                f"{self.scene.rows(positions)} {'sees' if one else 'see'} no key"
                f"{_in_heads(part)}{_in_layers(layers, n_layers)} ({self.scene.first(positions)})"
                f"{asks}; {_outcome(calls[0], part, one)}{_read(part, one)}."
            ),
            generation=step.generation,
            branch=step.branch,
            step=step.step,
            layer=layers[0] if len(layers) == 1 else None,
            head=part.heads[0] if len(part.heads) == 1 else None,
            positions=listed(positions),
            evidence={**_evidence(part), "layers": layers, "path": calls[0].path, "meant": meant},
        )

    def _newly_read(self, step: StepRecord) -> list[Finding]:
        """Return a finding when empty rows that nobody read are read after all."""
        unread = np.array(sorted(self._unread))
        counts = np.zeros(len(unread), np.int64)
        for mask in step.masks:
            cells = asked_cells(mask)
            if cells is not None:
                offset = mask.q_offset - mask.kv_offset
                counts += count_readers(cells, unread - mask.kv_offset, offset)
        read = unread[counts > 0]
        if not len(read):
            return []
        self._unread.difference_update(read.tolist())
        sentence = (
            f"{self.scene.rows(read)} that saw no key at all ({self.scene.first(read)}) "
            f"{'is' if len(read) == 1 else 'are'} read from step {step.step} on."
        )
        return [
            Finding(
                id=EMPTY_ROW,
                severity=Severity.ERROR,
                sentence=sentence,
                generation=step.generation,
                branch=step.branch,
                step=step.step,
                positions=listed(read),
                evidence={"empty": len(read), "read": len(read), "readers": int(counts.max())},
            )
        ]


RULE: type[Rule] = RowsRule


def find_empty_rows(mask: MaskRecord) -> tuple[EmptyRows, ...]:
    """Return the rows of a mask that see nothing in any head, and those that do so in some."""
    cells, offset = asked_cells(mask), mask.q_offset - mask.kv_offset
    if cells is None:
        return _empty_blocks(mask)
    if mask.kind.startswith("none"):
        return ()
    if cells.shape[1] == 1 < mask.q_len:  # one row that is broadcast
        cells = np.broadcast_to(cells, (len(cells), mask.q_len, cells.shape[2]))
    empty = _empty_by_head(cells, offset)
    if empty is None:
        return ()
    everywhere = empty.all(axis=0)
    parts = []
    for rows, heads in (
        (np.flatnonzero(everywhere), ()),
        (np.flatnonzero(empty.any(axis=0) & ~everywhere), _heads_of(empty & ~everywhere)),
    ):
        if len(rows):
            readers = count_readers(cells, rows + offset, offset)
            last, averaged = cells.shape[1] - 1, _averaged(mask, rows)
            parts.append(EmptyRows(_bare(mask), rows, last, readers, heads, len(cells), averaged))
    return tuple(parts)


def asked_cells(mask: MaskRecord) -> BoolArray | None:
    """Return the cells without the rows that were meant to be closed and are averaged instead.

    Such a row has all keys, but nobody asked for them, and what it makes of them is no attention:
    it sees no key in any sense that matters, and whom it reads does not matter either.
    """
    if mask.cells is None or mask.averaged is None:
        return mask.cells
    asked: BoolArray = mask.cells & ~mask.averaged[..., None]
    return asked


def _averaged(mask: MaskRecord, rows: Positions) -> BoolArray | None:
    if mask.averaged is None:
        return None
    averaged: BoolArray = np.any(mask.averaged, axis=0)
    return averaged.repeat(len(rows)) if len(averaged) == 1 else averaged[rows]


def _empty_by_head(cells: BoolArray, offset: int) -> BoolArray | None:
    """Return which rows are empty, bool (heads, rows), or None when none is.

    A row that sees itself is not empty, which settles most masks by their diagonal: of 8192 rows
    and keys in a hundredth of the time that reading all cells takes.
    """
    heads, n_rows, n_keys = cells.shape
    closed = np.ones((heads, n_rows), np.bool_)
    if 0 <= offset <= n_keys - n_rows:
        closed = ~cells.diagonal(offset, 1, 2)
        if not closed.any():
            return None
    rows = np.flatnonzero(closed.any(axis=0))
    empty = np.zeros((heads, n_rows), np.bool_)
    for start, stop in row_chunks(len(rows), _CHUNK):
        some = rows[start:stop]
        empty[:, some] = ~cells[:, some].any(axis=2)
    return empty if empty.any() else None


def count_readers(cells: BoolArray, columns: Positions, offset: int) -> npt.NDArray[np.int64]:
    """Return for each key how many rows see it in any head, without the key's own row.

    `columns` count from the mask's first key and may lie outside; row r is at column r + offset.
    """
    counts = np.zeros(len(columns), np.int64)
    inside = np.flatnonzero((columns >= 0) & (columns < cells.shape[2]))
    columns = columns[inside]
    for start, stop in row_chunks(cells.shape[1], _CHUNK):
        seen: BoolArray = np.any(cells[:, start:stop, columns], axis=0)
        own_row = columns - offset - start
        here = np.flatnonzero((own_row >= 0) & (own_row < stop - start))
        seen[own_row[here], here] = False
        counts[inside] += np.count_nonzero(seen, axis=0)
    return counts


def _empty_blocks(mask: MaskRecord) -> tuple[EmptyRows, ...]:
    """Return the rows of blocks that the compiled kernel never visits."""
    if not mask.compiled or mask.partial is None or mask.block_q is None:
        return ()
    visited = mask.partial if mask.full is None else mask.partial | mask.full
    empty = ~visited.any(axis=(0, 2))
    rows = np.flatnonzero(empty.repeat(mask.block_q)[: mask.q_len])
    if not len(rows):
        return ()
    return (EmptyRows(_bare(mask), rows, mask.q_len - 1, None, n_heads=len(visited)),)


def _bare(mask: MaskRecord) -> MaskRecord:
    """Return the mask without what is large, as it is remembered for the whole run."""
    return replace(mask, cells=None, averaged=None, partial=None, full=None)


def _heads_of(empty: BoolArray) -> tuple[int, ...]:
    return tuple(np.flatnonzero(empty.any(axis=1)).tolist())


def _severity(part: EmptyRows, meant: bool) -> Severity:
    if meant:
        return Severity.WARNING if part.has_newest else Severity.NOTE
    if part.heads or (part.readers is None and not part.has_newest):
        return Severity.WARNING
    return Severity.ERROR if part.n_read or part.has_newest else Severity.NOTE


def _evidence(part: EmptyRows) -> dict[str, Any]:
    return {
        "mask": part.mask.fingerprint,
        "rows": part.last + 1,
        "empty": len(part.rows),
        "heads": list(part.heads) or "all",
        "read": None if part.readers is None else part.n_read,
        "readers": None if part.readers is None else int(part.readers.max()),
        "newest": part.has_newest,
    }


def _in_heads(part: EmptyRows) -> str:
    if not part.heads:
        return " at all"
    if len(part.heads) == 1:
        return f" in head {part.heads[0]}"
    return f" in up to {len(part.heads)} of {part.n_heads} heads"


def _in_layers(layers: Sequence[int], n_layers: int) -> str:
    if len(layers) == n_layers:
        return ""
    if len(layers) == 1:
        return f" in layer {layers[0]}"
    return f" in {len(layers)} of {n_layers} layers"


def _outcome(call: CallRecord, part: EmptyRows, one: bool) -> str:
    """Say what such a row gets; checked for each path on torch 2.13 (CPU)."""
    them = "it" if one else "them"
    gets = "it gets" if one else "they get"
    if part.averaged is not None and part.averaged.any():
        if part.averaged.all():
            return f"{gets} the mean of all values, as closed means the lowest float"
        low = "where closed means the lowest float"
        return f"{gets} the mean of all values {low}, {_nothing(call)} if -Inf"
    if call.path.startswith("flex"):
        return f"FlexAttention gives {them} zeros (a dense softmax would give NaN)"
    if part.mask.kind == "float":
        return f"{gets} {_nothing(call)}, as closed means -Inf"
    if call.path == "sdpa":
        return f"SDPA gives {them} zeros"
    return f"what {call.backend} gives {them} is not known"


def _nothing(call: CallRecord) -> str:
    """Return what a row of -Inf gets where a mask is added to the scores."""
    return "NaN" if call.path == "eager" else "zeros"


def _read(part: EmptyRows, one: bool) -> str:
    """Say who reads the rows."""
    if part.has_newest:
        who = "it is" if one else "among them is"
        newest = f", and {who} the newest row, which chooses the next token"
    else:
        newest = ""
    if part.readers is None:
        return f"{newest}; whether other rows read {'it' if one else 'them'} was not recorded"
    if not part.n_read:
        return newest or f", and no other row of this step reads {'it' if one else 'them'}"
    least, most = int(part.readers[part.readers > 0].min()), int(part.readers.max())
    which = "it" if one else "them" if part.n_read == len(part.rows) else f"{part.n_read} of them"
    rows = f"{'up to ' if least < most else ''}{counted(most, 'other row')}"
    return f"{newest}, and {rows} {'reads' if most == 1 else 'read'} {which}"
