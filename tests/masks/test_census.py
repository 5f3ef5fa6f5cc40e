"""Counting the cells of masks by bands and tiles, against dense arrays."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexinspect.core.errors import MaskError
from flexinspect.masks import census
from flexinspect.masks.census import Probe, fold_table, full_edges, map_bands, take_census
from flexinspect.masks.known_masks import ArrayMask
from flexinspect.masks.mask_expressions import parse_mask


@pytest.fixture(autouse=True, scope="module")
def small_bands() -> Iterator[None]:
    before = census.BAND_ROWS, census.TILE_KEYS
    census.BAND_ROWS, census.TILE_KEYS = 3, 4
    yield
    census.BAND_ROWS, census.TILE_KEYS = before


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    n_rows, n_keys = draw(st.integers(1, 13)), draw(st.integers(1, 13))
    cells = draw(st.lists(st.booleans(), min_size=n_rows * n_keys, max_size=n_rows * n_keys))
    return np.array(cells).reshape(n_rows, n_keys)


def edges_of(draw: st.DrawFn, n: int) -> np.ndarray:
    inner = draw(st.sets(st.integers(1, max(n - 1, 1)), max_size=4)) - {n}
    return np.array(sorted({0, n} | inner), np.int32)


@given(arrays(), st.data(), st.sampled_from([1, 3]))
def test_a_census_counts_the_cells_of_the_dense_mask(
    array: np.ndarray, data: st.DataObject, threads: int
) -> None:
    rows, keys = (edges_of(data.draw.__call__, n) for n in array.shape)
    probe = ~np.tri(*array.shape, dtype=bool)
    found = take_census(
        ArrayMask("array", array[None]),
        rows,
        keys,
        probes=(parse_mask("not causal"),),
        threads=threads,
    )
    table = [[array[a:b, c:d].sum() for c, d in pairwise(keys)] for a, b in pairwise(rows)]
    assert found.table.tolist() == table
    assert found.n_open == array.sum()
    assert (found.row_any == array.any(axis=1)).all()
    assert (found.key_counts == array.sum(axis=0)).all()
    shared = np.argwhere(array & probe)
    first = tuple(shared[0].tolist()) if len(shared) else None
    assert found.probes == (Probe(len(shared), first),)


def test_a_census_covers_the_positions_between_its_edges_only() -> None:
    found = take_census(parse_mask("causal"), np.array((5, 9)), np.array((2, 6, 8)))
    assert found.table.tolist() == [[4 * 4, 1 + 2 + 2]]
    assert len(found.row_any) == 4
    assert len(found.key_counts) == 6


def test_bands_come_in_order_and_progress_ends_at_one() -> None:
    shares: list[float] = []
    bands = list(map_bands(lambda a, b: (a, b), 0, 10, shares.append, threads=2))
    assert bands == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert shares == [0.25, 0.5, 0.75, 1.0]


def test_an_error_in_a_band_is_raised_and_ends_the_threads() -> None:
    def fail(start: int, _stop: int) -> None:
        if start == 6:
            raise ValueError("row 6")

    with pytest.raises(ValueError, match="row 6"):
        list(map_bands(fail, 0, 999, threads=2))


def test_a_table_that_is_too_large_is_refused() -> None:
    edges = np.arange(5000, dtype=np.int32)
    with pytest.raises(MaskError, match="4999 by 4999 ranges is too large"):
        take_census(parse_mask("causal"), edges, edges)


def test_a_table_folds_to_coarser_ranges() -> None:
    edges, coarse = np.array((0, 2, 3, 7, 9)), np.array((0, 3, 9))
    fine = take_census(parse_mask("causal"), edges, full_edges(9)).table
    assert fold_table(fine, edges, coarse, 0).tolist() == [[6], [39]]
