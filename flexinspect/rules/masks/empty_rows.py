"""Rows of the executed mask that see no key at all, and who reads them.

A row without a key gets no attention output, and its hidden state goes to every row that has it
among its keys. Nothing is concluded from what was declared but whether the emptiness was meant. A
mask is looked at when it is new to the trace, and remembered by its fingerprint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from flexinspect.core.text import Positions, format_ranges, limit_positions, plural
from flexinspect.masks.algebra import BoolArray, row_chunks
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.step import CallRecord, MaskRecord, StepRecord
from flexinspect.rules.context import RuleContext
from flexinspect.rules.engine import FindingKind, Rule

EMPTY_ROW = "mask.empty-row"

_MAX_NAMED_ROWS = 8
"""Rows of a call outside of a model that a sentence names."""


class EmptyRowsRule(Rule):
    """Says which rows see nothing: an error if one is newest, a warning if others read them.

    A note if nobody does, or if it is meant. Where only some heads see nothing it is a warning.
    From level advanced on, as cells are recorded there; at basic, and for masks too large to
    record, only what the block tables of a compiled call show: whole blocks of rows.
    """

    name: ClassVar[str] = "rows"
    handles_standalone_calls: ClassVar[bool] = True
    findings: ClassVar[Mapping[str, FindingKind]] = {
        EMPTY_ROW: FindingKind(
            Severity.WARNING,
            "rows of the executed mask that see no key at all",
            "Attention adds nothing in such a row, and whoever reads it takes in a state that "
            "knows nothing of the text before it; a dense softmax over it would be NaN.",
            "In the mask panel the row is closed from end to end. A hook on the input of o_proj "
            "shows zeros in these rows in every layer.",
            "Give every token a segment: the usual causes are separators or a BOS that belong to "
            "none, and spans counted on ids without the special tokens. A rule that keeps the "
            "diagonal open (q_idx == kv_idx) leaves no row empty.",
            "SELECT c.layer, c.path, m.fingerprint, m.kind, m.q_len, m.kv_len, m.rule, "
            "m.rule_source FROM calls c JOIN masks m ON m.fingerprint = c.mask "
            "WHERE c.generation = {generation} AND c.branch = {branch} AND c.step = {step} "
            "AND c.layer = {layer} ORDER BY c.layer",
        )
    }

    def __init__(self) -> None:
        self._empty_rows: dict[str, tuple[EmptyRows, ...]] = {}
        """By fingerprint and for the whole run, as a mask is in one step's record only."""
        self._declared: Mapping[str, Any] = {}
        self._reported: dict[tuple[Any, ...], set[int]] = {}
        self._unread: set[int] = set()

    def on_generation_start(self, context: RuleContext) -> None:
        """Begin with nothing told; masks stay known."""
        super().on_generation_start(context)
        self._declared = context.generation.declared
        self._reported = {}
        self._unread = set()

    def on_step(self, step: StepRecord) -> Sequence[Finding]:
        """Return what is empty in the step's masks, in words, unless it was told of."""
        for mask in step.masks:
            parts = find_empty_rows(mask)
            if parts:
                self._empty_rows[mask.fingerprint] = parts
        if not self._empty_rows:
            return ()
        calls: dict[str, list[CallRecord]] = {}
        for call in step.calls:
            if call.mask is not None and call.mask in self._empty_rows:
                calls.setdefault(call.mask, []).append(call)
        # Of earlier steps alone: a layer that reads what another one leaves empty in the same step
        # ran something else, which is told of as that.
        found = self._newly_read_findings(step) if self._unread else []
        for fingerprint, received in calls.items():
            for part in self._empty_rows[fingerprint]:
                found += self._check_rows(step, part, received)
        return found

    def _check_rows(
        self, step: StepRecord, part: EmptyRows, calls: Sequence[CallRecord]
    ) -> list[Finding]:
        if self.context.is_standalone:
            return [_standalone_finding(step, part, calls[0])]
        part = part.select(self._find_unreported(step, part, calls))
        if not len(part.rows):
            return []
        meant = self._is_declared_empty(step.kv_before + part.rows)
        if not part.heads and part.readers is not None:
            unread = part.rows[(part.readers == 0) & ~meant & (part.rows != part.last)]
            self._unread.update((step.kv_before + unread).tolist())
        found = []
        for keep, as_meant in ((~meant, False), (meant, True)):
            if keep.any():
                found.append(self._finding(step, part.select(keep), calls, as_meant))
        return found

    def _find_unreported(
        self, step: StepRecord, part: EmptyRows, calls: Sequence[CallRecord]
    ) -> BoolArray:
        """Return which of the rows are news; all rows of generated text count as one.

        Else a mask that is wrong for every decode row would be told of in every step.
        """
        key = (step.branch, part.heads != (), *(call.layer for call in calls))
        told = self._reported.setdefault(key, set())
        n_prompt = self.context.n_prompt or step.kv_after
        places = [min(pos, n_prompt) for pos in (step.kv_before + part.rows).tolist()]
        news = np.array([place not in told for place in places])
        told.update(places)
        return news

    def _is_declared_empty(self, positions: Positions) -> BoolArray:
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
            severity=_empty_row_severity(part, meant),
            sentence=(
                f"{self.context.format_rows(positions)} {'sees' if one else 'see'} no key"
                f"{_format_in_heads(part)}{_format_in_layers(layers, n_layers)} ({self.context.format_first_position(positions)})"
                f"{asks}; {_format_row_output(calls[0], part, one)}{_format_readers(part, one)}."
            ),
            generation=step.generation,
            branch=step.branch,
            step=step.step,
            layer=layers[0] if len(layers) == 1 else None,
            head=part.heads[0] if len(part.heads) == 1 else None,
            positions=limit_positions(positions),
            evidence={
                **_empty_row_evidence(part),
                "layers": layers,
                "path": calls[0].path,
                "meant": meant,
            },
            layers=tuple(layers) if len(layers) > 1 else (),
        )

    def _newly_read_findings(self, step: StepRecord) -> list[Finding]:
        """Return a finding when empty rows that nobody read are read after all."""
        unread = np.array(sorted(self._unread))
        counts = np.zeros(len(unread), np.int64)
        for mask in step.masks:
            cells = intended_cells(mask)
            if cells is not None:
                offset = mask.q_offset - mask.kv_offset
                counts += count_readers(cells, unread - mask.kv_offset, offset)
        read = unread[counts > 0]
        if not len(read):
            return []
        self._unread.difference_update(read.tolist())
        sentence = (
            f"{self.context.format_rows(read)} that saw no key at all ({self.context.format_first_position(read)}) "
            f"{'is' if len(read) == 1 else 'are'} read from step {step.step} on."
        )
        return [
            Finding(
                id=EMPTY_ROW,
                severity=Severity.WARNING,
                sentence=sentence,
                generation=step.generation,
                branch=step.branch,
                step=step.step,
                positions=limit_positions(read),
                evidence={"empty": len(read), "read": len(read), "readers": int(counts.max())},
            )
        ]


