"""How a leak entered: in which layer and heads, directly or through rows that moved before.

Also measures noise. Layers that compute rows together, as experts do with the rows that are routed
to them, round differently for another number of rows. Then rows move that do not read the changed
segment, by as much as rounding, and not through attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor, nn

from flexinspect.analysis.proof_results import LEAK, UNSTABLE, format_amount, proof_finding
from flexinspect.core.text import limit_positions, plural, printable
from flexinspect.masks.mask_presets import BoolArray
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.prompt import Segment
from flexinspect_hooks.capture.layer_rows import CapturePoint, capture_rows
from flexinspect_hooks.capture.model_layers import attention_layers
from flexinspect_hooks.proofs import hidden_states
from flexinspect_hooks.proofs.hidden_states import NOISE_FACTOR, HiddenStates, RowChanges
from flexinspect_hooks.proofs.proof_subject import Subject

OUTPUT_PROJECTIONS = ("o_proj", "out_proj", "dense", "c_proj", "wo")
"""Names of the projection of the heads' outputs in attention modules."""
_MAX_NAMED_CARRIERS = 4
"""Rows on the path of a leak that a sentence names."""


class ChangedSegment(Struct, frozen=True):
    """One changed segment: which rows must not move, which may, and which did.

    `ids` (batch, rows) are the changed ids. `isolated_rows` must not attend to the segment,
    `reader_rows` may; both are bool (batch, rows). `moved` is 0 within the noise.
    """

    segment: Segment
    ids: Tensor
    n_changed: int
    isolated_rows: BoolArray
    reader_rows: BoolArray
    moved: RowChanges

    @property
    def leaking_rows(self) -> BoolArray:
        """Isolated rows that moved, bool (points, batch, rows)."""
        rows: BoolArray = (self.moved > 0) & self.isolated_rows
        return rows

    @property
    def moved_rows(self) -> BoolArray:
        """Rows that moved at any point, bool (batch, rows)."""
        rows: BoolArray = np.any(self.moved > 0, axis=0)
        return rows

    @property
    def has_leak(self) -> bool:
        """Whether an isolated row moved."""
        return bool(self.leaking_rows.any())

    @property
    def point(self) -> int:
        """Of a leak: the first point, an index into `HiddenStates.points`, where it shows."""
        return int(self.leaking_rows.any(axis=(1, 2)).argmax())

    @property
    def rows(self) -> BoolArray:
        """Of a leak: the isolated rows that moved at its point, bool (batch, rows)."""
        rows: BoolArray = self.leaking_rows[self.point]
        return rows

    @property
    def first(self) -> tuple[int, int]:
        """Of a leak: batch row and row of the first of its rows; the changed sequence is first."""
        batch, row = np.argwhere(self.rows)[0]
        return int(batch), int(row)


class _LeakPath(Struct, frozen=True):
    """A leak and how it entered its layer.

    `carriers` are the rows through which it came, () if it is direct. `heads` are those of
    `n_heads` whose output moves at the first leaking row, None if unknown.
    """

    leak: ChangedSegment
    carriers: tuple[int, ...] = ()
    heads: tuple[int, ...] | None = None
    n_heads: int = 0


def explain_leaks(leaks: Sequence[ChangedSegment], states: HiddenStates) -> list[Finding]:
    """One finding for each layer in which leaks enter, and for each kind of path."""
    groups: dict[tuple[int, bool], list[_LeakPath]] = {}
    entries = [
        _LeakPath(leak, _find_carriers(leak, states), *_leaking_heads(leak, states))
        for leak in leaks
    ]
    carriers = {pos for entry in entries for pos in entry.carriers}
    for entry in entries:
        segment = entry.leak.segment
        if carriers.issuperset(range(segment.start, segment.stop)):
            continue  # the finding of the other leak names this segment as a carrier
        groups.setdefault((entry.leak.point, bool(entry.carriers)), []).append(entry)
    return [_leak_finding(groups[key], states) for key in sorted(groups)]


