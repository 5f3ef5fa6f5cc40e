"""The value of an expression for a step: three values, layers, observations, findings, memory."""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from flexinspect.breakpoints.evaluation import (
    Observation,
    StepObservations,
    Unknown,
    describe_unknown,
    evaluate,
    hit_reason,
    observe_step,
)
from flexinspect.breakpoints.grammar import matches_module, parse, to_text
from flexinspect.breakpoints.store import Breakpoint, make_hit
from flexinspect.control.messages import BreakpointInfo
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.step import (
    CallRecord,
    LayerStatRecord,
    LogitsRecord,
    MemoryRecord,
    StepRecord,
    TokenRecord,
)

LOGITS = LogitsRecord(3.5, 0.25, 7, 1, math.log(0.25), 0, 0, -1.0, 1.0, (1,), ())
LEAK = Finding("mask.leak", Severity.ERROR, "Row 7 sees row 3.", step=5, layer=1)


def call(layer: int, path: str = "flex uncompiled", kv_len: int = 20) -> CallRecord:
    return CallRecord(layer, path, "x", None, 1, 4, 2, 1, kv_len, 8, "float32", None, 0.001)


def stats(layer: int, n_nan: int = 0, norm: float = 2.0) -> LayerStatRecord:
    name = f"model.layers.{layer}"
    return LayerStatRecord(layer, name, n_nan, 0, -1.0, 1.0, 0.0, 0.5, norm)


STEP = StepRecord(
    generation=1,
    step=5,
    phase="decode",
    q_len=1,
    kv_before=19,
    kv_after=20,
    started_at=0.0,
    wall_ms=12.0,
    capture_ms=0.1,
    logits=LOGITS,
    tokens=(TokenRecord(20, 7, "▁Paris", " Paris", 20, 0, step=5),),
    calls=(call(0), call(1, "sdpa", 19)),
    layer_stats=(stats(0), stats(1, norm=9.0)),
    memory=MemoryRecord(3 << 30, 1 << 20, 2 << 20),
    findings=(LEAK,),
)

HOLDS = (
    "entropy > 3 and step > 2",
    'token == " Paris"',
    '"aris" in token and token_id in (6, 7)',
    "0.2 < prob < 0.3",
    "rank == 1 and margin <= 0.25 and logprob < -1",
    'phase == "decode" and generation == 1 and branch == 0',
    "q_len == 1 and kv_len == 20 and wall_ms > 10",
    "rss >= 3 GiB and kv_cache < 3 MB and kv_cache > 2000000",
    "finding mask.* and finding mask.leak == error and finding * > note",
    "not nan and not inf",
    'path == "sdpa"',
    'path == "sdpa" and layer == 1',
    'path == "sdpa" and kv_len == 19',
    "norm > 8 and layer > 0",
    "finding mask.* and layer == 1",
    "step not in (1, 2)",
)
FAILS = (
    "entropy > 3 and step > 5",
    'token == "Paris"',
    "finding text.*",
    "finding mask.* <= warning",
    "finding mask.* and layer == 0",
    'path == "sdpa" and layer == 0',
    "norm > 8 and layer == 0",
    "nan and step == 5",
    "max > 1",
)


@pytest.mark.parametrize("text", HOLDS)
def test_it_holds(text: str) -> None:
    assert evaluate(parse(text), observe_step(STEP)).holds is True


@pytest.mark.parametrize("text", FAILS)
def test_it_does_not_hold(text: str) -> None:
    assert evaluate(parse(text), observe_step(STEP)).holds is False


def test_a_value_that_was_not_recorded_is_unknown() -> None:
    basic = replace(STEP, layer_stats=(), memory=None, logits=None, tokens=())
    for text, missing in {
        "entropy > 3": ("entropy",),
        "token == 'a' or prob > 1": ("token", "prob"),
        "rss > 1": ("rss",),
        "norm > 1": ("norm",),
        "nan": ("nan",),
        "empty-row": ("empty-row",),
        "nan @ layers.*.self_attn": ("nan @ layers.*.self_attn",),
        "not fallback": ("fallback",),
        "cuda_peak > 1": ("cuda_peak",),
    }.items():
        assert evaluate(parse(text), observe_step(basic)).holds == Unknown(missing)


def test_an_unknown_matters_only_where_it_decides() -> None:
    facts = StepObservations({"step": 5})
    assert evaluate(parse("entropy > 3 and step > 9"), facts).holds is False
    assert evaluate(parse("entropy > 3 or step == 5"), facts).holds is True
    assert evaluate(parse("entropy > 3 and step == 5"), facts).holds == Unknown(("entropy",))
    assert not evaluate(parse("entropy > 3"), facts).holds


