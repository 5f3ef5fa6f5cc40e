"""Says in words how two tables of numbers differ: a factor, an order, a rounding, which rows.

A difference that no hypothesis reproduces has a shape all the same. A row that is half as large, a
head that has the place of another one, or values that are those of bfloat16 name the mechanism
without knowing the code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from msgspec import Struct, field
from msgspec.structs import replace
from torch import Tensor

MIN_ROWS = 4
"""Rows that a pattern over rows needs: fewer fit too many of them."""
_MAX_LISTED = 6
IS_LOW_RANK = "has a difference of rank"
"""Start of the description of a difference like that of an adapter."""
IS_NOISE = "differs by about"
"""Start of the description of a difference without a pattern."""
_MAX_SIZE = 1 << 22
"""Elements of a table that are looked at: larger ones take too long."""


class ComparedTensors(Struct, frozen=True):
    """Two tables (rows, values) in float64, and the relative difference that rounding explains.

    `positions` are the rows' places in the text. The values are those of `heads` heads, one after
    another, if it is not 0. `parts` are tables of the same shape that `ours` may be a sum of.
    """

    ours: Tensor
    theirs: Tensor
    limit: float
    positions: Sequence[int]
    heads: int = 0
    parts: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def distance(self) -> float:
        """The difference relative to the norm of the right table."""
        return _ratio(self.ours - self.theirs, self.theirs)

    def fits(self, candidate: Tensor) -> bool:
        """Whether a candidate explains all but rounding, or 99 % of the difference."""
        left = _ratio(self.ours - candidate, self.theirs)
        return left <= max(16 * self.limit, self.distance / 100)

    def wrong_rows(self) -> Tensor:
        """Return the indices of the rows that differ by more than rounding."""
        scale = self.theirs.norm(dim=-1).clamp_min(1e-30)
        is_wrong: Tensor = (self.ours - self.theirs).norm(dim=-1) / scale > self.limit
        return is_wrong.nonzero().flatten()

    def of_rows(self, index: Tensor) -> ComparedTensors:
        """Return some of the rows."""
        parts = {name: one[index] for name, one in self.parts.items()}
        places = [self.positions[n] for n in index.tolist()]
        return replace(
            self, ours=self.ours[index], theirs=self.theirs[index], positions=places, parts=parts
        )

    def by_head(self, tensor: Tensor) -> Tensor:
        """Return (rows, heads, size)."""
        return split_last(tensor, self.heads)


def split_last(tensor: Tensor, n: int) -> Tensor:
    """Return a table whose last dimension is split into `n` parts: (…, n, size)."""
    return tensor.reshape(*tensor.shape[:-1], n, tensor.shape[-1] // n)


def _ratio(difference: Tensor, scale: Tensor) -> float:
    return float(difference.norm() / scale.norm().clamp_min(1e-30))


def describe_difference(compared: ComparedTensors) -> list[str]:
    """Return what is known about a difference, as ends of a sentence about the wrong table.

    The first one says where it is if it is not everywhere, the other one how it differs there.
    """
    ours, theirs = compared.ours, compared.theirs
    if ours.shape != theirs.shape or ours.numel() > _MAX_SIZE or not bool(ours.isfinite().all()):
        return []
    rows = compared.wrong_rows()
    if not len(rows):
        return []
    part = compared.of_rows(rows)
    found = [_rows_text(compared, rows), _values_text(part)]
    if text := _row_order(part, compared):
        return [*filter(None, found[:1]), text]
    for narrow, tests in _narrowed(part):
        for test in tests:
            if text := test(narrow):
                return [*filter(None, found), text]
    return [one for one in found if one]


_Tests = Sequence[Callable[[ComparedTensors], str]]


def _narrowed(part: ComparedTensors) -> Iterator[tuple[ComparedTensors, _Tests]]:
    """Yield only the wrong channels, the whole table, and only its wrong heads, with tests."""
    channels = _wrong_channels(part)
    if channels:
        index = torch.tensor(channels)
        parts = {name: one[:, index] for name, one in part.parts.items()}
        ours, theirs = part.ours[:, index], part.theirs[:, index]
        yield replace(part, ours=ours, theirs=theirs, parts=parts, heads=0), _TESTS
    yield part, _TESTS
    heads = _wrong_heads(part)
    if heads and len(heads) < part.heads:
        # Without the order of heads, whose numbers would be others here.
        yield _of_heads(part, heads), [test for test in _TESTS if test is not _head_order]


# -- where -----------------------------------------------------------------------------------------


def _rows_text(compared: ComparedTensors, rows: Tensor) -> str:
    n = len(set(compared.positions))
    places = list(dict.fromkeys(compared.positions[k] for k in rows.tolist()))
    if len(places) == n:
        return ""
    if n - len(places) == 1 and compared.positions[0] == 0 and 0 not in places:
        return ""  # the first row has nothing before it, so that much cannot change it
    return f"differs only at {positions_text(places)}"


def positions_text(places: Sequence[int]) -> str:
    """Return positions as a span, or as a list."""
    first, last = places[0], places[-1]
    if len(places) == 1:
        return f"position {first}"
    if list(places) == list(range(first, last + 1)):
        return f"the positions {first} to {last}"
    listed = ", ".join(str(one) for one in places[:_MAX_LISTED])
    more = f" and {len(places) - _MAX_LISTED} more" if len(places) > _MAX_LISTED else ""
    return f"the positions {listed}{more}"


def _wrong_heads(compared: ComparedTensors) -> list[int]:
    if compared.heads < 2 or compared.ours.shape[-1] % compared.heads:
        return []
    gap = compared.by_head(compared.ours - compared.theirs).norm(dim=-1)
    scale = compared.theirs.norm(dim=-1, keepdim=True).clamp_min(1e-30)
    worst = (gap / scale).amax(0)
    return [int(head) for head in (worst > compared.limit).nonzero().flatten()]


def _of_heads(compared: ComparedTensors, heads: Sequence[int]) -> ComparedTensors:
    def some(tensor: Tensor) -> Tensor:
        return compared.by_head(tensor)[:, list(heads)].flatten(1)

    parts = {name: some(one) for name, one in compared.parts.items()}
    ours, theirs = some(compared.ours), some(compared.theirs)
    return replace(compared, ours=ours, theirs=theirs, parts=parts, heads=len(heads))


def _values_text(compared: ComparedTensors) -> str:
    """Say which heads or channels differ, if not all do."""
    heads = _wrong_heads(compared)
    if heads and len(heads) < compared.heads:
        listed = ", ".join(map(str, heads[:12]))
        which = f"head {listed}" if len(heads) == 1 else f"heads {listed}"
        inside = _wrong_channels(compared)
        text = f"differs only in {which} of {compared.heads}"
        if inside and len(inside) < len(heads) * compared.ours.shape[-1] // compared.heads:
            return f"{text}, in {_channels_text(inside, compared.ours.shape[-1])}"
        return text
    wrong, size = _wrong_channels(compared), compared.ours.shape[-1]
    if not wrong:
        return ""
    return f"differs only in {_channels_text(wrong, size)}"


def _channels_text(wrong: Sequence[int], size: int) -> str:
    if len(wrong) == 1:
        return f"channel {wrong[0]} of {size}"
    if list(wrong) == list(range(wrong[0], wrong[-1] + 1)):
        return f"the channels {wrong[0]} to {wrong[-1]} of {size}"
    return f"{len(wrong)} of {size} channels"


def _wrong_channels(compared: ComparedTensors) -> list[int]:
    """Return the channels that differ, empty if most do."""
    size = compared.ours.shape[-1]
    gap = (compared.ours - compared.theirs).abs().amax(0)
    level = compared.limit * float(compared.theirs.norm(dim=-1).mean()) / size**0.5
    wrong: list[int] = (gap > level).nonzero().flatten().tolist()
    return wrong if len(wrong) <= 0.75 * size else []


# -- how -------------------------------------------------------------------------------------------


def _number(value: float) -> str:
    return f"{value:.3g}"


def _zero(compared: ComparedTensors) -> str:
    is_zero = float(compared.ours.norm()) <= compared.limit * float(compared.theirs.norm())
    return "is zero there" if is_zero else ""


def _factor(compared: ComparedTensors) -> str:
    square = compared.theirs.square().sum().clamp_min(1e-300)
    factor = float((compared.ours * compared.theirs).sum() / square)
    if not compared.fits(factor * compared.theirs):
        return ""
    if abs(factor + 1) < 1e-3:
        return "has the opposite sign"
    return f"is {_number(factor)} times the right one"


def _added_vector(compared: ComparedTensors) -> str:
    gap = compared.ours - compared.theirs
    if len(gap) < MIN_ROWS or not compared.fits(compared.theirs + gap.mean(0)):
        return ""
    share = _number(float(gap.mean(0).norm() / compared.theirs.norm(dim=-1).mean()))
    return f"has the same vector added in each row (its norm is {share} of a row's norm)"


def _mixture(compared: ComparedTensors) -> str:
    """Say of which multiples of its parts the table is a sum."""
    names = list(compared.parts)
    if not names or compared.ours.numel() < 8 * len(names):
        return ""
    columns = torch.stack([compared.parts[name].flatten() for name in names], 1)
    factors = torch.linalg.lstsq(columns, compared.ours.flatten()[:, None]).solution[:, 0]
    rounded = torch.where((factors - factors.round()).abs() < 2e-3, factors.round(), factors)
    if not compared.fits((columns @ rounded).view_as(compared.ours)):
        return ""
    pairs = [(float(one), name) for one, name in zip(rounded, names, strict=True) if one]
    terms = [f"{_number(one)} × {name}" for one, name in pairs]
    return f"is {' + '.join(terms)}"


def _row_factor(compared: ComparedTensors) -> str:
    ours, theirs = compared.ours, compared.theirs
    factors = (ours * theirs).sum(-1) / theirs.square().sum(-1).clamp_min(1e-300)
    if len(ours) < 2 or not compared.fits(factors[:, None] * theirs):
        return ""
    low, high = _number(float(factors.min())), _number(float(factors.max()))
    return f"has each row multiplied by a factor of its own ({low} to {high})"


def _channel_factor(compared: ComparedTensors) -> str:
    ours, theirs = compared.ours, compared.theirs
    if len(ours) < MIN_ROWS:
        return ""
    factors = (ours * theirs).sum(0) / theirs.square().sum(0).clamp_min(1e-300)
    if not compared.fits(factors * theirs):
        return ""
    low, high = _number(float(factors.min())), _number(float(factors.max()))
    text = f"has each channel multiplied by a factor of its own ({low} to {high}), which is the "
    return text + "same in all rows"


_MAX_DISTANCE = 0.1
"""Rows further apart are not equal, however large the limit of their dtype is."""


def _nearest(ours: Tensor, theirs: Tensor, limit: float) -> list[int] | None:
    """Return for each row of `ours` the equal row of `theirs`, None if some row has none."""
    distance = torch.cdist(ours, theirs) / theirs.norm(dim=-1).clamp_min(1e-30)
    best = distance.min(-1)
    close = min(16 * limit, max(limit, _MAX_DISTANCE))
    return best.indices.tolist() if bool((best.values <= close).all()) else None


def _row_order(part: ComparedTensors, whole: ComparedTensors) -> str:
    """Say which rows of the whole table the wrong rows hold."""
    if len(whole.ours) < 2:
        return ""
    found = _nearest(part.ours, whole.theirs, part.limit)
    if found is None:
        return ""
    sources = [whole.positions[row] for row in found]
    pairs = list(zip(part.positions, sources, strict=True))
    if any(place == source for place, source in pairs):
        return ""  # a wrong row that is nearest to the right one
    shifts = {source - place for place, source in pairs}
    if len(shifts) == 1:
        return f"has in each row the values of the row {_shift_text(shifts.pop())}"
    if len(set(sources)) == 1:
        return f"has in each row the values of position {sources[0]}"
    listed = ", ".join(f"{place} has those of {source}" for place, source in pairs[:_MAX_LISTED])
    more = f" and {len(pairs) - _MAX_LISTED} more" if len(pairs) > _MAX_LISTED else ""
    return f"has the values of other rows: {listed}{more}"


def _shift_text(shift: int) -> str:
    return f"{abs(shift)} {'after' if shift > 0 else 'before'} it"


def _head_order(compared: ComparedTensors) -> str:
    if compared.heads < 2 or compared.ours.shape[-1] % compared.heads:
        return ""
    ours = compared.by_head(compared.ours).transpose(0, 1).flatten(1)
    theirs = compared.by_head(compared.theirs).transpose(0, 1).flatten(1)
    found = _nearest(ours, theirs, compared.limit)
    if found is None or found == list(range(len(found))):
        return ""
    if found == list(range(len(found)))[::-1]:
        return "has its heads in reverse order"
    pairs = [f"head {at} has that of head {s}" for at, s in enumerate(found) if at != s]
    return f"has heads in the places of others: {', '.join(pairs[:_MAX_LISTED])}"


def _channel_order(compared: ComparedTensors) -> str:
    """Say by which permutation the channels are those of the right table, in all rows."""
    ours, theirs = compared.ours, compared.theirs
    if len(ours) < 2 or ours.shape[-1] > 1 << 12:
        return ""
    sizes = {ours.shape[-1]}
    if compared.heads > 1 and ours.shape[-1] % compared.heads == 0:
        sizes.add(ours.shape[-1] // compared.heads)
    for size in sorted(sizes):
        for text, order in _channel_orders(size):
            moved = split_last(theirs, theirs.shape[-1] // size)[..., order].flatten(1)
            if compared.fits(moved):
                of = "its channels" if size == ours.shape[-1] else "the channels of each head"
                return f"has {of} in another order: {text}"
    return ""


def _channel_orders(size: int) -> list[tuple[str, Tensor]]:
    index = torch.arange(size)
    orders = [("reversed", index.flip(0))]
    if size % 2 == 0:
        halves = index.view(2, -1)
        orders += [
            ("its halves exchanged", halves.flip(0).flatten()),
            ("even ones first, then odd ones", torch.cat((index[::2], index[1::2]))),
            ("the two halves interleaved", halves.T.flatten()),
        ]
    return [*orders, *((f"rolled by {k}", index.roll(k)) for k in (1, -1, 2, -2))]


def _signs(compared: ComparedTensors) -> str:
    ours, theirs = compared.ours, compared.theirs
    if not compared.fits(theirs * torch.sign(ours * theirs)):
        return ""
    n = int((torch.sign(ours * theirs) < 0).any(0).sum())
    return f"has the opposite sign in {n} of its channels" if n else ""


def _clipped(compared: ComparedTensors) -> str:
    low, high = float(compared.ours.min()), float(compared.ours.max())
    n = int(((compared.ours == low) | (compared.ours == high)).sum())
    if n < 3 or not compared.fits(compared.theirs.clamp(low, high)):
        return ""
    return f"is cut off at {_number(low)} and {_number(high)}"


def _rounded(compared: ComparedTensors) -> str:
    """Say of which dtype the values are, or the rounding by which they differ."""
    ours, theirs = compared.ours, compared.theirs
    if grid := _grid(compared):
        return grid
    if compared.distance > 0.05:
        return ""
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(ours.to(dtype).to(ours), ours):
            name = str(dtype).removeprefix("torch.")
            return f"has values of {name} only, which differ by its rounding"
    share = ((ours - theirs).abs() / theirs.abs().clamp_min(1e-30)).median()
    for name, unit in (("bfloat16", 2.0**-9), ("float16", 2.0**-12)):
        if unit / 6 < float(share) < 2.5 * unit:
            return (
                f"{IS_NOISE} {float(share):.1g} of each value, in no order: as if an "
                f"operation before it ran in {name}"
            )
    return ""


_MAX_STEPS = 127


def _grid(compared: ComparedTensors) -> str:
    """Say if all values are multiples of a step, as of a table that is kept in int8 or int4."""
    ours = compared.ours
    for what, table in _groups(compared):
        step = _step_of(table)
        if step is None:
            continue
        top = (table.abs().amax(-1, keepdim=True) / step).round()
        bits = 4 if int(top.max()) <= 7 else 8
        text = f"has only multiples of a step, as values in int{bits}, with {what}"
        largest = int((table.abs() / step).round().max())
        n = int(((table.abs() / step).round() == largest).sum())
        if n > 2 * len(table) and largest in (7, 127, 128):
            text += f"; {n} of {ours.numel()} values are cut off at {largest} steps"
        return text
    return ""


def is_quantized(compared: ComparedTensors) -> bool:
    """Whether the values are the right ones, rounded to the nearest multiple of a step."""
    right = replace(compared, ours=compared.theirs)
    for (_, table), (_, wanted) in zip(_groups(compared), _groups(right), strict=True):
        step = _step_of(table)
        if step is not None:
            return bool(((table - wanted).abs() <= _HALF_STEP * step).all())
    return False


_HALF_STEP = 0.51
"""The largest rounding in steps, with some room for the rounding of floats."""


def _groups(compared: ComparedTensors) -> list[tuple[str, Tensor]]:
    """Return the values in groups (groups, values) that may have a step in common."""
    ours, heads = compared.ours, compared.heads
    groups = []
    if heads > 1 and ours.shape[-1] % heads == 0:
        table = split_last(ours, heads)
        if len(ours) > 1:
            groups.append(("one step per head for all rows", table.transpose(0, 1).flatten(1)))
        groups.append(("a step per row and head", table.flatten(0, 1)))
    if len(ours) > 1:
        groups.append(("one step for all values", ours.flatten()[None]))
        groups.append(("one step per channel", ours.T))
    return [*groups, ("a step per row", ours)]


def _step_of(groups: Tensor) -> Tensor | None:
    """Return the step (groups, 1) of which all values are multiples, None if there is none."""
    if groups.shape[-1] < 8:
        return None
    values = groups.abs().sort(-1).values
    gaps = values.diff(dim=-1, prepend=torch.zeros_like(values[:, :1]))
    top = values[:, -1:].clamp_min(1e-30)
    smallest = torch.where(gaps > 1e-4 * top, gaps, torch.inf).amin(-1, keepdim=True)
    if not bool(smallest.isfinite().all()):
        return None
    for n_steps in (127, 7):
        step = top / n_steps
        if float((groups / step - (groups / step).round()).abs().amax()) < 0.02:
            return step
    # The smallest gap may be some steps; the largest value then is no multiple of it, mostly.
    for parts in (1, 2, 3):
        step = smallest / parts
        count = (top / step).round()
        step = top / count.clamp_min(1)
        off = (groups / step - (groups / step).round()).abs().amax()
        if float(off) < 0.02 and float(count.max()) <= _MAX_STEPS + 1 and float(count.min()) >= 3:
            return step
    return None


def _low_rank(compared: ComparedTensors) -> str:
    gap = compared.ours - compared.theirs
    smallest = min(gap.shape)
    if smallest < 6:
        return ""
    values = torch.linalg.svdvals(gap)
    least = max(1e-3, 16 * compared.limit / max(compared.distance, 1e-30))
    rank = int((values > least * values[0]).sum())
    if rank > smallest // 3:
        return ""
    if rank == 1:
        return "has in each row a multiple of one vector added, the same vector in all rows"
    return f"{IS_LOW_RANK} {rank}, as an adapter of that rank gives"


_TESTS: tuple[Callable[[ComparedTensors], str], ...] = (
    _zero,
    _factor,
    _added_vector,
    _mixture,
    _head_order,
    _channel_order,
    _signs,
    _clipped,
    _rounded,
    _row_factor,
    _channel_factor,
    _low_rank,
)
