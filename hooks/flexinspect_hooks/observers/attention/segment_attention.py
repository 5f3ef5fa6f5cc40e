"""Computes the newest row's attention per segment, layer and head, with its LSE check.

The weights of the row are recomputed from the q and k that the kernel received, under the executed
mask, and normalised with the kernel's own row LSE. Their sum is 1 only if the recorded mask is the
mask that ran. If a kernel returns no LSE, the row's output is recomputed and compared instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from threading import Lock
from typing import Any, ClassVar, cast
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from flexinspect.records.prompt import Segment
from flexinspect_hooks.capture.buffer import StepBuffer
from flexinspect_hooks.observers.attention.call_references import AttentionCall, Calls
from flexinspect_hooks.python_internals.threads import available_cores
from flexinspect_hooks.python_internals.torch_private import tensor_version
from flexinspect_hooks.step_writer.attention_records import ATTENTION_PREFIX, LOST_PREFIX


class _SegmentTable:
    """Which segment each key is in, on one device."""

    def __init__(self, starts: Sequence[int], device: torch.device) -> None:
        self._borders = torch.tensor([*starts, 1 << 40], device=device)
        self._segments = segment_membership(0, self._borders)

    def membership(self, n_keys: int, first: int) -> Tensor:
        """Return float32 (keys, segments), 1 where a key is in a segment; key 0 is at `first`.

        It has `n_keys` rows or more.
        """
        if first:
            return segment_membership(n_keys, self._borders - first)
        if n_keys > len(self._segments):
            self._segments = segment_membership(max(2 * n_keys, 1024), self._borders)
        return self._segments


class SegmentAttentionReducer:
    """Reduces the newest rows of all layers of a step together."""

    def __init__(self) -> None:
        self.begin(())
        self.end_series()

    def begin(self, segments: Sequence[Segment]) -> None:
        """Take a generation's segments; the last one has no end, because tokens are added."""
        self._starts = [segment.start for segment in segments] or [0]
        self._tables: dict[torch.device, _SegmentTable] = {}  # layers may be on several
        # If torch uses every core, work in the writer thread slows the model down just as much.
        self.defers = torch.get_num_threads() < available_cores()
        """Whether rows may wait for the writer thread; not after rows were lost by waiting."""

    def end_series(self) -> None:
        """The calls of the next step are not those of the step before."""
        self._groups: list[tuple[list[int], str]] = []

    def _table(self, device: torch.device) -> _SegmentTable:
        found = self._tables.get(device)
        if found is None:
            found = self._tables[device] = _SegmentTable(self._starts, device)
        return found

    def reduce(self, refs: Calls, kv_after: int, buffer: StepBuffer) -> None:
        """Put mass (layers, heads, segments), lse and entropy (layers, heads), lse_error (layers).

        `lse_error` is the error of the LSE check. Sets `check_kind` of each call whose row can be
        recomputed.
        """
        groups = self._groups
        if not groups or any(refs[those[0]].captured.cells is None for those, _ in groups):
            self._groups = self._group(refs)
        for members, kind in self._groups:
            for index in members:
                refs[index].check_kind = kind
            suffix = "/" + ",".join(map(str, members)) if len(members) < len(refs) else ""
            self._reduce_group([refs[i] for i in members], suffix, kv_after, buffer)

    def _group(self, refs: Calls) -> list[tuple[list[int], str]]:
        """Return the calls whose rows are reduced together, and how they are checked."""
        groups: dict[tuple[Any, ...], list[int]] = {}
        for index, ref in enumerate(refs):
            if _can_recompute(ref):
                if ref.lse is None and ref.kernel is not None and ref.kernel.is_output_modified:
                    continue  # the program replaced what the kernel returned
                kind = "output" if ref.lse is None else "lse"
                shape, device = (*ref.key.shape[1:], ref.query.shape[1]), ref.key.device
                key = (kind, ref.captured.number, *shape, ref.scale, ref.softcap, device)
                groups.setdefault(key, []).append(index)
        return [(members, kind) for (kind, *_), members in groups.items()]

    def _reduce_group(self, refs: Calls, suffix: str, kv_after: int, buffer: StepBuffer) -> None:
        """Reduce the newest rows of layers that share a mask and a shape."""
        first, mask, n_keys = refs[0], refs[0].captured, refs[0].key.shape[2]
        closed, device = None, first.key.device
        if not mask.is_open:
            newest = cast(Tensor, mask.cells)[:, -1]
            if newest.device != device:  # the mask of layers on several devices
                newest = newest.to(device, non_blocking=True)
            closed = ~(newest if newest.shape[0] in (1, first.query.shape[1]) else newest[:1])
        # A static cache has more keys than the sequence, a sliding one fewer.
        inside = self._table(device).membership(n_keys, max(kv_after - n_keys, 0))
        inputs: dict[str, Any] = {"closed": closed, "inside": inside, "bias": mask.bias}
        deferred = _defer_tensors(refs) if self.defers else None
        if deferred is not None:
            reduce_later = partial(_reduce_deferred_rows, suffix, first.softcap, first.scale)
            inputs |= deferred.tensors
            buffer.defer(partial(reduce_later, deferred), **inputs)
            return
        inputs["inside"] = inside[:n_keys]
        reduce = partial(_reduce_rows, suffix, first.softcap)
        queries, keys = _queries(refs), [_plain(ref.key[0]) for ref in refs]
        values = None
        if first.lse is None:
            inputs["outputs"] = _outputs(refs)
            values = [_plain(ref.value[0]) for ref in refs]
        else:
            lse = torch.cat([ref.lse for ref in refs if ref.lse is not None])[..., -1].float()
            inputs["kernel_lse"] = lse[:: first.query.shape[0]]  # batch 0 of each layer
        scores = attention_scores(torch, queries, keys)
        if values is not None:  # at once, because the values may be modified meanwhile
            shown = _final_scores(torch, scores, first.softcap, mask.bias, closed)
            weights = torch.softmax(mask_scores(torch, shown, closed, -math.inf), -1)
            inputs["recomputed"] = layer_products(torch, grouped(weights, values), values)
        may_wait = scores.nbytes <= MAX_DEFERRED_SCORE_BYTES
        buffer.defer(reduce, wait=may_wait, scores=scores, **inputs)


