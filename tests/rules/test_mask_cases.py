"""Mask findings of the case scripts; their repaired halves have none."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

import pytest
from support.cases import ran_case, segments
from support.planting import of, serious

from flexinspect.records.finding import Finding, Severity
from flexinspect.rules.masks.block_tables import BlockTablesRule
from flexinspect.rules.masks.declared_vs_executed import MasksRule
from flexinspect.trace.reader import open_trace

Spans = Sequence[tuple[int, int]]

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None,
    reason="compiled flex on a CPU needs a C++ compiler",
)


OWN = {**MasksRule.findings, **BlockTablesRule.findings}


def found_in(name: str, spans: Spans = (), mask: str = "") -> list[Finding]:
    """Run a case as a user would, with declared segments and mask; return its mask findings."""
    declared = segments(*spans, mask=mask, label="part") if spans or mask else ""
    ran, out = ran_case(name, declared)
    assert ran.code == 0, ran
    with open_trace(out) as reader:
        off = [row.event.text for row in reader.events() if row.event.kind == "rule-disabled"]
        assert off == []
        found = [f for f in reader.findings() if f.id in OWN]
        for finding in found:
            if finding.query:
                assert reader._query(finding.query, ())
        return [finding for finding in found if finding.id != "mask.empty-row"]


def ids_of(found: Sequence[Finding]) -> list[tuple[int, str]]:
    return [(f.generation, f.id) for f in found if f.id in OWN]


def test_a01_a_placeholder_opens_every_cell() -> None:
    found = found_in("a01_placeholder_mask", [(0, 12)], "causal")
    assert ids_of(found) == [(0, "mask.not-applied"), (1, "mask.not-applied")]
    for finding in found:
        assert (finding.severity, finding.layers) == (Severity.ERROR, (0, 1))
        assert "144 of 144 cells open where the declared mask (causal) opens 78" in finding.sentence
        assert "rows 0-10 see the future" in finding.sentence


def test_a01_is_found_without_a_declared_mask() -> None:
    found = found_in("a01_placeholder_mask")
    assert ids_of(found) == [(0, "mask.future"), (1, "mask.future")]
    assert found[0].severity is Severity.WARNING
    assert "rows 0-10 see the future (66 pairs)" in found[0].sentence


def test_a02_the_layer_that_fell_back_lost_the_mask() -> None:
    spans = [(1, 7), (9, 15)]
    found = found_in("a02_silent_fallback", spans, "segment-isolation")
    assert ids_of(found) == [(2, "mask.not-applied"), (3, "mask.not-applied")]
    assert {finding.layer for finding in found} == {1}
    assert "after RuntimeError: the flex call failed was suppressed" in found[0].sentence


@pytest.mark.parametrize("mask", ["", "segment-isolation"])
def test_a05_the_patch_did_nothing_under_sdpa(mask: str) -> None:
    found = found_in("a05_patch_needs_a_tensor", [(0, 4), (4, 8)], mask)
    assert ids_of(found) == [(0, "mask.not-applied"), (1, "mask.not-applied")]
    for finding in found:
        assert finding.severity is (Severity.ERROR if mask else Severity.WARNING)
        assert finding.sentence.startswith("All 2 layers ran causal SDPA without a mask")
        assert finding.evidence["leaked"] == 16
        assert "position 4" in finding.sentence


def test_a07_there_was_no_mask_function() -> None:
    found = found_in("a07_no_mask_function")
    assert ids_of(found) == [(0, "mask.none"), (1, "mask.none")]
    assert "attention 'mine' has no mask function" in found[0].sentence
    assert "rows 0-8 see the future" in found[0].sentence
    assert found[0].layers == (0, 1)


def test_a09_bools_were_added_by_eager_and_flex() -> None:
    found = found_in("a09_bool_mask_is_added")
    assert ids_of(found) == [(number, "mask.bool-added") for number in (2, 3, 4, 5)]
    assert "eager attention with a bool mask" in found[0].sentence
    assert "FlexAttention with a bool mask" in found[2].sentence


@pytest.mark.slow
@needs_compiler
def test_b02_two_open_blocks_are_not_in_the_tables() -> None:
    found = of(found_in("b02_stale_tables"), "mask.stale-tables")
    assert [finding.severity for finding in found] == [Severity.WARNING, Severity.ERROR]
    for finding in found:
        assert "2 open blocks missing, first: rows 128-255, keys 0-127" in finding.sentence


def test_b06_one_block_is_not_one_cell() -> None:
    (finding,) = found_in("b06_blocks_for_tokens")
    assert (finding.id, finding.severity) == ("mask.block-view", Severity.NOTE)
    assert "40 x 40 cells, 820 of them open, fits into one block of 128 x 128" in finding.sentence


def test_o04_the_model_was_never_patched() -> None:
    found = found_in("o04_drawn_mask_nobody_applied", [(1, 7), (9, 15)])
    assert ids_of(found) == [(0, "mask.not-applied"), (1, "mask.not-applied")]
    assert "part 2 sees part 1 (36 pairs)" in found[0].sentence
    assert "no mask was declared" in found[0].sentence


def test_w01_the_mask_is_the_declared_one_shifted() -> None:
    found = found_in("w01_bos_shift", [(1, 7), (9, 15)], "segment-isolation")
    assert ids_of(found) == [(0, "mask.leak"), (1, "mask.leak")]
    assert "the executed mask is the declared one shifted by -1" in found[0].sentence
    assert "position 14" in found[0].sentence


def test_w01_row_14_sees_part_1_without_a_declared_mask() -> None:
    found = found_in("w01_bos_shift", [(1, 7), (9, 15)])
    assert ids_of(found) == [(0, "mask.leak"), (1, "mask.leak")]
    assert found[0].positions == (14,)
    assert {finding.severity for finding in found} == {Severity.NOTE}
    assert {finding.evidence["cause"] for finding in found} == {"segments.shifted"}


def test_w04_the_documents_are_one_piece() -> None:
    found = found_in("w04_missing_eos", [(0, 4), (4, 7), (7, 11)])
    assert ids_of(found)[:2] == [(0, "mask.merged"), (1, "mask.merged")]
    assert "1 block-diagonal piece, but there are 3 segments" in found[0].sentence


def test_w04_with_correct_borders_has_no_more_findings() -> None:
    found = found_in("w04_missing_eos", [(0, 5), (5, 9), (9, 14)])
    assert {generation for generation, _ in ids_of(found)} == {0, 1}


CONTROLS = ("c1_plain_causal_prompt", "c2_padded_batch", "c3_open_decode_row", "c6_shared_mask")


@pytest.mark.parametrize("name", CONTROLS)
def test_controls_have_no_finding(name: str) -> None:
    assert serious(found_in(name)) == []
