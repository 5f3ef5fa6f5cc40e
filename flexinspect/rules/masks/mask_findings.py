"""Finding kinds of the mask rules, and the sentences of `MasksRule`.

`LayerGroup` and `MaskCase` hold what `declared_vs_executed` found; `case_sentence` and
`padding_sentence` turn a case into a sentence. `MASK_KINDS` and `TABLE_KINDS` explain the ids.
"""

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
"""The event that a custom attention function has a mask function, which returned no mask."""

MASK_MERGED, LAYERS_DIFFER, MASK_PADDING = "mask.merged", "mask.layers-differ", "mask.padding"

NO_MASK = "none"
_MAX_LISTED_FUTURE_ROWS = 64
_PATH_NAMES = {
    "flex uncompiled": "FlexAttention",
    "flex compiled": "compiled FlexAttention",
    "sdpa": "SDPA",
    "eager": "eager attention",
}


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of a step that executed the same mask; `call` is the first of their calls.

    `usual_path` is the path of most other layers if these layers took another one.
    """

    mask: MaskRecord
    call: CallRecord
    layers: tuple[int, ...]
    n_layers: int
    usual_path: str = ""

    @property
    def has_custom_mask_mod(self) -> bool:
        """Whether a mask_mod ran that does not belong to transformers."""
        mask_mod = self.mask.rule or ""
        return self.mask.kind == "block" and not mask_mod.startswith("transformers.")

    @property
    def adds_bools(self) -> bool:
        """Whether a bool mask was added to the scores."""
        return self.mask.kind == "bool" and self.call.path.startswith(("eager", "flex"))

    @property
    def is_fallback(self) -> bool:
        """Whether these layers took another path than the others, or a fallback after an error."""
        return self.call.swallowed is not None or self.usual_path != ""


@dataclass(frozen=True, slots=True)
class MaskCase:
    """An executed mask that is not the expected one: where it ran, and how it differs.

    Attributes:
        expected: the name of the expected mask in sentences.
        assumed: whether it was assumed from segments instead of declared.
        pattern: what ran instead (see `mask_difference.classify_pattern`).
        amount: the shift or the window of the pattern.
        earlier_generation: the generation whose declared mask it is, if any.
        heads: the heads that differ, of `n_heads`.
        pieces: how many block-diagonal pieces the `segments` form.
        id: the finding id, if it does not follow from the rest.
        severity: the severity, if it does not follow from the rest.
        varies: whether the counts vary over the layers; those here are the largest.
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
        """Return "3 pairs", or "up to 3 pairs" if the count varies over the layers."""
        return ("up to " if self.varies else "") + plural(n, "pair")


def case_finding_id(case: MaskCase) -> str:
    """Return the finding id of a case."""
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


def format_mask_mod(mask: MaskRecord) -> str:
    """Return the name of the mask_mod of a block mask, for sentences."""
    return printable(mask.rule or "an unnamed mask_mod")


def describe_run(group: LayerGroup) -> str:
    """Return what ran: "causal SDPA without a mask", "FlexAttention with mask_mod f"."""
    path = _PATH_NAMES.get(group.call.path, f"attention '{printable(group.call.backend)}'")
    kind = group.mask.kind
    if kind == "none, causal":
        text = f"causal {path} without a mask"
    elif kind == NO_MASK:
        text = f"{path} without a mask"
    elif kind == "block":
        text = f"{path} with mask_mod {printable(group.mask.rule or '(unnamed)')}"
    else:
        text = f"{path} with a {kind} mask"
    return text + _describe_reason(group)


def _describe_reason(group: LayerGroup) -> str:
    call = group.call
    if call.swallowed is not None:
        return f" after {printable(call.swallowed)} was suppressed"
    if group.usual_path:
        return f" (the other layers ran {group.usual_path})"
    if call.handed is not None and group.mask.kind.startswith(NO_MASK) and call.handed != NO_MASK:
        return f", although it received {printable(call.handed)}"
    return ""


