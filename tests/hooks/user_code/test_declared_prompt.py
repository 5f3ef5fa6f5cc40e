"""Segments of a user's own prompt: spans, texts, and what lies between."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from flexinspect.core.errors import UsageError
from flexinspect.records.prompt import DeclaredSegment, Segment
from flexinspect_hooks.user_code.generation_builder import (
    PromptInput,
    SegmentArgument,
    build_segments,
    encode_segments,
    parse_segments,
)

WORDS = ["<s>", "Who", " wrote", " it", "?", " By", " whom", "?", " Answer", ":"]


def encode(text: str) -> list[int]:
    return [WORDS.index(text)] if text in WORDS else [99]


def prompt(start: int = 0, n_pads: int = 0, has_bos: bool = True) -> PromptInput:
    texts = ["<pad>"] * n_pads + WORDS
    ids = [50] * n_pads + list(range(len(WORDS)))
    return PromptInput(ids, texts, start, n_pads, has_bos)


def encoded(declared: Sequence[SegmentArgument] | None) -> tuple[DeclaredSegment, ...]:
    return encode_segments(parse_segments(declared), encode)


def laid(
    declared: Sequence[SegmentArgument] | None, prompt_input: PromptInput | None = None
) -> list[tuple[int, int, str]]:
    segments, problems = build_segments(encoded(declared), prompt_input or prompt())
    assert problems == []
    return spans(segments)


def spans(segments: Sequence[Segment]) -> list[tuple[int, int, str]]:
    return [(one.start, one.stop, one.label) for one in segments]


def test_without_declarations_the_prompt_is_one_segment() -> None:
    assert laid(None) == [(0, 10, "prompt"), (10, 11, "generated")]


def test_ids_of_a_tokenizer_that_returns_numpy_numbers_are_plain_numbers() -> None:
    (segment,) = encode_segments(parse_segments(["Who"]), lambda text: np.array([3, 4]))
    assert [type(id_) for id_ in segment.ids] == [int, int]
    (counted,) = parse_segments([(False, True, "first")])
    assert (type(counted.start), type(counted.stop)) == (int, int)


def test_padding_is_a_segment_of_its_own() -> None:
    assert laid(None, prompt(n_pads=3))[:2] == [(0, 3, "padding"), (3, 13, "prompt")]
    assert laid(["Who wrote"], prompt(n_pads=3))[:3] == [
        *((0, 3, "padding"), (3, 4, "bos")),
        (4, 6, "Who wrote"),
    ]


def test_spans_are_kept_and_what_lies_between_is_named() -> None:
    segments, _ = build_segments(encoded([(1, 4, "one"), (5, 7, "two")]), prompt())
    assert spans(segments) == [
        (0, 1, "bos"),
        (1, 4, "one"),
        (4, 5, "separator 1"),
        (5, 7, "two"),
        (7, 10, "cue"),
        (10, 11, "generated"),
    ]
    kinds = ["bos", "paraphrase", "separator", "paraphrase", "cue", "generated"]
    assert [str(one.kind) for one in segments] == kinds
    assert segments[2].owner == 1


def test_texts_are_found_by_what_the_tokens_add_to_the_text() -> None:
    found = laid([("Who wrote it?", "first"), ("By whom", "second")])
    assert found[1:4] == [(1, 5, "first"), (5, 7, "second"), (7, 10, "cue")]


def test_a_text_whose_tokens_hold_more_than_it_takes_them_whole() -> None:
    assert laid(["rote i"])[2] == (2, 4, "rote i")


def test_the_same_text_twice_is_found_twice() -> None:
    assert [one for one in laid([("?", "a"), ("?", "b")]) if one[2] in "ab"] == [
        (4, 5, "a"),
        (7, 8, "b"),
    ]


def test_a_label_may_name_its_kind() -> None:
    segments, _ = build_segments(encoded([(0, 2, "shared"), (2, 3, "x")]), prompt())
    assert [str(one.kind) for one in segments[:2]] == ["shared", "paraphrase"]


def test_a_text_that_is_not_found_is_reported_and_left_out() -> None:
    segments, problems = build_segments(encoded(["nowhere", "By whom"]), prompt())
    assert problems == ["The text of segment 'nowhere' is not in the prompt."]
    assert "nowhere" not in [one.label for one in segments]


def test_a_span_past_the_end_is_cut_and_reported() -> None:
    segments, problems = build_segments(encoded([(8, 12, "late"), (20, 30, "never")]), prompt())
    assert (8, 10, "late") in spans(segments)
    assert len(problems) == 2
    assert "up to position 12" in problems[0]
    assert "ends at 10" in problems[0]


def test_a_text_inside_a_span_is_left_out_and_reported() -> None:
    _, problems = build_segments(encoded([(1, 8, "all"), ("By", "part")]), prompt())
    assert problems == ["Segment 'part' overlaps the one before it and is left out."]


def test_keys_cached_before_are_a_segment() -> None:
    found = laid(None, prompt(start=5))
    assert found == [(0, 5, "before watching"), (5, 15, "prompt"), (15, 16, "generated")]
    assert (6, 7, "Who") in laid(["Who"], prompt(start=5))


@pytest.mark.parametrize(
    "segment", [(3, 3, "x"), (-1, 2, "x"), (1, 2), "", ("", "x"), 7, (1, 2, 3)]
)
def test_an_invalid_segment_is_refused(segment: object) -> None:
    with pytest.raises(UsageError, match="is not a segment"):
        parse_segments([segment])  # type: ignore[list-item]


def test_spans_that_overlap_are_refused() -> None:
    with pytest.raises(UsageError, match="'a' and 'b' overlap at position 2"):
        parse_segments([(2, 5, "b"), (0, 3, "a")])
