"""What the findings about masks stand for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flexinspect.core.text import format_layers, format_ranges, plural, printable
from flexinspect.records.finding import Severity
from flexinspect.records.prompt import SegmentKind
from flexinspect.records.step import CallRecord, MaskRecord, StepRecord
from flexinspect.rules.context import RuleContext
from flexinspect.rules.engine import FindingKind
from flexinspect.rules.masks.mask_difference import CAUSAL, MOVED, OPEN, WINDOW, CellDifference

MASK_NOT_APPLIED, MASK_LEAK, MASK_LOST = "mask.not-applied", "mask.leak", "mask.lost"
MASK_NONE, MASK_FUTURE, BOOL_ADDED = "mask.none", "mask.future", "mask.bool-added"
MASK_FUNCTION_EVENT = "mask-function"
"""The event that an attention function of one's own has a mask function, which gave no mask."""

MASK_MERGED, LAYERS_DIFFER, MASK_PADDING = "mask.merged", "mask.layers-differ", "mask.padding"

NO_MASK = "none"
_PATH_NAMES = {
    "flex uncompiled": "FlexAttention",
    "flex compiled": "compiled FlexAttention",
    "sdpa": "SDPA",
    "eager": "eager attention",
}


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of a step that were given the same mask; `call` is the first of their calls.

    `elsewhere` is the path of most other layers, where it is another one.
    """

    mask: MaskRecord
    call: CallRecord
    layers: tuple[int, ...]
    n_layers: int
    usual_path: str = ""

    @property
    def has_custom_mask_mod(self) -> bool:
        """Whether a rule ran that is none of transformers'."""
        rule = self.mask.rule or ""
        return self.mask.kind == "block" and not rule.startswith("transformers.")

    @property
    def adds_bools(self) -> bool:
        """Whether bools were added to the scores."""
        return self.mask.kind == "bool" and self.call.path.startswith(("eager", "flex"))

    @property
    def is_fallback(self) -> bool:
        """Whether these layers took another path than the others, or one made up for a failure."""
        return self.call.swallowed is not None or self.usual_path != ""


@dataclass(frozen=True, slots=True)
class MaskCase:
    """A mask that is not the one meant: what ran where, and how it differs.

    `amount` belongs to the pattern (moved by, window of). `earlier` is the generation whose mask it
    is. `pieces` are how many block-diagonal pieces of `segments` are left. `id` and `severity` are
    given where they do not follow from the rest.
    """

    step: StepRecord
    group: LayerGroup
    difference: CellDifference
    expected: str
    assumed: bool = False
    pattern: str = ""
    amount: int = 0
    earlier_generation: int | None = None
    heads: tuple[int, ...] = ()
    n_heads: int = 1
    pieces: int = 0
    segments: int = 0
    id: str = ""
    severity: Severity | None = None
    varies: bool = False

    def format_pairs(self, n: int) -> str:
        """Return "3 pairs", "up to" so many where it varies over the layers."""
        return ("up to " if self.varies else "") + plural(n, "pair")


def case_finding_id(case: MaskCase) -> str:
    """Return the id that a difference goes by."""
    group, found = case.group, case.difference
    if case.id:
        return case.id
    if group.adds_bools and found.leaked:
        return BOOL_ADDED
    if case.pattern == OPEN:
        return MASK_NONE if group.mask.kind == NO_MASK else MASK_NOT_APPLIED
    merged = group.has_custom_mask_mod and found.leaked and case.pieces < case.segments
    if merged and case.pattern != MOVED and not found.future:
        return MASK_MERGED
    if case.pattern == CAUSAL and found.leaked:
        return MASK_NOT_APPLIED
    if found.leaked:
        return MASK_FUTURE if found.future == found.leaked else MASK_LEAK
    return MASK_LOST


def describe_run(group: LayerGroup) -> str:
    """Return what ran in words: "causal SDPA without a mask", "FlexAttention with the rule r"."""
    path = _PATH_NAMES.get(group.call.path, f"attention '{printable(group.call.backend)}'")
    kind = group.mask.kind
    if kind == "none, causal":
        words = f"causal {path} without a mask"
    elif kind == NO_MASK:
        words = f"{path} without a mask"
    elif kind == "block":
        words = f"{path} with the rule {printable(group.mask.rule or '(unnamed)')}"
    else:
        words = f"{path} with a {kind} mask"
    return words + _describe_reason(group)


