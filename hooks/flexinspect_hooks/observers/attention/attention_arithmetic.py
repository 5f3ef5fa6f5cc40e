"""Checks of an attention function of the user: the order of repeated keys, the scale of scores.

Keys may be repeated for grouped query heads before the call. Query heads of a group are neighbours,
so head 1 must read the same keys as head 0. If the keys are repeated as a whole (`repeat` in place
of `repeat_interleave`), groups read the keys of other groups, and nothing fails.

The kernel's scale alone does not give the scale of the scores, because queries or keys may have
been multiplied before: their newest row of head 0 is compared with what the layer passed. A
`score_mod` may scale, too. It is called in Python on a few scores: a `score_mod` that multiplies by
a constant, with or without a bias that depends on the position, gives lines of one slope. Anything
else (a soft cap, a factor that depends on position or head, a mask) gives different slopes, and
then the scale is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flexinspect_hooks.capture.buffer import StepBuffer, Values, with_prefix
from flexinspect_hooks.capture.hook import StepDraft
from flexinspect_hooks.capture.step_clock import StepContext
from flexinspect_hooks.debugger.python_mods import are_mods_debugged
from flexinspect_hooks.observers.attention.call_references import AttentionCall

if TYPE_CHECKING:
    from flexinspect_hooks.observers.attention.call_references import CallShape

KEYS_TILED = "keys-tiled"
_REPEATS_PREFIX = "repeats/"


def put_repeats(refs: Sequence[AttentionCall], step: StepContext, buffer: StepBuffer) -> None:
    """Put for each prefill call with repeated keys in which order they are repeated."""
    if step.phase != "prefill":
        return
    for index, ref in enumerate(refs):
        groups = _groups(ref)
        if groups > 1:
            buffer.put(f"{_REPEATS_PREFIX}{index}", _compare_orders(ref.key[0, :, -1], groups))


def _groups(ref: AttentionCall) -> int:
    """Return how often the keys were repeated before the call, 1 if they were not.

    With a single head of keys there is only one order, so that also gives 1.
    """
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


def record_repeats(
    values: Values, calls: Sequence[CallShape], step: StepContext, draft: StepDraft
) -> None:
    """Record an event for the layers whose keys are repeated as a whole (writer thread)."""
    tiled = [
        calls[int(number)]
        for number, orders in with_prefix(values, _REPEATS_PREFIX).items()
        if orders[1] and not orders[0]
    ]
    if tiled:
        layers = sorted({call.layer for call in tiled})
        text = f"The keys of layers {layers} were repeated as a whole, not head by head."
        facts = {"layers": layers, "q_heads": int(tiled[0].q[1])}
        draft.add_event(step, KEYS_TILED, text, facts)


RESCALED = "scores-rescaled"
_SCALES_PREFIX = "scales/"
_SCALE_TOLERANCE = 0.02
"""Largest relative deviation of a vector from a multiple of another, or of a scale from another."""


class _ScaledCall(NamedTuple):
    """A call, its kernel's scale divided by the layer's, and the slopes of its `score_mod`."""

    number: int
    ratio: float
    ref: AttentionCall
    slopes: Tensor


def put_scales(refs: Sequence[AttentionCall], step: StepContext, buffer: StepBuffer) -> None:
    """Put the scales of each call of the prompt that can be compared; see `_factors`."""
    if step.phase != "prefill" or step.step:
        return
    ratios = [(number, _ratio(ref), ref) for number, ref in enumerate(refs)]
    comparable = [(number, ratio, ref) for number, ratio, ref in ratios if ratio is not None]
    all_slopes = _score_mod_slopes([ref for *_, ref in comparable])
    groups: dict[tuple[int, torch.dtype], list[_ScaledCall]] = {}
    for (number, ratio, ref), slopes in zip(comparable, all_slopes, strict=True):
        if slopes is not None:
            key = ref.query.shape[-1], ref.query.dtype
            groups.setdefault(key, []).append(_ScaledCall(number, ratio, ref, slopes))
    for members in groups.values():
        buffer.put(f"{_SCALES_PREFIX}{members[0].number}", _factors(members))


def _ratio(ref: AttentionCall) -> float | None:
    """Return the kernel's scale divided by the layer's, None if they cannot be compared."""
    inputs = ref.layer_inputs
    if inputs is None or ref.query.shape != inputs.query.shape:
        return None
    if ref.unknown_scores and _score_mod_of(ref) is None:
        return None
    if ref.key.shape[2:] != inputs.key.shape[2:] or not inputs.scale:
        return None
    kernel_scale = ref.scale if ref.scale is not None else ref.query.shape[-1] ** -0.5
    return float(kernel_scale) / inputs.scale


def _factors(members: Sequence[_ScaledCall]) -> Tensor:
    """Return float32 (calls, 4): the call's number, the factor of its scores, the part of that
    factor that the `score_mod` multiplied by, and the largest relative deviation.

    The factor is the scale of the executed scores divided by the scale that the layer asked for.
    """
    inputs = [(m.ref, m.ref.layer_inputs) for m in members if m.ref.layer_inputs is not None]
    query, query_error = _multiple([(ref.query, given.query) for ref, given in inputs])
    key, key_error = _multiple([(ref.key, given.key) for ref, given in inputs])
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
    passed = torch.stack([new[0, 0, -1] for new, _ in pairs]).float()
    received = torch.stack([old[0, 0, -1] for _, old in pairs]).float()
    factor = (passed * received).sum(1) / (received * received).sum(1)
    error = (passed - factor[:, None] * received).abs().amax(1) / passed.abs().amax(1)
    return factor, error


def record_scales(
    values: Values, calls: Sequence[CallShape], step: StepContext, draft: StepDraft
) -> None:
    """Record an event for the layers whose scores have another scale (writer thread)."""
    rescaled: dict[int, tuple[float, float]] = {}
    for rows in with_prefix(values, _SCALES_PREFIX).values():
        for number, factor, mod, error in rows.tolist():
            if error < _SCALE_TOLERANCE and abs(factor - 1) > _SCALE_TOLERANCE:
                rescaled[int(number)] = factor, mod
    if not rescaled:
        return
    first = min(rescaled)
    factor, mod = rescaled[first]
    layers = sorted({calls[number].layer for number in rescaled})
    text = f"The scores of layers {layers} are scaled by {factor:.4g} times what they asked for."
    data = {"layers": layers, "factor": factor, "scale": calls[first].scale}
    if abs(mod - 1) > _SCALE_TOLERANCE:
        data["score_mod"] = mod
    draft.add_event(step, RESCALED, text, data)


_SCORES = (-40.0, 2.0, 300.0)
"""Large enough for a soft cap to show."""


def _score_mod_slopes(refs: Sequence[AttentionCall]) -> list[Tensor | None]:
    """Return for each call float32 (slopes): the factors of its `score_mod` at sample scores.

    None for a call whose `score_mod` raised, or in whose `score_mod` a debugger would stop.
    """
    known: dict[int, Tensor | None] = {}
    slopes: list[Tensor | None] = []
    for ref in refs:
        mod = _score_mod_of(ref)
        if mod is not None and id(mod) not in known:
            known[id(mod)] = None if are_mods_debugged() else _evaluate_slopes(mod, ref)
        slopes.append(ref.query.new_ones(1).float() if mod is None else known[id(mod)])
    return slopes


def _score_mod_of(ref: AttentionCall) -> Callable[..., Any] | None:
    return None if ref.kernel is None else ref.kernel.arguments.get("score_mod")


def _evaluate_slopes(score_mod: Callable[..., Any], ref: AttentionCall) -> Tensor | None:
    scores = torch.tensor(_SCORES, device=ref.query.device)
    cells = torch.tensor(_sample_cells(ref), device=ref.query.device)
    try:
        with torch.no_grad():
            changed = torch.stack([score_mod(score, *cell) for cell in cells for score in scores])
    except Exception:  # user code, which may not support this call outside of its kernel
        return None
    return (changed.float().view(len(cells), len(scores)).diff() / scores.diff()).flatten()


def _sample_cells(ref: AttentionCall) -> tuple[tuple[int, int, int, int], ...]:
    """Return (batch, head, q_idx, kv_idx) of cells that a causal mask leaves open."""
    batch, heads, q_len, _ = ref.query.shape
    last_q, last_kv = q_len - 1, ref.key.shape[2] - 1
    return (
        (0, 0, last_q, last_kv),
        (batch - 1, heads - 1, last_q, 0),
        (0, heads - 1, last_q // 2, 0),
    )
