"""The rows of a program's steps beside those of the reference, and the noise that they may have.

The noise is measured: the reference runs again with random relative changes, as large as the
rounding of the program's dtype, at the embedding and in every layer; and, if the program has
another dtype, in that dtype. A quantity diverges where it differs by more than `NOISE_MULTIPLE`
times what these runs differ by. Differences are relative to the norm of the row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor

from flexinspect_hooks.audit.evidence.audited_sequence import AuditedSequence, AuditedStep
from flexinspect_hooks.audit.evidence.step_evidence import StepEvidence
from flexinspect_hooks.audit.forward.forward_run import (
    EMBEDDING,
    ENCODER,
    HEADS,
    HIDDEN,
    KEY,
    LOGITS,
    QUANTITIES,
    QUERY,
    VALUE,
    Point,
)
from flexinspect_hooks.observers.hidden_digests import digest

NOISE_MULTIPLE = 8
"""A quantity diverges beyond this many times the measured noise."""
LOWEST_LIMIT = 64
"""In units of the dtype's rounding: no limit is lower."""

_HEADWISE = (QUERY, KEY, VALUE)
_ROBUST = (ENCODER, EMBEDDING, HIDDEN, LOGITS)
"""Quantities whose layout does not depend on how a program writes its attention."""


class Divergence(Struct, frozen=True):
    """Where a program's numbers leave those of the reference: `row` is a position of the text."""

    step: int
    point: Point
    row: int
    difference: float
    limit: float


def relative(one: Tensor, other: Tensor, scale: Tensor | None = None) -> Tensor:
    """Return the difference of each row (rows,) relative to the norm of `other`'s row.

    `scale` (rows,) are other norms to divide by.
    """
    one, other = one.flatten(1).double(), other.flatten(1).double()
    distance = (one - other).norm(dim=-1)
    scale = other.norm(dim=-1) if scale is None else scale.double()
    floor = scale.max().clamp_min(1e-30) * 1e-6
    ratio: Tensor = distance / torch.maximum(scale, floor)
    return ratio.nan_to_num(nan=torch.inf)


def digest_difference(digests: Tensor, rows: Tensor) -> Tensor:
    """Return by how much digests (rows, sums) differ from those of `rows`, relative to their norm.

    The norm is that of the rows themselves, which that of the digests estimates only.
    """
    return relative(digests, digest(rows), rows.flatten(1).norm(dim=-1))


def noise_limits(
    clean: Mapping[Point, Tensor],
    noisy: Sequence[Mapping[Point, Tensor]],
    dtype: torch.dtype,
    *,
    of_digests: bool = False,
) -> dict[Point, float]:
    """Return the limit of each point from runs that differ by noise only.

    With `of_digests` hidden states may differ by the noise of their digests, if that is larger.
    """
    lowest = LOWEST_LIMIT * torch.finfo(dtype).eps / 2
    limits = {}
    for point, tensor in clean.items():
        worst = max(
            (float(relative(_rows(run[point]), _rows(tensor)).max()) for run in noisy), default=0.0
        )
        if of_digests and point[0] == HIDDEN:
            rows = _rows(tensor)
            differences = [digest_difference(digest(_rows(run[point])), rows) for run in noisy]
            worst = max(worst, *(float(one.max()) for one in differences))
        limits[point] = max(NOISE_MULTIPLE * worst, lowest)
    return limits


def _rows(tensor: Tensor) -> Tensor:
    """Return (rows, values) of (1, rows, …), or of (1, heads, rows, size)."""
    return tensor[0].transpose(0, 1).flatten(1) if tensor.dim() == 4 else tensor[0]


def logits_difference(evidence: StepEvidence, theirs: Tensor) -> Tensor:
    """Return the difference of a step's logits from `theirs` (1, vocabulary), relative to these.

    Where only those of some tokens are known, it is relative to what is usual for as many: the best
    tokens alone may have a smaller norm than others.
    """
    ours, ids = evidence.values[LOGITS, None][0], evidence.logit_ids
    if ids is None:
        return relative(ours, theirs).cpu()
    share = (len(ids) / theirs.shape[-1]) ** 0.5
    chosen = theirs[:, ids.to(theirs.device)]
    return relative(ours.to(chosen.device), chosen, theirs.norm(dim=-1) * share).cpu()


