"""A whole mask in lines of text: what it is, who sees whom, what is not as declared."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexinspect.core.text import escape_unprintable
from flexinspect.masks.counting import Counts
from flexinspect.panels.mask.mask_data import MAX_LISTED_ROWS, MaskData
from flexinspect.records.prompt import Segment, SegmentKind

MAX_TABLE_SEGMENTS = 16
"""Segments up to which they are set against each other in a table."""


def describe_mask(data: MaskData) -> list[str]:
    """Return everything in lines of text."""
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
            f"The gate is above {data.lse_check.tolerance:g}: the newest row is not what ran."
        )
    if mask_view.is_truncated:
        lines.append(f"Shown are step 0 and {format_steps(data)}.")
    mask = data.mask
    if mask is not None:
        blocks = f" in blocks of {mask.block_q} x {mask.block_kv}" if mask.block_q else ""
        rule = f", rule {escape_unprintable(mask.rule)}" if mask.rule else ""
        source = f" ({escape_unprintable(mask.rule_source)})" if mask.rule_source else ""
        compiled = ", compiled" if mask.compiled else ""
        which = "cursor's row" if data.cursor else "step"
        lines.append(
            f"The {which} received {_format_kind(mask.kind)}, {mask.q_len} x {mask.kv_len}{blocks}{rule}"
            f"{source}{compiled}, fingerprint {escape_unprintable(mask.fingerprint)}."
        )
    return lines


def _format_kind(kind: str) -> str:
    names = {
        "block": "a block mask",
        "none": "no mask (every key is open)",
        "none, causal": "no mask, on a path that is causal by itself",
        "bool": "a dense mask of bools",
        "float": "a dense mask of floats",
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
        rule = data.generation_row.declared.get("rule")
        own = f" {escape_unprintable(str(rule))}" if rule else ""
        return [f"The mask{own} was not declared as a rule, so there is nothing to compare with."]
    if not mask_view.n_known():
        return [f"Declared is {spec_name(data)}."]
    if not has_difference(data):
        return [f"Declared is {spec_name(data)}; what was executed is what was declared."]
    return [
        f"Declared is {spec_name(data)}, and what was executed differs: {format_difference(data)}.",
        *(f"{text[0].upper()}{text[1:]}." for text in describe_first_pairs(data)),
    ]


def _describe_empty_rows(data: MaskData) -> list[str]:
    if not len(data.empty_rows):
        return ["Every recorded row sees something."] if data.mask_view.n_known() else []
    rows = data.mask_view.positions[data.empty_rows[:MAX_LISTED_ROWS]].tolist()
    more = ", ..." if len(data.empty_rows) > len(rows) else ""
    names = ", ".join(format_token(data, row) for row in rows)
    one = len(data.empty_rows) == 1
    return [f"{len(data.empty_rows)} {'row sees' if one else 'rows see'} nothing: {names}{more}."]


def _describe_blocks(data: MaskData) -> list[str]:
    label = format_block_counts(data)
    return [f"Block tables of the step: {label}."] if label else []


# -- segments against segments --------------------------------------------------------------------


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
    """Return by segments of row and key how many cells a causal mask would open."""
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
        "Who may look at whom, of the keys that are not later (- none; ahead: later ones, too):",
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
    words = describe_cell(data)
    lines = [] if words is None else [words.sentence()]
    return [f"{text[0].upper()}{text[1:]}." for text in (*lines, format_counts(data))]


# -- one cell -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CellDescription:
    """A cell in words: `row` may look at `key` or not, `why` (may be empty); `style` of it all."""

    row: str
    key: str
    relation: str
    reason: str
    style: str = "text"

    def sentence(self) -> str:
        """Return the whole sentence."""
        return f"row {self.row} {self.relation} {self.key}" + (
            f": {self.reason}" if self.reason else ""
        )


def format_token(data: MaskData, position: int, *, segment: bool = True) -> str:
    """Return a position as `45 "capital" (paraphrase 3)`, as far as it is known."""
    word = data.tokens.get(position)
    text = f'{position} "{word.text.strip() or word.text}"' if word else f"{position}"
    about = data.segment(position) if segment else None
    return f"{text} ({escape_unprintable(about.label)})" if about else text


def describe_cell(data: MaskData) -> CellDescription | None:
    """Return the cell under the cursor in words, None without a cursor."""
    if data.cursor is None:
        return None
    row, key = data.cursor
    position = int(data.mask_view.positions[row])
    who, whom = format_token(data, position), format_token(data, key)
    is_open, meant = data.mask_view.cell(row, key), is_declared_open(data, position, key)
    if data.view_mode == "declared" and meant is not None:
        why = "" if meant else _closed_reason(data, row, key, meant=False)
        return CellDescription(who, whom, "should look at" if meant else "should not look at", why)
    if data.view_mode == "received" or is_open is None:
        return _describe_received_cell(data, row, key, is_open)
    if is_open:
        leaked = meant is False
        why = (
            f"leaked, {spec_name(data)} closes it{_format_block_reason(data, row, key)}"
            if leaked
            else ""
        )
        return CellDescription(who, whom, "may look at", why, "bad" if leaked else "text")
    if meant and key < data.mask_view.part_of(row).step_at(row).kv_offset:
        return CellDescription(who, whom, "may not look at", "its key is no longer in the cache")
    if meant:
        gone = f"it was not executed{_format_block_reason(data, row, key)}"
        why = f"lost, {spec_name(data)} opens it, but {gone}"
        return CellDescription(who, whom, "may not look at", why, "bad")
    if data.mask_view.row_count(row) == 0:
        why = "the row sees nothing at all" + _empty_reason(data, position)
        return CellDescription(who, whom, "may not look at", why, "warn")
    return CellDescription(
        who, whom, "may not look at", _closed_reason(data, row, key, meant=meant)
    )


def is_declared_open(data: MaskData, position: int, key: int) -> bool | None:
    """Return whether a cell is declared open, None where no rule was declared."""
    rule = data.mask_view.spec
    if rule is None:
        return None
    region = rule.region(position)
    return key <= position and (key < rule.prefix_stops[region] or key >= rule.local_starts[region])


def spec_name(data: MaskData) -> str:
    """Return the name of the declared rule, printable."""
    return (
        escape_unprintable(data.mask_view.spec.name) if data.mask_view.spec else "the declared mask"
    )


def _describe_received_cell(
    data: MaskData, row: int, key: int, is_open: bool | None
) -> CellDescription:
    who = format_token(data, int(data.mask_view.positions[row]))
    whom = format_token(data, key)
    part = data.block_part(row)
    block = part.at(row, key) if part else ""
    size = f" of {part.size[0]} x {part.size[1]}" if part and part.size else ""
    if block == "partial":
        return CellDescription(who, whom, "and", f"their block{size} is partial, the rule decides")
    if block == "full":
        return CellDescription(
            who, whom, "may look at", f"their block{size} is full, no rule is asked"
        )
    if block:
        return CellDescription(who, whom, "may not look at", f"their block{size} is not visited")
    if is_open is None:
        return CellDescription(who, whom, "and", "what was executed here was not recorded", "muted")
    return CellDescription(who, whom, "may look at" if is_open else "may not look at", "")


def _format_block_reason(data: MaskData, row: int, key: int) -> str:
    """Say what the block tables of a compiled call have to do with a difference."""
    part = data.block_part(row)
    block = part.at(row, key) if part and data.mask and data.mask.compiled else ""
    return {
        "full": " (its block is full, so the rule is not asked)",
        "not visited": " (its block is not visited)",
    }.get(block, "")


def _empty_reason(data: MaskData, position: int) -> str:
    about = data.segment(position)
    isolated = data.generation_row.declared.get("separators") == "isolated"
    if isolated and about is not None and about.kind is SegmentKind.SEPARATOR:
        return ", as --separators isolated asks"
    return ""


def _closed_reason(data: MaskData, row: int, key: int, *, meant: bool | None) -> str:
    position = int(data.mask_view.positions[row])
    if key > position and meant is not None:  # every rule that is declared is causal
        return "it comes later (causal)"
    step_rows = data.mask_view.part_of(row).step_at(row)
    if key < step_rows.kv_offset and data.view_mode != "declared":
        return "its key is no longer in the cache"
    if meant is None:
        rule = data.mask.rule if data.mask else None
        return (
            f"closed by {escape_unprintable(rule)}"
            if rule
            else "closed by the mask that the layer got"
        )
    return _separation_reason(data, data.segment(position), data.segment(key), position)


def _separation_reason(
    data: MaskData, mine: Segment | None, other: Segment | None, position: int
) -> str:
    by = f"kept apart by {spec_name(data)}"
    if _empty_reason(data, position):
        return "rows of separators see nothing (--separators isolated)"
    if mine is None or other is None:
        return by
    owners = [data.segments[s.owner] for s in (mine, other) if 0 <= s.owner < len(data.segments)]
    if len({o.start for o in owners}) == 2 and all(
        o.kind is SegmentKind.PARAPHRASE for o in owners
    ):
        return f"another paraphrase, {by}"
    return f"{escape_unprintable(other.label)} is closed to {escape_unprintable(mine.label)} by {spec_name(data)}"


# -- counts ---------------------------------------------------------------------------------------


def format_counts(data: MaskData, *, short: bool = False) -> str:
    """Return how many keys the cursor's row sees (else the newest row's), and who sees its key."""
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
        text = f"row {name} sees {n_open} of {of}" if n_open else f"row {name} sees nothing"
    if data.cursor is None:
        return text
    key = data.cursor[1]
    seen = f"column {key} is seen by {mask_view.column_count(key)} of {mask_view.n_known()}"
    return f"{text} · {seen}"


def format_difference(data: MaskData) -> str:
    """Return "lost 3 · leaked 0", "" where nothing was declared or recorded."""
    if data.mask_view.spec is None or not data.mask_view.n_known():
        return ""
    return f"lost {data.mask_view.count('lost')} · leaked {data.mask_view.count('leaked')}"


def has_difference(data: MaskData) -> bool:
    """Tell whether anything was executed that was not declared, or the other way round."""
    return data.mask_view.count("lost") + data.mask_view.count("leaked") > 0


def describe_first_pairs(data: MaskData) -> list[str]:
    """Return where the first lost and the first leaked cell are; leaked ones come first."""
    lines = []
    meanings = (("leaked", "executed, declared closed"), ("lost", "declared open, not executed"))
    for kind, meaning in meanings:
        found = data.mask_view.first_cell(kind)
        if found is not None:
            row = format_token(data, int(data.mask_view.positions[found[0]]))
            key = format_token(data, found[1])
            lines.append(f"first {kind} pair ({meaning}): row {row}, key {key}")
    return lines


def format_steps(data: MaskData) -> str:
    """Return which steps are on the sheet: "steps 900-1923 of 100000"."""
    mask_view = data.mask_view
    return f"steps {mask_view.first_step}-{mask_view.last_step} of {mask_view.n_steps}"


def format_block_counts(data: MaskData) -> str:
    """Return "blocks of 128 x 128: 3 partial, 1 full, 2 not visited" of the part in question."""
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
