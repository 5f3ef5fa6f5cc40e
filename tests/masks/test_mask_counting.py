"""Counts and views of packed masks, compared with dense arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexinspect.masks import viewport
from flexinspect.masks.counting import (
    MaskCounts,
    PositionGroups,
    count_cells,
    pack_spec,
    shift_keys,
)
from flexinspect.masks.mask_presets import MaskSpec, preset
from flexinspect.masks.viewport import (
    APPLIED,
    BOTH,
    CLOSED,
    LEAKED,
    LOST,
    OPEN,
    SCALES,
    UNKNOWN,
    BlockLayout,
    PixelCounts,
    PixelGrid,
)
from flexinspect.records.prompt import Segment, SegmentKind

Bools = npt.NDArray[np.bool_]


def dense_of(seed: int, n_rows: int, n_keys: int, share: float) -> Bools:
    return np.random.default_rng(seed).random((n_rows, n_keys)) < share


def packed(cells: Bools) -> npt.NDArray[np.uint8]:
    return np.packbits(cells, axis=1)


def counted(cells: Bools, first_row: int = 0, size: int = 248, **options: Any) -> MaskCounts:
    rows = packed(cells)
    chunks = ((n, rows[n : n + size]) for n in range(0, len(rows), size))
    positions = np.arange(first_row, first_row + len(rows), dtype=np.int32)
    return count_cells(chunks, positions, cells.shape[1], first_row=first_row, **options)


def by_group(groups: PositionGroups, cells: Bools, first_row: int) -> npt.NDArray[np.int64]:
    of_row = groups.group_of(np.arange(first_row, first_row + len(cells)))
    of_key = groups.group_of(np.arange(cells.shape[1]))
    table = groups.empty_table()
    np.add.at(table, (of_row[:, None], of_key[None]), cells)
    return table


def pooled(cells: Bools, grid: PixelGrid) -> npt.NDArray[np.int64]:
    """Count open cells per pixel, the slow way."""
    out = grid.empty()
    for y in range(grid.height):
        for x in range(grid.width):
            row, key = grid.row + y * grid.row_scale, grid.key + x * grid.key_scale
            out[y, x] = cells[row : row + grid.row_scale, key : key + grid.key_scale].sum()
    return out


shapes = st.tuples(st.integers(1, 90), st.integers(1, 90))
shares = st.sampled_from([0.0, 0.02, 0.5, 0.98, 1.0])


@st.composite
def specs(draw: st.DrawFn) -> MaskSpec:
    n = draw(st.integers(1, 5))
    starts = [0, *sorted(draw(st.sets(st.integers(1, 80), min_size=n - 1, max_size=n - 1)))]
    pairs = [sorted(draw(st.tuples(st.integers(0, 90), st.integers(0, 90)))) for _ in starts]
    return MaskSpec("r", tuple(starts), tuple(p[0] for p in pairs), tuple(p[1] for p in pairs))


# -- packed rows ----------------------------------------------------------------------------------


@given(specs(), st.integers(0, 60), st.integers(1, 40), st.integers(1, 100))
def test_packed_rows_of_a_mask_equal_its_dense_rows(
    spec: MaskSpec, start: int, n_rows: int, n_keys: int
) -> None:
    positions = np.arange(start, start + n_rows, dtype=np.int32)
    rows = pack_spec(spec, positions, n_keys)
    assert np.array_equal(rows, packed(spec.dense(n_rows, n_keys, q_offset=start)))


def test_an_empty_row_is_packed_as_zeros() -> None:
    segments = (
        Segment(0, 1, "bos", SegmentKind.BOS, 0),
        Segment(1, 4, "paraphrase 1", SegmentKind.PARAPHRASE, 1),
        Segment(4, 5, "separator 1", SegmentKind.SEPARATOR, 1),
        Segment(5, 9, "cue", SegmentKind.CUE, 3),
    )
    spec = preset("segment-isolation", segments, separators="isolated")
    rows = pack_spec(spec, np.array([3, 4, 5], np.int32), 9)
    assert [bool(row.any()) for row in rows] == [True, False, True]


@given(st.integers(0, 9), shapes, st.integers(0, 40))
def test_shifted_rows_have_masked_keys_before_them(
    seed: int, shape: tuple[int, int], offset: int
) -> None:
    cells = dense_of(seed, *shape, 0.5)
    found = np.unpackbits(
        shift_keys(packed(cells), shape[1], offset), axis=1, count=offset + shape[1]
    )
    assert not found[:, :offset].any()
    assert np.array_equal(found[:, offset:].astype(bool), cells)


# -- counting -------------------------------------------------------------------------------------


@given(st.integers(0, 99), shapes, shares, st.integers(0, 20), st.integers(1, 60))
def test_count_cells_counts_by_row_key_tile_and_group(
    seed: int, shape: tuple[int, int], share: float, first_row: int, size: int
) -> None:
    cells = dense_of(seed, *shape, share)
    groups = PositionGroups((0, 7, 7, 30))
    found = counted(cells, first_row, size, groups=groups)
    assert found.open.n == cells.sum()
    assert found.open.row_counts.tolist() == cells.sum(axis=1).tolist()
    assert found.key_counts.tolist() == cells.sum(axis=0).tolist()
    assert found.lost is None
    assert found.group_counts.tolist() == by_group(groups, cells, first_row).tolist()
    if found.open.tiles is None:
        assert not cells.any()
    else:
        assert found.open.tiles.sum() == cells.sum()


def test_a_full_tile_is_counted_without_overflow() -> None:
    found = counted(np.ones((600, 300), np.bool_), 3)
    assert found.open.tiles is not None
    assert found.open.tiles.max() == 64
    assert found.open.n == 600 * 300
    assert found.key_counts.tolist() == [600] * 300


@given(st.integers(0, 99), shapes, specs(), st.integers(0, 20), st.integers(1, 60))
def test_lost_and_leaked_cells_are_counted_with_the_first_of_each(
    seed: int, shape: tuple[int, int], spec: MaskSpec, first_row: int, size: int
) -> None:
    cells = dense_of(seed, *shape, 0.5)
    meant = spec.dense(*shape, q_offset=first_row)
    groups = PositionGroups((0, 7, 7, 30))
    found = counted(cells, first_row, size, groups=groups, declared=lambda a, b: packed(meant[a:b]))
    for plane, table, wanted in (
        (found.lost, found.lost_groups, meant & ~cells),
        (found.leaked, found.leaked_groups, cells & ~meant),
    ):
        assert plane is not None
        sums = by_group(groups, wanted, first_row)
        assert sums.tolist() == (groups.empty_table() if table is None else table).tolist()
        assert plane.n == wanted.sum()
        assert plane.row_counts.tolist() == wanted.sum(axis=1).tolist()
        where = np.argwhere(wanted)
        assert plane.first == (tuple(where[0].tolist()) if len(where) else None)


def test_no_tiles_are_allocated_without_a_difference() -> None:
    cells = dense_of(1, 40, 40, 0.5)
    found = counted(cells, declared=lambda a, b: packed(cells[a:b]))
    assert found.lost is not None
    assert found.lost.tiles is None
    assert found.lost_groups is None


# -- windows --------------------------------------------------------------------------------------


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, int], tiles: bool) -> PixelGrid:
    row_scale = draw(st.sampled_from([8, 16, 24, 40] if tiles else [1, 2, 3, 5, 7, 11]))
    scales = [8, 16, 32, 56] if tiles or draw(st.booleans()) else [1, 2, 3, 5, 7, 13]
    key_scale = draw(st.sampled_from(scales))
    row = draw(st.integers(0, max(shape[0] - 1, 0))) // row_scale * row_scale
    key = draw(st.integers(0, max(shape[1] - 1, 0))) // key_scale * key_scale
    height, width = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    return PixelGrid(row, key, height, width, row_scale, key_scale)


@settings(deadline=None, max_examples=200)
@given(st.data(), st.integers(0, 99), shapes, shares, st.integers(0, 20))
def test_a_view_from_tiles_is_the_pooled_dense_mask(
    data: st.DataObject, seed: int, shape: tuple[int, int], share: float, first_row: int
) -> None:
    cells = dense_of(seed, *shape, share)
    dense_mask = np.zeros((first_row + shape[0], shape[1]), np.bool_)
    dense_mask[first_row:] = cells
    grid = data.draw(grids(dense_mask.shape, tiles=True))
    out = grid.empty()
    viewport.fold_tiles(counted(cells, first_row).open, first_row, grid, out)
    assert np.array_equal(out, pooled(dense_mask, grid))


@settings(deadline=None, max_examples=200)
@given(st.data(), st.integers(0, 99), shapes, shares, st.integers(0, 20))
def test_a_view_from_bits_is_the_pooled_dense_mask(
    data: st.DataObject, seed: int, shape: tuple[int, int], share: float, first_row: int
) -> None:
    cells = dense_of(seed, *shape, share)
    dense_mask = np.zeros((first_row + shape[0], shape[1]), np.bool_)
    dense_mask[first_row:] = cells
    grid = data.draw(grids(dense_mask.shape, tiles=False))
    out = grid.empty()
    viewport.fold_rows(packed(cells), first_row, grid, out)
    assert np.array_equal(out, pooled(dense_mask, grid))


@settings(deadline=None)
@given(st.data(), st.integers(0, 99), shapes, st.booleans(), st.booleans())
def test_a_single_cell_never_vanishes(
    data: st.DataObject, seed: int, shape: tuple[int, int], is_open: bool, tiles: bool
) -> None:
    rng = np.random.default_rng(seed)
    cells = np.full(shape, not is_open)
    row, key = int(rng.integers(shape[0])), int(rng.integers(shape[1]))
    cells[row, key] = is_open
    grid = data.draw(grids(shape, tiles=tiles))
    grid = PixelGrid(0, 0, 99, 99, grid.row_scale, grid.key_scale)
    out = grid.empty()
    if grid.in_tiles:
        viewport.fold_tiles(counted(cells).open, 0, grid, out)
    else:
        viewport.fold_rows(packed(cells), 0, grid, out)
    states = PixelCounts(viewport.pixel_sizes(grid, [(0, shape[0])], shape[1]), out).pixel_states()
    pixel = states[row // grid.row_scale, key // grid.key_scale]
    if is_open:
        assert pixel != CLOSED
        assert np.isin(states, [CLOSED, UNKNOWN, pixel]).all()
    else:
        assert pixel != OPEN
        assert np.isin(states, [OPEN, UNKNOWN, pixel]).all()


@settings(deadline=None)
@given(st.data(), st.integers(0, 99), shapes, shares)
def test_a_pixel_is_closed_or_open_only_if_all_its_cells_are(
    data: st.DataObject, seed: int, shape: tuple[int, int], share: float
) -> None:
    cells = dense_of(seed, *shape, share)
    grid = data.draw(grids(shape, tiles=False))
    out = grid.empty()
    viewport.fold_rows(packed(cells), 0, grid, out)
    size = viewport.pixel_sizes(grid, [(0, shape[0])], shape[1])
    assert np.array_equal(size, pooled(np.ones(shape, np.bool_), grid))
    states = PixelCounts(size, out).pixel_states()
    assert np.array_equal(states == CLOSED, (out == 0) & (size > 0))
    assert np.array_equal(states == OPEN, (out == size) & (size > 0))
    assert np.array_equal(states == UNKNOWN, size == 0)
    assert states[(out > 0) & (out < size)].max(initial=1) < OPEN


def test_more_open_cells_are_never_drawn_as_fewer() -> None:
    size = np.full((1, 65), 64)
    states = viewport.share_states(np.arange(65)[None], size)[0].tolist()
    assert states == sorted(states)
    assert (states[0], states[1], states[63], states[64]) == (CLOSED, 1, OPEN - 1, OPEN)


def test_a_difference_is_visible_in_a_pixel_of_any_size() -> None:
    counts = [np.array([[n, n, n, n]]) for n in (64, 30)]
    lost, leaked = np.array([[0, 1, 0, 1]]), np.array([[0, 0, 1, 1]])
    states = PixelCounts(counts[0], counts[1], lost, leaked).pixel_states()[0].tolist()
    assert states[1:] == [LOST, LEAKED, BOTH]
    assert CLOSED < states[0] < OPEN


def test_rows_that_were_not_recorded_count_neither_as_open_nor_as_closed() -> None:
    grid = PixelGrid(0, 0, 4, 1, 2, 2)
    size = viewport.pixel_sizes(grid, [(0, 2), (3, 4), (5, 6)], 9)
    assert size.ravel().tolist() == [4, 2, 2, 0]


@settings(deadline=None)
@given(st.data(), st.integers(0, 99), shapes, st.integers(0, 9), st.integers(0, 9))
def test_block_tables_are_counted_per_pixel(
    data: st.DataObject, seed: int, shape: tuple[int, int], row: int, key: int
) -> None:
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 40))
    n = tuple(-(-length // size) for length in shape)
    tables = rng.random((2, *n)) < 0.5
    edges = [
        np.minimum(at + size * np.arange(count + 1), at + length).astype(np.int32)
        for at, count, length in zip((row, key), n, shape, strict=True)
    ]
    blocks = BlockLayout(edges[0], edges[1], tables[0] & ~tables[1], tables[1])
    grid = data.draw(grids((row + shape[0], key + shape[1]), tiles=False))
    found = grid.empty(), grid.empty()
    viewport.fold_blocks(blocks, grid, *found)
    for out, table in zip(found, (blocks.partial, blocks.full), strict=True):
        dense_mask = np.zeros((row + shape[0], key + shape[1]), np.bool_)
        spread = table.repeat(size, axis=0).repeat(size, axis=1)[: shape[0], : shape[1]]
        dense_mask[row:, key:] = spread
        assert np.array_equal(out, pooled(dense_mask, grid))


def test_states_of_block_tables_distinguish_partial_from_full() -> None:
    size = np.full((1, 5), 4)
    partial, full = np.array([[0, 4, 0, 2, 2]]), np.array([[0, 0, 4, 2, 0]])
    states = viewport.block_states(partial, full, size)[0].tolist()
    assert states[:4] == [CLOSED, APPLIED, OPEN, APPLIED]
    assert CLOSED < states[4] < OPEN


def test_scales_can_be_counted_from_bits_or_from_tiles() -> None:
    assert list(SCALES) == sorted(set(SCALES))
    assert SCALES[:32] == tuple(range(1, 33))
    assert all(scale % 8 == 0 for scale in SCALES if scale > 32)
    assert SCALES[-1] > 1 << 20


@pytest.mark.parametrize("n_keys", [0, 1, 8])
def test_grids_with_no_key_or_one_key_are_counted(n_keys: int) -> None:
    cells = np.ones((3, n_keys), np.bool_)
    assert counted(cells).open.n == 3 * n_keys
    out = PixelGrid(0, 0, 2, 2).empty()
    viewport.fold_rows(packed(cells), 0, PixelGrid(0, 0, 2, 2), out)
    assert out.sum() == 2 * min(n_keys, 2)