def _find_carriers(leak: ChangedSegment, states: HiddenStates) -> tuple[int, ...]:
    """The rows through which the leak entered its layer, () if it is direct.

    Candidates are rows outside the changed segment that moved before the layer. The changed ids are
    run again with these rows restored to the reference: if the first leaking row now stays, they
    are the carriers. Those before the row are tried first, because they mostly suffice.
    """
    point, (batch, row) = leak.point, leak.first
    if batch or states.points[point].layer is None:
        return ()
    source = range(leak.segment.start, leak.segment.stop)
    carriers = np.setdiff1d(np.flatnonzero(leak.moved[point - 1, 0]), source)
    for candidates in (carriers[carriers < row], carriers):
        if not len(candidates):
            continue
        rows = candidates.tolist()
        module = states.points[point].module
        with hidden_states.patch_rows(module, rows, states.reference[point - 1]):
            moved = states.compare(leak.ids)
        if float(moved[point, batch, row]) <= NOISE_FACTOR * float(states.noise[point]):
            return tuple(rows)
    return ()


def _leaking_heads(
    leak: ChangedSegment, states: HiddenStates
) -> tuple[tuple[int, ...] | None, int]:
    """The heads of the layer whose output moves at the leak's first row, and the number of heads.

    None if the heads are unknown: there is no layer, or no output projection of a known name.
    """
    subject, (batch, row) = states.subject, leak.first
    layer = states.points[leak.point].layer
    projection, n_heads = _output_projection(subject.model, layer)
    if projection is None or not n_heads:
        return None, 0
    point = CapturePoint(layer, projection, is_input=True)
    runs = (partial(subject.forward, ids) for ids in (subject.ids, leak.ids))
    (one,), (other,) = (capture_rows([point], run, subject.n_rows) for run in runs)
    if min(one.shape[1], other.shape[1]) <= row or one.shape[-1] % n_heads:
        return None, 0
    by_head = (rows[batch, row].view(1, n_heads, -1) for rows in (one, other))
    return tuple(hidden_states.row_distance(*by_head)[0].nonzero().flatten().tolist()), n_heads


def _output_projection(model: nn.Module, layer: int | None) -> tuple[nn.Module | None, int]:
    layer_of = attention_layers(model)
    for module in model.modules():
        if layer is None or layer_of.get(id(module)) != layer:
            continue
        config = getattr(module, "config", getattr(model, "config", None))
        for name in OUTPUT_PROJECTIONS:
            projection = getattr(module, name, None)
            if isinstance(projection, nn.Module):
                return projection, int(getattr(config, "num_attention_heads", 0) or 0)
    return None, 0


# -- findings --------------------------------------------------------------------------------------


def _leak_finding(entries: Sequence[_LeakPath], states: HiddenStates) -> Finding:
    entry, subject = entries[0], states.subject
    leak, point = entry.leak, entry.leak.point
    batch, row = leak.first
    layer = states.points[point].layer
    far = float(leak.moved[point, batch, row])
    size = float(states.reference[point][batch, row].float().abs().max())
    sentence = (
        f"{_changed_text(leak)} moves {_row_text(subject, batch, row)} "
        f"{'before the first layer' if layer is None else f'in layer {layer}'} "
        f"by {format_amount(far)} "
        f"(largest value of the row: {format_amount(size)})"
        f"{_path_text(entry, subject)}{_heads_text(entry)}{_others_text(entries)}"
    )
    mask = subject.context.declared_mask
    if mask is not None and mask.assumed:
        sentence += ". No mask was declared; the segments were taken to be isolated."
    elif entry.carriers and _mask_allows_path(entry, subject):
        sentence += ", and the declared mask itself allows that path."
    else:
        sentence += "."
    return proof_finding(
        LEAK,
        sentence,
        step=0,
        layer=layer,
        head=entry.heads[0] if entry.heads and len(entry.heads) == 1 < entry.n_heads else None,
        positions=limit_positions(np.flatnonzero(leak.rows[batch])),
        evidence={
            "changed": [one.leak.segment.label for one in entries],
            "batch_row": batch,
            "row": row,
            "moved_by": far,
            "largest_value": size,
            "rows": sum(int(one.leak.rows.sum()) for one in entries),
            "through": list(entry.carriers),
            "heads": None if entry.heads is None else list(entry.heads),
            "noise": float(states.noise[point]),
        },
    )


def _mask_allows_path(entry: _LeakPath, subject: Subject) -> bool:
    """Whether the declared mask itself opens the path of a leak."""
    mask, segment = subject.context.declared_mask, entry.leak.segment
    if mask is None:
        return False
    cells, carriers = mask.spec.dense(subject.n_rows), list(entry.carriers)
    reads = cells[carriers, segment.start : segment.stop].any(axis=1)
    return bool((cells[entry.leak.first[1], carriers] & reads).any())


