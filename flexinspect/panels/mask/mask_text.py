"""A mask described as text: source, open cells, differences from the declared mask, one cell."""

from __future__ import annotations

from msgspec import Struct

from flexinspect.core.text import capitalize, escape_unprintable
from flexinspect.panels.mask.mask_data import MAX_LISTED_ROWS, MaskData
from flexinspect.panels.mask.mask_layout import MaskViewMode
from flexinspect.panels.mask.mask_segments import count_pairs, format_open_share
from flexinspect.records.prompt import SegmentKind
from flexinspect.records.step import INFERRED_MASK, MaskRecord

VIEW_LABELS: dict[MaskViewMode, str] = {
    "executed": "ran",
    "received": "passed in",
    "declared": "intended",
    "difference": "what differs",
}
"""What the views are called where they are shown."""

MAX_TABLE_SEGMENTS = 16
"""Maximum number of segments for which a table of all pairs is written."""


def describe_mask(data: MaskData) -> list[str]:
    """Describe the whole mask in lines of text."""
    blocks, cell = format_block_counts(data), describe_cell(data)
    lines = [*_describe_source(data), *_describe_open_cells(data), *_describe_difference(data)]
    lines += _describe_empty_rows(data)
    lines += [f"Block tables of the step: {blocks}."] if blocks else []
    lines += _describe_segments(data)
    lines += [f"{capitalize(cell.sentence())}."] if cell is not None else []
    return [*lines, f"{capitalize(format_counts(data))}."]


def _describe_source(data: MaskData) -> list[str]:
    mask_view, place = data.mask_view, data.place
    check, heads = data.lse_check, "the same for all heads"
    if mask_view.heads > 1:
        heads = f"head {mask_view.head} of {mask_view.heads}"
    where = f"layer {place.layer}, {heads}, generation {place.generation}, at step {place.step}"
    size = f"{mask_view.n_rows} rows, {mask_view.n_keys} keys"
    lines = [
        f"The mask of {where}: {size}, view '{VIEW_LABELS[data.view_mode]}', {format_check(data)}."
    ]
    if data.fallback_reason:
        lines.append(f"{data.fallback_reason}.")
    if check.is_failed:
        limit = f"its tolerance of {check.tolerance:g}"
        lines.append(f"The check exceeds {limit}: the newest row is not what ran.")
    if mask_view.is_truncated:
        lines.append(f"Step 0 and {format_steps(data)} are shown.")
    if data.mask is not None:
        lines.append(_describe_received_mask(data.mask, "cursor's row" if data.cursor else "step"))
    return lines


def _describe_received_mask(mask: MaskRecord, receiver: str) -> str:
    kind = _KIND_NAMES.get(mask.kind, escape_unprintable(mask.kind))
    parts = [f"{kind}, {mask.q_len} x {mask.kv_len}"]
    if mask.block_q:
        parts[0] += f" in blocks of {mask.block_q} x {mask.block_kv}"
    if mask.mask_mod:
        source = f" ({escape_unprintable(mask.mask_mod_source)})" if mask.mask_mod_source else ""
        parts.append(f"mask_mod {escape_unprintable(mask.mask_mod)}{source}")
    if mask.added is not None:
        parts.append(f"{mask.added['lowest']:g} added to {mask.added['cells']} open cells")
    if mask.compiled:
        parts.append("compiled")
    parts.append(f"fingerprint {escape_unprintable(mask.fingerprint)}")
    return f"The {receiver} received {', '.join(parts)}."


_KIND_NAMES = {
    "block": "a block mask",
    "none": "no mask (every key is open)",
    "score_mod": "no mask, but a score_mod that closes keys",
    "none, causal": "no mask, on a path that applies a causal mask itself",
    INFERRED_MASK: "no mask; a causal mask reproduces the recorded attention output",
    "bool": "a dense bool mask",
    "float": "a dense float mask",
}


