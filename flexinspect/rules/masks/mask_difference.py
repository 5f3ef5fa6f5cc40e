"""How executed mask cells differ from a `MaskSpec`: counts, first pairs, and the pattern.

Rows are compared as packed bits, a few hundred at a time, so a mask that matches costs a few
milliseconds per 2000 x 2000 cells, and the row of a decode step a few microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field
from msgspec.structs import replace

from flexinspect.masks import algebra
from flexinspect.masks.algebra import BoolArray, MaskSpec, Segments, row_chunks
from flexinspect.masks.counting import BIT_COUNTS, PackedMask, PositionGroups, pack_spec
from flexinspect.records.prompt import SegmentKind
from flexinspect.rules.masks.mask_views import slice_flags

IntArray = npt.NDArray[np.int64]

_DIFF_ROW_CHUNK = 256
_UNBOUNDED = 1 << 30
_SHIFTS = (-1, 1, -2, 2, -3, 3)
_MAX_SHIFTED_CELLS = 1 << 24  # up to this many, cells are also compared with shifted specs


class CellFrame(Struct, frozen=True):
    """The positions of a call's cells: row 0 is position `q_offset`, key 0 position `kv_offset`.

    The first `n_keys` columns hold keys; the columns after them are unwritten cache slots. `window`
    is the number of keys that a sliding layer sees. `rows`, bool (rows,), and `keys`,
    bool (n_keys,), select what is compared (padding is not); None selects all.
    """

    q_offset: int
    kv_offset: int
    n_keys: int
    window: int | None = None
    rows: BoolArray | None = None
    keys: BoolArray | None = None

    def select(self, flags: BoolArray, n_rows: int, *, fill: bool = True) -> CellFrame:
        """Return the frame of the rows and keys at the positions that are True in `flags`.

        Positions after the end of `flags` are selected if `fill` is true.
        """
        rows = slice_flags(flags, self.q_offset, n_rows, fill=fill)
        keys = slice_flags(flags, self.kv_offset, self.n_keys, fill=fill)
        return replace(self, rows=rows, keys=keys)


class CellDifference(Struct):
    """The cells of one head that are open but should be closed (`leaked`), or the reverse (`lost`).

    Pairs are (row, key) positions. Rows that see nothing are not counted.

    Attributes:
        future: number of leaked cells whose key comes after the row.
        n_open: number of open cells of the executed mask.
        n_expected: number of cells that the spec opens.
        n_closed: number of closed cells of the executed mask.
        first_across: the first leaked pair between two segments that should be isolated.
        nearest_lost: the smallest distance, row minus key, of a lost cell.
        leaked_by_pair: number of leaked cells by (segment of the row, segment of the key).
        leaking_rows: positions of the rows with leaked cells.
        losing_rows: positions of the rows with lost cells.
        last_keys: the last position that each row sees, -1 for none, from row `first_row` on.
    """

    lost: int = 0
    leaked: int = 0
    future: int = 0
    n_open: int = 0
    n_expected: int = 0
    n_closed: int = 0
    first_lost: tuple[int, int] | None = None
    first_leaked: tuple[int, int] | None = None
    first_across: tuple[int, int] | None = None
    nearest_lost: int = _UNBOUNDED
    leaked_by_pair: dict[tuple[int, int], int] = field(default_factory=dict)
    leaking_rows: list[int] = field(default_factory=list)
    losing_rows: list[int] = field(default_factory=list)
    last_keys: list[int] = field(default_factory=list)
    first_row: int = 0


def shift_spec(spec: MaskSpec, n: int) -> MaskSpec:
    """Return a spec with its borders shifted by n positions (to earlier ones for n < 0)."""
    starts = [max(start + n, 0) for start in spec.starts]
    keep = [i for i in range(len(starts)) if i + 1 == len(starts) or starts[i + 1] > 0]
    head, low = (
        tuple(max(ends[i] + n, 0) if 0 < ends[i] < _UNBOUNDED else ends[i] for i in keep)
        for ends in (spec.prefix_stops, spec.local_starts)
    )
    return MaskSpec(spec.name, (0, *(starts[i] for i in keep[1:])), head, low)


def row_matches_spec(row: BoolArray, spec: MaskSpec, frame: CellFrame) -> bool:
    """Return whether a row, bool (keys,), matches a spec."""
    # It counts keys, because this is the whole cost of a decode step without findings.
    q_idx, first = frame.q_offset, frame.kv_offset
    region = spec.region(q_idx)
    begin = max(first, 0 if frame.window is None else q_idx + 1 - frame.window)
    head = max(min(spec.prefix_stops[region], q_idx + 1), begin)
    low = min(max(spec.local_starts[region], head), q_idx + 1)
    n_expected = head - begin + q_idx + 1 - low
    if np.count_nonzero(row[: frame.n_keys]) != n_expected:
        return False
    inside = np.count_nonzero(row[begin - first : head - first])
    return bool(inside + np.count_nonzero(row[low - first : q_idx + 1 - first]) == n_expected)


def count_wrong_cells(
    cells: BoolArray, spec: MaskSpec, frame: CellFrame, *, limit: int = _UNBOUNDED
) -> int:
    """Count cells, bool (rows, keys), that differ from a spec in rows with keys, up to `limit`."""
    n_wrong = 0
    for _, ran, expected, counts in _iter_packed_rows(cells, spec, frame):
        wrong = (ran ^ expected) & counts
        if wrong.any():
            n_wrong += int(BIT_COUNTS[wrong].sum(dtype=np.int64))
            if n_wrong >= limit:
                break
    return n_wrong


def has_future_keys(cells: BoolArray, frame: CellFrame) -> bool:
    """Return whether any row sees a key that comes after it."""
    rows = _iter_packed_rows(cells, algebra.causal(), replace(frame, window=None))
    return any((ran & ~past & counts).any() for _, ran, past, counts in rows)


def _iter_packed_rows(
    cells: BoolArray, spec: MaskSpec, frame: CellFrame
) -> Iterator[tuple[int, PackedMask, PackedMask, PackedMask]]:
    """Yield chunks as (first row, packed rows, those of the spec, flags of cells to compare)."""
    keys = np.ones(frame.n_keys, np.bool_) if frame.keys is None else frame.keys
    counting, offset, window = np.packbits(keys), frame.kv_offset, frame.window
    for start, stop in row_chunks(len(cells), _DIFF_ROW_CHUNK):
        some = cells[start:stop]
        sees: BoolArray = np.any(some, axis=1)
        if frame.rows is not None:
            sees &= frame.rows[start:stop]
        ran = np.packbits(some[:, : frame.n_keys], axis=1)
        rows = np.arange(frame.q_offset + start, frame.q_offset + start + len(ran))
        expected = pack_spec(spec, rows, frame.n_keys, kv_offset=offset, window=window)
        yield start, ran, expected, np.where(sees[:, None], counting, np.uint8(0))


def find_difference(
    cells: BoolArray, spec: MaskSpec, frame: CellFrame, segments: Segments
) -> CellDifference:
    """Return how cells, bool (rows, keys), differ from a spec; slow, for cells that do differ."""
    out = CellDifference(first_row=frame.q_offset)
    key_idx = np.arange(frame.n_keys) + frame.kv_offset
    for start, *packed in _iter_packed_rows(cells, spec, frame):
        ran, expected, counts = (
            np.unpackbits(bits, axis=1, count=frame.n_keys).view(np.bool_) for bits in packed
        )
        q_idx = np.arange(start, start + len(ran)) + frame.q_offset
        ran &= counts
        leaked, lost = ran & ~expected, expected & ~ran & counts
        out.n_open += int(np.count_nonzero(ran))
        out.n_expected += int(np.count_nonzero(expected & counts))
        out.n_closed += int(np.count_nonzero(counts & ~ran))
        last = np.where(ran.any(axis=1), key_idx[-1] - ran[:, ::-1].argmax(axis=1), -1)
        out.last_keys += last.tolist()
        row, key = np.nonzero(leaked)
        if len(row):
            _add_leaked(out, q_idx[row], key_idx[key], segments)
        row, key = np.nonzero(lost)
        if len(row):
            rows, keys = q_idx[row], key_idx[key]
            out.lost += len(rows)
            out.losing_rows += np.unique(rows).tolist()
            out.nearest_lost = min(out.nearest_lost, int((rows - keys).min()))
            out.first_lost = out.first_lost or (int(rows[0]), int(keys[0]))
    return out


def _add_leaked(out: CellDifference, rows: IntArray, keys: IntArray, segments: Segments) -> None:
    """Add leaked cells, given as the positions of their rows and keys."""
    out.leaked += len(rows)
    out.future += int(np.count_nonzero(keys > rows))
    out.leaking_rows += np.unique(rows).tolist()
    out.first_leaked = out.first_leaked or (int(rows[0]), int(keys[0]))
    starts = tuple(segment.start for segment in segments) or (0,)
    row_part, key_part = (PositionGroups(starts).group_of(each) for each in (rows, keys))
    for pair, n in enumerate(np.bincount(row_part * len(starts) + key_part).tolist()):
        if n:
            where = divmod(pair, len(starts))
            out.leaked_by_pair[where] = out.leaked_by_pair.get(where, 0) + n
    if out.first_across is None and segments:
        isolated = np.array([segment.kind is SegmentKind.PARAPHRASE for segment in segments])
        across = isolated[row_part] & isolated[key_part] & (row_part != key_part)
        if across.any():
            at = int(across.argmax())
            out.first_across = int(rows[at]), int(keys[at])


OPEN, CAUSAL, MOVED, WINDOW, OTHER = "open", "causal", "moved", "window", "other"


def classify_pattern(
    cells: BoolArray, spec: MaskSpec, frame: CellFrame, found: CellDifference
) -> tuple[str, int]:
    """Return what ran instead of the spec: the pattern, and its shift or window (0 for others)."""
    if len(cells) > 1 and not found.n_closed and found.future:
        return OPEN, 0
    if not count_wrong_cells(cells, algebra.causal(), frame, limit=1):
        return CAUSAL, 0
    window = replace(frame, window=found.nearest_lost)
    if not found.leaked and not count_wrong_cells(cells, spec, window, limit=1):
        return WINDOW, found.nearest_lost
    if len(cells) > 1 and cells.size <= _MAX_SHIFTED_CELLS:
        enough = max((found.lost + found.leaked) // 8, 1)
        for n in _SHIFTS:
            if count_wrong_cells(cells, shift_spec(spec, n), frame, limit=enough) < enough:
                return MOVED, n
    return OTHER, 0


def is_blockwise(found: CellDifference, cells: BoolArray, frame: CellFrame) -> bool:
    """Return whether rows see the future in whole blocks: a prefix, or bidirectional segments."""
    # In a block, the last key that a row sees sees no further than itself, and sees that row. A
    # mask_mod with an offset that is one too large has rows whose last key sees further; one with
    # rows and keys swapped, or inverted, has rows that see the future but not the past.
    start = frame.q_offset - frame.kv_offset
    n = max(min(len(cells), frame.n_keys - start), 0)
    among = cells[:n, start : start + n]
    rows, keys = np.nonzero(np.triu(among, 1))
    counts = np.ones(len(rows), np.bool_)
    if frame.rows is not None:
        counts &= frame.rows[rows] & frame.rows[keys]
    if (counts & ~among[keys, rows]).any():
        return False  # a row that sees a later position is not seen by the row there
    last_keys = found.last_keys
    for row, furthest in enumerate(last_keys):
        at = furthest - frame.q_offset
        if row < at < len(last_keys) and last_keys[at] > furthest:
            return False
    return True
