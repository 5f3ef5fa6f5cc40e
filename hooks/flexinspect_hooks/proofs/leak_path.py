"""How a leak entered: in which layer and heads, directly or through rows that moved before.

Also measures noise. Layers that compute rows together, as experts do with the rows that are routed
to them, round differently for another number of rows. Then rows move that do not read the changed
segment, by as much as rounding, and not through attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flexinspect.analysis.proof_results import LEAK, UNSTABLE, format_amount, proof_finding
from flexinspect.core.text import limit_positions, plural, printable
from flexinspect.masks.algebra import BoolArray
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.prompt import Segment
from flexinspect_hooks.capture.model_layers import attention_layers
from flexinspect_hooks.proofs.hidden_states import (
    NOISE_FACTOR,
    CapturePoint,
    HiddenStates,
    RowChanges,
    capture_rows,
    patch_rows,
    row_distance,
)
from flexinspect_hooks.proofs.proof_subject import Subject

_OUTPUT_PROJECTIONS = ("o_proj", "out_proj", "dense", "c_proj", "wo")
"""Names of the projection of the heads' outputs in attention modules."""
_MAX_NAMED_CARRIERS = 4
"""Rows on the path of a leak that a sentence names."""


@dataclass(frozen=True, slots=True)
class IsolationLeak:
    """Rows that moved although they must not attend to the changed segment, where they first do.

    `point` is an index into `HiddenStates.points`, `rows` are bool (batch, rows), `changes` say
    how far every row moved at every point, `changed_ids` are (batch, rows).
    """

    segment: Segment
    point: int
    rows: BoolArray
    changes: RowChanges
    changed_ids: Tensor

    @property
    def first(self) -> tuple[int, int]:
        """Batch row and row of the first leaking row; the changed sequence comes first."""
        batch, row = np.argwhere(self.rows)[0]
        return int(batch), int(row)


@dataclass(frozen=True, slots=True)
class _LeakPath:
    """A leak and how it entered its layer.

    `carriers` are the rows through which it came, () if it is direct. `heads` are those of
    `n_heads` whose output moves at the first leaking row, None if unknown.
    """

    leak: IsolationLeak
    carriers: tuple[int, ...] = ()
    heads: tuple[int, ...] | None = None
    n_heads: int = 0


def explain_leaks(
    leaks: Sequence[IsolationLeak], subject: Subject, states: HiddenStates, noise: RowChanges
) -> list[Finding]:
    """One finding for each layer in which leaks enter, and for each kind of path."""
    groups: dict[tuple[int, bool], list[_LeakPath]] = {}
    entries = [_find_path(leak, subject, states, noise) for leak in leaks]
    carriers = {pos for entry in entries for pos in entry.carriers}
    for entry in entries:
        segment = entry.leak.segment
        if carriers.issuperset(range(segment.start, segment.stop)):
            continue  # the finding of the other leak names this segment as a carrier
        groups.setdefault((entry.leak.point, bool(entry.carriers)), []).append(entry)
    return [
        _leak_finding(entries, subject, states, noise)
        for _, entries in sorted(groups.items(), key=lambda group: group[0])
    ]


def _find_path(
    leak: IsolationLeak, subject: Subject, states: HiddenStates, noise: RowChanges
) -> _LeakPath:
    point = states.points[leak.point]
    if point.layer is None:
        return _LeakPath(leak)
    heads, n_heads = leaking_heads(leak, subject, point.layer)
    return _LeakPath(leak, _find_carriers(leak, subject, states, noise), heads, n_heads)


def _find_carriers(
    leak: IsolationLeak, subject: Subject, states: HiddenStates, noise: RowChanges
) -> tuple[int, ...]:
    """The rows through which the leak entered its layer, () if it is direct.

    Candidates are rows outside the changed segment that moved before the layer. The changed ids are
    run again with these rows restored to the reference: if the first leaking row now stays, they
    are the carriers. Those before the row are tried first, because they mostly suffice.
    """
    batch, row = leak.first
    before = leak.changes[leak.point - 1]
    is_source = np.zeros(before.shape[1], np.bool_)
    is_source[leak.segment.start : leak.segment.stop] = True
    carriers = np.flatnonzero((before[0] > 0) & ~is_source)
    if batch:
        return ()
    module = states.points[leak.point].module
    for candidates in (carriers[carriers < row], carriers):
        if not len(candidates):
            continue
        with patch_rows(module, candidates.tolist(), states.reference[leak.point - 1]):
            changes = states.compare(lambda: subject.forward(leak.changed_ids))
        if float(changes[leak.point, batch, row]) <= NOISE_FACTOR * float(noise[leak.point]):
            return tuple(candidates.tolist())
    return ()


