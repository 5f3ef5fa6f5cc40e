"""Recomputes attention rows from the queries, keys and masks of a trace.

The keys of a layer are stored per step. Those of the prefill and of every 64 steps after it are
cached together, so that going to the next step reads little more than the new keys. Only the heads
that are asked for are cached, because those of all may be larger than the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from math import prod

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from flexinspect.masks import attention_row
from flexinspect.masks.attention_row import Bools, Floats, LseCheck, kv_head_of, row_scores
from flexinspect.panels.base import Missing, TracePlace
from flexinspect.panels.panel_source import Source
from flexinspect.records.step import Array, CallRecord
from flexinspect.trace.array_parts import StoredArray, find_array, read_equal_arrays
from flexinspect.trace.mask_cells import find_mask_cells, read_mask_arrays, read_packed_rows
from flexinspect.trace.queries import branch_of_step
from flexinspect.trace.query_results import StepRow
from flexinspect.trace.reader import TraceReader

KEY_CHUNK_STEPS = 64
"""Number of decode steps whose keys are cached together."""

MAX_READ_BYTES = 256 << 20
"""Maximum bytes of the keys of a head that are read for one row, as float32."""

MAX_CACHED_MASK_CELLS = 1 << 22
"""Cells of a head up to which a mask is cached as a whole; of a larger one, the row that is shown.
"""

N_HEAVIEST = 64
NOT_FINITE = "The scores of this row are not finite, so it has no weights."
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

    def _find_array(self, stream: str, layer: int, step: int) -> StoredArray | None:
        reader, generation = self.source.reader, self.place.generation
        branch = branch_of_step(reader, generation, step, self.place.branch)
        return find_array(reader, generation, step, stream, layer, branch)

    def _find_queries(self, layer: int) -> StoredArray:
        """Return where the queries of a layer in this step are stored: (heads, rows, head dim).

        Raises `RowNotRecordedError`, as all functions below that read stored arrays.
        """
        queries = self._find_array("q", layer, self.step_row.step)
        if queries is None:
            stored = self.stored_layers()
            names = ", ".join(map(str, stored[:12])) + (" ..." if len(stored) > 12 else "")
            missing = f"The queries and keys of layer {layer} are not stored"
            reason = f"{missing}; those of layers {names} are." if stored else EXTREME_ONLY
            raise RowNotRecordedError(reason)
        if len(queries.shape) != 3:
            raise RowNotRecordedError(
                f"The stored queries of layer {layer} have the unexpected shape {queries.shape}."
            )
        return queries

    def stored_layers(self) -> list[int]:
        """Return the layers whose queries are stored in this step."""
        here = (self.place.generation, self.step_row.step, self.branch)
        infos = self.source.reader.arrays(*here)
        return sorted({i.layer for i in infos if i.stream == "q" and i.layer is not None})

    def load_keys(self, call: CallRecord, kv_heads: Sequence[int]) -> Iterator[Array]:
        """Yield the keys of some heads up to this step: pieces of (heads, rows, head dim)."""
        size = self.step_row.kv_after * call.head_dim * 4
        if size > MAX_READ_BYTES:
            limit = f"more than the limit of {MAX_READ_BYTES >> 20} MiB"
            raise RowNotRecordedError(f"The keys of this row take {size >> 20} MiB, {limit}.")
        n_keys, stop = 0, self.step_row.step + 1
        spans = [range(n, min(n + KEY_CHUNK_STEPS, stop)) for n in range(1, stop, KEY_CHUNK_STEPS)]
        for span in (range(1), *spans):
            load = self._load_key_chunk if span.start else self._load_first_keys
            keys = load(call.layer, span, tuple(kv_heads))
            n_keys += keys.shape[1]
            yield keys
        if n_keys != self.step_row.kv_after:
            raise RowNotRecordedError(
                f"The trace has {n_keys} stored keys, but this row had {self.step_row.kv_after}."
            )

    def _find_first_keys(self, layer: int) -> StoredArray:
        """Return where the keys of the prefill are stored: (kv heads, rows, head dim)."""
        keys = self._find_array("k", layer, 0)
        if keys is None or len(keys.shape) != 3 or 0 in keys.shape:
            raise RowNotRecordedError(f"The keys of layer {layer} in step 0 are not stored.")
        return keys

    def _load_first_keys(self, layer: int, steps: range, kv_heads: tuple[int, ...]) -> Array:
        """Return the keys of some heads in the prefill, where those of all may be gigabytes."""
        keys = self._find_first_keys(layer)
        n_heads, rows, width = keys.shape
        if max(kv_heads) >= n_heads:
            raise _shape_error(layer)

        def read(head: int) -> Array:
            start, stop = head * rows * width, (head + 1) * rows * width
            return keys.read(self.source.reader, start, stop).reshape(rows, width)

        return self._cache_keys(layer, steps, kv_heads, lambda: np.stack([*map(read, kv_heads)]))

    def _load_key_chunk(self, layer: int, steps: range, kv_heads: tuple[int, ...]) -> Array:
        def read() -> Array:
            keys = self._read_key_chunk(layer, steps)
            if max(kv_heads) >= len(keys):
                raise _shape_error(layer)
            return keys[[*kv_heads]]

        if len(steps) < KEY_CHUNK_STEPS:
            return read()
        return self._cache_keys(layer, steps, kv_heads, read)

    def _cache_keys(
        self, layer: int, steps: range, kv_heads: tuple[int, ...], read: Callable[[], Array]
    ) -> Array:
        # A branch has keys of its own, so the requested branch is part of the cache key.
        place = (self.place.generation, self.place.branch)
        return self.source.get_or_create(("attention.k", *place, layer, steps, kv_heads), read)

    def _read_key_chunk(self, layer: int, steps: range) -> Array:
        reader, generation = self.source.reader, self.place.generation
        branches = {
            branch_of_step(reader, generation, step, self.place.branch)
            for step in (steps[0], steps[-1])
        }
        here = (generation, branches.pop())
        keys = None if branches else read_equal_arrays(reader, here, steps, "k", layer)
        if keys is None or keys.ndim != 4:
            return _join_keys(self, layer, steps.start, steps.stop)
        n_steps, heads, rows, width = keys.shape
        return keys.transpose(1, 0, 2, 3).reshape(heads, n_steps * rows, width)

    def load_mask_row(self, call: CallRecord, row: int) -> Bools:
        """Return row `row` of the step's executed mask, bool (mask heads, keys)."""
        small = call.q_len * call.kv_len <= MAX_CACHED_MASK_CELLS

        def read() -> Bools | None:
            if call.mask is None:
                return None
            if not small:
                return _read_mask_row(self.source.reader, call.mask, row)
            mask = self.source.reader.mask(call.mask)
            return None if mask is None else mask.cells

        key = ("attention.mask", call.mask, None if small else row)
        cells = self.source.get_or_create(key, read)
        # A mask with one row is broadcast to all rows.
        index = row if small and cells is not None and cells.shape[1] != 1 else 0
        if cells is None or not 0 <= index < cells.shape[1]:
            raise RowNotRecordedError(f"The executed mask of layer {call.layer} was not recorded.")
        mask_row: Bools = cells[:, index]
        return mask_row

    def _is_row_averaged(self, call: CallRecord, head: int, row: int) -> bool:
        """Whether the mask leaves nothing of a row's scores (see `MaskRecord.uniform_rows`)."""

        def read() -> Bools | None:
            name = str(call.mask)
            return dict(read_mask_arrays(self.source.reader, [name], "mask.uniform_rows")).get(name)

        averaged = self.source.get_or_create(("attention.uniform_rows", call.mask), read)
        if averaged is None:
            return False
        flags = averaged[head if averaged.shape[0] == call.q_heads else 0]
        return bool(flags[row if len(flags) > 1 else 0])

    def recompute_row(self, index: int, head: int, q_idx: int) -> TokenRow:
        """Recompute row `q_idx` of a head in call `index` of a step; see `recompute_rows`."""
        return self.recompute_rows(index, (head,), q_idx)[0]

    def recompute_rows(self, index: int, heads: Sequence[int], q_idx: int) -> list[TokenRow]:
        """Recompute row `q_idx` of some heads in call `index`. Raises `RowNotRecordedError`.

        The newest row is normalised with the stored log-sum-exp. If the kernel returned none, that
        was computed during capture under the same mask and checked against the layer's output; then
        both checks must pass.
        """
        call, step_row = self.calls[index], self.step_row
        queries, row_in_step = self._find_queries(call.layer), q_idx - step_row.kv_before
        n_heads, rows, width = queries.shape
        if not (0 <= row_in_step < rows and all(0 <= head < n_heads for head in heads)):
            names = ", ".join(map(str, heads))
            raise RowNotRecordedError(f"The query of row {q_idx}, head {names} is not stored.")
        # Not the mask record's own offset: a mask is stored once, with the step that had it first.
        first_pos = max(step_row.kv_after - call.kv_len, 0)
        mask_row, n_keys = self.load_mask_row(call, row_in_step), step_row.kv_after - first_pos
        if mask_row.shape[1] < n_keys or mask_row[:, n_keys:].any():
            raise RowNotRecordedError(
                f"The mask has {mask_row.shape[1]} keys in this row, but the cache has {n_keys}."
            )
        mask_row = mask_row[:, :n_keys]  # a static cache has room for more
        starts = [(head * rows + row_in_step) * width for head in heads]
        own = [queries.read(self.source.reader, start, start + width) for start in starts]
        stored_lse = self.load_array("attention.lse") if q_idx == step_row.kv_after - 1 else None
        found = []
        for head, scores in zip(heads, self._key_scores(call, heads, own, n_heads), strict=True):
            # For a mask with another number of heads the first one is read, as capture does.
            open_keys = mask_row[head if len(mask_row) == n_heads else 0]
            if self._is_row_averaged(call, head, row_in_step):
                scores = np.zeros_like(scores)
            lse = _lse_of_head(stored_lse, index, head)
            row = attention_row.row_weights(scores[first_pos:], open_keys, lse)
            check = _check_row(call, row.lse_error)
            found.append(TokenRow(row.weights, row.total, open_keys, first_pos, check))
        return found

    def _key_scores(
        self, call: CallRecord, heads: Sequence[int], queries: Sequence[Array], q_heads: int
    ) -> list[Floats]:
        """Return the scores of each head's query with all keys, reading these only once."""
        n_kv = self._find_first_keys(call.layer).shape[0]
        groups = [kv_head_of(head, q_heads, n_kv) for head in heads]
        kv_heads = sorted(set(groups))
        scores: list[list[Floats]] = [[] for _ in heads]
        for keys in self.load_keys(call, kv_heads):
            if keys.shape[2] != len(queries[0]):
                raise _shape_error(call.layer)
            for parts, group, query in zip(scores, groups, queries, strict=True):
                own = keys[kv_heads.index(group)]
                parts.append(row_scores(query, own, call.scale, call.softcap))
        return [np.concatenate(parts) for parts in scores]

    def first_token_weights(self) -> Floats | None:
        """Recompute the newest row's weight on the first token, float64 (layers, heads).

        It needs no other key, because the stored log-sum-exp normalises it. NaN for layers that are
        not stored; None for a prefill, or without the log-sum-exp or any stored layer.
        """
        if self.step_row.q_len > 1:
            return None
        lse = self.load_array("attention.lse")
        if lse is None or lse.ndim != 2 or len(lse) != len(self.calls):
            return None
        out = np.full(lse.shape, np.nan)
        for index, call in enumerate(self.calls):
            try:
                out[index] = self._first_token_weights_of(call, lse[index])
            except RowNotRecordedError:
                continue
        return None if np.isnan(out).all() else out

    def _first_token_weights_of(self, call: CallRecord, lse: Array) -> Floats:
        queries = self._find_queries(call.layer)
        query = queries.read(self.source.reader, 0, prod(queries.shape)).reshape(queries.shape)
        if self.step_row.kv_after > call.kv_len:
            return np.zeros(len(lse))  # a sliding cache has dropped the first key
        first = self._load_first_token_keys(call.layer)
        cells = self.load_mask_row(call, 0)[:, 0]
        cells = cells if len(cells) == len(lse) else cells[:1]
        if query.shape[0] != len(lse) or query.shape[2] != first.shape[1]:
            raise RowNotRecordedError("")
        groups = [kv_head_of(head, len(lse), len(first)) for head in range(len(lse))]
        pairs = zip(query[:, 0], (first[group][None] for group in groups), strict=True)
        scores = np.array([row_scores(q, k, call.scale, call.softcap)[0] for q, k in pairs])
        with np.errstate(all="ignore"):
            weights: Floats = np.where(cells, np.exp(scores - lse.astype(np.float64)), 0.0)
        return weights

    def _load_first_token_keys(self, layer: int) -> Array:
        """Return the key of the first token in each head, (kv heads, head dim)."""

        def read() -> Array:
            keys = self._find_first_keys(layer)
            heads, rows, width = keys.shape
            starts = range(0, heads * rows * width, rows * width)
            return np.stack([keys.read(self.source.reader, at, at + width) for at in starts])

        key = ("attention.first", self.place.generation, self.place.branch, layer)
        return self.source.get_or_create(key, read)


