"""The rule for rows of the executed mask that see no key at all, and the rows that read them.

Such a row gets no attention output, but every row that sees its key reads its hidden state.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from flexinspect.core.text import Positions, format_ranges, is_or_are, plural
from flexinspect.masks.key_blocks import row_chunks
from flexinspect.masks.mask_presets import BoolArray
from flexinspect.records import imported
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.step import CallRecord, MaskRecord, StepRecord
from flexinspect.rules.engine import Findings, Rule, finding_kinds
from flexinspect.rules.masks.mask_views import Calls, broadcast_rows, calls_by_mask, visited_blocks

_MAX_NAMED_ROWS = 8  # rows of a standalone call that a sentence names
_EMPTY_ROW_CHUNK = 256  # rows copied at once, so that the copy of a large mask takes a few MiB


class EmptyRows(Struct, frozen=True):
    """Rows of one mask that see no key, in all heads or only in `heads`.

    All arrays have one entry per row.

    Attributes:
        mask: the mask, without its arrays.
        rows: the rows in ascending order; row 0 is the first row of the mask.
        last: the last row of the mask.
        readers: how many other rows see the key of each row, in any head; None if cells were not
            recorded.
        averaged: whether softmax weighted all keys of the row equally instead of none.
        heads: the heads in which the rows are empty; () for all of the `n_heads` heads.
        first_reader: the first row that sees the key of each row, -1 for none; None like `readers`.
    """

    mask: MaskRecord
    rows: Positions
    last: int
    readers: npt.NDArray[np.int64] | None
    averaged: BoolArray
    heads: tuple[int, ...] = ()
    n_heads: int = 1
    first_reader: npt.NDArray[np.int64] | None = None

    def select(self, keep: BoolArray) -> EmptyRows:
        """Return the rows that are True in `keep`, bool (rows,)."""
        names = ("rows", "readers", "averaged", "first_reader")
        arrays = {name: array for name in names if (array := getattr(self, name)) is not None}
        return replace(self, **{name: array[keep] for name, array in arrays.items()})

    @property
    def has_newest(self) -> bool:
        """Whether the newest row of the mask, which predicts the next token, is one of them."""
        return int(self.rows[-1]) == self.last

    @property
    def n_read(self) -> int:
        """How many of the rows are read by other rows; 0 if that is not known."""
        return 0 if self.readers is None else int(np.count_nonzero(self.readers))

    @property
    def first_reader_pos(self) -> int | None:
        """The position of the first row that reads one of the rows, or None."""
        if self.first_reader is None or not self.n_read:
            return None
        return self.mask.q_offset + int(self.first_reader[self.first_reader >= 0].min())

    @property
    def where(self) -> str:
        """The heads in which the rows are empty, as the end of a clause."""
        if not self.heads:
            return " at all"
        if len(self.heads) == 1:
            return f" in head {self.heads[0]}"
        return f" in up to {len(self.heads)} of {self.n_heads} heads"


class EmptyRowsRule(Rule):
    """Reports rows that see no key.

    An error if the newest row is one of them; a warning if other rows read them or if only some
    heads see nothing; a note if no row reads them or if the declared mask leaves them empty. It
    needs cells, which are recorded from level advanced on. At level basic, and for masks too large
    to record, it sees only what the block tables of a compiled call show: whole blocks of rows.
    """

    name = "rows"
    needs = (imported.MASKS,)
    handles_standalone_calls = True
    findings = finding_kinds("mask.empty-row")

    def __init__(self) -> None:
        self._empty_rows: dict[str, tuple[EmptyRows, ...]] = {}  # by fingerprint, for the whole run

    def reset(self) -> None:
        """Reset what was reported; masks stay known."""
        self._reported: dict[tuple[Any, ...], set[int]] = {}
        self._unread: set[int] = set()

    def on_step(self, step: StepRecord) -> Findings:
        """Return findings for empty rows of the step's masks that were not reported before."""
        parts = {mask.fingerprint: find_empty_rows(mask) for mask in step.masks}
        self._empty_rows |= {fingerprint: found for fingerprint, found in parts.items() if found}
        if not self._empty_rows:
            return
        # Only rows of earlier steps: if a layer reads a row that another layer leaves empty in the
        # same step, the two ran different masks, which `mask.layers-differ` reports.
        if self._unread:
            yield from self._newly_read_findings(step)
        for fingerprint, calls in calls_by_mask(step).items():
            for part in self._empty_rows.get(fingerprint or "", ()):
                yield from self._check_rows(step, part, calls)

    def _check_rows(self, step: StepRecord, part: EmptyRows, calls: Calls) -> Findings:
        if self.context.is_standalone:
            yield self._standalone_finding(step, part, calls[0])
            return
        part = part.select(~self._is_padding_at_end(step, part))
        if not len(part.rows):
            return
        # All generated rows count as one, so that such a mask is not reported at every step.
        key = (step.branch, part.heads != (), *(call.layer for call in calls))
        reported = self._reported.setdefault(key, set())
        n_prompt = self.context.n_prompt or step.kv_after
        positions = [min(pos, n_prompt) for pos in (step.kv_before + part.rows).tolist()]
        part = part.select(np.array([pos not in reported for pos in positions]))
        reported.update(positions)
        if not len(part.rows):
            return
        meant = self._is_declared_empty(step.kv_before + part.rows)
        if not part.heads and part.readers is not None:
            unread = part.rows[(part.readers == 0) & ~meant & (part.rows != part.last)]
            self._unread.update((step.kv_before + unread).tolist())
        for keep, is_meant in ((~meant, False), (meant, True)):
            if keep.any():
                yield self._empty_finding(step, part.select(keep), calls, is_meant)

    def _is_padding_at_end(self, step: StepRecord, part: EmptyRows) -> BoolArray:
        """Return which rows are padding after a prompt's text that no row reads, bool (rows,).

        A sliding window of such a row holds padding only.
        """
        is_padding = np.zeros(len(part.rows), np.bool_)
        pad = self.context.pad_id
        if pad is None or part.readers is None or not part.has_newest:
            return is_padding
        begin = part.last + 1
        while begin > 0:
            token = self.context.token(step.kv_before + begin - 1)
            if token is None or token.token_id != pad:
                break
            begin -= 1
        unread: BoolArray = (part.rows >= begin) & (part.readers == 0)
        return unread if begin > 0 else is_padding

    def _is_declared_empty(self, positions: Positions) -> BoolArray:
        spec = self.context.declared_spec
        if spec is None:
            return np.zeros(len(positions), np.bool_)
        prefix_stops, local_starts = spec.intervals(positions)
        meant: BoolArray = (prefix_stops == 0) & (local_starts > positions)
        return meant

    def _empty_finding(
        self, step: StepRecord, part: EmptyRows, calls: Calls, is_meant: bool
    ) -> Finding:
        positions, layers, reason = step.kv_before + part.rows, [call.layer for call in calls], ""
        if is_meant:
            isolated = self.context.generation.declared.get("separators") == "isolated"
            reason = f", as {'--separators isolated' if isolated else 'the declared mask'} requires"
        n_layers, one = len({call.layer for call in step.calls}), len(positions) == 1
        where = part.where
        if len(layers) < n_layers:
            several = f"{len(layers)} of {n_layers} layers"
            where += f" in layer {layers[0]}" if len(layers) == 1 else f" in {several}"
        sentence = (
            f"{self.context.format_rows(positions)} {'sees' if one else 'see'} no key{where} "
            f"({self.context.format_first_position(positions)}){reason}; "
            f"{_format_row_output(calls[0], part, one)}{_format_readers(part, one)}."
        )
        severity, path = _empty_row_severity(part, is_meant), calls[0].path
        facts = {"layers": layers, "path": path, "meant": is_meant}
        finding = self._rows_finding(step, part, sentence, severity, **facts)
        return finding if len(layers) == 1 else replace(finding, layer=None)

    def _rows_finding(
        self, step: StepRecord, part: EmptyRows, sentence: str, severity: Severity, **facts: Any
    ) -> Finding:
        mask, readers, first = part.mask.fingerprint, part.readers, part.first_reader_pos
        evidence: dict[str, Any] = {"mask": mask, "rows": part.last + 1, "empty": len(part.rows)}
        evidence |= {"heads": list(part.heads) or "all"}
        evidence["read"] = None if readers is None else part.n_read
        evidence["readers"] = None if readers is None else int(readers.max())
        evidence |= {"first_reader": first, "newest": part.has_newest, **facts}
        id_, layers = "mask.empty-row", facts.get("layers", ())
        positions = step.kv_before + part.rows
        head = part.heads[0] if len(part.heads) == 1 else None
        return self.finding(
            step, id_, sentence, layers, evidence, severity=severity, head=head, positions=positions
        )

    def _newly_read_findings(self, step: StepRecord) -> Findings:
        unread = np.array(sorted(self._unread))
        counts = np.zeros(len(unread), np.int64)
        for mask in step.masks:
            cells = intended_cells(mask)
            if cells is not None:
                offset = mask.q_offset - mask.kv_offset
                counts += count_readers(cells, unread - mask.kv_offset, offset)[0]
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
        """Return the finding of a standalone call, whose rows have no tokens."""
        # Which rows are read is known only if rows and keys are the same tokens, so if their
        # numbers are equal.
        n, n_rows, is_square = len(part.rows), part.last + 1, part.mask.q_len == part.mask.kv_len
        rows = format_ranges(part.rows[:_MAX_NAMED_ROWS].tolist())
        rows += ", ..." if n > _MAX_NAMED_ROWS else ""
        # The newest row of a standalone call predicts no token, so no row is taken for the newest.
        readers = _format_readers(replace(part, last=-1), n == 1) if is_square else ""
        sentence = (
            f"{'Row' if n == 1 else f'{n} rows'} {rows} of {n_rows} "
            f"{'sees' if n == 1 else 'see'} no key{part.where} in this call; "
            f"{_format_row_output(call, part, n == 1)}{readers}."
        )
        is_warning = (is_square and part.n_read > 0) or n == n_rows
        severity = Severity.WARNING if is_warning else Severity.NOTE
        return self._rows_finding(step, part, sentence, severity, path=call.path)


