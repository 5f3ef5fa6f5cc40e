"""Segments that nobody declared are read out of the executed mask, and odd borders are named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.masked_traces import PROMPT, SEGMENTS, isolated, model_on, own_attention, prompt_ids
from support.planting import of, one, planted

from flexinspect.records.finding import Finding, Severity
from flexinspect.records.prompt import Segment, SegmentKind
from flexinspect.records.step import (
    CallRecord,
    GenerationRecord,
    MaskRecord,
    StepRecord,
    TokenRecord,
)
from flexinspect.rules.context import RuleContext
from flexinspect.rules.prompt.inferred_segments import INFERRED, SUSPECT, InferredSegmentsRule

LINES = (
    "What| is| the| money| of| Japan|?|\n",
    "Name| its| cur|ren|cy|.|\n",
    "Answer| with| one| word|:",
)
TEXTS = ["<bos>", *(text for line in LINES for text in line.split("|"))]
SECOND, THIRD = 9, 16
"""Positions at which the second and the third line begin."""


def blocks(borders: Sequence[int], n: int = len(TEXTS), reader: int | None = None) -> Any:
    """Return the cells of a mask with blocks at the borders; rows from `reader` on see all."""
    owner = np.searchsorted(np.array(borders), np.arange(n), side="right")
    rows = np.arange(n)[:, None]
    same = (owner[:, None] == owner) | (np.arange(n) == 0)
    return (same | (rows >= (n if reader is None else reader))) & (np.arange(n) <= rows)


def look(
    cells: Any, texts: Sequence[str] = TEXTS, *, declared: dict[str, Any] | None = None
) -> list[Finding]:
    """Return the findings in a prefill of two layers that executed the mask."""
    tokens = tuple(
        TokenRecord(pos, pos, text, text, pos, 0, special=text.startswith("<"))
        for pos, text in enumerate(texts)
    )
    segments = (Segment(0, len(texts), "prompt", SegmentKind.SHARED, 0),)
    facts = {"tokenizer": {"bos": 0, "adds_bos": True}}
    facts = facts if declared is None else {**facts, **declared}
    about = GenerationRecord(0, "", "", "", segments, tokens, declared=facts)
    n = len(texts)
    mask = MaskRecord("m", "block", 1, 1, n, n, 0, cells=np.atleast_3d(cells).reshape(1, n, n))
    calls = tuple(
        CallRecord(layer, "flex", "cpu", "m", 1, 2, 2, n, n, 8, "float32", None)
        for layer in range(2)
    )
    step = StepRecord(0, 0, "prefill", n, 0, n, 0.0, 1.0, 0.1, calls=calls, masks=(mask,))
    rule, context = InferredSegmentsRule(), RuleContext()
    context.start_generation(about)
    rule.on_generation_start(context)
    context.add_step(step)
    return [*rule.on_step(step), *rule.on_step(step)]


def test_borders_at_lines_are_reported_as_segments_to_confirm() -> None:
    finding = one(look(blocks([SECOND, THIRD], reader=THIRD)), INFERRED)
    assert finding.sentence == (
        "In all 2 layers the executed mask cuts the prompt into 3 segments: "
        '"What is the money of Japan?↵", "Name its currency.↵" and "Answer with one word:". '
        "No segments were declared: is this what you meant?"
    )
    assert finding.severity is Severity.NOTE
    assert finding.evidence["borders"] == [SECOND, THIRD]
    assert finding.evidence["segments"][1] == [SECOND, THIRD, "Name its currency.↵"]
    assert (finding.positions, finding.step, finding.layers) == ((SECOND, THIRD), 0, (0, 1))


def test_borders_counted_without_the_bos_are_one_token_before_the_lines() -> None:
    finding = one(look(blocks([SECOND - 1, THIRD - 1], reader=THIRD - 1)), SUSPECT)
    assert finding.sentence == (
        "In all 2 layers the executed mask cuts the prompt into 3 segments, and every border is "
        "1 token before the beginning of a line, as if positions had been counted without the "
        'BOS: position 8 "↵" begins a segment instead of position 9 "Name". '
        "No segments were declared: is this what you meant?"
    )
    assert finding.evidence["shift"] == 1
    assert finding.positions == (SECOND - 1, THIRD - 1)


@pytest.mark.parametrize("n", [-3, -2, -1, 2, 3])
def test_borders_that_are_all_off_by_the_same_number_have_a_shift(n: int) -> None:
    finding = one(look(blocks([SECOND - n, THIRD - n])), SUSPECT)
    assert finding.evidence["shift"] == n
    side = "before" if n > 0 else "after"
    assert f"every border is {abs(n)} token{'s' * (abs(n) > 1)} {side} the" in finding.sentence


def test_one_border_far_from_a_line_has_no_shift() -> None:
    assert one(look(blocks([SECOND - 3])), INFERRED).evidence["borders"] == [SECOND - 3]
    assert one(look(blocks([SECOND - 1])), SUSPECT).sentence.count("the border is 1 token") == 1


def test_a_border_inside_a_word_is_named_next_to_correct_ones() -> None:
    finding = one(look(blocks([SECOND, SECOND + 3])), SUSPECT)
    assert 'and position 12 "ren" begins a segment inside a word.' in finding.sentence
    assert finding.positions == (SECOND + 3,)


def test_a_border_before_a_line_break_is_named_next_to_correct_ones() -> None:
    finding = one(look(blocks([SECOND, THIRD - 1])), SUSPECT)
    assert 'and position 15 "↵" begins one with a line break.' in finding.sentence


def test_a_special_token_may_begin_a_segment() -> None:
    texts = ["<bos>", "<user>", "Hi", " there", "<model>", "Yes", "."]
    assert [finding.id for finding in look(blocks([1, 4], len(texts)), texts)] == [INFERRED]


def test_a_segment_of_the_bos_alone_is_named_by_it() -> None:
    cells = blocks([1, SECOND])
    cells[1:, 0] = False
    finding = one(look(cells), INFERRED)
    assert finding.evidence["segments"][0] == [0, 1, "<bos>"]


def test_scripts_without_spaces_have_no_borders_inside_words() -> None:
    texts = ["<bos>", "日本", "の", "通貨", "は", "何"]
    assert [finding.id for finding in look(blocks([3], len(texts)), texts)] == [INFERRED]


@pytest.mark.parametrize(
    "cells",
    [
        pytest.param(np.tri(len(TEXTS), dtype=bool), id="causal"),
        pytest.param(
            np.tri(len(TEXTS), dtype=bool) & ~np.tri(len(TEXTS), k=-4, dtype=bool), id="window"
        ),
        pytest.param(np.ones((len(TEXTS),) * 2, bool), id="open"),
        pytest.param(blocks(range(1, len(TEXTS), 1)), id="a border in every row"),
    ],
)
def test_masks_without_segments_are_not_reported(cells: Any) -> None:
    assert look(cells) == []


def test_nothing_is_inferred_where_something_was_declared() -> None:
    declared = {"segments": [{"label": "one", "text": "What is the money"}]}
    assert look(blocks([SECOND]), declared=declared) == []
    assert look(blocks([SECOND]), declared={"mask_mod": "mine.mask_mod"}) == []


MODEL_RUN: Callable[[Any], Any] = lambda model: model.generate(  # noqa: E731
    prompt_ids(), attention_mask=torch.ones(1, PROMPT, dtype=torch.long), max_new_tokens=3
)


def test_a_run_of_a_model_without_a_declaration_is_reported_once(tmp_path: Path) -> None:
    with own_attention(isolated()) as name:
        model = model_on(name)
        found = planted(tmp_path, model, lambda: MODEL_RUN(model))
        finding = one(found, INFERRED)
        assert finding.evidence["borders"] == [1, 7, 12, 20]
        assert finding.sentence.startswith(
            "In all 3 layers the executed mask cuts the prompt into 5 segments: 0-0, 1-6, 7-11 and "
        )
        declared = planted(
            tmp_path, model, lambda: MODEL_RUN(model), name="declared", segments=SEGMENTS
        )
        assert of(declared, INFERRED) == of(declared, SUSPECT) == []
