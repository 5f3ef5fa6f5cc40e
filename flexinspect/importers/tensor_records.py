"""Records of tensors: candidates of logits, statistics of outputs, attention of the newest row.

The formulas are those of the capture (`flexinspect_hooks.observers`), in numpy.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from flexinspect.importers.importer import MAX_MASK_CELLS, AttentionTensors
from flexinspect.masks import attention_row
from flexinspect.masks.attention_row import kv_head_of, row_scores, row_weights
from flexinspect.records.prompt import Segment
from flexinspect.records.step import (
    UNKNOWN,
    UNKNOWN_PATH,
    Array,
    ArrayRecord,
    CallRecord,
    Candidate,
    LayerStatRecord,
    LogitsRecord,
    MaskRecord,
)

TOP_K = 20
HISTOGRAM_BINS = 64
MAX_HELD_BYTES = 2 << 30
"""Keys and values of earlier passes that are kept for the attention of later rows, in bytes."""


def logits_record(
    logits: Array, chosen_id: int | None, text_of: Callable[[int], str]
) -> LogitsRecord:
    """Return the distribution of logits (vocabulary,), with natural logarithms.

    Whether processors changed the logits before the choice is unknown: the scores are NaN.
    """
    row = logits.astype(np.float64)
    with np.errstate(all="ignore"):
        ids = np.argsort(-np.where(np.isnan(row), -np.inf, row), kind="stable")[:TOP_K]
        high = row[ids[0]]
        shares = np.where(np.isnan(row), 0.0, np.exp(row - high))
        total = float(shares.sum())
        lse = float(high) + math.log(total) if total > 0 else math.nan
        products = np.where(shares > 0, shares * (row - high), 0.0)
        entropy = math.log(total) - float(products.sum()) / total if total > 0 else math.nan
    low, top = float(np.nanmin(row)) if not np.isnan(row).all() else math.nan, float(high)
    histogram: tuple[int, ...] = ()
    if np.isfinite(row).all():
        counts, _ = np.histogram(row, HISTOGRAM_BINS, (low, max(top, low + 1e-30)))
        histogram = tuple(counts.tolist())
    is_known = chosen_id is not None and 0 <= chosen_id < len(row)
    chosen = float(row[chosen_id]) if is_known else math.nan
    return LogitsRecord(
        entropy=entropy,
        margin=float(row[ids[0]] - row[ids[1]]) if len(ids) > 1 else 0.0,
        chosen_id=int(chosen_id) if is_known and chosen_id is not None else UNKNOWN,
        chosen_rank=int(np.count_nonzero(row > chosen)) if is_known else UNKNOWN,
        chosen_logprob=chosen - lse,
        n_nan=int(np.isnan(row).sum()),
        n_inf=int(np.isinf(row).sum()),
        histogram_min=low,
        histogram_max=top,
        histogram=histogram,
        candidates=tuple(
            Candidate(rank, id_, text_of(id_), logit, logit - lse, math.nan, math.nan)
            for rank, (id_, logit) in enumerate(zip(ids.tolist(), row[ids].tolist(), strict=True))
        ),
    )


def layer_stat(layer: int, module: str, output: Array) -> LayerStatRecord:
    """Return the statistics of an output (..., rows, width); NaN for one without elements."""
    n_nan, n_inf = int(np.isnan(output).sum()), int(np.isinf(output).sum())
    low = high = mean = std = norm = math.nan
    if output.size:
        with np.errstate(all="ignore"):
            low, high, mean = float(output.min()), float(output.max()), output.mean(dtype=float)
            std = output.std(dtype=np.float64)
            norm = math.sqrt(float(np.square(output, dtype=np.float64).sum()))
    bad_row = None
    if (n_nan or n_inf) and output.ndim > 1:
        rows = ~np.isfinite(output).all(axis=-1)
        bad_row = int(np.flatnonzero(rows.reshape(-1, rows.shape[-1]).any(axis=0))[0])
    return LayerStatRecord(
        layer, module, n_nan, n_inf, low, high, float(mean), float(std), norm, bad_row
    )


def mask_record(mask: Array, kind: str, kv_before: int) -> MaskRecord:
    """Return the record of a mask (heads, rows, keys), named after its cells."""
    cells = np.ascontiguousarray(mask, np.bool_)
    identity = hashlib.sha256(f"{kind} {cells.shape} {kv_before}".encode())
    identity.update(np.packbits(cells).tobytes())
    heads, rows, keys = cells.shape
    name = identity.hexdigest()[:16]
    return MaskRecord(name, kind, 1, heads, rows, keys, kv_before, cells=cells)


class StepAttention(Struct, frozen=True):
    """The attention of one step as records; see `AttentionTracker.add`."""

    calls: tuple[CallRecord, ...] = ()
    masks: tuple[MaskRecord, ...] = ()
    arrays: tuple[ArrayRecord, ...] = ()


class _Row(Struct, frozen=True):
    """The newest row of a layer: attention (heads, segments), LSE and entropy (heads,)."""

    mass: npt.NDArray[np.float64]
    lse: npt.NDArray[np.float64]
    entropy: npt.NDArray[np.float64]
    error: float | None
    check_kind: str | None


class AttentionTracker:
    """Turns the attention tensors of one generation into records, pass by pass.

    The attention of the newest row needs the keys of earlier passes, so these are kept, up to
    `MAX_HELD_BYTES`; `is_full` says that there were more.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[str, int], list[Array]] = {}
        self._n_bytes = 0
        self.is_full = False

    def add(
        self, layers: Sequence[AttentionTensors], segments: Sequence[Segment], kv_before: int
    ) -> StepAttention:
        """Return the records of the layers that have queries and keys; other layers have none.

        `attention.*` is NaN in layers without a mask.
        """
        usable = [each for each in layers if each.q is not None and each.k is not None]
        masks: dict[str, MaskRecord] = {}
        calls, rows, arrays = [], [], []
        for each in usable:
            assert each.q is not None
            assert each.k is not None
            mask = None
            if each.mask is not None and each.mask[0].size <= MAX_MASK_CELLS:
                mask = mask_record(each.mask, each.mask_kind, kv_before)
                masks[mask.fingerprint] = mask
            keys, values = self._extend("k", each.layer, each.k), None
            if each.v is not None:
                values = self._extend("v", each.layer, each.v)
            if values is not None and keys is not None and values.shape[1] != keys.shape[1]:
                values = None  # an earlier forward holds no values: the output cannot be recomputed
            row = _newest_row(each, mask, keys, values, segments) if keys is not None else None
            rows.append(row)
            calls.append(_call(each, mask, kv_before, row))
            named = (("q", each.q), ("k", each.k), ("v", each.v))
            arrays += [
                ArrayRecord(stream, _storable(array), each.layer)
                for stream, array in named
                if array is not None
            ]
        return StepAttention(
            tuple(calls), tuple(masks.values()), (*_row_arrays(rows, calls, segments), *arrays)
        )

    def _extend(self, stream: str, layer: int, new: Array) -> Array | None:
        """Return all keys or values so far, (heads, keys, width); None when they are too many."""
        if self.is_full:
            return None
        self._n_bytes += new.nbytes
        if self._n_bytes > MAX_HELD_BYTES:
            self.is_full = True
            self._held.clear()
            return None
        parts = self._held.setdefault((stream, layer), [])
        parts.append(new)
        if any(part.shape[::2] != new.shape[::2] for part in parts):
            return None
        return new if len(parts) == 1 else np.concatenate(parts, axis=1)