def _empty_row_severity(part: EmptyRows, is_meant: bool) -> Severity:
    if is_meant:
        return Severity.WARNING if part.has_newest else Severity.NOTE
    if part.heads or (part.readers is None and not part.has_newest):
        return Severity.WARNING
    if part.has_newest:
        return Severity.ERROR
    return Severity.WARNING if part.n_read else Severity.NOTE


def _format_row_output(call: CallRecord, part: EmptyRows, one: bool) -> str:
    """Return the attention output of an empty row; checked for each path on torch 2.13 (CPU)."""
    them, gets = ("it", "it gets") if one else ("them", "they get")
    closed = "NaN" if call.path == "eager" else "zeros"  # of cells that are -Inf
    if part.averaged.all():
        return f"{gets} the mean of all values, because closed cells are the lowest float"
    if part.averaged.any():
        mean = "the mean of all values where closed cells are the lowest float"
        return f"{gets} {mean}, and {closed} where they are -Inf"
    if call.path.startswith("flex"):
        return f"FlexAttention gives {them} zeros (a dense softmax would give NaN)"
    if part.mask.kind == "float":
        return f"{gets} {closed}, because closed cells are -Inf"
    if call.path == "sdpa":
        return f"SDPA gives {them} zeros"
    return f"the output of {call.backend} for {them} is unknown"


