"""Recomputes attention rows from the queries, keys and masks of a trace.

The keys of a layer are stored per step. Those of the prefill and of every 64 steps after it are
cached together, so that going to the next step reads little more than the new keys.
"""

from __future__ import annotations

from functools import cached_property, partial

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from flexinspect.masks import attention_row
from flexinspect.masks.attention_row import Bools, Floats, LseCheck, kv_head_of, row_scores
from flexinspect.panels.base import Missing, TracePlace
from flexinspect.panels.panel_source import Source
from flexinspect.records.step import Array, CallRecord
from flexinspect.trace.mask_cells import find_mask_cells, read_mask_arrays, read_packed_rows
from flexinspect.trace.queries.range_queries import branch_of_step
from flexinspect.trace.query_results import StepRow
from flexinspect.trace.reader import TraceReader

KEY_CHUNK_STEPS = 64
"""Number of decode steps whose keys are cached together."""

MAX_READ_BYTES = 256 << 20
"""Maximum bytes of keys (or queries) that are read for one picture, as float32."""

MAX_CACHED_MASK_CELLS = 1 << 22
"""Cells of a head up to which a mask is cached as a whole; of a larger one, the row that is shown.
"""

N_HEAVIEST = 64
EXTREME_ONLY = "Weights of single tokens are recorded at --level extreme."


class RowNotRecordedError(Exception):
    """A row cannot be recomputed; the message is a sentence with the reason."""


class StepView(Struct, frozen=True):
    """One recorded step; `branch` is the one that owns it: the place's or an ancestor."""

    source: Source
    place: TracePlace
    branch: int
    step_row: StepRow
    calls: tuple[CallRecord, ...]

    def load_array(
        self, stream: str, layer: int | None = None, step: int | None = None
    ) -> Array | None:
        """Return an array of this or another step of the branch, None when it is not stored."""
        reader, generation = self.source.reader, self.place.generation
        step = self.step_row.step if step is None else step
        branch = branch_of_step(reader, generation, step, self.place.branch)
        return reader.array(generation, step, stream, layer, branch)


def load_step_view(source: Source, place: TracePlace) -> StepView:
    """Return the step of a place. Raises `Missing` when it is not recorded."""
    reader = source.reader
    branch = branch_of_step(reader, place.generation, place.step, place.branch)
    step_row = reader.step(place.generation, place.step, branch)
    if step_row is None:
        raise Missing(f"Step {place.step} of generation {place.generation} is not recorded.")
    calls = tuple(reader.calls(place.generation, place.step, branch))
    return StepView(source, place, branch, step_row, calls)


def load_queries(view: StepView, layer: int) -> Array:
    """Return the queries of a layer in this step, (heads, rows, head dim).

    Raises `RowNotRecordedError`, as all functions below that read stored arrays.
    """
    key = ("attention.q", view.place.generation, view.branch, view.step_row.step, layer)
    queries = view.source.get_or_create(key, lambda: view.load_array("q", layer))
    if queries is None:
        infos = view.source.reader.arrays(view.place.generation, view.step_row.step, view.branch)
        stored = sorted({i.layer for i in infos if i.stream == "q" and i.layer is not None})
        names = ", ".join(map(str, stored[:12])) + (" ..." if len(stored) > 12 else "")
        missing = (
            f"The queries and keys of layer {layer} are not stored; those of layers {names} are."
        )
        raise RowNotRecordedError(missing if stored else EXTREME_ONLY)
    if queries.ndim != 3:
        raise RowNotRecordedError(
            f"The stored queries of layer {layer} have the unexpected shape {queries.shape}."
        )
    return queries


def load_keys(view: StepView, call: CallRecord) -> list[Array]:
    """Return the keys of the call's layer up to this step: pieces (kv heads, rows, head dim)."""
    size = view.step_row.kv_after * call.kv_heads * call.head_dim * 4
    if size > MAX_READ_BYTES:
        limit = f"more than the limit of {MAX_READ_BYTES >> 20} MiB"
        raise RowNotRecordedError(f"The keys of this row take {size >> 20} MiB, {limit}.")
    stop = view.step_row.step + 1
    spans = [(0, 1)]
    spans += [(n, min(n + KEY_CHUNK_STEPS, stop)) for n in range(1, stop, KEY_CHUNK_STEPS)]
    pieces = [_load_key_chunk(view, call.layer, *span) for span in spans]
    n_keys = sum(piece.shape[1] for piece in pieces)
    if n_keys != view.step_row.kv_after:
        raise RowNotRecordedError(
            f"The trace has {n_keys} stored keys, but this row had {view.step_row.kv_after}."
        )
    return pieces


