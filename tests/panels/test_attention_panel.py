"""What the attention panel reads, and when it refuses to show it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support.attention_trace import (
    N_PROMPT,
    Made,
    SyntheticGeneration,
    described,
    load,
    paint,
    segments,
    token,
)

from flexinspect.panels.attention import row_recompute
from flexinspect.panels.base import TracePlace
from flexinspect.panels.panel_source import Source
from flexinspect.records.prompt import Segment, SegmentKind
from flexinspect.records.step import GenerationRecord, StepRecord
from flexinspect.trace.array_parts import read_equal_arrays
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.reader import TraceReader

# -- what is read ---------------------------------------------------------------------------------


def test_the_newest_row_is_recomputed_over_all_steps_and_passes_its_lse_check(made: Made) -> None:
    synthetic, source = made()
    for step in range(4):
        for layer, head in ((0, 0), (1, 3)):
            data = load(source, step=step, layer=layer, head=head)
            assert data.tokens is not None
            expected = synthetic.weights(layer, head, N_PROMPT + step - 1)
            np.testing.assert_allclose(data.tokens.weights, expected, atol=1e-5)
            assert data.lse_check.kind == "lse"
            assert data.lse_check.value is not None
            assert data.lse_check.value < 1e-5
            assert data.is_newest


def test_a_long_generation_reads_its_keys_in_pieces_and_keeps_them(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    synthetic, source = made(n_steps=28)
    monkeypatch.setattr("flexinspect.panels.attention.row_recompute.KEY_CHUNK_STEPS", 4)
    reads: list[range] = []

    def counting(reader: TraceReader, branch: Any, steps: range, stream: str, layer: int) -> Any:
        reads.append(steps)
        return read_equal_arrays(reader, branch, steps, stream, layer)

    monkeypatch.setattr(row_recompute, "read_equal_arrays", counting)
    for step in (26, 27):
        reads.clear()
        data = load(source, step=step, layer=1, head=2)
        assert data.tokens is not None
        expected = synthetic.weights(1, 2, N_PROMPT + step - 1)
        np.testing.assert_allclose(data.tokens.weights, expected, atol=1e-5)
    # The second time only what the last pieces did not hold: steps 25, 26 and 27.
    assert reads == [range(25, 28)]


def test_any_row_of_the_prefill_is_recomputed_but_not_called_checked(made: Made) -> None:
    synthetic, source = made()
    data = load(source, step=0, layer=1, head=1, row=6)
    assert data.tokens is not None
    expected = np.pad(synthetic.weights(1, 1, 6), (0, N_PROMPT - 7))
    np.testing.assert_allclose(data.tokens.weights, expected, atol=1e-5)
    assert (data.lse_check.is_checked, data.newest_lse_check.is_checked, data.is_newest) == (
        False,
        True,
        False,
    )
    assert data.query is not None
    assert data.query.text == " w6"
    sums = [expected[s.start : s.stop].sum() for s in segments()]
    np.testing.assert_allclose(data.segment_attention, sums, atol=1e-5)
    assert not data.segment_check.is_checked
    assert "not checked against the kernel; newest row: LSE error" in described(data)


def test_a_row_that_is_not_of_this_step_falls_back_to_the_newest(made: Made) -> None:
    _, source = made()
    assert load(source, step=2, row=6).q_idx == N_PROMPT + 1
    assert load(source, step=0, row=99).is_newest
    assert load(source, step=0, row=-1).is_newest


def test_keys_that_a_sliding_cache_has_dropped_are_not_read_as_first_keys(made: Made) -> None:
    synthetic, source = made(window=5)
    data = load(source, step=3, layer=0, head=3)
    assert data.tokens is not None
    assert data.tokens.first_pos == N_PROMPT + 3 - 5
    expected = synthetic.weights(0, 3, N_PROMPT + 2)[data.tokens.first_pos :]
    np.testing.assert_allclose(data.tokens.weights, expected, atol=1e-5)
    assert data.cells[N_PROMPT + 2].text == f" w{N_PROMPT + 2}"


def test_the_measures_are_masses_entropy_and_sink(made: Made) -> None:
    synthetic, source = made()
    weights = synthetic.weights(1, 2, N_PROMPT + 1)
    expected = {
        "paraphrase 1": weights[1:4].sum(),
        "paraphrase 2": weights[5:8].sum(),
        "BOS": weights[0],
        "separators": weights[4] + weights[8],
        "cue": weights[9],
        "generated": weights[10:].sum(),
        "entropy": -sum(w * math.log(w) for w in weights if w > 0),
        "sink": weights[0],
    }
    assert load(source, step=2).grid.measures == tuple(expected)
    for measure, value in expected.items():
        grid = load(source, step=2, measure=measure).grid
        assert grid.measure == measure
        assert grid.values[1, 2] == pytest.approx(value, abs=1e-5)


def test_an_unknown_measure_falls_back_to_the_first(made: Made) -> None:
    _, source = made()
    assert load(source, measure="paraphrase 9").grid.measure == "paraphrase 1"


def test_a_prompt_of_one_segment_shows_the_attention_on_the_first_token(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_segment(segments: Any) -> dict[str, list[int]]:
        return {"shared": [*range(len(segments))]}

    monkeypatch.setattr("flexinspect.panels.attention.attention_data.measure_groups", one_segment)
    _, source = made()
    data = load(source, step=2)
    assert data.grid.measure == "sink"
    assert "the first token (the prompt is one segment)" in described(data)
    chosen = load(source, step=2, measure="shared")
    assert (chosen.grid.measure, chosen.grid.is_single_part) == ("shared", False)


def without_bos(synthetic: SyntheticGeneration, path: Path) -> Source:
    first = Segment(0, 4, "paraphrase 1", SegmentKind.PARAPHRASE, 0)
    rest = [replace(segment, owner=0) for segment in segments()[2:]]

    def merged(step: StepRecord) -> StepRecord:
        mass = step.arrays[0].array
        joined = np.concatenate([mass[..., :2].sum(-1, keepdims=True), mass[..., 2:]], -1)
        first_array = replace(step.arrays[0], array=joined)
        return replace(step, arrays=(first_array, *step.arrays[1:]))

    with TraceWriter.create(path, {"model": "made"}) as writer:
        record = GenerationRecord(0, "s", "m", "contiguous", (first, *rest), ())
        writer.begin_generation(record)
        for number in range(synthetic.n_steps):
            writer.write_step(merged(synthetic.step(number)))
    return Source(TraceReader(path))


def test_without_a_bos_the_sink_is_recomputed_at_extreme_and_not_offered_below(
    tmp_path: Path,
) -> None:
    synthetic = SyntheticGeneration()
    source = without_bos(synthetic, tmp_path / "a.flextrace")
    grid = load(source, step=2, measure="sink").grid
    assert grid.measure == "sink"
    expected = [[synthetic.weights(i, h, N_PROMPT + 1)[0] for h in range(4)] for i in range(2)]
    np.testing.assert_allclose(grid.values, expected, atol=1e-5)
    assert not any(check.is_checked for check in grid.lse_checks)
    below = without_bos(SyntheticGeneration(level="advanced"), tmp_path / "b.flextrace")
    assert "sink" not in load(below, step=2).grid.measures


def test_a_recomputed_sink_is_hidden_with_the_row_that_fails_its_lse_check(tmp_path: Path) -> None:
    source = without_bos(SyntheticGeneration(softcap=1.0), tmp_path / "a.flextrace")
    data = load(source, step=2, measure="sink")
    assert data.mismatch
    assert all(check.is_failed for check in data.grid.lse_checks)
    assert np.isnan(data.grid.drawable_values()).all()


# -- LSE checks -----------------------------------------------------------------------------------


def test_a_row_that_is_not_what_ran_is_not_drawn(made: Made) -> None:
    _, source = made(softcap=1.0)
    data = load(source, step=2, layer=1, head=1)
    assert data.tokens is None
    assert data.mismatch.startswith("This is not what ran: ")
    assert f"(off by {data.lse_check.value:.2g})" in data.mismatch
    assert data.lse_check.is_failed
    lines, picture = paint(source, 100, 30, step=2, layer=1, head=1)
    assert "This is not what ran" in " ".join(lines)
    assert "open" not in "\n".join(lines)
    assert picture.alarm
    assert "not what ran" in picture.note
    assert data.mismatch in described(data)


def test_an_older_row_is_refused_when_the_newest_of_its_head_fails(made: Made) -> None:
    _, source = made(softcap=1.0)
    data = load(source, step=0, layer=1, head=1, row=6)
    assert data.mismatch
    assert data.tokens is None


def test_a_mask_that_is_not_the_one_that_ran_is_refused(made: Made) -> None:
    def lie(step: StepRecord) -> StepRecord:
        cells = step.masks[0].cells
        assert cells is not None
        cells = cells.copy()
        cells[..., 1:8] = False
        return replace(step, masks=(replace(step.masks[0], cells=cells),))

    _, source = made(change=lie)
    assert load(source, step=1).mismatch


@pytest.mark.parametrize("lse_error", [0.3, math.nan])
def test_layers_whose_lse_check_failed_are_marked_and_not_drawn(
    made: Made, lse_error: float
) -> None:
    def nonfinite(step: StepRecord) -> StepRecord:
        return replace(step, calls=(step.calls[0], replace(step.calls[1], lse_error=lse_error)))

    _, source = made(change=nonfinite, level="advanced")
    lines, picture = paint(source, 60, 20, step=1)
    assert [line[:15].rstrip() for line in lines if line.startswith("1 ")] == ["1 " + "!" * 12]
    assert "layer 1: not what ran" in "\n".join(lines)
    assert picture.alarm
    assert "Not what ran, so not shown: layers 1." in described(load(source, step=1))
    sick_row = load(source, step=1, layer=1)
    assert sick_row.segment_attention is None


def test_the_output_check_counts_as_well_as_the_rows_own(made: Made) -> None:
    _, source = made(lse_error=0.4, check_kind="output")
    data = load(source, step=1)
    assert data.lse_check.describe() == "output error 4e-01"
    assert data.mismatch.startswith("This is not what ran: the recomputed output")
    _, source = made(lse_error=1e-5, check_kind="output")
    assert load(source, step=1).lse_check.describe() == "output error 1e-05"


def test_an_lse_check_that_was_never_computed_reads_not_checked(made: Made) -> None:
    _, source = made(lse_error=None, check_kind=None, level="advanced")
    lines, picture = paint(source, 60, 20, step=1)
    assert "not checked" in "\n".join(lines)
    assert "error" not in "\n".join(lines)
    assert not picture.alarm


def test_stored_keys_without_a_log_sum_exp_are_shown_unchecked(made: Made) -> None:
    def drop(step: StepRecord) -> StepRecord:
        return replace(step, arrays=tuple(a for a in step.arrays if a.stream != "attention.lse"))

    _, source = made(change=drop)
    data = load(source, step=1)
    assert data.tokens is not None
    assert not data.lse_check.is_checked
    assert "not checked" in paint(source, 100, 30, step=1)[1].note


# -- branches -------------------------------------------------------------------------------------


def test_a_forks_row_reads_the_keys_of_its_parent_before_the_fork(tmp_path: Path) -> None:
    synthetic, fork = SyntheticGeneration(), SyntheticGeneration()
    rng = np.random.default_rng(9)
    fork.q[:, :, N_PROMPT + 1 :] = rng.normal(size=fork.q[:, :, N_PROMPT + 1 :].shape)
    fork.k[:, :, N_PROMPT + 1 :] = rng.normal(size=fork.k[:, :, N_PROMPT + 1 :].shape)
    path = tmp_path / "fork.flextrace"
    tokens = tuple(token(pos) for pos in range(N_PROMPT))
    with TraceWriter.create(path, {"model": "made"}) as writer:
        writer.begin_generation(GenerationRecord(0, "s", "m", "contiguous", segments(), tokens))
        for number in range(4):
            writer.write_step(synthetic.step(number))
        writer.begin_branch(0, 1, 0, 2)
        for number in (2, 3):
            step = fork.step(number)
            mask = replace(step.masks[0], fingerprint=f"fork{number}")
            calls = tuple(replace(call, mask=f"fork{number}") for call in step.calls)
            changed = (replace(step.tokens[0], text=f" f{number}"),)
            writer.write_step(replace(step, branch=1, masks=(mask,), calls=calls, tokens=changed))
    source = Source(TraceReader(path))
    data = load(source, step=3, branch=1, layer=1, head=2)
    assert data.tokens is not None
    np.testing.assert_allclose(data.tokens.weights, fork.weights(1, 2, N_PROMPT + 2), atol=1e-5)
    assert data.cells[N_PROMPT + 1].text == f" w{N_PROMPT + 1}"
    assert data.cells[N_PROMPT + 2].text == " f2"
    before = load(source, step=1, branch=1)
    assert before.tokens is not None
    np.testing.assert_allclose(before.tokens.weights, synthetic.weights(0, 0, N_PROMPT), atol=1e-5)


def one_row(step: StepRecord) -> StepRecord:
    """Open every cell, with the mask stored as one row that is broadcast."""
    cells = step.masks[0].cells
    assert cells is not None
    row = np.ones_like(cells[:, :1])
    return replace(step, masks=(replace(step.masks[0], cells=row),))


@pytest.mark.parametrize("limit", [row_recompute.MAX_CACHED_MASK_CELLS, 10], ids=["small", "large"])
def test_a_mask_of_one_row_stands_for_all_rows(
    made: Made, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(row_recompute, "MAX_CACHED_MASK_CELLS", limit)
    _, source = made(change=one_row)
    view = row_recompute.load_step_view(source, TracePlace())
    row = view.load_mask_row(view.calls[0], 4)
    assert row.tolist() == [[True] * N_PROMPT]


def test_only_one_row_of_a_large_mask_is_read(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_recompute, "MAX_CACHED_MASK_CELLS", 10)
    synthetic, source = made()

    def whole(self: Any, fingerprint: str) -> Any:
        raise AssertionError("the whole mask was read")

    monkeypatch.setattr(TraceReader, "mask", whole)
    view = row_recompute.load_step_view(source, TracePlace())
    for number in (0, 7):
        row = view.load_mask_row(view.calls[0], number)
        expected = np.pad(synthetic.cells(number), (0, N_PROMPT - 1 - number))
        np.testing.assert_array_equal(row, expected[None])
    with pytest.raises(row_recompute.RowNotRecordedError):
        view.load_mask_row(view.calls[0], N_PROMPT)