def _format_readers(part: EmptyRows, one: bool) -> str:
    """Return which rows read the empty rows, and whether one of these is the newest row."""
    them, newest = "it" if one else "them", ""
    if part.has_newest:
        subject = "it is" if one else "they include"
        newest = f", and {subject} the newest row, which predicts the next token"
    if part.readers is None:
        return f"{newest}; whether other rows read {them} was not recorded"
    if not part.n_read:
        return newest or f", and no other row of this step reads {them}"
    least, most = int(part.readers[part.readers > 0].min()), int(part.readers.max())
    which = them if part.n_read == len(part.rows) else f"{part.n_read} of them"
    first = f" ({'' if most == 1 else 'first: '}position {part.first_reader_pos})"
    rows = f"{'up to ' if least < most else ''}{plural(most, 'other row')}{first}"
    return f"{newest}, and {rows} {'reads' if most == 1 else 'read'} {which}"


def find_empty_rows(mask: MaskRecord) -> tuple[EmptyRows, ...]:
    """Return the rows of a mask that are empty in all heads, and those empty in some heads."""
    cells, offset = intended_cells(mask), mask.q_offset - mask.kv_offset
    # Without its large arrays, the mask is kept for the whole run.
    bare = replace(mask, cells=None, uniform_rows=None, partial=None, full=None)
    if cells is None:
        return _empty_blocks(mask, bare)
    if mask.kind.startswith("none"):
        return ()
    cells = broadcast_rows(cells, mask.q_len)
    empty = _empty_by_head(cells, offset)
    if empty is None:
        return ()
    averaged = np.zeros(cells.shape[1], np.bool_)
    if mask.uniform_rows is not None:
        averaged |= np.any(mask.uniform_rows, axis=0)
    everywhere = empty.all(axis=0)
    in_some = empty & ~everywhere
    some_heads = tuple(np.flatnonzero(in_some.any(axis=1)).tolist())
    parts, last, n_heads = [], cells.shape[1] - 1, len(cells)
    for is_empty, heads in ((everywhere, ()), (in_some.any(axis=0), some_heads)):
        rows = np.flatnonzero(is_empty)
        if len(rows):
            counts, first = count_readers(cells, rows + offset, offset)
            parts.append(EmptyRows(bare, rows, last, counts, averaged[rows], heads, n_heads, first))
    return tuple(parts)


