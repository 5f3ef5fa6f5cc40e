"""The rule for rows of the executed mask that see no key at all, and the rows that read them.

Such a row gets no attention output, but every row that sees its key reads its hidden state. The
declared mask only decides whether an empty row is intended. A mask is checked when it is new to the
trace, and the result is stored by its fingerprint.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from flexinspect.core.text import Positions, format_ranges, is_or_are, plural
from flexinspect.masks.algebra import BoolArray, row_chunks
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.step import CallRecord, MaskRecord, StepRecord
from flexinspect.rules.context import RuleContext
from flexinspect.rules.engine import Rule, finding_kinds
from flexinspect.rules.masks.mask_views import broadcast_rows, calls_by_mask

_MAX_NAMED_ROWS = 8
"""Rows of a standalone call that a sentence names."""
_EMPTY_ROW_CHUNK = 256
"""Rows that are copied at once, so that the copy of a large mask takes only a few MiB."""


@dataclass(frozen=True, slots=True)
class EmptyRows:
    """Rows of one mask that see no key, in all heads or only in `heads`.

    All arrays have one entry per row.

    Attributes:
        mask: the mask, without its arrays.
        rows: the rows in ascending order; row 0 is the first row of the mask.
        last: the last row of the mask.
        readers: how many other rows see the key of each row, in any head; None if cells were not
            recorded.
        heads: the heads in which the rows are empty; () for all of the `n_heads` heads.
        averaged: whether softmax weighted all keys of the row equally instead of none; None if it
            did so in no row.
        first_reader: the first row that sees the key of each row, -1 for none; None like `readers`.
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
        """Return the rows that are True in `keep`, bool (rows,)."""
        readers = None if self.readers is None else self.readers[keep]
        averaged = None if self.averaged is None else self.averaged[keep]
        first = None if self.first_reader is None else self.first_reader[keep]
        rows = self.rows[keep]
        return replace(self, rows=rows, readers=readers, averaged=averaged, first_reader=first)

    @property
    def has_newest(self) -> bool:
        """Whether the newest row of the mask, which predicts the next token, is one of them."""
        return int(self.rows[-1]) == self.last

    @property
    def n_read(self) -> int:
        """How many of the rows are read by other rows; 0 if that is not known."""
        return 0 if self.readers is None else int(np.count_nonzero(self.readers))


