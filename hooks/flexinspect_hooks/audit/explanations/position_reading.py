"""Reads from rotated queries or keys at which positions they were rotated, and with which base.

A rotary embedding turns each pair of channels by an angle. The right query before rotation is
known, so the angles by which the program turned it can be measured, and with them the positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from msgspec import Struct
from torch import Tensor

from flexinspect_hooks.audit.evidence.difference_shape import positions_text

_TOLERANCE = 2e-3
_MAX_POSITION = 4096
_MAX_ROWS = 512
_MAX_GROUPS = 4


class RotatedRows(Struct, frozen=True):
    """Rows (rows, heads, size) of the program, and those before rotation, in float64.

    `frequencies` (size / 2,) are the angles per position; `positions` are those of the text.
    """

    ours: Tensor
    plain: Tensor
    frequencies: Tensor
    positions: tuple[int, ...]


def read_positions(rows: RotatedRows) -> str:
    """Return at which positions or with which frequencies rows were rotated, "" if by no angle."""
    size = rows.plain.shape[-1]
    if rows.frequencies.shape[0] * 2 != size or len(rows.positions) > _MAX_ROWS:
        return ""
    angles = _angles(rows.ours, rows.plain)
    if angles is None:
        return _pairing(rows)
    places = torch.tensor(rows.positions, dtype=torch.float64)
    found = _match(angles, rows.frequencies)
    if found is not None:
        return _positions_sentence(places, found)
    return _frequencies_sentence(angles, places, rows.frequencies)


def _angles(ours: Tensor, plain: Tensor) -> Tensor | None:
    """Return the angle (rows, pairs) by which pairs of channels were turned, the same in all heads.

    None if the pairs were not turned only. The first half of the channels is paired with the other.
    """
    half = plain.shape[-1] // 2
    one = torch.complex(ours[..., :half], ours[..., half:])
    other = torch.complex(plain[..., :half], plain[..., half:])
    turned = (one * other.conj()).sum(1)
    angle = turned.angle()
    unit = torch.polar(torch.ones_like(angle), angle)
    gap = (one - other * unit[:, None]).abs().square().sum()
    scale = other.abs().square().sum().clamp_min(1e-30)
    return angle if float((gap / scale).sqrt()) < _TOLERANCE else None


def _pairing(rows: RotatedRows) -> str:
    """Say if channels are paired in another way, or only some of them are turned."""
    size = rows.plain.shape[-1]
    half = size // 2
    scale = rows.plain.norm().clamp_min(1e-30)
    same = ((rows.ours - rows.plain).norm(dim=(0, 1)) / scale * size**0.5) < _TOLERANCE
    kept = same.nonzero().flatten().tolist()
    if half <= len(kept) < size and kept == list(range(kept[0], size)):
        return f"Only the first {kept[0]} of {size} channels of each head are rotated."
    pairs = torch.stack((rows.ours[..., ::2], rows.ours[..., 1::2]), -1)
    plain = torch.stack((rows.plain[..., ::2], rows.plain[..., 1::2]), -1)
    joined = [one.transpose(-1, -2).flatten(-2) for one in (pairs, plain)]
    if _angles(joined[0], joined[1]) is not None:
        return (
            "Its neighbouring channels are rotated with each other (0 with 1, 2 with 3), where "
            f"this architecture pairs channel 0 with {half}."
        )
    return ""


def _match(angles: Tensor, frequencies: Tensor) -> Tensor | None:
    """Return the position (rows,) at which each row was rotated, None if some row has none."""
    candidates = torch.arange(-64, _MAX_POSITION, dtype=torch.float64)
    halves = candidates / 2
    for grid in (candidates, halves[: 2 * 512], candidates[:512] / 4, candidates[:512] / 8):
        tables = grid[:, None] * frequencies[None]
        gap = torch.stack([_gap(row, tables) for row in angles])
        best = gap.min(-1)
        if bool((best.values < 5 * _TOLERANCE).all()):
            return grid[best.indices]
    return None


def _gap(angles: Tensor, tables: Tensor) -> Tensor:
    """Return the largest difference of angles (pairs,) from those of each position."""
    difference = torch.remainder(tables - angles[None] + torch.pi, 2 * torch.pi) - torch.pi
    return difference.abs().amax(-1)


def _positions_sentence(places: Tensor, found: Tensor) -> str:
    shift = found - places
    if bool((shift == 0).all()):
        return ""
    if bool((shift == shift[0]).all()):
        return f"It is rotated for positions that are {float(shift[0]):+g} from those of the text."
    if len(places) > 2 and float(places[-1]):
        ratio = float(found[-1] / places[-1])
        if torch.equal(found, places * ratio):
            return f"It is rotated for {ratio:g} times the positions of the text."
        if torch.equal(found, places[-1] - places) or torch.equal(found, places.flip(0)):
            return "It is rotated for positions that count backwards."
    wrong = (shift != 0).nonzero().flatten().tolist()
    text = ", ".join(f"{int(places[k])} as {float(found[k]):g}" for k in wrong[:8])
    more = f" and {len(wrong) - 8} more" if len(wrong) > 8 else ""
    if bool((found == found[0]).all()):
        return f"All its rows are rotated for position {float(found[0]):g}."
    where = positions_text([int(places[k]) for k in wrong])
    return f"Of its rows, those at {where} are rotated for other positions: {text}{more}."


def _frequencies_sentence(angles: Tensor, places: Tensor, frequencies: Tensor) -> str:
    """Say which frequencies, and so which base, turn the rows at the positions of the text."""
    measured = _frequencies(angles, places, frequencies)
    if measured is None:
        return _each_row(angles, places, frequencies)
    n = len(frequencies)
    kept = measured.abs() < 1e-4
    if bool(kept.any()) and not bool(kept.all()):
        return f"Of its {n} pairs of channels {int(kept.sum())} are not rotated."
    for dtype in (torch.bfloat16, torch.float16):
        rounded = frequencies.to(dtype).double()
        if _is_closer(measured, rounded, frequencies):
            name = str(dtype).removeprefix("torch.")
            text = f"Its frequencies are rounded to {name}: the model was cast to it, "
            return f"{text}with its rotary tables, and cast back."
    base = _base_of(measured)
    if base is not None:
        own = _base_of(frequencies)
        was = f", not {own:.4g}" if own is not None else ""
        return f"It is rotated with RoPE of base {base:.4g}{was}."
    ratio = measured / frequencies
    if float(ratio.max() - ratio.min()) < 0.01 * float(ratio.abs().mean()):
        return f"It is rotated by {float(ratio.mean()):.3g} times the right angles."
    low, high = float(ratio.min()), float(ratio.max())
    return f"It is rotated by other frequencies, {low:.3g} to {high:.3g} times the right ones."


def _is_closer(measured: Tensor, one: Tensor, other: Tensor) -> bool:
    """Whether measured frequencies are those of `one`, as far as they can be told from `other`."""
    return float((measured - one).abs().max()) < 0.1 * float((one - other).abs().max())


def _base_of(frequencies: Tensor) -> float | None:
    n = len(frequencies)
    if n < 2 or float((frequencies[0] - 1).abs()) > 0.01 or bool((frequencies <= 0).any()):
        return None
    slope = frequencies.log() / (torch.arange(n, dtype=torch.float64) / n).clamp_min(1e-12)
    bases = (-slope[1:]).exp()
    return float(bases.mean()) if float(bases.std(correction=0) / bases.mean()) < 0.02 else None


def _frequencies(angles: Tensor, places: Tensor, frequencies: Tensor) -> Tensor | None:
    """Return the angle per position of each pair, from rows at neighbouring positions."""
    steps = places[1:] - places[:-1]
    near = (steps == 1).nonzero().flatten()
    if len(near) < 3:
        return None
    turn = torch.remainder(angles[near + 1] - angles[near] + torch.pi, 2 * torch.pi) - torch.pi
    middle = turn.median(0).values
    if float((turn - middle).abs().max()) > 5 * _TOLERANCE:
        return None
    return middle


def _each_row(angles: Tensor, places: Tensor, frequencies: Tensor) -> str:
    """Say that each row has another base, as of a table that changes with the length."""
    bases = []
    grid = torch.logspace(0.5, 7, 2600, dtype=torch.float64)
    exponents = torch.arange(len(frequencies), dtype=torch.float64) / len(frequencies)
    for row, place in zip(angles, places, strict=True):
        if place < 1:
            continue
        tables = place * grid[:, None] ** -exponents[None]
        gap = _gap(row, tables)
        if float(gap.min()) > 0.02:
            return ""
        bases.append((int(place), float(grid[int(gap.argmin())])))
    if not bases:
        return ""
    return f"Its rows are rotated with RoPE of bases that change: {_groups_text(bases)}."


def _groups_text(bases: Sequence[tuple[int, float]]) -> str:
    """List bases by position, those that are equal as one span, at most `_MAX_GROUPS`."""
    groups: list[list[tuple[int, float]]] = []
    for pair in bases:
        if groups and abs(groups[-1][0][1] / pair[1] - 1) < 0.02:
            groups[-1].append(pair)
        else:
            groups.append([pair])
    if len(groups) > _MAX_GROUPS:
        groups = [*groups[: _MAX_GROUPS - 1], groups[-1]]
    texts = [
        f"{positions_text([place for place, _ in group])} with base {group[0][1]:.3g}"
        for group in groups
    ]
    return ", ".join(texts)
