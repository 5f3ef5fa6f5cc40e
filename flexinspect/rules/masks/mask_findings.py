"""How executed masks differ from the expected ones: counts, patterns, finding ids and sentences.

Rows are compared as packed bits, a few hundred at a time, so a mask that matches costs a few
milliseconds per 2000 x 2000 cells, and the row of a decode step a few microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field
from msgspec.structs import replace

from flexinspect.core import text
from flexinspect.masks import mask_presets
from flexinspect.masks.counting import BIT_COUNTS, PackedMask, PositionGroups, pack_spec
from flexinspect.masks.key_blocks import row_chunks
from flexinspect.masks.mask_presets import BoolArray, MaskSpec, Segments
from flexinspect.records.finding import Severity
from flexinspect.records.prompt import SegmentKind
from flexinspect.records.step import CallRecord, MaskRecord, StepRecord
from flexinspect.rules.context import RuleContext
from flexinspect.rules.masks.mask_views import slice_flags

IntArray = npt.NDArray[np.int64]

_DIFF_ROW_CHUNK = 256
_UNBOUNDED = 1 << 30
_SHIFTS = (-1, 1, -2, 2, -3, 3)
_MAX_SHIFTED_CELLS = 1 << 24  # up to this many, cells are also compared with shifted specs


_NO_CELLS = np.zeros((0, 0), np.bool_)


class CellFrame(Struct, frozen=True):
    """The positions of a call's cells: row 0 is position `q_offset`, key 0 position `kv_offset`.

    The first `n_keys` columns hold keys; the columns after them are unwritten cache slots. `window`
    is the number of keys that a sliding layer sees. `rows`, bool (rows,), and `keys`,
    bool (n_keys,), select what is compared (padding is not); None selects all. `cells` are those of
    one head, bool (rows, keys).
    """

    q_offset: int
    kv_offset: int
    n_keys: int
    window: int | None = None
    rows: BoolArray | None = None
    keys: BoolArray | None = None
    cells: BoolArray = _NO_CELLS

    def select(self, flags: BoolArray, n_rows: int, *, fill: bool = True) -> CellFrame:
        """Return the frame of the rows and keys at the positions that are True in `flags`.

        Positions after the end of `flags` are selected if `fill` is true.
        """
        rows = slice_flags(flags, self.q_offset, n_rows, fill=fill)
        keys = slice_flags(flags, self.kv_offset, self.n_keys, fill=fill)
        return replace(self, rows=rows, keys=keys)


class DeclaredDifference(Struct):
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


def find_empty_rows(spec: MaskSpec, n: int) -> BoolArray:
    """Return which of the first n positions see nothing, not even themselves, bool (n,)."""
    rows = np.arange(n)
    region = np.searchsorted(np.asarray(spec.starts), rows, side="right") - 1
    is_prefixed = np.asarray(spec.prefix_stops)[region] > 0
    empty: BoolArray = ~is_prefixed & (np.asarray(spec.local_starts)[region] > rows)
    return empty


def row_matches_spec(frame: CellFrame, spec: MaskSpec) -> bool:
    """Return whether the only row matches a spec."""
    # It counts keys, because this is the whole cost of a decode step without findings.
    row, q_idx, first = frame.cells[0], frame.q_offset, frame.kv_offset
    region = spec.region(q_idx)
    begin = max(first, 0 if frame.window is None else q_idx + 1 - frame.window)
    head = max(min(spec.prefix_stops[region], q_idx + 1), begin)
    low = min(max(spec.local_starts[region], head), q_idx + 1)
    n_expected = head - begin + q_idx + 1 - low
    if np.count_nonzero(row[: frame.n_keys]) != n_expected:
        return False
    inside = np.count_nonzero(row[begin - first : head - first])
    return bool(inside + np.count_nonzero(row[low - first : q_idx + 1 - first]) == n_expected)


def count_wrong_cells(frame: CellFrame, spec: MaskSpec, *, limit: int) -> int:
    """Count cells that differ from a spec in rows with keys, up to `limit`."""
    n_wrong = 0
    for _, ran, expected, counts in _iter_packed_rows(frame, spec):
        wrong = (ran ^ expected) & counts
        if wrong.any():
            n_wrong += int(BIT_COUNTS[wrong].sum(dtype=np.int64))
            if n_wrong >= limit:
                break
    return n_wrong


def has_future_keys(frame: CellFrame) -> bool:
    """Return whether any row sees a key that comes after it."""
    rows = _iter_packed_rows(replace(frame, window=None), mask_presets.causal())
    return any((ran & ~past & counts).any() for _, ran, past, counts in rows)


def _iter_packed_rows(
    frame: CellFrame, spec: MaskSpec
) -> Iterator[tuple[int, PackedMask, PackedMask, PackedMask]]:
    """Yield chunks as (first row, packed rows, those of the spec, flags of cells to compare)."""
    keys = np.ones(frame.n_keys, np.bool_) if frame.keys is None else frame.keys
    counting, offset, window = np.packbits(keys), frame.kv_offset, frame.window
    for start, stop in row_chunks(len(frame.cells), _DIFF_ROW_CHUNK):
        some = frame.cells[start:stop]
        sees: BoolArray = np.any(some, axis=1)
        if frame.rows is not None:
            sees &= frame.rows[start:stop]
        ran = np.packbits(some[:, : frame.n_keys], axis=1)
        rows = np.arange(frame.q_offset + start, frame.q_offset + start + len(ran))
        expected = pack_spec(spec, rows, frame.n_keys, kv_offset=offset, window=window)
        yield start, ran, expected, np.where(sees[:, None], counting, np.uint8(0))


def find_difference(frame: CellFrame, spec: MaskSpec, segments: Segments) -> DeclaredDifference:
    """Return how cells differ from a spec; slow, for cells that do differ."""
    out = DeclaredDifference(first_row=frame.q_offset)
    key_idx = np.arange(frame.n_keys) + frame.kv_offset
    for start, *packed in _iter_packed_rows(frame, spec):
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


def _add_leaked(
    out: DeclaredDifference, rows: IntArray, keys: IntArray, segments: Segments
) -> None:
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
    frame: CellFrame, spec: MaskSpec, found: DeclaredDifference
) -> tuple[str, int]:
    """Return what ran instead of the spec: the pattern, and its shift or window (0 for others)."""
    if len(frame.cells) > 1 and not found.n_closed and found.future:
        return OPEN, 0
    if not count_wrong_cells(frame, mask_presets.causal(), limit=1):
        return CAUSAL, 0
    window = replace(frame, window=found.nearest_lost)
    if not found.leaked and not count_wrong_cells(window, spec, limit=1):
        return WINDOW, found.nearest_lost
    if len(frame.cells) > 1 and frame.cells.size <= _MAX_SHIFTED_CELLS:
        enough = max((found.lost + found.leaked) // 8, 1)
        for n in _SHIFTS:
            if count_wrong_cells(frame, shift_spec(spec, n), limit=enough) < enough:
                return MOVED, n
    return OTHER, 0


def is_blockwise(found: DeclaredDifference, frame: CellFrame) -> bool:
    """Return whether rows see the future in whole blocks: a prefix, or bidirectional segments."""
    # In a block, the last key that a row sees sees no further than itself, and sees that row. A
    # mask_mod with an offset that is one too large has rows whose last key sees further; one with
    # rows and keys swapped, or inverted, has rows that see the future but not the past.
    start = frame.q_offset - frame.kv_offset
    n = max(min(len(frame.cells), frame.n_keys - start), 0)
    among = frame.cells[:n, start : start + n]
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


KNOWN_BACKENDS = ("sdpa", "eager", "flex_attention", "direct")
MASK_FUNCTION_EVENT = "mask-function"  # a custom attention function's mask function gave none

NO_MASK = "none"
_MAX_LISTED_FUTURE_ROWS = 64
_PATH_NAMES = {"flex uncompiled": "FlexAttention", "flex compiled": "compiled FlexAttention"}
_PATH_NAMES |= {"sdpa": "SDPA", "eager": "eager attention"}


class LayerGroup(Struct, frozen=True):
    """Layers of a step that executed the same mask; `call` is the first of their calls.

    `usual_path` is the path of most other layers if these layers took another one.
    """

    step: StepRecord
    mask: MaskRecord
    call: CallRecord
    layers: tuple[int, ...]
    usual_path: str = ""

    @property
    def n_layers(self) -> int:
        """How many layers have calls in the step."""
        return len({call.layer for call in self.step.calls})

    @property
    def cells(self) -> BoolArray:
        """The executed cells, bool (heads, rows, keys), which must be known."""
        assert self.mask.cells is not None
        return self.mask.cells

    @property
    def n_heads(self) -> int:
        """How many heads have a mask of their own; 1 if all share one."""
        return 1 if self.mask.cells is None else len(self.mask.cells)

    @property
    def has_custom_mask_mod(self) -> bool:
        """Whether a mask_mod ran that does not belong to transformers."""
        mask_mod = self.mask.mask_mod or ""
        return self.mask.kind == "block" and not mask_mod.startswith("transformers.")

    @property
    def adds_bools(self) -> bool:
        """Whether a bool mask was added to the scores."""
        return self.mask.kind == "bool" and self.call.path.startswith(("eager", "flex"))

    @property
    def is_fallback(self) -> bool:
        """Whether these layers took another path than the others, or a fallback after an error."""
        return self.call.suppressed_exception is not None or self.usual_path != ""

    def describe_layers(self) -> str:
        """Return "layer 3", "layers 0-2" or "all 8 layers"."""
        return text.format_layers(self.layers, self.n_layers)

    def describe_where(self, heads: Sequence[int] = ()) -> str:
        """Return "Layer 3", "All 8 layers", "Layers 0-2 in heads 0, 3 of 8"."""
        in_heads = ""
        if heads and len(heads) < self.n_heads:
            in_heads = f" in {text.format_numbers('head', heads)} of {self.n_heads}"
        return text.capitalize(self.describe_layers()) + in_heads

    def describe_run(self) -> str:
        """Return what ran: "causal SDPA without a mask", "FlexAttention with mask_mod f"."""
        kind, passed = self.mask.kind, self.call.mask_passed_to_layer
        path = _PATH_NAMES.get(self.call.path, f"attention '{text.printable(self.call.backend)}'")
        ran = f"{path} with a {kind} mask"
        if kind.startswith(NO_MASK):
            ran = f"{'' if kind == NO_MASK else 'causal '}{path} without a mask"
        elif kind == "block":
            ran = f"{path} with mask_mod {text.printable(self.mask.mask_mod or '(unnamed)')}"
        if self.call.suppressed_exception is not None:
            return f"{ran} after {text.printable(self.call.suppressed_exception)} was suppressed"
        if self.usual_path:
            return f"{ran} (the other layers ran {self.usual_path})"
        if kind.startswith(NO_MASK) and passed not in (None, NO_MASK):
            return f"{ran}, although it received {text.printable(str(passed))}"
        return ran


class MaskCase(Struct, frozen=True):
    """An executed mask that is not the expected one: where it ran, and how it differs.

    Attributes:
        expected: the name of the expected mask in sentences.
        assumed: whether it was assumed from segments instead of declared.
        pattern: what ran instead (see `classify_pattern`).
        amount: the shift or the window of the pattern.
        earlier_generation: the generation whose declared mask it is, if any.
        heads: the heads that differ.
        pieces: how many block-diagonal pieces the `segments` form.
        id: the finding id, if it does not follow from the rest.
        severity: the severity, if it does not follow from the rest.
        varies: whether the counts vary over the layers; those here are the largest.
    """

    context: RuleContext
    group: LayerGroup
    found: DeclaredDifference
    expected: str
    assumed: bool = False
    pattern: str = ""
    amount: int = 0
    earlier_generation: int | None = None
    heads: tuple[int, ...] = ()
    pieces: int = 0
    segments: int = 0
    id: str = ""
    severity: Severity | None = None
    varies: bool = False

    @property
    def finding_id(self) -> str:
        """The finding id of the case."""
        group = self.group
        if self.id:
            return self.id
        if group.adds_bools and self.found.leaked:
            return "mask.bool-added"
        if self.pattern == OPEN:
            return "mask.none" if group.mask.kind == NO_MASK else "mask.not-applied"
        merged = group.has_custom_mask_mod and self.found.leaked and self.pieces < self.segments
        if merged and self.pattern != MOVED and not self.found.future:
            return "mask.merged"
        if self.pattern == CAUSAL and self.found.leaked:
            return "mask.not-applied"
        if self.found.leaked:
            return "mask.future" if self.found.future == self.found.leaked else "mask.leak"
        return "mask.lost"

    def format_pairs(self, n: int) -> str:
        """Return "3 pairs", or "up to 3 pairs" if the count varies over the layers."""
        return ("up to " if self.varies else "") + text.plural(n, "pair")

    def _describe_all_open(self) -> str:
        """Return which rows see the future in a mask that should be closed in part."""
        n_cells = self.found.n_open + self.found.n_closed
        return (
            f", with {self.found.n_open} of {n_cells} cells open where "
            f"{self.expected} opens {self.found.n_expected}, so {self._describe_future_rows()}"
        )

    def describe(self, finding_id: str) -> str:
        """Return one sentence: which layers, what ran there, what is wrong, and the first pair."""
        describe = {
            "mask.none": self._describe_open,
            "mask.bool-added": self._describe_added_bools,
            "mask.merged": self._describe_merged,
            "mask.not-applied": self._describe_not_applied,
            "mask.future": self._describe_future,
            "mask.padding": self._describe_padding,
        }.get(finding_id, self._describe_counts)
        assumption = ""
        if self.assumed:
            segments = f"{self.segments} segments"
            assumption = f" (no mask was declared; {segments} are assumed to be isolated)"
        ran = f"{self.group.describe_where(self.heads)} ran {self.group.describe_run()}"
        return f"{ran}{describe()}{self._describe_first_pair()}{assumption}."

    def _describe_open(self) -> str:
        backend = self.group.call.backend
        known = backend in KNOWN_BACKENDS
        known = known or any(event.kind == MASK_FUNCTION_EVENT for event in self.group.step.events)
        why = "" if known else f" (attention '{text.printable(backend)}' has no mask function)"
        return f"{why}: every cell is open, so {self._describe_future_rows()}"

    def _describe_added_bools(self) -> str:
        future = f", so {self._describe_future_rows()}" if self.found.future else ""
        added = ", which adds 1 to the scores of its open cells and closes nothing"
        return f"{added}: every cell is open{future}"

    def _describe_merged(self) -> str:
        kept = f"{self.expected} keeps {self.segments} segments apart"
        expected = f"there are {self.segments} segments" if self.assumed else kept
        pieces = text.plural(self.pieces, "block-diagonal piece")
        return f", whose mask has {pieces}, but {expected}: {self._describe_worst_pair()}"

    def _describe_not_applied(self) -> str:
        group = self.group
        if self.pattern == OPEN:
            return self._describe_all_open()
        received = ""
        if group.mask.kind.startswith(NO_MASK) and group.call.mask_passed_to_layer is None:
            received = f" (received: None, backend {text.printable(group.call.backend)})"
        is_all = len(group.layers) == group.n_layers
        layers = text.plural(group.n_layers, "layer")
        applied = f"applied in 0 of {layers}" if is_all else "not applied"
        pairs = self.format_pairs(self.found.leaked)
        if self.assumed:
            isolation = f"the isolation of the declared segments was {applied}"
            return f"{received}, so {isolation}: {self._describe_worst_pair()}"
        lost = f", and {self.found.lost} that it opens are closed" if self.found.lost else ""
        return (
            f"{received}, so {self.expected} was {applied}: {pairs} that it closes "
            f"{text.is_or_are(self.found.leaked)} open{self._describe_across()}{lost}"
        )

    def _describe_future(self) -> str:
        pairs = f"({self.format_pairs(self.found.future)})"
        if self.found.n_closed or len(self.found.last_keys) < 2:
            return f", in which {self._describe_future_rows()} {pairs}"
        return f"{self._describe_all_open()} {pairs}"

    def _describe_padding(self) -> str:
        n_rows, pairs = len(self.found.leaking_rows), self.format_pairs(self.found.leaked)
        sees = "sees" if n_rows == 1 else "see"
        return f", in which {text.plural(n_rows, 'row')} {sees} padding keys ({pairs})"

    def _describe_counts(self) -> str:
        name = self.expected
        leaked, lost = self.format_pairs(self.found.leaked), self.format_pairs(self.found.lost)
        if self.assumed:
            shifted = f", as if shifted by {self.amount:+d}" if self.pattern == MOVED else ""
            return f": {self._describe_worst_pair(shifted)}"
        if not self.found.leaked:
            return f", which closes {lost} that {name} opens{self._describe_pattern()}"
        also = f" and closes {lost} that it opens" if self.found.lost else ""
        opens = f", which opens {leaked} that {name} closes{self._describe_across()}"
        return f"{opens}{also}{self._describe_pattern()}"

    def _describe_across(self) -> str:
        """Return " (36 of them let segment 2 see segment 1)", or "" if no segments are joined."""
        if self.found.first_across is None:
            return ""
        kinds, pairs = [s.kind for s in self.context.segments], self.found.leaked_by_pair
        isolated = SegmentKind.PARAPHRASE
        across = [(r, k) for r, k in pairs if r != k and kinds[r] is kinds[k] is isolated]
        row, key = max(across, key=lambda pair: pairs[pair])
        n = pairs[row, key]
        some = "they let" if n == self.found.leaked else f"{n} of them let"
        which = "it lets" if self.found.leaked == 1 else some
        return f" ({which} {self._segment_label(row)} see {self._segment_label(key)})"

    def _describe_pattern(self) -> str:
        if self.earlier_generation is not None:
            return f" (it is the mask of generation {self.earlier_generation})"
        if self.pattern == MOVED:
            return f" (the executed mask is the declared one shifted by {self.amount:+d})"
        if self.pattern == WINDOW:
            cut = f"the declared one cut to the newest {text.plural(self.amount, 'key')}"
            return f" (it is {cut}, but the layer declares no such window)"
        if not self.found.leaked and self.found.lost and self.group.step.q_len == 1:
            n_open = self.found.n_open
            row_0 = ", as for row 0" if self.found.last_keys == [0] else ""
            return f" ({n_open} of {text.plural(n_open + self.found.lost, 'key')} left{row_0})"
        return ""

    def _describe_future_rows(self) -> str:
        """Return "rows 0-10 see the future"."""
        last_keys = enumerate(self.found.last_keys, self.found.first_row)
        rows = [row for row, last in last_keys if last > row]
        if len(rows) == 1:
            return f"row {rows[0]} sees the future"
        if len(rows) <= _MAX_LISTED_FUTURE_ROWS:
            return f"rows {text.format_ranges(rows)} see the future"
        return f"{len(rows)} rows from {rows[0]} to {rows[-1]} see the future"

    def _describe_worst_pair(self, note: str = "") -> str:
        """Return "paraphrase 2 sees paraphrase 1 (6 pairs)", the segments with the most pairs."""
        pairs = self.found.leaked_by_pair
        row, key = max(pairs, key=lambda pair: pairs[pair])
        rest = sum(row != key for row, key in pairs) - 1
        more = f" and {text.plural(rest, 'more pair')} of segments leak" if rest > 0 else ""
        count = f"({self.format_pairs(self.found.leaked)}{note})"
        return f"{self._segment_label(row)} sees {self._segment_label(key)}{more} {count}"

    def _segment_label(self, index: int) -> str:
        if 0 <= index < len(self.context.segments):
            return text.printable(self.context.segments[index].label)
        return "the sequence"

    def _describe_first_pair(self) -> str:
        """Return the first wrong (row, key) pair, with the segments of the two positions."""
        pair, sees = self.found.first_across or self.found.first_leaked, "sees"
        if not self.found.leaked:
            pair, sees = self.found.first_lost, "does not see"
        if pair is None:
            return ""
        row, key = (self._describe_position(pos) for pos in pair)
        first = "first: " if (self.found.leaked or self.found.lost) > 1 else ""
        return f"; {first}{row} {sees} {key}"

    def _describe_position(self, pos: int) -> str:
        segment, place = self.context.segment_at(pos), self.context.format_position(pos)
        if segment is None or len(self.context.segments) <= 2:
            return place
        return f"{place} ({text.printable(segment.label)})"


def count_pieces(context: RuleContext, found: DeclaredDifference) -> tuple[int, int]:
    """Return the number of block-diagonal pieces, and the number of paraphrases."""
    # Two paraphrases form one piece where every row of one sees every key of the other.
    segments = context.segments
    paraphrases = [n for n, s in enumerate(segments) if s.kind is SegmentKind.PARAPHRASE]
    piece_of = {n: n for n in paraphrases}
    for (row, key), n_pairs in found.leaked_by_pair.items():
        are_paraphrases = row in piece_of and key in piece_of
        if are_paraphrases and n_pairs >= len(segments[row]) * len(segments[key]):
            old, new = piece_of[row], piece_of[key]
            piece_of = {n: new if piece == old else piece for n, piece in piece_of.items()}
    return len({*piece_of.values()}), len(paraphrases)
