"""Edits of a mask: their effect on the cells, their text form, and invalid edits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from flexinspect.core.errors import MaskError
from flexinspect.masks import mask_presets
from flexinspect.masks.edits import (
    PatchedMask,
    apply_edits,
    apply_patches,
    changed_rows,
    parse_edit,
    with_segment_labels,
)
from flexinspect.masks.mask_presets import BoolArray
from flexinspect.records.prompt import PromptTokenIds, Segment, compose_prompt

PROMPT = compose_prompt(
    PromptTokenIds((1,), (), ((2, 3, 4), (5, 6), (7, 8)), (9,), (10,)), max_new_tokens=4
)
SEGMENTS: Sequence[Segment] = PROMPT.segments
N = 16
"""bos 0, paraphrase 1 at 1-3, its separator 4, paraphrase 2 at 5-6 and 7, 3 at 8-9 and 10, cue 11,
generated 12-15."""
BASE = PatchedMask(mask_presets.preset("segment-isolation", SEGMENTS))
FORMS = (
    *("preset causal", "drop paraphrase 2", "join paraphrase 1 and paraphrase 3"),
    *("let cue not see paraphrase 1", "let paraphrase 3 see paraphrase 1"),
    *("cell 9 2", "cell 9 2 open", "cell 9 8 close", "row 9", "row 9 open", "row 9 close"),
)


def cells(*edits: str, base: PatchedMask = BASE) -> BoolArray:
    return apply_edits([parse_edit(edit) for edit in edits], base, SEGMENTS).dense(N)


def moved(*edits: str) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """Return the cells that edits opened, and those that they closed."""
    before, after = BASE.dense(N), cells(*edits)
    opened, closed = (
        {(int(row), int(key)) for row, key in np.argwhere(found)}
        for found in (after & ~before, before & ~after)
    )
    return opened, closed


def grid(rows: Sequence[int], keys: Sequence[int]) -> set[tuple[int, int]]:
    return {(row, key) for row in rows for key in keys}


@pytest.mark.parametrize("text", FORMS)
def test_an_edit_round_trips_through_text(text: str) -> None:
    edit = parse_edit(text)
    assert str(edit) == text
    assert parse_edit(str(edit)) == edit


@pytest.mark.parametrize("text", FORMS)
def test_no_edit_opens_a_later_key(text: str) -> None:
    if text not in ("cell 9 8 close",):
        assert not np.triu(cells(text), 1).any()


def test_a_preset_replaces_the_mask_and_earlier_edits() -> None:
    assert np.array_equal(cells("cell 9 2", "preset causal"), np.tril(np.ones((N, N), np.bool_)))
    isolated = cells("preset segment-isolation/isolated")
    assert not isolated[4].any()


def test_no_other_segment_attends_to_a_dropped_one() -> None:
    opened, closed = moved("drop paraphrase 2")
    assert not opened
    assert closed == grid(range(11, 16), range(5, 8))  # by cue and generated rows, separator too


def test_joined_segments_and_their_separators_attend_to_each_other() -> None:
    opened, closed = moved("join paraphrase 1 and paraphrase 3")
    assert not closed
    assert opened == grid(range(8, 11), range(1, 5))


def test_see_and_not_see_open_and_close_one_segment_to_another() -> None:
    assert moved("let paraphrase 2 see paraphrase 1") == (grid(range(5, 8), range(1, 5)), set())
    assert moved("let cue not see paraphrase 1") == (set(), grid([11], range(1, 5)))
    assert moved("let generated not see cue") == (set(), grid(range(12, 16), [11]))


def test_a_cell_is_toggled_opened_or_closed() -> None:
    assert moved("cell 9 2") == ({(9, 2)}, set())
    assert moved("cell 9 8") == (set(), {(9, 8)})
    assert moved("cell 9 2", "cell 9 2 close", "cell 9 3 open") == ({(9, 3)}, set())


def test_a_row_is_opened_to_all_keys_before_it_or_closed_but_for_itself() -> None:
    assert moved("row 9") == (grid([9], range(1, 8)), set())
    assert moved("row 9 close") == (set(), grid([9], (0, 8)))
    assert moved("row 13")[1] == grid([13], range(13))


def test_segments_can_be_named_by_number_or_label() -> None:
    assert np.array_equal(cells("drop 3"), cells("drop Paraphrase 2"))
    assert (
        str(with_segment_labels(parse_edit("let 5 see 1"), SEGMENTS))
        == "let paraphrase 3 see paraphrase 1"
    )


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("turn 3", "'turn 3' is not an edit of a mask."),
        ("cell 2 9", "Row 2 comes before key 9, and a row attends to no later key."),
        ("row 99", "There is no row 99: the last row is 15."),
        ("drop paraphrse 2", "There is no segment 'paraphrse 2'."),
        ("drop generated", "The generated segment cannot be dropped: its rows choose the tokens."),
        ("join cue and cue", "'join cue and cue' names one segment twice."),
        ("preset nothing", "The mask 'nothing' is unknown"),
        ("let cue see paraphrase 1", "'let cue see paraphrase 1' does not change the mask."),
        (
            "let paraphrase 1 see paraphrase 3",
            "paraphrase 1 comes before paraphrase 3, and a row attends to no later key.",
        ),
    ],
)
def test_an_invalid_edit_is_a_mask_error(text: str, sentence: str) -> None:
    with pytest.raises(MaskError) as caught:
        cells(text)
    assert caught.value.message.startswith(sentence)


def test_changed_rows_are_those_that_differ_in_the_first_n() -> None:
    after = apply_edits([parse_edit("drop paraphrase 2")], BASE, SEGMENTS)
    assert changed_rows(BASE, after, 11).tolist() == []
    assert changed_rows(BASE, after, 14).tolist() == [11, 12, 13]


def test_changed_rows_of_an_unknown_base_mask_are_those_under_patches() -> None:
    class OtherMask:
        def dense(self, n_q: int, n_kv: int | None = None, *, q_offset: int = 0) -> BoolArray:
            return mask_presets.causal().dense(n_q, n_kv, q_offset=q_offset)

    before = PatchedMask(OtherMask())
    after = apply_edits([parse_edit("row 6 close")], before, SEGMENTS)
    assert changed_rows(before, after, N).tolist() == [6]
    assert after.dense(2, q_offset=6)[0].tolist() == [False] * 6 + [True, False]


def test_patches_apply_to_cells_of_any_heads_and_offset() -> None:
    patches = apply_edits([parse_edit("cell 9 2")], BASE, SEGMENTS).patches
    shown = np.stack([BASE.dense(3, N, q_offset=8)] * 2)
    out = apply_patches(shown, patches, q_offset=8)
    assert [*zip(*(out != shown).nonzero(), strict=True)] == [(0, 1, 2), (1, 1, 2)]