class EmptyRowsRule(Rule):
    """Reports rows that see no key.

    An error if the newest row is one of them; a warning if other rows read them or if only some
    heads see nothing; a note if no row reads them or if the declared mask leaves them empty. It
    needs cells, which are recorded from level advanced on. At level basic, and for masks too large
    to record, it sees only what the block tables of a compiled call show: whole blocks of rows.
    """

    name = "rows"
    handles_standalone_calls = True
    findings = finding_kinds("mask.empty-row")

    def __init__(self) -> None:
        self._empty_rows: dict[str, tuple[EmptyRows, ...]] = {}
        """By fingerprint and for the whole run, as a mask is in one step's record only."""

    def on_generation_start(self, context: RuleContext) -> None:
        """Reset what was reported; masks stay known."""
        super().on_generation_start(context)
        self._declared = context.generation.declared
        self._reported: dict[tuple[Any, ...], set[int]] = {}
        self._unread: set[int] = set()

    def on_step(self, step: StepRecord) -> Iterator[Finding]:
        """Return findings for empty rows of the step's masks that were not reported before."""
        for mask in step.masks:
            parts = find_empty_rows(mask)
            if parts:
                self._empty_rows[mask.fingerprint] = parts
        if not self._empty_rows:
            return
        # Only rows of earlier steps: if a layer reads a row that another layer leaves empty in the
        # same step, the two ran different masks, which `mask.layers-differ` reports.
        if self._unread:
            yield from self._newly_read_findings(step)
        for fingerprint, calls in calls_by_mask(step).items():
            for part in self._empty_rows.get(fingerprint or "", ()):
                yield from self._check_rows(step, part, calls)

    def _check_rows(
        self, step: StepRecord, part: EmptyRows, calls: Sequence[CallRecord]
    ) -> Iterator[Finding]:
        if self.context.is_standalone:
            yield self._standalone_finding(step, part, calls[0])
            return
        part = part.select(self._find_unreported(step, part, calls))
        if not len(part.rows):
            return
        meant = self._is_declared_empty(step.kv_before + part.rows)
        if not part.heads and part.readers is not None:
            unread = part.rows[(part.readers == 0) & ~meant & (part.rows != part.last)]
            self._unread.update((step.kv_before + unread).tolist())
        for keep, is_meant in ((~meant, False), (meant, True)):
            if keep.any():
                yield self._empty_finding(step, part.select(keep), calls, is_meant)

    def _find_unreported(
        self, step: StepRecord, part: EmptyRows, calls: Sequence[CallRecord]
    ) -> BoolArray:
        """Return which of the rows are new, bool (rows,); all generated rows count as one.

        Otherwise a mask that is wrong for every decode row would be reported at every step.
        """
        key = (step.branch, part.heads != (), *(call.layer for call in calls))
        reported = self._reported.setdefault(key, set())
        n_prompt = self.context.n_prompt or step.kv_after
        positions = [min(pos, n_prompt) for pos in (step.kv_before + part.rows).tolist()]
        new = np.array([pos not in reported for pos in positions])
        reported.update(positions)
        return new

    def _is_declared_empty(self, positions: Positions) -> BoolArray:
        """Return which rows the declared mask leaves empty (see `masks.algebra.MaskSpec`)."""
        starts, head, low = (
            self._declared.get(name) for name in ("starts", "prefix_stops", "local_starts")
        )
        if not starts or not head or not low:
            return np.zeros(len(positions), np.bool_)
        region = np.searchsorted(starts, positions, side="right") - 1
        meant: BoolArray = (np.asarray(head)[region] == 0) & (np.asarray(low)[region] > positions)
        return meant

    def _empty_finding(
        self, step: StepRecord, part: EmptyRows, calls: Sequence[CallRecord], is_meant: bool
    ) -> Finding:
        positions = step.kv_before + part.rows
        layers = [call.layer for call in calls]
        reason = ""
        if is_meant:
            isolated = self._declared.get("separators") == "isolated"
            source = "--separators isolated" if isolated else "the declared mask"
            reason = f", as {source} requires"
        one = len(positions) == 1
        sentence = (
            f"{self.context.format_rows(positions)} {'sees' if one else 'see'} no key"
            f"{_format_in_heads(part)}{_format_in_layers(layers, step)} "
            f"({self.context.format_first_position(positions)}){reason}; "
            f"{_format_row_output(calls[0], part, one)}{_format_readers(part, one)}."
        )
        finding = self.finding(
            step,
            "mask.empty-row",
            sentence,
            severity=_empty_row_severity(part, is_meant),
            layers=layers,
            head=part.heads[0] if len(part.heads) == 1 else None,
            positions=positions,
            evidence={
                **_empty_row_evidence(part),
                "layers": layers,
                "path": calls[0].path,
                "meant": is_meant,
            },
        )
        return finding if len(layers) == 1 else replace(finding, layer=None)

    def _newly_read_findings(self, step: StepRecord) -> Iterator[Finding]:
        """Return a finding if empty rows that no row had read are read now."""
        unread = np.array(sorted(self._unread))
        counts = np.zeros(len(unread), np.int64)
        for mask in step.masks:
            cells = intended_cells(mask)
            if cells is not None:
                offset = mask.q_offset - mask.kv_offset
                counts += count_readers(cells, unread - mask.kv_offset, offset)
        read = unread[counts > 0]
        if not len(read):
            return
        self._unread.difference_update(read.tolist())
        sentence = (
            f"{self.context.format_rows(read)} that saw no key at all "
            f"({self.context.format_first_position(read)}) {is_or_are(len(read))} read from step "
            f"{step.step} on."
        )
        evidence = {"empty": len(read), "read": len(read), "readers": int(counts.max())}
        yield self.finding(step, "mask.empty-row", sentence, positions=read, evidence=evidence)

    def _standalone_finding(self, step: StepRecord, part: EmptyRows, call: CallRecord) -> Finding:
        """Return the finding of a standalone call, whose rows have no tokens.

        Which rows are read is known only if rows and keys are the same tokens, so if their numbers
        are equal.
        """
        one, is_square = len(part.rows) == 1, part.mask.q_len == part.mask.kv_len
        n_rows = part.last + 1
        rows = format_ranges(part.rows[:_MAX_NAMED_ROWS].tolist())
        if len(part.rows) > _MAX_NAMED_ROWS:
            rows += ", ..."
        # The newest row of a standalone call predicts no token, so no row is taken for the newest.
        readers = _format_readers(replace(part, last=-1), one) if is_square else ""
        sentence = (
            f"{'Row' if one else f'{len(part.rows)} rows'} {rows} of {n_rows} "
            f"{'sees' if one else 'see'} no key{_format_in_heads(part)} in this call; "
            f"{_format_row_output(call, part, one)}{readers}."
        )
        is_read = is_square and part.n_read > 0
        is_warning = is_read or len(part.rows) == n_rows
        return self.finding(
            step,
            "mask.empty-row",
            sentence,
            severity=Severity.WARNING if is_warning else Severity.NOTE,
            head=part.heads[0] if len(part.heads) == 1 else None,
            positions=step.kv_before + part.rows,
            evidence={**_empty_row_evidence(part), "path": call.path},
        )


