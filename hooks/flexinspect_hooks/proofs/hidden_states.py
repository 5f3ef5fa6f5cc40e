"""The hidden states of a run at chosen points of a model, and how far they move in other runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from flexinspect.core.errors import UsageError
from flexinspect_hooks.capture.layer_rows import (
    ReduceRows,
    capture_points,
    capture_rows,
    clone_rows,
)
from flexinspect_hooks.proofs.proof_subject import Subject

NOISE_FACTOR = 4
"""A row has moved if it differs this many times more than in a repetition of the same run."""

RowChanges = npt.NDArray[np.float32]
"""The largest change of a value in each row, (points, batch, rows); 0 is bit-equal."""


@contextmanager
def patch_rows(module: nn.Module, rows: Sequence[int], states: Tensor) -> Iterator[None]:
    """Replace some input rows of a module, in batch row 0, by those of `states` (B, n, D)."""
    n_passed = 0

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal n_passed
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        start, n_passed = n_passed, n_passed + hidden.shape[1]
        here = [row for row in rows if start <= row < n_passed]
        if not here:
            return None
        hidden = hidden.clone()
        hidden[0, [row - start for row in here]] = states[0, here].to(hidden.dtype)
        if args:
            return (hidden, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": hidden}

    with module.register_forward_pre_hook(before, with_kwargs=True):
        yield


class HiddenStates:
    """The rows of a subject's run at some points; runs on other ids are compared with them."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.points = capture_points(subject.model)
        self.reference = self._run(subject.ids, clone_rows)
        """Per point (batch, rows, width), on the model's device."""
        self.noise = self._largest_change()
        """How far repetitions of the run differ at each point, (points,)."""
        for _ in range(2 if self.noise.any() else 0):
            self.noise = np.maximum(self.noise, self._largest_change())

    def compare(self, ids: Tensor) -> RowChanges:
        """Run on other ids, and return how far each row is from the reference."""

        def distance(index: int, start: int, rows: Tensor) -> Tensor:
            before = self.reference[index][:, start : start + rows.shape[1]]
            if before.shape != rows.shape:
                raise UsageError(
                    "Two runs on the same number of ids gave states of different shapes: "
                    f"{tuple(before.shape)} and {tuple(rows.shape)}.",
                    hint="A run must not pass anything, such as a cache, on to the next one.",
                )
            return row_distance(before, rows)

        return torch.stack(self._run(ids, distance)).float().cpu().numpy()

    def above_noise(self, moved: RowChanges) -> RowChanges:
        """Changes (points, batch, rows) with those within the noise set to 0."""
        is_real = moved > NOISE_FACTOR * self.noise[:, None, None]
        return np.where(is_real, moved, 0).astype(np.float32)

    def largest_value(self, point: int) -> float:
        """The largest finite absolute value of the reference at a point."""
        return float(self.reference[point].float().abs().nan_to_num(posinf=0).max())

    def _largest_change(self) -> RowChanges:
        moved = np.where(self.subject.real, self.compare(self.subject.ids), 0)
        largest: RowChanges = moved.max(axis=(1, 2))
        return largest

    def _run(self, ids: Tensor, reduce: ReduceRows) -> list[Tensor]:
        n_rows = self.subject.n_rows
        rows = capture_rows(self.points, lambda: self.subject.forward(ids), n_rows, reduce)
        n_passed = [one.shape[1] for one in rows]
        if min(n_passed) < n_rows:
            layer = self.points[n_passed.index(min(n_passed))].layer
            name = "the input of the layers" if layer is None else f"layer {layer}"
            raise UsageError(
                f"The run had {min(n_passed)} rows in {name}, but {n_rows} ids.",
                hint="The run must process all ids that it receives, with this model, without "
                "torch.compile around its layers.",
            )
        return rows


def row_distance(one: Tensor, other: Tensor) -> Tensor:
    """The largest difference in each row (batch, rows); 0 only if all values are equal.

    NaN equals NaN, and Inf equals Inf of the same sign; NaN and a number differ by infinity.
    """
    dtype = torch.promote_types(one.dtype, torch.float32)
    same = (one == other) | (one.isnan() & other.isnan())
    distance = (one.to(dtype) - other.to(dtype)).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    return distance.masked_fill(same, 0).amax(-1)
