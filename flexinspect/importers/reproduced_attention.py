"""Attention that a dump does not hold as such, rebuilt and kept only if it gives what ran.

transformers' debugger has queries and keys before rotation, the cos and sin, the mask that a layer
received, and the input of its output projection. Rotated queries and keys with that mask are kept
if the attention computed from them is that input, within the rounding of the dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from flexinspect.importers.importer import MAX_MASK_CELLS, AttentionTensors
from flexinspect.importers.tensor_files import Tensor
from flexinspect.importers.tensor_records import output_error
from flexinspect.masks.attention_row import LseCheck, kv_head_of
from flexinspect.records.step import INFERRED_MASK, Array

MAX_CHECKED_ROWS = 512
"""Rows of a head that are compared; of a longer prompt, that many at equal distances."""

_CLOSED = -1e4
"""A float mask closes a cell with this or less: half precision has no lower round number."""


def reproduce_attention(
    layer: int, tensors: Mapping[str, Tensor], angles: tuple[Array, Array], mask: Array | None
) -> tuple[AttentionTensors, float] | None:
    """Return the attention of a layer with its error, None if it is not what ran.

    `tensors` are q, k, v and out as (sequences, rows, heads * width), or with split heads, `angles`
    the cos and sin (rows, width), `mask` (sequences, heads or 1, rows, keys), bool or float. If the
    layer received none, a causal mask is tried.
    """
    cos, sin = angles
    try:
        arrays = {name: _heads(each.array, cos.shape[-1]) for name, each in tensors.items()}
        arrays["q"], arrays["k"] = (_rotate(arrays[name], cos, sin) for name in "qk")
    except ValueError:  # the shapes do not fit: the rotation covers a part of the width only
        return None
    q, k, dtype = arrays["q"], arrays["k"], tensors["q"].dtype
    if arrays["out"].shape != q.shape or arrays["v"].shape != k.shape or len(q) % len(k):
        return None
    if q.shape[1] * k.shape[1] > MAX_MASK_CELLS:
        return None
    kind, cells = INFERRED_MASK, None
    if mask is not None:
        kind = "bool" if mask.dtype == np.bool_ else "float"
        cells = _cells(mask)
    elif q.shape[1] == k.shape[1]:
        cells = np.tri(q.shape[1], dtype=np.bool_)[None]
    if cells is None or cells.shape[1:] != (q.shape[1], k.shape[1]):
        return None
    error = _output_error(arrays, cells)
    if LseCheck(error, "output", dtype).is_failed:
        return None
    found = AttentionTensors(
        layer=layer,
        q=q,
        k=k,
        v=arrays["v"],
        out=arrays["out"],
        mask=cells,
        mask_kind=kind,
        dtype=dtype,
    )
    return found, error


def _heads(array: Array, width: int) -> Array:
    """Return sequence 0, heads first. Raises `ValueError` for another width."""
    own = array[0]
    split: Array = own.reshape(len(own), -1, width) if own.ndim == 2 else own
    if split.ndim != 3 or split.shape[2] != width or not split.size or split.dtype.kind != "f":
        raise ValueError
    return np.ascontiguousarray(split.transpose(1, 0, 2))


def _rotate(array: Array, cos: Array, sin: Array) -> Array:
    """Return x cos + rotate_half(x) sin (Su et al. 2021, RoFormer), paired as in transformers."""
    half = array.shape[2] // 2
    turned = np.concatenate([-array[..., half:], array[..., :half]], axis=-1)
    rotated: Array = (array * cos + turned * sin).astype(np.float32)
    return rotated


def _cells(mask: Array) -> npt.NDArray[np.bool_] | None:
    """Return the open cells of sequence 0, None for a mask that also adds a bias."""
    if mask.ndim != 4:
        return None
    own = mask[0]
    is_open: npt.NDArray[np.bool_] = own if own.dtype == np.bool_ else own == 0
    return is_open if (is_open | (own <= _CLOSED)).all() or own.dtype == np.bool_ else None


def _output_error(arrays: Mapping[str, Any], cells: Array) -> float:
    """Return the largest error of softmax(q k' / sqrt(width) + mask) v over heads and rows."""
    q, k, v, out = (arrays[name] for name in ("q", "k", "v", "out"))
    n_rows = q.shape[1]
    rows = np.unique(np.linspace(0, n_rows - 1, min(n_rows, MAX_CHECKED_ROWS)).astype(int))
    errors = []
    for head in range(len(q)):
        kv_head = kv_head_of(head, len(q), len(k))
        scores = q[head, rows].astype(np.float64) @ k[kv_head].T * q.shape[2] ** -0.5
        scores = np.where(cells[head if len(cells) > 1 else 0, rows], scores, -np.inf)
        with np.errstate(all="ignore"):
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights = np.nan_to_num(weights / weights.sum(axis=1, keepdims=True))
        errors.append(output_error(weights @ v[kv_head], out[head, rows]))
    return float(np.max(errors))