def _empty_row_severity(part: EmptyRows, is_meant: bool) -> Severity:
    if is_meant:
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
    """Return the position of the first row that reads one of the rows, or None."""
    if part.first_reader is None or not part.n_read:
        return None
    return part.mask.q_offset + int(part.first_reader[part.first_reader >= 0].min())


def _format_in_heads(part: EmptyRows) -> str:
    if not part.heads:
        return " at all"
    if len(part.heads) == 1:
        return f" in head {part.heads[0]}"
    return f" in up to {len(part.heads)} of {part.n_heads} heads"


def _format_in_layers(layers: Sequence[int], step: StepRecord) -> str:
    n_layers = len({call.layer for call in step.calls})
    if len(layers) == n_layers:
        return ""
    if len(layers) == 1:
        return f" in layer {layers[0]}"
    return f" in {len(layers)} of {n_layers} layers"


def _format_row_output(call: CallRecord, part: EmptyRows, one: bool) -> str:
    """Return the attention output of an empty row; checked for each path on torch 2.13 (CPU)."""
    them = "it" if one else "them"
    gets = "it gets" if one else "they get"
    if part.averaged is not None and part.averaged.any():
        if part.averaged.all():
            return f"{gets} the mean of all values, because closed cells are the lowest float"
        return (
            f"{gets} the mean of all values where closed cells are the lowest float, and "
            f"{_format_closed_softmax(call)} where they are -Inf"
        )
    if call.path.startswith("flex"):
        return f"FlexAttention gives {them} zeros (a dense softmax would give NaN)"
    if part.mask.kind == "float":
        return f"{gets} {_format_closed_softmax(call)}, because closed cells are -Inf"
    if call.path == "sdpa":
        return f"SDPA gives {them} zeros"
    return f"the output of {call.backend} for {them} is unknown"


def _format_closed_softmax(call: CallRecord) -> str:
    """Return the output of a row of -Inf where the mask is added to the scores."""
    return "NaN" if call.path == "eager" else "zeros"


def _format_readers(part: EmptyRows, one: bool) -> str:
    """Return which rows read the empty rows, and whether one of these is the newest row."""
    them = "it" if one else "them"
    newest = ""
    if part.has_newest:
        subject = "it is" if one else "they include"
        newest = f", and {subject} the newest row, which predicts the next token"
    if part.readers is None:
        return f"{newest}; whether other rows read {them} was not recorded"
    if not part.n_read:
        return newest or f", and no other row of this step reads {them}"
    least, most = int(part.readers[part.readers > 0].min()), int(part.readers.max())
    which = them if part.n_read == len(part.rows) else f"{part.n_read} of them"
    first = f" ({'' if most == 1 else 'first: '}position {_first_reader_pos(part)})"
    rows = f"{'up to ' if least < most else ''}{plural(most, 'other row')}{first}"
    return f"{newest}, and {rows} {'reads' if most == 1 else 'read'} {which}"


# -- which rows are empty, and who reads them ------------------------------------------------------


def find_empty_rows(mask: MaskRecord) -> tuple[EmptyRows, ...]:
    """Return the rows of a mask that are empty in all heads, and those empty in some heads."""
    cells, offset = intended_cells(mask), mask.q_offset - mask.kv_offset
    if cells is None:
        return _empty_blocks(mask)
    if mask.kind.startswith("none"):
        return ()
    cells = broadcast_rows(cells, mask.q_len)
    empty = _empty_by_head(cells, offset)
    if empty is None:
        return ()
    everywhere = empty.all(axis=0)
    in_some = empty & ~everywhere
    some_heads = tuple(np.flatnonzero(in_some.any(axis=1)).tolist())
    return tuple(
        EmptyRows(
            mask=_without_arrays(mask),
            rows=rows,
            last=cells.shape[1] - 1,
            readers=count_readers(cells, rows + offset, offset),
            heads=heads,
            n_heads=len(cells),
            averaged=_averaged_rows(mask, rows),
            first_reader=_find_first_readers(cells, rows + offset, offset),
        )
        for rows, heads in (
            (np.flatnonzero(everywhere), ()),
            (np.flatnonzero(in_some.any(axis=0)), some_heads),
        )
        if len(rows)
    )


