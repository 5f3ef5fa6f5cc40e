"""Edits of a mask, as a person gives them: a preset, a segment dropped or joined, a cell, a row.

    preset causal                        another preset over the same segments
    drop paraphrase 2                    nobody else sees it, nor the separator that belongs to it
    join paraphrase 1 and paraphrase 2   the two see each other
    let paraphrase 3 see paraphrase 1    one sees another
    let cue not see paraphrase 2         or no longer does
    cell 12 3                            row 12, key 3: opened if it was closed, and the other way
    cell 12 3 open                       (or close)
    row 12                               opened to all before it; closed to itself alone if it was
    row 12 close                         (or open)

Segments go by their label or their number. A mask stays causal: a cell above the diagonal cannot be
opened, as the key is not there when a generated row is computed.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from flexinspect import masks
from flexinspect.errors import MaskError
from flexinspect.masks import BoolArray, MaskRule
from flexinspect.prompts import Segment, SegmentKind

END = masks.NOTHING
"""A `stop` beyond every position."""

HINT = (
    "Write 'preset NAME', 'drop SEGMENT', 'join SEGMENT and SEGMENT', "
    "'let SEGMENT [not] see SEGMENT', 'cell ROW KEY [open|close]' or 'row ROW [open|close]'."
)


class Ground(Protocol):
    """What edits lie on: a mask in positions of the whole sequence."""

    def dense(self, n_q: int, n_kv: int | None = None, *, q_offset: int = 0) -> BoolArray:
        """Return its cells, bool (n_q, n_kv), for the rows from `q_offset` on."""
        ...


@dataclass(frozen=True, slots=True)
class Patch:
    """A rectangle of cells, `start <= i < stop`, opened as far as they are causal, or closed."""

    row_start: int
    row_stop: int
    key_start: int
    key_stop: int
    is_open: bool


@dataclass(frozen=True, slots=True)
class EditedRule:
    """A mask with patches over it, the later ones over the earlier ones."""

    ground: Ground
    patches: tuple[Patch, ...] = ()

    def dense(self, n_q: int, n_kv: int | None = None, *, q_offset: int = 0) -> BoolArray:
        """Return its cells, bool (n_q, n_kv), for the rows from `q_offset` on."""
        return patched(
            self.ground.dense(n_q, n_kv, q_offset=q_offset), self.patches, q_offset=q_offset
        )


def patched(cells: BoolArray, patches: Sequence[Patch], *, q_offset: int = 0) -> BoolArray:
    """Return cells (..., rows, keys) with patches applied; row 0 is position `q_offset`."""
    out = cells.copy()
    n_rows, n_keys = out.shape[-2:]
    q_idx = np.arange(q_offset, q_offset + n_rows)
    for patch in patches:
        rows = slice(*(min(max(at - q_offset, 0), n_rows) for at in _rows_of(patch)))
        keys = slice(min(patch.key_start, n_keys), min(patch.key_stop, n_keys))
        if not patch.is_open:
            out[..., rows, keys] = False
            continue
        causal = np.arange(n_keys)[None, keys] <= q_idx[rows, None]
        out[..., rows, keys] |= causal
    return out


def _rows_of(patch: Patch) -> tuple[int, int]:
    return patch.row_start, patch.row_stop


def changed_rows(before: EditedRule, after: EditedRule, n_rows: int) -> npt.NDArray[np.intp]:
    """Return which of the first `n_rows` rows are other rows under `after`.

    Of a mask that is no `MaskRule` only some heads may be known, so every row under a new patch
    counts.
    """
    if not isinstance(before.ground, MaskRule) and before.ground is after.ground:
        new = after.patches[len(before.patches) :]
        touched = np.zeros(n_rows, np.bool_)
        for patch in new:
            touched[slice(*_rows_of(patch))] = True
        return np.flatnonzero(touched)
    found = [
        start + np.flatnonzero(_differs(before, after, start, stop, n_rows))
        for start, stop in masks.row_chunks(n_rows)
    ]
    return np.concatenate(found) if found else np.zeros(0, np.intp)


def _differs(
    before: EditedRule, after: EditedRule, start: int, stop: int, n_rows: int
) -> npt.NDArray[np.bool_]:
    one, other = (rule.dense(stop - start, n_rows, q_offset=start) for rule in (before, after))
    differs: npt.NDArray[np.bool_] = (one != other).any(axis=1)
    return differs


# -- the edits -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Edit:
    """One edit. `kind` is preset, drop, join, see, cell or row.

    `names` are the preset, or the segments (of "see": who sees, who is seen); `places` the row, and
    the key of a cell. `is_open` is what becomes of them, None for the contrary of what they are.
    """

    kind: str
    names: tuple[str, ...] = ()
    places: tuple[int, ...] = ()
    is_open: bool | None = None

    def __str__(self) -> str:
        """The edit as `parse` reads it."""
        match self.kind:
            case "join":
                return f"join {self.names[0]} and {self.names[1]}"
            case "see":
                verb = "not see" if self.is_open is False else "see"
                return f"let {self.names[0]} {verb} {self.names[1]}"
            case "preset" | "drop":
                return f"{self.kind} {self.names[0]}"
        verb = {None: "", True: " open", False: " close"}[self.is_open]
        return f"{self.kind} {' '.join(map(str, self.places))}{verb}"

    def to_json(self) -> dict[str, Any]:
        """Return the edit as plain data."""
        lists = {"names": list(self.names), "places": list(self.places)}
        return {"kind": self.kind, **lists, "open": self.is_open}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Edit:
        """Read an edit back. Raises `MaskError` when it is none."""
        try:
            is_open = data.get("open")
            names = tuple(str(name) for name in data.get("names", ()))
            places = tuple(int(place) for place in data.get("places", ()))
            edit = cls(str(data["kind"]), names, places, None if is_open is None else bool(is_open))
            return parse(str(edit))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise MaskError(f"{data!r} is no edit of a mask.", hint=HINT) from error


_FORMS: tuple[tuple[str, str], ...] = (
    ("preset", r"preset (\S+)"),
    ("drop", r"drop (.+)"),
    ("join", r"join (.+) and (.+)"),
    ("hide", r"let (.+) not see (.+)"),
    ("see", r"let (.+) see (.+)"),
    ("cell", r"cell (\d{1,9})[ ,]+(\d{1,9})(?: (open|close))?"),
    ("row", r"row (\d{1,9})(?: (open|close))?"),
)


def parse(text: str) -> Edit:
    """Return the edit that a text says. Raises `MaskError` with the forms there are."""
    said = " ".join(text.split())
    for kind, form in _FORMS:
        found = re.fullmatch(form, said, re.IGNORECASE)
        if found is None:
            continue
        if kind == "hide":
            return Edit("see", tuple(found.groups()), (), False)
        if kind not in ("cell", "row"):
            return Edit(kind, tuple(found.groups()))
        *places, verb = found.groups()
        is_open = None if verb is None else verb.lower() == "open"
        return Edit(kind, (), tuple(map(int, places)), is_open)
    raise MaskError(f"'{text}' is no edit of a mask.", hint=HINT)


def apply(edits: Sequence[Edit], rule: EditedRule, segments: Sequence[Segment]) -> EditedRule:
    """Return the rule with edits applied, one after the other.

    Raises `MaskError` for a segment or preset that is not known, a key behind its row, and edits
    that change nothing.
    """
    after = rule
    for edit in edits:
        after = _APPLY[edit.kind](edit, after, segments)
    if after is rule:
        said = "; ".join(str(edit) for edit in edits)
        raise MaskError(f"'{said}' changes nothing: the mask is like that already.")
    return after


def _preset(edit: Edit, rule: EditedRule, segments: Sequence[Segment]) -> EditedRule:
    name, _, separators = edit.names[0].partition("/")
    made = masks.preset(name, segments, separators=separators or "attached")
    return rule if rule == EditedRule(made) else EditedRule(made)


def _drop(edit: Edit, rule: EditedRule, segments: Sequence[Segment]) -> EditedRule:
    number = resolve(edit.names[0], segments)
    if segments[number].kind is SegmentKind.GENERATED:
        raise MaskError("The generated segment cannot be dropped: its rows choose the tokens.")
    mine = _spans(number, segments)
    others = _between(mine)
    return _with(rule, [Patch(*rows, *keys, False) for keys in mine for rows in others])


def _join(edit: Edit, rule: EditedRule, segments: Sequence[Segment]) -> EditedRule:
    one, other = (resolve(name, segments) for name in edit.names)
    if one == other:
        raise MaskError(f"'{edit}' names one segment twice.")
    return _with(rule, _seeing(one, other, segments) + _seeing(other, one, segments))


def _see(edit: Edit, rule: EditedRule, segments: Sequence[Segment]) -> EditedRule:
    reader, read = (resolve(name, segments) for name in edit.names)
    if segments[reader].stop <= segments[read].start:
        raise MaskError(
            f"{segments[reader].label} comes before {segments[read].label}, and a row sees no "
            "later key.",
            hint=f"Say it the other way round, or 'drop {segments[reader].label}'.",
        )
    found = _seeing(reader, read, segments)
    if edit.is_open is False:
        found = [replace(patch, is_open=False) for patch in found]
    return _with(rule, found)


def _seeing(reader: int, read: int, segments: Sequence[Segment]) -> list[Patch]:
    """Return patches that open one segment to another; none where that is all later."""
    pairs = [(r, k) for r in _spans(reader, segments) for k in _spans(read, segments)]
    return [Patch(*rows, *keys, True) for rows, keys in pairs if keys[0] < rows[1]]


def _cell(edit: Edit, rule: EditedRule, segments: Sequence[Segment]) -> EditedRule:
    row, key = edit.places
    if key > row:
        raise MaskError(f"Row {row} comes before key {key}, and a row sees no later key.")
    _check_row(row, segments)
    is_open = edit.is_open
    if is_open is None:
        is_open = not rule.dense(1, row + 1, q_offset=row)[0, key]
    return _with(rule, [Patch(row, row + 1, key, key + 1, is_open)])


def _row(edit: Edit, rule: EditedRule, segments: Sequence[Segment]) -> EditedRule:
    row = edit.places[0]
    _check_row(row, segments)
    is_open = edit.is_open
    if is_open is None:
        is_open = not rule.dense(1, row + 1, q_offset=row).all()
    if is_open:
        return _with(rule, [Patch(row, row + 1, 0, row + 1, True)])
    itself = Patch(row, row + 1, row, row + 1, True)
    return _with(rule, [Patch(row, row + 1, 0, END, False), itself])


def _check_row(row: int, segments: Sequence[Segment]) -> None:
    if segments and row >= segments[-1].stop:
        raise MaskError(f"There is no row {row}: the last one may be {segments[-1].stop - 1}.")


_APPLY: dict[str, Callable[[Edit, EditedRule, Sequence[Segment]], EditedRule]] = {
    "preset": _preset,
    "drop": _drop,
    "join": _join,
    "see": _see,
    "cell": _cell,
    "row": _row,
}


def _with(rule: EditedRule, patches: Sequence[Patch]) -> EditedRule:
    """Return a rule with patches over it, the same one where they change no cell."""
    needed = tuple(patch for patch in patches if _matters(rule, patch))
    if not needed:
        return rule
    return EditedRule(rule.ground, (*rule.patches, *patches))


def _matters(rule: EditedRule, patch: Patch) -> bool:
    """Say whether a patch changes a cell; of endless rows one per region of the ground is asked."""
    last = patch.row_stop - 1 if patch.row_stop < END else max(patch.row_start, _last_start(rule))
    for start, stop in masks.row_chunks(last + 1 - patch.row_start):
        first = patch.row_start + start
        cells = rule.dense(stop - start, last + 1, q_offset=first)
        if (cells != patched(cells, [patch], q_offset=first)).any():
            return True
    return False


def _last_start(rule: EditedRule) -> int:
    starts = rule.ground.starts if isinstance(rule.ground, MaskRule) else ()
    places = [start for patch in rule.patches for start in (patch.row_start, patch.key_stop)]
    return max((*starts, *(place for place in places if place < END), 0)) + 1


def named(edit: Edit, segments: Sequence[Segment]) -> Edit:
    """Return an edit that calls its segments by their labels. Raises `MaskError`."""
    if edit.kind == "preset":
        return edit
    labels = tuple(segments[resolve(name, segments)].label for name in edit.names)
    return replace(edit, names=labels)


# -- segments --------------------------------------------------------------------------------------


def resolve(name: str, segments: Sequence[Segment]) -> int:
    """Return the number of the segment of a label or number. Raises `MaskError`."""
    said = name.strip().lower()
    labels = [segment.label.lower() for segment in segments]
    if said in labels:
        return labels.index(said)
    if said.isascii() and said.isdecimal() and int(said) < len(segments):
        return int(said)
    near = difflib.get_close_matches(said, labels, 1)
    raise MaskError(
        f"There is no segment '{name.strip()}'.",
        hint=f"Did you mean '{near[0]}'?" if near else f"There are {', '.join(labels)}.",
    )


def _spans(number: int, segments: Sequence[Segment]) -> list[tuple[int, int]]:
    """Return the spans of a segment and of what belongs to it, neighbours merged."""
    mine = [s for at, s in enumerate(segments) if number in (at, s.owner)]
    spans: list[tuple[int, int]] = []
    for segment in mine:
        stop = END if segment.kind is SegmentKind.GENERATED else segment.stop
        if spans and spans[-1][1] == segment.start:
            spans[-1] = (spans[-1][0], stop)
        else:
            spans.append((segment.start, stop))
    return spans


def _between(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the rows outside of spans, from the first span on: none before it sees them."""
    starts = [stop for _, stop in spans]
    stops = [*(start for start, _ in spans[1:]), END]
    return [(start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop]
