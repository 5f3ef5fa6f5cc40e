"""Each case script shows, under capture, the fault that it stands for."""

from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path

import pytest
from facts import FACTS
from standalone_facts import STANDALONE_FACTS
from support.cases import COMPILES, CRASHES, ran_case
from support.planting import serious
from support.warm_python import Ran, run_warm

from flexinspect.trace.reader import open_trace

HERE = Path(__file__).parent
ALL = range(12)

PRINTS: dict[str, tuple[str, ...]] = {
    "w01_bos_shift": (
        "empty rows: [6, 7]",
        "rows that touching segment 1 moves: [3, 4, 5, 14]",
        "rows that move, counted with the BOS: [3, 4, 5, 6]",
    ),
    "w02_orphan_tokens": (
        "rows whose attention is exactly 0, per layer: [[0, 7, 8], [0, 7, 8], [0, 7, 8]]",
        "row 16 reads rows 7 and 8: [True, True]",
    ),
    "w04_missing_eos": (
        "EOS written: False; documents found: 1 of 3 packed; document 1 moves the last row: True",
        "EOS written: True; documents found: 3 of 3 packed; document 1 moves the last row: False",
    ),
    "a01_placeholder_mask": (
        "FlexAttention ran without fallback",
        f"rows that touching the LAST token moves: {[*ALL]}",
        "open cells, requested and executed: 78 144",
    ),
    "a02_silent_fallback": (
        "failing layers (): ran [(0, 'flex'), (1, 'flex')], segment 2 moved: False",
        "failing layers (1,): ran [(0, 'flex'), (1, 'sdpa')], segment 2 moved: True",
    ),
    "a05_patch_needs_a_tensor": (
        "sdpa: applied in 0 of 2 layers; segment 2 moved: True",
        "eager: applied in 2 of 2 layers; segment 2 moved: False",
    ),
    "a07_no_mask_function": (
        f"mask received: NoneType; rows that touching the LAST token moves: {[*ALL[:10]]}",
        "mask received: BlockMask; rows that touching the LAST token moves: [9]",
    ),
    "a09_bool_mask_is_added": (
        "sdpa: rows before the last that move: 0",
        "eager: rows before the last that move: 9",
        "flex_attention: rows before the last that move: 9",
    ),
    "s01_leak_through_separators": (
        "direct cells from segment 2 to segment 1: 0",
        "segment 2 moved: True",
        "reachable in two layers: True",
        "through rows: [7, 8]",
        "segment 2 moved with the separators cut: False",
    ),
    "s03_order_of_paraphrases": (
        "positions contiguous: swapping moves the next token: True",
        "positions restarting per segment: swapping moves the next token: False",
    ),
    "s04_left_padding": (
        "eager: padding rows are exactly 0: False",
        "sdpa: padding rows are exactly 0: True",
        "flex_attention: padding rows are exactly 0: True",
        "rows in which eager and flex differ: [0, 1, 2]",
    ),
    "k01_decode_without_offset": (
        "offset 0: right: False; equals the first value: True",
        "offset 8: right: True; equals the first value: False",
        "with offset: False; keys the newest row sees, step by step: [9, 1, 1, 1]",
        "with offset: True; keys the newest row sees, step by step: [9, 10, 11, 12]",
        "tokens that are the same: 1 of 4",
    ),
    "k03_empty_cache_slots": (
        "keys allowed: 32 filled: 12",
        "weight on empty slots: 0.54",
        "relative error: 0.54",
    ),
    "k04_mask_one_short": (
        "33 keys: refused",
        "31 keys: refused",
        "step 1: refused; the cache holds [33, 32]",
    ),
    "k07_lost_cache": (
        "{} TypeError about past_key_values: True",
        "{'use_cache': False} TypeError about past_key_values: True",
        "cached length per layer: [0, 5]",
        "a step later: [0, 6]",
    ),
    "k09_no_cache": (
        "masks built: 20 for 5 tokens",
        "query rows computed: 60 needed with a cache: 14",
    ),
    "b02_stale_tables": (
        "uncompiled: rows that differ from the rule: 0, in blocks []",
        "compiled: rows that differ from the rule: 256, in blocks [1, 3]",
        "blocks in the tables: 4 of the rule: 6",
    ),
    "b06_blocks_for_tokens": (
        "to_dense: (1, 1, 1, 1) sparsity makes sense: False",
        "cells: (1, 1, 40, 40) open: 820 causal: True",
    ),
    "p02_graph_every_step": (
        "fresh: 5 graphs in 5 steps",
        "over_a_number: 2 graphs in 5 steps",
        "over_a_tensor: 2 graphs in 5 steps",
    ),
    "p03_square_of_the_length": (
        "grid 1 x 1 x 2048 x 2048: over 100 MiB: False",
        "grid 1 x 8 x 2048 x 2048: over 100 MiB: True",
        "attention itself: over 100 MiB: False",
    ),
    "n01_which_head": (
        "repeat_interleave is the same as grouped queries: True",
        "repeat is the same as grouped queries: False",
        "query head 3 reads kv head 1: True",
    ),
    "n02_bfloat16": (
        "relative difference per layer is rounding: [True, True]",
        "rows with another best token: # of 24",
    ),
    "l01_compiled_crash": ("entering compiled flex",),
    "l01_compiled_does_not_build": (
        "entering compiled flex",
        "InductorError | about cur_kvSplitSize: True",
    ),
    "o01_not_weights": (
        "claimed weights: (1, 14, 32) expected: (1, 4, 14, 14)",
        "rows sum to 1: False",
    ),
    "o03_logger_breaks_flex": (
        "before: it runs",
        "inside: NotImplementedError",
        "after: Unsupported",
        "after a reset of dynamo: it runs",
    ),
    "o04_drawn_mask_nobody_applied": (
        "the picture says isolated: True",
        "the model says isolated: False",
    ),
    "origin_wrapper": (
        "generated: [206, 138, 86, 167]",
        "fallbacks: 0",
        "the plain model's tokens: [277, 133, 65, 106]",
    ),
    "c1_plain_causal_prompt": (
        "answer: [223, 237, 245, 43]",
        "rows that the last token moves: [8]",
    ),
    "c2_padded_batch": (
        "row 0: [256, 261, 193, 161], the same as alone: True",
        "row 1: [237, 294, 73, 80], the same as alone: True",
    ),
    "c3_open_decode_row": (
        "rows, keys and open cells per step: [(6, 6, 21), (1, 7, 7), (1, 8, 8), (1, 9, 9)]",
        "the same tokens as the plain model: True",
    ),
    "c4_two_graphs": ("graphs after each step: [1, 2, 2, 2, 2, 2, 2, 2]",),
    "c5_shifted_positions": ("logits the same: True", "best tokens the same: True"),
    "c6_shared_mask": ("mask: (1, 1, 16, 16) queries: (8, 32, 16, 16)", "right: True"),
    "c7_nan_in_masked_keys": (
        "NaN in masked keys: rows with NaN: []",
        "NaN in masked values: rows with NaN: [0, 1, 2, 3]",
    ),
}
"""What each script prints without capture, line by line: `python tests/cases/NAME.py`.

`#` stands for a number.
"""

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None,
    reason="compiled flex on a CPU needs a C++ compiler",
)


