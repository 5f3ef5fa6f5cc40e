"""How much an optimizer step changed the weights: change over weights, by group, from a sample."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from flexinspect_hooks.training.gradstats import tensor_norms
from flexinspect_hooks.training.parameters import NamedParameters

MAX_SAMPLE = 1 << 16
"""Values of a parameter that are copied at most: rows, evenly spread."""


class UpdateMeter:
    """Copies samples of the weights before a step, and compares them after it.

    The copies are made once and filled again: new memory costs more than copying.
    """

    def __init__(
        self, named: NamedParameters, groups: Sequence[str], group_of: Sequence[int]
    ) -> None:
        self._named = named
        self._samples: list[Tensor] = []
        self._sizes: list[float] = []
        self._n_groups, self._group_of = len(groups), group_of
        self._copies: list[Tensor] | None = None
        self.has_copies = False

    @torch.no_grad()
    def copy_weights(self) -> None:
        """Copy the samples."""
        # Not kept from step to step: a parameter may get another memory, and the old one is freed.
        self._samples = [_sample_rows(one.parameter) for one in self._named]
        if self._copies is None or not all(map(_are_alike, self._copies, self._samples)):
            self._sizes = [
                one.parameter.numel() / max(sample.numel(), 1)
                for one, sample in zip(self._named, self._samples, strict=True)
            ]
            self._copies = [torch.empty_like(one) for one in self._samples]
        _foreach_by_kind(torch._foreach_copy_, self._copies, self._samples)
        self.has_copies = True

    @torch.no_grad()
    def measure_change(self) -> tuple[float, ...]:
        """Return the ratio of each group, NaN for one without weights; empty without `before`."""
        if not self.has_copies or self._copies is None:
            return ()
        self.has_copies = False
        weights = tensor_norms(self._copies)
        _foreach_by_kind(torch._foreach_sub_, self._copies, self._samples)
        self._samples = []
        return self._ratios(tensor_norms(self._copies), weights)

    def _ratios(self, changes: Sequence[float], weights: Sequence[float]) -> tuple[float, ...]:
        squares = [[0.0, 0.0] for _ in range(self._n_groups)]
        for group, size, change, weight in zip(
            self._group_of, self._sizes, changes, weights, strict=True
        ):
            squares[group][0] += size * change * change
            squares[group][1] += size * weight * weight
        return tuple(math.sqrt(c / w) if w else math.nan for c, w in squares)

    def release(self) -> None:
        """Let go of the copies."""
        self._samples, self._copies, self.has_copies = [], None, False


def _are_alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device


def _sample_rows(parameter: Tensor) -> Tensor:
    """Return a view of evenly spread rows of a parameter, at most `SAMPLE` values together."""
    values = parameter.detach()
    if values.is_complex():
        values = torch.view_as_real(values)
    if values.numel() <= MAX_SAMPLE:
        return values
    # In the order of the memory every dense parameter can be seen as rows.
    strides = values.stride()
    values = values.permute(sorted(range(values.dim()), key=lambda at: -strides[at]))
    if not values.is_contiguous():
        return values[:: -(-values.numel() // MAX_SAMPLE)]
    width = values.shape[-1] if values.shape[-1] <= MAX_SAMPLE else 1
    rows = values.view(-1, width)
    return rows[:: -(-len(rows) // (MAX_SAMPLE // width))]


def _foreach_by_kind(call: object, first: Sequence[Tensor], second: Sequence[Tensor]) -> None:
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, one in enumerate(first):
        kinds.setdefault((one.device, one.dtype), []).append(index)
    for where in kinds.values():
        call([first[i] for i in where], [second[i] for i in where])  # type: ignore[operator]
