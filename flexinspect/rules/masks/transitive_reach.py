"""What reaches what through the masks of several layers: the boolean closure, on packed cells.

A row that sees one segment carries it on to whoever sees that row a layer later: separators that
see everything and are seen by all join what the mask keeps apart. The closure of the executed masks
over the layers, each with its own mask, says from which layer on, and through which rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from flexinspect.core.text import format_ranges, limit_positions, plural, printable
from flexinspect.masks.algebra import BoolArray, MaskSpec
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.prompt import Segment, SegmentKind
from flexinspect.records.step import StepRecord
from flexinspect.rules.context import DeclaredMask, RuleContext
from flexinspect.rules.engine import FindingKind, Rule
from flexinspect.rules.masks.mask_views import (
    NON_PROMPT_LABELS,
    paraphrase_segments,
    step_mask_views,
)

PackedRows = npt.NDArray[np.uint64]
"""Cells packed 64 to a word: (rows, words)."""


@dataclass(frozen=True, slots=True)
class TransitiveLeak:
    """Segment `target` depends on `source` from `layer` on, through the rows `carriers`.

    The carriers are all rows outside of both that the target sees and that depend on the source, so
    with them cut nothing is left.
    """

    target: int
    source: int
    layer: int
    carriers: tuple[int, ...]


def pack_rows(cells: BoolArray, n: int, n_rows: int | None = None) -> PackedRows:
    """Return the first n rows and keys of a mask (heads, rows, keys), in any head, 64 to a word.

    A single row stands for all. `n_rows` may ask for fewer rows than keys.
    """
    n_rows = n if n_rows is None else n_rows
    some = cells[:, :n_rows, :n]
    rows = some[0] if len(some) == 1 else some.any(axis=0)
    bits = np.packbits(rows, axis=1)
    padded = np.zeros((len(bits), -(-n // 64) * 8), np.uint8)
    padded[:, : bits.shape[1]] = bits
    words: PackedRows = padded.view(np.uint64)
    return np.broadcast_to(words, (n_rows, words.shape[1]))


def find_transitive_leaks(
    packed: Mapping[int, PackedRows], targets: Sequence[Segment], sources: Sequence[Segment]
) -> list[TransitiveLeak]:
    """Return which targets depend on which sources after all layers, without seeing them directly.

    `packed` are the masks by layer, all of `pack` and one length. A row keeps what it had, as the
    residual stream does. Layers that are not known are taken to pass nothing on.
    """
    layers = sorted(packed)
    n = len(packed[layers[0]])
    leaks: list[TransitiveLeak] = []
    for number, source in enumerate(sources):
        inputs = _rows_reached(packed, layers, source, n)
        for index, target in enumerate(targets):
            if target != source and inputs[-1][target.start : target.stop].any():
                leaks.append(_make_leak(packed, layers, inputs, (index, number), (target, source)))
    return _drop_implied_leaks(leaks, targets, sources)


def _rows_reached(
    packed: Mapping[int, PackedRows], layers: Sequence[int], source: Segment, n: int
) -> list[BoolArray]:
    """Return which rows depend on a segment: before the first layer, and after each."""
    has = np.zeros(n, np.bool_)
    has[source.start : source.stop] = True
    inputs, settled = [has], None
    for layer in layers:
        mask = packed[layer]
        if mask is not settled:
            now: BoolArray = has | (mask & _pack_flags(has)).any(axis=1)
            settled = mask if np.array_equal(now, has) else None
            has = now
        inputs.append(has)
    return inputs


def _make_leak(
    packed: Mapping[int, PackedRows],
    layers: Sequence[int],
    inputs: Sequence[BoolArray],
    names: tuple[int, int],
    segments: tuple[Segment, Segment],
) -> TransitiveLeak:
    """Return the leak of a target that depends on a source; no carriers if it sees it directly."""
    target, source = segments
    carriers = np.zeros_like(inputs[0])
    after = [bool(has[target.start : target.stop].any()) for has in inputs[1:]]
    first = layers[after.index(True)]
    for layer, has in zip(layers, inputs, strict=False):
        rows = packed[layer][target.start : target.stop]
        seen = _unpack_row(np.bitwise_or.reduce(rows), len(has))
        if seen[source.start : source.stop].any():
            return TransitiveLeak(*names, first, ())
        if not _is_sliding_row(packed[layer], target.stop - 1, len(has)):
            carriers |= seen & has
    carriers[target.start : target.stop] = False
    return TransitiveLeak(*names, first, tuple(np.flatnonzero(carriers).tolist()))


def _is_sliding_row(mask: PackedRows, last: int, n: int) -> bool:
    """Say whether a row sees a window of keys that moved on by one from the row before it.

    Such a mask closes what is far, and means to pass it on from row to row.
    """
    runs = [np.flatnonzero(_unpack_row(mask[row], n)) for row in (max(last - 1, 0), last)]
    return all(
        len(keys) > 1 and keys[0] > 0 and keys[-1] == row == keys[0] + len(keys) - 1
        for row, keys in zip((last - 1, last), runs, strict=True)
    ) and len(runs[0]) == len(runs[1])


def _pack_flags(has: BoolArray) -> PackedRows:
    words: PackedRows = pack_rows(has[None, None], len(has), 1)[0]
    return words


def _unpack_row(packed: PackedRows, n: int) -> BoolArray:
    return np.unpackbits(packed.view(np.uint8), count=n).view(np.bool_)


def _drop_implied_leaks(
    leaks: Sequence[TransitiveLeak], targets: Sequence[Segment], sources: Sequence[Segment]
) -> list[TransitiveLeak]:
    """Return the leaks that do not follow from what segments see of each other directly.

    Nor from another leak: what a third segment alone hands on, it got hold of by one of its own.
    """
    spans = [(s.start, s.stop) for s in sources]
    numbers = {span: number for number, span in enumerate(spans)}
    direct = np.eye(len(sources), dtype=np.int64)
    for leak in leaks:
        target = targets[leak.target]
        number = numbers.get((target.start, target.stop))
        if not leak.carriers and number is not None:
            direct[number, leak.source] = 1
    for _ in sources:
        direct = np.minimum(direct @ direct, 1)
    return [
        leak
        for leak in leaks
        if any(not any(a <= pos < b for a, b in spans) for pos in leak.carriers)
        and not direct[numbers[targets[leak.target].start, targets[leak.target].stop], leak.source]
    ]


def spec_reach(
    spec: MaskSpec, targets: Sequence[Segment], sources: Sequence[Segment]
) -> tuple[BoolArray, BoolArray]:
    """Return what a rule joins in one layer, and over any number: bool (targets, sources) each.

    Counted over runs of positions that no border of a segment or of the rule divides: in each, the
    last row sees all that the others see.
    """
    n = max(segment.stop for segment in (*targets, *sources))
    spans = [pos for s in (*targets, *sources) for pos in (s.start, s.stop)]
    borders = {0, n, *spans, *spec.starts, *spec.prefix_stops, *spec.local_starts}
    starts = np.array(sorted(border for border in borders if 0 <= border < n))
    rows = np.append(starts[1:], n) - 1
    region = np.searchsorted(spec.starts, rows, side="right") - 1
    head, low = (
        np.asarray(column)[region][:, None] for column in (spec.prefix_stops, spec.local_starts)
    )
    sees = (starts <= rows[:, None]) & ((starts < head) | (starts >= low))
    closure = sees | np.eye(len(starts), dtype=np.bool_)
    for _ in range(int(np.ceil(np.log2(len(starts)))) + 1):
        closure = (closure.astype(np.int64) @ closure) > 0

    def joined(cells: BoolArray) -> BoolArray:
        inside = [
            [(s.start <= starts) & (starts < s.stop) for s in some] for some in (targets, sources)
        ]
        return np.array([[cells[np.ix_(t, s)].any() for s in inside[1]] for t in inside[0]])

    return joined(sees), joined(closure)


REACH_LEAK = "reach.leak"
REACH_BY_DESIGN = "reach.by-design"

_MAX_NAMED_CARRIERS = 4
"""Rows that a sentence names one by one, with their words."""

_REACH_QUERY = (
    "SELECT c.layer, c.path, m.fingerprint, m.kind, m.q_len, m.kv_len, m.rule, m.rule_source "
    "FROM calls c LEFT JOIN masks m ON m.fingerprint = c.mask "
    "WHERE c.generation = {generation} AND c.branch = {branch} AND c.step = {step} "
    "ORDER BY c.layer"
)


class TransitiveReachRule(Rule):
    """Follows the prompt's segments through the layers, once per set of masks.

    An error beyond a declared mask, a warning where none was declared. Where the declared mask
    itself joins over the layers what it keeps apart in each of them, that is a warning of its own.
    """

    name: ClassVar[str] = "reach"
    findings: ClassVar[Mapping[str, FindingKind]] = {
        REACH_LEAK: FindingKind(
            Severity.ERROR,
            "segments that do not see each other reach each other over several layers",
            "Each picture of the mask looks isolated, and yet the segment's hidden states change "
            "with the text of the other one.",
            "Change a token of the segment that is reached and compare the other one's hidden "
            "states: they move from the layer named on. In the mask panel the rows named are open "
            "over one segment, and seen by the other.",
            "Let the rows named see only what everybody may know, or see nothing of them from the "
            "other segments: each separator belongs to the segment before it.",
            _REACH_QUERY,
        ),
        REACH_BY_DESIGN: FindingKind(
            Severity.WARNING,
            "the declared mask itself joins over the layers segments that it keeps apart in each",
            "The rule does what it says, but what it says is not isolation: information passes "
            "through the rows that several segments share.",
            "Draw the declared mask in the mask panel and follow the rows named: open over one "
            "segment, and seen by the other.",
            "If the segments are meant to be independent, close the rows named over them, or give "
            "each segment rows of its own; else nothing is to be done.",
            _REACH_QUERY,
        ),
    }

    def __init__(self) -> None:
        self._checked: set[tuple[tuple[int, str], ...]] = set()

    def on_generation_start(self, context: RuleContext) -> None:
        """Begin with no mask followed."""
        super().on_generation_start(context)
        self._checked = set()
        self._targets = paraphrase_segments(context.segments)

    def on_step(self, step: StepRecord) -> Sequence[Finding]:
        """Return what reaches what in a step that computes the whole prompt."""
        # A decode row changes nothing of what the prompt's rows have become.
        if step.kv_before or len(self._targets) < 2 or step.q_len < self._targets[-1].stop:
            return ()
        key = tuple((call.layer, call.mask or "") for call in step.calls)
        if key in self._checked:
            return ()
        self._checked.add(key)
        leaks, is_design = self._find_leaks(step)
        leaks.sort(key=lambda leak: leak.layer)
        return [self._finding(step, leaks, is_design)] if leaks else ()

    def _find_leaks(self, step: StepRecord) -> tuple[list[TransitiveLeak], bool]:
        """Return what is worth telling, and whether it is the declared mask's own design."""
        views, _ = step_mask_views(step, self.context)
        n = self._targets[-1].stop
        packed: dict[int, PackedRows] = {}
        for view in views:
            if not view.first_key_pos:
                packed.update(dict.fromkeys(view.layers, pack_rows(view.cells, n)))
        sources = self._sources()
        leaks = find_transitive_leaks(packed, self._targets, sources) if packed else []
        if not leaks:
            return [], False
        return self._reportable_leaks(leaks, sources)

    def _sources(self) -> list[Segment]:
        """Return the segments that others may have to be kept from.

        Text before them is often shared; only a declared mask says whether it is.
        """
        intent, kinds = self.context.declared_mask, [SegmentKind.PARAPHRASE]
        if intent is not None and not intent.assumed:
            kinds.append(SegmentKind.SHARED)
        return [
            s
            for s in self.context.segments
            if s in self._targets or (s.kind in kinds and s.label not in NON_PROMPT_LABELS)
        ]

    def _reportable_leaks(
        self, leaks: Sequence[TransitiveLeak], sources: Sequence[Segment]
    ) -> tuple[list[TransitiveLeak], bool]:
        """Return the leaks beyond what the mask meant joins itself, else those that it does join.

        What its rule lets a segment see directly is no leak, and only missing here.
        """
        intent = self.context.declared_mask
        if intent is None:  # a function of the user's own: it means what it does
            return list(leaks), True
        direct, over_layers = spec_reach(intent.spec, self._targets, sources)
        beyond = [leak for leak in leaks if not over_layers[leak.target, leak.source]]
        if beyond:
            return beyond, False
        return [leak for leak in leaks if not direct[leak.target, leak.source]], True

    def _finding(
        self, step: StepRecord, leaks: Sequence[TransitiveLeak], by_design: bool
    ) -> Finding:
        intent, sources = self.context.declared_mask, self._sources()
        first = leaks[0]
        target, source = self._targets[first.target], sources[first.source]
        carriers = np.array(sorted({pos for leak in leaks for pos in leak.carriers}), np.intp)
        return Finding(
            id=REACH_BY_DESIGN if by_design else REACH_LEAK,
            severity=_reach_severity(intent, by_design),
            sentence=(
                f"{_capitalize_label(target.label)} reaches {printable(source.label)} from layer "
                f"{first.layer} on, through {self._format_carriers(first.carriers)}, though none of its "
                f"{plural(len(target), 'row')} sees it directly{self._format_others(leaks)}"
                f"{_format_declaration(intent, by_design)}."
            ),
            generation=step.generation,
            branch=step.branch,
            step=step.step,
            layer=first.layer,
            positions=limit_positions(carriers),
            evidence={
                "pairs": [
                    [self._targets[leak.target].label, sources[leak.source].label, leak.layer]
                    for leak in leaks
                ],
                "carriers": len(carriers),
                "declared": intent is not None and not intent.assumed,
            },
            series=f"{[(leak.target, leak.source, leak.layer) for leak in leaks]}",
        )

    def _format_carriers(self, carriers: Sequence[int]) -> str:
        """Return `rows 7 "," and 8 "and" (separator 1)`, or how many there are."""
        labels: dict[str, None] = {}
        for pos in carriers:
            segment = self.context.segment_at(pos)
            if segment is not None:
                labels.setdefault(printable(segment.label))
        names = list(labels)
        where = f" ({' and '.join(names)})" if 0 < len(names) < 3 else ""
        if len(names) > 2:
            where = f" ({names[0]} and {len(names) - 1} other segments)"
        if len(carriers) > _MAX_NAMED_CARRIERS:
            return (
                f"{len(carriers)} rows, {format_ranges(carriers[: 2 * _MAX_NAMED_CARRIERS])}{where}"
            )
        words = [self.context.format_position(pos).removeprefix("position ") for pos in carriers]
        if len(words) == 1:
            return f"row {words[0]}{where}"
        return f"rows {', '.join(words[:-1])} and {words[-1]}{where}"

    def _format_others(self, leaks: Sequence[TransitiveLeak]) -> str:
        n = len(leaks) - 1
        return f"; so {'does' if n == 1 else 'do'} {plural(n, 'other pair')} of segments" * (n > 0)


def _reach_severity(declared: DeclaredMask | None, by_design: bool) -> Severity:
    if by_design or declared is None or declared.assumed:
        return Severity.WARNING
    return Severity.ERROR


def _format_declaration(declared: DeclaredMask | None, by_design: bool) -> str:
    if by_design:
        return "; the declared mask itself has it so"
    if declared is not None and declared.assumed:
        return "; no mask was declared, so the segments are taken to be meant apart"
    return "; the declared mask keeps the two apart over all layers"


def _capitalize_label(text: str) -> str:
    return printable(text[:1].upper() + text[1:])
