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
from flexinspect.proofs import UNSTABLE, amount, found
from flexinspect_hooks.proofs.leaks import Leak, heads_of
from flexinspect_hooks.proofs.rows import NOISE_FACTOR, Moved, States
from flexinspect_hooks.proofs.subject import Subject

_LOUD = 1e-2
"""Noise above this part of the states' size is a warning."""
_ROUNDINGS = 2000
"""Roundings of the largest value that a movement may have grown to over all layers."""


def own_noise(states: States, subject: Subject) -> Moved:
    """Return how far a run is from itself at each point (points,), over three more runs if any."""
    noise = _furthest(states.moved(subject.forward), subject)
    if noise.any():
        for _ in range(2):
            noise = np.maximum(noise, _furthest(states.moved(subject.forward), subject))
    return noise


def _furthest(moved: Moved, subject: Subject) -> Moved:
    furthest: Moved = np.where(subject.real, moved, 0).max(axis=(1, 2))
    return furthest


def above(moved: Moved, noise: Moved) -> Moved:
    """Return movements (points, batch, rows) with those within the noise (points,) set to 0."""
    return np.where(moved > NOISE_FACTOR * noise[:, None, None], moved, 0).astype(np.float32)


def is_mixing(leak: Leak, subject: Subject, states: States) -> bool:
    """Say whether what looks like a leak is no more than rounding, and not by attention."""
    layer = states.points[leak.point].layer
    if layer is None or float(leak.moved[leak.point][leak.rows].max()) > _bound(states)[leak.point]:
        return False
    return heads_of(leak, subject, layer)[0] == ()


def mixing_noise(states: States, moved: Sequence[Moved]) -> Moved:
    """Return how far rounding moves rows at each point (points,): what stays within its bound."""
    bound = _bound(states)[:, None, None]
    small = [np.where(one <= bound, one, 0).max(axis=(1, 2)) for one in moved]
    noise: Moved = np.max(small, axis=0).astype(np.float32)
    return noise


def _bound(states: States) -> Moved:
    """Return what rounding may grow to at each point, (points,)."""
    eps = torch.finfo(states.of[0].dtype).eps
    sizes = [float(of.float().abs().nan_to_num(posinf=0).max()) for of in states.of]
    return np.array(sizes, np.float32) * np.float32(min(_ROUNDINGS * eps, _LOUD))


def unstable(subject: Subject, states: States, noise: Moved, *, is_mixed: bool) -> Finding:
    """Return the finding that tells of noise (points,), and what is judged above it."""
    point = int(noise.argmax())
    size = float(states.of[point].float().abs().nan_to_num(posinf=0).max())
    layer = states.points[point].layer
    where = "before the layers" if layer is None else f"in layer {layer}"
    sizes = f"{amount(float(noise[point]))} {where} (largest value {amount(size)})"
    what = (
        f"Rounding moves rows that read nothing of what was changed by up to {sizes}, and not by "
        "attention: these layers compute rows together, as experts do"
        if is_mixed
        else f"The same ids, run again, gave states that differ by up to {sizes}"
    )
    training = " The model is in training mode." if subject.model.training else ""
    sentence = f"{what}; only what moves more than {NOISE_FACTOR} times as far is judged.{training}"
    severity = Severity.WARNING if noise[point] > _LOUD * size else Severity.NOTE
    evidence = {"noise": [float(value) for value in noise], "size": size, "rounding": is_mixed}
    return found(UNSTABLE, sentence, severity=severity, layer=layer, evidence=evidence)