def leaking_heads(
    leak: IsolationLeak, subject: Subject, layer: int
) -> tuple[tuple[int, ...] | None, int]:
    """The heads of a layer whose output moves at the leak's first row, and the number of heads.

    None if the heads are unknown: the layer has no output projection of a known name.
    """
    attention, n_heads = _output_projection(subject.model, layer)
    if attention is None or not n_heads:
        return None, 0
    point = CapturePoint(layer, attention, is_input=True)
    outputs = [_rows_at_point(point, subject, ids) for ids in (subject.ids, leak.changed_ids)]
    batch, row = leak.first
    one, other = (_row_of_chunks(parts, batch, row) for parts in outputs)
    if one is None or other is None or one.shape[0] % n_heads:
        return None, 0
    moved = row_distance(one.view(1, n_heads, -1), other.view(1, n_heads, -1))[0]
    return tuple(moved.nonzero().flatten().tolist()), n_heads


def _rows_at_point(point: CapturePoint, subject: Subject, ids: Tensor) -> list[Tensor]:
    """The rows that pass a point in a run on `ids`, in parts (batch, rows, width)."""
    parts: list[Tensor] = []

    def on_rows(index: int, start: int, rows: Tensor) -> None:
        parts.append(rows.clone())

    with capture_rows([point], subject.n_rows, on_rows):
        subject.forward(ids)
    return parts


def _row_of_chunks(parts: Sequence[Tensor], batch: int, row: int) -> Tensor | None:
    """One row (width,) of parts (batch, rows, width)."""
    for part in parts:
        if row < part.shape[1]:
            return part[batch, row]
        row -= part.shape[1]
    return None


def _output_projection(model: nn.Module, layer: int) -> tuple[nn.Module | None, int]:
    layer_of = attention_layers(model)
    for module in model.modules():
        if layer_of.get(id(module)) != layer:
            continue
        config = getattr(module, "config", getattr(model, "config", None))
        for name in _OUTPUT_PROJECTIONS:
            projection = getattr(module, name, None)
            if isinstance(projection, nn.Module):
                return projection, int(getattr(config, "num_attention_heads", 0) or 0)
    return None, 0


# -- findings --------------------------------------------------------------------------------------


def _leak_finding(
    entries: Sequence[_LeakPath], subject: Subject, states: HiddenStates, noise: RowChanges
) -> Finding:
    entry = entries[0]
    leak = entry.leak
    batch, row = leak.first
    layer = states.points[leak.point].layer
    far = float(leak.changes[leak.point, batch, row])
    size = states.largest_value(leak.point, row, batch)
    sentence = (
        f"{_changed_text(leak)} moves {_row_text(subject, batch, row)} "
        f"{_layer_text(layer)} by {format_amount(far)} "
        f"(largest value of the row: {format_amount(size)})"
        f"{_path_text(entry, subject)}{_heads_text(entry)}{_others_text(entries)}"
    )
    mask = subject.scene.declared_mask
    if mask is not None and mask.assumed:
        sentence += ". No mask was declared; the segments were taken to be isolated."
    elif entry.carriers and _mask_allows_path(entry, subject):
        sentence += ", and the declared mask itself allows that path."
    else:
        sentence += "."
    rows = np.flatnonzero(leak.rows[batch])
    return proof_finding(
        LEAK,
        sentence,
        step=0,
        layer=layer,
        head=entry.heads[0] if entry.heads and len(entry.heads) == 1 < entry.n_heads else None,
        positions=limit_positions(rows),
        evidence=_leak_evidence(entries, far, size, noise),
    )


def _mask_allows_path(entry: _LeakPath, subject: Subject) -> bool:
    """Whether the declared mask itself opens the path of a leak."""
    mask, segment = subject.scene.declared_mask, entry.leak.segment
    if mask is None:
        return False
    cells, carriers = mask.spec.dense(subject.n_rows), list(entry.carriers)
    reads = cells[carriers, segment.start : segment.stop].any(axis=1)
    return bool((cells[entry.leak.first[1], carriers] & reads).any())


def _leak_evidence(
    entries: Sequence[_LeakPath], far: float, size: float, noise: RowChanges
) -> dict[str, Any]:
    entry = entries[0]
    batch, row = entry.leak.first
    return {
        "changed": [one.leak.segment.label for one in entries],
        "batch_row": batch,
        "row": row,
        "moved_by": far,
        "largest_value": size,
        "rows": sum(int(one.leak.rows.sum()) for one in entries),
        "through": list(entry.carriers),
        "heads": None if entry.heads is None else list(entry.heads),
        "noise": float(noise[entry.leak.point]),
    }


