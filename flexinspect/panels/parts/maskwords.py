"""A mask in words: who may look at whom and why not, how many, and where it is not as declared."""

from __future__ import annotations

from dataclasses import dataclass

from flexinspect.panels.parts.maskdata import MaskData
from flexinspect.prompts import Segment, SegmentKind
from flexinspect.text import visible

# -- one cell -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CellWords:
    """A cell in words: `row` may look at `key` or not, `why` (may be empty); `style` of it all."""

    row: str
    key: str
    may: str
    why: str
    style: str = "text"

    def sentence(self) -> str:
        """Return the whole sentence."""
        return f"row {self.row} {self.may} {self.key}" + (f": {self.why}" if self.why else "")


def token_words(data: MaskData, position: int, *, segment: bool = True) -> str:
    """Return a position as `45 "capital" (paraphrase 3)`, as far as it is known."""
    word = data.words.get(position)
    text = f'{position} "{word.text.strip() or word.text}"' if word else f"{position}"
    about = data.segment(position) if segment else None
    return f"{text} ({visible(about.label)})" if about else text


def cell_words(data: MaskData) -> CellWords | None:
    """Return the cell under the cursor in words, None without a cursor."""
    if data.cursor is None:
        return None
    row, key = data.cursor
    position = int(data.sheet.positions[row])
    who, whom = token_words(data, position), token_words(data, key)
    is_open, meant = data.sheet.cell(row, key), declared_at(data, position, key)
    if data.view == "declared" and meant is not None:
        why = "" if meant else _why_closed(data, row, key, meant=False)
        return CellWords(who, whom, "should look at" if meant else "should not look at", why)
    if data.view == "received" or is_open is None:
        return _received_words(data, row, key, is_open)
    if is_open:
        leaked = meant is False
        why = f"leaked, {rule_name(data)} closes it{_block_words(data, row, key)}" if leaked else ""
        return CellWords(who, whom, "may look at", why, "bad" if leaked else "text")
    if meant and key < data.sheet.part_of(row).fed_at(row).kv_offset:
        return CellWords(who, whom, "may not look at", "its key is no longer in the cache")
    if meant:
        gone = f"it was not executed{_block_words(data, row, key)}"
        why = f"lost, {rule_name(data)} opens it, but {gone}"
        return CellWords(who, whom, "may not look at", why, "bad")
    if data.sheet.row_count(row) == 0:
        why = "the row sees nothing at all" + _empty_reason(data, position)
        return CellWords(who, whom, "may not look at", why, "warn")
    return CellWords(who, whom, "may not look at", _why_closed(data, row, key, meant=meant))


def declared_at(data: MaskData, position: int, key: int) -> bool | None:
    """Return whether a cell is declared open, None where no rule was declared."""
    rule = data.sheet.rule
    if rule is None:
        return None
    region = rule.region(position)
    return key <= position and (key < rule.head[region] or key >= rule.low[region])


def rule_name(data: MaskData) -> str:
    """Return the name of the declared rule, printable."""
    return visible(data.sheet.rule.name) if data.sheet.rule else "the declared mask"


def _received_words(data: MaskData, row: int, key: int, is_open: bool | None) -> CellWords:
    who = token_words(data, int(data.sheet.positions[row]))
    whom = token_words(data, key)
    part = data.block_part(row)
    block = part.at(row, key) if part else ""
    size = f" of {part.size[0]} x {part.size[1]}" if part and part.size else ""
    if block == "partial":
        return CellWords(who, whom, "and", f"their block{size} is partial, the rule decides")
    if block == "full":
        return CellWords(who, whom, "may look at", f"their block{size} is full, no rule is asked")
    if block:
        return CellWords(who, whom, "may not look at", f"their block{size} is not visited")
    if is_open is None:
        return CellWords(who, whom, "and", "what was executed here was not recorded", "muted")
    return CellWords(who, whom, "may look at" if is_open else "may not look at", "")


def _block_words(data: MaskData, row: int, key: int) -> str:
    """Say what the block tables of a compiled call have to do with a difference."""
    part = data.block_part(row)
    block = part.at(row, key) if part and data.mask and data.mask.compiled else ""
    return {
        "full": " (its block is full, so the rule is not asked)",
        "not visited": " (its block is not visited)",
    }.get(block, "")