def _changed_text(leak: ChangedSegment) -> str:
    segment, last = leak.segment, leak.segment.stop - 1
    is_one = last == segment.start
    places = f"position {last}" if is_one else f"positions {segment.start} to {last}"
    return f"Changing {printable(segment.label)} ({places})"


def _row_text(subject: Subject, batch: int, row: int) -> str:
    if batch:
        return f"position {row} of sequence {batch} of the batch"
    segment = subject.context.segment_at(row)
    inside = f" of {printable(segment.label)}" if segment is not None else ""
    return f"{subject.context.format_position(row)}{inside}"


def _path_text(entry: _LeakPath, subject: Subject) -> str:
    if entry.carriers:
        named = [*map(subject.context.format_position, entry.carriers[:_MAX_NAMED_CARRIERS])]
        more = len(entry.carriers) - len(named)
        rows = ", ".join(named) + (f" and {plural(more, 'row')} more" if more else "")
        return f", through {rows}: with these rows restored, it does not move"
    if entry.heads == ():
        return ", and not by the layer's attention, whose output for the row does not change"
    return "" if entry.leak.point == 0 else ", directly"


def _heads_text(entry: _LeakPath) -> str:
    heads = entry.heads
    if not heads or len(heads) == entry.n_heads:
        return ""
    if len(heads) == 1:
        return f", only in head {heads[0]} of {entry.n_heads}"
    return f", in {len(heads)} of {entry.n_heads} heads"


def _others_text(entries: Sequence[_LeakPath]) -> str:
    """Counts the other leaks in the same layer and of the same kind."""
    more = int(entries[0].leak.rows.sum()) - 1
    parts = [plural(more, "more row")] if more else []
    if len(entries) > 1:
        names = [printable(one.leak.segment.label) for one in entries[1:3]]
        rest = len(entries) - 1 - len(names)
        parts.append(f"also from {' and '.join(names)}" + (f" and {rest} more" if rest else ""))
    return f"; {', '.join(parts)}" if parts else ""


# -- noise -----------------------------------------------------------------------------------------

_WARNING_SHARE = 1e-2
"""Noise above this share of the states' size is a warning."""
_MAX_ROUNDINGS = 2000
"""Rounding errors of the largest value that may accumulate over all layers."""


def is_rounding(leak: ChangedSegment, states: HiddenStates) -> bool:
    """Whether an apparent leak is only rounding, and not caused by attention."""
    largest = float(leak.moved[leak.point][leak.rows].max())
    is_small = largest <= _rounding_bound(states)[leak.point]
    return is_small and _leaking_heads(leak, states)[0] == ()


def rounding_noise(states: HiddenStates, changes: Sequence[ChangedSegment]) -> RowChanges:
    """How far rounding moves isolated rows at each point, (points,): the changes in its bound."""
    bound = _rounding_bound(states)[:, None, None]
    small = [
        np.where(one.isolated_rows & (one.moved <= bound), one.moved, 0).max(axis=(1, 2))
        for one in changes
    ]
    noise: RowChanges = np.max(small, axis=0).astype(np.float32)
    return noise


def _rounding_bound(states: HiddenStates) -> RowChanges:
    """The largest change that rounding can explain at each point, (points,)."""
    eps = torch.finfo(states.reference[0].dtype).eps
    sizes = [states.largest_value(point) for point in range(len(states.points))]
    return np.array(sizes, np.float32) * np.float32(min(_MAX_ROUNDINGS * eps, _WARNING_SHARE))


def unstable_finding(states: HiddenStates, *, is_mixed: bool) -> Finding:
    """The finding that reports the noise, above which changes are judged."""
    noise, point = states.noise, int(states.noise.argmax())
    size = states.largest_value(point)
    layer = states.points[point].layer
    where = "before the layers" if layer is None else f"in layer {layer}"
    sizes = f"{format_amount(float(noise[point]))} {where} (largest value {format_amount(size)})"
    what = (
        f"Rounding moves rows that do not read the changed segment by up to {sizes}, and not by "
        "attention: these layers compute rows together, as experts do"
        if is_mixed
        else f"The same ids, run again, gave states that differ by up to {sizes}"
    )
    training = " The model is in training mode." if states.subject.model.training else ""
    sentence = f"{what}; only changes more than {NOISE_FACTOR} times as large count.{training}"
    severity = Severity.WARNING if noise[point] > _WARNING_SHARE * size else Severity.NOTE
    evidence = {"noise": noise.tolist(), "size": size, "rounding": is_mixed}
    return proof_finding(UNSTABLE, sentence, severity=severity, layer=layer, evidence=evidence)