def load_step_view(source: Source, place: TracePlace) -> StepView:
    """Return the step of a place. Raises `Missing` when it is not recorded."""
    reader = source.reader
    branch = branch_of_step(reader, place.generation, place.step, place.branch)
    step_row = reader.step(place.generation, place.step, branch)
    if step_row is None:
        raise Missing(f"Step {place.step} of generation {place.generation} is not recorded.")
    calls = tuple(reader.calls(place.generation, place.step, branch))
    return StepView(source, place, branch, step_row, calls)


def _check_row(call: CallRecord, lse_error: float | None) -> LseCheck:
    """Return the check of a row by its own LSE error, and if it needs one by the output's."""
    if lse_error is None:
        return LseCheck()
    if call.check_kind != "output":
        return LseCheck(lse_error, "lse")
    checks = [LseCheck(error, "output", call.dtype) for error in (lse_error, call.lse_error)]
    return attention_row.worst_check(checks)


def _lse_of_head(lse: Array | None, index: int, head: int) -> float | None:
    """Return the log-sum-exp of a head in call `index`, None if it is not stored."""
    if lse is None or lse.ndim != 2 or index >= lse.shape[0] or head >= lse.shape[1]:
        return None
    return float(lse[index, head])


def _shape_error(layer: int) -> RowNotRecordedError:
    return RowNotRecordedError(
        f"The shapes of the stored queries and keys of layer {layer} do not match."
    )


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
        changed = f"The keys of layer {layer} change their shape between steps."
        raise RowNotRecordedError(changed) from None


def _read_mask_row(reader: TraceReader, fingerprint: str, row: int) -> Bools | None:
    """Return a row of a mask of any size, bool (heads, 1, keys), None where it has none."""
    cells = find_mask_cells(reader, fingerprint)
    at = 0 if cells is not None and cells.n_rows == 1 else row
    if cells is None or not 0 <= at < cells.n_rows:
        return None
    found = (read_packed_rows(reader, cells, head, at, at + 1) for head in range(cells.heads))
    heads = [packed for _, packed in chain.from_iterable(found)]
    packed = np.stack(heads) if heads else np.zeros((0, 1, 0), np.uint8)
    return np.unpackbits(packed, axis=2, count=cells.n_keys).astype(np.bool_)


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