def newest_weights(ref: AttentionCall) -> Tensor:
    """Return the weights of one call's newest row, float32 (q heads, keys), batch 0."""
    mask = ref.captured
    closed = ~cast(Tensor, mask.cells)[:, -1]
    scores = attention_scores(torch, _queries([ref]), [_plain(ref.key[0])])
    scores = _final_scores(torch, scores, ref.softcap, mask.bias, closed)
    _, weights = softmax_weights(torch, mask_scores(torch, scores, closed, -math.inf), None)
    return cast(Tensor, weights[0].nan_to_num())


def _can_recompute(ref: AttentionCall) -> bool:
    """Whether the weights are known: they are not random, and have no further inputs."""
    if ref.captured.cells is None or ref.unknown_scores or ref.kwargs.get("dropout"):
        return False
    return all(ref.kwargs.get(name) is None for name in _UNSUPPORTED_ARGUMENTS)


_UNSUPPORTED_ARGUMENTS = ("s_aux", "position_bias")
"""Keyword arguments of attention functions that change the weights: a sink, a bias by distance."""


MAX_DEFERRED_BYTES = 64 << 20
"""Keys and values that may wait for the writer thread at one time."""

MAX_DEFERRED_SCORE_BYTES = 1 << 20
"""Scores of a step that may wait for the writer thread, where their keys may not."""

MAX_DEFERRED_PRODUCT = 1 << 18
"""Multiplications of a product that may wait. OpenBLAS uses more threads for a larger product, and
they would slow the model down (SMP_THRESHOLD_MIN * GEMM_MULTITHREAD_THRESHOLD in its sources)."""


class _DeferredTensors:
    """Tensors of calls that wait to be read, while this lives; models may run in threads.

    `tensors` are those of all calls, by their names in an `AttentionCall`.
    """

    _all: ClassVar[WeakSet[_DeferredTensors]] = WeakSet()
    _lock: ClassVar[Lock] = Lock()

    def __init__(self, tensors: Mapping[str, list[Tensor]], n_bytes: int) -> None:
        self.tensors, self.n_bytes = tensors, n_bytes
        with self._lock:
            self._all.add(self)

    @classmethod
    def has_room(cls, n_bytes: int) -> bool:
        """Whether `n_bytes` more may wait."""
        with cls._lock:
            return n_bytes + sum(entry.n_bytes for entry in cls._all) <= MAX_DEFERRED_BYTES


def _defer_tensors(refs: Calls) -> _DeferredTensors | None:
    """Return the tensors of calls if they may be read later: small ones that are not modified.

    A cache that grows by copies does not modify the tensors of a step. A cache that is filled in
    place does, and their version counter shows it. Tensors of inference mode have no version.
    """
    first = refs[0]
    group = first.query.shape[1] // first.key.shape[1]
    if first.key[0, 0].numel() * group > MAX_DEFERRED_PRODUCT or first.key.device.type != "cpu":
        return None
    # Without the kernel's LSE the row's output is computed again.
    names = ("query", "key", "value", "output") if first.lse is None else ("query", "key", "lse")
    tensors = {name: [getattr(ref, name) for ref in refs] for name in names}
    if any(those[0].is_inference() for those in tensors.values()):
        return None
    if {one.dtype for one in tensors["query"]} != {torch.float32}:
        return None
    # The versions of all are read when they are reduced; each reading costs time here.
    for those in tensors.values():
        for one in (those[0], those[-1]):
            if one.dtype is not torch.float32 or one._version:
                return None
    n_bytes = 2 * len(refs) * first.key.nbytes
    if not _DeferredTensors.has_room(n_bytes):
        return None
    return _DeferredTensors(tensors, n_bytes)


