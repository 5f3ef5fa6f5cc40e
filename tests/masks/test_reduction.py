"""Pictures of masks keep single cells, borders, empty rows and unseen keys at every size."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flexinspect.masks.known_masks import ArrayMask, dense
from flexinspect.masks.mask_expressions import parse_mask
from flexinspect.masks.mask_picture import MaskPicture
from flexinspect.masks.mask_reduction import find_changes, reduce_mask, reduce_phases
from flexinspect.masks.size_presets import PRESET_CONFIGS, MaskConfig
from flexinspect.masks.viewport import BOTH, CLOSED, LEAKED, LOST, OPEN
from flexinspect.records.prompt import Segment

N = 60
CONFIG = MaskConfig(4, 12, 2, 6)
SEGMENTS = CONFIG.segments()

expressions = st.sampled_from(
    [
        "segment-isolation",
        "causal",
        "sliding-window(7)",
        "document",
        "causal-block(8)",
        "full",
        "not full",
        "dilated(3)",
        "prefix-lm(20)",
        "global-tokens(3) or sliding-window(4)",
    ]
)
positions = st.integers(0, N - 1)
limits = st.integers(1, N + 5)


def cells(text: str) -> np.ndarray:
    return dense(parse_mask(text, SEGMENTS), N, N)


def reduced(array: np.ndarray, limit: int, declared: np.ndarray | None = None) -> MaskPicture:
    other = None if declared is None else ArrayMask("declared", declared[None])
    return reduce_mask(
        ArrayMask("array", array[None]), *array.shape, limit, limit, declared=other, threads=1
    )


def range_of(edges: np.ndarray, position: int) -> int:
    return int(np.searchsorted(edges, position, side="right")) - 1


def flipped(array: np.ndarray, row: int, key: int) -> np.ndarray:
    changed = array.copy()
    changed[row, key] ^= True
    return changed


@given(expressions, st.lists(st.tuples(positions, positions), max_size=4), limits, limits)
def test_a_cell_is_open_or_closed_only_if_all_of_its_cells_are(
    text: str, flips: list[tuple[int, int]], max_rows: int, max_keys: int
) -> None:
    array = cells(text)
    for flip in flips:
        array = flipped(array, *flip)
    picture = reduce_mask(ArrayMask("array", array[None]), N, N, max_rows, max_keys, threads=1)
    rows, keys = picture.row_edges, picture.key_edges
    assert rows[0] == keys[0] == 0
    assert rows[-1] == keys[-1] == N
    assert len(rows) - 1 <= max_rows
    assert len(keys) - 1 <= max_keys
    for i, states in enumerate(picture.states.tolist()):
        for j, state in enumerate(states):
            part = array[rows[i] : rows[i + 1], keys[j] : keys[j + 1]]
            assert (state == OPEN) == part.all()
            assert (state == CLOSED) == (not part.any())


@given(expressions, positions, positions, st.integers(3, N), st.sampled_from([(), SEGMENTS]))
def test_a_single_cell_has_a_cell_of_the_picture_of_its_own(
    text: str, row: int, key: int, limit: int, segments: tuple[Segment, ...]
) -> None:
    array = cells(text)
    if array[max(row - 1, 0) : row + 2, max(key - 1, 0) : key + 2].std() > 0:
        return  # at an edge of the mask a flipped cell only moves the edge
    changed = flipped(array, row, key)
    mask = ArrayMask("array", changed[None])
    picture = reduce_mask(mask, N, N, limit, limit, segments=segments, threads=1)
    i, j = range_of(picture.row_edges, row), range_of(picture.key_edges, key)
    assert picture.row_edges[i + 1] - picture.row_edges[i] == 1
    assert picture.key_edges[j + 1] - picture.key_edges[j] == 1
    assert picture.states[i, j] == (OPEN if changed[row, key] else CLOSED)


@given(st.integers(2, N - 2), st.integers(2, N))
def test_a_border_one_token_off_is_at_its_own_place(border: int, limit: int) -> None:
    array = np.tri(N, dtype=bool)
    array[border:, :border] = False
    picture = reduced(array, limit)
    assert border in picture.row_edges
    assert border in picture.key_edges


@given(expressions, positions, limits)
def test_an_empty_row_and_an_unseen_key_are_marked_at_every_size(
    text: str, position: int, limit: int
) -> None:
    array = cells(text) | np.eye(N, dtype=bool)
    array[position] = array[:, position] = False
    picture = reduced(array, limit)
    row, key = range_of(picture.row_edges, position), range_of(picture.key_edges, position)
    assert np.flatnonzero(picture.empty_rows).tolist() == [row]
    assert np.flatnonzero(picture.unseen_keys).tolist() == [key]


@given(expressions, positions, positions, limits)
def test_one_cell_that_differs_from_the_declared_mask_is_marked_at_every_size(
    text: str, row: int, key: int, limit: int
) -> None:
    declared = cells(text)
    picture = reduced(flipped(declared, row, key), limit, declared)
    i, j = range_of(picture.row_edges, row), range_of(picture.key_edges, key)
    assert picture.states[i, j] == (LOST if declared[row, key] else LEAKED)
    assert np.isin(picture.states, (LOST, LEAKED, BOTH)).sum() == 1


def test_cells_lost_and_leaked_in_one_range_are_both() -> None:
    declared = np.tri(40, dtype=bool)
    changed = declared.copy()
    changed[20:30, 5:15] = np.indices((10, 10)).sum(0) % 2 == 0
    changed[3, 30] = True
    picture = reduced(changed, 1, declared)
    assert picture.states.tolist() == [[BOTH]]


def test_regular_masks_change_at_their_segments_only() -> None:
    mask = parse_mask("segment-isolation", SEGMENTS)
    rows, keys = (np.flatnonzero(c).tolist() for c in find_changes(mask, N, N))
    assert rows == [14, 28, 42, 54]
    assert keys == [14, 28, 42]
    for text in ("causal", "sliding-window(9)", "full", "not causal"):
        rows, keys = (c.any() for c in find_changes(parse_mask(text), N, N))
        assert not rows, text
        assert not keys, text


def test_segments_of_a_sampled_preset_begin_at_edges() -> None:
    for config in PRESET_CONFIGS.values():
        segments, n, limit = config.segments(), config.length, config.display_limit()
        mask = parse_mask("segment-isolation", segments)
        picture = reduce_mask(mask, n, n, limit, limit, segments=segments)
        assert {s.start for s in segments} <= set(picture.row_edges.tolist())
        assert len(picture.states) <= limit
        assert picture.is_sampled == (config.display_mode == "sampled")
        assert picture.first_generated == config.prompt_length


@given(st.integers(1, 30), st.integers(1, 30), limits, limits)
def test_masks_that_are_not_square_fit_too(
    n_rows: int, n_keys: int, max_rows: int, max_keys: int
) -> None:
    mask = parse_mask("sliding-window(3)")
    picture = reduce_mask(mask, n_rows, n_keys, max_rows, max_keys, threads=1)
    assert picture.states.shape == (len(picture.row_edges) - 1, len(picture.key_edges) - 1)
    assert picture.states.shape[0] <= max_rows
    assert picture.states.shape[1] <= max_keys


def test_every_pass_reports_its_share() -> None:
    shares: list[float] = []
    mask, declared = parse_mask("full"), parse_mask("causal")
    reduce_mask(mask, 500, 500, 20, 20, declared=declared, report=shares.append, threads=1)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_each_phase_has_a_picture_with_its_own_rows() -> None:
    mask = parse_mask("segment-isolation", SEGMENTS)
    encoding, generation = reduce_phases(mask, SEGMENTS, N)
    assert generation is not None
    start = CONFIG.prompt_length
    whole = np.where(cells("segment-isolation"), OPEN, CLOSED)
    assert (encoding.states == whole[:start, :start]).all()
    assert (generation.states == whole[start:]).all()
    assert (generation.row_edges[0], generation.row_edges[-1]) == (start, N)
    assert (encoding.first_generated, generation.first_generated) == (None, start)
    assert encoding.title == generation.title == "segment-isolation"
    without = MaskConfig(num_generated_tokens=0).segments()
    assert reduce_phases(parse_mask("causal"), without, 20)[1] is None
