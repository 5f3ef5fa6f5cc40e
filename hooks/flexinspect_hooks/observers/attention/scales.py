"""Keys that own code repeated for its query heads: as the model groups them, or in another order.

Query heads of a group are neighbours, so head 0's keys must be those of head 1 again. Repeated as a
whole (`repeat` for `repeat_interleave`) every group reads the keys of others, and nothing fails.

The kernel's scale alone does not tell, as queries or keys may have been multiplied before: their
newest row of head 0 is compared with the one that the layer gave. A `score_mod` may scale, too.

It is called on a few scores, in Python: a rule that multiplies by a constant, with or without a
bias of the place, gives lines of one slope. Whatever else it does (a cap, a factor of the place or
of the head, a mask) makes slopes that differ, and then nothing is known of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flexinspect.records.step import EventRecord
from flexinspect_hooks.capture.buffer import StepBuffer, Values
from flexinspect_hooks.capture.hook import StepDraft
from flexinspect_hooks.capture.step_clock import StepContext
from flexinspect_hooks.debugger.python_mods import are_mods_debugged
from flexinspect_hooks.observers.attention.call_references import AttentionCall

if TYPE_CHECKING:
    from flexinspect_hooks.observers.attention.call_references import CallShape

KEYS_TILED = "keys-tiled"
_REPEATS_PREFIX = "repeats/"


def put_repeats(refs: Sequence[AttentionCall], step: StepContext, buffer: StepBuffer) -> None:
    """Put for each call of a prompt whether its keys are repeated head by head, and otherwise."""
    if step.phase != "prefill":
        return
    for index, ref in enumerate(refs):
        groups = _groups(ref)
        if groups > 1:
            buffer.put(f"{_REPEATS_PREFIX}{index}", _compare_orders(ref.key[0, :, -1], groups))


def _groups(ref: AttentionCall) -> int:
    """Return by how much the keys were repeated before the call, 1 when they were not.

    With a single head of keys there is one order alone.
    """
    groups = getattr(ref.module, "num_key_value_groups", 1)
    heads = ref.key.shape[1]
    if type(groups) is not int or groups < 2 or ref.query.shape[1] != heads:
        return 1
    return groups if heads % groups == 0 and heads // groups > 1 else 1


def _compare_orders(newest: Tensor, groups: int) -> Tensor:
    """Return whether the newest key (heads, D) repeats as neighbours, and as a whole."""
    n_heads, width = newest.shape
    neighbours = newest.reshape(n_heads // groups, groups, width)
    whole = newest.reshape(groups, n_heads // groups, width)
    return torch.stack([(neighbours == neighbours[:, :1]).all(), (whole == whole[:1]).all()])


def record_repeats(
    values: Values, calls: Sequence[CallShape], step: StepContext, draft: StepDraft
) -> None:
    """Tell of the layers whose keys are repeated as a whole (writer thread)."""
    found = {
        int(k.removeprefix(_REPEATS_PREFIX)): v
        for k, v in values.items()
        if k.startswith(_REPEATS_PREFIX)
    }
    tiled = sorted({calls[i].layer for i, (near, whole) in found.items() if whole and not near})
    if not tiled:
        return
    heads = next(calls[i].q[1] for i, (near, whole) in found.items() if whole and not near)
    text = f"The keys of layers {tiled} were repeated as a whole, not head by head."
    data = {"layers": tiled, "q_heads": int(heads)}
    place = (step.started_at, step.generation, step.step, data)
    draft.events.append(EventRecord(KEYS_TILED, text, *place))


RESCALED = "scores-rescaled"
_SCALES_PREFIX = "scales"
_SCALE_TOLERANCE = 0.02
"""By how much a vector may be off a multiple of another, or a scale off the one asked for."""


class _ScaledCall(NamedTuple):
    """A call, the kernel's scale over the one asked for, and what its `score_mod` multiplies by."""

    number: int
    ratio: float
    ref: AttentionCall
    slope: Tensor


def put_scales(refs: Sequence[AttentionCall], step: StepContext, buffer: StepBuffer) -> None:
    """Put for each call of a prompt that can be compared: its number, and by what it was scaled."""
    if step.phase != "prefill" or step.step:
        return
    known = [(number, _ratio(ref), ref) for number, ref in enumerate(refs)]
    pairs = [(number, ratio, ref) for number, ratio, ref in known if ratio is not None]
    found: dict[tuple[int, torch.dtype], list[_ScaledCall]] = {}
    for (number, ratio, ref), slope in zip(
        pairs, score_mod_slopes([ref for *_, ref in pairs]), strict=True
    ):
        if slope is not None:
            kind = ref.query.shape[-1], ref.query.dtype
            found.setdefault(kind, []).append(_ScaledCall(number, ratio, ref, slope))
    for members in found.values():
        buffer.put(f"{_SCALES_PREFIX}/{members[0].number}", _factors(members))