def _describe_reason(group: LayerGroup) -> str:
    call = group.call
    if call.swallowed is not None:
        return f" after {printable(call.swallowed)} was swallowed"
    if group.usual_path:
        return f" (the other layers ran {group.usual_path})"
    if call.handed is not None and group.mask.kind.startswith(NO_MASK) and call.handed != NO_MASK:
        return f", though it was handed {printable(call.handed)}"
    return ""


def describe_where(group: LayerGroup, heads: Sequence[int] = (), n_heads: int = 1) -> str:
    """Return "Layer 3", "All 8 layers", "Layers 0-2 in heads 0, 3 of 8"."""
    words = format_layers(group.layers, group.n_layers)
    words = words[0].upper() + words[1:]
    if heads and len(heads) < n_heads:
        head = f"head {heads[0]}" if len(heads) == 1 else f"heads {format_ranges(heads)}"
        words += f" in {head} of {n_heads}"
    return words


# -- sentences ------------------------------------------------------------------------------------


def case_sentence(context: RuleContext, case: MaskCase, finding_id: str) -> str:
    """Return what is wrong, where, and how many, in one sentence."""
    found = case.difference
    start = f"{describe_where(case.group, case.heads, case.n_heads)} ran {describe_run(case.group)}"
    said = {
        MASK_NONE: _describe_open,
        BOOL_ADDED: _describe_added_bools,
        MASK_MERGED: _describe_merged,
        MASK_NOT_APPLIED: _describe_not_applied,
        MASK_FUTURE: _describe_future,
    }.get(finding_id, _describe_counts)(context, case)
    return f"{start}{said}{_describe_first_pair(context, found)}{_describe_assumption(case)}."


def _describe_open(context: RuleContext, case: MaskCase) -> str:
    backend = printable(case.group.call.backend)
    known = case.group.call.backend in ("sdpa", "eager", "flex_attention", "direct")
    known = known or any(event.kind == MASK_FUNCTION_EVENT for event in case.step.events)
    why = "" if known else f" (attention '{backend}' has no mask function)"
    return f"{why}: every cell is open, so that {_describe_future_rows(context, case.difference)}"


def _describe_added_bools(context: RuleContext, case: MaskCase) -> str:
    return (
        ", which adds 1 to the scores of its open cells and closes nothing: every cell is open"
        + (
            f", so that {_describe_future_rows(context, case.difference)}"
            if case.difference.future
            else ""
        )
    )


def _describe_merged(context: RuleContext, case: MaskCase) -> str:
    found = case.difference
    pieces = plural(case.pieces, "block-diagonal piece")
    return (
        f", whose mask holds {pieces}, where {_describe_expected(case)} {case.segments} segments: "
        f"{_describe_worst_pair(context, found)} ({case.format_pairs(found.leaked)})"
    )


def _describe_not_applied(context: RuleContext, case: MaskCase) -> str:
    found, group = case.difference, case.group
    is_all = len(group.layers) == group.n_layers
    is_none = group.mask.kind.startswith(NO_MASK) and group.call.handed is None
    received = f" (received: None, backend {printable(group.call.backend)})" if is_none else ""
    if case.pattern == OPEN:
        cells = found.n_open + found.n_closed
        return (
            f", with {found.n_open} of {cells} cells open where {case.expected} opens "
            f"{found.n_meant}, so that {_describe_future_rows(context, found)}"
        )
    lost = f", and {found.lost} that it opens are closed" if found.lost else ""
    applied = f"applied in 0 of {plural(group.n_layers, 'layer')}" if is_all else "not applied"
    if case.assumed:
        return (
            f"{received}, so that the structure of what was named was {applied}: "
            f"{_describe_worst_pair(context, found)} ({case.format_pairs(found.leaked)})"
        )
    return (
        f"{received}, so {case.expected} was {applied}: {case.format_pairs(found.leaked)} that it closes "
        f"{'is' if found.leaked == 1 else 'are'} open{_describe_across(context, found)}{lost}"
    )


def _describe_future(context: RuleContext, case: MaskCase) -> str:
    found = case.difference
    rows = f"{_describe_future_rows(context, found)} ({case.format_pairs(found.future)})"
    if found.n_closed or found.n_rows < 2:
        return f", in which {rows}"
    cells = found.n_open + found.n_closed
    return (
        f", with {found.n_open} of {cells} cells open where {case.expected} opens {found.n_meant}, so "
        f"that {rows}"
    )


