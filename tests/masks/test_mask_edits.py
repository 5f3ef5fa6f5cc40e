"""Edits of a mask: what each does to the cells, as text and as JSON, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from flexinspect.core.errors import MaskError
from flexinspect.masks import algebra
from flexinspect.masks.algebra import BoolArray
from flexinspect.masks.edits import (
    Edit,
    PatchedMask,
    apply_edits,
    apply_patches,
    changed_rows,
    parse_edit,
    with_segment_labels,
)
from flexinspect.records.prompt import PromptTokenIds, Segment, compose_prompt

PROMPT = compose_prompt(
    PromptTokenIds((1,), (), ((2, 3, 4), (5, 6), (7, 8)), (9,), (10,)), max_new_tokens=4
)
SEGMENTS: Sequence[Segment] = PROMPT.segments
N = 16
"""bos 0, paraphrase 1 at 1-3, its separator 4, paraphrase 2 at 5-6 and 7, 3 at 8-9 and 10, cue 11,
generated 12-15."""
BASE = PatchedMask(algebra.preset("segment-isolation", SEGMENTS))
FORMS = (
    *("preset causal", "drop paraphrase 2", "join paraphrase 1 and paraphrase 3"),
    *("let cue not see paraphrase 1", "let paraphrase 3 see paraphrase 1"),
    *("cell 9 2", "cell 9 2 open", "cell 9 8 close", "row 9", "row 9 open", "row 9 close"),
)


def cells(*edits: str, base: PatchedMask = BASE) -> BoolArray:
    return apply_edits([parse_edit(edit) for edit in edits], base, SEGMENTS).dense(N)


def moved(*edits: str) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """Return the cells that edits opened and closed."""
    before, after = BASE.dense(N), cells(*edits)
    opened, closed = (
        {(int(row), int(key)) for row, key in np.argwhere(found)}
        for found in (after & ~before, before & ~after)
    )
    return opened, closed


def grid(rows: Sequence[int], keys: Sequence[int]) -> set[tuple[int, int]]:
    return {(row, key) for row in rows for key in keys}


@pytest.mark.parametrize("text", FORMS)
def test_an_edit_is_read_back_from_its_text_and_its_json(text: str) -> None:
    edit = parse_edit(text)
    assert str(edit) == text
    assert parse_edit(str(edit)) == edit
    assert Edit.from_json(edit.to_json()) == edit


@pytest.mark.parametrize("text", FORMS)
def test_no_edit_opens_a_later_key(text: str) -> None:
    if text not in ("cell 9 8 close",):
        assert not np.triu(cells(text), 1).any()


def test_a_preset_replaces_the_mask_and_earlier_edits() -> None:
    assert np.array_equal(cells("cell 9 2", "preset causal"), np.tril(np.ones((N, N), np.bool_)))
    isolated = cells("preset segment-isolation/isolated")
    assert not isolated[4].any()


def test_a_dropped_segment_is_seen_by_itself_alone() -> None:
    opened, closed = moved("drop paraphrase 2")
    assert not opened
    assert closed == grid(range(11, 16), range(5, 8))  # by cue and generated rows, separator too


def test_joined_segments_see_each_other_with_their_separators() -> None:
    opened, closed = moved("join paraphrase 1 and paraphrase 3")
    assert not closed
    assert opened == grid(range(8, 11), range(1, 5))


def test_one_segment_sees_another_or_no_longer_does() -> None:
    assert moved("let paraphrase 2 see paraphrase 1") == (grid(range(5, 8), range(1, 5)), set())
    assert moved("let cue not see paraphrase 1") == (set(), grid([11], range(1, 5)))
    assert moved("let generated not see cue") == (set(), grid(range(12, 16), [11]))


def test_a_cell_is_toggled_opened_or_closed() -> None:
    assert moved("cell 9 2") == ({(9, 2)}, set())
    assert moved("cell 9 8") == (set(), {(9, 8)})
    assert moved("cell 9 2", "cell 9 2 close", "cell 9 3 open") == ({(9, 3)}, set())


def test_a_row_is_opened_to_all_before_it_or_closed_to_itself() -> None:
    assert moved("row 9") == (grid([9], range(1, 8)), set())
    assert moved("row 9 close") == (set(), grid([9], (0, 8)))
    assert moved("row 13")[1] == grid([13], range(13))


def test_segments_go_by_number_too_and_are_named_by_their_label() -> None:
    assert np.array_equal(cells("drop 3"), cells("drop Paraphrase 2"))
    assert (
        str(with_segment_labels(parse_edit("let 5 see 1"), SEGMENTS))
        == "let paraphrase 3 see paraphrase 1"
    )


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("turn 3", "'turn 3' is no edit of a mask."),
        ("cell 2 9", "Row 2 comes before key 9, and a row sees no later key."),
        ("row 99", "There is no row 99: the last one may be 15."),
        ("drop paraphrse 2", "There is no segment 'paraphrse 2'."),
        ("drop generated", "The generated segment cannot be dropped: its rows choose the tokens."),
        ("join cue and cue", "'join cue and cue' names one segment twice."),
        ("preset nothing", "The mask 'nothing' is unknown"),
        ("let cue see paraphrase 1", "'let cue see paraphrase 1' changes nothing"),
        (
            "let paraphrase 1 see paraphrase 3",
            "paraphrase 1 comes before paraphrase 3, and a row sees no later key.",
        ),
    ],
)
def test_what_cannot_be_edited_is_a_sentence(text: str, sentence: str) -> None:
    with pytest.raises(MaskError) as caught:
        cells(text)
    assert caught.value.message.startswith(sentence)


def test_json_that_is_no_edit_is_a_sentence() -> None:
    for data in ({}, {"kind": "cell", "places": ["x"]}, {"kind": "join", "names": ["a"]}):
        with pytest.raises(MaskError, match="is no edit of a mask"):
            Edit.from_json(data)


def test_changed_rows_are_those_that_differ_among_the_first() -> None:
    after = apply_edits([parse_edit("drop paraphrase 2")], BASE, SEGMENTS)
    assert changed_rows(BASE, after, 11).tolist() == []
    assert changed_rows(BASE, after, 14).tolist() == [11, 12, 13]


def test_rows_of_a_ground_that_is_not_known_cell_by_cell_count_by_patches() -> None:
    class Own:
        def dense(self, n_q: int, n_kv: int | None = None, *, q_offset: int = 0) -> BoolArray:
            return algebra.causal().dense(n_q, n_kv, q_offset=q_offset)

    before = PatchedMask(Own())
    after = apply_edits([parse_edit("row 6 close")], before, SEGMENTS)
    assert changed_rows(before, after, N).tolist() == [6]
    assert after.dense(2, q_offset=6)[0].tolist() == [False] * 6 + [True, False]


def test_patches_apply_to_cells_of_any_heads_and_offset() -> None:
    patches = apply_edits([parse_edit("cell 9 2")], BASE, SEGMENTS).patches
    shown = np.stack([BASE.dense(3, N, q_offset=8)] * 2)
    out = apply_patches(shown, patches, q_offset=8)
    assert [*zip(*(out != shown).nonzero(), strict=True)] == [(0, 1, 2), (1, 1, 2)]
