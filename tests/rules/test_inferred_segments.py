"""Segments that nobody declared are read out of the executed mask, and odd borders are named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from support.masked_traces import PROMPT, SEGMENTS, isolated, model_on, own_attention, prompt_ids
from support.paths import DEMO
from support.planting import of, one, planted
from support.undeclared import SECOND, TEXTS, THIRD, blocks, generation, prefill
from transformers import AutoModelForCausalLM, AutoTokenizer

from flexinspect.analysis.inferred_declaration import UndeclaredMask
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.prompt import (
    DeclaredSegment,
    Segment,
    SegmentKind,
    TokenizerFacts,
    declaration_entries,
)
from flexinspect.records.step import InputsRecord
from flexinspect.rules.context import RuleContext
from flexinspect.rules.prompt.inferred_segments import INFERRED, SUSPECT, InferredSegmentsRule
from flexinspect.trace.reader import open_trace

GUESS = "You declared no segments, so this is a guess from the mask and the text."


Span = tuple[int, int, str]


def look(
    cells: Any,
    texts: Sequence[str] = TEXTS,
    *,
    declared: dict[str, Any] | None = None,
    positions: Sequence[tuple[int, int]] = (),
) -> list[Finding]:
    """Return the findings in a prefill of two layers that executed the mask."""
    step = prefill(cells)
    if positions:
        step = replace(step, inputs=InputsRecord(1, positions=tuple(positions)))
    rule, context = InferredSegmentsRule(), RuleContext()
    context.start_generation(generation(texts, declared))
    rule.on_generation_start(context)
    context.add_step(step)
    return [*rule.on_step(step), *rule.on_step(step)]


def parts(*edges: int) -> dict[str, Any]:
    """Return lists of the program, one from each of these positions to the next one."""
    spans = enumerate(pairwise(edges))
    return {"parts": [{"name": f"texts[{n}]", "start": a, "stop": b} for n, (a, b) in spans]}


def test_borders_that_divide_lists_of_the_program_at_one_distance_are_a_warning() -> None:
    """Without a tokenizer no text tells where a segment begins."""
    edges = parts(1, SECOND, THIRD, len(TEXTS))
    cells = blocks([SECOND - 1, THIRD - 1], reader=THIRD - 1)
    finding = one(look(cells, declared={"tokenizer": {}, **edges}), SUSPECT)
    assert finding.severity is Severity.WARNING
    assert "1 token early" in finding.sentence
    assert "begins a segment instead of" in finding.sentence
    assert "(the beginning of texts[1])" in finding.sentence
    assert finding.sentence.endswith("these lists of token ids are variables of your program.")
    assert finding.evidence["shift"] == 1


def test_borders_at_edges_of_lists_are_right_whatever_the_text_says() -> None:
    edges = parts(1, SECOND + 2, THIRD + 1, len(TEXTS))
    finding = one(look(blocks([SECOND + 2, THIRD + 1], reader=THIRD + 1), declared=edges), INFERRED)
    assert finding.severity is Severity.NOTE


@pytest.mark.parametrize(
    "edges",
    [
        (1, len(TEXTS)),  # one list: its borders may be anywhere
        (SECOND, THIRD, len(TEXTS)),  # a border before all lists
        (1, SECOND, THIRD + 1, len(TEXTS)),  # two distances
    ],
    ids=["one list", "outside", "two distances"],
)
def test_lists_that_do_not_fit_all_borders_say_nothing(edges: tuple[int, ...]) -> None:
    declared = {"tokenizer": {}, **parts(*edges)}
    found = look(blocks([SECOND - 1, THIRD - 1], reader=THIRD - 1), declared=declared)
    assert one(found, INFERRED).severity is Severity.NOTE


SAME_IDS = ((0, SECOND), (1, THIRD - SECOND), (1, len(TEXTS) - THIRD))
"""Runs of position ids: after the BOS, each line begins with 1."""


def test_borders_that_are_late_by_position_ids_from_0_on_are_a_warning() -> None:
    positions = ((0, SECOND), (0, THIRD - SECOND), (0, len(TEXTS) - THIRD))
    cells = blocks([SECOND + 1, THIRD + 1])
    finding = one(look(cells, declared={"tokenizer": {}}, positions=positions), SUSPECT)
    assert finding.severity is Severity.WARNING
    assert "1 token late" in finding.sentence
    assert "(where the position ids start again)" in finding.sentence


def test_a_first_segment_without_a_border_is_found_by_the_position_ids() -> None:
    cells = blocks([SECOND, THIRD])
    cells |= np.tri(len(TEXTS), dtype=bool) & (np.arange(len(TEXTS)) < SECOND)
    finding = one(look(cells, declared={"tokenizer": {}}, positions=SAME_IDS), SUSPECT)
    assert finding.severity is Severity.WARNING
    assert finding.positions == (1,)
    assert "By the position ids, position 1" in finding.sentence
    assert f"later segments attend to 1-{SECOND - 1}" in finding.sentence
    assert finding.sentence.endswith("those that your program passed.")


def test_borders_at_one_distance_from_the_position_ids_are_a_warning() -> None:
    cells = blocks([SECOND - 1, THIRD - 1])
    finding = one(look(cells, declared={"tokenizer": {}}, positions=SAME_IDS), SUSPECT)
    assert finding.severity is Severity.WARNING
    assert "1 token early" in finding.sentence
    assert "(where the position ids start again)" in finding.sentence


@pytest.mark.parametrize(
    "positions",
    [
        SAME_IDS,  # as the mask
        ((0, len(TEXTS)),),  # one run
        ((0, SECOND), (1, len(TEXTS) - SECOND)),  # only one segment begins again
        ((0, SECOND), (1, THIRD - SECOND), (3, len(TEXTS) - THIRD)),  # two beginnings
        ((0, SECOND), (0, THIRD - SECOND), (0, len(TEXTS) - THIRD)),  # documents, from 0 on
    ],
)
def test_position_ids_of_another_structure_say_nothing(
    positions: tuple[tuple[int, int], ...],
) -> None:
    found = look(blocks([1, SECOND, THIRD]), declared={"tokenizer": {}}, positions=positions)
    assert one(found, INFERRED).severity is Severity.NOTE


def test_the_text_is_read_where_mask_and_position_ids_agree() -> None:
    early = ((0, SECOND - 1), (1, THIRD - SECOND), (1, len(TEXTS) - THIRD + 1))
    finding = one(look(blocks([SECOND - 1, THIRD - 1]), positions=early), SUSPECT)
    assert "the beginning of a line" in finding.sentence


def test_borders_at_lines_are_reported_as_segments_to_confirm() -> None:
    finding = one(look(blocks([SECOND, THIRD], reader=THIRD)), INFERRED)
    assert finding.sentence == (
        "In all 2 layers the executed mask cuts the prompt into 2 segments and a cue: "
        '"What is the money of Japan?↵", "Name its currency.↵" and "Answer with one word:". '
        f"{GUESS}"
    )
    assert finding.severity is Severity.NOTE
    assert finding.evidence["borders"] == [SECOND, THIRD]
    second = {"start": SECOND, "stop": THIRD, "text": "Name its currency.↵"}
    assert finding.evidence["segments"][1] == second
    assert (finding.positions, finding.step, finding.layers) == ((SECOND, THIRD), 0, (0, 1))


def test_borders_counted_without_the_bos_are_one_token_before_the_lines() -> None:
    finding = one(look(blocks([SECOND - 1, THIRD - 1], reader=THIRD - 1)), SUSPECT)
    assert finding.sentence == (
        'Every segment border is 1 token early, as if counted without the BOS: position 8 "↵" '
        'begins a segment instead of position 9 "Name" (the beginning of a line). '
        "In all 2 layers the executed mask cuts the prompt into 2 segments and a cue. "
        f"{GUESS}"
    )
    assert finding.evidence["shift"] == 1
    assert "flexinspect declare TRACE --move 1 (D" in finding.fix
    assert finding.positions == (SECOND - 1, THIRD - 1)


@pytest.mark.parametrize("is_open", [True, False])
def test_it_is_a_warning_unless_the_mask_counts_the_bos(*, is_open: bool) -> None:
    """Where all segments see the BOS, a line break may be meant to begin a segment."""
    cells = blocks([SECOND - 1, THIRD - 1], reader=THIRD - 1)
    cells[SECOND - 1 : THIRD - 1, 0] = is_open
    severity = one(look(cells), SUSPECT).severity
    assert severity is (Severity.NOTE if is_open else Severity.WARNING)


@pytest.mark.parametrize("n", [-3, -2, -1, 2, 3])
def test_borders_that_are_all_off_by_the_same_number_have_a_shift(n: int) -> None:
    finding = one(look(blocks([SECOND - n, THIRD - n])), SUSPECT)
    assert (finding.evidence["shift"], finding.severity) == (n, Severity.NOTE)
    side = "early" if n > 0 else "late"
    start = f"Every segment border is {abs(n)} token{'s' * (abs(n) > 1)} {side}"
    assert finding.sentence.startswith(start)


def test_one_border_far_from_a_line_has_no_shift() -> None:
    assert one(look(blocks([SECOND - 3])), INFERRED).evidence["borders"] == [SECOND - 3]
    single = one(look(blocks([SECOND - 1])), SUSPECT)
    assert single.sentence.startswith("The segment border is")
    assert single.severity is Severity.NOTE


def test_a_border_inside_a_word_is_named_next_to_correct_ones() -> None:
    finding = one(look(blocks([SECOND, SECOND + 3])), SUSPECT)
    assert 'Position 12 "ren" begins a segment inside a word. In all' in finding.sentence
    assert finding.positions == (SECOND + 3,)


def test_a_border_before_a_line_break_is_named_next_to_correct_ones() -> None:
    finding = one(look(blocks([SECOND, THIRD - 1])), SUSPECT)
    assert 'Position 15 "↵" begins a segment with a line break. In all' in finding.sentence


def test_a_special_token_may_begin_a_segment() -> None:
    texts = ["<bos>", "<user>", "Hi", " there", "<model>", "Yes", "."]
    assert [finding.id for finding in look(blocks([1, 4], len(texts)), texts)] == [INFERRED]


CHAT = ["<bos>"]
for _text in ("Who| wrote| Emma", "Name| the| author| of| Emma", "Answer"):
    CHAT += ["<start>", "user", "<end>", "\n\n", *_text.split("|"), "?", "<eot>"]
TURNS = tuple(pos for pos, text in enumerate(CHAT) if text == "<start>")[1:]
ROW = "Who| wrote| Emma|?| \\|| Name| the| author|?| \\|| Emma| is| by|?|\n|Answer|:"
SEPARATED = ["<bos>", *ROW.replace("\\|", "¦").split("|")]
AFTER_BARS = (*(pos + 1 for pos, text in enumerate(SEPARATED) if text == " ¦"), 16)
_WORDS = "Question| one|,| Question| two| words|,| Question| three|\n|So|:"
WORDED = ["<bos>", *_WORDS.split("|")]


def test_a_segment_may_be_a_turn_of_a_chat_or_its_content() -> None:
    n = len(CHAT)
    for borders in (TURNS, tuple(turn + 4 for turn in TURNS)):
        assert [finding.id for finding in look(blocks(borders, n), CHAT)] == [INFERRED]


@pytest.mark.parametrize("n", [-1, 1])
def test_borders_next_to_the_turns_of_a_chat_are_suspect(n: int) -> None:
    finding = one(look(blocks([turn - n for turn in TURNS], len(CHAT)), CHAT), SUSPECT)
    assert f"border is 1 token {'early' if n > 0 else 'late'}" in finding.sentence
    assert "(the beginning of a turn of the chat)" in finding.sentence
    assert finding.evidence["shift"] == n


def test_segments_may_begin_after_a_separator_within_a_line() -> None:
    cells = blocks(AFTER_BARS, len(SEPARATED))
    assert [finding.id for finding in look(cells, SEPARATED)] == [INFERRED]


def test_borders_that_are_off_from_a_separator_are_suspect() -> None:
    cells = blocks([border - 1 for border in AFTER_BARS], len(SEPARATED))
    finding = one(look(cells, SEPARATED), SUSPECT)
    assert '(the text after "¦")' in finding.sentence
    assert finding.evidence["shift"] == 1


def test_borders_that_are_off_from_a_repeated_wording_are_suspect() -> None:
    at = [pos for pos, text in enumerate(WORDED) if text.strip() in ("Question", "So")][1:]
    assert [f.id for f in look(blocks(at, len(WORDED)), WORDED)] == [INFERRED]
    finding = one(look(blocks([pos - 2 for pos in at], len(WORDED)), WORDED), SUSPECT)
    assert '("Question", with which the prompt and other segments begin)' in finding.sentence


def test_a_segment_of_the_bos_alone_is_named_by_it() -> None:
    cells = blocks([1, SECOND])
    cells[1:, 0] = False
    finding = one(look(cells), INFERRED)
    assert finding.evidence["segments"][0] == {"start": 0, "stop": 1, "text": "<bos>"}


def test_text_before_the_segments_that_all_see_is_a_segment_of_its_own() -> None:
    cells = blocks([SECOND, THIRD], reader=THIRD)
    cells[:, 1:4] = np.tri(len(TEXTS), dtype=bool)[:, 1:4]
    finding = one(look(cells), INFERRED)
    assert finding.evidence["borders"] == [4, SECOND, THIRD]
    assert finding.evidence["segments"][0] == {"start": 0, "stop": 4, "text": "What is the"}
    assert "cuts the prompt into a shared text, 2 segments and a cue: " in finding.sentence


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


WORDINGS = [(1, SECOND - 1, "one"), (SECOND, THIRD - 1, "two")]
"""The first two lines, each without its line break."""


def look_at_wordings(cells: Any, spans: Sequence[Span] = WORDINGS) -> list[Finding]:
    """Return the findings where the wordings were declared as segments, but no mask."""
    declared = declaration_entries(
        [DeclaredSegment(label, start, stop) for start, stop, label in spans],
        TokenizerFacts(0, adds_bos=True),
    )
    rule, context, step = InferredSegmentsRule(), RuleContext(), prefill(cells)
    about, paraphrase = generation(TEXTS, declared), SegmentKind.PARAPHRASE
    segments = [Segment(*span, paraphrase, n) for n, span in enumerate(spans)]
    context.start_generation(replace(about, segments=(*segments, *about.segments[-1:])))
    rule.on_generation_start(context)
    context.add_step(step)
    return [*rule.on_step(step)]


def test_borders_between_declared_segments_stay_suspect_without_a_declared_mask() -> None:
    finding = one(look_at_wordings(blocks([SECOND - 1, THIRD - 1], reader=THIRD - 1)), SUSPECT)
    assert "Every segment border is 1 token early" in finding.sentence
    assert finding.sentence.endswith(
        "You declared segments but no mask, so the cells were not compared one by one."
    )
    assert 'declare the mask beside the segments, for example mask = "segment' in finding.fix


def test_borders_where_the_declared_segments_begin_are_confirmed() -> None:
    assert look_at_wordings(blocks([SECOND, THIRD], reader=THIRD)) == []
    early = [(1, SECOND - 1, "one"), (SECOND - 1, THIRD - 1, "two")]
    assert look_at_wordings(blocks([SECOND - 1, THIRD - 1]), early) == []


def test_borders_inside_declared_segments_are_left_to_the_comparison_with_them() -> None:
    assert look_at_wordings(blocks([SECOND - 2, THIRD - 2])) == []


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
            "In all 3 layers the executed mask cuts the prompt into the first token, 3 segments "
            "and a cue: 0-0, 1-6, 7-11 and "
        )
        declared = planted(
            tmp_path, model, lambda: MODEL_RUN(model), name="declared", segments=SEGMENTS
        )
        assert of(declared, INFERRED) == of(declared, SUSPECT) == []


def test_what_is_declared_from_a_wrong_mask_finds_its_fault_in_the_next_run(
    tmp_path: Path,
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    lines = ["What is the money of Japan?\n", "Name the currency of Japan.\n", "Answer:"]
    pieces = [tokenizer.encode(line, add_special_tokens=False) for line in lines]
    ends = np.cumsum([len(piece) for piece in pieces]).tolist()  # without the BOS: the fault
    mask_mod = isolated([(0, ends[0]), (ends[0], ends[1])], reader=ends[1])
    row = torch.tensor([[tokenizer.bos_token_id, *(id_ for piece in pieces for id_ in piece)]])
    with own_attention(mask_mod) as name:
        model = AutoModelForCausalLM.from_pretrained(DEMO, attn_implementation=name).eval()

        def generate() -> None:
            model.generate(row, attention_mask=torch.ones_like(row), max_new_tokens=2)

        found = planted(tmp_path, model, generate, name="first", tokenizer=tokenizer)
        assert one(found, SUSPECT).evidence["shift"] == 1
        with open_trace(tmp_path / "first.flextrace") as reader:
            declared = UndeclaredMask(reader, 0).choices()[0]
        segments = [(entry.text, entry.label) for entry in declared.segments]
        assert [text for text, _ in segments] == [line.strip() for line in lines[:2]]
        options = {"tokenizer": tokenizer, "segments": segments, "mask": "segment-isolation"}
        found = planted(tmp_path, model, generate, name="second", **options)
        assert one(found, "segments.shifted").evidence["shift"] == 1
        assert of(found, SUSPECT) == []