def _describe_counts(context: RuleContext, case: MaskCase) -> str:
    found, name = case.difference, case.expected
    if case.assumed:
        moved = f", as if moved by {case.amount:+d}" if case.pattern == MOVED else ""
        return (
            f": {_describe_worst_pair(context, found)} ({case.format_pairs(found.leaked)}{moved})"
        )
    lost = case.format_pairs(found.lost)
    if not found.leaked:
        return f", which closes {lost} that {name} opens{_describe_pattern(case)}"
    also = f" and closes {lost} that it opens" if found.lost else ""
    return (
        f", which opens {case.format_pairs(found.leaked)} that {name} closes{_describe_across(context, found)}"
        f"{also}{_describe_pattern(case)}"
    )


def _describe_across(context: RuleContext, found: CellDifference) -> str:
    """Return " (36 of them let segment 2 see segment 1)", "" where no two such parts do."""
    if found.first_across is None:
        return ""
    kinds = [segment.kind for segment in context.segments]
    across = [p for p in found.leaked_by_pair if p[0] != p[1]]
    across = [p for p in across if kinds[p[0]] is kinds[p[1]] is SegmentKind.PARAPHRASE]
    row, key = max(across, key=lambda pair: found.leaked_by_pair[pair])
    n = found.leaked_by_pair[row, key]
    some = "they let" if n == found.leaked else f"{n} of them let"
    which = "it lets" if found.leaked == 1 else some
    return f" ({which} {_segment_label(context, row)} see {_segment_label(context, key)})"


def _describe_pattern(case: MaskCase) -> str:
    if case.earlier_generation is not None:
        return f" (it is the mask of generation {case.earlier_generation})"
    if case.pattern == MOVED:
        return f" (the executed mask is the declared one moved by {case.amount:+d})"
    if case.pattern == WINDOW:
        return (
            f" (it is the declared one cut to the newest {plural(case.amount, 'key')}, and the "
            "layer states no such window)"
        )
    if not case.difference.leaked and case.difference.lost and case.step.q_len == 1:
        n_open = case.difference.n_open
        alone = ", as for row 0" if case.difference.last_keys == [0] else ""
        return f" ({n_open} of {plural(n_open + case.difference.lost, 'key')} left{alone})"
    return ""


def _describe_assumption(case: MaskCase) -> str:
    if not case.assumed:
        return ""
    return f" (no mask was declared; {case.segments} segments are taken to be kept apart)"


def _describe_expected(case: MaskCase) -> str:
    return "there are" if case.assumed else f"{case.expected} keeps apart"


def _describe_future_rows(context: RuleContext, found: CellDifference) -> str:
    """Return "rows 0-10 see the future"."""
    rows = [
        row for row, last in zip(_row_positions(found), found.last_keys, strict=True) if last > row
    ]
    if len(rows) == 1:
        return f"row {rows[0]} sees the future"
    return (
        f"rows {format_ranges(rows)} see the future"
        if len(rows) <= 64
        else _describe_many_rows(rows)
    )


def _describe_many_rows(rows: Sequence[int]) -> str:
    return f"{len(rows)} rows from {rows[0]} to {rows[-1]} see the future"


def _row_positions(found: CellDifference) -> range:
    return range(found.first_row, found.first_row + len(found.last_keys))


def _describe_worst_pair(context: RuleContext, found: CellDifference) -> str:
    """Return "paraphrase 2 sees paraphrase 1", the pair of segments with most leaked pairs."""
    (row, key), _ = max(found.leaked_by_pair.items(), key=lambda item: item[1])
    rest = len({pair for pair in found.leaked_by_pair if pair[0] != pair[1]}) - 1
    more = f" and {plural(rest, 'more pair')} of segments leak" if rest > 0 else ""
    return f"{_segment_label(context, row)} sees {_segment_label(context, key)}{more}"


def _segment_label(context: RuleContext, index: int) -> str:
    if 0 <= index < len(context.segments):
        return printable(context.segments[index].label)
    return "the sequence"


def _describe_first_pair(context: RuleContext, found: CellDifference) -> str:
    """Return the first offending pair in words, with its segments."""
    pair, sees = found.first_across or found.first_leaked, "sees"
    if not found.leaked:
        pair, sees = found.first_lost, "does not see"
    if pair is None:
        return ""
    row, key = (_describe_position(context, pos) for pos in pair)
    several = found.leaked > 1 or (not found.leaked and found.lost > 1)
    return f"; {'first: ' if several else ''}{row} {sees} {key}"


def _describe_position(context: RuleContext, pos: int) -> str:
    about = context.segment_at(pos)
    named = len(context.segments) > 2 and about is not None
    return context.format_position(pos) + (
        f" ({printable(about.label)})" if named and about else ""
    )


