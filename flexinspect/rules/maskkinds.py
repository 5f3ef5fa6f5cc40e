"""What the findings about masks stand for."""

from __future__ import annotations

from collections.abc import Mapping

from flexinspect.findings import Severity
from flexinspect.rules.base import FindingKind
from flexinspect.rules.maskwords import (
    BOOL_ADDED,
    LAYERS_DIFFER,
    MASK_FUTURE,
    MASK_LEAK,
    MASK_LOST,
    MASK_MERGED,
    MASK_NONE,
    MASK_NOT_APPLIED,
    MASK_PADDING,
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
