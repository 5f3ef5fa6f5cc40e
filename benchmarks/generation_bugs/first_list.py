"""The first list of bugs: the scripts of `tests/cases`, what is declared of them, what names them.

The scripts have the error and often its repair one after the other, so there are no twins here;
`tests/cases` lists every error and warning of each script. Left out is L01,
compiled FlexAttention that crashes or does not build: it needs a process of its own.
"""

from __future__ import annotations

from benchmarks.generation_bugs.cases import Case, Named
from flexinspect.records.job import Declaration


def _isolated(*spans: tuple[int, int, str]) -> Declaration:
    return Declaration(spans, "segment-isolation")


_TWO = _isolated((1, 7, "segment 1"), (7, 9, "separator"), (9, 15, "segment 2"))
FIRST_LIST: dict[str, tuple[str, Case]] = {
    "W01": (
        "w01_bos_shift",
        Case("spans are counted without the BOS", (Named("mask.empty-row", ("position 6",)),)),
    ),
    "W02": (
        "w02_orphan_tokens",
        Case("separators belong to no segment", (Named("mask.empty-row", ("3 rows",)),)),
    ),
    "W04": (
        "w04_missing_eos",
        Case(
            "document borders from an EOS that is not in the ids",
            (
                Named("mask.merged", ("document 2",)),
                Named("mask.not-applied", ("document 2",)),
            ),
            declaration=_isolated(
                (0, 4, "document 1"), (4, 7, "document 2"), (7, 11, "document 3")
            ),
        ),
    ),
    "A01": (
        "a01_placeholder_mask",
        Case("a placeholder mask", (Named("mask.future", ("placeholder",)),)),
    ),
    "A02": (
        "a02_silent_fallback",
        Case("one layer falls back to SDPA", (Named("path.fallback", ("Layer 1",)),)),
    ),
    "A05": (
        "a05_patch_needs_a_tensor",
        Case(
            "a patch that needs a 4D mask, under SDPA",
            (Named("mask.not-applied", ("SDPA without a mask",)),),
            declaration=_isolated((0, 4, "segment 1"), (4, 8, "segment 2")),
        ),
    ),
    "A07": (
        "a07_no_mask_function",
        Case("no mask function", (Named("mask.none", ("no mask function",)),)),
    ),
    "A09": (
        "a09_bool_mask_is_added",
        Case("a bool mask is added", (Named("mask.bool-added", ("closes nothing",)),)),
    ),
    "S01": (
        "s01_leak_through_separators",
        Case(
            "isolation leaks through shared tokens",
            (Named("reach.leak", ("separator",)), Named("mask.leak", ("separator",))),
            declaration=_isolated(
                (1, 7, "segment 1"), (7, 9, "separator"), (9, 16, "segment 2"), (16, 17, "cue")
            ),
        ),
    ),
    "S03": (
        "s03_order_of_paraphrases",
        Case(
            "the result depends on the order of paraphrases",
            (Named("positions.not-reset"), Named("segments.order")),
            declaration=_isolated((0, 5, "paraphrase 1"), (5, 10, "paraphrase 2")),
            notes_count=True,
        ),
    ),
    "S04": (
        "s04_left_padding",
        Case(
            "rows of left padding differ between backends",
            (Named("mask.empty-row", ("rows of padding",)),),
            notes_count=True,
        ),
    ),
    "K01": (
        "k01_decode_without_offset",
        Case("a decode row without offset", (Named("decode.no-offset", ("row 0 of 1",)),)),
    ),
    "K03": (
        "k03_empty_cache_slots",
        Case("empty slots take part", (Named("cache.empty-slots", ("12 filled",)),)),
    ),
    "K04": (
        "k04_mask_one_short",
        Case("a mask for 32 keys, and 33", (Named("lengths.mask-kv", ("33", "32")),)),
    ),
    "K07": (
        "k07_lost_cache",
        Case("a patched forward loses the cache", (Named("cache.empty-layer", ("Layer 0",)),)),
    ),
    "K09": (
        "k09_no_cache",
        Case("no cache is used", (Named("cache.not-used", ("60 query rows",)),), notes_count=True),
    ),
    "B02": (
        "b02_stale_tables",
        Case("a captured tensor is edited afterwards", (Named("mask.stale-tables"),)),
    ),
    "B06": (
        "b06_blocks_for_tokens",
        Case(
            "the view by blocks is taken for the mask",
            (Named("mask.block-view", ("one block",)),),
            notes_count=True,
        ),
    ),
    "P02": (
        "p02_graph_every_step",
        Case("a new graph in every step", (Named("graphs.every-step"),)),
    ),
    "P03": (
        "p03_square_of_the_length",
        Case("a mask costs the square of the length", (Named("memory.mask-creation"),)),
    ),
    "N01 (heads)": (
        "n01_which_head",
        Case(
            "which head is head 3",
            (Named("mask.by-head", ("query head 3 -> kv head 1",)),),
            notes_count=True,
        ),
    ),
    "N02 (dtypes)": (
        "n02_bfloat16",
        Case(
            "bfloat16 beside float32 (rounding, no error)",
            (Named("same-prompt.rounding"),),
            notes_count=True,
        ),
    ),
    "O01": (
        "o01_not_weights",
        Case("attention weights that are none", (Named("observer.not-weights", ("Layer 0",)),)),
    ),
    "O03": (
        "o03_logger_breaks_flex",
        Case("watching breaks flex", (Named("observer.logger-breaks-flex", ("Log",)),)),
    ),
    "O04": (
        "o04_drawn_mask_nobody_applied",
        Case(
            "a drawn mask that nobody applied",
            (Named("mask.not-applied", ("0 of 2 layers",)),),
            declaration=_TWO,
        ),
    ),
}
"""By number: the name of the script, and what is planted in it."""
