"""The first generated row behind packed documents."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace
from support.traces import sample_generation, sample_step

from flexinspect.masks.mask_presets import BoolArray
from flexinspect.records.finding import Finding
from flexinspect.records.step import CallRecord, InputsRecord, MaskRecord
from flexinspect.rules.context import RuleContext
from flexinspect.rules.masks.decode_segment import DecodeSegmentRule, find_spans

N = 12
ROW, KEY = np.arange(N)[:, None], np.arange(N)[None]
CAUSAL = ROW >= KEY
DOCUMENT = np.repeat([0, 1, 2], [3, 5, 4])
PACKED = (DOCUMENT[:, None] == DOCUMENT[None]) & CAUSAL


def row_of(*documents: int) -> BoolArray:
    return np.array([[*np.isin(DOCUMENT, documents), True]])


def look(prompt: BoolArray, newest: BoolArray, position: int | None = None) -> list[Finding]:
    """Return the findings of a prompt under a mask and of one decode row."""
    context, rule = RuleContext(), DecodeSegmentRule()
    context.start_generation(replace(sample_generation(0), segments=(), declared={}))
    rule.on_generation_start(context)
    found: list[Finding] = []
    for number, cells in enumerate((prompt, newest)):
        n_rows, n_keys = cells.shape
        name = f"mask {number}"
        mask = MaskRecord(name, "block", 1, 1, n_rows, n_keys, n_keys - n_rows, cells=cells[None])
        call = CallRecord(0, "flex", "", name, 1, 2, 2, n_rows, n_keys, 8, "float32", None)
        ids = ((position, 1),) if position is not None and number else ()
        step = replace(
            sample_step(number),
            q_len=n_rows,
            kv_before=n_keys - n_rows,
            kv_after=n_keys,
            masks=(mask,),
            calls=(call, replace(call, layer=1)),
            inputs=InputsRecord(1, ids),
        )
        context.add_step(step)
        found += rule.on_step(step)
    return found


def test_a_row_that_continues_document_0_is_reported_with_the_segments() -> None:
    (finding,) = look(PACKED, row_of(0))
    assert (finding.id, finding.step, finding.positions) == ("decode.other-segment", 1, (12,))
    assert finding.layers == (0, 1)
    first, second, own = ({"start": a, "stop": b} for a, b in ((0, 3), (3, 8), (8, 12)))
    assert finding.evidence["segments"] == [first, second, own]
    assert (finding.evidence["own"], finding.evidence["seen"]) == (own, [first])
    assert "this row sees all of 0-2, but none of the keys 8-11. It has the first" in (
        finding.sentence
    )


def test_a_row_that_continues_the_middle_document_has_no_guess_of_padded_ids() -> None:
    (finding,) = look(PACKED, row_of(1))
    assert finding.sentence.endswith("sees all of 3-7, but none of the keys 8-11.")


def test_left_padding_that_sees_nothing_is_no_segment() -> None:
    padded = PACKED & (KEY >= 3)
    (finding,) = look(padded, row_of(1))
    assert finding.evidence["segments"] == [{"start": 3, "stop": 8}, {"start": 8, "stop": 12}]


@pytest.mark.parametrize("seen", [(2,), (0, 2), (0, 1, 2), ()])
def test_a_row_that_sees_its_own_document_or_only_itself_is_clean(seen: tuple[int, ...]) -> None:
    assert look(PACKED, row_of(*seen)) == []


def test_a_row_whose_position_id_continues_the_document_is_meant_to() -> None:
    assert look(PACKED, row_of(0), position=3) == []
    assert len(look(PACKED, row_of(0), position=12)) == 1


@pytest.mark.parametrize(
    "prompt",
    [
        CAUSAL,
        CAUSAL & (ROW - KEY < 3),
        CAUSAL & ((ROW - KEY < 3) | (KEY < 2)),
        CAUSAL & ((ROW - KEY) % 2 == 0),
        np.eye(N, dtype=np.bool_),
        PACKED | (CAUSAL & (KEY == 0)),
    ],
    ids=["causal", "window", "sinks", "dilated", "diagonal", "shared prefix"],
)
def test_a_mask_without_isolated_segments_is_clean(prompt: BoolArray) -> None:
    assert find_spans(prompt[None]) == ()
    assert look(prompt, row_of(0)) == []


LABEL = np.array([0, 0, 0, 1, 1, 2, 2, 2, 2, 9, 9, 9])
"""A system prompt, two paraphrases, and a header that reads all of them."""
SHARED = CAUSAL & ((LABEL[:, None] == LABEL[None]) | (LABEL[None] == 0) | (LABEL[:, None] == 9))


def keys_row(*keys: int) -> BoolArray:
    return np.array([[*np.isin(np.arange(N), keys), True]])


def test_a_row_with_the_segment_of_the_system_prompt_is_reported() -> None:
    (finding,) = look(SHARED, keys_row(0, 1, 2), position=N)
    assert (finding.id, finding.layers, finding.positions) == (
        *("decode.other-segment", (0, 1), (12,)),
    )
    assert finding.evidence == {"like": 2, "missed": {"start": 3, "stop": 12}, "n_missed": 9}
    assert "none of the keys 3-11, of which the last row of the prompt sees 9" in finding.sentence
    assert "filled up with 0 for new tokens" in finding.sentence


def test_a_row_with_the_segment_of_a_paraphrase_is_reported() -> None:
    (finding,) = look(SHARED, keys_row(0, 1, 2, 3, 4), position=N)
    assert finding.sentence.endswith("It has the segment of position 4.")


@pytest.mark.parametrize(
    ("prompt", "newest"),
    [
        (SHARED, keys_row(*range(N))),
        (SHARED, keys_row(0, 1, 2, 9, 10, 11)),
        (SHARED, keys_row()),
        # Chunks that see the first two keys of each earlier one.
        (CAUSAL & ((ROW // 4 == KEY // 4) | (KEY % 4 < 2)), keys_row(0, 1, 4, 5, 8, 9)),
        (CAUSAL & ((ROW - KEY) % 4 == 0), keys_row(0, 4, 8)),
        (CAUSAL & ((ROW - KEY < 1) | (KEY < 2)), keys_row(0, 1)),
    ],
    ids=["reads all", "as the header", "only itself", "summaries", "dilated", "sinks"],
)
def test_rows_of_masks_with_shared_segments_that_are_meant_are_clean(
    prompt: BoolArray, newest: BoolArray
) -> None:
    assert look(prompt, newest, position=N) == []


def test_a_row_that_goes_on_behind_the_system_prompt_by_its_position_is_meant_to() -> None:
    assert look(SHARED, keys_row(0, 1, 2), position=3) == []


def test_heads_that_differ_are_not_compared() -> None:
    assert find_spans(np.stack((PACKED, CAUSAL))) == ()
    assert len(find_spans(np.stack((PACKED, PACKED)))) == 3