def _ratio(ref: AttentionCall) -> float | None:
    """Return the kernel's scale over the one asked for; None where that cannot be compared."""
    asked = ref.layer_inputs
    if asked is None or ref.query.shape != asked.query.shape:
        return None
    if ref.unknown_scores and not has_score_mod(ref):
        return None
    if ref.key.shape[2:] != asked.key.shape[2:] or not asked.scale:
        return None
    used = ref.scale
    return float(ref.query.shape[-1] ** -0.5 if used is None else used) / asked.scale


def _factors(members: Sequence[_ScaledCall]) -> Tensor:
    """Return float32 (calls, 4): number, scale over the one asked for, of that what a `score_mod`
    multiplied, and how far all that is off."""
    pairs = [
        (ref.query, ref.layer_inputs.query)
        for _, _, ref, _ in members
        if ref.layer_inputs is not None
    ]
    query, query_off = _multiple(pairs)
    pairs = [
        (ref.key, ref.layer_inputs.key) for _, _, ref, _ in members if ref.layer_inputs is not None
    ]
    key, key_off = _multiple(pairs)
    known = query.new_tensor([[number, ratio] for number, ratio, _, _ in members])
    rule = torch.stack([slope.mean() for _, _, _, slope in members])
    # A rule that drops the score says nothing of its scale: 0 / 0 is no small number.
    bent = torch.stack([(slope / slope.mean() - 1).abs().amax() for _, _, _, slope in members])
    off = torch.stack([query_off, key_off, bent]).amax(0)
    return torch.stack([known[:, 0], known[:, 1] * query * key * rule, rule, off], 1)


def _multiple(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return by what newest rows were multiplied, and how far they are off that, each (calls)."""
    now = torch.stack([new[0, 0, -1] for new, _ in pairs]).float()
    before = torch.stack([old[0, 0, -1] for _, old in pairs]).float()
    factor = (now * before).sum(1) / (before * before).sum(1)
    off = (now - factor[:, None] * before).abs().amax(1) / now.abs().amax(1)
    return factor, off


def record_scales(
    values: Values, calls: Sequence[CallShape], step: StepContext, draft: StepDraft
) -> None:
    """Tell of the layers whose scores are not scaled as they asked for (writer thread)."""
    odd: dict[int, tuple[float, float]] = {}
    for name, rows in values.items():
        if name.startswith(f"{_SCALES_PREFIX}/"):
            for number, factor, rule, off in rows.tolist():
                if off < _SCALE_TOLERANCE and abs(factor - 1) > _SCALE_TOLERANCE:
                    odd[int(number)] = factor, rule
    if not odd:
        return
    first = min(odd)
    factor, rule = odd[first]
    layers = sorted({calls[number].layer for number in odd})
    text = f"The scores of layers {layers} are scaled by {factor:.4g} times what they asked for."
    data = {"layers": layers, "factor": factor, "scale": calls[first].scale}
    if abs(rule - 1) > _SCALE_TOLERANCE:
        data["score_mod"] = rule
    place = (step.started_at, step.generation, step.step, data)
    draft.events.append(EventRecord(RESCALED, text, *place))


_SCORES = (-40.0, 2.0, 300.0)
"""Large enough for a cap to bend them."""


def has_score_mod(ref: AttentionCall) -> bool:
    """Say whether the call is one of FlexAttention with a `score_mod`."""
    return _score_mod_of(ref) is not None


def score_mod_slopes(refs: Sequence[AttentionCall]) -> list[Tensor | None]:
    """Return for each call float32 (slopes): by what its `score_mod` multiplies some scores.

    None where that is not known: the rule raised, or a debugger would stop in it.
    """
    known: dict[int, Tensor | None] = {}
    found: list[Tensor | None] = []
    for ref in refs:
        rule = _score_mod_of(ref)
        if rule is not None and id(rule) not in known:
            known[id(rule)] = None if are_mods_debugged() else _evaluate_slopes(rule, ref)
        found.append(ref.query.new_ones(1).float() if rule is None else known[id(rule)])
    return found


def _score_mod_of(ref: AttentionCall) -> Callable[..., Any] | None:
    return None if ref.kernel is None else ref.kernel.arguments.get("score_mod")


def _evaluate_slopes(score_mod: Callable[..., Any], ref: AttentionCall) -> Tensor | None:
    scores = torch.tensor(_SCORES, device=ref.query.device)
    places = torch.tensor(_sample_cells(ref), device=ref.query.device)
    try:
        with torch.no_grad():
            made = torch.stack([score_mod(score, *at) for at in places for score in scores])
    except Exception:  # the user's own rule; what it is called with here is no call of its kernel
        return None
    return (made.float().view(len(places), len(scores)).diff() / scores.diff()).flatten()


def _sample_cells(ref: AttentionCall) -> tuple[tuple[int, int, int, int], ...]:
    """Return (batch, head, q_idx, kv_idx) of cells that a causal rule leaves open."""
    batch, heads, q_len, _ = ref.query.shape
    last_q, last_kv = q_len - 1, ref.key.shape[2] - 1
    return (
        (0, 0, last_q, last_kv),
        (batch - 1, heads - 1, last_q, 0),
        (0, heads - 1, last_q // 2, 0),
    )
