"""Masks as expressions: what each elementary mask opens, composition, and refused text."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexinspect.core.errors import MaskError
from flexinspect.masks import mask_presets
from flexinspect.masks.known_masks import ArrayMask, dense
from flexinspect.masks.mask_expressions import mask_names, mask_usages, parse_mask
from flexinspect.masks.mask_presets import BoolArray
from flexinspect.records.prompt import Segment, SegmentKind

SEGMENTS = (
    Segment(0, 1, "bos", SegmentKind.BOS, 0),
    Segment(1, 4, "paraphrase 1", SegmentKind.PARAPHRASE, 1),
    Segment(4, 5, "separator 1", SegmentKind.SEPARATOR, 1),
    Segment(5, 9, "paraphrase 2", SegmentKind.PARAPHRASE, 3),
    Segment(9, 12, "generated", SegmentKind.GENERATED, 4),
)
N = 12


def cells(text: str, head: int = 0) -> BoolArray:
    return dense(parse_mask(text, SEGMENTS), N, N, head)


def defined(rule: str) -> BoolArray:
    """The cells of a rule in plain Python, cell by cell."""
    return np.array([[eval(rule, {"q": q, "k": k}) for k in range(N)] for q in range(N)], bool)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("full", "True"),
        ("causal", "k <= q"),
        ("prefix-lm(4)", "k <= q or k < 4"),
        ("prefix-lm", "k <= q or k < 9"),
        ("sliding-window(3)", "0 <= q - k < 3"),
        ("document-packing(5)", "k <= q and k // 5 == q // 5"),
        ("document-packing(2, 4)", "k <= q and (k >= 2) == (q >= 2) and (k+2) // 4 == (q+2) // 4"),
        ("dilated(3)", "k <= q and (q - k) % 3 == 0"),
        ("global-tokens(2)", "k < 2 or q < 2"),
        ("causal-block(4)", "k // 4 <= q // 4"),
        ("causal and not sliding-window(2)", "k <= q - 2"),
        ("dilated(2) or global-tokens(1)", "k == 0 or q == 0 or (k <= q and (q - k) % 2 == 0)"),
        ("shift(causal, 1)", "1 <= k <= q + 1"),
        ("shift(causal, 0, 2)", "q >= 2 and k <= q - 2"),
        ("shift(full, -3)", "True"),
        ("~causal & full", "k > q"),
    ],
)
def test_each_mask_opens_the_cells_of_its_definition(text: str, rule: str) -> None:
    assert (cells(text) == defined(rule)).all()


def test_document_packing_without_lengths_packs_the_segments_with_their_separators() -> None:
    owner = [0, 1, 1, 1, 1, 3, 3, 3, 3, 4, 4, 4]
    expected = [[k <= q and owner[k] == owner[q] for k in range(N)] for q in range(N)]
    assert cells("document-packing").tolist() == expected


def test_a_node_of_a_tree_attends_to_the_prompt_and_its_ancestors() -> None:
    open_keys = [np.flatnonzero(row).tolist() for row in cells("tree-attention(2, 3)")]
    assert open_keys[:3] == [[0], [0, 1], [0, 1, 2]]
    # nodes 0 to 8 at positions 3 to 11: the children of node n are 2n + 1 and 2n + 2
    assert open_keys[3] == [0, 1, 2, 3]
    assert open_keys[5] == [0, 1, 2, 3, 5]
    assert open_keys[9] == [0, 1, 2, 3, 5, 9]
    assert open_keys[11] == [0, 1, 2, 3, 4, 6, 11]


@pytest.mark.parametrize("name", [name for name in mask_presets.PRESETS if name != "causal"])
def test_every_preset_is_a_mask_with_the_cells_of_its_normal_form(name: str) -> None:
    assert (cells(name) == mask_presets.preset(name, SEGMENTS).dense(N)).all()


def test_each_head_has_its_own_mask() -> None:
    mask = parse_mask("per-head(causal, sliding-window(1), full) and causal", SEGMENTS)
    assert mask.n_heads == 3
    assert (dense(mask, N, N, 1) == np.eye(N, dtype=bool)).all()
    assert (dense(mask, N, N, 2) == cells("causal")).all()


atoms = st.sampled_from(["causal", "segment-isolation", "sliding-window(3)", "dilated(2)", "full"])
expressions = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(lambda t: f"({' '.join(t)})"),
        inner.map(lambda text: f"not {text}"),
        st.tuples(inner, st.integers(-2, 2)).map(lambda t: f"shift({t[0]}, {t[1]})"),
    ),
    max_leaves=5,
)


@given(expressions)
def test_the_name_of_a_mask_is_an_expression_of_the_same_mask(text: str) -> None:
    mask = parse_mask(text, SEGMENTS)
    again = parse_mask(mask.name, SEGMENTS)
    assert again.name == mask.name
    assert (dense(again, N, N) == dense(mask, N, N)).all()


@given(expressions, st.lists(st.integers(0, N - 1), min_size=1), st.lists(st.integers(0, N - 1)))
def test_any_part_of_a_mask_equals_that_part_of_the_whole(
    text: str, rows: list[int], keys: list[int]
) -> None:
    mask = parse_mask(text, SEGMENTS)
    part = mask.cells(np.array(rows, np.int32), np.array(keys, np.int32))
    assert part.shape == (len(rows), len(keys))
    assert (part == dense(mask, N, N)[np.ix_(rows, keys)]).all()


def test_cells_outside_of_an_array_are_closed() -> None:
    mask = ArrayMask("array", np.ones((2, 3, 4), bool))
    assert mask.n_heads == 2
    assert dense(mask, 5, 5, 1).sum() == 12


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("slidng-window(8)", "there is no mask 'slidng-window'", "Did you mean sliding-window?"),
        ("sliding-window", r"sliding-window is written sliding-window\(size\)", ""),
        ("sliding-window(0)", "takes numbers from 1 on, not 0", ""),
        ("sliding-window(2.5)", "'2.5' is not a whole number", ""),
        ("causal + full", r"'causal \+ full' is not part of a mask", ""),
        ("shift(causal)", r"shift is written shift\(MASK, keys, rows=0\)", ""),
        ("segment-isolation(3)", "segment-isolation is written segment-isolation", ""),
        ("__import__('os').system('true')", "is not part of a mask", ""),
        ("causal and", "is not a mask", "For instance"),
        ("", "is not a mask", "For instance"),
        ("(" * 1900, "is not a mask", ""),
        ("causal\x00", "is not a mask", ""),
        ("x" * 3000, "longer than 2000 characters", ""),
    ],
)
def test_text_that_is_no_mask_is_refused_with_one_sentence(
    text: str, message: str, hint: str
) -> None:
    with pytest.raises(MaskError, match=message) as error:
        parse_mask(text, SEGMENTS)
    assert hint in (error.value.hint or "")
    assert "\n" not in error.value.message


def test_a_preset_without_segments_is_refused() -> None:
    with pytest.raises(MaskError, match="'segment-isolation' needs segments"):
        parse_mask("segment-isolation")


def test_the_list_of_masks_names_each_with_its_form() -> None:
    usages = dict(mask_usages())
    assert {usage.partition("(")[0] for usage in usages} == set(mask_names())
    assert usages["sliding-window(size)"].startswith("Every row attends to itself")
