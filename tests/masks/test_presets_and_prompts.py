"""Prompts composed from token ids, and the keys that each preset lets a row attend to."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tiny import make_pieces

from flexinspect.core.errors import MaskError, UsageError
from flexinspect.core.text import escape_unprintable
from flexinspect.inputs.samples import is_correct_answer
from flexinspect.masks import mask_presets
from flexinspect.records.job import Job, PromptTexts, SamplingOptions, parse_layers, parse_steps
from flexinspect.records.prompt import (
    Prompt,
    PromptTokenIds,
    SegmentKind,
    close_generated_segment,
    compose_prompt,
    segment_index,
)


@pytest.fixture
def prompt() -> Prompt:
    return compose_prompt(make_pieces(), max_new_tokens=8)


ids = st.lists(st.integers(3, 99), max_size=5).map(tuple)


@given(st.booleans(), ids, st.lists(ids.filter(len), min_size=1, max_size=4), ids, ids)
def test_every_position_belongs_to_one_segment_that_holds_its_piece(
    bos: bool,
    shared: tuple[int, ...],
    paraphrases: list[tuple[int, ...]],
    separator: tuple[int, ...],
    cue: tuple[int, ...],
) -> None:
    pieces = PromptTokenIds((1,) if bos else (), shared, tuple(paraphrases), separator, cue)
    prompt = compose_prompt(pieces, max_new_tokens=4)
    stops = [segment.stop for segment in prompt.segments]
    assert [segment.start for segment in prompt.segments] == [0, *stops[:-1]]
    assert stops[-1] == len(prompt.ids) + 4
    for number, paraphrase in enumerate(paraphrases, start=1):
        segment = next(s for s in prompt.segments if s.label == f"paraphrase {number}")
        assert prompt.ids[segment.start : segment.stop] == paraphrase
    for pos in range(len(prompt.ids)):
        assert prompt.segments[segment_index(prompt.segments, pos)].start <= pos


def test_reset_positions_restart_after_the_prefix_and_end_after_the_longest() -> None:
    prompt = compose_prompt(make_pieces(), max_new_tokens=3, positions="reset")
    by_label = {s.label: prompt.position_ids[s.start : s.stop] for s in prompt.segments}
    prefix = 1 + 4
    for number, length in ((1, 7), (2, 5), (3, 8)):
        assert by_label[f"paraphrase {number}"] == tuple(range(prefix, prefix + length))
    assert by_label["cue"] == (prefix + 9, prefix + 10)
    assert prompt.next_position(0) == prefix + 11


def test_an_empty_prompt_and_unknown_positions_are_refused() -> None:
    with pytest.raises(UsageError, match="no tokens"):
        compose_prompt(PromptTokenIds((), (), ((),), (), ()), max_new_tokens=1)
    with pytest.raises(UsageError, match="contiguous or reset"):
        compose_prompt(make_pieces(), max_new_tokens=1, positions="random")


def test_the_generated_segment_is_closed_at_its_true_length(prompt: Prompt) -> None:
    closed = close_generated_segment(prompt.segments, len(prompt.ids) + 2)
    assert len(closed[-1]) == 2
    assert closed[:-1] == prompt.segments[:-1]


def rows(prompt: Prompt, *kinds: SegmentKind) -> list[int]:
    return [p for s in prompt.segments if s.kind in kinds for p in range(s.start, s.stop)]


@pytest.mark.parametrize("name", mask_presets.PRESETS)
def test_every_preset_is_causal_without_empty_rows(prompt: Prompt, name: str) -> None:
    cells = mask_presets.preset(name, prompt.segments).dense(prompt.segments[-1].stop)
    assert not np.triu(cells, 1).any()
    assert cells.diagonal().all()
    assert cells.any(axis=1).all()


def test_isolated_paraphrases_attend_to_bos_and_themselves(prompt: Prompt) -> None:
    spec = mask_presets.preset("segment-isolation", prompt.segments)
    cells = spec.dense(prompt.segments[-1].stop)
    for index, segment in enumerate(prompt.segments):
        if segment.kind is not SegmentKind.PARAPHRASE:
            continue
        own = {p for s in prompt.segments if s.owner == index for p in range(s.start, s.stop)}
        for row in own:
            seen = set(np.flatnonzero(cells[row]).tolist())
            assert seen == {0} | {p for p in own if p <= row}


def test_generated_rows_attend_to_everything_before_them(prompt: Prompt) -> None:
    spec = mask_presets.preset("segment-isolation", prompt.segments)
    cells = spec.dense(prompt.segments[-1].stop)
    for row in rows(prompt, SegmentKind.CUE, SegmentKind.GENERATED):
        assert cells[row, : row + 1].all()


def test_the_other_presets_open_or_close_the_documented_segments(prompt: Prompt) -> None:
    n = prompt.segments[-1].stop
    span = {s.label: slice(s.start, s.stop) for s in prompt.segments}
    shared = mask_presets.preset("shared-prefix", prompt.segments).dense(n)
    assert shared[span["paraphrase 3"], span["shared"]].all()
    assert not shared[span["paraphrase 3"], span["paraphrase 1"]].any()
    anchor = mask_presets.preset("anchor-first", prompt.segments).dense(n)
    assert anchor[span["paraphrase 3"], span["paraphrase 1"]].all()
    assert not anchor[span["paraphrase 3"], span["paraphrase 2"]].any()
    document = mask_presets.preset("document", prompt.segments).dense(n)
    assert document[span["generated"], span["paraphrase 3"]].all()
    assert not document[span["generated"], span["paraphrase 1"]].any()


def test_isolated_separators_are_empty_rows_that_later_rows_attend_to(prompt: Prompt) -> None:
    rule = mask_presets.preset("segment-isolation", prompt.segments, separators="isolated")
    cells = rule.dense(prompt.segments[-1].stop)
    separators = rows(prompt, SegmentKind.SEPARATOR)
    assert np.flatnonzero(~cells.any(axis=1)).tolist() == separators
    assert cells[-1, separators].all()


def test_an_unknown_name_suggests_the_nearest_one(prompt: Prompt) -> None:
    with pytest.raises(MaskError) as caught:
        mask_presets.preset("shared-prefx", prompt.segments)
    assert "Did you mean shared-prefix?" in caught.value.sentence()
    with pytest.raises(MaskError, match="attached or isolated"):
        mask_presets.preset("causal", prompt.segments, separators="none")


def test_a_job_round_trips_to_the_capture_process() -> None:
    job = Job(
        out="x.flextrace",
        prompts=("a\nb", "ü"),
        texts=PromptTexts(instruction="hm\t"),
        sampling=SamplingOptions(True, 0.5, 3, 0.9),
        argv=("flexinspect", "run"),
    )
    assert Job.from_json(job.to_json()) == job
    with pytest.raises(UsageError):
        Job.from_json("{")


def test_layers_are_parsed_as_numbers_and_ranges() -> None:
    assert parse_layers(None, 4) is None
    assert parse_layers("all", 4) is None
    assert parse_layers("3,0-1", 4) == (0, 1, 3)
    for text, message in (
        ("4", "layer 4"),
        ("1-9", "layer 4"),
        ("0-99999999999999", "layer 4"),
        ("x", "not a number"),
        ("1-", "not a number"),
        ("2-1", "names no"),
    ):
        with pytest.raises(UsageError, match=message):
            parse_layers(text, 4)


def test_huge_step_ranges_are_refused_before_they_are_expanded() -> None:
    assert parse_steps("0,5-7") == {0, 5, 6, 7}
    for text in ("0-99999999999999", "9" * 5000):
        with pytest.raises(UsageError, match="no generation has a step as late"):
            parse_steps(text)


def test_an_answer_is_right_if_it_contains_an_expected_one_as_whole_words() -> None:
    assert is_correct_answer(" paris. ", ["Paris"])
    assert is_correct_answer("São  Tomé", ["são tomé"])
    assert not is_correct_answer("Parisian", ["Paris"])
    assert not is_correct_answer("", ["Paris"])
    assert not is_correct_answer("Paris", ["", "."])
    assert is_correct_answer("The domain is .fr.", [".fr"])
    assert is_correct_answer("You dial +33.", ["+1", "+33"])
    assert not is_correct_answer("You dial +331.", ["+33"])


def test_text_from_a_model_cannot_move_the_cursor() -> None:
    assert escape_unprintable("a\x1b[2Jb\n\u202e") == "a\\x1b[2Jb\\n\\u202e"
    assert escape_unprintable("naïve 🦙 日本") == "naïve 🦙 日本"
