"""Layers of one step that executed different masks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flexinspect.findings import Finding, Severity
from flexinspect.masks import BoolArray
from flexinspect.records import MaskRecord, StepRecord
from flexinspect.rules.maskwords import LAYERS_DIFFER, LayerGroup, describe_run, describe_where
from flexinspect.rules.scene import RuleContext
from flexinspect.rules.words import format_layers, plural

_MIN_KIND_SHARE = 0.2
"""From this share of the layers on (and two of them), the odd ones may be a kind of layer."""


def find_differing_layers(
    context: RuleContext, step: StepRecord, groups: Sequence[LayerGroup], real: BoolArray | None
) -> list[Finding]:
    """Return which layers ran another mask than most layers of their kind.

    Layers with another window, or that hold another number of keys, are another kind.
    """
    kinds: dict[tuple[int | None, int], list[LayerGroup]] = {}
    for group in groups:
        if group.mask.cells is not None:
            kinds.setdefault((group.call.window, group.call.kv_len), []).append(group)
    found = []
    for some in kinds.values():
        found += _find_differing_in_kind(context, step, some, real) if len(some) > 1 else []
    return found


def _find_differing_in_kind(
    context: RuleContext, step: StepRecord, groups: Sequence[LayerGroup], real: BoolArray | None
) -> list[Finding]:
    classes: list[list[LayerGroup]] = []
    for group in groups:
        for known in classes:
            if not _differing_cells(known[0].mask, group.mask, step, real).any():
                known.append(group)
                break
        else:
            classes.append([group])
    if len(classes) < 2:
        return []
    norm = max(classes, key=_norm_rank)
    return [
        _layers_differ_finding(context, step, norm, odd, real) for odd in classes if odd is not norm
    ]


def _norm_rank(groups: Sequence[LayerGroup]) -> tuple[int, bool, int]:
    """Return what makes some layers the norm: their number, then that nothing failed in them."""
    n_layers = sum(len(group.layers) for group in groups)
    first = min(group.layers[0] for group in groups)
    return n_layers, not any(group.is_fallback for group in groups), -first


def _differing_cells(
    a: MaskRecord, b: MaskRecord, step: StepRecord, real: BoolArray | None
) -> BoolArray:
    """Return the cells (heads, rows, keys) in which two masks differ, in rows that count."""
    assert a.cells is not None
    assert b.cells is not None
    if a.cells.shape[1:] != b.cells.shape[1:]:
        return np.zeros((1, 1, 1), np.bool_)
    n_heads = max(len(a.cells), len(b.cells))
    if not {len(a.cells), len(b.cells)} <= {1, n_heads}:
        return np.zeros((1, 1, 1), np.bool_)
    rows = np.ones((1, a.cells.shape[1]), np.bool_)
    if real is not None:
        some = real[step.kv_before : step.kv_before + rows.shape[1]]
        rows[:, : len(some)] &= some
    for mask in (a, b):
        if mask.averaged is not None:
            rows = rows & ~mask.averaged
    differing: BoolArray = (a.cells ^ b.cells) & rows[..., None]
    return differing


def _layers_differ_finding(
    context: RuleContext,
    step: StepRecord,
    norm: Sequence[LayerGroup],
    odd: Sequence[LayerGroup],
    real: BoolArray | None,
) -> Finding:
    which = tuple(sorted(layer for group in odd for layer in group.layers))
    others = tuple(sorted(layer for group in norm for layer in group.layers))
    one, n_layers = odd[0], odd[0].n_layers
    cells = _differing_cells(norm[0].mask, one.mask, step, real)
    head, row, key = (int(n) for n in np.argwhere(cells)[0])
    assert one.mask.cells is not None
    opens = bool(one.mask.cells[min(head, len(one.mask.cells) - 1), row, key])
    q_idx = step.kv_before + row
    kv_idx = max(step.kv_after - one.call.kv_len, 0) + key
    n_cells = int(np.count_nonzero(cells.any(axis=0)))
    sees = f"{context.format_position(q_idx)} {'sees' if opens else 'does not see'} {context.format_position(kv_idx)}"
    words = describe_where(LayerGroup(one.mask, one.call, which, n_layers))
    sentence = (
        f"{words} ran {describe_run(one)}, and {format_layers(others, n_layers)} ran {describe_run(norm[0])}: "
        f"{plural(n_cells, 'cell')} {'differs' if n_cells == 1 else 'differ'}, "
        f"{'' if n_cells == 1 else 'first: '}{sees} there only."
    )
    if not opens:
        sentence = sentence.replace(" there only.", ", as in the others.")
    return Finding(
        id=LAYERS_DIFFER,
        severity=_layers_differ_severity(one, which, n_layers),
        sentence=sentence,
        generation=step.generation,
        branch=step.branch,
        step=step.step,
        layer=which[0],
        positions=(q_idx, kv_idx),
        evidence={
            "mask": one.mask.fingerprint,
            "others": norm[0].mask.fingerprint,
            "cells": n_cells,
            "layers": list(which),
            "path": one.call.path,
            "path_of_others": norm[0].call.path,
            "swallowed": one.call.swallowed,
        },
        layers=which if len(which) > 1 else (),
        series="layers " + ", ".join(map(str, which)),
    )


def _layers_differ_severity(odd: LayerGroup, which: Sequence[int], n_layers: int) -> Severity:
    """A fallback is told of by its path; layers of two kinds may be how the model is."""
    is_kind = len(which) > 1 and len(which) >= _MIN_KIND_SHARE * n_layers
    return Severity.NOTE if odd.is_fallback or is_kind else Severity.WARNING
