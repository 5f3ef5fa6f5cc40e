"""Checks of attention calls that segment attention does not make: keys, scales, cache, batch rows.

The functions put values; `step_writer.call_check_records` records them. Most checks are for code of
the user only: flexinspect's own attention function passes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexinspect_hooks.capture.buffer import StepBuffer, stack_layers
from flexinspect_hooks.capture.step_clock import StepContext
from flexinspect_hooks.debugger.frames import breakpoints_disabled
from flexinspect_hooks.debugger.python_mods import are_mods_debugged
from flexinspect_hooks.generation.mask_source import evaluate_mask_mod
from flexinspect_hooks.observers.attention.call_references import AttentionCall, Calls, CapturedMask
from flexinspect_hooks.observers.attention.segment_attention import newest_weights
from flexinspect_hooks.step_writer.call_check_records import (
    BATCH_PREFIX,
    CLOSING_PREFIX,
    REPEATS_PREFIX,
    SCALES_PREFIX,
    SLOTS_PREFIX,
)

_OWN_BACKENDS = ("sdpa", "eager", "flex_attention", "direct")
_TOLERANCE = 0.02  # of a row's norm, above the rounding of bfloat16


def put_user_call_checks(
    refs: Calls, step: StepContext, filled: int | None, buffer: StepBuffer
) -> None:
    """Put what is checked of calls in code of the user; `filled` is as in `_put_slots`."""
    if step.phase == "prefill":
        for index, ref in enumerate(refs):
            groups = _groups(ref)
            if groups > 1:
                buffer.put(f"{REPEATS_PREFIX}{index}", _compare_orders(ref.key[0, :, -1], groups))
        if not step.step:
            _put_scales(refs, buffer)
    _put_slots(refs, filled, buffer)


# -- the order of repeated keys --------------------------------------------------------------------
#
# Keys may be repeated for grouped query heads before the call. Query heads of a group are
# neighbours, so head 1 must read the same keys as head 0. If the keys are repeated as a whole
# (`repeat` in place of `repeat_interleave`), groups read the keys of other groups, and nothing
# fails.


def _groups(ref: AttentionCall) -> int:
    """Return how often keys were repeated before the call, 1 if not or if there is one head."""
    groups = getattr(ref.module, "num_key_value_groups", 1)
    heads = ref.key.shape[1]
    if type(groups) is not int or groups < 2 or ref.query.shape[1] != heads:
        return 1
    return groups if heads % groups == 0 and heads // groups > 1 else 1


def _compare_orders(newest: Tensor, groups: int) -> Tensor:
    """Return whether the newest key (heads, D) repeats head by head, and whether as a whole."""
    n_heads, width = newest.shape
    neighbours = newest.reshape(n_heads // groups, groups, width)
    whole = newest.reshape(groups, n_heads // groups, width)
    return torch.stack([(neighbours == neighbours[:, :1]).all(), (whole == whole[:1]).all()])


# -- the scale of scores ---------------------------------------------------------------------------
#
# The kernel's scale alone does not give the scale of the scores, because queries or keys may have
# been multiplied before: their newest row of head 0 is compared with what the layer passed. A
# `score_mod` may scale, too. It is called in Python on a few scores: a `score_mod` that multiplies
# by a constant, with or without a bias that depends on the position, gives lines of one slope.
# Anything else (a soft cap, a factor that depends on position or head, a mask) gives different
# slopes, and then the scale is not known.

_SCORES = (-40.0, 2.0, 300.0)  # large enough for a soft cap to show


class _ScaledCall(NamedTuple):
    """A call, its kernel's scale divided by the layer's, and the slopes of its `score_mod`."""

    number: int
    ratio: float
    ref: AttentionCall
    slopes: Tensor


def _put_scales(refs: Calls, buffer: StepBuffer) -> None:
    """Put the scales of each call that can be compared; see `_factors`."""
    known: dict[int, Tensor | None] = {}
    groups: dict[tuple[int, torch.dtype], list[_ScaledCall]] = {}
    for number, ref in enumerate(refs):
        ratio = _ratio(ref)
        if ratio is None:
            continue
        mod = _score_mod_of(ref)
        if mod is not None and id(mod) not in known:
            known[id(mod)] = None if are_mods_debugged() else _score_mod_slopes(mod, ref)
        slopes = ref.query.new_ones(1).float() if mod is None else known[id(mod)]
        if slopes is not None:
            key = ref.query.shape[-1], ref.query.dtype
            groups.setdefault(key, []).append(_ScaledCall(number, ratio, ref, slopes))
    for members in groups.values():
        buffer.put(f"{SCALES_PREFIX}{members[0].number}", _factors(members))


def _ratio(ref: AttentionCall) -> float | None:
    """Return the kernel's scale divided by the layer's, None if they cannot be compared."""
    layer_call = ref.layer_call
    if layer_call is None or ref.query.shape != layer_call.query.shape:
        return None
    if ref.unknown_scores and _score_mod_of(ref) is None:
        return None
    scale = layer_call.kwargs.get("scaling", getattr(layer_call.module, "scaling", None))
    if ref.key.shape[2:] != layer_call.key.shape[2:] or not isinstance(scale, float) or not scale:
        return None
    kernel_scale = ref.scale if ref.scale is not None else ref.query.shape[-1] ** -0.5
    return float(kernel_scale) / scale


def _score_mod_of(ref: AttentionCall) -> Callable[..., Any] | None:
    return None if ref.kernel is None else ref.kernel.arguments.get("score_mod")


def _score_mod_slopes(score_mod: Callable[..., Any], ref: AttentionCall) -> Tensor | None:
    """Return float32 (slopes), the factors of a `score_mod` at sample scores; None if it raised.

    It is called at (batch, head, q_idx, kv_idx) of three cells that a causal mask leaves open.
    """
    device, (batch, heads, q_len, _) = ref.query.device, ref.query.shape
    q, h = q_len - 1, heads - 1
    sample = ((0, 0, q, ref.key.shape[2] - 1), (batch - 1, h, q, 0), (0, h, q // 2, 0))
    scores, cells = torch.tensor(_SCORES, device=device), torch.tensor(sample, device=device)
    try:
        with torch.no_grad():
            changed = torch.stack([score_mod(score, *cell) for cell in cells for score in scores])
    except Exception:  # user code, which may not support this call outside of its kernel
        return None
    return (changed.float().view(len(cells), len(scores)).diff() / scores.diff()).flatten()


def _factors(members: Sequence[_ScaledCall]) -> Tensor:
    """Return float32 (calls, 4): the call's number, the factor of its scores, the part of that
    factor that the `score_mod` multiplied by, and the largest relative deviation.

    The factor is the scale of the executed scores divided by the scale that the layer asked for.
    """
    pairs = [(m.ref, m.ref.layer_call) for m in members if m.ref.layer_call is not None]
    query, query_error = _multiple([(ref.query, given.query) for ref, given in pairs])
    key, key_error = _multiple([(ref.key, given.key) for ref, given in pairs])
    numbers = query.new_tensor([m.number for m in members])
    ratios = query.new_tensor([m.ratio for m in members])
    mod = torch.stack([m.slopes.mean() for m in members])
    # A score_mod that drops the score gives 0 / 0 = NaN, which is not below the tolerance.
    mod_error = torch.stack([(m.slopes / m.slopes.mean() - 1).abs().amax() for m in members])
    error = torch.stack([query_error, key_error, mod_error]).amax(0)
    return torch.stack([numbers, ratios * query * key * mod, mod, error], 1)


def _multiple(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the factors of newest rows (calls), and their relative deviation from it (calls).

    `pairs` are (passed to the kernel, received from the layer), each (B, heads, rows, D).
    """
    passed = stack_layers([new[0, 0, -1] for new, _ in pairs]).float()
    received = stack_layers([old[0, 0, -1] for _, old in pairs]).float()
    factor = (passed * received).sum(1) / (received * received).sum(1)
    error = (passed - factor[:, None] * received).abs().amax(1) / passed.abs().amax(1)
    return factor, error


