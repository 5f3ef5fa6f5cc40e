"""Compares what layers read from the cache with what was written into it, and with the text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from msgspec import Struct
from torch import Tensor

from flexinspect.core.text import format_layers
from flexinspect_hooks.audit.evidence.audited_sequence import row_order
from flexinspect_hooks.audit.evidence.cached_layers import CachedLayer
from flexinspect_hooks.audit.evidence.difference_shape import ComparedTensors, describe_difference
from flexinspect_hooks.audit.evidence.step_evidence import StepEvidence

_EXACT = 1e-6
_MAX_LISTED = 8
_MIN_ROWS = 3
_MULTIPLIED = "were multiplied by "
_FACTOR_ERROR = 1e-5
"""The largest difference of a multiplied table, relative to its norm."""


class CacheChange(Struct, frozen=True):
    """The first change of rows that are in the cache already; `step` is the first that reads it."""

    step: int
    text: str
    is_order: bool
    """Whether batch rows only changed places, keys and values of all layers alike."""


def cache_changes(steps: Sequence[StepEvidence]) -> list[CacheChange]:
    """Return what happened to rows of the cache between steps of a generation."""
    by_step: dict[int, dict[str, list[int]]] = {}
    layers = sorted({layer for step in steps for layer in step.cached})
    for layer in layers:
        before: tuple[CachedLayer, int] | None = None
        for step in steps:
            now = step.cached.get(layer)
            if now is None or not now.is_intact:
                continue  # written to since: what the layer read is gone
            if before is not None and step.kv_before:
                text = _layer_change(before[0], now, min(before[1], step.kv_before))
                if text:
                    changes = by_step.setdefault(step.step, {})
                    changes.setdefault(_like(text, changes), []).append(layer)
            before = now, step.kv_before + step.q_len
    found = []
    for step_number, changes in sorted(by_step.items()):
        for text, where in list(changes.items())[:2]:
            is_order = text.startswith(_ORDER) and len(where) == len(layers)
            which = "all layers" if len(where) == len(layers) else format_layers(where, 1 << 20)
            text += f" (numbers of layer {where[0]})" if _MULTIPLIED in text and where[1:] else ""
            whole = f"Before step {step_number} the cache of {which} was changed: {text}."
            found.append(CacheChange(step_number, whole, is_order))
    return found


def _like(text: str, known: Mapping[str, list[int]]) -> str:
    """Return a known change that differs by the factors only, else the change itself."""
    if _MULTIPLIED not in text:
        return text
    plain = _NUMBERS.sub("", text)
    return next((one for one in known if _NUMBERS.sub("", one) == plain), text)


_NUMBERS = re.compile(r"[\d.]+")
_ORDER = "its batch rows"
OTHER_ROW = "it is that of batch row"
"""Begins what `mask_change` says of a mask that another batch row had."""


def _layer_change(one: CachedLayer, other: CachedLayer, n: int) -> str:
    """Return how the first `n` rows of a layer's cache changed, empty if they did not."""
    before, now = (one.key, one.value), (other.key, other.value)
    if any(a.data_ptr() == b.data_ptr() for a, b in zip(before, now, strict=True)):
        return ""  # rewritten in place: what it was is gone
    if any(t.shape[2] < n or t.shape[1] != now[0].shape[1] for t in (*before, *now)):
        return ""
    pairs = [(a[:, :, :n], b[:, :, :n]) for a, b in zip(before, now, strict=True)]
    if all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs):
        return ""
    maps = [_row_map(a, b) for a, b in pairs]
    if maps[0] is not None and maps[0] == maps[1]:
        return f"{_ORDER} are now those of the rows {_listed(maps[0])}"
    texts = []
    for name, (old, new), moved in zip(("keys", "values"), pairs, maps, strict=True):
        if moved == list(range(len(new))):
            texts.append(f"the {name} stayed")
        elif moved is not None:
            texts.append(f"the {name} of its batch rows are now those of the rows {_listed(moved)}")
        else:
            texts.append(f"the {name} of rows that were written before {_content(old, new)}")
    return ", and ".join(texts)


def _listed(rows: Sequence[int]) -> str:
    more = ", …" if len(rows) > _MAX_LISTED else ""
    return ", ".join(map(str, rows[:_MAX_LISTED])) + more


def _row_map(before: Tensor, now: Tensor) -> list[int] | None:
    """Return which batch row of `before` each batch row of `now` equals, None if one has none."""
    found = []
    for row, table in enumerate(now):
        same = [other for other, old in enumerate(before) if torch.equal(old, table)]
        if not same:
            return None
        found.append(row if row in same else same[0])
    return found


