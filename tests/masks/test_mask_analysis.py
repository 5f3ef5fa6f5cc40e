"""The facts beside a mask's picture, and the picture of its phases as text."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexinspect.core.errors import MaskError
from flexinspect.core.languages import languages, load_labels
from flexinspect.masks import key_blocks, mask_presets
from flexinspect.masks.census import past_cells
from flexinspect.masks.known_masks import ArrayMask, dense, preset_mask
from flexinspect.masks.mask_analysis import analyse_mask
from flexinspect.masks.mask_expressions import parse_mask
from flexinspect.masks.mask_reduction import reduce_mask
from flexinspect.masks.picture_text import (
    MAX_SHOWN_SEGMENTS,
    Places,
    phase_lines,
    phase_table,
    picture_lines,
    row_names,
    size_line,
)
from flexinspect.masks.size_presets import MaskConfig
from flexinspect.records.prompt import Segment, SegmentKind

CONFIG = MaskConfig(3, 5, 2, 3)
SEGMENTS, N = CONFIG.segments(), CONFIG.length
ENGLISH = load_labels("en")
PLACES = Places(ENGLISH, SEGMENTS)
expressions = st.sampled_from(["segment-isolation", "causal", "full", "dilated(3)", "not full"])


@given(expressions, st.integers(1, 30))
def test_blocks_are_those_of_dense_cells(text: str, size: int) -> None:
    mask = parse_mask(text, SEGMENTS)
    cells = np.zeros((-(-N // size) * size,) * 2, bool)
    cells[:N, :N] = dense(mask, N, N)
    blocks = cells.reshape(len(cells) // size, size, -1, size)
    work = analyse_mask(mask, N, N, segments=SEGMENTS, block_size=size).blocks
    full, visited = blocks.all(axis=(1, 3)).sum(), blocks.any(axis=(1, 3)).sum()
    assert (work.full, work.partial) == (full, visited - full)
    assert work.empty == (N + size - 1) // size * ((N + size - 1) // size) - visited
    assert work.visited == visited


def test_blocks_of_128_equal_the_block_tables_of_a_preset() -> None:
    config = MaskConfig(5, 200, 7, 30)
    n, segments = config.length, config.segments()
    tables = key_blocks.block_tables(mask_presets.preset("segment-isolation", segments), n, n)
    work = analyse_mask(parse_mask("segment-isolation", segments), n, n, segments=segments).blocks
    assert (work.full, work.partial) == (tables.full.sum(), tables.partial.sum())


@given(expressions)
def test_pairs_of_segments_and_phases_add_up(text: str) -> None:
    mask = parse_mask(text, SEGMENTS)
    cells = dense(mask, N, N)
    facts = analyse_mask(mask, N, N, segments=SEGMENTS, block_size=4)
    for i, row in enumerate(SEGMENTS):
        for j, key in enumerate(SEGMENTS):
            part = cells[row.start : row.stop, key.start : key.stop]
            assert facts.pairs[i, j] == part.sum()
    reach = np.tri(N, dtype=bool) if text not in ("full", "not full") else np.ones((N, N), bool)
    reach = np.tri(N, dtype=bool) if text == "not full" else reach
    assert facts.n_cells == reach.sum() == facts.pair_cells.sum()
    assert facts.density == pytest.approx(cells.sum() / reach.sum())
    assert facts.encoding is not None
    assert facts.generation is not None
    start = CONFIG.prompt_length
    assert facts.encoding.n_open == cells[:start].sum()
    assert facts.generation.n_open == cells[start:].sum()
    assert facts.generation.n_cross == cells[start:, :start].sum()
    assert facts.n_open == cells.sum()


@given(st.lists(st.integers(0, 20), min_size=2, max_size=6, unique=True))
def test_cells_up_to_the_diagonal_are_counted_in_closed_form(edges: list[int]) -> None:
    edges = sorted(edges)
    expected = [
        [np.tri(20, 20, dtype=int)[a:b, c:d].sum() for c, d in pairwise(edges)]
        for a, b in pairwise(edges)
    ]
    assert past_cells(np.array(edges), np.array(edges)).tolist() == expected


def test_the_facts_are_said_in_words() -> None:
    declared = parse_mask("segment-isolation", SEGMENTS)
    cells = dense(declared, N, N)
    cells[8, 1], cells[12, 12] = True, False
    changed = ArrayMask("mine", cells[None])
    facts = analyse_mask(changed, N, N, segments=SEGMENTS, block_size=8, against=declared)
    lines = facts.lines(PLACES)
    assert lines[0] == "Analysis of mine"
    assert f"Open cells: {cells.sum()} of 253 cells up to the diagonal (" in lines[1]
    assert lines[2].endswith(", 1 to other segments")
    assert "Rows that see nothing: none" in lines
    assert lines[-3:] == [
        "Compared with segment-isolation: 1 cells lost, 1 leaked",
        "  first: row 8 (paraphrase 2) attends to key 1 (paraphrase 1)",
        "  first: row 12 (separator 2) does not attend to key 12 (separator 2)",
    ]
    same = analyse_mask(declared, N, N, segments=SEGMENTS, against=declared)
    assert same.lines(PLACES)[-1] == "No cell differs from segment-isolation"
    assert json.loads(json.dumps(facts.as_json(), default=str))["blocks"]["size"] == 8


def test_too_many_blocks_are_refused_and_many_segments_are_not_listed() -> None:
    with pytest.raises(MaskError, match="too many") as error:
        analyse_mask(parse_mask("causal"), 10_000, 10_000, block_size=1)
    assert "--block-size" in (error.value.hint or "")
    config = MaskConfig(300, 2, 0, 1)
    mask = parse_mask("segment-isolation", config.segments())
    facts = analyse_mask(mask, config.length, config.length, segments=config.segments())
    assert facts.pairs.size == 0
    assert facts.generation is not None
    assert facts.generation.n_open == config.length


# -- text -----------------------------------------------------------------------------------------


def test_the_text_picture_shows_isolated_segments_and_fusion() -> None:
    table = phase_table(parse_mask("segment-isolation", SEGMENTS), SEGMENTS)
    assert phase_lines(table, ENGLISH) == [
        "Encoding phase",
        "        Seg1 Seg2 Seg3",
        "   Seg1    ■    ·    ·  Isolated",
        "   Seg2    ·    ■    ·  Isolated",
        "   Seg3    ·    ·    ■  Isolated",
        "",
        "Generation phase",
        "        Seg1 Seg2 Seg3 Gen1 Gen2 Gen3",
        "   Gen1    ■    ■    ■    ■    ·    ·  Fusion",
        "   Gen2    ■    ■    ■    ■    ■    ·  Fusion",
        "   Gen3    ■    ■    ■    ■    ■    ■  Fusion",
        "",
        "■ all keys before, ▒ some, · none",
    ]
    assert "  融合" in phase_lines(table, load_labels("zh"))[8]


def test_a_leak_is_not_isolated_and_a_missing_key_is_no_fusion() -> None:
    cells = dense(parse_mask("segment-isolation", SEGMENTS), N, N)
    cells[8, 1], cells[20, 3] = True, False
    lines = phase_lines(phase_table(ArrayMask("mine", cells[None]), SEGMENTS), ENGLISH)
    assert lines[3] == "   Seg2    ▒    ■    ·"
    assert lines[9] == "   Gen2    ▒    ■    ■    ■    ■    ·"


def test_a_paraphrase_that_attends_to_the_bos_is_isolated() -> None:
    segments = (
        Segment(0, 1, "bos", SegmentKind.BOS, 0),
        Segment(1, 4, "paraphrase 1", SegmentKind.PARAPHRASE, 1),
        Segment(4, 7, "paraphrase 2", SegmentKind.PARAPHRASE, 2),
    )
    lines = phase_lines(phase_table(parse_mask("segment-isolation", segments), segments), ENGLISH)
    assert lines[2:5] == [
        "    Bos    ■    ·    ·",
        "   Seg1    ■    ■    ·  Isolated",
        "   Seg2    ■    ·    ■  Isolated",
    ]


def test_long_lists_of_segments_and_tokens_are_cut() -> None:
    config = MaskConfig(40, 2, 1, 30)
    table = phase_table(parse_mask("causal"), config.segments())
    lines = phase_lines(table, ENGLISH)
    assert lines[1].split()[-2:] == [f"Seg{MAX_SHOWN_SEGMENTS}", "…"]
    assert max(map(len, lines)) < 160
    assert not phase_lines(phase_table(parse_mask("causal"), ()), ENGLISH)


def test_a_picture_in_characters_names_rows_and_marks_what_is_missing() -> None:
    cells = dense(parse_mask("segment-isolation", SEGMENTS), N, N)
    cells[4] = cells[:, 9] = False
    words = {0: "Who", 1: "\x1b[2J"}
    picture = reduce_mask(
        ArrayMask("mine", cells[None]), N, N, N, N, segments=SEGMENTS, words=words
    )
    names = row_names(picture)
    assert names[0] == "Who"
    assert "\x1b" not in names[1]
    assert names[7] == "Seg2"
    assert names[19:] == ["Gen1", "Gen2", "Gen3"]
    lines = picture_lines(picture, ENGLISH)
    assert lines[4].endswith(" ∅")
    assert lines[N].strip() == "∅"
    assert "∅ row that sees nothing" in lines[-1]
    assert size_line(picture, ENGLISH) == "22 rows × 22 keys"
    small = reduce_mask(ArrayMask("mine", cells[None]), N, N, 9, 9, segments=SEGMENTS)
    assert size_line(small, ENGLISH).startswith("22 rows × 22 keys, shown in 9 × ")


def test_places_are_named_in_every_language() -> None:
    for code in languages():
        places = Places(load_labels(code), SEGMENTS, {3: "who"})
        for segment in SEGMENTS:
            assert places.segment(segment)
        assert "who" in places.cell(20, 3, head=1)
    assert PLACES.cell(20, 3) == "row 20 (generated token 2) attends to key 3 (paraphrase 1)"
    assert Places(ENGLISH).cell(2, 1) == "row 2 attends to key 1"


def test_the_columns_of_the_table_of_segments_have_the_numbers_of_its_rows() -> None:
    segments = MaskConfig(2, 3, 1, 2).segments()
    mask = preset_mask("segment-isolation", segments)
    lines = analyse_mask(mask, 9, 9, segments=segments).lines(Places(load_labels("en"), segments))
    header, *rows = lines[lines.index("") + 2 :]
    assert header.split() == [row.split()[0] for row in rows] == ["0", "1", "2", "3"]
    assert rows[-1].split()[-4:] == ["6/6", "2/2", "6/6", "3/3"]
    assert len(header) == len(rows[-1])


def test_a_leak_to_a_later_segment_is_some_not_all_keys_before() -> None:
    segments = MaskConfig(2, 3, 0, 1).segments()
    cells = dense(preset_mask("segment-isolation", segments), 7, 7)
    cells[0, 5] = True
    lines = phase_lines(phase_table(ArrayMask("leak", cells[None]), segments), load_labels("en"))
    assert lines[2].split() == ["Seg1", "■", "▒"]
