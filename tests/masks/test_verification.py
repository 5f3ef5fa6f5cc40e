"""Verification of masks: the lines of the notebook, counterexamples in words, every violation."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexinspect.core.errors import MaskError
from flexinspect.core.languages import load_labels
from flexinspect.masks.known_masks import ArrayMask, dense
from flexinspect.masks.mask_expressions import parse_mask
from flexinspect.masks.mask_presets import PRESETS
from flexinspect.masks.picture_text import Places
from flexinspect.masks.size_presets import PRESET_CONFIGS, MaskConfig
from flexinspect.masks.verification import CHECKS, Verification, verify_mask
from flexinspect.records.prompt import Segment, SegmentKind

CONFIG = MaskConfig(3, 4, 1, 2)
SEGMENTS, N = CONFIG.segments(), CONFIG.length
ISOLATED = parse_mask("segment-isolation", SEGMENTS)


def lines(result: Verification, language: str = "en", **words: str) -> list[str]:
    texts = {int(at[1:]): word for at, word in words.items()}
    return result.lines(Places(load_labels(language), SEGMENTS, texts))


@pytest.mark.parametrize("name", PRESET_CONFIGS)
def test_a_preset_gives_exactly_the_lines_of_the_notebook(name: str) -> None:
    segments = PRESET_CONFIGS[name].segments()
    result = verify_mask(parse_mask("segment-isolation", segments), segments)
    assert result.passed
    expected = segments[-1].start + 1
    assert result.lines(Places(load_labels("en"), segments)) == [
        "Causal violations: 0",
        "Encoding cross-segment attention: 0",
        f"First generated token attends to: {expected}/{expected}",
        "All tests passed",
    ]
    assert expected == {"small": 50, "medium": 134, "large": 259}[name]


def test_the_lines_are_there_in_chinese() -> None:
    segments = PRESET_CONFIGS["small"].segments()
    result = verify_mask(parse_mask("segment-isolation", segments), segments)
    assert result.lines(Places(load_labels("zh"), segments)) == [
        "因果性违规：0",
        "编码阶段跨段注意力：0",
        "第一个生成的 token 关注：50/50",
        "所有测试通过",
    ]


def test_a_leak_is_named_with_its_row_key_segments_and_words() -> None:
    cells = dense(ISOLATED, N, N)
    cells[6, 2] = True
    result = verify_mask(cells, SEGMENTS, declared=ISOLATED)
    assert result.failed == ("isolation", "declared")
    where = 'row 6 ("Who", paraphrase 2) attends to key 2 (paraphrase 1)'
    assert lines(result, p6="Who") == [
        "Causal violations: 0",
        "Encoding cross-segment attention: 1",
        f"  first: {where}",
        "First generated token attends to: 15/15",
        "Cells that differ from segment-isolation: 0 lost, 1 leaked",
        f"  first: {where}",
        "Tests failed: 2",
    ]


def test_generated_tokens_that_miss_keys_are_counted() -> None:
    result = verify_mask(parse_mask("document", SEGMENTS), SEGMENTS)
    assert result.failed == ("fusion",)
    assert lines(result)[2:5] == [
        "First generated token attends to: 5/15",
        "Generated tokens that do not attend to all keys before them: 2",
        "  first: row 14 (generated token 1) attends to 5 of 15 keys",
    ]


def test_empty_rows_and_unseen_keys_are_violations() -> None:
    cells = dense(ISOLATED, N, N)
    cells[3] = cells[:, 0] = False
    result = verify_mask(cells, SEGMENTS, checks=("rows", "keys"))
    assert lines(result) == [
        "Rows that see nothing: 2",
        "  positions 0, 3",
        "Keys that nobody sees: 1",
        "  positions 0",
        "Tests failed: 2",
    ]


def test_a_check_that_was_asked_for_has_a_line_when_it_passes() -> None:
    assert lines(verify_mask(ISOLATED, SEGMENTS, checks=("rows",))) == [
        "Rows that see nothing: 0",
        "All tests passed",
    ]


def test_every_head_is_verified_and_the_first_violation_names_its_head() -> None:
    mask = parse_mask("per-head(segment-isolation, full)", SEGMENTS)
    result = verify_mask(mask, SEGMENTS)
    assert [head.causal.count for head in result.heads] == [0, N * (N - 1) // 2]
    assert lines(result)[1].startswith("  first: head 1: row 0 (paraphrase 1) attends to key 1")


@given(
    st.sampled_from([*PRESETS, "full", "sliding-window(3)"]),
    st.lists(st.tuples(st.integers(0, N - 1), st.integers(0, N - 1)), max_size=3),
)
def test_the_counts_equal_those_of_plain_loops(text: str, flips: list[tuple[int, int]]) -> None:
    cells = dense(parse_mask(text, SEGMENTS), N, N)
    for row, key in flips:
        cells[row, key] ^= True
    (head,) = verify_mask(cells, SEGMENTS, declared=ISOLATED).heads
    declared = dense(ISOLATED, N, N)
    owner = [next(s.owner for s in SEGMENTS if s.start <= at < s.stop) for at in range(N)]
    is_cross = [[owner[q] != owner[k] and q < 14 and k < 14 for k in range(N)] for q in range(N)]
    assert head.violations() == {
        "causal": sum(cells[q, k] for q in range(N) for k in range(q + 1, N)),
        "isolation": (cells & np.array(is_cross)).sum(),
        "fusion": sum(not cells[q, : q + 1].all() for q in (14, 15)),
        "rows": (~cells.any(axis=1)).sum(),
        "keys": (~cells.any(axis=0)).sum(),
        "declared": (cells != declared).sum(),
    }
    leaked = np.argwhere(cells & ~declared).tolist()
    assert head.leaked is not None
    assert head.leaked.first == (tuple(leaked[0]) if leaked else None)


def test_text_around_the_paraphrases_may_be_attended_to() -> None:
    segments = (
        Segment(0, 1, "bos", SegmentKind.BOS, 0),
        Segment(1, 3, "shared", SegmentKind.SHARED, 1),
        Segment(3, 6, "paraphrase 1", SegmentKind.PARAPHRASE, 2),
        Segment(6, 9, "paraphrase 2", SegmentKind.PARAPHRASE, 3),
        Segment(9, 11, "cue", SegmentKind.CUE, 4),
        Segment(11, 12, "generated", SegmentKind.GENERATED, 5),
    )
    assert verify_mask(parse_mask("shared-prefix", segments), segments).passed
    (head,) = verify_mask(parse_mask("causal", segments), segments).heads
    assert (head.isolation.count, head.isolation.first) == (9, (6, 3))


def test_the_result_is_plain_data() -> None:
    result = verify_mask(parse_mask("causal"), SEGMENTS, declared=ISOLATED)
    data = json.loads(json.dumps(result.as_json()))
    assert data["passed"] is False
    assert list(data["checks"]) == list(CHECKS)
    assert data["checks"]["causal"] == {"violations": 0, "passed": True}
    assert data["heads"][0]["leaked"]["first"] == [5, 0]


def test_a_mask_without_segments_is_checked_as_far_as_it_goes() -> None:
    result = verify_mask(np.tri(5, dtype=bool))
    assert result.passed
    assert result.lines(Places(load_labels("en"))) == [
        "Causal violations: 0",
        "All tests passed",
    ]


def test_progress_is_reported_up_to_the_end() -> None:
    shares: list[float] = []
    mask = parse_mask("per-head(causal, full)")
    verify_mask(mask, n_rows=600, n_keys=600, declared=mask, report=shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_an_unknown_check_and_a_missing_size_are_refused() -> None:
    with pytest.raises(MaskError, match="There is no check 'casual'") as error:
        verify_mask(ISOLATED, SEGMENTS, checks=("casual",))
    assert error.value.hint == "Did you mean causal?"
    for cells in (np.ones((3, 3)), np.ones(3, bool), np.zeros((0, 3), bool)):
        with pytest.raises(MaskError, match=r"An array of .* is not a mask"):
            verify_mask(cells, SEGMENTS)
    with pytest.raises(MaskError, match="size of the mask is not known"):
        verify_mask(ArrayMask("empty", np.zeros((1, 0, 0), bool)))