# -- key slots that hold no token of the sequence --------------------------------------------------
#
# Such slots exist where keys are allocated ahead (more keys than the sequence has tokens), and in
# standalone calls. An ordinary step costs one comparison per distinct mask.


def _put_slots(refs: Calls, filled: int | None, buffer: StepBuffer) -> None:
    """Put five numbers for each call whose newest row attends to slots from `filled` on.

    With `filled` None any slot may be empty. The numbers: open keys of the newest row; all-zero
    keys among those slots, and their weight; other keys among them, and their weight. Weights are
    means over heads, of batch 0.
    """
    distinct = {ref.captured.number: ref.captured for ref in refs}
    suspects = {number for number, mask in distinct.items() if _is_open(mask, filled)}
    for index, ref in enumerate(refs) if suspects else ():
        if ref.captured.number not in suspects or ref.unknown_scores:
            continue
        if filled is None and ref.query.shape[2] >= ref.key.shape[2]:
            continue  # as many keys as rows: no cache
        buffer.put(f"{SLOTS_PREFIX}{index}", _count_slots(ref, filled))
        if ref.key.device.type != "cpu":
            # On an accelerator `_is_open` did not read the mask, so check one layer of each mask.
            suspects.discard(ref.captured.number)


def _is_open(mask: CapturedMask, filled: int | None) -> bool:
    """Whether the newest row may attend to such slots; on an accelerator the mask is not read."""
    if mask.cells is None or filled is None:
        return mask.cells is not None
    if mask.kv_len <= filled:
        return False
    return mask.cells.device.type != "cpu" or bool(mask.cells[:, -1, filled:].any())


