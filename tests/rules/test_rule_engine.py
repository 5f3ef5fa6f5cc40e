"""The rule runner and its contract, `NumbersRule`, and `EmptyRowsRule`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
from msgspec.structs import replace

from flexinspect.core.text import printable
from flexinspect.masks import mask_presets
from flexinspect.records import imported
from flexinspect.records.finding import Finding, Repeat, Severity
from flexinspect.records.prompt import PromptTokenIds, Segment, compose_prompt
from flexinspect.records.step import (
    ArrayRecord,
    CallRecord,
    Candidate,
    EventRecord,
    GenerationRecord,
    LayerStatRecord,
    LogitsRecord,
    MaskRecord,
    StepRecord,
    TokenRecord,
)
from flexinspect.rules import context as rule_context
from flexinspect.rules.context import DeclaredMask, RuleContext
from flexinspect.rules.engine import FindingKind, Rule, RuleRunner
from flexinspect.rules.masks import empty_rows
from flexinspect.rules.numerics import nan_and_inf

WORDS = [
    "<s>",
    "Be",
    " brief",
    "\n",
    "What",
    " is",
    " it",
    "?",
    "\n",
    "Name",
    " it",
    ".",
    "\n",
    "A",
]
PROMPT = compose_prompt(
    PromptTokenIds((1,), (2, 3, 4), ((5, 6, 7, 8), (10, 11, 12)), (9,), (13,)), max_new_tokens=50
)
"""bos 0, shared 1-3, paraphrase 1 4-7, separator 1 8, paraphrase 2 9-11, separator 2 12, cue 13."""
N = len(PROMPT.ids)
LAYERS = 4


def generation(number: int = 0, **changes: Any) -> GenerationRecord:
    tokens = tuple(
        TokenRecord(pos, 5, word, word, pos, 0) for pos, word in enumerate(WORDS, start=0)
    )
    record = GenerationRecord(number, "s", "m", "contiguous", PROMPT.segments, tokens)
    return replace(record, **changes)


def stat(layer: int, n_nan: int = 0, n_inf: int = 0) -> LayerStatRecord:
    return LayerStatRecord(layer, f"model.layers.{layer}", n_nan, n_inf, -1.0, 1.0, 0.0, 1.0, 3.0)


def stats(**non_finite: tuple[int, int]) -> tuple[LayerStatRecord, ...]:
    """Return statistics of every layer; `l2=(n_nan, n_inf)` puts NaN and Inf into layer 2."""
    return tuple(stat(layer, *non_finite.get(f"l{layer}", (0, 0))) for layer in range(LAYERS))


def logits(n_nan: int = 0, n_inf: int = 0, best: float = 3.0) -> LogitsRecord:
    candidate = Candidate(0, 7, "x", best, 0.0, best, 0.0)
    return LogitsRecord(1.0, 1.0, 7, 0, -0.1, n_nan, n_inf, 0.0, 3.0, (), (candidate,))


def step(
    number: int,
    *,
    layer_stats: Sequence[LayerStatRecord] = (),
    cells: np.ndarray[Any, Any] | None = None,
    path: str = "flex uncompiled",
    layers: Sequence[int] = range(LAYERS),
    mask: Mapping[str, Any] | None = None,
    **changes: Any,
) -> StepRecord:
    """Return step 0 over the prompt, or a decode step, with a mask of `cells` in `layers`."""
    before, q_len = (0, N) if number == 0 else (N + number - 1, 1)
    after = before + q_len
    if cells is None:
        cells = np.tril(np.ones((1, q_len, after), np.bool_), before)
    name = f"f{cells.tobytes()!r}"
    record = MaskRecord(name, "block", 1, len(cells), q_len, after, before, cells=cells)
    record = replace(record, **(mask or {}))
    calls = tuple(
        CallRecord(i, path, "b", name if i in layers else None, 1, 8, 2, q_len, after, 4, "f", None)
        for i in range(LAYERS)
    )
    made = StepRecord(
        generation=0,
        step=number,
        phase="prefill" if number == 0 else "decode",
        q_len=q_len,
        kv_before=before,
        kv_after=after,
        started_at=0.0,
        wall_ms=1.0,
        capture_ms=0.1,
        logits=logits(),
        tokens=(TokenRecord(after, 5, f"w{number}", f"w{number}", after, 7, step=number),),
        calls=calls,
        layer_stats=tuple(layer_stats) or stats(),
        masks=(record,),
    )
    return replace(made, **changes)


def run_rule(rule: Rule, *steps: StepRecord, of: GenerationRecord | None = None) -> list[Finding]:
    context = RuleContext()
    context.start_generation(of or generation())
    rule.on_generation_start(context)
    found = []
    for record in steps:
        context.add_step(record)
        found += rule.on_step(record)
    return found


def without(*closed: int, n: int = N) -> np.ndarray[Any, Any]:
    """Return a causal mask (1, n, n) whose rows `closed` see nothing."""
    cells = np.tril(np.ones((1, n, n), np.bool_))
    cells[:, list(closed)] = False
    return cells


# -- what every rule keeps -------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [nan_and_inf.NumbersRule, empty_rows.EmptyRowsRule])
def test_a_correct_generation_has_no_findings(rule: type[Rule]) -> None:
    assert run_rule(rule(), *(step(number) for number in range(5))) == []


def test_a_step_without_findings_is_returned_unchanged() -> None:
    runner, record = RuleRunner([nan_and_inf.NumbersRule(), empty_rows.EmptyRowsRule()]), step(0)
    assert runner.on_generation_start(generation()) == ()
    assert runner.on_step(record) is record


def test_rules_accept_a_step_without_optional_records() -> None:
    bare = step(1, logits=None, calls=(), masks=())
    bare = replace(bare, layer_stats=())
    assert (
        run_rule(nan_and_inf.NumbersRule(), bare)
        == run_rule(empty_rows.EmptyRowsRule(), bare)
        == []
    )


class Faulty(Rule):
    """A rule that raises in one method, or returns something that is not one of its findings."""

    name: ClassVar[str] = "faulty"
    findings: ClassVar[Mapping[str, FindingKind]] = {
        "faulty.known": FindingKind(Severity.NOTE, "a known one")
    }

    def __init__(self, where: str) -> None:
        self.where, self.n_calls = where, 0

    def on_generation_start(self, context: RuleContext) -> None:
        self.n_calls += 1
        if self.where == "on_generation_start":
            raise ZeroDivisionError("in on_generation_start")

    def on_step(self, step: StepRecord) -> Sequence[Any]:
        self.n_calls += 1
        if self.where == "on_step":
            raise ZeroDivisionError("in on_step")
        wrong = {"id": [Finding("other.id", Severity.NOTE, "s")], "text": ["in words"]}
        return wrong.get(self.where, [Finding("faulty.known", Severity.NOTE, "s")])


@pytest.mark.parametrize(
    ("where", "reason"),
    [("on_step", "in on_step"), ("id", "other.id"), ("text", "str is not a Finding")],
)
def test_a_rule_that_fails_is_disabled_and_the_others_continue(where: str, reason: str) -> None:
    faulty = Faulty(where)
    runner = RuleRunner([faulty, empty_rows.EmptyRowsRule()])
    assert runner.on_generation_start(generation()) == ()
    first, second = runner.on_step(step(0, cells=without(5))), runner.on_step(step(1))
    assert [f.id for f in first.findings] == ["mask.empty-row"]
    assert [e.kind for e in first.events] == ["rule-disabled"]
    assert first.events[0].text.startswith("The rule 'faulty' failed at step 0 and is off: ")
    assert reason in first.events[0].text
    assert (second.events, faulty.n_calls) == ((), 2)


def test_a_rule_that_fails_at_the_start_of_a_generation_is_reported_there() -> None:
    runner = RuleRunner([Faulty("on_generation_start")])
    (event,) = runner.on_generation_start(generation(3))
    assert (event.kind, event.generation, event.step) == ("rule-disabled", 3, None)
    assert "the beginning of generation 3" in event.text
    assert runner.on_step(step(0)).findings == ()


def test_new_findings_are_added_to_those_of_the_step() -> None:
    runner = RuleRunner([Faulty("nowhere")])
    before = Finding("hook.finding", Severity.NOTE, "s")
    assert [f.id for f in runner.on_step(step(0, findings=(before,))).findings] == [
        "hook.finding",
        "faulty.known",
    ]


def test_every_finding_is_declared_with_a_meaning() -> None:
    declared = {**nan_and_inf.NumbersRule.findings, **empty_rows.EmptyRowsRule.findings}
    assert sorted(declared) == ["mask.empty-row", "numbers.inf", "numbers.nan"]
    assert all(kind.meaning for kind in declared.values())


def test_positions_and_rows_in_sentences_are_printable() -> None:
    assert printable("a\nb\x1b[31m") == "a↵b<U+001B>[31m"
    context = RuleContext()
    context.start_generation(generation())
    assert context.format_position(8) == 'position 8 "↵"'
    assert context.format_position(99) == "position 99"
    assert context.format_rows(np.array([5, 6])) == "2 rows of paraphrase 1"
    assert context.format_rows(np.array([5, 9])) == "2 rows of paraphrase 1 and paraphrase 2"
    assert context.format_rows(np.array([5, 8, 9])) == "3 rows of paraphrase 1 and 2 other segments"
    assert context.format_rows(np.array([10_000])) == "1 row of generated"


def test_a_long_generation_keeps_its_prompt_and_its_newest_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rule_context, "MAX_GENERATED_TOKENS", 3)
    context = RuleContext()
    context.start_generation(generation())
    for number in range(1, 10):
        context.add_step(step(number))
    last = max(context._tokens)
    assert sorted(context._tokens) == [*range(context.n_prompt), last - 2, last - 1, last]


# -- NaN and Inf -----------------------------------------------------------------------------------


def test_the_first_layer_with_nan_is_named_once_with_the_later_ones() -> None:
    broken = stats(l2=(3, 0), l3=(48, 0))
    found = run_rule(
        nan_and_inf.NumbersRule(),
        *(step(n, layer_stats=broken, logits=logits(n_nan=9)) for n in range(1, 50)),
    )
    (finding,) = found
    assert (finding.id, finding.severity) == ("numbers.nan", Severity.ERROR)
    assert (finding.step, finding.layer, finding.positions) == (1, 2, (N,))
    assert finding.sentence == (
        f"NaN first appears in the output of layer 2 (model.layers.2), in step 1 at position {N}: "
        "3 values; layer 3 and the logits contain it too."
    )
    assert finding.evidence["carriers"] == [3]


def test_the_token_of_a_decode_row_is_that_of_the_previous_step() -> None:
    found = run_rule(nan_and_inf.NumbersRule(), step(0), step(1, layer_stats=stats(l3=(0, 2))))
    assert found[0].sentence == (
        f"Inf first appears in the output of layer 3 (model.layers.3), in step 1 at position {N} "
        '"w0": 2 values; no later layer of this step contains it.'
    )
    assert found[0].id == "numbers.inf"


def test_nan_that_the_cache_passes_to_later_layers_is_not_reported_again() -> None:
    found = run_rule(
        nan_and_inf.NumbersRule(),
        step(1, layer_stats=stats(l1=(1, 0), l2=(1, 0), l3=(1, 0))),
        step(2, layer_stats=stats(l2=(1, 0), l3=(1, 0))),
        step(3, logits=logits(n_nan=4)),
    )
    assert [(f.step, f.layer) for f in found] == [(1, 1)]


def test_nan_in_an_earlier_layer_at_a_later_step_is_reported() -> None:
    found = run_rule(
        nan_and_inf.NumbersRule(),
        step(1, layer_stats=stats(l2=(1, 1))),
        step(2, layer_stats=stats(l0=(0, 1), l1=(1, 0))),
    )
    assert [(f.step, f.layer, f.id) for f in found] == [
        (1, 2, "numbers.nan"),
        (2, 0, "numbers.inf"),
    ]
    assert "1 NaN and 1 Inf values" in found[0].sentence
    assert found[1].sentence.startswith("Inf now appears in the output of layer 0")
    assert "the input embeddings are not recorded" in found[1].sentence


def test_the_same_fault_is_reported_again_in_a_new_generation() -> None:
    rule = nan_and_inf.NumbersRule()
    broken = step(0, layer_stats=stats(l1=(1, 0)))
    assert len(run_rule(rule, broken)) == len(run_rule(rule, broken)) == 1


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_prompt_rows_are_named_if_the_hidden_states_are_stored(dtype: str | None) -> None:
    hidden = np.ones((N, 6), np.float32)
    hidden[5, 2], hidden[6, 0] = np.nan, np.inf
    if dtype:
        hidden = (hidden.view(np.uint32) >> 16).astype(np.uint16)
    array = ArrayRecord("hidden", hidden, 1, dtype)
    (finding,) = run_rule(
        nan_and_inf.NumbersRule(), step(0, layer_stats=stats(l1=(1, 1)), arrays=(array,))
    )
    assert finding.positions == (5, 6)
    assert 'in step 0 in 2 rows of paraphrase 1 (first: position 5 " is"): ' in finding.sentence


def test_prompt_rows_are_not_named_without_stored_hidden_states() -> None:
    (finding,) = run_rule(nan_and_inf.NumbersRule(), step(0, layer_stats=stats(l1=(1, 0))))
    assert finding.positions == ()
    assert f"in step 0 (somewhere in its {N} rows)" in finding.sentence


def test_nan_only_in_the_logits_comes_from_the_modules_after_the_layers() -> None:
    (finding,) = run_rule(
        nan_and_inf.NumbersRule(), *(step(n, logits=logits(n_nan=2)) for n in range(3))
    )
    assert (finding.id, finding.layer, finding.positions) == ("numbers.nan", None, (N - 1,))
    assert finding.evidence["module"] == "logits"
    assert finding.sentence == (
        "NaN appears in the logits of step 0 (2 values), while every layer's output is finite: "
        "it comes from the final norm or the output head."
    )


def test_nan_in_the_logits_at_a_level_without_layers_names_no_source() -> None:
    record = replace(step(0, logits=logits(n_nan=2)), layer_stats=())
    (finding,) = run_rule(nan_and_inf.NumbersRule(), record)
    assert "its source is not recorded" in finding.sentence


def test_inf_among_the_best_logits_is_an_error() -> None:
    (finding,) = run_rule(nan_and_inf.NumbersRule(), step(1, logits=logits(n_inf=1, best=np.inf)))
    assert (finding.id, finding.severity) == ("numbers.inf", Severity.ERROR)


def test_logits_that_are_inf_in_every_step_make_no_finding() -> None:
    assert (
        run_rule(nan_and_inf.NumbersRule(), *(step(n, logits=logits(n_inf=128)) for n in range(9)))
        == []
    )


def test_logits_that_become_inf_later_are_one_warning() -> None:
    steps = (step(n, logits=logits(n_inf=0 if n < 2 else n)) for n in range(9))
    (finding,) = run_rule(nan_and_inf.NumbersRule(), *steps)
    assert (finding.id, finding.severity, finding.step) == ("numbers.inf", Severity.WARNING, 2)
    assert "2 logits of step 2 are -Inf before any logits processor" in finding.sentence


def test_nan_is_reported_after_inf_logits_were() -> None:
    steps = [step(0), step(1, logits=logits(n_inf=3)), step(2, logits=logits(n_nan=1, n_inf=3))]
    assert [f.id for f in run_rule(nan_and_inf.NumbersRule(), *steps)] == [
        "numbers.inf",
        "numbers.nan",
    ]


# -- rows that see no key --------------------------------------------------------------------------


def test_empty_rows_that_others_read_are_a_warning_with_tokens_and_segments() -> None:
    (finding,) = run_rule(empty_rows.EmptyRowsRule(), step(0, cells=without(5, 6, 9)))
    assert (finding.id, finding.severity) == ("mask.empty-row", Severity.WARNING)
    assert (finding.step, finding.layer, finding.head) == (0, None, None)
    assert finding.positions == (5, 6, 9)
    assert finding.sentence == (
        '3 rows of paraphrase 1 and paraphrase 2 see no key at all (first: position 5 " is"); '
        "FlexAttention gives them zeros (a dense softmax would give NaN), and up to 6 other rows "
        "(first: position 7) read them."
    )
    evidence = dict(finding.evidence)
    assert (evidence["rows"], evidence["empty"], evidence["read"]) == (N, 3, 3)
    assert (evidence["readers"], evidence["layers"]) == (6, [0, 1, 2, 3])


def test_an_empty_row_that_no_row_reads_is_a_note() -> None:
    cells = without(5)
    cells[:, :, 5] = False
    (finding,) = run_rule(empty_rows.EmptyRowsRule(), step(0, cells=cells))
    assert finding.severity is Severity.NOTE
    assert finding.sentence.endswith("and no other row of this step reads it.")


def test_an_empty_row_that_generated_rows_read_becomes_a_warning() -> None:
    cells = without(5, 6)
    cells[:, :, 5:7] = False
    empty_row = np.ones((1, 1, N + 1), np.bool_)
    empty_row[..., 6] = False
    found = run_rule(
        empty_rows.EmptyRowsRule(), step(0, cells=cells), step(1, cells=empty_row), step(2), step(3)
    )
    assert [(f.severity.value, f.step, f.positions) for f in found] == [
        ("note", 0, (5, 6)),
        ("warning", 1, (5,)),
        ("warning", 2, (6,)),
    ]
    assert found[1].sentence == (
        '1 row of paraphrase 1 that saw no key at all (position 5 " is") is read from step 1 on.'
    )


def test_an_empty_newest_row_is_an_error_although_no_row_reads_it() -> None:
    (finding,) = run_rule(empty_rows.EmptyRowsRule(), step(0, cells=without(N - 1)))
    assert finding.severity is Severity.ERROR
    assert finding.sentence == (
        '1 row of cue sees no key at all (position 13 "A"); FlexAttention gives it zeros (a dense '
        "softmax would give NaN), and it is the newest row, which predicts the next token."
    )


def test_empty_decode_rows_are_reported_once() -> None:
    def nothing(n: int) -> np.ndarray[Any, Any]:
        return np.zeros((1, 1, N + n), np.bool_)

    found = run_rule(
        empty_rows.EmptyRowsRule(), step(0), *(step(n, cells=nothing(n)) for n in range(1, 99))
    )
    assert [(f.step, f.positions) for f in found] == [(1, (N,))]
    assert "1 row of generated sees no key" in found[0].sentence


def test_the_masks_of_a_loop_without_a_cache_are_reported_once() -> None:
    def whole(n: int) -> StepRecord:
        cells = without(5, *range(N, N + n), n=N + n)
        shape = {"q_len": N + n, "q_offset": 0}
        return replace(step(n, cells=cells, mask=shape), q_len=N + n, kv_before=0, phase="prefill")

    found = run_rule(empty_rows.EmptyRowsRule(), *(whole(n) for n in range(6)))
    assert [(f.step, f.positions) for f in found] == [(0, (5,)), (1, (N,))]


def test_a_mask_of_an_earlier_generation_is_reported_in_this_one() -> None:
    rule, record = empty_rows.EmptyRowsRule(), step(0, cells=without(5))
    assert len(run_rule(rule, record)) == 1
    (again,) = run_rule(rule, replace(record, masks=(), generation=1), of=generation(1))
    assert (again.generation, again.positions) == (1, (5,))


def test_rows_that_the_declared_mask_leaves_empty_are_a_note_and_others_are_not() -> None:
    spec = mask_presets.preset("segment-isolation", PROMPT.segments, separators="isolated")
    declared = {
        "separators": "isolated",
        "starts": spec.starts,
        "prefix_stops": spec.prefix_stops,
        "local_starts": spec.local_starts,
    }
    cells = spec.dense(N)[None].copy()
    cells[:, 5] = False
    other, meant = run_rule(
        empty_rows.EmptyRowsRule(), step(0, cells=cells), of=generation(declared=declared)
    )
    assert (other.severity, other.positions) == (Severity.WARNING, (5,))
    assert (meant.severity, meant.positions) == (Severity.NOTE, (8, 12))
    assert meant.sentence == (
        '2 rows of separator 1 and separator 2 see no key at all (first: position 8 "↵"), as '
        "--separators isolated requires; FlexAttention gives them zeros (a dense softmax would "
        "give NaN), and 1 other row (position 13) reads them."
    )


def test_a_row_that_should_see_the_first_key_is_not_declared_empty() -> None:
    declared = {
        "starts": (0, 5),
        "prefix_stops": (0, 1),
        "local_starts": (0, mask_presets.UNREACHABLE),
    }
    cells = mask_presets.MaskSpec("m", *declared.values()).dense(N)[None].copy()
    cells[:, 5] = False
    (finding,) = run_rule(
        empty_rows.EmptyRowsRule(), step(0, cells=cells), of=generation(declared=declared)
    )
    assert (finding.positions, finding.evidence["meant"]) == ((5,), False)


def test_declared_empty_rows_stay_a_note_when_generated_rows_read_them() -> None:
    declared = {
        "starts": (0, 5, 6),
        "prefix_stops": (0, 0, 0),
        "local_starts": (0, mask_presets.UNREACHABLE, 6),
    }
    cells = mask_presets.MaskSpec("m", *declared.values()).dense(N)[None]
    found = run_rule(
        empty_rows.EmptyRowsRule(),
        step(0, cells=cells),
        step(1),
        of=generation(declared=declared),
    )
    assert [(f.severity, f.positions) for f in found] == [(Severity.NOTE, (5,))]
    assert ", as the declared mask requires; " in found[0].sentence


def test_a_declared_empty_row_that_is_the_newest_is_a_warning() -> None:
    declared = {
        "starts": (0, N - 1),
        "prefix_stops": (0, 0),
        "local_starts": (0, mask_presets.UNREACHABLE),
    }
    cells = mask_presets.MaskSpec("m", *declared.values()).dense(N)[None]
    (finding,) = run_rule(
        empty_rows.EmptyRowsRule(), step(0, cells=cells), of=generation(declared=declared)
    )
    assert (finding.severity, finding.evidence["newest"]) == (Severity.WARNING, True)


def test_the_presets_leave_no_row_empty() -> None:
    for name in mask_presets.PRESETS:
        cells = mask_presets.preset(name, PROMPT.segments).dense(N)[None]
        assert run_rule(empty_rows.EmptyRowsRule(), step(0, cells=cells)) == []


def test_a_row_that_is_empty_in_one_head_only_names_the_head() -> None:
    cells = np.tril(np.ones((4, N, N), np.bool_))
    cells[2, 5] = False
    (finding,) = run_rule(empty_rows.EmptyRowsRule(), step(0, cells=cells))
    assert (finding.severity, finding.head) == (Severity.WARNING, 2)
    assert "1 row of paraphrase 1 sees no key in head 2 (position 5" in finding.sentence
    cells[1, 6] = False
    (finding,) = run_rule(empty_rows.EmptyRowsRule(), step(0, cells=cells))
    assert "2 rows of paraphrase 1 see no key in up to 2 of 4 heads (first" in finding.sentence
    assert finding.evidence["heads"] == [1, 2]


def test_a_row_that_reads_itself_in_another_head_is_not_its_own_reader() -> None:
    cells = np.tril(np.ones((2, N, N), np.bool_))
    cells[0, 5] = False
    cells[:, :, 5] = False
    cells[1, 5, 5] = True
    (finding,) = run_rule(empty_rows.EmptyRowsRule(), step(0, cells=cells))
    assert finding.evidence["readers"] == 0


def test_layers_are_named_if_not_all_have_the_mask() -> None:
    (one,) = run_rule(empty_rows.EmptyRowsRule(), step(0, cells=without(5), layers=[2]))
    assert (one.layer, "see no key" in one.sentence) == (2, False)
    assert "sees no key at all in layer 2 (position 5" in one.sentence
    (two,) = run_rule(empty_rows.EmptyRowsRule(), step(0, cells=without(5), layers=[0, 2]))
    assert "sees no key at all in 2 of 4 layers (" in two.sentence


@pytest.mark.parametrize(
    ("path", "kind", "text"),
    [
        ("sdpa", "bool", "SDPA gives it zeros"),
        ("sdpa", "float", "it gets zeros, because closed cells are -Inf"),
        ("eager", "float", "it gets NaN, because closed cells are -Inf"),
        ("flex compiled", "block", "FlexAttention gives it zeros"),
        ("other", "bool", "the output of b for it is unknown"),
    ],
)
def test_the_output_of_an_empty_row_depends_on_the_path(path: str, kind: str, text: str) -> None:
    record = step(0, cells=without(5), path=path, mask={"kind": kind})
    assert text in run_rule(empty_rows.EmptyRowsRule(), record)[0].sentence


def averaged(*rows_: int, n: int = N) -> dict[str, Any]:
    """Return the fields of a float mask whose rows are closed by the lowest float throughout."""
    flags = np.zeros((1, n), np.bool_)
    flags[:, rows_] = True
    return {"kind": "float", "uniform_rows": flags, "cells": without(*rows_) | flags[..., None]}


@pytest.mark.parametrize("path", ["eager", "sdpa", "flex uncompiled"])
def test_an_averaged_row_is_empty_and_its_output_is_named(path: str) -> None:
    (finding,) = run_rule(empty_rows.EmptyRowsRule(), step(0, path=path, mask=averaged(5, 6)))
    (closed,) = run_rule(empty_rows.EmptyRowsRule(), step(0, path=path, cells=without(5, 6)))
    assert (finding.severity, finding.positions) == (closed.severity, (5, 6))
    readers = [found.evidence["readers"] for found in (finding, closed)]
    assert readers[0] == readers[1] > 0
    assert (
        "they get the mean of all values, because closed cells are the lowest float"
        in finding.sentence
    )


def test_an_averaged_row_is_not_a_reader() -> None:
    mask = averaged(0, 1, 2)
    mask["cells"][:, 3:, :3] = False  # left padding that no other row sees
    (finding,) = run_rule(empty_rows.EmptyRowsRule(), step(0, path="eager", mask=mask))
    assert (finding.severity, finding.evidence["read"]) == (Severity.NOTE, 0)


def test_averaged_rows_and_closed_rows_are_named_together() -> None:
    mask = averaged(5)
    mask["cells"][:, 6] = False
    (finding,) = run_rule(empty_rows.EmptyRowsRule(), step(0, path="eager", mask=mask))
    assert finding.positions == (5, 6)
    assert (
        "where closed cells are the lowest float, and NaN where they are -Inf" in finding.sentence
    )


def test_rows_of_a_mask_are_positions_of_the_sequence() -> None:
    cells = np.zeros((1, 1, 9), np.bool_)
    window = {"kv_len": 9, "kv_offset": N + 3 - 9}
    found = run_rule(empty_rows.EmptyRowsRule(), step(0), step(3, cells=cells, mask=window))
    assert found[0].positions == (N + 2,)


def test_a_mask_of_one_row_is_broadcast() -> None:
    cells = np.zeros((1, 1, N), np.bool_)
    (finding,) = run_rule(
        empty_rows.EmptyRowsRule(), step(0, cells=cells, mask={"kind": "bool"}, path="sdpa")
    )
    assert finding.positions == tuple(range(N))


def test_without_cells_only_unvisited_blocks_of_a_compiled_call_are_found() -> None:
    tables = {"cells": None, "partial": np.array([[[True], [False]]]), "block_q": 8}
    assert run_rule(empty_rows.EmptyRowsRule(), step(0, mask=tables)) == []
    (finding,) = run_rule(empty_rows.EmptyRowsRule(), step(0, mask={**tables, "compiled": True}))
    assert finding.positions == tuple(range(8, N))
    assert finding.severity is Severity.ERROR
    assert finding.sentence.endswith("whether other rows read them was not recorded.")
    tables["partial"] = np.array([[[False], [True]]])
    (finding,) = run_rule(empty_rows.EmptyRowsRule(), step(0, mask={**tables, "compiled": True}))
    assert (finding.severity, finding.positions) == (Severity.WARNING, tuple(range(8)))


def test_a_long_list_of_positions_is_truncated() -> None:
    segments = (Segment(0, 200, "text", PROMPT.segments[0].kind, 0),)
    cells = without(*range(1, 150), n=200)
    record = replace(step(0, cells=cells, mask={"q_len": 200}), q_len=200, kv_after=200)
    (finding,) = run_rule(
        empty_rows.EmptyRowsRule(), record, of=generation(segments=segments, tokens=())
    )
    assert finding.positions == tuple(range(1, 33))
    assert finding.evidence["empty"] == 149
    assert finding.sentence.startswith("149 rows of text see no key")


def test_masks_are_kept_without_their_cells() -> None:
    (part,) = empty_rows.find_empty_rows(step(0, cells=without(5)).masks[0])
    assert (part.mask.cells, part.mask.partial, part.mask.full) == (None, None, None)
    assert part.rows.tolist() == [5]


@pytest.mark.parametrize("seed", range(8))
def test_empty_rows_and_readers_match_a_slow_count(seed: int) -> None:
    random = np.random.default_rng(seed)
    heads, n_rows, n_keys = random.integers(1, 4), random.integers(1, 600), random.integers(1, 40)
    offset = int(random.integers(-5, 40))
    cells = random.random((heads, n_rows, n_keys)) < 0.05
    mask = MaskRecord("f", "block", 1, int(heads), int(n_rows), int(n_keys), offset, cells=cells)
    empty = ~cells.any(axis=2)
    every = np.flatnonzero(empty.all(axis=0))
    some = np.flatnonzero(empty.any(axis=0) & ~empty.all(axis=0))
    parts = empty_rows.find_empty_rows(mask)
    assert [p.rows.tolist() for p in parts] == [r.tolist() for r in (every, some) if len(r)]
    for part in parts:
        assert part.readers is not None
        for row, readers in zip(part.rows, part.readers, strict=True):
            key = row + offset
            slow = 0
            if 0 <= key < n_keys:
                slow = sum(cells[:, r, key].any() for r in range(n_rows) if r != row)
            assert readers == slow


# -- series, texts of the kind, events, and the context --------------------------------------------


class Repeating(Rule):
    """Returns the same finding in every step, and one for an event and at the end."""

    name: ClassVar[str] = "repeating"
    findings: ClassVar[Mapping[str, FindingKind]] = {
        "repeating.again": FindingKind(
            Severity.WARNING,
            "the same again",
            why="It matters.",
            query="SELECT * FROM calls WHERE generation = {generation} AND layer = {layer}",
        )
    }
    handles_standalone_calls: ClassVar[bool] = True

    def on_step(self, step: StepRecord) -> Sequence[Finding]:
        return [Finding("repeating.again", Severity.WARNING, "s", step=step.step, series="one")]

    def on_event(self, event: EventRecord) -> Sequence[Finding]:
        return [Finding("repeating.again", Severity.WARNING, event.text, layer=2, why="Own text.")]

    def on_generation_end(self) -> Sequence[Finding]:
        return [Finding("repeating.again", Severity.NOTE, self.context.generation.sample_id)]


def test_a_series_is_one_finding_and_later_ones_are_counted() -> None:
    runner = RuleRunner([Repeating()])
    runner.on_generation_start(generation())
    first, second = runner.on_step(step(0)), runner.on_step(step(1))
    assert [(f.id, f.step) for f in first.findings] == [("repeating.again", 0)]
    assert (first.repeats, second.findings) == ((), ())
    assert second.repeats == (Repeat("repeating.again", "one"),)
    runner.on_generation_start(generation(1))
    assert len(runner.on_step(step(0)).findings) == 1


def test_a_finding_takes_the_texts_and_the_query_of_its_kind() -> None:
    runner = RuleRunner([Repeating()])
    runner.on_generation_start(generation())
    (first,) = runner.on_step(step(0)).findings
    assert first.why == "It matters."
    assert first.query == "SELECT * FROM calls WHERE generation = 0 AND layer = layer"
    event = EventRecord("kernel-failed", "It raised.", 0.0, 0)
    (finding,), _, failures = runner.on_record(event)
    assert (finding.sentence, finding.why, failures) == ("It raised.", "Own text.", ())
    assert finding.query.endswith("layer = 2")
    (finding,), _, failures = runner.on_generation_end()
    assert (finding.sentence, failures) == ("s", ())


def test_standalone_calls_are_checked_only_by_rules_that_handle_them() -> None:
    class ModelOnly(Repeating):
        name: ClassVar[str] = "model-only"
        handles_standalone_calls: ClassVar[bool] = False

    runner = RuleRunner([ModelOnly(), Repeating()], is_standalone=True)
    runner.on_generation_start(generation())
    assert runner.names == ("repeating",)
    assert [f.id for f in runner.on_step(step(0)).findings] == ["repeating.again"]


def test_a_context_looks_up_masks_that_it_no_longer_has() -> None:
    mask = step(0).masks[0]
    assert RuleContext().mask(mask.fingerprint) is None
    context = RuleContext({mask.fingerprint: mask}.get)
    assert context.mask(mask.fingerprint) is mask
    assert context.mask(None) is context.mask("other") is None


def test_the_declared_mask_is_the_declared_spec_or_assumed_from_segments() -> None:
    context = RuleContext()
    context.start_generation(generation())
    assert context.declared_mask is not None
    assert (context.declared_mask.spec.name, context.declared_mask.assumed) == (
        "segment-isolation",
        True,
    )
    spec = mask_presets.causal()
    declared = {
        "preset": "causal",
        "starts": spec.starts,
        "prefix_stops": spec.prefix_stops,
        "local_starts": spec.local_starts,
    }
    context.start_generation(generation(declared=declared))
    assert context.declared_mask == DeclaredMask(spec)
    context.start_generation(generation(declared={"mask_mod": "package:function"}))
    assert context.declared_mask is None


def test_rules_that_need_other_records_are_named_but_not_called() -> None:
    def rule(name: str, *needed: str) -> Rule:
        class Counting(Rule):
            findings: ClassVar[Mapping[str, FindingKind]] = {}
            needs: ClassVar[tuple[str, ...]] = needed

            def on_step(self, step: StepRecord) -> tuple[()]:
                called.append(name)
                return ()

        Counting.name = name
        return Counting()

    called: list[str] = []
    rules = [rule("any"), rule("masks", imported.MASKS), rule("memory", imported.MEMORY)]
    runner = RuleRunner(rules, holds=(imported.MEMORY, imported.EVENTS))
    runner.on_generation_start(generation())
    runner.on_step(step(0))
    assert called == ["any", "memory"]
    assert set(runner.names) == {"any", "masks", "memory"}


def test_rules_given_as_a_function_are_made_when_a_record_comes() -> None:
    made: list[Rule] = []

    def make() -> list[Rule]:
        made.append(nan_and_inf.NumbersRule())
        return [*made]

    runner = RuleRunner(make)
    assert made == []
    assert runner.names == ("numbers",)
    assert runner.names == ("numbers",)
    assert len(made) == 1