def _describe_open_cells(data: MaskData) -> list[str]:
    mask_view, n_known = data.mask_view, data.mask_view.n_known()
    if not n_known:
        return ["No executed cells of these rows were recorded."]
    n_cells, n_open = n_known * mask_view.n_keys, mask_view.count("open")
    lines = [f"{n_open} of {n_cells} cells are open ({100 * n_open / n_cells:.1f} %)."]
    n_unknown = mask_view.n_rows - n_known
    return [*lines, f"The cells of {n_unknown} rows were not recorded."] if n_unknown else lines


def _describe_difference(data: MaskData) -> list[str]:
    mask_view = data.mask_view
    if mask_view.spec is None:
        mask_mod = data.generation_row.declared.get("mask_mod")
        name = f" {escape_unprintable(str(mask_mod))}" if mask_mod else ""
        return [f"The mask{name} was not declared, so there is nothing to compare it with."]
    declared = f"The declared mask is {spec_name(data)}"
    if not mask_view.n_known():
        return [f"{declared}."]
    if not has_difference(data):
        return [f"{declared}; the executed mask is the same."]
    return [
        f"{declared}; the executed mask differs: {format_difference(data)}.",
        *(f"{capitalize(pair)}." for pair in describe_first_pairs(data)),
    ]


def _describe_empty_rows(data: MaskData) -> list[str]:
    n_empty = len(data.empty_rows)
    if not n_empty:
        return ["Every recorded row attends to a key."] if data.mask_view.n_known() else []
    rows = data.mask_view.positions[data.empty_rows[:MAX_LISTED_ROWS]].tolist()
    more = ", ..." if n_empty > len(rows) else ""
    names = ", ".join(format_token(data, row) for row in rows)
    attend = "rows attend" if n_empty > 1 else "row attends"
    return [f"{n_empty} {attend} to no key: {names}{more}."]


# -- pairs of segments ----------------------------------------------------------------------------


def _describe_segments(data: MaskData) -> list[str]:
    if not data.segments or not data.mask_view.n_known():
        return []
    every = range(len(data.segments))
    pairs = count_pairs(data.mask_view, every, every)
    names = [escape_unprintable(segment.label) for segment in data.segments]
    shares = {
        row: [format_open_share(*pair) for pair in zip(opened, past, strict=True)]
        for row, (opened, past) in enumerate(
            zip(pairs.open.tolist(), pairs.past.tolist(), strict=True)
        )
        if any(opened) or any(past)
    }
    if len(names) > MAX_TABLE_SEGMENTS:
        return [_describe_segment_row(names, row, texts) for row, texts in shares.items()]
    width = max(map(len, names)) + 4
    rows = [(" " * width, [*map(str, every)])]
    rows += [(f"{row:>2} {names[row]:<{width - 3}}", texts) for row, texts in shares.items()]
    lines = [name + "".join(f"{text:>7}" for text in texts) for name, texts in rows]
    return [
        "Which segment (row) attends to which (column): to all of its past keys (open), to none",
        "(closed), to a share of them (0.11), or also to later keys (ahead); - has no past key:",
        *lines,
    ]


def _describe_segment_row(names: list[str], row: int, shares: list[str]) -> str:
    by_share: dict[str, list[str]] = {"open": [], "part": [], "ahead": [], "closed": [], "-": []}
    for name, share in zip(names, shares, strict=False):
        by_share[share if share in by_share else "part"].append(name)
    del by_share["-"]
    parts = (
        f"{kind} {', '.join(own[:6])}" + (", ..." if len(own) > 6 else "")
        for kind, own in by_share.items()
        if own
    )
    return f"{names[row]}: {'; '.join(parts)}."


# -- one cell -------------------------------------------------------------------------------------