def _content(before: Tensor, now: Tensor) -> str:
    if before.shape != now.shape:
        return "have other values"
    for row in range(len(now)):
        if torch.equal(before[row], now[row]):
            continue
        where = f" in batch row {row}" if len(now) > 1 else ""
        if factors := _factors(before[row].double().cpu(), now[row].double().cpu()):
            return f"{_MULTIPLIED}{factors}{where}, as codes are that get the scale of newer rows"
        shape = _shape(_table(now[row]), _table(before[row]), range(now.shape[2]), now.shape[1])
        return f"changed{where} (the table {shape})" if shape else f"changed{where}"
    return "stayed"


def _factors(before: Tensor, now: Tensor) -> str:
    """Return the factor of each head, or of its channels, by which a table was multiplied.

    Both are (heads, rows, size); empty if there are no such factors.
    """
    if before.shape[1] < _MIN_ROWS:
        return ""
    for dims, what in (((1, 2), "by head"), ((1,), "by channel, in each head")):
        square = before.square().sum(dims, keepdim=True)
        factor = (before * now).sum(dims, keepdim=True) / square.clamp_min(1e-30)
        gap = (now - factor * before).square().sum(dims, keepdim=True)
        fits = gap <= _FACTOR_ERROR**2 * now.square().sum(dims, keepdim=True).clamp_min(1e-30)
        if bool(fits.all()) and bool((square > 0).all()) and bool((factor > 0).all()):
            values = factor.flatten().tolist()
            numbers = [f"{one:.3g}" for one in values]
            if len({*numbers}) == 1:
                return ""  # its shape says so
            if len(numbers) > _MAX_LISTED:
                return f"{min(values):.3g} to {max(values):.3g} ({what})"
            return f"{', '.join(numbers)} ({what})"
    return ""


def _table(tensor: Tensor) -> Tensor:
    """Return (rows, heads x size) of (heads, rows, size), in float64."""
    return tensor.transpose(0, 1).flatten(1).double().cpu()


def _shape(ours: Tensor, theirs: Tensor, places: Sequence[int], heads: int) -> str:
    compared = ComparedTensors(ours, theirs, _EXACT, list(places), heads)
    return ", and there ".join(describe_difference(compared))


def cache_beside_text(
    evidence: StepEvidence,
    layer: int,
    row: int,
    right: Mapping[str, Tensor],
    columns: Sequence[int],
    limit: float,
) -> str:
    """Return how the keys and values that a layer reads in a step differ from those of the text.

    `right` are the reference's "keys" and "values" (heads, n, size); `columns` are the slots of the
    text's positions.
    """
    kept = evidence.cached.get(layer)
    if kept is None or not evidence.kv_before:
        return ""
    texts, n = [], evidence.kv_before + evidence.q_len
    slots = [slot for slot in columns if slot < min(n, kept.key.shape[2])]
    for tensor, (name, table) in zip((kept.key, kept.value), right.items(), strict=True):
        if row >= len(tensor) or tensor.shape[1] != table.shape[0]:
            return ""
        ours, theirs = _table(tensor[row])[slots], _table(table)[: len(slots)]
        compared = ComparedTensors(ours, theirs, 4 * limit, range(len(slots)), tensor.shape[1])
        if not len(compared.wrong_rows()):
            texts.append(f"the cached {name} are right")
            continue
        shape = ", and there ".join(describe_difference(compared))
        n_wrong = len(compared.wrong_rows())
        texts.append(f"of the cached {name} {n_wrong} of {len(slots)} rows are wrong")
        if shape:
            texts[-1] += f" (the table {shape})"
    return f"In step {evidence.step} {', and '.join(texts)}."


def mask_change(steps: Sequence[StepEvidence], at: StepEvidence, row: int) -> str:
    """Return how the attention mask of a batch row differs from that of the step before."""
    before = [one for one in steps if one.step < at.step and one.padding is not None]
    now = at.padding
    if now is None or not before or now.dim() != 2 or row >= len(now):
        return ""
    old = before[-1].padding
    assert old is not None
    n = min(old.shape[1], now.shape[1])
    known, mine = (old[:, :n] != 0), (now[row, :n] != 0)
    order = row_order([before[-1], at])[-1]
    parent = row if order is None or row >= len(order) else order[row]
    if parent >= len(known) or torch.equal(known[parent], mine):
        return ""
    closed = (known[parent] & ~mine).nonzero().flatten().tolist()
    opened = (~known[parent] & mine).nonzero().flatten().tolist()
    parts = [f"closes columns that were open ({_listed(closed)})"] if closed else []
    parts += (
        [f"opens columns that were closed, such as padding ({_listed(opened)})"] if opened else []
    )
    text = f"In step {at.step} the attention mask of this row {' and '.join(parts)}"
    same = [other for other, table in enumerate(known) if torch.equal(table, mine)]
    whose = f"; {OTHER_ROW} {same[0]} of the step before" if same else ""
    if parent != row:
        whose += f", while the row in the cache was row {parent} then"
    return f"{text}{whose}."
