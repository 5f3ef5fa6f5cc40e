"""A mask in words: who may look at whom and why not, how many, and where it is not as declared."""

from __future__ import annotations

from dataclasses import dataclass

from flexinspect.panels.parts.maskdata import MaskData
from flexinspect.prompts import Segment, SegmentKind
from flexinspect.text import escape_unprintable

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
