"""Keys and segments that no row reads are reported when the generation is over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import found_in_case, segments
from support.ownmasks import attend_by, causal, inside, isolated, with_cache, without_cache
from support.planting import of, one, planted, serious
from support.tiny import FAMILIES, ids, make_model
from torch import Tensor

from flexinspect.records.finding import Severity

SPANS = [(1, 6), (7, 12), (13, 18)]
CUE, PROMPT = 19, 21
SEGMENTS = [(*span, f"paraphrase {n}") for n, span in enumerate(SPANS, start=1)]
LAST = [*SEGMENTS, (18, 19, "separator 3")]
APART = isolated(SPANS, CUE)

ORPHAN, UNUSED = "mask.orphan-key", "segments.unused"


def prompt_ids(n: int = PROMPT) -> Tensor:
    return torch.tensor([ids(n, 3)])


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Any]:
    """Generate with a tiny model under a mask of cells, and return the findings."""

    def go(cells: Any, family: str = "llama", loop: Any = with_cache, **watch: Any) -> Any:
        model = make_model(family)
        attend_by(model, cells)
        return planted(
            tmp_path, model, lambda: loop(model, prompt_ids()), **{"segments": LAST, **watch}
        )

    return go


def without(*spans: tuple[int, int], cells: Any = APART, **only: Any) -> Any:
    """Return a mask whose keys in the spans are seen only by their own rows."""

    def change(layer: int, rows: Tensor, keys: Tensor) -> Tensor:
        closed = inside(keys, *spans) & (keys != rows)
        closed &= rows >= only.get("start", 0)
        return cells(layer, rows, keys) & ~(closed & (layer in only.get("layers", range(9))))

    return change


# -- keys that no row reads ------------------------------------------------------------------------


def test_a_span_that_stops_one_token_early_leaves_its_last_key_unread(
    run: Callable[..., Any],
) -> None:
    finding = one(run(without((11, 12))), ORPHAN)
    assert (finding.severity, finding.positions) == (Severity.WARNING, (11,))
    assert (finding.step, finding.layer) == (None, None)
    assert finding.sentence.startswith("1 key of paraphrase 2 (position 11")
    assert finding.sentence.endswith(
        "is read by no other row, in any of the 3 layers or any step: no later token depends on it."
    )


def test_keys_of_two_segments_are_one_finding(run: Callable[..., Any]) -> None:
    finding = one(run(without((4, 6), (17, 18)), "qwen3"), ORPHAN)
    assert finding.positions == (4, 5, 17)
    assert finding.sentence.startswith("3 keys of paraphrase 1 and paraphrase 3 (first: position 4")


def test_cells_that_a_declared_mask_lost_are_a_note_here(run: Callable[..., Any]) -> None:
    finding = one(run(without((11, 12)), mask="segment-isolation"), ORPHAN)
    assert finding.severity is Severity.NOTE


def test_an_unread_key_in_a_prompt_without_declarations_is_a_note(
    run: Callable[..., Any],
) -> None:
    found = run(without((4, 5), cells=causal), "gpt_neox", segments=None, loop=without_cache)
    finding = one(found, ORPHAN)
    assert (finding.severity, finding.positions) == (Severity.NOTE, (4,))


def test_a_key_that_is_read_in_one_layer_or_step_is_read(run: Callable[..., Any]) -> None:
    assert of(run(without((11, 12), layers=[0, 2])), ORPHAN) == []

    def late(layer: int, rows: Tensor, keys: Tensor) -> Tensor:
        closed = (keys == 11) & (keys != rows) & (rows < PROMPT + 2)
        return APART(layer, rows, keys) & ~closed

    assert of(run(late, name="late"), ORPHAN) == []


# -- segments that no row uses ---------------------------------------------------------------------


def test_a_segment_that_no_reader_sees_is_named(run: Callable[..., Any]) -> None:
    found = run(without((7, 12), start=CUE))
    finding = one(found, UNUSED)
    assert (finding.severity, finding.positions) == (Severity.WARNING, (7, 8, 9, 10, 11))
    assert finding.evidence["segments"] == ["paraphrase 2"]
    assert finding.sentence.startswith("Paraphrase 2 (position 7")
    assert (
        "is seen by no row of the cue and by no generated row, in any layer or head; no mask was "
        "declared"
    ) in finding.sentence
    assert of(found, "decode.generated-row-isolated") == []


def test_two_segments_under_a_declared_mask(run: Callable[..., Any]) -> None:
    found = run(without((1, 12), start=CUE), "qwen2", mask="segment-isolation")
    finding = one(found, UNUSED)
    assert finding.sentence.startswith("Paraphrase 1 and paraphrase 2 (position 1")
    assert finding.evidence["segments"] == ["paraphrase 1", "paraphrase 2"]
    assert "no mask was declared" not in finding.sentence


def test_without_a_cache_a_segment_that_no_reader_sees(run: Callable[..., Any]) -> None:
    finding = one(run(without((1, 6), start=CUE), loop=without_cache), UNUSED)
    assert finding.evidence["segments"] == ["paraphrase 1"]


def test_one_segment_of_a_prompt_that_a_mask_closes_is_a_note(run: Callable[..., Any]) -> None:
    closed = without((3, 9), start=9, cells=causal)
    finding = one(run(closed, segments=[(3, 9, "context")]), UNUSED)
    assert (finding.severity, finding.evidence["segments"]) == (Severity.NOTE, ["context"])


def test_a_segment_that_is_open_but_gets_no_attention_is_a_note(tmp_path: Path) -> None:
    model = make_model("llama")
    model.set_attn_implementation("eager")
    bias = torch.zeros(1, 1, PROMPT, PROMPT).masked_fill(~causal(0, *grid(PROMPT)), -1e9)
    bias[..., CUE:, 7:12] -= 200

    def loop() -> None:
        cache = model(prompt_ids(), attention_mask=bias).past_key_values
        row = torch.zeros(1, 1, 1, PROMPT + 1)
        row[..., 7:12] -= 200
        model(torch.tensor([[5]]), past_key_values=cache, attention_mask=row)

    finding = one(planted(tmp_path, model, loop, segments=LAST), UNUSED)
    assert finding.severity is Severity.NOTE
    assert finding.sentence.startswith("Paraphrase 2 is visible to generated rows, but gets at")


def grid(n: int) -> tuple[Tensor, Tensor]:
    return torch.arange(n)[:, None], torch.arange(n)[None]


# -- correct runs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_no_family_makes_a_finding(tmp_path: Path, family: str) -> None:
    model = make_model(family)
    found = planted(tmp_path, model, lambda: with_cache(model, prompt_ids(), 12), segments=LAST)
    assert not [f for f in found if f.id in (ORPHAN, UNUSED)]


@pytest.mark.parametrize("loop", [with_cache, without_cache])
@pytest.mark.parametrize(
    "cells",
    [
        APART,
        isolated(SPANS, CUE, bos=False),
        lambda layer, rows, keys: (keys <= rows) & (keys > rows - 4),
        lambda layer, rows, keys: (keys <= rows) & ((keys > rows - 4) | (keys < 1)),
    ],
    ids=["apart", "bos apart", "window", "sink and window"],
)
def test_intended_masks_make_no_finding(run: Callable[..., Any], cells: Any, loop: Any) -> None:
    found = run(cells, loop=loop, segments=LAST if cells is APART else None)
    assert not [f for f in serious(found) if f.id in (ORPHAN, UNUSED)]


def test_a_document_mask_that_was_declared_leaves_the_first_documents_unused(
    run: Callable[..., Any],
) -> None:
    def cells(layer: int, rows: Tensor, keys: Tensor) -> Tensor:
        return APART(layer, rows.clamp(max=18), keys.clamp(max=18)) & (keys <= rows)

    found = run(cells, mask="document")
    assert not [f for f in found if f.id in (ORPHAN, UNUSED)]


def test_padding_makes_no_finding(tmp_path: Path) -> None:
    model, prompt = make_model("llama"), prompt_ids()
    prompt[0, :4] = 0
    mask = (prompt != 0).long()
    found = planted(
        tmp_path,
        model,
        lambda: model.generate(prompt, attention_mask=mask, max_new_tokens=4, do_sample=False),
    )
    assert not [f for f in found if f.id in (ORPHAN, UNUSED)]


def test_keys_that_the_caller_closes_in_the_middle_make_no_finding(tmp_path: Path) -> None:
    model, mask = make_model("llama"), torch.ones(1, PROMPT, dtype=torch.long)
    mask[0, 5:8] = 0
    found = planted(
        tmp_path,
        model,
        lambda: model.generate(
            prompt_ids(), attention_mask=mask, max_new_tokens=4, do_sample=False
        ),
    )
    assert not [f for f in found if f.id in (ORPHAN, UNUSED)]


@pytest.mark.parametrize(
    ("name", "spans"),
    [
        ("w01_bos_shift", [(1, 7), (9, 15)]),
        ("w04_missing_eos", [(0, 5), (5, 9), (9, 13)]),
        ("s01_leak_through_separators", [(1, 7), (9, 16)]),
    ],
)
def test_a_single_forward_has_no_unused_segments(name: str, spans: list[tuple[int, int]]) -> None:
    found = found_in_case(name, segments(*spans))
    assert not [f for f in serious(found) if f.id in (ORPHAN, UNUSED)]


def test_level_basic_makes_no_finding(run: Callable[..., Any]) -> None:
    found = run(without((7, 12), start=CUE), level="basic")
    assert not [f for f in found if f.id in (ORPHAN, UNUSED)]
