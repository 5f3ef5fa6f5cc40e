"""Single rows and columns of a mask, and the small picture around a finding."""

from __future__ import annotations

import numpy as np
import pytest
from support import mask_trace
from support.mask_trace import Shown

from flexinspect.masks.viewport import CLOSED, LEAKED, LOST, OPEN
from flexinspect.panels.base import TracePlace
from flexinspect.panels.mask.cell_states import (
    column_states,
    find_row,
    load_mask_view,
    row_states,
)
from flexinspect.panels.mask.cells_around import CELLS_WIDTH, load_cells_around
from flexinspect.panels.panel_source import Source
from flexinspect.trace.reader import open_trace


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    path = mask_trace.write(tmp_path_factory.mktemp("cells") / "t.flextrace")
    return Source(open_trace(path))


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    return Shown(mask_trace.write(tmp_path_factory.mktemp("cells") / "t.flextrace"))


@pytest.mark.parametrize("layer", [mask_trace.RIGHT, mask_trace.WRONG, mask_trace.SLIDING])
def test_rows_and_columns_are_those_of_the_difference(
    source: Source, shown: Shown, layer: int
) -> None:
    at = TracePlace(step=3, layer=layer)
    whole = shown.load(at=at, view="difference").states
    view = load_mask_view(source, at)
    assert view is not None
    rows = np.stack([row_states(view, row) for row in range(view.n_rows)])
    assert np.array_equal(rows, whole)
    columns = [column_states(view, key, range(view.n_rows)) for key in range(view.n_keys)]
    assert np.array_equal(np.stack(columns, axis=1), whole)


def test_a_layer_without_recorded_cells_has_no_view(source: Source) -> None:
    assert load_mask_view(source, TracePlace(step=3, layer=mask_trace.TABLES)) is None
    assert load_cells_around(source, TracePlace(step=3, layer=mask_trace.TABLES), 4) is None


def test_a_position_that_was_never_an_input_has_no_row(source: Source) -> None:
    view = load_mask_view(source, TracePlace(step=3, layer=mask_trace.RIGHT))
    assert view is not None
    assert find_row(view, 5) == 5
    assert find_row(view, 99) is None


def test_the_picture_is_around_the_first_difference_of_the_row(source: Source) -> None:
    at = TracePlace(step=3, layer=mask_trace.WRONG)
    view = load_mask_view(source, at)
    assert view is not None
    wrong = [
        row for row in range(view.n_rows) if np.isin(row_states(view, row), (LOST, LEAKED)).any()
    ]
    cells = load_cells_around(source, at, wrong[-1])
    assert cells is not None
    seen = {state for row in cells.states for state in row}
    assert seen & {LOST, LEAKED}
    signs = {"".join(text for text, _ in line).strip()[-1:] for line in cells.lines()[1:]}
    assert signs
    assert all(sum(len(text) for text, _ in line) <= CELLS_WIDTH for line in cells.lines())


def test_without_a_difference_the_picture_is_around_the_position(source: Source) -> None:
    cells = load_cells_around(source, TracePlace(step=3, layer=mask_trace.RIGHT), 8)
    assert cells is not None
    assert cells.row_words[2] == "city" or len(cells.row_words) == 5
    assert {state for row in cells.states for state in row} <= {OPEN, CLOSED}
    assert load_cells_around(source, TracePlace(step=3, layer=mask_trace.RIGHT), None) is None