def scripts() -> list[str]:
    """Return the names of the scripts: every file here that is no test and no part of one."""
    parts = {"kit", "facts", "standalone_facts", Path(__file__).stem}
    return sorted({path.stem for path in HERE.glob("*.py")} - parts)


def cases(names: list[str]) -> list[object]:
    """Return the names as parameters, those that compile marked as slow."""
    slow = (pytest.mark.slow, needs_compiler)
    return [pytest.param(name, marks=slow if name in COMPILES else ()) for name in names]


def check_prints(name: str, ran: Ran) -> None:
    expected = PRINTS[name]
    assert len(ran.lines) == len(expected), ran
    for line, start in zip(ran.lines, expected, strict=True):
        pattern = re.escape(start).replace(r"\#", r"\d+")
        assert re.fullmatch(pattern, line), ran


def test_every_script_is_checked_and_none_knows_of_flexinspect() -> None:
    assert scripts() == sorted(PRINTS)
    for name in [*scripts(), "kit"]:
        assert "flexinspect" not in (HERE / f"{name}.py").read_text().split('"""', 2)[2]


DEADLY = {signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL}


@pytest.mark.parametrize("name", cases([*PRINTS]))
def test_under_capture_a_case_shows_its_fault(name: str) -> None:
    ran, path = ran_case(name)
    check_prints(name, ran)
    if name == CRASHES:
        # A shell says of a program killed by a signal 128 and its number; which of them a broken
        # heap ends in, changes from run to run.
        assert ran.code - 128 in DEADLY, ran
    else:
        assert ran.code == 0, ran
    with open_trace(path) as trace:
        assert trace.state == ("finished" if ran.code == 0 else "failed")


