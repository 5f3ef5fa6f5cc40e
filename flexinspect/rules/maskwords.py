"""What a mask that differs is called, and its sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexinspect.findings import Severity
from flexinspect.prompts import SegmentKind
from flexinspect.records import CallRecord, MaskRecord, StepRecord
from flexinspect.rules.maskdiff import CAUSAL, MOVED, OPEN, WINDOW, Difference
from flexinspect.rules.scene import Scene
from flexinspect.rules.words import counted, layers, numbers, printable

NOT_APPLIED, LEAK, LOST = "mask.not-applied", "mask.leak", "mask.lost"
NONE, FUTURE, BOOL_ADDED = "mask.none", "mask.future", "mask.bool-added"
MASK_FUNCTION = "mask-function"
"""The event that an attention function of one's own has a mask function, which gave no mask."""

MERGED, LAYERS_DIFFER, PADDING = "mask.merged", "mask.layers-differ", "mask.padding"

NO_MASK = "none"
_PATHS = {
    "flex uncompiled": "FlexAttention",
    "flex compiled": "compiled FlexAttention",
    "sdpa": "SDPA",
    "eager": "eager attention",
}


@dataclass(frozen=True, slots=True)
class Group:
    """Layers of a step that were given the same mask; `call` is the first of their calls.

    `elsewhere` is the path of most other layers, where it is another one.
    """

    mask: MaskRecord
    call: CallRecord
    layers: tuple[int, ...]
    n_layers: int
    elsewhere: str = ""

    @property
    def is_own_rule(self) -> bool:
        """Whether a rule ran that is none of transformers'."""
        rule = self.mask.rule or ""
        return self.mask.kind == "block" and not rule.startswith("transformers.")

    @property
    def is_added(self) -> bool:
        """Whether bools were added to the scores."""
        return self.mask.kind == "bool" and self.call.path.startswith(("eager", "flex"))

    @property
    def is_fallback(self) -> bool:
        """Whether these layers took another path than the others, or one made up for a failure."""
        return self.call.swallowed is not None or self.elsewhere != ""


@dataclass(frozen=True, slots=True)
class Case:
    """A mask that is not the one meant: what ran where, and how it differs.

    `amount` belongs to the pattern (moved by, window of). `earlier` is the generation whose mask it
    is. `pieces` are how many block-diagonal pieces of `segments` are left. `id` and `severity` are
    given where they do not follow from the rest.
    """

    step: StepRecord
    group: Group
    found: Difference
    name: str
    assumed: bool = False
    pattern: str = ""
    amount: int = 0
    earlier: int | None = None
    heads: tuple[int, ...] = ()
    n_heads: int = 1
    pieces: int = 0
    segments: int = 0
    id: str = ""
    severity: Severity | None = None
    varies: bool = False

    def pairs(self, n: int) -> str:
        """Return "3 pairs", "up to" so many where it varies over the layers."""
        return ("up to " if self.varies else "") + counted(n, "pair")


def id_of(case: Case) -> str:
    """Return the id that a difference goes by."""
    group, found = case.group, case.found
    if case.id:
        return case.id
    if group.is_added and found.leaked:
        return BOOL_ADDED
    if case.pattern == OPEN:
        return NONE if group.mask.kind == NO_MASK else NOT_APPLIED
    merged = group.is_own_rule and found.leaked and case.pieces < case.segments
    if merged and case.pattern != MOVED and not found.future:
        return MERGED
    if case.pattern == CAUSAL and found.leaked:
        return NOT_APPLIED
    if found.leaked:
        return FUTURE if found.future == found.leaked else LEAK
    return LOST


def ran(group: Group) -> str:
    """Return what ran in words: "causal SDPA without a mask", "FlexAttention with the rule r"."""
    path = _PATHS.get(group.call.path, f"attention '{printable(group.call.backend)}'")
    kind = group.mask.kind
    if kind == "none, causal":
        words = f"causal {path} without a mask"
    elif kind == NO_MASK:
        words = f"{path} without a mask"
    elif kind == "block":
        words = f"{path} with the rule {printable(group.mask.rule or '(unnamed)')}"
    else:
        words = f"{path} with a {kind} mask"
    return words + _why(group)


def _why(group: Group) -> str:
    call = group.call
    if call.swallowed is not None:
        return f" after {printable(call.swallowed)} was swallowed"
    if group.elsewhere:
        return f" (the other layers ran {group.elsewhere})"
    if call.handed is not None and group.mask.kind.startswith(NO_MASK) and call.handed != NO_MASK:
        return f", though it was handed {printable(call.handed)}"
    return ""