def describe_where(group: LayerGroup, heads: Sequence[int] = (), n_heads: int = 1) -> str:
    """Return "Layer 3", "All 8 layers", "Layers 0-2 in heads 0, 3 of 8"."""
    text = format_layers(group.layers, group.n_layers)
    text = text[0].upper() + text[1:]
    if heads and len(heads) < n_heads:
        head = f"head {heads[0]}" if len(heads) == 1 else f"heads {format_ranges(heads)}"
        text += f" in {head} of {n_heads}"
    return text


# -- sentences ------------------------------------------------------------------------------------


def case_sentence(context: RuleContext, case: MaskCase, finding_id: str) -> str:
    """Return one sentence: which layers, what ran there, what is wrong, and the first pair."""
    describe = {
        MASK_NONE: _describe_open,
        BOOL_ADDED: _describe_added_bools,
        MASK_MERGED: _describe_merged,
        MASK_NOT_APPLIED: _describe_not_applied,
        MASK_FUTURE: _describe_future,
    }.get(finding_id, _describe_counts)
    return (
        f"{describe_where(case.group, case.heads, case.n_heads)} ran {describe_run(case.group)}"
        f"{describe(context, case)}{_describe_first_pair(context, case.difference)}"
        f"{_describe_assumption(case)}."
    )


def _describe_open(context: RuleContext, case: MaskCase) -> str:
    backend = printable(case.group.call.backend)
    known = case.group.call.backend in ("sdpa", "eager", "flex_attention", "direct")
    known = known or any(event.kind == MASK_FUNCTION_EVENT for event in case.step.events)
    why = "" if known else f" (attention '{backend}' has no mask function)"
    return f"{why}: every cell is open, so {_describe_future_rows(case.difference)}"


def _describe_added_bools(context: RuleContext, case: MaskCase) -> str:
    found = case.difference
    future = f", so {_describe_future_rows(found)}" if found.future else ""
    return (
        ", which adds 1 to the scores of its open cells and closes nothing: every cell is open"
        f"{future}"
    )


def _describe_merged(context: RuleContext, case: MaskCase) -> str:
    found, segments = case.difference, case.segments
    pieces = plural(case.pieces, "block-diagonal piece")
    expected = (
        f"there are {segments} segments"
        if case.assumed
        else f"{case.expected} keeps {segments} segments apart"
    )
    return (
        f", whose mask has {pieces}, but {expected}: "
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
            f"{found.n_expected}, so {_describe_future_rows(found)}"
        )
    lost = f", and {found.lost} that it opens are closed" if found.lost else ""
    applied = f"applied in 0 of {plural(group.n_layers, 'layer')}" if is_all else "not applied"
    pairs = case.format_pairs(found.leaked)
    if case.assumed:
        return (
            f"{received}, so the isolation of the declared segments was {applied}: "
            f"{_describe_worst_pair(context, found)} ({pairs})"
        )
    return (
        f"{received}, so {case.expected} was {applied}: {pairs} that it closes "
        f"{'is' if found.leaked == 1 else 'are'} open{_describe_across(context, found)}{lost}"
    )


def _describe_future(context: RuleContext, case: MaskCase) -> str:
    found = case.difference
    rows = f"{_describe_future_rows(found)} ({case.format_pairs(found.future)})"
    if found.n_closed or found.n_rows < 2:
        return f", in which {rows}"
    cells = found.n_open + found.n_closed
    return (
        f", with {found.n_open} of {cells} cells open where {case.expected} opens "
        f"{found.n_expected}, so {rows}"
    )


def _describe_counts(context: RuleContext, case: MaskCase) -> str:
    found, name = case.difference, case.expected
    leaked, lost = case.format_pairs(found.leaked), case.format_pairs(found.lost)
    if case.assumed:
        shifted = f", as if shifted by {case.amount:+d}" if case.pattern == MOVED else ""
        return f": {_describe_worst_pair(context, found)} ({leaked}{shifted})"
    if not found.leaked:
        return f", which closes {lost} that {name} opens{_describe_pattern(case)}"
    also = f" and closes {lost} that it opens" if found.lost else ""
    return (
        f", which opens {leaked} that {name} closes{_describe_across(context, found)}"
        f"{also}{_describe_pattern(case)}"
    )


