"""What moves rows without being a leak: a run that differs from itself, and rounding.

Layers that compute rows together, as experts do with the rows that are routed to them, round
otherwise when there are more or fewer of them. So rows move that read nothing of what was changed,
by as much as rounding does, and not through attention.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from flexinspect.findings import Finding, Severity
from flexinspect.proofs import UNSTABLE, format_amount, proof_finding
from flexinspect_hooks.proofs.leaks import IsolationLeak, leaking_heads
from flexinspect_hooks.proofs.rows import NOISE_FACTOR, HiddenStates, RowChanges
from flexinspect_hooks.proofs.subject import Subject

_WARNING_SHARE = 1e-2
"""Noise above this part of the states' size is a warning."""
_MAX_ROUNDINGS = 2000
"""Roundings of the largest value that a movement may have grown to over all layers."""


def run_noise(states: HiddenStates, subject: Subject) -> RowChanges:
    """Return how far a run is from itself at each point (points,), over three more runs if any."""
    noise = _largest_change(states.compare(subject.forward), subject)
    if noise.any():
        for _ in range(2):
            noise = np.maximum(noise, _largest_change(states.compare(subject.forward), subject))
    return noise


def _largest_change(moved: RowChanges, subject: Subject) -> RowChanges:
    furthest: RowChanges = np.where(subject.real, moved, 0).max(axis=(1, 2))
    return furthest


def above_noise(moved: RowChanges, noise: RowChanges) -> RowChanges:
    """Return movements (points, batch, rows) with those within the noise (points,) set to 0."""
    return np.where(moved > NOISE_FACTOR * noise[:, None, None], moved, 0).astype(np.float32)


def is_rounding(leak: IsolationLeak, subject: Subject, states: HiddenStates) -> bool:
    """Say whether what looks like a leak is no more than rounding, and not by attention."""
    layer = states.points[leak.point].layer
    if (
        layer is None
        or float(leak.changes[leak.point][leak.rows].max()) > _rounding_bound(states)[leak.point]
    ):
        return False
    return leaking_heads(leak, subject, layer)[0] == ()


def rounding_noise(states: HiddenStates, moved: Sequence[RowChanges]) -> RowChanges:
    """Return how far rounding moves rows at each point (points,): what stays within its bound."""
    bound = _rounding_bound(states)[:, None, None]
    small = [np.where(one <= bound, one, 0).max(axis=(1, 2)) for one in moved]
    noise: RowChanges = np.max(small, axis=0).astype(np.float32)
    return noise


def _rounding_bound(states: HiddenStates) -> RowChanges:
    """Return what rounding may grow to at each point, (points,)."""
    eps = torch.finfo(states.reference[0].dtype).eps
    sizes = [float(of.float().abs().nan_to_num(posinf=0).max()) for of in states.reference]
    return np.array(sizes, np.float32) * np.float32(min(_MAX_ROUNDINGS * eps, _WARNING_SHARE))


def unstable_finding(
    subject: Subject, states: HiddenStates, noise: RowChanges, *, is_mixed: bool
) -> Finding:
    """Return the finding that tells of noise (points,), and what is judged above it."""
    point = int(noise.argmax())
    size = float(states.reference[point].float().abs().nan_to_num(posinf=0).max())
    layer = states.points[point].layer
    where = "before the layers" if layer is None else f"in layer {layer}"
    sizes = f"{format_amount(float(noise[point]))} {where} (largest value {format_amount(size)})"
    what = (
        f"Rounding moves rows that read nothing of what was changed by up to {sizes}, and not by "
        "attention: these layers compute rows together, as experts do"
        if is_mixed
        else f"The same ids, run again, gave states that differ by up to {sizes}"
    )
    training = " The model is in training mode." if subject.model.training else ""
    sentence = f"{what}; only what moves more than {NOISE_FACTOR} times as far is judged.{training}"
    severity = Severity.WARNING if noise[point] > _WARNING_SHARE * size else Severity.NOTE
    evidence = {"noise": [float(value) for value in noise], "size": size, "rounding": is_mixed}
    return proof_finding(UNSTABLE, sentence, severity=severity, layer=layer, evidence=evidence)
