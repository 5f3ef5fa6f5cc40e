"""Where the rows and columns of a weight are now that it had when it was made.

Of a large weight only a block was kept. Each row of it is looked for among all rows of the weight
as it is now, at the columns of the block, and each column likewise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from msgspec import Struct
from torch import Tensor

_CLOSE = 0.35
"""Of the norm: how far a row may be from what it was, as after quantisation to a few bits."""
_SAME = 0.1
"""Of the norm: rows that are nearer to what was in their place are not looked for elsewhere."""
_CLEAR = 2.0
"""How many times farther all other rows must be."""
_MIN_WIDTH, _MIN_FOUND, _MIN_COMMON = 8, 0.9, 4
_N_TRIED = 4
"""Rows that are looked for first: mostly the values are others, and no order is wanted."""
_EMPTY = 1e-3
"""Rows with less than this part of the mean norm say nothing."""


class Seen(Struct, frozen=True):
    """A weight (outputs, inputs): a block of what it was, and what it is now around the block.

    `at_inputs` has all outputs at the block's inputs, `at_outputs` the block's outputs with all
    inputs, or is None if that is not known. `kind` is empty, or the class of the program's module
    that is in the weight's place.
    """

    name: str
    before: Tensor
    outputs: Tensor
    inputs: Tensor
    at_inputs: Tensor
    at_outputs: Tensor | None
    kind: str = ""

    def now(self) -> Tensor:
        """Return the block as it is now."""
        return self.at_inputs[self.outputs]

    def order_of_outputs(self) -> Order | None:
        """Return where the outputs are now; None if it is not certain."""
        return find_order(self.before, self.at_inputs, self.outputs)

    def order_of_inputs(self) -> Order | None:
        """Return where the inputs are now; None if it is not certain."""
        if self.at_outputs is None:
            return None
        return find_order(self.before.T, self.at_outputs.T, self.inputs)


class Order(Struct, frozen=True):
    """The places of `n` rows: row `old[i]` of the weight as it was made is row `new[i]` now."""

    old: Tensor
    new: Tensor
    n: int

    @property
    def is_same(self) -> bool:
        """Whether each row is where it was."""
        return torch.equal(self.old, self.new)

    def sources(self) -> list[int] | None:
        """Return for each row of now which one it was; None if not all are known."""
        if len(self.old) != self.n or not torch.equal(self.new.sort().values, torch.arange(self.n)):
            return None
        return [int(one) for one in self.old[self.new.argsort()]]

    def agrees(self, other: Order) -> bool | None:
        """Return whether another order has the same rows in the same places; None if unknown."""
        mine = dict(zip(self.old.tolist(), self.new.tolist(), strict=True))
        common = [
            (mine[old], new)
            for old, new in zip(other.old.tolist(), other.new.tolist(), strict=True)
            if old in mine
        ]
        if len(common) < min(_MIN_COMMON, self.n, other.n):
            return None
        return all(one == two for one, two in common)

    def within(self, part: Tensor) -> Order:
        """Return the order of a part, whose rows it counts; -1 for what is elsewhere now."""
        at = torch.full((self.n,), -1)
        at[part] = torch.arange(len(part))
        is_in = torch.isin(self.old, part)
        return Order(at[self.old[is_in]], at[self.new[is_in]], len(part))

    def of_blocks(self, size: int) -> Order | None:
        """Return the order of blocks of rows, such as heads; None if a block is torn apart."""
        found: dict[int, set[int]] = {}
        for old, new in zip(self.old.tolist(), self.new.tolist(), strict=True):
            found.setdefault(old // size, set()).add(new // size)
        if any(len(one) > 1 for one in found.values()):
            return None
        new = [one.pop() for one in found.values()]
        return Order(torch.tensor(list(found)), torch.tensor(new), self.n // size)


def same_order(n: int) -> Order:
    """Return the order of a weight that did not change."""
    return Order(torch.arange(n), torch.arange(n), n)


def find_order(before: Tensor, now: Tensor, places: Sequence[int] | Tensor) -> Order | None:
    """Return where rows are now that a weight had at some places.

    `before` is (places, width), `now` is (all rows, width). None if a row may be several, or more
    than a few are gone.
    """
    if before.dim() != 2 or before.shape[1] < _MIN_WIDTH or not len(before):
        return None
    norms, places = before.norm(dim=1), torch.as_tensor(places)
    is_full = norms > _EMPTY * norms.mean()
    if not is_full.any() or not bool(now.isfinite().all()):
        return None
    moved = (now[places] - before).norm(dim=1)
    if bool((moved[is_full] < _SAME * norms[is_full]).all()):
        return Order(places, places, len(now))
    before, now = before.double(), now.double()
    full = torch.where(is_full)[0]
    tried = full[:: max(1, len(full) // _N_TRIED)]
    if not _nearest(before[tried], now)[0].any():
        return None
    is_found, new = _nearest(before[full], now)
    new = new[is_found]
    if is_found.float().mean() < _MIN_FOUND or len(set(new.tolist())) < len(new):
        return None
    return Order(places[is_full][is_found], new, len(now))


def _nearest(rows: Tensor, now: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each row whether one of `now` is surely it, and the place of that one."""
    gaps = torch.cdist(rows, now) / rows.norm(dim=1, keepdim=True)
    nearest = gaps.topk(min(2, len(now)), dim=1, largest=False)
    best, other = nearest.values[:, 0], nearest.values[:, -1]
    is_found = (best < _CLOSE) & ((_CLEAR * best < other) | (len(now) == 1))
    return is_found, nearest.indices[:, 0]