def intended_cells(mask: MaskRecord) -> BoolArray | None:
    """Return the cells of a mask with averaged rows closed, bool (heads, rows, keys).

    An averaged row is closed by the lowest float throughout, so softmax weights all its keys
    equally. It counts as a row that sees no key, and not as a reader of other rows.
    """
    if mask.cells is None or mask.uniform_rows is None:
        return mask.cells
    intended: BoolArray = mask.cells & ~mask.uniform_rows[..., None]
    return intended


def _averaged_rows(mask: MaskRecord, rows: Positions) -> BoolArray | None:
    if mask.uniform_rows is None:
        return None
    averaged: BoolArray = np.any(mask.uniform_rows, axis=0)
    return averaged.repeat(len(rows)) if len(averaged) == 1 else averaged[rows]


def _empty_by_head(cells: BoolArray, offset: int) -> BoolArray | None:
    """Return which rows are empty, bool (heads, rows), or None if none is.

    A row that sees itself is not empty, so for most masks the diagonal is enough: for 8192 rows and
    keys that takes a hundredth of the time of reading all cells.
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
        chunk = rows[start:stop]
        empty[:, chunk] = ~cells[:, chunk].any(axis=2)
    return empty if empty.any() else None


def count_readers(cells: BoolArray, columns: Positions, offset: int) -> npt.NDArray[np.int64]:
    """Return for each key how many rows see it in any head, except the key's own row.

    `columns` are indices of keys and may lie outside of the mask. Row r has its own key at column
    r + offset.
    """
    counts = np.zeros(len(columns), np.int64)
    for inside, _, seen in _iter_readers(cells, columns, offset):
        counts[inside] += np.count_nonzero(seen, axis=0)
    return counts


def _find_first_readers(cells: BoolArray, columns: Positions, offset: int) -> npt.NDArray[np.int64]:
    """Return for each key the first row that sees it, -1 for none (see `count_readers`)."""
    first = np.full(len(columns), -1, np.int64)
    for inside, start, seen in _iter_readers(cells, columns, offset):
        new = inside[(first[inside] < 0) & seen.any(axis=0)]
        first[new] = start + seen.argmax(axis=0)[np.isin(inside, new)]
    return first


def _iter_readers(
    cells: BoolArray, columns: Positions, offset: int
) -> Iterator[tuple[Positions, int, BoolArray]]:
    """Yield (indices of columns inside of the mask, first row of a chunk, cells of the chunk).

    The cells are bool (rows of the chunk, columns inside), in any head, with each key's own row
    closed.
    """
    inside = np.flatnonzero((columns >= 0) & (columns < cells.shape[2]))
    columns = columns[inside]
    for start, stop in row_chunks(cells.shape[1], _EMPTY_ROW_CHUNK):
        seen: BoolArray = np.any(cells[:, start:stop, columns], axis=0)
        own_row = columns - offset - start
        in_chunk = np.flatnonzero((own_row >= 0) & (own_row < stop - start))
        seen[own_row[in_chunk], in_chunk] = False
        yield inside, start, seen


def _empty_blocks(mask: MaskRecord) -> tuple[EmptyRows, ...]:
    """Return the rows of block rows that the compiled kernel never visits."""
    if not mask.compiled or mask.partial is None or mask.block_q is None:
        return ()
    visited = mask.partial if mask.full is None else mask.partial | mask.full
    empty = ~visited.any(axis=(0, 2))
    rows = np.flatnonzero(empty.repeat(mask.block_q)[: mask.q_len])
    if not len(rows):
        return ()
    return (EmptyRows(_without_arrays(mask), rows, mask.q_len - 1, None, n_heads=len(visited)),)


def _without_arrays(mask: MaskRecord) -> MaskRecord:
    """Return the mask without its large arrays, to keep it for the whole run."""
    return replace(mask, cells=None, uniform_rows=None, partial=None, full=None)
