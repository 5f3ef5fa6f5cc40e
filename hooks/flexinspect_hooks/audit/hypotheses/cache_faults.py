"""Hypotheses about the key-value cache: what a decode row reads of earlier rows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from msgspec.structs import replace
from torch import Tensor

from flexinspect_hooks.audit.forward.forward_edits import AttentionInput, ForwardEdit
from flexinspect_hooks.audit.hypotheses.mask_faults import mask_edit
from flexinspect_hooks.audit.hypotheses.probe import FaultProbe

Edits = Iterator[ForwardEdit]

MAX_EVICTED = 24
"""Numbers of keys that are left, and single rows, that are tried."""


def _without(key: int) -> ForwardEdit:
    def change(call: AttentionInput) -> Tensor:
        allowed = call.allowed.clone()
        allowed[..., key] = False
        rows = torch.arange(allowed.shape[-2], device=allowed.device)
        allowed[..., rows == key, key] = True
        return allowed

    sentence = f"in which decode rows do not read the cached key of position {key}"
    return mask_edit("cache.missing", sentence, change)


def key_missing(probe: FaultProbe) -> Edits:
    """One cached key is missing: the first, the last of the prompt, or the one before the row."""
    if probe.is_decode:
        for key in sorted({0, probe.n_prompt - 1, probe.first_row - 1}):
            yield _without(key)

        def newest(call: AttentionInput) -> Tensor:
            n = call.allowed.shape[-1]
            return call.allowed & ~torch.eye(n, dtype=torch.bool, device=call.allowed.device)

        sentence = "in which decode rows do not read their own key"
        yield mask_edit("cache.missing", sentence, newest)


def key_duplicated(probe: FaultProbe) -> Edits:
    """One key counts twice: the last of the prompt, the one before the row, or the row's own."""
    if not probe.is_decode:
        return
    for key in sorted({0, probe.n_prompt - 1, probe.first_row - 1, probe.first_row}):
        # Twice the weight of a key is the score plus log 2.
        def attention(call: AttentionInput, key: int = key) -> AttentionInput:
            n = call.allowed.shape[-1]
            bias = torch.zeros(1, 1, n, n, dtype=call.query.dtype, device=call.query.device)
            bias[..., key] = torch.log(torch.tensor(2.0))
            return replace(call, bias=bias if call.bias is None else call.bias + bias)

        sentence = f"in which the cached key of position {key} counts twice"
        yield ForwardEdit(name="cache.duplicated", sentence=sentence, attention=attention)


def key_stale(probe: FaultProbe) -> Edits:
    """A cache row holds the key and value of another position."""
    if not probe.is_decode:
        return
    row = probe.first_row
    pairs = {(row - 1, row - 2), (row, row - 1), (row - 1, row), (row, 0)}
    for other in range(max(1, row - MAX_EVICTED), row - 1):  # overwritten by a neighbour
        pairs |= {(other, other - 1), (other, other + 1)}
    for to, source in sorted((a, b) for a, b in pairs if b >= 0):

        def attention(call: AttentionInput, to: int = to, source: int = source) -> AttentionInput:
            key, value = call.key.clone(), call.value.clone()
            key[:, :, to], value[:, :, to] = call.key[:, :, source], call.value[:, :, source]
            return replace(call, key=key, value=value)

        sentence = f"in which the cache row {to} holds the key and value of position {source}"
        yield ForwardEdit(name="cache.stale", sentence=sentence, attention=attention)

    def empty(call: AttentionInput) -> AttentionInput:
        # Slots that are not filled hold zeros, which softmax gives the weight of score 0.
        key, value = call.key.clone(), call.value.clone()
        key[:, :, row - 1], value[:, :, row - 1] = 0, 0
        return replace(call, key=key, value=value)

    sentence = f"in which the cache row {row - 1} holds zeros"
    yield ForwardEdit(name="cache.stale", sentence=sentence, attention=empty)


def slots_as_positions(probe: FaultProbe) -> Edits:
    """A mask of a paged cache compares positions with slots."""
    layout = probe.slots
    if layout is None:
        return
    position = layout.moved
    sentence = (
        "whose mask takes slots of the paged cache for positions (position "
        f"{position} is in slot {int(layout.slot_of[position])})"
    )

    def attention(call: AttentionInput) -> AttentionInput:
        return replace(call, output=layout.attend)

    yield ForwardEdit(name="cache.slots", sentence=sentence, attention=attention)


def keys_evicted(probe: FaultProbe) -> Edits:
    """Rows of the cache were closed, or zeroed in place, and its length stayed the same.

    Usual are some first keys and the newest ones that are left; or one row that holds zeros.
    """
    n = probe.first_row
    if not probe.is_decode:
        return
    for first in (0, 1, 2, 4):
        for newest in _counts(n - first - 1):
            rows = slice(first, n - newest)
            left = f"first {first} and newest {newest}" if first else f"newest {newest}"
            what = f"in which decode rows read only the {left} of {n} cached keys"
            yield mask_edit("cache.evicted", what, partial(_closed, rows=rows))
            what = f"in which all but the {left} of {n} cache rows hold zeros"
            yield ForwardEdit(
                name="cache.zeroed", sentence=what, attention=partial(_zeroed, rows=rows)
            )
    for row in range(max(0, n - MAX_EVICTED), n - 1):
        what = f"in which the cache row {row} holds zeros"
        edit = partial(_zeroed, rows=slice(row, row + 1))
        yield ForwardEdit(name="cache.zeroed", sentence=what, attention=edit)


def _counts(n: int) -> list[int]:
    """Return numbers of newest keys: all below `MAX_EVICTED`, then powers of two, up to `n`."""
    few = range(1, min(n, MAX_EVICTED - 1) + 1)
    return [*few, *(1 << k for k in range(5, 12) if MAX_EVICTED <= 1 << k <= n)]


def _closed(call: AttentionInput, rows: slice) -> Tensor:
    allowed = call.allowed.clone()
    allowed[..., rows.stop :, rows] = False
    return allowed


def _zeroed(call: AttentionInput, rows: slice) -> AttentionInput:
    key, value = call.key.clone(), call.value.clone()
    key[:, :, rows], value[:, :, rows] = 0, 0
    return replace(call, key=key, value=value)


HYPOTHESES = (slots_as_positions, key_missing, key_duplicated, key_stale, keys_evicted)