def _empty_reason(data: MaskData, position: int) -> str:
    about = data.segment(position)
    isolated = data.about.declared.get("separators") == "isolated"
    if isolated and about is not None and about.kind is SegmentKind.SEPARATOR:
        return ", as --separators isolated asks"
    return ""


def _why_closed(data: MaskData, row: int, key: int, *, meant: bool | None) -> str:
    position = int(data.sheet.positions[row])
    if key > position and meant is not None:  # every rule that is declared is causal
        return "it comes later (causal)"
    fed = data.sheet.part_of(row).fed_at(row)
    if key < fed.kv_offset and data.view != "declared":
        return "its key is no longer in the cache"
    if meant is None:
        rule = data.mask.rule if data.mask else None
        return f"closed by {visible(rule)}" if rule else "closed by the mask that the layer got"
    return _kept_apart(data, data.segment(position), data.segment(key), position)


def _kept_apart(data: MaskData, mine: Segment | None, other: Segment | None, position: int) -> str:
    by = f"kept apart by {rule_name(data)}"
    if _empty_reason(data, position):
        return "rows of separators see nothing (--separators isolated)"
    if mine is None or other is None:
        return by
    owners = [data.segments[s.owner] for s in (mine, other) if 0 <= s.owner < len(data.segments)]
    if len({o.start for o in owners}) == 2 and all(
        o.kind is SegmentKind.PARAPHRASE for o in owners
    ):
        return f"another paraphrase, {by}"
    return f"{visible(other.label)} is closed to {visible(mine.label)} by {rule_name(data)}"


# -- counts ---------------------------------------------------------------------------------------


def count_words(data: MaskData, *, short: bool = False) -> str:
    """Return how many keys the cursor's row sees (else the newest row's), and who sees its key."""
    sheet = data.sheet
    row = data.cursor[0] if data.cursor else data.current[-1] if data.current else None
    if row is None:
        return "the rows of this step are not shown"
    position = int(sheet.positions[row])
    name = str(position) if data.cursor or short else token_words(data, position)
    part = sheet.part_of(row)
    if not part.is_known(row):
        text = f"row {name}: its cells were not recorded"
    else:
        n_open = sheet.row_count(row)
        of = position + 1 if n_open <= position + 1 else part.n_keys
        text = f"row {name} sees {n_open} of {of}" if n_open else f"row {name} sees nothing"
    if data.cursor is None:
        return text
    key = data.cursor[1]
    seen = f"column {key} is seen by {sheet.column_count(key)} of {sheet.n_known()}"
    return f"{text} · {seen}"


def difference_words(data: MaskData) -> str:
    """Return "lost 3 · leaked 0", "" where nothing was declared or recorded."""
    if data.sheet.rule is None or not data.sheet.n_known():
        return ""
    return f"lost {data.sheet.total('lost')} · leaked {data.sheet.total('leaked')}"


def differs(data: MaskData) -> bool:
    """Tell whether anything was executed that was not declared, or the other way round."""
    return data.sheet.total("lost") + data.sheet.total("leaked") > 0


def first_pairs(data: MaskData) -> list[str]:
    """Return where the first lost and the first leaked cell are; leaked ones come first."""
    said = []
    meanings = (("leaked", "executed, declared closed"), ("lost", "declared open, not executed"))
    for kind, meaning in meanings:
        found = data.sheet.first(kind)
        if found is not None:
            row = token_words(data, int(data.sheet.positions[found[0]]))
            key = token_words(data, found[1])
            said.append(f"first {kind} pair ({meaning}): row {row}, key {key}")
    return said


def window_words(data: MaskData) -> str:
    """Return which steps are on the sheet: "steps 900-1923 of 100000"."""
    sheet = data.sheet
    return f"steps {sheet.first_step}-{sheet.last_step} of {sheet.n_steps}"


def block_label(data: MaskData) -> str:
    """Return "blocks of 128 x 128: 3 partial, 1 full, 2 not visited" of the part in question."""
    row = data.cursor[0] if data.cursor else data.current[-1] if data.current else 0
    part = data.block_part(row)
    if part is None:
        return ""
    if part.size is None:
        return "no block tables" + (": a dense mask" if part.dense else " recorded")
    if not part.blocks:
        return "its block tables were not recorded"
    partial, full, closed = part.counts()
    size = f"{part.size[0]} x {part.size[1]}"
    return f"blocks of {size}: {partial} partial, {full} full, {closed} not visited"
