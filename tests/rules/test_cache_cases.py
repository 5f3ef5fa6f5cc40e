"""The shipped cases of lengths, caches and positions are found, and their correct twins are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.cases import found_in_case
from support.planting import of, one, serious

from flexinspect.records.finding import Finding, Severity

TWO_PARAPHRASES = """
[[segments]]
start = 0
stop = 5
label = "paraphrase 1"

[[segments]]
start = 5
stop = 10
label = "paraphrase 2"
"""


@pytest.fixture
def found() -> Callable[..., list[Finding]]:
    return found_in_case


def test_k03_weighs_the_empty_slots_and_leaves_the_closed_ones_alone(
    found: Callable[..., list[Finding]],
) -> None:
    finding = one(found("k03_empty_cache_slots"), "cache.empty-slots")
    assert (finding.generation, finding.severity) == (0, Severity.ERROR)
    assert finding.sentence == (
        "32 keys open, 12 filled: 54 % of the attention of this call is on empty slots."
    )


def test_k04_names_both_lengths_layer_step_and_what_the_cache_holds(
    found: Callable[..., list[Finding]],
) -> None:
    longer, shorter, finding = of(found("k04_mask_one_short"), "lengths.mask-kv")
    assert longer.sentence.startswith("KV length 33 but mask built for 32: flex_attention raised")
    assert shorter.sentence.startswith("KV length 31 but mask built for 32: flex_attention raised")
    assert (finding.layer, finding.step, finding.severity) == (0, 1, Severity.ERROR)
    assert finding.sentence.startswith(
        "KV length 33 but mask built for 32 (layer 0, step 1; cache holds 32 before, 33 after): "
        "flex_attention raised "
    )


def test_k07_names_the_layer_that_stayed_empty_once(found: Callable[..., list[Finding]]) -> None:
    findings = found("k07_lost_cache")
    finding = one(findings, "cache.empty-layer")
    assert (finding.layer, finding.step, finding.severity) == (0, 0, Severity.ERROR)
    assert finding.sentence == "Layer 0 received a cache and left it empty (0), layer 1 holds 5."
    assert [f.id for f in findings if f.id.startswith(("cache.", "positions.", "lengths."))] == [
        "cache.empty-layer"
    ]


def test_k09_counts_the_rows_once(found: Callable[..., list[Finding]]) -> None:
    finding = one(found("k09_no_cache"), "cache.not-used")
    assert (finding.step, finding.last_step, finding.severity) == (1, 4, Severity.NOTE)
    assert "q length grows 10, 11, 12, ... to 14" in finding.sentence
    assert "5 steps computed 60 query rows, where 14 are enough" in finding.sentence


def test_s03_names_the_segment_whose_positions_continue_and_not_the_one_that_restarts(
    found: Callable[..., list[Finding]],
) -> None:
    notes = of(found("s03_order_of_paraphrases", TWO_PARAPHRASES), "positions.not-reset")
    assert [note.generation for note in notes] == [0, 1]
    assert {(note.severity, note.positions) for note in notes} == {(Severity.NOTE, (5,))}
    assert "are not restarted at paraphrase 2: it begins at 5" in notes[0].sentence


@pytest.mark.parametrize("name", ["c2_padded_batch", "c3_open_decode_row", "c5_shifted_positions"])
def test_correct_programs_have_no_findings(found: Callable[..., list[Finding]], name: str) -> None:
    findings = found(name)
    ours = [f for f in findings if f.id.startswith(("cache.", "positions.", "lengths."))]
    assert serious(findings) == ours == []