class RowComparison(Struct):
    """Compares the steps of a sequence with values of the reference.

    `logit_rows` are the positions whose logits the reference gave, in order. Only the steps of
    `generation` are judged; earlier ones may have filled its cache.
    """

    sequence: AuditedSequence
    limits: Mapping[Point, float]
    logit_rows: Sequence[int]
    generation: int

    @property
    def steps(self) -> list[AuditedStep]:
        """The steps that are judged: those with values."""
        steps = (s for s in self.sequence.steps if s.evidence.generation == self.generation)
        return [step for step in steps if step.evidence.values]

    def differences(
        self,
        step: AuditedStep,
        values: Mapping[Point, Tensor],
        counts: Callable[[Point], bool] = lambda point: True,
    ) -> Iterator[tuple[Point, Tensor, Tensor]]:
        """Yield point, relative difference and position of the rows of a step, in forward order.

        Points that do not count are not compared.
        """
        evidence, b = step.evidence, step.row
        for point in sorted(filter(counts, evidence.values), key=forward_order):
            reference = values.get(point)
            if reference is None or (point[0] in _HEADWISE and not self._has_own_positions(step)):
                continue
            kept = evidence.values[point]
            if point[0] == LOGITS:
                last = int(step.positions[-1])
                is_last = int(step.kept[-1]) == len(evidence.rows) - 1  # type: ignore[arg-type]
                if b or last not in self.logit_rows or not is_last:
                    continue
                theirs = reference[0, [self.logit_rows.index(last)]]
                if evidence.logit_ids is not None or kept.shape[-1] == theirs.shape[-1]:
                    yield point, logits_difference(evidence, theirs), step.positions[-1:]
                continue
            if b >= len(kept):
                continue
            if point[0] == ENCODER:
                ours = kept[b].to(reference)
                if (mask := self._encoder_mask()) is not None:
                    ours = ours * mask[..., None].to(ours)
                yield point, relative(ours, reference[0]).max()[None].cpu(), step.positions[:1]
                continue
            index = step.kept.to(kept.device)
            ours, positions = kept[b].index_select(0, index), step.positions
            theirs = _rows(reference).index_select(0, positions.to(reference.device))
            if evidence.dtype is not None and point[0] == HIDDEN:
                yield point, digest_difference(ours.to(theirs.device), theirs).cpu(), positions
                continue
            if ours.flatten(1).shape == theirs.flatten(1).shape:
                yield point, relative(ours, theirs).cpu(), positions

    def _encoder_mask(self) -> Tensor | None:
        encoder = self.sequence.encoder
        return None if encoder is None or encoder.mask is None else encoder.mask[0]

    def agreeing_heads(
        self, step: AuditedStep, values: Mapping[Point, Tensor], layer: int | None, n_heads: int
    ) -> tuple[int, ...]:
        """Return the heads whose attention agrees in all rows of a step.

        Their differences are relative to the norm of the whole row, whose noise is known.
        """
        point = (HEADS, layer)
        kept, reference = step.evidence.values.get(point), values.get(point)
        if kept is None or reference is None or step.row >= len(kept):
            return ()
        ours = kept[step.row].index_select(0, step.kept.to(kept.device)).flatten(1)
        theirs = _rows(reference).index_select(0, step.positions.to(reference.device)).flatten(1)
        if ours.shape != theirs.shape or ours.shape[-1] % n_heads:
            return ()
        scale, limit = theirs.norm(dim=-1), self.limits.get(point, 0.0)
        pairs = zip(ours.chunk(n_heads, -1), theirs.chunk(n_heads, -1), strict=True)
        differences = [float(relative(one, other, scale).max()) for one, other in pairs]
        return tuple(head for head, worst in enumerate(differences) if worst <= limit)

    def agreement_inside(
        self, step: AuditedStep, values: Mapping[Point, Tensor], layers_up_to: int
    ) -> tuple[int, int]:
        """Return how many queries, keys and values of the layers up to one agree, of how many."""

        def counts(point: Point) -> bool:
            return point[0] in _HEADWISE and point[1] is not None and point[1] <= layers_up_to

        agree = total = 0
        for point, differences, _ in self.differences(step, values, counts):
            total += 1
            agree += float(differences.max()) <= self.limits.get(point, 0.0)
        return agree, total

    def _has_own_positions(self, step: AuditedStep) -> bool:
        """Whether rotated rows can be compared: not if padding moves all positions."""
        return not self.sequence.is_padded

    def first(self, values: Mapping[Point, Tensor]) -> Divergence | None:
        """Return the first divergence: the first step, and in it the first quantity."""
        for step in self.steps:
            found: dict[Point, Divergence] = {}
            known = set[int | None]()  # layers whose hidden states are compared
            for point, differences, positions in self.differences(step, values):
                known |= {point[1]} if point[0] == HIDDEN else set()
                limit = self.limits.get(point, 0.0)
                beyond = (~(differences <= limit)).nonzero().flatten()
                if len(beyond):
                    worst = int(beyond[0])
                    found[point] = Divergence(
                        step.evidence.step,
                        point,
                        int(positions[worst]),
                        float(differences.max()),
                        limit,
                    )
            robust = next((point for point in found if point[0] in _ROBUST), None)
            if robust is not None:
                # What a program lays out in its own way counts only where it shows in the layer.
                within = {robust[1]}
                if robust[0] == LOGITS and known:  # in a layer after those
                    within |= {p[1] for p in found if p[1] not in known}
                inside = (p for p in found if p[1] in within and p[0] != LOGITS)
                return found[next(inside, robust)]
        return None

    def quantities(self, values: Mapping[Point, Tensor]) -> tuple[str, ...]:
        """Return the names of what is compared in any step, in forward order."""
        steps = self.steps[:2]
        points = {point for step in steps for point, *_ in self.differences(step, values)}
        return tuple(dict.fromkeys(point[0] for point in sorted(points, key=forward_order)))

    def step_of(self, divergence: Divergence) -> AuditedStep:
        """Return the step of a divergence."""
        return next(s for s in self.steps if s.evidence.step == divergence.step)

    def agreement(
        self, values: Mapping[Point, Tensor], steps: Sequence[AuditedStep], layers_up_to: int | None
    ) -> tuple[float, int, int]:
        """Return the largest difference, and how many points agree, of how many.

        With `layers_up_to` only points up to that layer count. Values that a program lays out in
        its own way do not count.
        """

        def counts(point: Point) -> bool:
            name, layer = point
            if name in _HEADWISE or layers_up_to is None:
                return name not in _HEADWISE
            return name != LOGITS and (layer is None or layer <= layers_up_to)

        worst, agree, total = 0.0, 0, 0
        for step in steps:
            for point, differences, _ in self.differences(step, values, counts):
                largest = float(differences.max())
                worst, total = max(worst, largest), total + 1
                agree += largest <= self.limits.get(point, 0.0)
        return worst, agree, total


def forward_order(point: Point) -> tuple[int, int]:
    """Sort key: the encoder's output, the embedding, the quantities of each layer, the logits."""
    name, layer = point
    if name == ENCODER:
        return -2, 0
    if name == EMBEDDING:
        return -1, 0
    if name == LOGITS:
        return 1 << 30, 0
    return (-1 if layer is None else layer), QUANTITIES.index(name)


def dtype_of(steps: Sequence[AuditedStep]) -> torch.dtype:
    """Return the dtype of the program's hidden states."""
    for step in steps:
        if step.evidence.dtype is not None:
            return step.evidence.dtype
        for point, tensor in step.evidence.values.items():
            if point[0] in (HIDDEN, EMBEDDING):
                return tensor.dtype
    return torch.float32


def describe(divergence: Divergence) -> dict[str, Any]:
    """Return a divergence as the data of an event."""
    name, layer = divergence.point
    is_finite = math.isfinite(divergence.difference)
    return {
        "nonfinite": not is_finite,
        "step": divergence.step,
        "quantity": name,
        "layer": layer,
        "row": divergence.row,
        "difference": divergence.difference if is_finite else 1e30,
        "limit": divergence.limit,
    }