def where(group: Group, heads: Sequence[int] = (), n_heads: int = 1) -> str:
    """Return "Layer 3", "All 8 layers", "Layers 0-2 in heads 0, 3 of 8"."""
    words = layers(group.layers, group.n_layers)
    words = words[0].upper() + words[1:]
    if heads and len(heads) < n_heads:
        head = f"head {heads[0]}" if len(heads) == 1 else f"heads {numbers(heads)}"
        words += f" in {head} of {n_heads}"
    return words


# -- sentences ------------------------------------------------------------------------------------


def sentence(scene: Scene, case: Case, finding_id: str) -> str:
    """Return what is wrong, where, and how many, in one sentence."""
    found = case.found
    start = f"{where(case.group, case.heads, case.n_heads)} ran {ran(case.group)}"
    said = {
        NONE: _open_words,
        BOOL_ADDED: _added_words,
        MERGED: _merged_words,
        NOT_APPLIED: _not_applied_words,
        FUTURE: _future_words,
    }.get(finding_id, _count_words)(scene, case)
    return f"{start}{said}{_pair(scene, found)}{_also(case)}."


def _open_words(scene: Scene, case: Case) -> str:
    backend = printable(case.group.call.backend)
    known = case.group.call.backend in ("sdpa", "eager", "flex_attention", "direct")
    known = known or any(event.kind == MASK_FUNCTION for event in case.step.events)
    why = "" if known else f" (attention '{backend}' has no mask function)"
    return f"{why}: every cell is open, so that {_future_rows(scene, case.found)}"


def _added_words(scene: Scene, case: Case) -> str:
    return (
        ", which adds 1 to the scores of its open cells and closes nothing: every cell is open"
        + (f", so that {_future_rows(scene, case.found)}" if case.found.future else "")
    )


def _merged_words(scene: Scene, case: Case) -> str:
    found = case.found
    pieces = counted(case.pieces, "block-diagonal piece")
    return (
        f", whose mask holds {pieces}, where {_named(case)} {case.segments} segments: "
        f"{_between(scene, found)} ({case.pairs(found.leaked)})"
    )


def _not_applied_words(scene: Scene, case: Case) -> str:
    found, group = case.found, case.group
    is_all = len(group.layers) == group.n_layers
    is_none = group.mask.kind.startswith(NO_MASK) and group.call.handed is None
    received = f" (received: None, backend {printable(group.call.backend)})" if is_none else ""
    if case.pattern == OPEN:
        cells = found.n_open + found.n_closed
        return (
            f", with {found.n_open} of {cells} cells open where {case.name} opens "
            f"{found.n_meant}, so that {_future_rows(scene, found)}"
        )
    lost = f", and {found.lost} that it opens are closed" if found.lost else ""
    applied = f"applied in 0 of {counted(group.n_layers, 'layer')}" if is_all else "not applied"
    if case.assumed:
        return (
            f"{received}, so that the structure of what was named was {applied}: "
            f"{_between(scene, found)} ({case.pairs(found.leaked)})"
        )
    return (
        f"{received}, so {case.name} was {applied}: {case.pairs(found.leaked)} that it closes "
        f"{'is' if found.leaked == 1 else 'are'} open{_across(scene, found)}{lost}"
    )


def _future_words(scene: Scene, case: Case) -> str:
    found = case.found
    rows = f"{_future_rows(scene, found)} ({case.pairs(found.future)})"
    if found.n_closed or found.n_rows < 2:
        return f", in which {rows}"
    cells = found.n_open + found.n_closed
    return (
        f", with {found.n_open} of {cells} cells open where {case.name} opens {found.n_meant}, so "
        f"that {rows}"
    )


def _count_words(scene: Scene, case: Case) -> str:
    found, name = case.found, case.name
    if case.assumed:
        moved = f", as if moved by {case.amount:+d}" if case.pattern == MOVED else ""
        return f": {_between(scene, found)} ({case.pairs(found.leaked)}{moved})"
    lost = case.pairs(found.lost)
    if not found.leaked:
        return f", which closes {lost} that {name} opens{_pattern_words(case)}"
    also = f" and closes {lost} that it opens" if found.lost else ""
    return (
        f", which opens {case.pairs(found.leaked)} that {name} closes{_across(scene, found)}"
        f"{also}{_pattern_words(case)}"
    )