# -- segments -------------------------------------------------------------------------------------


def count_pieces(context: RuleContext, found: CellDifference) -> tuple[int, int]:
    """Return how many pieces the paraphrases form, joined where one sees all of another.

    And how many paraphrases there are.
    """
    parts = [n for n, s in enumerate(context.segments) if s.kind is SegmentKind.PARAPHRASE]
    piece = {n: n for n in parts}
    for (row, key), n_pairs in found.leaked_by_pair.items():
        whole = row in piece and key in piece
        if whole and n_pairs >= len(context.segments[row]) * len(context.segments[key]):
            old, new = piece[row], piece[key]
            piece = {n: new if at == old else at for n, at in piece.items()}
    return len({*piece.values()}), len(parts)


def padding_sentence(context: RuleContext, case: MaskCase, finding_id: str) -> str:
    """Return who sees padding."""
    found = case.difference
    rows = plural(len(found.leaking_rows), "row")
    return (
        f"{describe_where(case.group, case.heads, case.n_heads)} ran {describe_run(case.group)}, in which {rows} "
        f"{'sees' if len(found.leaking_rows) == 1 else 'see'} keys of padding "
        f"({case.format_pairs(found.leaked)}){_describe_first_pair(context, found)}."
    )


_MASK_CALL_QUERY = (
    "SELECT c.layer, c.path, c.backend, c.mask, m.kind, m.rule, c.handed, c.swallowed, c.window "
    "FROM calls c LEFT JOIN masks m ON m.fingerprint = c.mask WHERE c.generation = {generation} "
    "AND c.branch = {branch} AND c.step = {step} ORDER BY c.call"
)
_MASK_DIFFERENCE_HINT = (
    "In the mask panel, flip the view to the difference: leaked and lost cells stand out, and the "
    "cursor names both words of a pair."
)

MASK_KINDS: Mapping[str, FindingKind] = {
    MASK_NOT_APPLIED: FindingKind(
        Severity.ERROR,
        "the structure that was meant is not in the mask that ran",
        "What was kept apart on paper saw each other in the model: the answer is that of another "
        "experiment, and nothing fails.",
        f"{_MASK_DIFFERENCE_HINT} The path panel says which path each layer took.",
        "Look for what stands between your mask and the layer: a patch behind an `if` that is "
        "never true (SDPA is given None, not a tensor), a backend that was not switched, an "
        "override that nobody asks, a placeholder rule.",
        _MASK_CALL_QUERY,
    ),
    MASK_LEAK: FindingKind(
        Severity.ERROR,
        "cells are open that were meant to be closed",
        "Each such cell carries what one token knows to another that must not know it, and from "
        "there to all that see it.",
        _MASK_DIFFERENCE_HINT,
        "Compare the borders in the rule with the segments panel: most leaks are spans that are "
        "off by one, a missing `and`, or a layer or head that has a rule of its own.",
        _MASK_CALL_QUERY,
    ),
    MASK_LOST: FindingKind(
        Severity.ERROR,
        "cells are closed that were meant to be open",
        "Rows do not see what they need: answers get worse in ways that look like a weak model.",
        _MASK_DIFFERENCE_HINT,
        "Look for spans that end too early, a decode row without its offset, and tables that were "
        "made for another length. A sliding window belongs into the declaration.",
        _MASK_CALL_QUERY,
    ),
    MASK_NONE: FindingKind(
        Severity.ERROR,
        "a causal layer got no mask at all, on a path that is not causal by itself",
        "With no mask FlexAttention is bidirectional: each row sees the tokens that it is asked to "
        "predict, and padding takes part.",
        "The mask panel shows every cell open; the path panel shows under which name attention "
        "was dispatched.",
        "Register a mask function under the same name "
        "(`AttentionMaskInterface.register(name, flex_attention_mask)`), or pass the mask on.",
        _MASK_CALL_QUERY,
    ),
    MASK_FUTURE: FindingKind(
        Severity.ERROR,
        "rows of a causal layer see keys that come after them",
        "A model that was trained to see the past alone is shown the tokens that it predicts: its "
        "logits mean nothing, however low its loss.",
        "In the mask panel, cells above the diagonal are open; the cursor names the first of them.",
        "Add `kv_idx <= q_idx` to the rule, and look for an offset that is one too large. If a "
        "prefix is meant to see itself both ways, this is as it should be.",
        _MASK_CALL_QUERY,
    ),
    BOOL_ADDED: FindingKind(
        Severity.ERROR,
        "a mask of bools was added to the scores, where it closes nothing",
        "Added, True is 1 and False is 0: open cells get a little more weight and closed ones stay "
        "open. The same call is right under SDPA.",
        "The mask panel shows every cell open though the mask received is a bool one.",
        "Give floats (0 where open, the lowest float where closed), or use a backend that takes "
        "bools.",
        _MASK_CALL_QUERY,
    ),
    MASK_MERGED: FindingKind(
        Severity.ERROR,
        "segments that were meant to be apart are one piece of the mask that ran",
        "Borders were not found where they are, so neighbours attend to each other as if they were "
        "one text; the loss looks fine.",
        f"{_MASK_DIFFERENCE_HINT} The tokens panel shows whether the border's token was fed at all.",
        "Derive borders from lengths or spans, not from a token (EOS) that the tokenizer may not "
        "write; check that ids were not shifted before they were counted.",
        _MASK_CALL_QUERY,
    ),
    LAYERS_DIFFER: FindingKind(
        Severity.WARNING,
        "layers of one kind executed different masks in one step",
        "A single layer with another mask is enough to carry anything from anywhere to all later "
        "layers.",
        "Go through the layers in the mask panel at this step; the path panel shows whether the "
        "odd one took another path.",
        "Look for a patch that missed a layer, an `except` around the call, or a mask that is "
        "built anew in each layer.",
        _MASK_CALL_QUERY,
    ),
    MASK_PADDING: FindingKind(
        Severity.ERROR,
        "rows see keys of padding",
        "Padding is noise, and how much of it there is depends on the batch: the same prompt "
        "answers otherwise in other company.",
        "In the mask panel, the columns of the segment `padding` are open for rows of the prompt.",
        "Join the padding mask with yours (`and_masks`), or feed prompts one by one.",
        _MASK_CALL_QUERY,
    ),
}

