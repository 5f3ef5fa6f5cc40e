"""The cases of `MasksRule`: what `declared_vs_executed` found, its finding id and its sentence."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from flexinspect.core.text import (
    capitalize,
    format_layers,
    format_numbers,
    format_ranges,
    is_or_are,
    plural,
    printable,
)
from flexinspect.masks.algebra import BoolArray
from flexinspect.records.finding import Severity
from flexinspect.records.prompt import SegmentKind
from flexinspect.records.step import CallRecord, MaskRecord, StepRecord
from flexinspect.rules.context import RuleContext
from flexinspect.rules.masks.mask_difference import CAUSAL, MOVED, OPEN, WINDOW, CellDifference

MASK_FUNCTION_EVENT = "mask-function"  # a custom attention function's mask function gave none

NO_MASK = "none"
_MAX_LISTED_FUTURE_ROWS = 64
_PATH_NAMES = {
    "flex uncompiled": "FlexAttention",
    "flex compiled": "compiled FlexAttention",
    "sdpa": "SDPA",
    "eager": "eager attention",
}


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
        return format_layers(self.layers, self.n_layers)

    def describe_where(self, heads: Sequence[int] = ()) -> str:
        """Return "Layer 3", "All 8 layers", "Layers 0-2 in heads 0, 3 of 8"."""
        in_heads = ""
        if heads and len(heads) < self.n_heads:
            in_heads = f" in {format_numbers('head', heads)} of {self.n_heads}"
        return capitalize(self.describe_layers()) + in_heads

    def describe_run(self) -> str:
        """Return what ran: "causal SDPA without a mask", "FlexAttention with mask_mod f"."""
        kind, passed = self.mask.kind, self.call.mask_passed_to_layer
        path = _PATH_NAMES.get(self.call.path, f"attention '{printable(self.call.backend)}'")
        text = f"{path} with a {kind} mask"
        if kind.startswith(NO_MASK):
            text = f"{'' if kind == NO_MASK else 'causal '}{path} without a mask"
        elif kind == "block":
            text = f"{path} with mask_mod {printable(self.mask.mask_mod or '(unnamed)')}"
        if self.call.suppressed_exception is not None:
            return f"{text} after {printable(self.call.suppressed_exception)} was suppressed"
        if self.usual_path:
            return f"{text} (the other layers ran {self.usual_path})"
        if kind.startswith(NO_MASK) and passed not in (None, NO_MASK):
            return f"{text}, although it received {printable(str(passed))}"
        return text


class MaskCase(Struct, frozen=True):
    """An executed mask that is not the expected one: where it ran, and how it differs.

    Attributes:
        expected: the name of the expected mask in sentences.
        assumed: whether it was assumed from segments instead of declared.
        pattern: what ran instead (see `mask_difference.classify_pattern`).
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
    found: CellDifference
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
        return ("up to " if self.varies else "") + plural(n, "pair")

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
        known = backend in ("sdpa", "eager", "flex_attention", "direct")
        known = known or any(event.kind == MASK_FUNCTION_EVENT for event in self.group.step.events)
        why = "" if known else f" (attention '{printable(backend)}' has no mask function)"
        return f"{why}: every cell is open, so {self._describe_future_rows()}"

    def _describe_added_bools(self) -> str:
        future = f", so {self._describe_future_rows()}" if self.found.future else ""
        added = ", which adds 1 to the scores of its open cells and closes nothing"
        return f"{added}: every cell is open{future}"

    def _describe_merged(self) -> str:
        kept = f"{self.expected} keeps {self.segments} segments apart"
        expected = f"there are {self.segments} segments" if self.assumed else kept
        pieces = plural(self.pieces, "block-diagonal piece")
        return f", whose mask has {pieces}, but {expected}: {self._describe_worst_pair()}"

    def _describe_not_applied(self) -> str:
        group = self.group
        if self.pattern == OPEN:
            return self._describe_all_open()
        received = ""
        if group.mask.kind.startswith(NO_MASK) and group.call.mask_passed_to_layer is None:
            received = f" (received: None, backend {printable(group.call.backend)})"
        is_all = len(group.layers) == group.n_layers
        applied = f"applied in 0 of {plural(group.n_layers, 'layer')}" if is_all else "not applied"
        pairs = self.format_pairs(self.found.leaked)
        if self.assumed:
            isolation = f"the isolation of the declared segments was {applied}"
            return f"{received}, so {isolation}: {self._describe_worst_pair()}"
        lost = f", and {self.found.lost} that it opens are closed" if self.found.lost else ""
        return (
            f"{received}, so {self.expected} was {applied}: {pairs} that it closes "
            f"{is_or_are(self.found.leaked)} open{self._describe_across()}{lost}"
        )

    def _describe_future(self) -> str:
        pairs = f"({self.format_pairs(self.found.future)})"
        if self.found.n_closed or len(self.found.last_keys) < 2:
            return f", in which {self._describe_future_rows()} {pairs}"
        return f"{self._describe_all_open()} {pairs}"

    def _describe_padding(self) -> str:
        n_rows, pairs = len(self.found.leaking_rows), self.format_pairs(self.found.leaked)
        sees = "sees" if n_rows == 1 else "see"
        return f", in which {plural(n_rows, 'row')} {sees} padding keys ({pairs})"

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
            cut = f"the declared one cut to the newest {plural(self.amount, 'key')}"
            return f" (it is {cut}, but the layer declares no such window)"
        if not self.found.leaked and self.found.lost and self.group.step.q_len == 1:
            n_open = self.found.n_open
            row_0 = ", as for row 0" if self.found.last_keys == [0] else ""
            return f" ({n_open} of {plural(n_open + self.found.lost, 'key')} left{row_0})"
        return ""

    def _describe_future_rows(self) -> str:
        """Return "rows 0-10 see the future"."""
        last_keys = enumerate(self.found.last_keys, self.found.first_row)
        rows = [row for row, last in last_keys if last > row]
        if len(rows) == 1:
            return f"row {rows[0]} sees the future"
        if len(rows) <= _MAX_LISTED_FUTURE_ROWS:
            return f"rows {format_ranges(rows)} see the future"
        return f"{len(rows)} rows from {rows[0]} to {rows[-1]} see the future"

    def _describe_worst_pair(self, note: str = "") -> str:
        """Return "paraphrase 2 sees paraphrase 1 (6 pairs)", the segments with the most pairs."""
        pairs = self.found.leaked_by_pair
        row, key = max(pairs, key=lambda pair: pairs[pair])
        rest = sum(row != key for row, key in pairs) - 1
        more = f" and {plural(rest, 'more pair')} of segments leak" if rest > 0 else ""
        count = f"({self.format_pairs(self.found.leaked)}{note})"
        return f"{self._segment_label(row)} sees {self._segment_label(key)}{more} {count}"

    def _segment_label(self, index: int) -> str:
        if 0 <= index < len(self.context.segments):
            return printable(self.context.segments[index].label)
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
        segment, text = self.context.segment_at(pos), self.context.format_position(pos)
        if segment is None or len(self.context.segments) <= 2:
            return text
        return f"{text} ({printable(segment.label)})"


def count_pieces(context: RuleContext, found: CellDifference) -> tuple[int, int]:
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
