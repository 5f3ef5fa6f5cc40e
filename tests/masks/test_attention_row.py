"""A row of attention in numpy: its weights, its LSE check, its attention per segment."""

from __future__ import annotations

import math

import numpy as np
import pytest

from flexinspect.masks.attention_row import (
    LseCheck,
    attention_by_segment,
    entropy,
    kv_head_of,
    row_scores,
    row_weights,
    worst_check,
)
from flexinspect.records.prompt import Segment, SegmentKind

RNG = np.random.default_rng(3)
QUERY = RNG.normal(size=16).astype(np.float32)
KEYS = RNG.normal(size=(11, 16)).astype(np.float32)
OPEN = np.arange(11) % 3 != 1


def softmax(scores: np.ndarray, visible: np.ndarray) -> np.ndarray:
    parts = np.where(visible, np.exp(scores), 0.0)
    return np.asarray(parts / parts.sum())


def test_weights_are_the_softmax_of_the_scaled_scores_of_visible_keys() -> None:
    scores = row_scores(QUERY, KEYS, 0.3)
    np.testing.assert_allclose(scores, KEYS.astype(float) @ QUERY.astype(float) * 0.3, atol=1e-5)
    row = row_weights(scores, OPEN)
    np.testing.assert_allclose(row.weights, softmax(scores, OPEN), atol=1e-12)
    assert row.weights[~OPEN].sum() == 0
    assert row.lse_error is None


def test_the_default_scale_is_one_over_the_root_of_the_width() -> None:
    np.testing.assert_array_equal(row_scores(QUERY, KEYS, None), row_scores(QUERY, KEYS, 0.25))


def test_a_softcap_applies_to_the_scaled_scores() -> None:
    plain = row_scores(QUERY, KEYS, 1.0)
    capped = row_scores(QUERY, KEYS, 1.0, 2.0)
    np.testing.assert_allclose(capped, 2.0 * np.tanh(plain / 2.0))
    assert np.abs(capped).max() < 2.0 < np.abs(plain).max()


def test_the_lse_check_passes_for_the_executed_mask_and_fails_for_another() -> None:
    scores = row_scores(QUERY, KEYS, 0.3)
    lse = math.log(np.exp(scores[OPEN]).sum())
    right = row_weights(scores, OPEN, lse)
    assert right.lse_error is not None
    assert right.lse_error < 1e-12
    hidden = OPEN.copy()
    hidden[3] = False
    wrong = row_weights(scores, hidden, lse)
    assert wrong.lse_error == pytest.approx(right.weights[3], rel=1e-9)
    assert wrong.total == pytest.approx(1 - right.weights[3])


def test_a_row_without_visible_keys_has_no_weights_and_passes_the_check() -> None:
    nothing = np.zeros(11, np.bool_)
    row = row_weights(row_scores(QUERY, KEYS, 0.3), nothing, -math.inf)
    assert (row.total, row.lse_error, row.lse) == (0.0, 0.0, -math.inf)
    own = row_weights(row_scores(QUERY, KEYS, 0.3), nothing)
    assert (own.total, own.lse_error) == (0.0, None)


def test_visible_keys_where_the_kernel_saw_none_fail_the_check() -> None:
    row = row_weights(np.zeros(11), OPEN, -math.inf)
    assert row.lse_error == OPEN.sum()


def test_nan_in_visible_scores_fails_the_check() -> None:
    scores = row_scores(QUERY, KEYS, 0.3)
    scores[0] = math.nan
    row = row_weights(scores, OPEN, 1.0)
    assert row.lse_error is not None
    assert math.isnan(row.lse_error)
    assert LseCheck(row.lse_error, "lse").is_failed
    closed = row_weights(scores, OPEN & (np.arange(11) > 0))
    assert closed.total == pytest.approx(1.0)


def test_huge_scores_do_not_overflow() -> None:
    row = row_weights(np.array([1e4, 1e4, 0.0]), np.ones(3, np.bool_))
    np.testing.assert_allclose(row.weights, [0.5, 0.5, 0.0])
    assert row_weights(np.array([1e4]), np.ones(1, np.bool_), 0.0).lse_error == math.inf


def test_a_row_without_keys_is_not_an_error() -> None:
    row = row_weights(np.zeros(0), np.zeros(0, np.bool_))
    assert (row.total, row.lse) == (0.0, -math.inf)


@pytest.mark.parametrize(("heads", "expected"), [((8, 2), [0] * 4 + [1] * 4), ((4, 4), [0, 1, 2])])
def test_neighbouring_query_heads_share_a_key_head(
    heads: tuple[int, int], expected: list[int]
) -> None:
    assert [kv_head_of(head, *heads) for head in range(len(expected))] == expected


def test_entropy_is_in_nats_and_zero_for_a_single_key() -> None:
    assert entropy(np.full(4, 0.25)) == pytest.approx(math.log(4))
    assert entropy(np.array([0.0, 1.0])) == 0.0


def segment(start: int, stop: int, kind: SegmentKind = SegmentKind.PARAPHRASE) -> Segment:
    return Segment(start, stop, "x", kind, 0)


def test_attention_is_summed_by_segment_and_the_last_segment_gets_the_rest() -> None:
    weights = np.arange(6, dtype=float)
    segments = (segment(0, 1), segment(1, 4), segment(4, 5))
    np.testing.assert_array_equal(attention_by_segment(weights, segments), [0, 6, 9])


def test_attention_by_segment_accounts_for_keys_dropped_by_a_sliding_cache() -> None:
    weights = np.ones(4)
    segments = (segment(0, 2), segment(2, 5), segment(5, 9))
    np.testing.assert_array_equal(attention_by_segment(weights, segments, first_pos=3), [0, 2, 2])


def test_checks_describe_their_value_and_kind() -> None:
    assert LseCheck(3.2e-6, "lse").describe() == "LSE error 3e-06"
    assert LseCheck(0.0, "output").describe() == "output error 0"
    assert LseCheck().describe() == "not checked"
    assert [
        LseCheck(value).is_failed for value in (None, 0.0, 1e-2, 1.1e-2, math.nan, math.inf)
    ] == [
        *(False, False, False),
        *(True, True, True),
    ]


def test_the_worst_check_is_a_failed_one_then_an_unchecked_one_then_the_largest() -> None:
    good, better, bad = LseCheck(1e-4), LseCheck(1e-6), LseCheck(0.5)
    assert worst_check([better, good]) is good
    assert not worst_check([good, LseCheck()]).is_checked
    assert worst_check([LseCheck(), bad, good]) is bad
    assert math.isnan(worst_check([bad, LseCheck(math.nan)]).value or 0)
    assert worst_check([]) == LseCheck()


@pytest.mark.parametrize(("share", "is_seen"), [(0.005, False), (0.02, True)])
def test_a_wrongly_masked_key_is_detected_above_one_percent_of_attention(
    share: float, is_seen: bool
) -> None:
    scores = np.log(np.array([1 - share, share]))
    row = row_weights(scores, np.array([True, False]), lse=0.0)
    assert row.lse_error == pytest.approx(share)
    assert LseCheck(row.lse_error, "lse").is_failed is is_seen


def test_rounding_of_half_precision_passes_with_a_note() -> None:
    rounded = LseCheck(0.03, "output", "bfloat16")
    assert not rounded.is_failed
    assert rounded.describe() == "output error 3e-02 (bfloat16 rounds to 0.12)"
    assert LseCheck(0.03, "output", "float32").is_failed
    assert LseCheck(0.03, "lse", "bfloat16").is_failed
    assert LseCheck(0.3, "output", "bfloat16").is_failed
