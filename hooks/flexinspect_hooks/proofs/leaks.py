"""How a leak entered: in which layer and heads, directly or through rows that had moved before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from flexinspect.findings import Finding
from flexinspect.masks import BoolArray
from flexinspect.prompts import Segment
from flexinspect.proofs import LEAK, amount, found
from flexinspect.rules.words import counted, listed, printable
from flexinspect_hooks.layers import attention_layers
from flexinspect_hooks.proofs.rows import (
    NOISE_FACTOR,
    Moved,
    Point,
    States,
    distance,
    seen,
    set_back,
)
from flexinspect_hooks.proofs.subject import Subject

_PROJECTIONS = ("o_proj", "out_proj", "dense", "c_proj", "wo")
"""What attention modules call the projection that their heads' outputs go into."""
_CARRIERS = 4
"""Rows that carried a leak on which a sentence names."""


@dataclass(frozen=True, slots=True)
class Leak:
    """Rows that moved although they must not see what was changed, where that first happened.

    `point` is the number of a point of `rows.States`, `rows` bool (batch, rows), `moved` how far
    every row moved at every point, `changed` the ids (batch, rows) that were run.
    """

    segment: Segment
    point: int
    rows: BoolArray
    moved: Moved
    changed: Tensor

    @property
    def first(self) -> tuple[int, int]:
        """Batch row and row of the first one: in the changed sequence, if it is in it."""
        batch, row = np.argwhere(self.rows)[0]
        return int(batch), int(row)


@dataclass(frozen=True, slots=True)
class _Entry:
    """A leak and its way in. `through` are rows that alone carried it, empty when it is direct.

    `heads` are those whose output moves at the first row, None where that was not seen, of
    `n_heads`.
    """

    leak: Leak
    through: tuple[int, ...] = ()
    heads: tuple[int, ...] | None = None
    n_heads: int = 0


def explained(
    leaks: Sequence[Leak], subject: Subject, states: States, noise: Moved
) -> list[Finding]:
    """Return one finding for each layer and way in which leaks enter."""
    groups: dict[tuple[int, bool], list[_Entry]] = {}
    entries = [_entry(leak, subject, states, noise) for leak in leaks]
    carriers = {pos for entry in entries for pos in entry.through}
    for entry in entries:
        segment = entry.leak.segment
        if carriers.issuperset(range(segment.start, segment.stop)):
            continue  # what carries another leak is named there
        groups.setdefault((entry.leak.point, bool(entry.through)), []).append(entry)
    return [
        _finding(entries, subject, states, noise)
        for _, entries in sorted(groups.items(), key=lambda group: group[0])
    ]


def _entry(leak: Leak, subject: Subject, states: States, noise: Moved) -> _Entry:
    point = states.points[leak.point]
    if point.layer is None:
        return _Entry(leak)
    heads, n_heads = heads_of(leak, subject, point.layer)
    through = _carriers(leak, subject, states, noise)
    return _Entry(leak, through, heads, n_heads)


def _carriers(leak: Leak, subject: Subject, states: States, noise: Moved) -> tuple[int, ...]:
    """Return the rows that brought the leak into its layer, empty when it did not need them.

    They are rows outside of what was changed that had moved before the layer. The changed ids are
    run once more with these rows set back to what they were: if the first row now stays where it
    was, they are the way. Those before the row are tried first, as they mostly suffice.
    """
    batch, row = leak.first
    before = leak.moved[leak.point - 1]
    is_source = np.zeros(before.shape[1], np.bool_)
    is_source[leak.segment.start : leak.segment.stop] = True
    carriers = np.flatnonzero((before[0] > 0) & ~is_source)
    if batch:
        return ()
    module = states.points[leak.point].module
    for some in (carriers[carriers < row], carriers):
        if not len(some):
            continue
        with set_back(module, some.tolist(), states.of[leak.point - 1]):
            now = states.moved(lambda: subject.forward(leak.changed))
        if float(now[leak.point, batch, row]) <= NOISE_FACTOR * float(noise[leak.point]):
            return tuple(some.tolist())
    return ()


def heads_of(leak: Leak, subject: Subject, layer: int) -> tuple[tuple[int, ...] | None, int]:
    """Return the heads of a layer whose output moves at the leak's first row, and how many it has.

    None when the layer's heads are not seen: it has no output projection of a known name.
    """
    attention, n_heads = _projection(subject.model, layer)
    if attention is None or not n_heads:
        return None, 0
    point = Point(layer, attention, is_input=True)
    outputs = [_rows_at(point, subject, ids) for ids in (subject.ids, leak.changed)]
    batch, row = leak.first
    one, other = (_row(parts, batch, row) for parts in outputs)
    if one is None or other is None or one.shape[0] % n_heads:
        return None, 0
    moved = distance(one.view(1, n_heads, -1), other.view(1, n_heads, -1))[0]
    return tuple(moved.nonzero().flatten().tolist()), n_heads


def _rows_at(point: Point, subject: Subject, ids: Tensor) -> list[Tensor]:
    """Return the rows that pass a point when some ids are run, in parts (batch, rows, width)."""
    parts: list[Tensor] = []

    def see(index: int, start: int, rows: Tensor) -> None:
        parts.append(rows.clone())

    with seen([point], subject.n_rows, see):
        subject.forward(ids)
    return parts