def _load_key_chunk(view: StepView, layer: int, start: int, stop: int) -> Array:
    read = partial(_join_keys, view, layer, start, stop)
    if start > 0 and stop - start < KEY_CHUNK_STEPS:
        return read()
    # A branch has keys of its own, so the requested branch is part of the cache key.
    key = ("attention.k", view.place.generation, view.place.branch, layer, start)
    return view.source.get_or_create(key, read)


def _join_keys(view: StepView, layer: int, start: int, stop: int) -> Array:
    parts = []
    for step in range(start, stop):
        part = view.load_array("k", layer, step)
        if part is None or part.ndim != 3:
            raise RowNotRecordedError(f"The keys of layer {layer} in step {step} are not stored.")
        parts.append(part)
    try:
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
    except ValueError:
        raise RowNotRecordedError(
            f"The keys of layer {layer} change their shape between steps."
        ) from None


def load_mask_row(view: StepView, call: CallRecord, row: int) -> Bools:
    """Return a row (counted from 0 in this step) of the executed mask, bool (mask heads, keys)."""
    small = call.q_len * call.kv_len <= MAX_CACHED_MASK_CELLS

    def read() -> Bools | None:
        if call.mask is None:
            return None
        if not small:
            return _read_mask_row(view.source.reader, call.mask, row)
        mask = view.source.reader.mask(call.mask)
        return None if mask is None else mask.cells

    key = ("attention.mask", call.mask, None if small else row)
    cells = view.source.get_or_create(key, read)
    # A mask with one row is broadcast to all rows.
    index = row if small and cells is not None and cells.shape[1] != 1 else 0
    if cells is None or not 0 <= index < cells.shape[1]:
        raise RowNotRecordedError(f"The executed mask of layer {call.layer} was not recorded.")
    mask_row: Bools = cells[:, index]
    return mask_row


def _read_mask_row(reader: TraceReader, fingerprint: str, row: int) -> Bools | None:
    """Return a row of a mask of any size, bool (heads, 1, keys), None where it has none."""
    cells = find_mask_cells(reader, fingerprint)
    at = 0 if cells is not None and cells.n_rows == 1 else row
    if cells is None or not 0 <= at < cells.n_rows:
        return None
    heads = [
        packed
        for head in range(cells.heads)
        for _, packed in read_packed_rows(reader, cells, head, at, at + 1)
    ]
    packed = np.stack(heads) if heads else np.zeros((0, 1, 0), np.uint8)
    return np.unpackbits(packed, axis=2, count=cells.n_keys).astype(np.bool_)


def _is_row_averaged(view: StepView, call: CallRecord, head: int, row: int) -> bool:
    """Whether the mask leaves nothing of a row's scores (see `MaskRecord.averaged`)."""

    def read() -> Bools | None:
        found = dict(read_mask_arrays(view.source.reader, [str(call.mask)], "mask.uniform_rows"))
        return found.get(str(call.mask))

    averaged = view.source.get_or_create(("attention.uniform_rows", call.mask), read)
    if averaged is None:
        return False
    flags = averaged[head if averaged.shape[0] == call.q_heads else 0]
    return bool(flags[row if len(flags) > 1 else 0])


class TokenRow(Struct, frozen=True, dict=True):
    """The weights of a row over its keys, float64 (keys,), 0 where `open_keys` is False.

    `total` is their sum. Key 0 is at position `first_pos`. `lse_check` is the row's own; only the
    newest row can be checked.
    """

    weights: Floats
    total: float
    open_keys: Bools
    first_pos: int
    lse_check: LseCheck

    @cached_property
    def heaviest(self) -> npt.NDArray[np.intp]:
        """The keys with the largest weights, at most `N_HEAVIEST`, in descending order."""
        n = min(int(self.open_keys.sum()), N_HEAVIEST)
        ranked = np.where(self.open_keys, self.weights, -1.0)
        top = np.argpartition(-ranked, n - 1)[:n] if 0 < n < len(ranked) else np.arange(len(ranked))
        # Of equal weights the earlier key comes first.
        return top[np.lexsort((top, -ranked[top]))][:n]


