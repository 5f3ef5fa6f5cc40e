"""A whole mask in lines of text: what it is, who sees whom, what is not as declared."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flexinspect.masksheets.counting import Counts
from flexinspect.panels.parts.maskdata import MAX_LISTED_ROWS, MaskData
from flexinspect.panels.parts.maskwords import (
    describe_cell,
    describe_first_pairs,
    format_block_counts,
    format_counts,
    format_difference,
    format_steps,
    format_token,
    has_difference,
    spec_name,
)
from flexinspect.text import escape_unprintable

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
