"""The mask panel over generations, branches, long generations and large masks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support import mask_trace
from support.mask_trace import Shown

from flexinspect.drawing.theme import Theme
from flexinspect.masks import mask_presets
from flexinspect.masks.counting import TILE, PositionGroups
from flexinspect.masks.viewport import OPEN
from flexinspect.panels.base import TracePlace
from flexinspect.panels.mask import mask_grid
from flexinspect.panels.panel_source import Source
from flexinspect.records.step import GenerationEnd, GenerationRecord, MaskRecord
from flexinspect.trace.file.writer import TraceWriter

PLAIN = Theme("none")


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    return Shown(mask_trace.write(tmp_path_factory.mktemp("mask") / "t.flextrace"))


def test_every_generation_has_its_own_mask(tmp_path: Path) -> None:
    both = Shown(mask_trace.write(tmp_path / "t.flextrace", n_generations=2))
    data = both.load(at=TracePlace(generation=1, step=2, layer=mask_trace.WRONG))
    assert data.mask_view.part_of(0).step_at(0).mask == "L1s0g1b0"
    assert np.array_equal(data.states == OPEN, mask_trace.dense_mask(mask_trace.WRONG))


def test_the_rows_of_steps_that_stay_in_view_are_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    make = mask_grid.MaskLoader._input_rows

    def counted(self: mask_grid.MaskLoader, call: Any) -> Any:
        made.append(call.step)
        return make(self, call)

    monkeypatch.setattr(mask_grid.MaskLoader, "_input_rows", counted)
    seen = Shown(mask_trace.write(tmp_path / "t.flextrace"))
    first = seen.load(at=TracePlace(step=1, layer=mask_trace.WRONG))
    assert made
    made.clear()
    second = seen.load(at=TracePlace(step=2, layer=mask_trace.WRONG))
    assert made == []
    assert second.mask_view.parts[0] is first.mask_view.parts[0]


def test_a_part_that_moves_in_the_view_by_whole_tiles_is_not_read_again(
    shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    make = mask_grid.MaskLoader._make_part

    def counted(self: mask_grid.MaskLoader, steps: Any, row: int, head: int) -> Any:
        made.append(row)
        return make(self, steps, row, head)

    monkeypatch.setattr(mask_grid.MaskLoader, "_make_part", counted)
    place = TracePlace(step=1, layer=mask_trace.WRONG)
    loader = mask_grid.MaskLoader(Source(shown.source.reader), place, None, PositionGroups())
    (_, part) = loader._step_rows(((0, 0, None),), 0, 4)
    first, moved = loader._load_part(part, 3), loader._load_part(part, 3 + 5 * TILE)
    assert made == [3]
    assert (moved.row, moved.stop) == (3 + 5 * TILE, first.stop + 5 * TILE)
    assert moved.counts is first.counts
    assert moved.counts.open.row_counts.tolist() == [
        row.sum() for row in mask_trace.dense_mask(mask_trace.WRONG)[-len(part.steps) :]
    ]
    loader._load_part(part, 4)
    assert made == [3, 4]


@pytest.mark.parametrize(
    ("n_keys", "steps"), [(0, 1024), (65_536, 1024), (65_537, 512), (500_000, 128), (1 << 26, 128)]
)
def test_a_window_has_fewer_steps_the_more_keys_they_have(n_keys: int, steps: int) -> None:
    assert mask_grid.window_size(n_keys) == steps


def test_a_branch_continues_from_its_parents_rows(tmp_path: Path) -> None:
    path = tmp_path / "t.flextrace"
    spec = mask_presets.preset("segment-isolation", mask_trace.SEGMENTS)
    masked = mask_trace.MaskedSteps(spec)
    with TraceWriter.create(path, {"model": "x"}) as writer:
        writer.begin_generation(
            GenerationRecord(
                *(0, "s", spec.name, "contiguous", mask_trace.SEGMENTS, mask_trace.tokens()),
                declared=mask_trace.declared(spec),
            )
        )
        for number in range(4):
            writer.write_step(masked.step(number))
        writer.begin_branch(0, 1, parent=0, fork_step=2)
        for number in (2, 3, 4):
            step = masked.step(number, branch=1)
            chosen = replace(step.tokens[0], text=" other", token=" other")
            writer.write_step(replace(step, tokens=(chosen,)))
        writer.end_generation(GenerationEnd(0, "finished", "x", mask_trace.SEGMENTS, branch=1))
    branch = Shown(path)
    data = branch.load(at=TracePlace(branch=1, step=4, layer=mask_trace.WRONG))
    names = [data.mask_view.part_of(row).step_at(row).mask for row in (0, 15, 16, 18)]
    assert names == ["L1s0g0b0", "L1s1g0b0", "L1s2g0b1", "L1s4g0b1"]
    assert data.mask_view.positions.tolist() == list(range(19))
    assert [data.tokens[pos].text for pos in (15, 16, 17, 18)] == [" w15", " w16", *[" other"] * 2]
    parent = branch.load(at=TracePlace(step=3, layer=mask_trace.WRONG))
    assert parent.tokens[17].text == " w17"


def test_a_fork_that_has_not_made_a_step_shows_its_parents_rows(tmp_path: Path) -> None:
    path = tmp_path / "t.flextrace"
    masked = mask_trace.MaskedSteps(mask_presets.causal())
    with TraceWriter.create(path, {"model": "x"}) as writer:
        writer.begin_generation(
            GenerationRecord(
                0, "s", "causal", "contiguous", mask_trace.SEGMENTS, mask_trace.tokens()
            )
        )
        for number in range(4):
            writer.write_step(masked.step(number))
        writer.begin_branch(0, 1, parent=0, fork_step=2)
    data = Shown(path).load(at=TracePlace(branch=1, step=1))
    assert data.mask_view.n_rows == 16


def long_trace(path: Path, n_steps: int) -> Shown:
    """A generation of which only what the mask panel needs is written."""
    masked = mask_trace.MaskedSteps(mask_presets.causal(), layers=(0,))
    with TraceWriter.create(path, {"model": "x"}) as writer:
        writer.begin_generation(
            GenerationRecord(
                *(0, "s", "causal", "contiguous", mask_trace.SEGMENTS, mask_trace.tokens()),
                declared=mask_trace.declared(mask_presets.causal()),
            )
        )
        writer.write_steps([masked.step(number) for number in range(n_steps)])
    return Shown(path)


def test_a_long_generation_shows_a_window_of_steps_and_says_so(tmp_path: Path) -> None:
    long = long_trace(tmp_path / "t.flextrace", 2600)
    data = long.load(0, 1500)
    assert (data.mask_view.first_step, data.mask_view.last_step, data.mask_view.n_steps) == (
        1024,
        2047,
        2600,
    )
    assert data.mask_view.n_rows == 15 + 1024
    assert data.mask_view.positions[[14, 15, -1]].tolist() == [14, 1038, 2061]
    assert data.current == range(15 + 1500 - 1024, 15 + 1500 - 1024 + 1)
    assert long.paint(0, 1500).note.endswith("rows of steps 1024-2047 of 2600")
    assert "Step 0 and steps 1024-2047 of 2600 are shown." in long.words(0, 1500)
    assert data.mask_view.count("open") == 15 * 16 // 2 + sum(range(1039, 2063))
    assert data.mask_view.count("lost") == data.mask_view.count("leaked") == 0
    first, last = long.load(0, 0), long.load(0, 2599)
    assert (first.mask_view.first_step, first.mask_view.last_step) == (0, 1023)
    assert (last.mask_view.first_step, last.mask_view.last_step) == (1792, 2599)
    assert last.current is not None


def test_a_step_reads_a_bounded_part_of_the_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = long_trace(tmp_path / "t.flextrace", 600)
    long.load(0, 100)
    rows: list[int] = []
    query = long.source.reader._query

    def counted(sql: str, params: Any) -> list[Any]:
        found = query(sql, params)
        rows.append(len(found))
        return found

    monkeypatch.setattr(long.source.reader, "_query", counted)
    long.load(0, 101)
    assert len(rows) <= 10
    assert sum(rows) <= 40


def test_a_mask_too_large_to_be_kept_is_read_in_bands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    path = tmp_path / "t.flextrace"
    cells = np.random.default_rng(3).random((2, 200, 213)) < 0.3
    step = mask_trace.MaskedSteps(mask_presets.causal(), layers=(0,)).step(0)
    call = replace(step.calls[0], q_len=200, kv_len=213, mask="big")
    mask = MaskRecord("big", "bool", 1, 2, 200, 213, 0, cells=cells)
    with TraceWriter.create(path, {"model": "x"}) as writer:
        writer.begin_generation(
            GenerationRecord(0, "s", "own", "contiguous", mask_trace.SEGMENTS, mask_trace.tokens())
        )
        writer.write_step(
            replace(step, q_len=200, kv_before=13, kv_after=213, calls=(call,), masks=(mask,))
        )
    monkeypatch.setattr(mask_grid, "MAX_PACKED_BYTES", 0)
    monkeypatch.setattr(mask_grid, "BAND_ROWS", 64)
    data = Shown(path).load(at=TracePlace(head=1), size=(300, 120))
    assert data.mask_view.parts[0].packed is None
    assert np.array_equal(data.states == OPEN, cells[1])
    assert data.mask_view.cell(199, 212) == cells[1, 199, 212]


def test_a_row_that_is_broadcast_stands_for_all_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    path = tmp_path / "t.flextrace"
    cells = np.random.default_rng(3).random((1, 1, 15)) < 0.5
    step = mask_trace.MaskedSteps(mask_presets.causal(), layers=(0,)).step(0)
    mask = MaskRecord("row", "bool", 1, 1, 15, 15, 0, cells=cells)
    with TraceWriter.create(path, {"model": "x"}) as writer:
        writer.begin_generation(
            GenerationRecord(0, "s", "own", "contiguous", mask_trace.SEGMENTS, mask_trace.tokens())
        )
        calls = (replace(step.calls[0], mask="row"),)
        writer.write_step(replace(step, calls=calls, masks=(mask,)))
    for whole in (1 << 20, 0):
        monkeypatch.setattr(mask_grid, "MAX_PACKED_BYTES", whole)
        data = Shown(path).load()
        assert np.array_equal(data.states == OPEN, cells[0].repeat(15, axis=0))


def test_a_mask_that_comes_again_stands_where_its_step_stood(tmp_path: Path) -> None:
    path = tmp_path / "t.flextrace"
    masked = mask_trace.MaskedSteps(mask_presets.causal(), layers=(0,))
    with TraceWriter.create(path, {"model": "x"}) as writer:
        writer.begin_generation(
            GenerationRecord(0, "s", "own", "contiguous", mask_trace.SEGMENTS, mask_trace.tokens())
        )
        writer.write_step(masked.step(0))
        for number in (1, 2):
            step = masked.step(number)
            call = replace(step.calls[0], mask="same", kv_len=5)
            mask = MaskRecord(
                "same", "none", 1, 1, 1, 5, 15, 11, cells=np.ones((1, 1, 5), np.bool_)
            )
            writer.write_step(replace(step, calls=(call,), masks=(mask,)))
    states = Shown(path).load(0, 2).states
    assert np.flatnonzero(states[15] == OPEN).tolist() == list(range(11, 16))
    assert np.flatnonzero(states[16] == OPEN).tolist() == list(range(12, 17))