def _count_slots(ref: AttentionCall, filled: int | None) -> Tensor:
    """Return the five numbers; no element is read here, which would wait for an accelerator."""
    weights = newest_weights(ref).mean(0)
    is_open = cast(Tensor, ref.captured.cells)[:, -1].any(0)
    is_zero = (ref.key[0] == 0).all(-1).all(0)
    suspect = is_open & (torch.arange(len(is_open), device=is_open.device) >= (filled or 0))
    empty, stale = suspect & is_zero, suspect & ~is_zero
    if filled is None:
        # If all keys are zero, that is on purpose; and a query of zeros is a padding row itself.
        empty = empty & ~is_zero.all() & ref.query[0, :, -1].any()
        stale = torch.zeros_like(empty)
    counted = [is_open.sum(), *(n for x in (empty, stale) for n in (x.sum(), weights @ x.float()))]
    return torch.stack([number.float() for number in counted])


# -- a mask in other batch rows --------------------------------------------------------------------
#
# Cells are recorded for batch row 0 only, so a sample of a mask is compared between batch rows. A
# mask_mod that ignores the batch costs one evaluation of the sample, once per mask_mod and kind of
# step. A block mask with one batch row whose mask_mod reads `b` is correct uncompiled and wrong
# compiled.

SAMPLE_ROWS = 32
"""Rows of a mask that are evaluated for every batch row."""
MAX_SAMPLE_CELLS = 1 << 22
"""Most cells, over all batch rows, that are evaluated; larger samples are skipped."""


def put_batch_rows(refs: Calls, compared: set[tuple[Any, ...]], buffer: StepBuffer) -> None:
    """Put a summary of the batch rows of each mask that is not in `compared` yet."""
    if refs[0].query.shape[0] < 2:
        return
    first_of_mask: dict[int, AttentionCall] = {}
    for ref in refs:
        first_of_mask.setdefault(ref.captured.number, ref)
    for ref in first_of_mask.values():
        mask = ref.captured
        key = (ref.layer, mask.kind, mask.name, mask.q_len == 1, ref.query.shape[0])
        if key in compared:
            continue
        compared.add(key)
        with suppress(Exception):  # a mask_mod may fail for indices its kernel never passed
            summary = _compare_batch_rows(ref)
            if summary is not None:
                buffer.put(f"{BATCH_PREFIX}{mask.number}", summary)
            if ref.mask is None and ref.kernel is None and ref.backend not in _OWN_BACKENDS:
                buffer.put(f"{CLOSING_PREFIX}{mask.number}", _rows_that_close_keys(ref))