def _describe_across(context: RuleContext, found: CellDifference) -> str:
    """Return " (36 of them let segment 2 see segment 1)", or "" if no segments are joined."""
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
        return f" (the executed mask is the declared one shifted by {case.amount:+d})"
    if case.pattern == WINDOW:
        return (
            f" (it is the declared one cut to the newest {plural(case.amount, 'key')}, but the "
            "layer declares no such window)"
        )
    if not case.difference.leaked and case.difference.lost and case.step.q_len == 1:
        n_open = case.difference.n_open
        row_0 = ", as for row 0" if case.difference.last_keys == [0] else ""
        return f" ({n_open} of {plural(n_open + case.difference.lost, 'key')} left{row_0})"
    return ""


def _describe_assumption(case: MaskCase) -> str:
    if not case.assumed:
        return ""
    return f" (no mask was declared; {case.segments} segments are assumed to be isolated)"


def _describe_future_rows(found: CellDifference) -> str:
    """Return "rows 0-10 see the future"."""
    rows = [row for row, last in enumerate(found.last_keys, found.first_row) if last > row]
    if len(rows) == 1:
        return f"row {rows[0]} sees the future"
    if len(rows) <= _MAX_LISTED_FUTURE_ROWS:
        return f"rows {format_ranges(rows)} see the future"
    return f"{len(rows)} rows from {rows[0]} to {rows[-1]} see the future"


def _describe_worst_pair(context: RuleContext, found: CellDifference) -> str:
    """Return "paraphrase 2 sees paraphrase 1", the two segments with the most leaked pairs."""
    (row, key), _ = max(found.leaked_by_pair.items(), key=lambda item: item[1])
    rest = len({pair for pair in found.leaked_by_pair if pair[0] != pair[1]}) - 1
    more = f" and {plural(rest, 'more pair')} of segments leak" if rest > 0 else ""
    return f"{_segment_label(context, row)} sees {_segment_label(context, key)}{more}"


def _segment_label(context: RuleContext, index: int) -> str:
    if 0 <= index < len(context.segments):
        return printable(context.segments[index].label)
    return "the sequence"


def _describe_first_pair(context: RuleContext, found: CellDifference) -> str:
    """Return the first wrong (row, key) pair, with the segments of the two positions."""
    pair, sees = found.first_across or found.first_leaked, "sees"
    if not found.leaked:
        pair, sees = found.first_lost, "does not see"
    if pair is None:
        return ""
    row, key = (_describe_position(context, pos) for pos in pair)
    several = found.leaked > 1 or (not found.leaked and found.lost > 1)
    return f"; {'first: ' if several else ''}{row} {sees} {key}"


def _describe_position(context: RuleContext, pos: int) -> str:
    segment = context.segment_at(pos)
    label = f" ({printable(segment.label)})" if segment and len(context.segments) > 2 else ""
    return context.format_position(pos) + label


# -- segments -------------------------------------------------------------------------------------


def count_pieces(context: RuleContext, found: CellDifference) -> tuple[int, int]:
    """Return the number of block-diagonal pieces, and the number of paraphrases.

    Two paraphrases form one piece where every row of one sees every key of the other.
    """
    segments = context.segments
    paraphrases = [n for n, s in enumerate(segments) if s.kind is SegmentKind.PARAPHRASE]
    piece_of = {n: n for n in paraphrases}
    for (row, key), n_pairs in found.leaked_by_pair.items():
        are_paraphrases = row in piece_of and key in piece_of
        if are_paraphrases and n_pairs >= len(segments[row]) * len(segments[key]):
            old, new = piece_of[row], piece_of[key]
            piece_of = {n: new if piece == old else piece for n, piece in piece_of.items()}
    return len({*piece_of.values()}), len(paraphrases)