def _storable(array: Array) -> Array:
    return array.astype(np.float32) if array.dtype.kind not in "fiub" else array


def _call(
    each: AttentionTensors, mask: MaskRecord | None, kv_before: int, row: _Row | None
) -> CallRecord:
    assert each.q is not None
    assert each.k is not None
    heads, n_rows, width = each.q.shape
    n_keys = kv_before + n_rows if mask is None else mask.kv_len
    return CallRecord(
        *(each.layer, UNKNOWN_PATH, "", mask.fingerprint if mask else None, 1, heads),
        *(each.k.shape[0], n_rows, n_keys, width, each.dtype, each.scale),
        lse_error=row.error if row else None,
        check_kind=row.check_kind if row else None,
        softcap=each.softcap,
    )


def _newest_row(
    each: AttentionTensors,
    mask: MaskRecord | None,
    keys: Array,
    values: Array | None,
    segments: Sequence[Segment],
) -> _Row | None:
    """Recompute the newest row and check it with the kernel's LSE, or else with its output."""
    if mask is None or mask.cells is None or each.q is None or mask.cells.shape[2] != keys.shape[1]:
        return None
    n_heads = each.q.shape[0]
    mass, lse, spread = np.zeros((n_heads, len(segments))), np.zeros(n_heads), np.zeros(n_heads)
    errors, outputs = [], []
    for head in range(n_heads):
        kv_head = kv_head_of(head, n_heads, keys.shape[0])
        scores = row_scores(each.q[head, -1], keys[kv_head], each.scale, each.softcap)
        visible = mask.cells[head if len(mask.cells) == n_heads else 0, -1]
        given = None if each.lse is None else float(each.lse[head, -1])
        row = row_weights(scores, visible, given)
        mass[head] = attention_row.attention_by_segment(row.weights, segments)
        lse[head], spread[head] = row.lse, attention_row.entropy(row.weights)
        if row.lse_error is not None:
            errors.append(row.lse_error)
        if values is not None:
            outputs.append(row.weights @ values[kv_head].astype(np.float64))
    if each.lse is not None:
        return _Row(mass, each.lse[:, -1].astype(np.float64), spread, max(errors), "lse")
    if values is None or each.out is None:
        return _Row(mass, lse, spread, None, None)
    error = output_error(np.stack(outputs), each.out[:, -1])
    return _Row(mass, lse, spread, error, "output")


def output_error(recomputed: Array, output: Array) -> float:
    """Return the largest error of an output relative to its largest value, as capture does."""
    largest = max(float(np.abs(output).max()), 1e-6)
    return float(np.abs(recomputed - output.astype(np.float64)).max()) / largest


def _row_arrays(
    rows: Sequence[_Row | None], calls: Sequence[CallRecord], segments: Sequence[Segment]
) -> list[ArrayRecord]:
    known = [row for row in rows if row is not None]
    if not known:
        return []
    n_heads = max(call.q_heads for call in calls)
    mass = np.full((len(calls), n_heads, len(segments)), np.nan, np.float32)
    entropy, lse = (np.full((len(calls), n_heads), np.nan, np.float32) for _ in range(2))
    for index, row in enumerate(rows):
        if row is not None:
            mass[index, : len(row.mass)] = row.mass
            entropy[index, : len(row.mass)], lse[index, : len(row.mass)] = row.entropy, row.lse
    arrays = [ArrayRecord("attention.mass", mass), ArrayRecord("attention.entropy", entropy)]
    # The stored LSE counts as that of the kernel: it must be its own, or checked by its output.
    if all(row is not None and row.check_kind is not None for row in rows):
        arrays.append(ArrayRecord("attention.lse", lse))
    return arrays