def test_an_unobserved_choice_is_unknown() -> None:
    unseen = replace(LOGITS, chosen_id=-1, chosen_rank=-1, chosen_logprob=math.nan)
    facts = observe_step(replace(STEP, logits=unseen, tokens=()))
    assert evaluate(parse("rank > 0"), facts).holds == Unknown(("rank",))
    assert evaluate(parse("prob < 0.1"), facts).holds == Unknown(("prob",))
    assert evaluate(parse("entropy > 3"), facts).holds is True


def test_a_nan_in_a_layers_record_is_reported_with_its_location() -> None:
    facts = observe_step(replace(STEP, layer_stats=(stats(0), stats(1, n_nan=3))))
    verdict = evaluate(parse("nan"), facts)
    assert verdict.holds is True
    reason = hit_reason(parse("nan"), facts, verdict)
    assert reason == (
        'nan: step 5 (decode) of generation 1: 3 NaN values in model.layers.1; token " Paris"'
    )
    assert evaluate(parse("nan and layer == 0"), facts).holds is False
    assert evaluate(parse("nan @ layers.1"), facts).holds is True


def test_checked_modules_without_an_observation_are_false() -> None:
    text = "nan @ layers.*.self_attn"
    facts = observe_step(STEP, checked=[text])
    assert evaluate(parse(text), facts).holds is False
    seen = Observation("nan", "model.layers.2.self_attn", 2, "a NaN in model.layers.2.self_attn")
    assert evaluate(parse(text), observe_step(STEP, observed=[seen])).holds is True
    assert evaluate(
        parse("nan @ layers.*.mlp"), observe_step(STEP, observed=[seen])
    ).holds == Unknown(("nan @ layers.*.mlp",))


def test_modules_match_by_the_last_parts_of_their_names() -> None:
    name = "model.layers.11.self_attn"
    for pattern in ("layers.*.self_attn", "model.**", "self_attn", "layers.1?.*", "**.self_attn"):
        assert matches_module(pattern, name)
    for pattern in ("layers.*", "model.*", "layers.?.self_attn", "elf_attn", "layers.[2-9].*"):
        assert not matches_module(pattern, name)


def test_more_than_two_stars_match_as_two() -> None:
    name = "model.layers.11.self_attn"
    started = time.thread_time()
    assert matches_module("*" * 400 + "attn", name)
    assert not matches_module("*" * 400 + "mlp", name * 3)
    assert time.thread_time() - started < 1.0


@given(st.text(max_size=20), st.text(max_size=20))
def test_any_pattern_matches_or_does_not(pattern: str, name: str) -> None:
    assert matches_module(pattern, name) in (True, False)


def test_the_reason_names_place_values_and_token() -> None:
    def reason_of(text: str) -> str:
        return hit_reason(
            parse(text), observe_step(STEP), evaluate(parse(text), observe_step(STEP))
        )

    where = "step 5 (decode) of generation 1"
    assert reason_of("entropy > 3 and step > 2") == (
        f'entropy > 3 and step > 2: {where}: entropy 3.5; token " Paris"'
    )
    assert reason_of('path == "sdpa"').startswith(
        f'path == "sdpa": {where}, layer 1: path "sdpa"; token'
    )
    assert reason_of("finding mask.*").endswith(
        f'{where}: mask.leak: Row 7 sees row 3; token " Paris"'
    )
    assert "kv_cache 2.0 MiB" in reason_of("kv_cache > 1 MiB")


def test_an_unknown_result_is_reported_with_the_step() -> None:
    sentence = describe_unknown("rss > 1", Unknown(("rss",)), observe_step(STEP))
    assert "rss > 1 could not be evaluated in step 5 (decode) of generation 1: rss is" in sentence


@pytest.mark.parametrize(
    ("text", "layer"),
    [("entropy > 3", None), ("entropy > 3 and nan @ *.mlp", 2), ("nan or empty-row", 0)],
)
def test_a_hit_names_the_layer_of_its_observation(text: str, layer: int | None) -> None:
    seen = (Observation("empty-row", "", 0, "a row"), Observation("nan", "a.mlp", 2, "a NaN"))
    facts, expression = observe_step(STEP, observed=seen), parse(text)
    verdict = evaluate(expression, facts)
    assert verdict.holds is True
    assert (
        make_hit(
            Breakpoint(BreakpointInfo(1, to_text(expression)), expression),
            facts,
            verdict,
            in_forward=False,
        ).layer
        == layer
    )