class CellDescription(Struct, frozen=True):
    """A cell as text: the row, its relation to the key ("attends to"), the reason (may be empty).

    `style` is the name of the style of the whole text.
    """

    row: str
    key: str
    relation: str
    reason: str
    style: str

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
    names = format_token(data, int(data.mask_view.positions[row])), format_token(data, key)
    return CellDescription(*names, *_relate(data, row, key))


def _relate(data: MaskData, row: int, key: int) -> tuple[str, str, str]:
    """Return the relation of a row to a key, the reason, and the name of the style."""
    position = int(data.mask_view.positions[row])
    is_open, declared = data.mask_view.cell(row, key), is_declared_open(data, position, key)
    if data.view_mode == "declared" and declared is not None:
        if declared:
            return "should attend to", "", "text"
        return "should not attend to", _closed_reason(data, row, key, declared=False), "text"
    if data.view_mode == "received" or is_open is None:
        return _describe_received_cell(data, row, key, is_open)
    if is_open:
        if declared is not False:
            return _OPEN, "", "text"
        block = _format_block_reason(data, row, key)
        return _OPEN, f"leaked, {spec_name(data)} closes it{block}", "bad"
    if declared and key < data.mask_view.part_of(row).step_at(row).kv_offset:
        return _CLOSED, "its key is no longer in the cache", "text"
    if declared:
        block = _format_block_reason(data, row, key)
        return _CLOSED, f"lost, {spec_name(data)} opens it, but it was not executed{block}", "bad"
    if data.mask_view.row_count(row) == 0:
        return _CLOSED, "the row attends to no key" + _empty_reason(data, position), "warn"
    return _CLOSED, _closed_reason(data, row, key, declared=declared), "text"


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
) -> tuple[str, str, str]:
    part = data.block_part(row)
    size = f" of {part.size[0]} x {part.size[1]}" if part and part.size else ""
    match part.at(row, key) if part else "":
        case "partial":
            return "and", f"their block{size} is partial, the mask_mod decides", "text"
        case "full":
            return _OPEN, f"their block{size} is full, no mask_mod is called", "text"
        case "not visited":
            return _CLOSED, f"their block{size} is not visited", "text"
    if is_open is None:
        return "and", "the executed mask was not recorded here", "muted"
    return _OPEN if is_open else _CLOSED, "", "text"


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
    is_isolated = data.generation_row.declared.get("separators") == "isolated"
    is_separator = segment is not None and segment.kind is SegmentKind.SEPARATOR
    return ", as set by --separators isolated" if is_isolated and is_separator else ""


def _closed_reason(data: MaskData, row: int, key: int, *, declared: bool | None) -> str:
    position = int(data.mask_view.positions[row])
    if key > position and declared is not None:  # every declared mask is causal
        return "it comes later (causal)"
    step_rows = data.mask_view.part_of(row).step_at(row)
    if key < step_rows.kv_offset and data.view_mode != "declared":
        return "its key is no longer in the cache"
    if declared is None:
        mask_mod = data.mask.mask_mod if data.mask else None
        name = escape_unprintable(mask_mod) if mask_mod else "the mask that the layer received"
        return f"closed by {name}"
    own, other, by = data.segment(position), data.segment(key), f"separated by {spec_name(data)}"
    if _empty_reason(data, position):
        return "rows of separators attend to no key (--separators isolated)"
    if own is None or other is None:
        return by
    owners = [data.segments[s.owner] for s in (own, other) if 0 <= s.owner < len(data.segments)]
    paraphrases = {o.start for o in owners if o.kind is SegmentKind.PARAPHRASE}
    if len(paraphrases) == 2:
        return f"another paraphrase, {by}"
    names = (escape_unprintable(segment.label) for segment in (other, own))
    return f"{' is closed to '.join(names)} by {spec_name(data)}"


# -- counts ---------------------------------------------------------------------------------------


def format_check(data: MaskData) -> str:
    """Return whether recomputed and executed attention agree: "verified ✓ (error 3e-06)"."""
    check = data.lse_check
    if check.is_failed:
        return f"{check.describe()}: not what ran"
    if not check.is_checked:
        return check.describe()
    return f"verified ✓ ({check.describe().removeprefix('LSE ').removeprefix('output ')})"