def _across(scene: Scene, found: Difference) -> str:
    """Return " (36 of them let segment 2 see segment 1)", "" where no two such parts do."""
    if found.first_across is None:
        return ""
    kinds = [segment.kind for segment in scene.segments]
    across = [p for p in found.between if p[0] != p[1]]
    across = [p for p in across if kinds[p[0]] is kinds[p[1]] is SegmentKind.PARAPHRASE]
    row, key = max(across, key=lambda pair: found.between[pair])
    n = found.between[row, key]
    some = "they let" if n == found.leaked else f"{n} of them let"
    which = "it lets" if found.leaked == 1 else some
    return f" ({which} {_label(scene, row)} see {_label(scene, key)})"


def _pattern_words(case: Case) -> str:
    if case.earlier is not None:
        return f" (it is the mask of generation {case.earlier})"
    if case.pattern == MOVED:
        return f" (the executed mask is the declared one moved by {case.amount:+d})"
    if case.pattern == WINDOW:
        return (
            f" (it is the declared one cut to the newest {counted(case.amount, 'key')}, and the "
            "layer states no such window)"
        )
    if not case.found.leaked and case.found.lost and case.step.q_len == 1:
        n_open = case.found.n_open
        alone = ", as for row 0" if case.found.furthest == [0] else ""
        return f" ({n_open} of {counted(n_open + case.found.lost, 'key')} left{alone})"
    return ""


def _also(case: Case) -> str:
    if not case.assumed:
        return ""
    return f" (no mask was declared; {case.segments} segments are taken to be kept apart)"


def _named(case: Case) -> str:
    return "there are" if case.assumed else f"{case.name} keeps apart"


def _future_rows(scene: Scene, found: Difference) -> str:
    """Return "rows 0-10 see the future"."""
    rows = [row for row, last in zip(_positions(found), found.furthest, strict=True) if last > row]
    if len(rows) == 1:
        return f"row {rows[0]} sees the future"
    return f"rows {numbers(rows)} see the future" if len(rows) <= 64 else _many(rows)


def _many(rows: Sequence[int]) -> str:
    return f"{len(rows)} rows from {rows[0]} to {rows[-1]} see the future"


def _positions(found: Difference) -> range:
    return range(found.first_row, found.first_row + len(found.furthest))


def _between(scene: Scene, found: Difference) -> str:
    """Return "paraphrase 2 sees paraphrase 1", the pair of segments with most leaked pairs."""
    (row, key), _ = max(found.between.items(), key=lambda item: item[1])
    rest = len({pair for pair in found.between if pair[0] != pair[1]}) - 1
    more = f" and {counted(rest, 'more pair')} of segments leak" if rest > 0 else ""
    return f"{_label(scene, row)} sees {_label(scene, key)}{more}"


def _label(scene: Scene, index: int) -> str:
    if 0 <= index < len(scene.segments):
        return printable(scene.segments[index].label)
    return "the sequence"


def _pair(scene: Scene, found: Difference) -> str:
    """Return the first offending pair in words, with its segments."""
    pair, sees = found.first_across or found.first_leaked, "sees"
    if not found.leaked:
        pair, sees = found.first_lost, "does not see"
    if pair is None:
        return ""
    row, key = (_placed(scene, pos) for pos in pair)
    several = found.leaked > 1 or (not found.leaked and found.lost > 1)
    return f"; {'first: ' if several else ''}{row} {sees} {key}"


def _placed(scene: Scene, pos: int) -> str:
    about = scene.segment_at(pos)
    named = len(scene.segments) > 2 and about is not None
    return scene.position(pos) + (f" ({printable(about.label)})" if named and about else "")


# -- segments -------------------------------------------------------------------------------------


def pieces_left(scene: Scene, found: Difference) -> tuple[int, int]:
    """Return how many pieces the paraphrases form, joined where one sees all of another.

    And how many paraphrases there are.
    """
    parts = [n for n, s in enumerate(scene.segments) if s.kind is SegmentKind.PARAPHRASE]
    piece = {n: n for n in parts}
    for (row, key), n_pairs in found.between.items():
        whole = row in piece and key in piece
        if whole and n_pairs >= len(scene.segments[row]) * len(scene.segments[key]):
            old, new = piece[row], piece[key]
            piece = {n: new if at == old else at for n, at in piece.items()}
    return len({*piece.values()}), len(parts)


def padding_sentence(scene: Scene, case: Case, finding_id: str) -> str:
    """Return who sees padding."""
    found = case.found
    rows = counted(len(found.leaking), "row")
    return (
        f"{where(case.group, case.heads, case.n_heads)} ran {ran(case.group)}, in which {rows} "
        f"{'sees' if len(found.leaking) == 1 else 'see'} keys of padding "
        f"({case.pairs(found.leaked)}){_pair(scene, found)}."
    )
