"""A mask described as text: source, open cells, differences from the declared mask, one cell."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from flexinspect.core.text import escape_unprintable
from flexinspect.masks.counting import Counts
from flexinspect.panels.mask.mask_data import MAX_LISTED_ROWS, MaskData
from flexinspect.records.prompt import Segment, SegmentKind
from flexinspect.records.step import MaskRecord

MAX_TABLE_SEGMENTS = 16
"""Maximum number of segments for which a table of all pairs is written."""


def describe_mask(data: MaskData) -> list[str]:
    """Describe the whole mask in lines of text."""
    return [
        *_describe_source(data),
        *_describe_open_cells(data),
        *_describe_difference(data),
        *_describe_empty_rows(data),
        *_describe_blocks(data),
        *_describe_segments(data),
        *_describe_cursor(data),
    ]


def _describe_source(data: MaskData) -> list[str]:
    mask_view, place = data.mask_view, data.place
    heads = (
        f"head {mask_view.head} of {mask_view.heads}"
        if mask_view.heads > 1
        else "the same for all heads"
    )
    where = f"layer {place.layer}, {heads}"
    at = f"generation {place.generation}, at step {place.step}"
    size = f"{mask_view.n_rows} rows, {mask_view.n_keys} keys"
    lines = [f"The mask of {where}, {at}: {size}, {data.view_mode} ({data.lse_check.describe()})."]
    if data.fallback_reason:
        lines.append(f"{data.fallback_reason}.")
    if data.lse_check.is_failed:
        lines.append(
            f"The check exceeds its tolerance of {data.lse_check.tolerance:g}: the newest row is "
            "not what ran."
        )
    if mask_view.is_truncated:
        lines.append(f"Step 0 and {format_steps(data)} are shown.")
    if data.mask is not None:
        lines.append(_describe_received_mask(data.mask, "cursor's row" if data.cursor else "step"))
    return lines


def _describe_received_mask(mask: MaskRecord, receiver: str) -> str:
    parts = [f"{_format_kind(mask.kind)}, {mask.q_len} x {mask.kv_len}"]
    if mask.block_q:
        parts[0] += f" in blocks of {mask.block_q} x {mask.block_kv}"
    if mask.rule:
        source = f" ({escape_unprintable(mask.rule_source)})" if mask.rule_source else ""
        parts.append(f"mask_mod {escape_unprintable(mask.rule)}{source}")
    if mask.compiled:
        parts.append("compiled")
    parts.append(f"fingerprint {escape_unprintable(mask.fingerprint)}")
    return f"The {receiver} received {', '.join(parts)}."


def _format_kind(kind: str) -> str:
    names = {
        "block": "a block mask",
        "none": "no mask (every key is open)",
        "none, causal": "no mask, on a path that applies a causal mask itself",
        "bool": "a dense bool mask",
        "float": "a dense float mask",
    }
    return names.get(kind, escape_unprintable(kind))


def _describe_open_cells(data: MaskData) -> list[str]:
    mask_view = data.mask_view
    n_known = mask_view.n_known()
    if not n_known:
        return ["No executed cells of these rows were recorded."]
    n_cells = n_known * mask_view.n_keys
    n_open = mask_view.count("open")
    lines = [f"{n_open} of {n_cells} cells are open ({100 * n_open / n_cells:.1f} %)."]
    if n_known < mask_view.n_rows:
        lines.append(f"The cells of {mask_view.n_rows - n_known} rows were not recorded.")
    return lines


def _describe_difference(data: MaskData) -> list[str]:
    mask_view = data.mask_view
    if mask_view.spec is None:
        mask_mod = data.generation_row.declared.get("rule")
        name = f" {escape_unprintable(str(mask_mod))}" if mask_mod else ""
        return [f"The mask{name} was not declared, so there is nothing to compare it with."]
    declared = f"The declared mask is {spec_name(data)}"
    if not mask_view.n_known():
        return [f"{declared}."]
    if not has_difference(data):
        return [f"{declared}; the executed mask is the same."]
    return [
        f"{declared}; the executed mask differs: {format_difference(data)}.",
        *(f"{text[0].upper()}{text[1:]}." for text in describe_first_pairs(data)),
    ]


def _describe_empty_rows(data: MaskData) -> list[str]:
    n_empty = len(data.empty_rows)
    if not n_empty:
        return ["Every recorded row attends to a key."] if data.mask_view.n_known() else []
    rows = data.mask_view.positions[data.empty_rows[:MAX_LISTED_ROWS]].tolist()
    more = ", ..." if n_empty > len(rows) else ""
    names = ", ".join(format_token(data, row) for row in rows)
    return [
        f"{n_empty} {'rows attend' if n_empty > 1 else 'row attends'} to no key: {names}{more}."
    ]


def _describe_blocks(data: MaskData) -> list[str]:
    label = format_block_counts(data)
    return [f"Block tables of the step: {label}."] if label else []


# -- pairs of segments ----------------------------------------------------------------------------


def _describe_segments(data: MaskData) -> list[str]:
    if not data.segments or not data.mask_view.n_known():
        return []
    n_open: Counts = np.sum([part.counts.group_counts for part in data.mask_view.parts], axis=0)
    n_past = _causal_counts(data)
    rows = [n for n in range(len(data.segments)) if n_past[n].any() or n_open[n].any()]
    if len(data.segments) <= MAX_TABLE_SEGMENTS:
        return _segment_table(data, rows, n_open, n_past)
    return [_describe_segment_row(data, number, n_open[number], n_past[number]) for number in rows]


def _causal_counts(data: MaskData) -> Counts:
    """Return the number of cells that a causal mask opens, int64 (row segments, key segments)."""
    groups, mask_view = data.mask_view.groups, data.mask_view
    starts = np.array(groups.starts)
    past = np.zeros((len(starts), len(starts)), np.int64)
    known: npt.NDArray[np.int32] = np.concatenate(
        [
            mask_view.positions[start:stop]
            for part in mask_view.parts
            for start, stop in part.known_spans()
        ]
    )
    of_row = groups.group_of(known)
    stops = np.append(starts[1:], mask_view.n_keys)
    for number, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
        cells = np.clip(known + 1 - start, 0, max(stop - start, 0))
        past[:, number] = np.bincount(of_row, weights=cells, minlength=len(starts))
    return past


def _format_open_share(n_open: int, n_past: int) -> str:
    if n_open > n_past:
        return "ahead"
    if n_past == 0:
        return "-"
    if n_open in (0, n_past):
        return "open" if n_open else "closed"
    return f"{min(max(n_open / n_past, 0.01), 0.99):.2f}"


def _segment_table(data: MaskData, rows: list[int], n_open: Counts, n_past: Counts) -> list[str]:
    names = [escape_unprintable(segment.label) for segment in data.segments]
    width = max(map(len, names)) + 4
    columns = range(len(data.segments))
    lines = [
        "Which segment (row) attends to which (column), as share of past keys (ahead: later ones):",
        " " * width + "".join(f"{number:>7}" for number in columns),
    ]
    for row in rows:
        cells = "".join(
            f"{_format_open_share(int(n_open[row, c]), int(n_past[row, c])):>7}" for c in columns
        )
        lines.append(f"{row:>2} {names[row]:<{width - 3}}{cells}")
    return lines


def _describe_segment_row(data: MaskData, row: int, n_open: Counts, n_past: Counts) -> str:
    by_share: dict[str, list[str]] = {}
    for number, segment in enumerate(data.segments):
        share = _format_open_share(int(n_open[number]), int(n_past[number]))
        kind = share if share in ("open", "closed", "ahead", "-") else "part"
        by_share.setdefault(kind, []).append(escape_unprintable(segment.label))
    parts = [
        f"{kind} {', '.join(by_share[kind][:6])}" + (", ..." if len(by_share[kind]) > 6 else "")
        for kind in ("open", "part", "ahead", "closed")
        if kind in by_share
    ]
    return f"{escape_unprintable(data.segments[row].label)}: {'; '.join(parts)}."


def _describe_cursor(data: MaskData) -> list[str]:
    cell = describe_cell(data)
    lines = [] if cell is None else [cell.sentence()]
    return [f"{text[0].upper()}{text[1:]}." for text in (*lines, format_counts(data))]


# -- one cell -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CellDescription:
    """A cell as text: the row, its relation to the key ("attends to"), the reason (may be empty).

    `style` is the name of the style of the whole text.
    """

    row: str
    key: str
    relation: str
    reason: str
    style: str = "text"

    def sentence(self) -> str:
        """Return the description as one sentence, without a full stop."""
        reason = f": {self.reason}" if self.reason else ""
        return f"row {self.row} {self.relation} {self.key}{reason}"


def format_token(data: MaskData, position: int, *, segment: bool = True) -> str:
    """Return a position as `45 "capital" (paraphrase 3)`, without the parts that are unknown."""
    cell = data.tokens.get(position)
    text = f'{position} "{cell.text.strip() or cell.text}"' if cell else f"{position}"
    owner = data.segment(position) if segment else None
    return f"{text} ({escape_unprintable(owner.label)})" if owner else text


_OPEN, _CLOSED = "attends to", "does not attend to"


def describe_cell(data: MaskData) -> CellDescription | None:
    """Describe the cell under the cursor, None without a cursor."""
    if data.cursor is None:
        return None
    row, key = data.cursor
    position = int(data.mask_view.positions[row])
    describe = partial(CellDescription, format_token(data, position), format_token(data, key))
    is_open, declared = data.mask_view.cell(row, key), is_declared_open(data, position, key)
    if data.view_mode == "declared" and declared is not None:
        if declared:
            return describe("should attend to", "")
        return describe("should not attend to", _closed_reason(data, row, key, declared=False))
    if data.view_mode == "received" or is_open is None:
        return _describe_received_cell(data, row, key, is_open)
    if is_open:
        if declared is not False:
            return describe(_OPEN, "")
        block = _format_block_reason(data, row, key)
        return describe(_OPEN, f"leaked, {spec_name(data)} closes it{block}", "bad")
    if declared and key < data.mask_view.part_of(row).step_at(row).kv_offset:
        return describe(_CLOSED, "its key is no longer in the cache")
    if declared:
        block = _format_block_reason(data, row, key)
        reason = f"lost, {spec_name(data)} opens it, but it was not executed{block}"
        return describe(_CLOSED, reason, "bad")
    if data.mask_view.row_count(row) == 0:
        reason = "the row attends to no key" + _empty_reason(data, position)
        return describe(_CLOSED, reason, "warn")
    return describe(_CLOSED, _closed_reason(data, row, key, declared=declared))


def is_declared_open(data: MaskData, position: int, key: int) -> bool | None:
    """Whether a cell is declared open, None if no mask was declared."""
    spec = data.mask_view.spec
    if spec is None:
        return None
    region = spec.region(position)
    return key <= position and (key < spec.prefix_stops[region] or key >= spec.local_starts[region])


def spec_name(data: MaskData) -> str:
    """Return the printable name of the declared mask."""
    spec = data.mask_view.spec
    return escape_unprintable(spec.name) if spec else "the declared mask"


def _describe_received_cell(
    data: MaskData, row: int, key: int, is_open: bool | None
) -> CellDescription:
    position = int(data.mask_view.positions[row])
    describe = partial(CellDescription, format_token(data, position), format_token(data, key))
    part = data.block_part(row)
    block = part.at(row, key) if part else ""
    size = f" of {part.size[0]} x {part.size[1]}" if part and part.size else ""
    if block == "partial":
        return describe("and", f"their block{size} is partial, the mask_mod decides")
    if block == "full":
        return describe(_OPEN, f"their block{size} is full, no mask_mod is called")
    if block:
        return describe(_CLOSED, f"their block{size} is not visited")
    if is_open is None:
        return describe("and", "the executed mask was not recorded here", "muted")
    return describe(_OPEN if is_open else _CLOSED, "")


def _format_block_reason(data: MaskData, row: int, key: int) -> str:
    """Explain a difference by the block tables of a compiled call, "" if they do not explain it."""
    part = data.block_part(row)
    block = part.at(row, key) if part and data.mask and data.mask.compiled else ""
    return {
        "full": " (its block is full, so the mask_mod is not called)",
        "not visited": " (its block is not visited)",
    }.get(block, "")


def _empty_reason(data: MaskData, position: int) -> str:
    segment = data.segment(position)
    isolated = data.generation_row.declared.get("separators") == "isolated"
    if isolated and segment is not None and segment.kind is SegmentKind.SEPARATOR:
        return ", as set by --separators isolated"
    return ""


def _closed_reason(data: MaskData, row: int, key: int, *, declared: bool | None) -> str:
    position = int(data.mask_view.positions[row])
    if key > position and declared is not None:  # every declared mask is causal
        return "it comes later (causal)"
    step_rows = data.mask_view.part_of(row).step_at(row)
    if key < step_rows.kv_offset and data.view_mode != "declared":
        return "its key is no longer in the cache"
    if declared is None:
        mask_mod = data.mask.rule if data.mask else None
        name = escape_unprintable(mask_mod) if mask_mod else "the mask that the layer received"
        return f"closed by {name}"
    return _separation_reason(data, data.segment(position), data.segment(key), position)


def _separation_reason(
    data: MaskData, own: Segment | None, other: Segment | None, position: int
) -> str:
    by = f"separated by {spec_name(data)}"
    if _empty_reason(data, position):
        return "rows of separators attend to no key (--separators isolated)"
    if own is None or other is None:
        return by
    owners = [data.segments[s.owner] for s in (own, other) if 0 <= s.owner < len(data.segments)]
    if len({o.start for o in owners}) == 2 and all(
        o.kind is SegmentKind.PARAPHRASE for o in owners
    ):
        return f"another paraphrase, {by}"
    names = (escape_unprintable(segment.label) for segment in (other, own))
    return f"{' is closed to '.join(names)} by {spec_name(data)}"


# -- counts ---------------------------------------------------------------------------------------


def format_counts(data: MaskData, *, short: bool = False) -> str:
    """Return how many keys are open to the cursor's row, or the newest one, and how many rows
    attend to the cursor's key."""
    mask_view = data.mask_view
    row = data.cursor[0] if data.cursor else data.current[-1] if data.current else None
    if row is None:
        return "the rows of this step are not shown"
    position = int(mask_view.positions[row])
    name = str(position) if data.cursor or short else format_token(data, position)
    part = mask_view.part_of(row)
    if not part.is_known(row):
        text = f"row {name}: its cells were not recorded"
    else:
        n_open = mask_view.row_count(row)
        of = position + 1 if n_open <= position + 1 else part.n_keys
        text = f"row {name}: {n_open} of {of} keys open" if n_open else f"row {name}: no open key"
    if data.cursor is None:
        return text
    key = data.cursor[1]
    return (
        f"{text} · key {key}: open to {mask_view.column_count(key)} of {mask_view.n_known()} rows"
    )