def recompute_row(view: StepView, index: int, head: int, q_idx: int) -> TokenRow:
    """Recompute row `q_idx` of a head in call `index` of a step. Raises `RowNotRecordedError`.

    The newest row is normalised with the stored log-sum-exp. If the kernel returned none, that was
    computed during capture under the same mask and checked against the layer's output; then both
    checks must pass.
    """
    call, step_row = view.calls[index], view.step_row
    query = load_queries(view, call.layer)
    row_in_step = q_idx - step_row.kv_before
    if not (0 <= head < query.shape[0] and 0 <= row_in_step < query.shape[1]):
        raise RowNotRecordedError(f"The query of row {q_idx}, head {head} is not stored.")
    scores = _key_scores(view, call, query[head, row_in_step], head, query.shape[0])
    # Not the mask record's own offset: a mask is stored once, with the step that had it first.
    first_pos = max(step_row.kv_after - call.kv_len, 0)
    mask_row, n_keys = load_mask_row(view, call, row_in_step), len(scores) - first_pos
    # For a mask with another number of heads the first one is read, as capture does.
    open_keys = mask_row[head if mask_row.shape[0] == query.shape[0] else 0]
    if len(open_keys) < n_keys or open_keys[n_keys:].any():
        raise RowNotRecordedError(
            f"The mask has {len(open_keys)} keys in this row, but the cache has {n_keys}."
        )
    open_keys = open_keys[:n_keys]  # a static cache has room for more
    if _is_row_averaged(view, call, head, row_in_step):
        scores = np.zeros_like(scores)
    lse = _stored_lse(view, index, head) if q_idx == step_row.kv_after - 1 else None
    row = attention_row.row_weights(scores[first_pos:], open_keys, lse)
    check = LseCheck() if row.lse_error is None else LseCheck(row.lse_error, "lse")
    if row.lse_error is not None and call.check_kind == "output":
        errors = (row.lse_error, call.lse_error)
        check = attention_row.worst_check(
            [LseCheck(error, "output", call.dtype) for error in errors]
        )
    return TokenRow(row.weights, row.total, open_keys, first_pos, check)


def _key_scores(view: StepView, call: CallRecord, query: Array, head: int, q_heads: int) -> Floats:
    pieces = load_keys(view, call)
    group = kv_head_of(head, q_heads, pieces[0].shape[0])
    if any(piece.shape[2] != query.shape[0] or group >= piece.shape[0] for piece in pieces):
        raise RowNotRecordedError(
            f"The shapes of the stored queries and keys of layer {call.layer} do not match."
        )
    scores = (row_scores(query, piece[group], call.scale, call.softcap) for piece in pieces)
    return np.concatenate([*scores])


def _stored_lse(view: StepView, index: int, head: int) -> float | None:
    lse = view.load_array("attention.lse")
    if lse is None or lse.ndim != 2 or index >= lse.shape[0] or head >= lse.shape[1]:
        return None
    return float(lse[index, head])


def first_token_weights(view: StepView) -> Floats | None:
    """Recompute the newest row's weight on the first token, float64 (layers, heads).

    It needs no other key, because the stored log-sum-exp normalises it. NaN for layers that are
    not stored; None for a prefill, without the log-sum-exp or any stored layer, or if there is too
    much to read.
    """
    if view.step_row.q_len > 1:
        return None
    lse = view.load_array("attention.lse")
    if lse is None or lse.ndim != 2 or len(lse) != len(view.calls):
        return None
    widths = sum(call.kv_heads * call.head_dim for call in view.calls)
    if widths * view.step_row.kv_after * 4 > 4 * MAX_READ_BYTES:
        return None
    out = np.full(lse.shape, np.nan)
    for index, call in enumerate(view.calls):
        try:
            out[index] = _first_token_weights_of(view, call, lse[index])
        except RowNotRecordedError:
            continue
    return None if np.isnan(out).all() else out


def _first_token_weights_of(view: StepView, call: CallRecord, lse: Array) -> Floats:
    query = load_queries(view, call.layer)
    if view.step_row.kv_after > call.kv_len:
        return np.zeros(len(lse))  # a sliding cache has dropped the first key
    key = ("attention.first", view.place.generation, view.place.branch, call.layer)
    read = partial(_join_keys, view, call.layer, 0, 1)
    first = view.source.get_or_create(key, lambda: read()[:, 0].copy())
    cells = load_mask_row(view, call, 0)[:, 0]
    cells = cells if len(cells) == len(lse) else cells[:1]
    if query.shape[0] != len(lse) or query.shape[2] != first.shape[1]:
        raise RowNotRecordedError("")
    groups = [kv_head_of(head, len(lse), len(first)) for head in range(len(lse))]
    keys = (first[group][None] for group in groups)
    pairs = zip(query[:, 0], keys, strict=True)
    scores = np.array([row_scores(q, k, call.scale, call.softcap)[0] for q, k in pairs])
    with np.errstate(all="ignore"):
        weights: Floats = np.where(cells, np.exp(scores - lse.astype(np.float64)), 0.0)
    return weights