def _row(parts: Sequence[Tensor], batch: int, row: int) -> Tensor | None:
    """Return one row (width,) of what came in parts (batch, rows, width)."""
    for part in parts:
        if row < part.shape[1]:
            return part[batch, row]
        row -= part.shape[1]
    return None


def _projection(model: nn.Module, layer: int) -> tuple[nn.Module | None, int]:
    layer_of = attention_layers(model)
    for module in model.modules():
        if layer_of.get(id(module)) != layer:
            continue
        config = getattr(module, "config", getattr(model, "config", None))
        for name in _PROJECTIONS:
            found_one = getattr(module, name, None)
            if isinstance(found_one, nn.Module):
                return found_one, int(getattr(config, "num_attention_heads", 0) or 0)
    return None, 0


# -- in words --------------------------------------------------------------------------------------


def _finding(entries: Sequence[_Entry], subject: Subject, states: States, noise: Moved) -> Finding:
    entry = entries[0]
    leak = entry.leak
    batch, row = leak.first
    layer = states.points[leak.point].layer
    far = float(leak.moved[leak.point, batch, row])
    size = states.size(leak.point, row, batch)
    sentence = (
        f"{_changed(leak)} moves {_where(subject, batch, row)} "
        f"{_place(layer)} by {amount(far)} (largest value of the row: {amount(size)})"
        f"{_way(entry, subject)}{_onlyheads_of(entry)}{_others(entries)}."
    )
    intent = subject.scene.intent
    if intent is not None and intent.assumed:
        sentence += " No mask was declared; the segments were taken to be isolated."
    elif entry.through and _is_declared(entry, subject):
        sentence = f"{sentence[:-1]}, and the declared mask itself leads that way."
    rows = np.flatnonzero(leak.rows[batch])
    return found(
        LEAK,
        sentence,
        step=0,
        layer=layer,
        head=entry.heads[0] if entry.heads and len(entry.heads) == 1 < entry.n_heads else None,
        positions=listed(rows),
        evidence=_evidence(entries, far, size, noise),
    )


def _is_declared(entry: _Entry, subject: Subject) -> bool:
    """Say whether the declared mask opens the way that a leak took."""
    intent, segment = subject.scene.intent, entry.leak.segment
    if intent is None:
        return False
    cells, through = intent.rule.dense(subject.n_rows), list(entry.through)
    reads = cells[through, segment.start : segment.stop].any(axis=1)
    return bool((cells[entry.leak.first[1], through] & reads).any())


def _evidence(entries: Sequence[_Entry], far: float, size: float, noise: Moved) -> dict[str, Any]:
    entry = entries[0]
    batch, row = entry.leak.first
    return {
        "changed": [one.leak.segment.label for one in entries],
        "batch_row": batch,
        "row": row,
        "moved_by": far,
        "largest_value": size,
        "rows": sum(int(one.leak.rows.sum()) for one in entries),
        "through": list(entry.through),
        "heads": None if entry.heads is None else list(entry.heads),
        "noise": float(noise[entry.leak.point]),
    }


def _changed(leak: Leak) -> str:
    segment = leak.segment
    places = f"positions {segment.start} to {segment.stop - 1}"
    if len(segment) == 1:
        places = f"position {segment.start}"
    return f"Changing {printable(segment.label)} ({places})"


def _where(subject: Subject, batch: int, row: int) -> str:
    if batch:
        return f"position {row} of sequence {batch} of the batch"
    segment = subject.scene.segment_at(row)
    inside = f" of {printable(segment.label)}" if segment is not None else ""
    return f"{subject.scene.position(row)}{inside}"


def _place(layer: int | None) -> str:
    return "before the first layer" if layer is None else f"in layer {layer}"


def _way(entry: _Entry, subject: Subject) -> str:
    if entry.through:
        named = [subject.scene.position(pos) for pos in entry.through[:_CARRIERS]]
        more = len(entry.through) - len(named)
        rows = ", ".join(named) + (f" and {counted(more, 'row')} more" if more else "")
        return f", through {rows}: with these set back to what they were, it stays"
    if entry.heads == ():
        return ", and not by the layer's attention, whose output for the row stays as it was"
    return "" if entry.leak.point == 0 else ", directly"


def _onlyheads_of(entry: _Entry) -> str:
    heads = entry.heads
    if not heads or len(heads) == entry.n_heads:
        return ""
    if len(heads) == 1:
        return f", in head {heads[0]} alone of {entry.n_heads}"
    return f", in {len(heads)} of {entry.n_heads} heads"


def _others(entries: Sequence[_Entry]) -> str:
    """Count what else leaks at the same place in the same way."""
    more = int(entries[0].leak.rows.sum()) - 1
    said = [f"{more} more row{'s' if more > 1 else ''}"] if more else []
    if len(entries) > 1:
        names = [printable(one.leak.segment.label) for one in entries[1:3]]
        rest = len(entries) - 1 - len(names)
        what = " and ".join(names) + (f" and {rest} more" if rest else "")
        said.append(f"also from {what}")
    return f"; {', '.join(said)}" if said else ""