# Without capture, these print a number that differs between machines.
@pytest.mark.parametrize("name", [name for name in PRINTS if "#" in "".join(PRINTS[name])])
def test_a_case_prints_the_same_without_capture(name: str) -> None:
    alone = run_warm([str(HERE / f"{name}.py")])
    assert (alone.code, alone.out) == (0, ran_case(name)[0].out), alone


@pytest.mark.parametrize("name", cases([*FACTS, *STANDALONE_FACTS]))
def test_the_trace_of_a_case_holds_its_facts(name: str) -> None:
    ran, path = ran_case(name)
    assert (ran.code == 0) == (name != CRASHES), ran
    with open_trace(path) as trace:
        assert [row.event.text for row in trace.events() if row.event.kind == "hook-disabled"] == []
        {**FACTS, **STANDALONE_FACTS}[name](trace)


NOT_WITHOUT_A_WORD = ()
"""Where nothing was declared, nothing can be wrong; what a declaration adds is in tests/rules."""

SAID: dict[str, tuple[str, ...]] = {
    "w01_bos_shift": ("mask.empty-row",),
    "w02_orphan_tokens": ("mask.empty-row",),
    "w04_missing_eos": NOT_WITHOUT_A_WORD,
    "a01_placeholder_mask": ("mask.future",),
    "a02_silent_fallback": ("path.fallback",),
    "a05_patch_needs_a_tensor": NOT_WITHOUT_A_WORD,
    "a07_no_mask_function": ("mask.none",),
    "a09_bool_mask_is_added": ("mask.bool-added",),
    "s01_leak_through_separators": NOT_WITHOUT_A_WORD,
    "s03_order_of_paraphrases": (),
    "s04_left_padding": (),
    "k01_decode_without_offset": ("decode.no-offset",),
    "k03_empty_cache_slots": ("cache.empty-slots",),
    "k04_mask_one_short": ("lengths.mask-kv",),
    "k07_lost_cache": ("run.exception", "cache.empty-layer"),
    "k09_no_cache": (),
    "b02_stale_tables": ("mask.stale-tables",),
    "b06_blocks_for_tokens": (),
    "p02_graph_every_step": ("graphs.every-step",),
    "p03_square_of_the_length": ("memory.mask-creation",),
    "n01_which_head": (),
    "n02_bfloat16": (),
    "l01_compiled_crash": ("observer.crash",),
    "l01_compiled_does_not_build": ("kernel.does-not-build",),
    "o01_not_weights": ("observer.not-weights",),
    "o03_logger_breaks_flex": ("observer.logger-breaks-flex",),
    "o04_drawn_mask_nobody_applied": NOT_WITHOUT_A_WORD,
    "origin_wrapper": (),
    "c1_plain_causal_prompt": (),
    "c2_padded_batch": (),
    "c3_open_decode_row": (),
    "c4_two_graphs": (),
    "c5_shifted_positions": (),
    "c6_shared_mask": (),
    "c7_nan_in_masked_keys": ("numbers.nan",),
}
"""The errors and warnings of each case as it is, with nothing declared: these ids and no other."""


@pytest.mark.parametrize("name", cases([*SAID]))
def test_the_findings_of_a_case_are_its_fault_and_nothing_else(name: str) -> None:
    with open_trace(ran_case(name)[1]) as trace:
        assert {finding.id for finding in serious(trace.findings())} == {*SAID[name]}


def test_every_case_has_findings_or_is_listed_as_silent() -> None:
    assert sorted(SAID) == sorted(PRINTS)