def padding_sentence(context: RuleContext, case: MaskCase) -> str:
    """Return one sentence: which layers, what ran there, and which rows see padding."""
    found = case.difference
    n_rows = len(found.leaking_rows)
    return (
        f"{describe_where(case.group, case.heads, case.n_heads)} ran {describe_run(case.group)}, "
        f"in which {plural(n_rows, 'row')} {'sees' if n_rows == 1 else 'see'} padding keys "
        f"({case.format_pairs(found.leaked)}){_describe_first_pair(context, found)}."
    )


_MASK_CALL_QUERY = (
    "SELECT c.layer, c.path, c.backend, c.mask, m.kind, m.rule, c.handed, c.swallowed, c.window "
    "FROM calls c LEFT JOIN masks m ON m.fingerprint = c.mask WHERE c.generation = {generation} "
    "AND c.branch = {branch} AND c.step = {step} ORDER BY c.call"
)
_MASK_DIFFERENCE_HINT = (
    "In the mask panel, switch the view to the difference: leaked and lost cells are highlighted, "
    "and the cursor shows both tokens of a pair."
)

MASK_KINDS: Mapping[str, FindingKind] = {
    MASK_NOT_APPLIED: FindingKind(
        Severity.ERROR,
        "the declared mask was not applied at all",
        why="Segments that should be isolated attended to each other. No error is raised, but the "
        "output belongs to a different experiment.",
        confirm=f"{_MASK_DIFFERENCE_HINT} The path panel shows which path each layer took.",
        fix="Check every step between your mask and the layer: a patch behind an `if` that is "
        "never true (SDPA receives None, not a tensor), a backend that was not switched, an "
        "override that is never called, a placeholder mask_mod.",
        query=_MASK_CALL_QUERY,
    ),
    MASK_LEAK: FindingKind(
        Severity.ERROR,
        "cells are open that should be closed",
        why="Each open cell passes information from one token to another that must not have it, "
        "and from there to every token that sees that one.",
        confirm=_MASK_DIFFERENCE_HINT,
        fix="Compare the borders in the mask_mod with the segments panel. Most leaks are spans "
        "that are off by one, a missing `&`, or a layer or head with a mask_mod of its own.",
        query=_MASK_CALL_QUERY,
    ),
    MASK_LOST: FindingKind(
        Severity.ERROR,
        "cells are closed that should be open",
        why="Rows do not see tokens that they need. The output gets worse in a way that looks like "
        "a weak model.",
        confirm=_MASK_DIFFERENCE_HINT,
        fix="Look for spans that end too early, a decode row without its offset, and block tables "
        "built for another length. If a sliding window is intended, declare it.",
        query=_MASK_CALL_QUERY,
    ),
    MASK_NONE: FindingKind(
        Severity.ERROR,
        "a causal layer received no mask, on a path that is not causal by itself",
        why="Without a mask FlexAttention is bidirectional: each row sees the tokens that it "
        "should predict, and padding takes part.",
        confirm="The mask panel shows every cell open. The path panel shows under which name "
        "attention was dispatched.",
        fix="Register a mask function under the same name "
        "(`AttentionMaskInterface.register(name, flex_attention_mask)`), or pass the mask on.",
        query=_MASK_CALL_QUERY,
    ),
    MASK_FUTURE: FindingKind(
        Severity.ERROR,
        "rows of a causal layer see keys that come after them",
        why="The model was trained to see only the past, and here sees the tokens that it should "
        "predict. Its logits are meaningless, however low the loss.",
        confirm="In the mask panel, cells above the diagonal are open; the cursor shows the tokens "
        "of each.",
        fix="Add `kv_idx <= q_idx` to the mask_mod, and look for an offset that is one too large. "
        "If a bidirectional prefix is intended, no action is needed.",
        query=_MASK_CALL_QUERY,
    ),
    BOOL_ADDED: FindingKind(
        Severity.ERROR,
        "a bool mask was added to the scores, so it closes nothing",
        why="As numbers, True is 1 and False is 0: open cells get slightly more weight and closed "
        "cells stay open. The same call is correct under SDPA.",
        confirm="The mask panel shows every cell open, although a bool mask was received.",
        fix="Pass a float mask (0 where open, the lowest float where closed), or use a backend "
        "that takes bool masks.",
        query=_MASK_CALL_QUERY,
    ),
    MASK_MERGED: FindingKind(
        Severity.ERROR,
        "segments that should be isolated form one piece of the executed mask",
        why="The mask_mod missed the borders, so neighbouring segments attend to each other as if "
        "they were one text. The loss looks normal.",
        confirm=f"{_MASK_DIFFERENCE_HINT} The tokens panel shows whether the prompt contains the "
        "token that marks a border.",
        fix="Derive borders from lengths or spans, not from a token (EOS) that the tokenizer may "
        "not add. Check that ids were not shifted before they were counted.",
        query=_MASK_CALL_QUERY,
    ),
    LAYERS_DIFFER: FindingKind(
        Severity.WARNING,
        "layers of one kind executed different masks in one step",
        why="A single layer with another mask can pass information from any token to all later "
        "layers.",
        confirm="Go through the layers in the mask panel at this step. The path panel shows "
        "whether the layer took another path.",
        fix="Look for a patch that missed a layer, an `except` around the call, or a mask that "
        "each layer builds again.",
        query=_MASK_CALL_QUERY,
    ),
    MASK_PADDING: FindingKind(
        Severity.ERROR,
        "rows see padding keys",
        why="Padding is noise, and its amount depends on the batch: the same prompt gets another "
        "output in another batch.",
        confirm="In the mask panel, the columns of the segment `padding` are open for rows of the "
        "prompt.",
        fix="Combine the padding mask with yours (`and_masks`), or run the prompts one by one.",
        query=_MASK_CALL_QUERY,
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
_BLOCKS_HINT = "In the mask panel, show the blocks: some open cells lie outside of them."

TABLE_KINDS: Mapping[str, FindingKind] = {
    STALE_TABLES: FindingKind(
        Severity.WARNING,
        "the block tables of a mask do not match its mask_mod",
        why="Uncompiled FlexAttention evaluates the mask_mod on every cell. Compiled, it applies "
        "the mask_mod in partial blocks only and opens full blocks completely. The two now give "
        "different masks.",
        confirm=_BLOCKS_HINT,
        fix="Build the mask again after any change to a tensor that its mask_mod reads. Do not "
        "crop, index or reuse a BlockMask of another step.",
        query=_TABLE_QUERY,
    ),
    IGNORES_HEAD: FindingKind(
        Severity.WARNING,
        "a mask was built for one head, but its mask_mod depends on the head",
        why="With H=None the block tables are those of head 0. Uncompiled, every head gets its own "
        "cells; compiled, the other heads lose what lies outside of the blocks of head 0.",
        confirm=f"{_BLOCKS_HINT} Go through the heads.",
        fix="Build the mask with H set to the number of query heads.",
        query=_TABLE_QUERY,
    ),
    WRONG_SIZE: FindingKind(
        Severity.WARNING,
        "a mask was built for another batch or another number of heads",
        why="FlexAttention checks neither. Uncompiled it goes unnoticed; compiled the kernel may "
        "read past the end of the block tables and crash the process.",
        confirm="The query shows the sizes of each call next to those of its mask.",
        fix="Build the mask for 1, or for exactly the batch and the query heads (not the KV heads) "
        "of the call, and again for each batch.",
        query=_TABLE_QUERY,
    ),
    BLOCK_VIEW: FindingKind(
        Severity.NOTE,
        "the block tables show a whole mask as one block",
        why="`to_dense()` and `sparsity()` describe blocks of 128 x 128, not tokens, and do not "
        "distinguish partial from full blocks.",
        confirm="The mask panel shows cells, and blocks only where it says so.",
        fix="Look at cells: `create_mask(block_mask.mask_mod, B, H, Q, K)`.",
        query=_TABLE_QUERY,
    ),
}