def _changed_text(leak: IsolationLeak) -> str:
    segment = leak.segment
    places = f"positions {segment.start} to {segment.stop - 1}"
    if len(segment) == 1:
        places = f"position {segment.start}"
    return f"Changing {printable(segment.label)} ({places})"


def _row_text(subject: Subject, batch: int, row: int) -> str:
    if batch:
        return f"position {row} of sequence {batch} of the batch"
    segment = subject.scene.segment_at(row)
    inside = f" of {printable(segment.label)}" if segment is not None else ""
    return f"{subject.scene.format_position(row)}{inside}"


def _layer_text(layer: int | None) -> str:
    return "before the first layer" if layer is None else f"in layer {layer}"


def _path_text(entry: _LeakPath, subject: Subject) -> str:
    if entry.carriers:
        named = [subject.scene.format_position(pos) for pos in entry.carriers[:_MAX_NAMED_CARRIERS]]
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


def run_noise(states: HiddenStates, subject: Subject) -> RowChanges:
    """How far repetitions of the run differ at each point, (points,).

    One repetition suffices if it is bit-equal; otherwise there are three.
    """
    noise = _largest_change(states.compare(subject.forward), subject)
    if noise.any():
        for _ in range(2):
            noise = np.maximum(noise, _largest_change(states.compare(subject.forward), subject))
    return noise


def _largest_change(moved: RowChanges, subject: Subject) -> RowChanges:
    largest: RowChanges = np.where(subject.real, moved, 0).max(axis=(1, 2))
    return largest


def above_noise(moved: RowChanges, noise: RowChanges) -> RowChanges:
    """Changes (points, batch, rows) with those within the noise (points,) set to 0."""
    return np.where(moved > NOISE_FACTOR * noise[:, None, None], moved, 0).astype(np.float32)


def is_rounding(leak: IsolationLeak, subject: Subject, states: HiddenStates) -> bool:
    """Whether an apparent leak is only rounding, and not caused by attention."""
    layer = states.points[leak.point].layer
    if (
        layer is None
        or float(leak.changes[leak.point][leak.rows].max()) > _rounding_bound(states)[leak.point]
    ):
        return False
    return leaking_heads(leak, subject, layer)[0] == ()


def rounding_noise(states: HiddenStates, moved: Sequence[RowChanges]) -> RowChanges:
    """How far rounding moves rows at each point, (points,): the changes within its bound."""
    bound = _rounding_bound(states)[:, None, None]
    small = [np.where(one <= bound, one, 0).max(axis=(1, 2)) for one in moved]
    noise: RowChanges = np.max(small, axis=0).astype(np.float32)
    return noise


def _rounding_bound(states: HiddenStates) -> RowChanges:
    """The largest change that rounding can explain at each point, (points,)."""
    eps = torch.finfo(states.reference[0].dtype).eps
    sizes = [float(of.float().abs().nan_to_num(posinf=0).max()) for of in states.reference]
    return np.array(sizes, np.float32) * np.float32(min(_MAX_ROUNDINGS * eps, _WARNING_SHARE))


def unstable_finding(
    subject: Subject, states: HiddenStates, noise: RowChanges, *, is_mixed: bool
) -> Finding:
    """The finding that reports noise (points,), above which changes are judged."""
    point = int(noise.argmax())
    size = float(states.reference[point].float().abs().nan_to_num(posinf=0).max())
    layer = states.points[point].layer
    where = "before the layers" if layer is None else f"in layer {layer}"
    sizes = f"{format_amount(float(noise[point]))} {where} (largest value {format_amount(size)})"
    what = (
        f"Rounding moves rows that do not read the changed segment by up to {sizes}, and not by "
        "attention: these layers compute rows together, as experts do"
        if is_mixed
        else f"The same ids, run again, gave states that differ by up to {sizes}"
    )
    training = " The model is in training mode." if subject.model.training else ""
    sentence = f"{what}; only changes more than {NOISE_FACTOR} times as large count.{training}"
    severity = Severity.WARNING if noise[point] > _WARNING_SHARE * size else Severity.NOTE
    evidence = {"noise": [float(value) for value in noise], "size": size, "rounding": is_mixed}
    return proof_finding(UNSTABLE, sentence, severity=severity, layer=layer, evidence=evidence)