def _compare_batch_rows(ref: AttentionCall) -> Tensor | None:
    """Return the summary of a mask's batch rows, zeros if all are equal; None if not comparable."""
    received, mask = ref.mask, ref.captured
    batch, device = ref.query.shape[0], ref.query.device
    # Evenly spaced rows, the first and the last among them.
    count = min(mask.q_len, SAMPLE_ROWS)
    rows = torch.linspace(0, mask.q_len - 1, count, device="cpu").round().long().to(device)
    equal = torch.zeros((batch, 6), dtype=torch.int64, device=device)
    is_dense = isinstance(received, Tensor)
    if received is None or (is_dense and (received.dim() < 4 or received.shape[0] == 1)):
        return equal
    if batch * len(rows) * mask.kv_len > MAX_SAMPLE_CELLS:
        return None
    if isinstance(received, BlockMask):
        batches, keys = (torch.arange(n, device=device) for n in (batch, mask.kv_len))
        with breakpoints_disabled():
            zero = torch.zeros_like(keys[0])
            cells = evaluate_mask_mod(received.mask_mod, batches, zero, rows, keys)
        return equal if cells.stride(0) == 0 else _summarize_rows(cells, rows, mask)
    if not is_dense or received.shape[0] != batch or received.shape[2] != mask.q_len:
        return None
    part = received[:, 0, rows, : mask.kv_len]
    is_open = part if part.dtype is torch.bool else part > torch.finfo(part.dtype).min / 2
    return _summarize_rows(is_open, rows, mask)


def _rows_that_close_keys(ref: AttentionCall) -> Tensor:
    """Return whether the newest row of each batch row is not that of all keys, bool (batch,).

    An attention function of the program that got no mask may close keys, such as padding, by
    itself, which no record of its mask holds.
    """
    query, key, value = (one.detach().float() for one in (ref.query[:, :, -1:], ref.key, ref.value))
    groups = query.shape[1] // key.shape[1]
    key, value = (one.repeat_interleave(groups, 1) for one in (key, value))
    scale = query.shape[-1] ** -0.5 if ref.scale is None else ref.scale
    scores = (query @ key.mT) * scale
    if ref.softcap:
        scores = ref.softcap * torch.tanh(scores / ref.softcap)
    expected = (scores.softmax(-1) @ value)[:, :, 0].flatten(1)
    ours = ref.output.detach()[:, -1].float().flatten(1)
    is_other: Tensor = (ours - expected).norm(dim=-1) > _TOLERANCE * expected.norm(dim=-1)
    return is_other


def _summarize_rows(cells: Tensor, rows: Tensor, mask: CapturedMask) -> Tensor:
    """Return int64 (batch, 6), for each batch row of `cells` (batch, sample rows, keys).

    The columns: cells that differ from batch row 0, the first of them (row, key), open cells, open
    cells in the future of their row, and the first key that the newest row attends to (the number
    of keys if it attends to none).
    """
    keys = torch.arange(cells.shape[2], device=cells.device)
    differs = (cells != cells[:1]).flatten(1)
    first = differs.int().argmax(1)
    is_future = keys + mask.kv_offset > (rows + mask.q_offset)[:, None]
    columns = [
        differs.sum(1),
        rows[first // cells.shape[2]],
        keys[first % cells.shape[2]],
        cells.flatten(1).sum(1),
        (cells & is_future).flatten(1).sum(1),
        torch.where(cells[:, -1], keys, len(keys)).amin(1),
    ]
    return torch.stack(columns, 1)