def format_counts(data: MaskData, *, segment: bool = True) -> str:
    """Return how many keys the cursor's row attends to, and how many rows to the cursor's key.

    Without a cursor it is the row of the step: `token 71 "Par" (generated) sees 1 of 72 keys`.
    """
    if data.cursor is None:
        return format_step_row(data, segment=segment)
    row, key = data.cursor
    mask_view, position = data.mask_view, int(data.mask_view.positions[row])
    counts = count_row(data, row)
    text = f"row {position}: its cells were not recorded"
    if counts is not None:
        text = f"row {position}: {counts[0]} of {counts[1]} keys open"
    n_rows = mask_view.n_known()
    return f"{text} · key {key}: open to {mask_view.column_count(key)} of {n_rows} rows"


def format_step_row(data: MaskData, *, segment: bool = True) -> str:
    """Return how many keys the newest row of the step attends to, with its segment if asked."""
    if not data.current:
        return "the rows of this step are not shown"
    row = data.current[-1]
    position = int(data.mask_view.positions[row])
    name = f"token {format_token(data, position, segment=segment)}"
    counts = count_row(data, row)
    if counts is None:
        return f"{name}: its cells were not recorded"
    return f"{name} sees {counts[0]} of {counts[1]} keys"


def count_row(data: MaskData, row: int) -> tuple[int, int] | None:
    """Return the number of keys that a row attends to, and of those it could; None if not recorded.

    These are the keys up to its own position, or all keys of a row that looks ahead.
    """
    part = data.mask_view.part_of(row)
    if not part.known[row - part.row]:
        return None
    n_past, n_open = int(data.mask_view.positions[row]) + 1, data.mask_view.row_count(row)
    return n_open, n_past if n_open <= n_past else part.n_keys


def format_difference(data: MaskData) -> str:
    """Return "lost 3 · leaked 0", "" if no mask was declared or none recorded."""
    if data.mask_view.spec is None or not data.mask_view.n_known():
        return ""
    return f"lost {data.mask_view.count('lost')} · leaked {data.mask_view.count('leaked')}"


def has_difference(data: MaskData) -> bool:
    """Whether the executed mask differs from the declared one."""
    return data.mask_view.count("lost") + data.mask_view.count("leaked") > 0


def describe_first_pairs(data: MaskData, *, short: bool = False) -> list[str]:
    """Describe the first leaked and the first lost cell; `short` without what the words mean."""
    lines = []
    meanings = (("leaked", "executed, declared closed"), ("lost", "declared open, not executed"))
    for kind, meaning in meanings:
        cell = data.mask_view.first_cell(kind)
        if cell is not None:
            row = format_token(data, int(data.mask_view.positions[cell[0]]))
            key = format_token(data, cell[1])
            about = "" if short else f" ({meaning})"
            lines.append(f"first {kind} pair{about}: row {row}, key {key}")
    return lines


def format_steps(data: MaskData) -> str:
    """Return the steps of the mask view: "steps 900-1923 of 100000"."""
    mask_view = data.mask_view
    return f"steps {mask_view.first_step}-{mask_view.last_step} of {mask_view.n_steps}"


def format_block_counts(data: MaskData) -> str:
    """Return "blocks of 128 x 128: 3 partial, 1 full, 2 not visited" for the part of the cursor's
    row, or of the newest one."""
    part = data.block_part(data.focus_row or 0)
    if part is None:
        return ""
    if part.size is None:
        return "no block tables" + (": a dense mask" if part.is_dense else " recorded")
    if not part.blocks:
        return "its block tables were not recorded"
    partial, full, closed = part.counts()
    size = f"{part.size[0]} x {part.size[1]}"
    return f"blocks of {size}: {partial} partial, {full} full, {closed} not visited"
