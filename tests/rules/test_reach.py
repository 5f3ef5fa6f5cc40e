"""Isolated segments that reach each other over several layers are found, with the rows between."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.cases import found_in_case, segments
from support.ownmasks import attend_by, causal, inside, isolated, with_cache, without_cache
from support.planting import of, one, planted, serious
from support.tiny import ids, make_model
from torch import Tensor

from flexinspect.masks.mask_presets import PRESETS, MaskSpec, preset
from flexinspect.masks.mask_presets import causal as causal_rule
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.prompt import Segment, SegmentKind
from flexinspect.records.step import GenerationRecord, TokenRecord
from flexinspect.rules.context import RuleContext
from flexinspect.rules.masks import transitive_reach
from flexinspect.rules.masks.transitive_reach import _format_carriers

SPANS = [(1, 6), (7, 12), (13, 18)]
CUE, PROMPT = 19, 21
SEGMENTS = [(*span, f"paraphrase {n}") for n, span in enumerate(SPANS, start=1)]
LAST = [*SEGMENTS, (18, 19, "separator 3")]
APART = isolated(SPANS, CUE)

MINE = ("reach.leak", "reach.by-design")


def prompt_ids() -> Tensor:
    return torch.tensor([ids(PROMPT, 3)])


def shared(
    *rows: int, sees: Any = range(99), seen: Any = range(99), heads: tuple[int, int] | None = None
) -> Any:
    """Return a mask whose `rows` see all rows before them and are seen by all rows after them.

    They see in the layers `sees` and are seen in the layers `seen`. `heads` limits each of the two
    to one head.
    """

    def cells(layer: int, row: Tensor, key: Tensor) -> Tensor:
        spans = [(at, at + 1) for at in rows]
        down = inside(row, *spans) & (key <= row) & (layer in sees)
        up = inside(key, *spans) & (key <= row) & (layer in seen)
        if heads is None:
            return APART(layer, row, key) | down | up
        out = APART(layer, row, key).expand(4, len(row), key.shape[1]).clone()
        out[heads[0]] |= down
        out[heads[1]] |= up
        return out

    return cells


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., list[Finding]]:
    """Run a tiny model once over the prompt under a mask of cells, and return the findings."""

    def go(cells: Any, family: str = "llama", loop: Any = None, **watch: Any) -> list[Finding]:
        model = make_model(family, num_hidden_layers=watch.pop("layers", 3))
        attend_by(model, cells)
        act = loop or (lambda model, prompt: model(prompt))
        options = {"segments": LAST, **watch}
        return planted(tmp_path, model, lambda: act(model, prompt_ids()), **options)

    return go


def moves(cells: Any, source: int, target: int, layers: int = 3) -> bool:
    """Return whether the last hidden states of a segment change with the text of another."""
    model, prompt = make_model("llama", num_hidden_layers=layers), prompt_ids()
    attend_by(model, cells)
    other = prompt.clone()
    other[0, slice(*SPANS[source])] += 1
    hidden = [model.model(x).last_hidden_state[0, slice(*SPANS[target])] for x in (prompt, other)]
    return bool((hidden[0] - hidden[1]).abs().max() > 1e-6)


# -- leaks -----------------------------------------------------------------------------------------


def pair_of(entry: dict[str, Any]) -> tuple[Any, ...]:
    """Return target, source and layer of a pair of the evidence."""
    return entry["segment"], entry["depends on"], entry["from layer"]


def test_rows_of_line_breaks_are_called_so() -> None:
    context = RuleContext()
    tokens = [TokenRecord(pos, pos, "t", text, pos, 0) for pos, text in enumerate("a\nb\nc")]
    context.start_generation(GenerationRecord(0, "s", "", "", (), tuple(tokens)))
    assert _format_carriers(context, (1, 3)) == "rows 1 and 3 (line breaks)"
    assert _format_carriers(context, (3,)) == "row 3 (line break)"
    assert _format_carriers(context, (1, 2)) == 'rows 1 "↵" and 2 "b"'


def test_the_case_of_shared_separators_names_them() -> None:
    found = found_in_case("s01_leak_through_separators", segments((1, 7), (9, 16)))
    leaks = of(found, "reach.leak")
    assert [leak.generation for leak in leaks] == [0, 1]  # not with the separators cut
    assert (leaks[0].severity, leaks[0].step, leaks[0].layer) == (Severity.WARNING, 0, 1)
    assert leaks[0].positions == (7, 8)
    assert leaks[0].sentence.startswith("Paraphrase 2 depends on paraphrase 1 from layer 1 on, ")
    assert 'through rows 7 "' in leaks[0].sentence
    assert "(separator 1), although none of its 7 rows sees it directly" in leaks[0].sentence
    assert not [f for f in serious(found) if f.generation >= 2]


def test_the_same_case_under_a_declared_mask_is_an_error() -> None:
    declared = segments((1, 7), (9, 16), mask="segment-isolation")
    found = found_in_case("s01_leak_through_separators", declared)
    leak = of(found, "reach.leak")[0]
    assert leak.severity is Severity.ERROR
    assert leak.sentence.endswith("; the declared mask isolates the two over all layers.")


def test_the_wrapper_case_leaks_through_its_separator() -> None:
    found = found_in_case("origin_wrapper", segments((1, 7), (8, 13)))
    leak = one(found, "reach.leak")
    assert (leak.generation, leak.positions, leak.times, leak.layer) == (0, (7,), 4, 1)


def test_three_segments_are_one_finding_that_counts_the_pairs(
    run: Callable[..., list[Finding]],
) -> None:
    finding = one(run(shared(6, 12), "qwen3"), "reach.leak")
    assert finding.positions == (6, 12)
    assert finding.evidence["pairs"][0] == {
        "segment": "paraphrase 2",
        "depends on": "paraphrase 1",
        "from layer": 1,
    }
    assert [*map(pair_of, finding.evidence["pairs"])] == [
        ("paraphrase 2", "paraphrase 1", 1),
        ("paraphrase 3", "paraphrase 1", 1),
        ("paraphrase 3", "paraphrase 2", 1),
    ]
    others = "; the same holds for 2 other pairs of segments, also through row 12 "
    assert others in finding.sentence


def test_with_a_mask_per_layer_the_first_layer_of_the_leak_is_named(
    run: Callable[..., list[Finding]],
) -> None:
    finding = one(run(shared(6, sees=[1], seen=[3]), layers=5), "reach.leak")
    assert (finding.layer, finding.positions) == (3, (6,))
    assert "from layer 3 on, through row 6" in finding.sentence
    found = run(shared(6, seen=[0]), name="too early")
    assert of(found, "reach.leak") == []  # seen before it has anything to carry


def test_a_leak_needs_no_head_that_does_both(run: Callable[..., list[Finding]]) -> None:
    finding = one(run(shared(6, heads=(1, 3)), "gpt_neox"), "reach.leak")
    assert (finding.layer, finding.positions) == (1, (6,))


def test_a_first_row_that_sees_the_whole_prompt_passes_it_to_all_rows(
    run: Callable[..., list[Finding]],
) -> None:
    """A BOS that is not causal: later paraphrases leak into the earlier ones as well."""

    def cells(layer: int, rows: Tensor, keys: Tensor) -> Tensor:
        return APART(layer, rows, keys) | (rows == 0)

    finding = one(run(cells, "qwen2"), "reach.leak")
    assert (len(finding.evidence["pairs"]), finding.positions) == (6, (0,))
    assert "Paraphrase 2 depends on paraphrase 1 from layer 1 on, through row 0" in finding.sentence


def test_a_chain_of_rows_needs_one_more_layer(run: Callable[..., list[Finding]]) -> None:
    def cells(layer: int, rows: Tensor, keys: Tensor) -> Tensor:
        chain = ((rows == 6) & inside(keys, (1, 6))) | ((rows == 12) & (keys == 6))
        own = APART(layer, rows, keys) & ~((rows == 12) & inside(keys, (1, 6)))
        return own | chain | (inside(rows, (13, 18)) & (keys == 12))

    finding = one(run(cells), "reach.leak")
    assert (finding.layer, finding.positions) == (1, (12,))
    near, far = ("paraphrase 3", "paraphrase 2", 1), ("paraphrase 3", "paraphrase 1", 2)
    assert [*map(pair_of, finding.evidence["pairs"])] == [near, far]
    short = one(run(cells, layers=2, name="short"), "reach.leak")
    assert [*map(pair_of, short.evidence["pairs"])] == [
        near
    ]  # two layers are too few for the chain


def test_a_loop_without_a_cache_is_one_finding(
    run: Callable[..., list[Finding]],
) -> None:
    finding = one(run(shared(6), loop=without_cache), "reach.leak")
    assert (finding.step, finding.times) == (0, 4)


def test_a_leak_that_begins_at_a_later_step_is_found_there(
    run: Callable[..., list[Finding]],
) -> None:
    def cells(layer: int, rows: Tensor, keys: Tensor) -> Tensor:
        return (shared(6) if keys.shape[1] > PROMPT + 1 else APART)(layer, rows, keys)

    finding = one(run(cells, loop=without_cache), "reach.leak")
    assert (finding.step, finding.times) == (2, 2)


@pytest.mark.parametrize("rows", [(6,), (6, 12), (0,)])
def test_closing_the_named_rows_ends_the_leak(
    run: Callable[..., list[Finding]], rows: tuple[int, ...]
) -> None:
    def whole(layer: int, row: Tensor, key: Tensor) -> Tensor:
        return shared(*rows)(layer, row, key) | ((row == 0) & (0 in rows))

    finding = one(run(whole), "reach.leak")
    named = [(pos, pos + 1) for pos in finding.positions]

    def cut(layer: int, row: Tensor, key: Tensor) -> Tensor:
        return whole(layer, row, key) & ~(inside(row, *named) & (row != key))

    assert moves(whole, 0, 1)
    assert not moves(cut, 0, 1)
    assert of(run(cut, name="cut"), "reach.leak") == []


@pytest.mark.parametrize("seed", range(6))
def test_the_reported_pairs_are_those_whose_hidden_states_change(
    run: Callable[..., list[Finding]], seed: int
) -> None:
    """Random cells between separators and segments, in three layers each with its own."""
    random = torch.Generator().manual_seed(seed)
    extra = (torch.rand(3, PROMPT, PROMPT, generator=random) < 0.05).tril()
    for start, stop in SPANS:  # nothing joins two segments directly
        for other in SPANS:
            extra[:, start:stop, slice(*other)] = False

    def cells(layer: int, rows: Tensor, keys: Tensor) -> Tensor:
        return APART(layer, rows, keys) | extra[layer][rows, keys]

    found = of(run(cells, level="advanced"), "reach.leak")
    reported = {pair_of(pair)[:2] for leak in found for pair in leak.evidence["pairs"]}
    for target in (1, 2):
        for source in range(target):
            pair = (f"paraphrase {target + 1}", f"paraphrase {source + 1}")
            assert (pair in reported) == moves(cells, source, target), pair


# -- leaks of the declared mask --------------------------------------------------------------------


def spec_with_open_separators() -> MaskSpec:
    """Return an isolating spec whose separator 1, row 6, sees all and is seen by paraphrase 2."""
    starts, head, low = (0, 1, 6, 7, 13, 19), (0, 1, 0, 1, 1, 0), (0, 1, 0, 6, 13, 0)
    return MaskSpec("own", starts, head, low)


def test_a_declared_mask_that_leaks_by_design_is_a_warning(
    run: Callable[..., list[Finding]],
) -> None:
    spec = spec_with_open_separators()
    whole = torch.from_numpy(spec.dense(64))
    found = run(lambda layer, rows, keys: whole[rows, keys], mask=spec)
    finding = one(found, "reach.by-design")
    assert (finding.severity, finding.positions, finding.layer) == (Severity.WARNING, (6,), 1)
    assert finding.sentence.startswith("Paraphrase 2 depends on paraphrase 1 from layer 1 on")
    assert finding.sentence.endswith("; the declared mask itself allows this.")
    assert of(found, "reach.leak") == []


def test_more_than_the_declared_mask_allows_is_a_leak(run: Callable[..., list[Finding]]) -> None:
    spec = spec_with_open_separators()
    whole = torch.from_numpy(spec.dense(64))

    def cells(layer: int, rows: Tensor, keys: Tensor) -> Tensor:
        extra = ((rows == 12) & (keys < 12)) | (inside(rows, (13, 18)) & (keys == 12))
        return whole[rows, keys] | extra

    finding = one(run(cells, mask=spec), "reach.leak")
    assert finding.severity is Severity.ERROR
    assert {pair_of(pair)[:2] for pair in finding.evidence["pairs"]} == {
        ("paraphrase 3", "paraphrase 1"),
        ("paraphrase 3", "paraphrase 2"),
    }


def test_the_reach_of_a_spec_is_that_of_its_cells() -> None:
    specs = [causal_rule(), spec_with_open_separators()]
    kind = SegmentKind.PARAPHRASE
    spans = [Segment(*span, f"p{n}", kind, n) for n, span in enumerate(SPANS)]
    for spec in specs:
        direct, over_layers = transitive_reach.spec_reach(spec, spans, spans)
        cells = spec.dense(PROMPT)
        many = np.linalg.matrix_power((cells | np.eye(PROMPT, dtype=np.bool_)).astype(float), 9) > 0
        for t, target in enumerate(spans):
            for s, source in enumerate(spans):
                block = np.s_[target.start : target.stop, source.start : source.stop]
                assert direct[t, s] == cells[block].any()
                assert over_layers[t, s] == many[block].any()


# -- correct runs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", [None, with_cache, without_cache])
@pytest.mark.parametrize(
    "cells",
    [APART, isolated(SPANS, CUE, bos=False), causal],
    ids=["apart", "apart, and BOS apart", "causal"],
)
def test_isolating_and_causal_masks_make_no_finding(
    run: Callable[..., list[Finding]], cells: Any, loop: Any
) -> None:
    assert not [f for f in run(cells, loop=loop) if f.id in MINE]


@pytest.mark.parametrize("name", sorted(PRESETS))
@pytest.mark.parametrize("separators", ["attached", "isolated"])
def test_no_preset_makes_a_finding(name: str, separators: str) -> None:
    kinds = [SegmentKind.BOS, SegmentKind.SHARED, *[SegmentKind.PARAPHRASE] * 3, SegmentKind.CUE]
    spans = [Segment(4 * n, 4 * n + 4, f"{kind} {n}", kind, n) for n, kind in enumerate(kinds)]
    spec = preset(name, spans, separators=separators)
    targets = [s for s in spans if s.kind is SegmentKind.PARAPHRASE]
    packed = dict.fromkeys(range(4), transitive_reach.pack_rows(spec.dense(20)[None], 20))
    assert transitive_reach.find_transitive_leaks(packed, targets, [*targets, spans[1]]) == []


@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_sliding_windows_make_no_finding(tmp_path: Path, family: str) -> None:
    """A window closes distant keys, but passes them on from row to row by design."""
    model = make_model(family)
    found = planted(tmp_path, model, lambda: with_cache(model, prompt_ids()), segments=LAST)
    assert not [f for f in found if f.id in MINE]


def test_shared_rows_that_do_not_see_the_segments_make_no_finding(
    run: Callable[..., list[Finding]],
) -> None:
    def cells(layer: int, rows: Tensor, keys: Tensor) -> Tensor:
        empty_row = (rows == 6) & (keys != rows)
        return shared(0, 6, sees=[])(layer, rows, keys) & ~empty_row

    assert not [f for f in run(cells) if f.id in MINE]


def test_a_window_with_much_text_between_the_segments_makes_no_finding(tmp_path: Path) -> None:
    model, prompt = make_model("mistral"), torch.tensor([ids(60, 3)])
    spans = [(1, 14, "paraphrase 1"), (24, 37, "paraphrase 2"), (47, 60, "paraphrase 3")]
    found = planted(tmp_path, model, lambda: model(prompt), segments=spans)
    assert not [f for f in found if f.id in MINE]


def test_a_single_segment_cannot_leak(run: Callable[..., list[Finding]]) -> None:
    assert not [f for f in run(shared(6), segments=[(1, 6, "context")]) if f.id in MINE]