def _standalone_finding(step: StepRecord, part: EmptyRows, call: CallRecord) -> Finding:
    """Return the finding of a call outside of a model, whose rows have no place in a text.

    That a row is read is known where rows and keys are of the same tokens, so of one length.
    """
    one, is_square = len(part.rows) == 1, part.mask.q_len == part.mask.kv_len
    n_rows = part.last + 1
    is_read = is_square and part.n_read > 0
    rows = format_ranges(part.rows[:_MAX_NAMED_ROWS].tolist()) + (
        "" if len(part.rows) <= _MAX_NAMED_ROWS else ", ..."
    )
    who = f"{'Row' if one else f'{len(part.rows)} rows'} {rows} of {n_rows}"
    sentence = (
        f"{who} {'sees' if one else 'see'} no key{_format_in_heads(part)} in this call; "
        f"{_format_row_output(call, part, one)}{_format_readers(replace(part, last=-1), one) if is_square else ''}."
    )
    is_bad = is_read or len(part.rows) == n_rows
    return Finding(
        id=EMPTY_ROW,
        severity=Severity.WARNING if is_bad else Severity.NOTE,
        sentence=sentence,
        generation=step.generation,
        branch=step.branch,
        step=step.step,
        head=part.heads[0] if len(part.heads) == 1 else None,
        positions=limit_positions(step.kv_before + part.rows),
        evidence={**_empty_row_evidence(part), "path": call.path},
    )


def _empty_row_severity(part: EmptyRows, meant: bool) -> Severity:
    if meant:
        return Severity.WARNING if part.has_newest else Severity.NOTE
    if part.heads or (part.readers is None and not part.has_newest):
        return Severity.WARNING
    if part.has_newest:
        return Severity.ERROR
    return Severity.WARNING if part.n_read else Severity.NOTE