STALE_TABLES, IGNORES_HEAD = "mask.stale-tables", "mask.ignores-head"
WRONG_SIZE, BLOCK_VIEW = "mask.wrong-size", "mask.block-view"

_TABLE_QUERY = (
    "SELECT c.layer, c.path, c.batch, c.q_heads, c.kv_heads, m.batch AS mask_batch, "
    "m.heads AS mask_heads, m.block_q, m.block_kv, m.rule, m.rule_source, m.compiled "
    "FROM calls c JOIN masks m ON m.fingerprint = c.mask WHERE c.generation = {generation} "
    "AND c.branch = {branch} AND c.step = {step} ORDER BY c.call"
)
_BLOCKS_HINT = "In the mask panel, show the blocks: cells that the rule opens lie outside of them."

TABLE_KINDS: Mapping[str, FindingKind] = {
    STALE_TABLES: FindingKind(
        Severity.WARNING,
        "the block tables and the rule of a mask disagree",
        "Uncompiled FlexAttention evaluates the rule on every cell, compiled computes (partial "
        "block and rule) or full block: the two are different masks now.",
        _BLOCKS_HINT,
        "Build the mask again after any tensor that its rule reads was changed; do not crop, index "
        "or reuse a BlockMask of another step.",
        _TABLE_QUERY,
    ),
    IGNORES_HEAD: FindingKind(
        Severity.WARNING,
        "a mask was built for one head, and its rule tells heads apart",
        "With H=None the tables are those of head 0. Uncompiled every head gets its own cells, "
        "compiled the others lose what lies outside of the tables of head 0.",
        f"{_BLOCKS_HINT} Go through the heads.",
        "Build the mask with H set to the number of query heads.",
        _TABLE_QUERY,
    ),
    WRONG_SIZE: FindingKind(
        Severity.WARNING,
        "a mask was made for another batch or another number of heads",
        "Neither is checked by FlexAttention: uncompiled it goes unnoticed, compiled it may read "
        "beyond the tables and end the process.",
        "The query gives the sizes of each call beside those of its mask.",
        "Build the mask for 1 or for exactly the batch and the query heads (not the key heads) of "
        "the call; build it anew for each batch.",
        _TABLE_QUERY,
    ),
    BLOCK_VIEW: FindingKind(
        Severity.NOTE,
        "the block tables show a whole mask as one block",
        "`to_dense()` and `sparsity()` speak of blocks of 128 x 128, not of tokens, and mix "
        "partial blocks with full ones.",
        "The mask panel shows cells, and blocks only where it says so.",
        "Look at cells: `create_mask(block_mask.mask_mod, B, H, Q, K)`.",
        _TABLE_QUERY,
    ),
}
