"""The mask panel: what it loads of a trace with known masks, and its text where data is missing."""

from __future__ import annotations

import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import mask_trace
from support.earlier_traces import unpack
from support.mask_trace import Shown, sentence

from flexinspect.core.errors import TraceError
from flexinspect.drawing.theme import Theme
from flexinspect.masks import mask_presets
from flexinspect.masks.viewport import APPLIED, CLOSED, LEAKED, LOST, OPEN, UNKNOWN
from flexinspect.panels.base import Missing, TracePlace
from flexinspect.panels.mask.mask_layout import MaskOptions
from flexinspect.records.step import GenerationRecord
from flexinspect.trace.file.writer import TraceWriter

PLAIN = Theme("none")


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    return Shown(mask_trace.write(tmp_path_factory.mktemp("mask") / "t.flextrace"))


# -- the grid -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "head"),
    [
        (mask_trace.RIGHT, 0),
        (mask_trace.WRONG, 0),
        (mask_trace.CAUSAL, 0),
        (mask_trace.HEADS, 0),
        (mask_trace.HEADS, 1),
        (mask_trace.SLIDING, 0),
    ],
)
def test_every_cell_is_the_one_that_was_executed(shown: Shown, layer: int, head: int) -> None:
    data = shown.load(at=TracePlace(step=3, layer=layer, head=head))
    dense = mask_trace.dense_mask(layer, head=head)
    assert data.layout.grid.row_scale == 1
    assert np.array_equal(data.states == OPEN, dense)
    assert np.array_equal(data.states == CLOSED, ~dense)
    cells = [[data.mask_view.cell(row, key) for key in range(18)] for row in range(18)]
    assert np.array_equal(np.array(cells), dense)
    rows, columns = dense.sum(axis=1).tolist(), dense.sum(axis=0).tolist()
    assert [data.mask_view.row_count(row) for row in range(18)] == rows
    assert [data.mask_view.column_count(key) for key in range(18)] == columns


def test_a_head_that_is_not_there_is_the_last_one(shown: Shown) -> None:
    data = shown.load(at=TracePlace(step=3, layer=mask_trace.RIGHT, head=5))
    assert (data.mask_view.head, data.mask_view.heads) == (0, 1)
    data = shown.load(at=TracePlace(step=3, layer=mask_trace.HEADS, head=5))
    assert (data.mask_view.head, data.mask_view.heads) == (1, 2)


def test_the_rows_of_the_steps_are_known(shown: Shown) -> None:
    data = shown.load(0, 2)
    assert data.current == range(16, 17)
    assert shown.load(0, 0).current == range(15)
    assert data.mask_view.positions.tolist() == list(range(18))


def test_the_declared_view_is_the_spec_and_the_difference_names_both_sides(shown: Shown) -> None:
    spec = mask_presets.preset("segment-isolation", mask_trace.SEGMENTS)
    declared = shown.load(mask_trace.WRONG, 3, view="declared").states
    assert np.array_equal(declared == OPEN, spec.dense(18))
    states = shown.load(mask_trace.WRONG, 3, view="difference").states
    assert np.argwhere(states == LEAKED).tolist() == [[9, 2]]
    assert np.argwhere(states == LOST).tolist() == [[10, 8], [16, 3]]
    dense = mask_trace.dense_mask(mask_trace.WRONG)
    same = ~np.isin(states, [LOST, LEAKED])
    assert np.array_equal(states[same] == OPEN, dense[same])


def test_keys_that_a_cache_dropped_are_not_lost(shown: Shown) -> None:
    data = shown.load(mask_trace.SLIDING, 3, view="difference")
    assert 17 not in np.argwhere(data.states == LOST)[:, 0].tolist()
    for zoom in (0, data.layout.last_zoom):
        assert (
            shown.load(mask_trace.SLIDING, 3, view="difference", zoom=zoom).mask_view.count("lost")
            == 0
        )
    assert sentence(shown, mask_trace.SLIDING, 17, 3).endswith(
        'does not attend to 3 "is" (paraphrase 1): its key is no longer in the cache'
    )


def test_the_received_view_shows_block_tables_and_dense_masks_as_run(shown: Shown) -> None:
    states = shown.load(mask_trace.RIGHT, 3, view="received").states
    assert (states[:15, :15] == APPLIED).all()
    assert (states[:15, 15:] == CLOSED).all()
    dense = shown.load(mask_trace.CAUSAL, 3, view="received").states
    assert np.array_equal(dense == OPEN, mask_trace.dense_mask(mask_trace.CAUSAL))


def test_blocks_are_a_layer_with_a_label(shown: Shown) -> None:
    data = shown.load(mask_trace.RIGHT, 3, blocks=True)
    assert data.tables is not None
    assert np.array_equal(data.states == OPEN, mask_trace.dense_mask(mask_trace.RIGHT))
    text = "\n".join(shown.text(mask_trace.RIGHT, 3, blocks=True))
    assert "blocks of 128 x 128: 3 partial, 0 full, 0 not visited" in text
    assert "not visited, · partial, : full" in "\n".join(
        shown.text(mask_trace.RIGHT, 3, (160, 40), blocks=True, look=PLAIN)
    )
    assert "no block tables: a dense mask" in shown.words(mask_trace.CAUSAL, 3, blocks=True)