def format_difference(data: MaskData) -> str:
    """Return "lost 3 · leaked 0", "" if no mask was declared or none recorded."""
    if data.mask_view.spec is None or not data.mask_view.n_known():
        return ""
    return f"lost {data.mask_view.count('lost')} · leaked {data.mask_view.count('leaked')}"


def has_difference(data: MaskData) -> bool:
    """Whether the executed mask differs from the declared one."""
    return data.mask_view.count("lost") + data.mask_view.count("leaked") > 0


def describe_first_pairs(data: MaskData) -> list[str]:
    """Describe the first leaked and the first lost cell."""
    lines = []
    meanings = (("leaked", "executed, declared closed"), ("lost", "declared open, not executed"))
    for kind, meaning in meanings:
        cell = data.mask_view.first_cell(kind)
        if cell is not None:
            row = format_token(data, int(data.mask_view.positions[cell[0]]))
            key = format_token(data, cell[1])
            lines.append(f"first {kind} pair ({meaning}): row {row}, key {key}")
    return lines


def format_steps(data: MaskData) -> str:
    """Return the steps of the mask view: "steps 900-1923 of 100000"."""
    mask_view = data.mask_view
    return f"steps {mask_view.first_step}-{mask_view.last_step} of {mask_view.n_steps}"


def format_block_counts(data: MaskData) -> str:
    """Return "blocks of 128 x 128: 3 partial, 1 full, 2 not visited" for the part of the cursor's
    row, or of the newest one."""
    row = data.cursor[0] if data.cursor else data.current[-1] if data.current else 0
    part = data.block_part(row)
    if part is None:
        return ""
    if part.size is None:
        return "no block tables" + (": a dense mask" if part.is_dense else " recorded")
    if not part.blocks:
        return "its block tables were not recorded"
    partial, full, closed = part.counts()
    size = f"{part.size[0]} x {part.size[1]}"
    return f"blocks of {size}: {partial} partial, {full} full, {closed} not visited"
