"""The rule for segments that reach each other through several layers.

A row that sees a segment passes it on to every row that sees that row one layer later. The closure
of the executed masks over the layers shows from which layer on and through which rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flexinspect.core.text import capitalize, format_ranges, join_labels, plural, printable
from flexinspect.masks.mask_presets import BoolArray, MaskSpec, Segments
from flexinspect.records import imported
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.prompt import Segment, SegmentKind
from flexinspect.records.step import StepRecord
from flexinspect.rules.context import RuleContext, abbreviate_labels
from flexinspect.rules.engine import Findings, Rule, finding_kinds
from flexinspect.rules.masks import mask_views

PackedRows = npt.NDArray[np.uint64]  # mask cells, 64 per word: (rows, words)


class TransitiveLeak(NamedTuple):
    """Segment `target` depends on segment `source` from `layer` on, through the rows `carriers`.

    The carriers are all rows outside of both segments that the target sees and that depend on the
    source. If they are closed, the target no longer depends on the source.
    """

    target: int
    source: int
    layer: int
    carriers: tuple[int, ...]


def pack_rows(cells: BoolArray, n: int, n_rows: int | None = None) -> PackedRows:
    """Return the first n rows and keys of a mask, bool (heads, rows, keys), in any head, packed.

    A single row is broadcast to all rows. `n_rows` limits the number of rows, n by default.
    """
    n_rows = n if n_rows is None else n_rows
    part = cells[:, :n_rows, :n]
    rows = part[0] if len(part) == 1 else part.any(axis=0)
    bits = np.packbits(rows, axis=1)
    padded = np.zeros((len(bits), -(-n // 64) * 8), np.uint8)
    padded[:, : bits.shape[1]] = bits
    words: PackedRows = padded.view(np.uint64)
    return np.broadcast_to(words, (n_rows, words.shape[1]))


def find_transitive_leaks(
    packed: Mapping[int, PackedRows], targets: Segments, sources: Segments
) -> list[TransitiveLeak]:
    """Return which targets depend on which sources after all layers, without seeing them directly.

    `packed` are the masks by layer, as `pack_rows` returns them, all of one length. A row keeps
    what it had, as in the residual stream. Layers without a mask are assumed to pass nothing on.
    """
    leaks: list[TransitiveLeak] = []
    for number, source in enumerate(sources):
        inputs = _rows_reached(packed, source)
        for index, target in enumerate(targets):
            if target != source and inputs[-1][target.start : target.stop].any():
                layer, carriers = _find_carriers(packed, inputs, target, source)
                leaks.append(TransitiveLeak(index, number, layer, carriers))
    return _drop_implied_leaks(leaks, targets, sources)


def _rows_reached(packed: Mapping[int, PackedRows], source: Segment) -> list[BoolArray]:
    """Return which rows depend on a segment, bool (n,): before the first layer, and after each."""
    row = np.arange(len(next(iter(packed.values()))))
    reached = (row >= source.start) & (row < source.stop)
    inputs, settled = [reached], None
    for _, mask in sorted(packed.items()):
        if mask is not settled:  # the same mask again cannot add rows after it added none
            flags = pack_rows(reached[None, None], len(row), 1)[0]
            after: BoolArray = reached | (mask & flags).any(axis=1)
            settled = mask if np.array_equal(after, reached) else None
            reached = after
        inputs.append(reached)
    return inputs


def _find_carriers(
    packed: Mapping[int, PackedRows], inputs: Sequence[BoolArray], target: Segment, source: Segment
) -> tuple[int, tuple[int, ...]]:
    """Return from which layer on a target depends on a source, and through which rows."""
    # There are no such rows if it sees the source directly.
    layers, carriers = sorted(packed), np.zeros_like(inputs[0])
    after = [bool(reached[target.start : target.stop].any()) for reached in inputs[1:]]
    first = layers[after.index(True)]
    for layer, reached in zip(layers, inputs, strict=False):
        rows = packed[layer][target.start : target.stop]
        seen = _unpack_row(np.bitwise_or.reduce(rows), len(reached))
        if seen[source.start : source.stop].any():
            return first, ()
        if not _is_sliding_row(packed[layer], target.stop - 1, len(reached)):
            carriers |= seen & reached
    carriers[target.start : target.stop] = False
    return first, tuple(np.flatnonzero(carriers).tolist())


def _is_sliding_row(mask: PackedRows, last: int, n: int) -> bool:
    """Return whether a row sees a window of keys that moved by one from the row before it."""
    # A sliding window closes distant keys, but passes them on from row to row by design.
    before, keys = (np.flatnonzero(_unpack_row(mask[row], n)) for row in (max(last - 1, 0), last))
    is_window = mask_views.is_sliding_window
    moved = is_window(before, last - 1, len(keys)) and is_window(keys, last, len(before))
    return len(keys) > 1 and moved


def _unpack_row(packed: PackedRows, n: int) -> BoolArray:
    return np.unpackbits(packed.view(np.uint8), count=n).view(np.bool_)


def _drop_implied_leaks(
    leaks: Sequence[TransitiveLeak], targets: Segments, sources: Segments
) -> list[TransitiveLeak]:
    """Return the leaks that follow neither from directly visible segments nor from other leaks."""
    # If all carriers lie in a third segment, that segment has a leak of its own.
    spans = [(s.start, s.stop) for s in sources]
    numbers = [spans.index((target.start, target.stop)) for target in targets]
    direct = np.eye(len(sources), dtype=np.int64)
    for leak in leaks:
        if not leak.carriers:
            direct[numbers[leak.target], leak.source] = 1
    for _ in sources:
        direct = np.minimum(direct @ direct, 1)
    return [
        leak
        for leak in leaks
        if any(not any(a <= pos < b for a, b in spans) for pos in leak.carriers)
        and not direct[numbers[leak.target], leak.source]
    ]


def spec_reach(spec: MaskSpec, targets: Segments, sources: Segments) -> tuple[BoolArray, BoolArray]:
    """Return which targets reach which sources, bool (targets, sources), in one layer and all."""
    n = max(segment.stop for segment in (*targets, *sources))
    # As many layers as rows are enough. After one that adds no row, the others cost nothing.
    packed = dict.fromkeys(range(n), pack_rows(spec.dense(n)[None], n))
    inputs = [_rows_reached(packed, source) for source in sources]
    direct, over_layers = (
        np.array([[reached[at][t.start : t.stop].any() for reached in inputs] for t in targets])
        for at in (1, -1)
    )
    return direct, over_layers


_MAX_NAMED_CARRIERS = 4  # up to this many rows, a sentence names each with its token


class TransitiveReachRule(Rule):
    """Follows the segments of the prompt through the layers, once per set of masks.

    Leaks that the declared mask does not allow are errors, or warnings if no mask was declared. If
    the declared mask itself joins segments over several layers that it isolates in each, that is a
    warning of its own.
    """

    name = "reach"
    needs = (imported.MASKS,)
    findings = finding_kinds("reach.leak", "reach.by-design")

    def reset(self) -> None:
        self._checked: set[tuple[tuple[int, str], ...]] = set()
        segments = self.context.segments
        self._targets = self._sources = mask_views.paraphrase_segments(segments)
        if self.context.declared_spec is not None:  # it defines which rows may see shared text
            no_source, shared = mask_views.NON_PROMPT_LABELS, SegmentKind.SHARED
            others = [s for s in segments if s.kind is shared and s.label not in no_source]
            self._sources = sorted(self._targets + others, key=lambda segment: segment.start)

    def on_step(self, step: StepRecord) -> Findings:
        """Return the leaks of a step that computes the whole prompt, as one finding."""
        # A decode row does not change the hidden states of prompt rows.
        if step.kv_before or len(self._targets) < 2 or step.q_len < self._targets[-1].stop:
            return
        key = tuple((call.layer, call.mask or "") for call in step.calls)
        if key in self._checked:
            return
        self._checked.add(key)
        packed: dict[int, PackedRows] = {}
        for view in mask_views.step_mask_views(step, self.context)[0]:
            if not view.first_key_pos:
                rows = pack_rows(view.cells, self._targets[-1].stop)
                packed.update(dict.fromkeys(view.layers, rows))
        leaks = find_transitive_leaks(packed, self._targets, self._sources) if packed else []
        leaks, by_design = self._reportable_leaks(leaks) if leaks else ([], False)
        if leaks:
            yield self._leak_finding(step, sorted(leaks, key=lambda leak: leak.layer), by_design)

    def _reportable_leaks(self, leaks: list[TransitiveLeak]) -> tuple[list[TransitiveLeak], bool]:
        """Return the leaks beyond the declared mask, or else those that it has by design."""
        # Segments that the declared mask lets see each other directly are not a leak.
        declared = self.context.declared_mask
        if declared is None:  # a mask function of the user: its executed cells are the design
            return leaks, True
        direct, over_layers = spec_reach(declared.spec, self._targets, self._sources)
        beyond = [leak for leak in leaks if not over_layers[leak.target, leak.source]]
        if beyond:
            return beyond, False
        return [leak for leak in leaks if not direct[leak.target, leak.source]], True

    def _leak_finding(
        self, step: StepRecord, leaks: Sequence[TransitiveLeak], by_design: bool
    ) -> Finding:
        declared, first, others = self.context.declared_mask, leaks[0], ""
        target, source = self._targets[first.target], self._sources[first.source]
        carriers = sorted({pos for leak in leaks for pos in leak.carriers})
        if len(leaks) > 1:
            others = f"; the same holds for {plural(len(leaks) - 1, 'other pair')} of segments"
        if more := [pos for pos in carriers if pos not in first.carriers]:
            others += f", also through {_format_carriers(self.context, more)}"
        severity, allowed = Severity.ERROR, "the declared mask isolates the two over all layers"
        if by_design:
            severity, allowed = Severity.WARNING, "the declared mask itself allows this"
        elif declared is not None and declared.assumed:
            severity = Severity.WARNING
            allowed = "no mask was declared, so the segments are assumed to be isolated"
        sentence = (
            f"{printable(capitalize(target.label))} depends on {printable(source.label)} from "
            f"layer {first.layer} on, through {_format_carriers(self.context, first.carriers)}, "
            f"although none of its {plural(len(target), 'row')} sees it directly{others}; "
            f"{allowed}."
        )
        names = [segment.label for segment in self._sources]
        targets = [segment.label for segment in self._targets]
        keys = ("segment", "depends on", "from layer")
        pairs = [
            dict(zip(keys, (targets[leak.target], names[leak.source], leak.layer), strict=True))
            for leak in leaks
        ]
        is_declared = self.context.declared_spec is not None
        id_, layers = "reach.by-design" if by_design else "reach.leak", (first.layer,)
        facts = {"pairs": pairs, "carriers": len(carriers), "declared": is_declared}
        series = f"{[(leak.target, leak.source, leak.layer) for leak in leaks]}"
        return self.finding(
            step, id_, sentence, layers, facts, severity=severity, positions=carriers, series=series
        )


def _format_carriers(context: RuleContext, carriers: Sequence[int]) -> str:
    """Return `rows 7 "," and 8 "and" (separator 1)`, or `12 rows, 5-12 (separator 1)`.

    Rows of line breaks are called so: `rows 7 and 15 (line breaks)`.
    """
    s = "" if len(carriers) == 1 else "s"
    shown = format_ranges(carriers[: 2 * _MAX_NAMED_CARRIERS])
    tokens = [context.token(pos) for pos in carriers]
    if all(token is not None and token.text in ("\n", "\r\n") for token in tokens):
        few = len(carriers) <= _MAX_NAMED_CARRIERS
        return f"row{s} {join_labels([*map(str, carriers)]) if few else shown} (line break{s})"
    labels = context.labels_at(np.array(carriers, np.intp))
    where = f" ({abbreviate_labels(labels)})" if labels else ""
    if len(carriers) > _MAX_NAMED_CARRIERS:
        return f"{len(carriers)} rows, {shown}{where}"
    rows = [context.format_position(pos).removeprefix("position ") for pos in carriers]
    return f"row{s} {join_labels(rows)}{where}"