def _empty_row_evidence(part: EmptyRows) -> dict[str, Any]:
    return {
        "mask": part.mask.fingerprint,
        "rows": part.last + 1,
        "empty": len(part.rows),
        "heads": list(part.heads) or "all",
        "read": None if part.readers is None else part.n_read,
        "readers": None if part.readers is None else int(part.readers.max()),
        "first_reader": _first_reader_pos(part),
        "newest": part.has_newest,
    }


def _first_reader_pos(part: EmptyRows) -> int | None:
    """Return the position of the first row that reads one of the rows, None when none does."""
    if part.first_reader is None or not part.n_read:
        return None
    return part.mask.q_offset + int(part.first_reader[part.first_reader >= 0].min())


def _format_in_heads(part: EmptyRows) -> str:
    if not part.heads:
        return " at all"
    if len(part.heads) == 1:
        return f" in head {part.heads[0]}"
    return f" in up to {len(part.heads)} of {part.n_heads} heads"


def _format_in_layers(layers: Sequence[int], n_layers: int) -> str:
    if len(layers) == n_layers:
        return ""
    if len(layers) == 1:
        return f" in layer {layers[0]}"
    return f" in {len(layers)} of {n_layers} layers"


def _format_row_output(call: CallRecord, part: EmptyRows, one: bool) -> str:
    """Say what such a row gets; checked for each path on torch 2.13 (CPU)."""
    them = "it" if one else "them"
    gets = "it gets" if one else "they get"
    if part.averaged is not None and part.averaged.any():
        if part.averaged.all():
            return f"{gets} the mean of all values, as closed means the lowest float"
        low = "where closed means the lowest float"
        return f"{gets} the mean of all values {low}, {_format_closed_softmax(call)} if -Inf"
    if call.path.startswith("flex"):
        return f"FlexAttention gives {them} zeros (a dense softmax would give NaN)"
    if part.mask.kind == "float":
        return f"{gets} {_format_closed_softmax(call)}, as closed means -Inf"
    if call.path == "sdpa":
        return f"SDPA gives {them} zeros"
    return f"what {call.backend} gives {them} is not known"


def _format_closed_softmax(call: CallRecord) -> str:
    """Return what a row of -Inf gets where a mask is added to the scores."""
    return "NaN" if call.path == "eager" else "zeros"


def _format_readers(part: EmptyRows, one: bool) -> str:
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
    first = f" ({'' if most == 1 else 'first: '}position {_first_reader_pos(part)})"
    rows = f"{'up to ' if least < most else ''}{plural(most, 'other row')}{first}"
    return f"{newest}, and {rows} {'reads' if most == 1 else 'read'} {which}"


_EMPTY_ROW_CHUNK = 256
"""Rows looked at in one piece, so that a copy of a large mask takes a few MiB."""


@dataclass(frozen=True, slots=True)
class EmptyRows:
    """Rows of one mask that see no key, in all heads or only in `heads`.

    `mask` comes without its cells. `rows` counts from the mask's first row, ascending; `last` is
    the mask's last row. `readers` says for each of the rows how many other rows have it among their
    keys, in any head, and `first_reader` which is the first of them (-1: none); both are None where
    cells were not recorded. `averaged` says of each row whether softmax gave all keys the same
    weight instead of none (None: of no row).
    """

    mask: MaskRecord
    rows: Positions
    last: int
    readers: npt.NDArray[np.int64] | None
    heads: tuple[int, ...] = ()
    n_heads: int = 1
    averaged: BoolArray | None = None
    first_reader: npt.NDArray[np.int64] | None = None

    def select(self, keep: BoolArray) -> EmptyRows:
        """Return some of the rows."""
        readers = None if self.readers is None else self.readers[keep]
        averaged = None if self.averaged is None else self.averaged[keep]
        first = None if self.first_reader is None else self.first_reader[keep]
        rows = self.rows[keep]
        return replace(self, rows=rows, readers=readers, averaged=averaged, first_reader=first)

    @property
    def has_newest(self) -> bool:
        """Whether the last row is one of them: the one whose output chooses the next token."""
        return int(self.rows[-1]) == self.last

    @property
    def n_read(self) -> int:
        """How many of the rows others read (0 where that is not known)."""
        return 0 if self.readers is None else int(np.count_nonzero(self.readers))