def _plain(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype is torch.float32 else tensor.float()


def _queries(refs: Calls) -> Tensor:
    """Return the newest rows' scaled queries, batch 0, float32 (layers, kv heads, group, D)."""
    first = refs[0]
    kv_heads, head_dim = first.key.shape[1], first.key.shape[3]
    scale = first.scale if first.scale is not None else head_dim**-0.5
    if first.query.shape[2] == first.query.shape[0] == 1:
        queries = torch.cat([ref.query for ref in refs]).float() * scale
    else:
        queries = torch.stack([ref.query[0, :, -1] for ref in refs]).float() * scale
    return queries.view(len(refs), kv_heads, -1, head_dim)


def _outputs(refs: Calls) -> Tensor:
    if refs[0].output.shape[0] == refs[0].output.shape[1] == 1:
        return torch.cat([ref.output[0] for ref in refs]).float()
    return torch.stack([ref.output[0, -1] for ref in refs]).float()


def _reduce_deferred_rows(
    suffix: str,
    softcap: float | None,
    scale: float | None,
    deferred: _DeferredTensors,
    xp: Any,
    *,
    query: Sequence[Any],
    key: Sequence[Any],
    value: Sequence[Any] = (),
    output: Sequence[Any] = (),
    lse: Sequence[Any] = (),
    **inputs: Any,
) -> dict[str, Any]:
    """Return what `_reduce_rows` does, of the calls' own tensors, unless one was modified.

    There is one array per layer, with the shapes of `AttentionCall`.
    """
    kv_heads, head_dim = key[0].shape[1], key[0].shape[3]
    scale = scale if scale is not None else head_dim**-0.5
    queries = xp.stack([rows[0, :, -1] for rows in query]) * np.float32(scale)
    inputs["queries"] = queries.reshape(len(query), kv_heads, -1, head_dim)
    inputs["keys"] = [each[0] for each in key]
    inputs["inside"] = inputs["inside"][: key[0].shape[2]]
    if lse:
        inputs["kernel_lse"] = xp.stack([each[0, :, -1] for each in lse])
    else:
        inputs["values"] = [each[0] for each in value]
        inputs["outputs"] = xp.stack([each[0, -1] for each in output])
    reduced = _reduce_rows(suffix, softcap, xp, **inputs)
    if any(tensor_version(one) for those in deferred.tensors.values() for one in those):
        return {f"{LOST_PREFIX}{suffix}": xp.ones(())}
    return reduced


def _reduce_rows(
    suffix: str,
    softcap: float | None,
    xp: Any,
    *,
    closed: Any,
    inside: Any,
    bias: Any,
    scores: Any = None,
    queries: Any = None,
    keys: Sequence[Any] = (),
    values: Sequence[Any] | None = None,
    kernel_lse: Any = None,
    outputs: Any = None,
    recomputed: Any = None,
) -> dict[str, Any]:
    """Return mass (layers, heads, segments), lse and entropy (layers, heads), lse_error (layers).

    `scores` is (layers, q heads, keys); without it they are computed from `queries` (layers, kv
    heads, group, D) and one key (kv heads, keys, D) per layer. Keys are read in place, one batched
    product per layer, because copying them would cost more than the products. `closed` is
    broadcastable to one layer of the scores, `inside` the segment membership (keys, segments). The
    check needs the kernel's LSE (layers, q heads), or its outputs (layers, q heads, D) and what to
    compare them with: recomputed outputs, or one value (kv heads, keys, D) per layer to recompute
    them. `xp` is torch or numpy.
    """
    scores = attention_scores(xp, queries, keys) if scores is None else scores
    scores = _final_scores(xp, scores, softcap, bias, closed)
    seen = mask_scores(xp, scores, closed, -math.inf)
    lse, weights = softmax_weights(xp, seen, kernel_lse)
    has_keys = lse > -math.inf
    shift = xp.where(has_keys, lse, xp.zeros_like(lse))
    total = xp.sum(weights, axis=-1)
    spread = xp.sum(weights * mask_scores(xp, scores, closed, 0.0), axis=-1)
    # With w = exp(s - lse) the entropy in nats is lse * sum w - sum(w * s). Segment attention is
    # one product: running sums between borders take five times as long.
    out = {"mass": xp.matmul(weights, inside), "lse": lse, "entropy": shift * total - spread}
    if outputs is None:
        out["lse_error"] = xp.amax(xp.abs(total - xp.where(has_keys, 1.0, 0.0)), axis=-1)
    else:
        if values is not None:
            recomputed = layer_products(xp, grouped(weights, values), values)
        recomputed = xp.where(has_keys[..., None], recomputed, 0.0)
        out["lse_error"] = output_error(xp, recomputed, outputs)
    return {f"{ATTENTION_PREFIX}{name}{suffix}": value for name, value in out.items()}


def attention_scores(xp: Any, queries: Any, keys: Sequence[Any]) -> Any:
    """Return queries (layers, kv heads, group, D) @ keys.mT as (layers, q heads, keys).

    In torch keys @ queries.mT is computed, which takes two thirds of the time.
    """
    if xp is np:
        return layer_products(xp, queries, [xp.swapaxes(key, -1, -2) for key in keys])
    transposed = [torch.bmm(key, row) for key, row in zip(keys, queries.mT.unbind(0), strict=True)]
    return torch.stack(transposed).mT.reshape(len(transposed), -1, transposed[0].shape[1])


def grouped(weights: Any, values: Sequence[Any]) -> Any:
    """Return weights (layers, q heads, keys) as (layers, kv heads, group, keys)."""
    return weights.reshape(len(weights), len(values[0]), -1, weights.shape[-1])


def layer_products(xp: Any, left: Any, right: Sequence[Any]) -> Any:
    """Return left @ right layer by layer, (layers, kv heads, group, n) as (layers, q heads, n)."""
    multiply = np.matmul if xp is np else torch.bmm  # torch.matmul takes a third longer
    products = xp.stack([multiply(a, b) for a, b in zip(left, right, strict=True)])
    return products.reshape(len(products), -1, products.shape[-1])


def _final_scores(xp: Any, scores: Any, cap: float | None, bias: Any, closed: Any) -> Any:
    """Return scores with a soft cap, cap * tanh(scores / cap), and with what a mask adds."""
    scores = cap * xp.tanh(scores / cap) if cap else scores
    return scores if bias is None else shift_lowest_rows(xp, scores + bias, closed)


def mask_scores(xp: Any, scores: Any, closed: Any, value: float) -> Any:
    """Return scores with `value` in closed cells; `closed` is None if there are none."""
    if closed is None:
        return scores
    # Most decode rows close nothing; on an accelerator reading that would wait for the device.
    if (xp is np or closed.device.type == "cpu") and not closed.any():
        return scores
    return xp.where(closed, xp.full_like(scores, value), scores)


def shift_lowest_rows(xp: Any, scores: Any, closed: Any) -> Any:
    """Return scores with rows at the lowest float shifted to 0, where `exp` does not underflow.

    Softmax is invariant to the shift; a row without any open key is not changed.
    """
    top = xp.amax(mask_scores(xp, scores, closed, -math.inf), axis=-1)[..., None]
    is_low = (top < LOWEST / 2) & (top > -math.inf)
    return xp.where(is_low, scores - top, scores)


LOWEST = float(np.finfo(np.float32).min)


def softmax_weights(xp: Any, seen: Any, lse: Any) -> tuple[Any, Any]:
    """Return the LSE (given, or computed if None; -inf without open keys) and exp(score - LSE)."""
    base = xp.amax(seen, axis=-1) if lse is None else lse
    base = xp.where(base > -math.inf, base, xp.zeros_like(base))
    weights = xp.exp(seen - base[..., None])
    if lse is not None:
        return lse, weights
    total = xp.sum(weights, axis=-1)
    weights /= xp.where(total > 0, total, xp.ones_like(total))[..., None]
    return base + xp.log(total), weights


def segment_membership(n_keys: int, borders: Tensor) -> Tensor:
    """Return float32 (keys, segments), 1 where a key lies in a segment; segments end at borders."""
    positions = torch.arange(n_keys, device=borders.device)[:, None]
    return ((positions >= borders[:-1]) & (positions < borders[1:])).float()


def output_error(xp: Any, recomputed: Any, output: Any) -> Any:
    """Return the largest error of a row's output, relative to its largest value (layers)."""
    shape = (len(recomputed), -1)
    largest = xp.amax(xp.abs(output).reshape(shape), -1)
    error = xp.amax(xp.abs(recomputed - output.reshape(recomputed.shape)).reshape(shape), -1)
    return error / xp.clip(largest, 1e-6, None)