# -- missing --------------------------------------------------------------------------------------


def test_without_cells_the_received_mask_is_shown(shown: Shown) -> None:
    data = shown.load(mask_trace.TABLES, 3)
    assert data.view_mode == "received"
    assert data.fallback_reason == "The executed cells were not recorded; this is the received mask"
    assert "No executed cells of these rows were recorded." in shown.words(mask_trace.TABLES, 3)
    assert shown.text(mask_trace.TABLES, 3)[-2].startswith(data.fallback_reason)


def test_without_any_mask_the_declared_mask_is_shown(shown: Shown) -> None:
    data = shown.load(mask_trace.BARE, 3)
    assert data.view_mode == "declared"
    assert data.fallback_reason == "The executed cells were not recorded; this is the declared mask"
    assert (shown.load(mask_trace.BARE, 3, view="received").states == UNKNOWN).all()


def test_a_mask_that_is_neither_recorded_nor_declared_is_missing(tmp_path: Path) -> None:
    own = Shown(mask_trace.write(tmp_path / "t.flextrace", about={"mask_mod": "mine:rule"}))
    with pytest.raises(Missing) as missing:
        own.load(mask_trace.BARE, 1)
    assert missing.value.lines()[0] == "The mask of this layer was not recorded."
    assert "--level advanced" in missing.value.hint


@pytest.mark.parametrize("layer", [0, mask_trace.WRONG])
def test_what_differs_is_shown_first_where_something_differs(shown: Shown, layer: int) -> None:
    data = shown.load(layer, 3, view="auto")
    assert data.view_mode == ("difference" if layer == mask_trace.WRONG else "executed")
    request = shown.request(layer, 3, view="auto")
    flipped = shown.panel.on_action("view.flip", data, request)
    assert isinstance(flipped, MaskOptions)
    assert flipped.view == ("executed" if layer == mask_trace.WRONG else "received")


def test_a_custom_mask_has_no_declared_one(tmp_path: Path) -> None:
    own = Shown(mask_trace.write(tmp_path / "t.flextrace", about={"mask_mod": "mine:rule"}))
    data = own.load(mask_trace.WRONG, 1, view="difference")
    assert data.view_mode == "executed"
    assert data.fallback_reason.startswith("No mask was declared")
    assert "The mask mine:rule was not declared" in own.words(mask_trace.WRONG, 1)
    views = ["executed"]
    for _ in range(2):
        request = own.request(mask_trace.WRONG, 1, view=views[-1])
        options = own.panel.on_action("view.flip", own.panel.load(own.source, request), request)
        assert isinstance(options, MaskOptions)
        views.append(options.view)
    assert views == ["executed", "received", "executed"]
    assert sentence(own, mask_trace.WRONG, 10, 8).endswith("closed by user.rule")


@pytest.mark.parametrize(
    "about",
    [
        {"preset": "x", "starts": [1], "prefix_stops": [0], "local_starts": [0]},
        {"preset": "x", "starts": [0, 9, 5], "prefix_stops": [0, 0, 0], "local_starts": [0, 0, 0]},
        {"preset": "x", "starts": [0], "prefix_stops": [], "local_starts": [0]},
        {"preset": "x", "starts": "0", "prefix_stops": [0], "local_starts": [0]},
        {"preset": "x", "starts": [0.5], "prefix_stops": [0], "local_starts": [None]},
        {},
    ],
)
def test_an_invalid_declaration_has_no_spec(tmp_path: Path, about: dict[str, Any]) -> None:
    own = Shown(mask_trace.write(tmp_path / "t.flextrace", about=about))
    assert own.load(0, 1).mask_view.spec is None
    assert own.load(0, 1, view="declared").view_mode == "executed"


def test_a_generation_without_steps_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "t.flextrace"
    with TraceWriter.create(path, {"model": "x"}) as writer:
        writer.begin_generation(
            GenerationRecord(
                0, "s", "causal", "contiguous", mask_trace.SEGMENTS, mask_trace.tokens()
            )
        )
    with pytest.raises(Missing, match="No step"):
        Shown(path).load()


def test_a_damaged_mask_is_an_error_of_the_trace(tmp_path: Path) -> None:
    path = mask_trace.write(tmp_path / "t.flextrace")
    with sqlite3.connect(path) as db:
        db.execute("UPDATE arrays SET checksum = checksum + 1 WHERE owner LIKE 'L0s0%'")
    db.close()
    with pytest.raises(TraceError, match="checksum"):
        Shown(path).load(0, 1)


def test_block_tables_of_different_shapes_are_named_as_damage(tmp_path: Path) -> None:
    path = unpack("program", tmp_path)
    with closing(sqlite3.connect(path)) as db, db:
        sql = "UPDATE arrays SET shape = '[4, 4, 1]' WHERE stream = ? AND shape = '[1, 4, 4]'"
        assert db.execute(sql, ("mask.partial",)).rowcount
    shown = Shown(path)
    said = []
    for row in shown.source.reader.generations():
        with suppress(Missing):
            try:
                shown.paint(at=TracePlace(row.generation), view="received")
            except TraceError as error:
                said.append(error.message)
    assert said
    assert all("the block table of mask" in each for each in said)
