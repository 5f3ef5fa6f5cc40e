"""Prompt rows masked as generated rows, and generated rows that do not see the segments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import found_in_case, segments
from support.ownmasks import attend_by, causal, inside, isolated, with_cache, without_cache
from support.planting import of, one, planted, serious
from support.tiny import ids, make_model
from torch import Tensor

from flexinspect.masks.mask_presets import PRESETS
from flexinspect.records.finding import Severity

SPANS = [(1, 6), (7, 12), (13, 18)]
"""Three paraphrases with a separator after each; BOS is 0, and the cue is 19 and 20."""
CUE, PROMPT = 19, 21
SEGMENTS = [(*span, f"paraphrase {n}") for n, span in enumerate(SPANS, start=1)]
LAST = [*SEGMENTS, (18, 19, "separator 3")]
"""Without this the last separator would count as part of the cue."""
APART = isolated(SPANS, CUE)

PROMPT_ROW, ISOLATED = "decode.prompt-row-generated", "decode.generated-row-isolated"


def prompt_ids() -> Tensor:
    return torch.tensor([ids(PROMPT, 3)])


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Any]:
    """Generate with a tiny model under a mask of cells, and return the findings."""

    def go(cells: Any, family: str = "llama", loop: Any = with_cache, **watch: Any) -> Any:
        model = make_model(family)
        attend_by(model, cells)
        options = {"segments": LAST, **watch}
        return planted(tmp_path, model, lambda: loop(model, prompt_ids()), **options)

    return go


def but(cells: Any, change: Callable[[Tensor, int, Tensor, Tensor], Tensor]) -> Any:
    """Return a mask with a change applied to its cells."""
    return lambda layer, rows, keys: change(cells(layer, rows, keys), layer, rows, keys)


# -- prompt rows that see too much -----------------------------------------------------------------


@pytest.mark.parametrize("mask", ["", "segment-isolation"])
def test_the_case_of_spans_counted_without_a_bos_names_the_row(mask: str) -> None:
    spans = segments((1, 7), (9, 15), mask=mask)
    found = found_in_case("w01_bos_shift", spans)
    first, second = of(found, PROMPT_ROW)
    assert (first.generation, second.generation) == (0, 1)  # not the repaired half
    assert first.severity is (Severity.ERROR if mask else Severity.WARNING)
    assert (first.step, first.layers, first.positions) == (0, (0, 1), (14,))
    assert first.sentence.startswith("Position 14 ")
    assert (
        "the last row of paraphrase 2, is masked as if generated in all 2 layers: it sees 6 keys "
        "of paraphrase 1, of which the other 5 rows of its segment see none"
    ) in first.sentence
    assert ("no mask was declared" in first.sentence) == (not mask)
    (empty,) = of([f for f in found if f.generation == 0], "mask.empty-row")
    assert empty.positions == (6, 7)
    mine = [PROMPT_ROW, "mask.empty-row", ISOLATED]
    assert not [f for f in serious(found) if f.id in mine and f.generation >= 2]


def test_the_last_rows_of_a_segment_in_the_middle_are_named(run: Callable[..., Any]) -> None:
    cells = but(APART, lambda out, layer, rows, keys: out | inside(rows, (10, 12)) & (keys <= rows))
    finding = one(run(cells, "qwen2"), PROMPT_ROW)
    assert (finding.positions, finding.layers) == ((10, 11), (0, 1, 2))
    assert "the last 2 rows of paraphrase 2, are masked as if generated" in finding.sentence
    assert "they see 5 keys of paraphrase 1, of which the other 3 rows" in finding.sentence


def test_the_last_row_of_the_last_segment_in_one_layer_is_named(run: Callable[..., Any]) -> None:
    cells = but(
        APART, lambda out, layer, rows, keys: out | (rows == 17) & (keys <= rows) & (layer == 1)
    )
    finding = one(run(cells, "gpt_neox", mask="segment-isolation"), PROMPT_ROW)
    assert (finding.layer, finding.layers, finding.positions) == (1, (), (17,))
    assert finding.severity is Severity.ERROR
    assert "it sees 10 keys of paraphrase 1 and paraphrase 2" in finding.sentence
    assert "no mask was declared" not in finding.sentence


def test_rows_of_two_segments_are_two_findings(run: Callable[..., Any]) -> None:
    cells = but(
        APART, lambda out, layer, rows, keys: out | inside(rows, (11, 12), (17, 18)) & (keys < rows)
    )
    found = of(run(cells), PROMPT_ROW)
    assert [finding.positions for finding in found] == [(11,), (17,)]


def test_a_prompt_row_is_one_finding_without_a_cache(run: Callable[..., Any]) -> None:
    cells = but(APART, lambda out, layer, rows, keys: out | (rows == 17) & (keys <= rows))
    finding = one(run(cells, loop=without_cache), PROMPT_ROW)
    assert (finding.step, finding.times, finding.last_step) == (0, 4, 3)


# -- generated rows that see too little ------------------------------------------------------------


def hidden(*spans: tuple[int, int], start: int = PROMPT, layers: Any = range(3)) -> Any:
    """Return the mask in which rows from `start` on do not see the spans."""
    return but(
        APART,
        lambda out, layer, rows, keys: (
            out & ~((rows >= start) & inside(keys, *spans) & (layer in layers))
        ),
    )


def test_generated_rows_that_see_only_the_last_segment(run: Callable[..., Any]) -> None:
    finding = one(run(hidden((0, 13))), ISOLATED)
    assert (finding.step, finding.layers, finding.times) == (1, (0, 1, 2), 4)
    assert finding.severity is Severity.WARNING
    assert finding.positions == (PROMPT,)
    assert finding.evidence["missed"] == ["paraphrase 1", "paraphrase 2"]
    assert finding.sentence.startswith(
        "Generated rows do not see paraphrase 1 and paraphrase 2 in all 3 layers: in step 1 "
        "position 21"
    )
    assert "sees 9 of 22 keys" in finding.sentence
    assert "although the last row of the cue does" in finding.sentence


def test_generated_rows_that_see_only_themselves_under_a_declared_mask(
    run: Callable[..., Any],
) -> None:
    found = run(hidden((0, PROMPT)), "qwen3", mask="segment-isolation")
    finding = one(found, ISOLATED)
    assert finding.severity is Severity.ERROR
    assert finding.evidence["keys_missed"] == 15
    assert "paraphrase 1 and 2 other segments" in finding.sentence
    assert not of(found, "segments.unused")


def test_one_segment_lost_in_one_layer_from_a_later_step_on(run: Callable[..., Any]) -> None:
    finding = one(run(hidden((7, 12), start=PROMPT + 2, layers=[2]), "phi3"), ISOLATED)
    assert (finding.step, finding.layer, finding.layers, finding.times) == (3, 2, (), 2)
    assert finding.evidence["missed"] == ["paraphrase 2"]


def test_generated_rows_are_checked_without_a_cache(run: Callable[..., Any]) -> None:
    finding = one(run(hidden((1, 6)), loop=without_cache), ISOLATED)
    assert (finding.step, finding.times) == (1, 3)


def test_a_packed_prompt_that_continues_its_last_document_is_a_note(
    tmp_path: Path,
) -> None:
    model = make_model("llama")
    attend_by(model, isolated(SPANS, 99, bos=False))
    spans = [(1, 7, "document 1"), (7, 13, "document 2"), (13, PROMPT, "document 3")]
    found = planted(tmp_path, model, lambda: with_cache(model, prompt_ids()), segments=spans)
    assert one(found, ISOLATED).severity is Severity.NOTE
    assert not [f for f in serious(found) if f.id in (PROMPT_ROW, "segments.unused")]


# -- correct runs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", [with_cache, without_cache])
@pytest.mark.parametrize("cells", [causal, APART], ids=["causal", "apart"])
def test_isolated_segments_that_generated_rows_see_make_no_finding(
    run: Callable[..., Any], cells: Any, loop: Any
) -> None:
    found = run(cells, loop=loop)
    assert not [f for f in found if f.id in (PROMPT_ROW, ISOLATED)]


@pytest.mark.parametrize("family", ["mistral", "gemma2", "llama"])
def test_windows_make_no_finding(tmp_path: Path, family: str) -> None:
    model = make_model(family)
    found = planted(tmp_path, model, lambda: with_cache(model, prompt_ids(), 8), segments=LAST)
    assert not [f for f in found if f.id in (PROMPT_ROW, ISOLATED)]


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_declared_preset_that_ran_makes_no_finding(
    run: Callable[..., Any],
    preset: str,
) -> None:
    spec = preset_spec(preset)

    def cells(layer: int, rows: Tensor, keys: Tensor) -> Tensor:
        whole = torch.from_numpy(spec.dense(64, 64))
        return whole[rows, keys]

    assert serious(run(cells, mask=preset)) == []


def preset_spec(name: str) -> Any:
    """Return the spec that capture builds from a preset for these segments."""
    from flexinspect.masks.mask_presets import preset
    from flexinspect_hooks.user_code.generation_builder import (
        PromptInput,
        build_segments,
        parse_segments,
    )

    prompt = PromptInput([0] * PROMPT, ())
    found, troubles = build_segments(parse_segments(LAST), prompt)
    assert troubles == []
    return preset(name, found)


def test_a_last_row_that_sees_one_key_of_another_segment_makes_no_finding(
    run: Callable[..., Any],
) -> None:
    """A row masked as generated would see all keys of the segments before it."""
    cells = but(APART, lambda out, layer, rows, keys: out | (rows == 17) & (keys == 5))
    assert not of(run(cells), PROMPT_ROW)
