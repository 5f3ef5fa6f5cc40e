"""A whole mask in lines of text: what it is, who sees whom, what is not as declared."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flexinspect.masksheets.counting import Counts
from flexinspect.panels.parts.maskdata import MOST_LISTED, MaskData
from flexinspect.panels.parts.maskwords import (
    block_label,
    cell_words,
    count_words,
    difference_words,
    differs,
    first_pairs,
    rule_name,
    token_words,
    window_words,
)
from flexinspect.text import visible

MOST_COLUMNS = 16
"""Segments up to which they are set against each other in a table."""


def describe(data: MaskData) -> list[str]:
    """Return everything in lines of text."""
    return [
        *_what(data),
        *_how_open(data),
        *_as_declared(data),
        *_empty_rows(data),
        *_blocks(data),
        *_segments(data),
        *_cursor(data),
    ]


def _what(data: MaskData) -> list[str]:
    sheet, place = data.sheet, data.place
    heads = f"head {sheet.head} of {sheet.heads}" if sheet.heads > 1 else "the same for all heads"
    where = f"layer {place.layer}, {heads}"
    at = f"generation {place.generation}, at step {place.step}"
    size = f"{sheet.n_rows} rows, {sheet.n_keys} keys"
    lines = [f"The mask of {where}, {at}: {size}, {data.view} ({data.gate.words()})."]
    if data.why:
        lines.append(f"{data.why}.")
    if data.gate.bad:
        lines.append(f"The gate is above {data.gate.bar:g}: the newest row is not what ran.")
    if sheet.is_cut:
        lines.append(f"Shown are step 0 and {window_words(data)}.")
    mask = data.mask
    if mask is not None:
        blocks = f" in blocks of {mask.block_q} x {mask.block_kv}" if mask.block_q else ""
        rule = f", rule {visible(mask.rule)}" if mask.rule else ""
        source = f" ({visible(mask.rule_source)})" if mask.rule_source else ""
        compiled = ", compiled" if mask.compiled else ""
        which = "cursor's row" if data.cursor else "step"
        lines.append(
            f"The {which} received {_kind(mask.kind)}, {mask.q_len} x {mask.kv_len}{blocks}{rule}"
            f"{source}{compiled}, fingerprint {visible(mask.fingerprint)}."
        )
    return lines


def _kind(kind: str) -> str:
    names = {
        "block": "a block mask",
        "none": "no mask (every key is open)",
        "none, causal": "no mask, on a path that is causal by itself",
        "bool": "a dense mask of bools",
        "float": "a dense mask of floats",
    }
    return names.get(kind, visible(kind))


def _how_open(data: MaskData) -> list[str]:
    sheet = data.sheet
    n_known = sheet.n_known()
    if not n_known:
        return ["No executed cells of these rows were recorded."]
    n_cells = n_known * sheet.n_keys
    n_open = sheet.total("open")
    lines = [f"{n_open} of {n_cells} cells are open ({100 * n_open / n_cells:.1f} %)."]
    if n_known < sheet.n_rows:
        lines.append(f"The cells of {sheet.n_rows - n_known} rows were not recorded.")
    return lines


def _as_declared(data: MaskData) -> list[str]:
    sheet = data.sheet
    if sheet.rule is None:
        rule = data.about.declared.get("rule")
        own = f" {visible(str(rule))}" if rule else ""
        return [f"The mask{own} was not declared as a rule, so there is nothing to compare with."]
    if not sheet.n_known():
        return [f"Declared is {rule_name(data)}."]
    if not differs(data):
        return [f"Declared is {rule_name(data)}; what was executed is what was declared."]
    return [
        f"Declared is {rule_name(data)}, and what was executed differs: {difference_words(data)}.",
        *(f"{text[0].upper()}{text[1:]}." for text in first_pairs(data)),
    ]


def _empty_rows(data: MaskData) -> list[str]:
    if not len(data.empty):
        return ["Every recorded row sees something."] if data.sheet.n_known() else []
    rows = data.sheet.positions[data.empty[:MOST_LISTED]].tolist()
    more = ", ..." if len(data.empty) > len(rows) else ""
    names = ", ".join(token_words(data, row) for row in rows)
    one = len(data.empty) == 1
    return [f"{len(data.empty)} {'row sees' if one else 'rows see'} nothing: {names}{more}."]


def _blocks(data: MaskData) -> list[str]:
    label = block_label(data)
    return [f"Block tables of the step: {label}."] if label else []


# -- segments against segments --------------------------------------------------------------------


def _segments(data: MaskData) -> list[str]:
    if not data.segments or not data.sheet.n_known():
        return []
    n_open: Counts = np.sum([part.tally.table for part in data.sheet.parts], axis=0)
    n_past = _past(data)
    rows = [n for n in range(len(data.segments)) if n_past[n].any() or n_open[n].any()]
    if len(data.segments) <= MOST_COLUMNS:
        return _table(data, rows, n_open, n_past)
    return [_row_words(data, number, n_open[number], n_past[number]) for number in rows]


def _past(data: MaskData) -> Counts:
    """Return by segments of row and key how many cells a causal mask would open."""
    groups, sheet = data.sheet.groups, data.sheet
    starts = np.array(groups.starts)
    past = np.zeros((len(starts), len(starts)), np.int64)
    known: npt.NDArray[np.int32] = np.concatenate(
        [sheet.positions[start:stop] for part in sheet.parts for start, stop in part.known_spans()]
    )
    of_row = groups.of(known)
    stops = np.append(starts[1:], sheet.n_keys)
    for number, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
        cells = np.clip(known + 1 - start, 0, max(stop - start, 0))
        past[:, number] = np.bincount(of_row, weights=cells, minlength=len(starts))
    return past


def _share(n_open: int, n_past: int) -> str:
    if n_open > n_past:
        return "ahead"
    if n_past == 0:
        return "-"
    if n_open in (0, n_past):
        return "open" if n_open else "closed"
    return f"{min(max(n_open / n_past, 0.01), 0.99):.2f}"


def _table(data: MaskData, rows: list[int], n_open: Counts, n_past: Counts) -> list[str]:
    names = [visible(segment.label) for segment in data.segments]
    width = max(map(len, names)) + 4
    columns = range(len(data.segments))
    lines = [
        "Who may look at whom, of the keys that are not later (- none; ahead: later ones, too):",
        " " * width + "".join(f"{number:>7}" for number in columns),
    ]
    for row in rows:
        cells = "".join(f"{_share(int(n_open[row, c]), int(n_past[row, c])):>7}" for c in columns)
        lines.append(f"{row:>2} {names[row]:<{width - 3}}{cells}")
    return lines


def _row_words(data: MaskData, row: int, n_open: Counts, n_past: Counts) -> str:
    by_share: dict[str, list[str]] = {}
    for number, segment in enumerate(data.segments):
        share = _share(int(n_open[number]), int(n_past[number]))
        kind = share if share in ("open", "closed", "ahead", "-") else "part"
        by_share.setdefault(kind, []).append(visible(segment.label))
    said = [
        f"{kind} {', '.join(by_share[kind][:6])}" + (", ..." if len(by_share[kind]) > 6 else "")
        for kind in ("open", "part", "ahead", "closed")
        if kind in by_share
    ]
    return f"{visible(data.segments[row].label)}: {'; '.join(said)}."


def _cursor(data: MaskData) -> list[str]:
    words = cell_words(data)
    lines = [] if words is None else [words.sentence()]
    return [f"{text[0].upper()}{text[1:]}." for text in (*lines, count_words(data))]