def find_empty_rows(mask: MaskRecord) -> tuple[EmptyRows, ...]:
    """Return the rows of a mask that see nothing in any head, and those that do so in some."""
    cells, offset = intended_cells(mask), mask.q_offset - mask.kv_offset
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
        (np.flatnonzero(empty.any(axis=0) & ~everywhere), _heads_with_any(empty & ~everywhere)),
    ):
        if len(rows):
            readers = count_readers(cells, rows + offset, offset)
            first = _find_first_readers(cells, rows + offset, offset)
            last, n_heads = cells.shape[1] - 1, len(cells)
            averaged = _averaged_rows(mask, rows)
            parts.append(
                EmptyRows(
                    _without_arrays(mask), rows, last, readers, heads, n_heads, averaged, first
                )
            )
    return tuple(parts)


def intended_cells(mask: MaskRecord) -> BoolArray | None:
    """Return the cells without the rows that were meant to be closed and are averaged instead.

    Such a row has all keys, but nobody asked for them, and what it makes of them is no attention:
    it sees no key in any sense that matters, and whom it reads does not matter either.
    """
    if mask.cells is None or mask.averaged is None:
        return mask.cells
    asked: BoolArray = mask.cells & ~mask.averaged[..., None]
    return asked


def _averaged_rows(mask: MaskRecord, rows: Positions) -> BoolArray | None:
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
    for start, stop in row_chunks(len(rows), _EMPTY_ROW_CHUNK):
        some = rows[start:stop]
        empty[:, some] = ~cells[:, some].any(axis=2)
    return empty if empty.any() else None


def count_readers(cells: BoolArray, columns: Positions, offset: int) -> npt.NDArray[np.int64]:
    """Return for each key how many rows see it in any head, without the key's own row.

    `columns` count from the mask's first key and may lie outside; row r is at column r + offset.
    """
    counts = np.zeros(len(columns), np.int64)
    for inside, _, seen in _iter_readers(cells, columns, offset):
        counts[inside] += np.count_nonzero(seen, axis=0)
    return counts


def _find_first_readers(cells: BoolArray, columns: Positions, offset: int) -> npt.NDArray[np.int64]:
    """Return for each key the first row that sees it (see `count_readers`), -1 for none."""
    first = np.full(len(columns), -1, np.int64)
    for inside, start, seen in _iter_readers(cells, columns, offset):
        new = inside[(first[inside] < 0) & seen.any(axis=0)]
        first[new] = start + seen.argmax(axis=0)[np.isin(inside, new)]
    return first


def _iter_readers(
    cells: BoolArray, columns: Positions, offset: int
) -> Iterator[tuple[Positions, int, BoolArray]]:
    """Yield the columns inside, and for each piece of rows its start and who sees them.

    What is seen is bool (rows of the piece, columns inside), in any head, own rows left out.
    """
    inside = np.flatnonzero((columns >= 0) & (columns < cells.shape[2]))
    columns = columns[inside]
    for start, stop in row_chunks(cells.shape[1], _EMPTY_ROW_CHUNK):
        seen: BoolArray = np.any(cells[:, start:stop, columns], axis=0)
        own_row = columns - offset - start
        here = np.flatnonzero((own_row >= 0) & (own_row < stop - start))
        seen[own_row[here], here] = False
        yield inside, start, seen


def _empty_blocks(mask: MaskRecord) -> tuple[EmptyRows, ...]:
    """Return the rows of blocks that the compiled kernel never visits."""
    if not mask.compiled or mask.partial is None or mask.block_q is None:
        return ()
    visited = mask.partial if mask.full is None else mask.partial | mask.full
    empty = ~visited.any(axis=(0, 2))
    rows = np.flatnonzero(empty.repeat(mask.block_q)[: mask.q_len])
    if not len(rows):
        return ()
    return (EmptyRows(_without_arrays(mask), rows, mask.q_len - 1, None, n_heads=len(visited)),)


def _without_arrays(mask: MaskRecord) -> MaskRecord:
    """Return the mask without what is large, as it is remembered for the whole run."""
    return replace(mask, cells=None, averaged=None, partial=None, full=None)


def _heads_with_any(empty: BoolArray) -> tuple[int, ...]:
    return tuple(np.flatnonzero(empty.any(axis=1)).tolist())