def intended_cells(mask: MaskRecord) -> BoolArray | None:
    """Return the cells of a mask with averaged rows closed, bool (heads, rows, keys)."""
    # An averaged row is closed by the lowest float throughout, so softmax weights all its keys
    # equally. It counts as a row that sees no key, and not as a reader of other rows.
    if mask.cells is None or mask.uniform_rows is None:
        return mask.cells
    intended: BoolArray = mask.cells & ~mask.uniform_rows[..., None]
    return intended


def _empty_by_head(cells: BoolArray, offset: int) -> BoolArray | None:
    """Return which rows are empty, bool (heads, rows), or None if none is."""
    # A row that sees itself is not empty, so for most masks the diagonal is enough: for 8192 rows
    # and keys that takes a hundredth of the time of reading all cells.
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


def count_readers(
    cells: BoolArray, columns: Positions, offset: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return for each key how many rows see it in any head, and the first of them (-1 for none).

    The key's own row does not count. `columns` are indices of keys and may lie outside of the mask.
    Row r has its own key at column r + offset.
    """
    counts, first = np.zeros(len(columns), np.int64), np.full(len(columns), -1, np.int64)
    inside = np.flatnonzero((columns >= 0) & (columns < cells.shape[2]))
    columns = columns[inside]
    for start, stop in row_chunks(cells.shape[1], _EMPTY_ROW_CHUNK):
        seen: BoolArray = np.any(cells[:, start:stop, columns], axis=0)
        own_row = columns - offset - start
        in_chunk = np.flatnonzero((own_row >= 0) & (own_row < stop - start))
        seen[own_row[in_chunk], in_chunk] = False
        counts[inside] += np.count_nonzero(seen, axis=0)
        is_new = (first[inside] < 0) & seen.any(axis=0)
        first[inside[is_new]] = start + seen.argmax(axis=0)[is_new]
    return counts, first


def _empty_blocks(mask: MaskRecord, bare: MaskRecord) -> tuple[EmptyRows, ...]:
    """Return the rows of block rows that the compiled kernel never visits."""
    visited = visited_blocks(mask)
    if not mask.compiled or visited is None or mask.block_q is None:
        return ()
    rows = np.flatnonzero((~visited.any(axis=(0, 2))).repeat(mask.block_q)[: mask.q_len])
    averaged, n_heads = np.zeros(len(rows), np.bool_), len(visited)
    part = EmptyRows(bare, rows, mask.q_len - 1, None, averaged, n_heads=n_heads)
    return (part,) if len(rows) else ()
