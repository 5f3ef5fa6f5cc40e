"""Faults in generated text, planted in the trained demo model and in random models."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from support.paths import DEMO
from support.planting import of, one, planted, serious
from support.tiny import ids, make_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from flexinspect.records.finding import Finding, Severity
from flexinspect.records.prompt import Segment, SegmentKind
from flexinspect.records.step import (
    CallRecord,
    Candidate,
    EventRecord,
    GenerationRecord,
    LogitsRecord,
    StepRecord,
    TokenRecord,
    forced_tokens,
)
from flexinspect.rules.context import RuleContext
from flexinspect.rules.engine import Rule, RuleRunner
from flexinspect.rules.text.chosen_tokens import TextRule, TokenChoiceRule

TOKENIZER = AutoTokenizer.from_pretrained(DEMO)
EOS = 2
Change = Callable[[int, Tensor], Tensor]
"""(number of the forward, the newest row's logits) to the logits that are given on."""


def demo() -> Any:
    return AutoModelForCausalLM.from_pretrained(DEMO).eval().requires_grad_(False)


def unchanged(n: int, row: Tensor) -> Tensor:
    return row


def run(
    tmp_path: Path,
    change: Change = unchanged,
    *,
    model: Any = None,
    n: int = 24,
    pick: Callable[[int, Tensor], Tensor] = lambda n, row: row.argmax(-1),
    **watch: Any,
) -> list[Finding]:
    """Generate in a user loop with a cache, over changed logits."""
    model = demo() if model is None else model
    calls: list[int] = []

    def hook(module: Any, args: Any, out: Tensor) -> Tensor:
        out = out.clone()
        out[:, -1] = change(len(calls), out[:, -1])
        calls.append(1)
        return out

    head = model.get_output_embeddings()
    handle = head.register_forward_hook(hook)
    prompt = TOKENIZER("What is the capital of France?\nAnswer:", return_tensors="pt").input_ids
    input_ids = prompt if model.config.vocab_size > 1000 else torch.tensor([ids(14, 3)])

    def loop() -> None:
        cache, now = DynamicCache(config=model.config), input_ids
        for step in range(
            n + 1
        ):  # the token of the last step is never an input, so it is not known
            row = model(now, past_key_values=cache).logits[:, -1]
            now = pick(step, row)[:, None]

    found = planted(tmp_path, model, loop, tokenizer=TOKENIZER, **watch)
    handle.remove()
    return found


def cycle(*period: int, after: int = 3, sure: float = 60.0) -> Change:
    """Make a model repeat the same tokens after its first few."""

    def change(n: int, row: Tensor) -> Tensor:
        if n >= after:
            row[:, period[(n - after) % len(period)]] += sure
        return row

    return change


# -- loops -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("period", [(300,), (300, 301), (310, 300, 305, 700)], ids=len)
def test_a_trained_model_in_a_loop_is_a_warning_with_its_words(
    period: tuple[int, ...], tmp_path: Path
) -> None:
    finding = one(run(tmp_path, cycle(*period)), "text.repetition")
    assert (finding.severity, finding.step) == (Severity.WARNING, 14)
    assert finding.evidence["period"] == len(period)
    assert (finding.evidence["begins"], finding.evidence["tokens"]) == (3, 12)
    last = period[-(12 % len(period)) :] + period[: -(12 % len(period))]
    repeated = TOKENIZER.decode(last if 12 % len(period) else period).strip()
    what = "1 token" if len(period) == 1 else f"the same {len(period)} tokens"
    assert f'The text repeats {what}, "{repeated}", {12 // len(period)} times' in finding.sentence
    assert "the loop begins at step 3" in finding.sentence
    assert len(finding.positions) == len(period)


def test_a_loop_of_eight_tokens_needs_three_periods(tmp_path: Path) -> None:
    period = tuple(range(300, 308))
    assert of(run(tmp_path, cycle(*period), n=26), "text.repetition") == []
    found = run(tmp_path, cycle(*period), n=28, name="longer")
    assert one(found, "text.repetition").evidence["tokens"] == 24


def test_a_loop_that_ends_and_begins_again_is_reported_again(tmp_path: Path) -> None:
    first, second = cycle(300), cycle(301, 302)

    def change(n: int, row: Tensor) -> Tensor:
        return first(n, row) if n < 18 else second(n, row)

    found = of(run(tmp_path, change, n=40), "text.repetition")
    assert [finding.evidence["period"] for finding in found] == [1, 2]


def test_a_loop_is_found_at_level_basic_as_well(tmp_path: Path) -> None:
    found = run(tmp_path, cycle(2100, 300), level="basic")
    assert one(found, "text.repetition").severity is Severity.WARNING


@pytest.mark.parametrize("family", ["gemma2", "llama"])
def test_a_random_model_that_loops_is_a_note(family: str, tmp_path: Path) -> None:
    """Gemma 2 repeats without a change: its input and output embeddings are tied."""
    found = run(tmp_path, cycle(30) if family == "llama" else unchanged, model=make_model(family))
    assert one(found, "text.repetition").severity is Severity.NOTE
    assert not [finding for finding in serious(found) if finding.id.startswith("text.")]


def test_an_untrained_model_that_copies_its_input_is_a_note(tmp_path: Path) -> None:
    found = run(tmp_path, cycle(300, after=0))
    finding = one(found, "text.repetition")
    assert (finding.severity, finding.evidence["begins"]) == (Severity.NOTE, 0)


def test_a_loop_that_the_model_is_not_sure_of_is_a_note(tmp_path: Path) -> None:
    def even(n: int, row: Tensor) -> Tensor:
        row[:, 300:303] = row.max() + torch.tensor([8.1, 8.0, 8.0])
        return row

    assert one(run(tmp_path, even), "text.repetition").severity is Severity.NOTE


def test_padding_after_the_end_is_no_loop(tmp_path: Path) -> None:
    def padded(n: int, row: Tensor) -> Tensor:
        return torch.full_like(row.argmax(-1), 0) if n > 2 else row.argmax(-1)

    assert of(run(tmp_path, pick=padded), "text.repetition") == []


def test_text_that_nan_chose_is_no_text(tmp_path: Path) -> None:
    found = run(tmp_path, lambda n, row: row * torch.nan)
    assert {finding.id for finding in found} == {"numbers.nan"}


# -- distributions ---------------------------------------------------------------------------------


def test_logits_that_become_flat_are_a_warning(tmp_path: Path) -> None:
    found = run(tmp_path, lambda n, row: row if n < 6 else row * 1e-3, n=14)
    finding = one(found, "text.flat")
    assert (finding.severity, finding.step, finding.times) == (Severity.WARNING, 9, 6)
    assert "entropy 7.85 of at most 7.85 nats over 2560 tokens, after 6 steps" in finding.sentence


def test_logits_that_are_flat_from_the_start_are_a_note(tmp_path: Path) -> None:
    model = make_model("qwen2", initializer_range=0.02)
    found = run(tmp_path, model=model)
    finding = one(found, "text.flat")
    assert (finding.severity, finding.step) == (Severity.NOTE, 3)
    assert finding.sentence.endswith("over 300 tokens, from the beginning on.")
    assert of(found, "text.repetition") == []


def test_a_model_that_is_certain_of_everything_is_a_note(tmp_path: Path) -> None:
    found = run(tmp_path, lambda n, row: row * 1e3, model=make_model("llama"), n=20)
    finding = one(found, "text.entropy-collapse")
    assert (finding.severity, finding.step) == (Severity.NOTE, 15)
    assert finding.sentence.startswith("For 16 steps up to step 15, one token has all the prob")


# -- the first token -------------------------------------------------------------------------------


def generate(tmp_path: Path, change: Change, **options: Any) -> list[Finding]:
    model = demo()
    calls: list[int] = []

    def hook(module: Any, args: Any, out: Tensor) -> Tensor:
        out = out.clone()
        out[:, -1] = change(len(calls), out[:, -1])
        calls.append(1)
        return out

    handle = model.lm_head.register_forward_hook(hook)
    inputs = TOKENIZER("What is the capital of France?\nAnswer:", return_tensors="pt")
    given = {"max_new_tokens": 6, "do_sample": False, **options}
    found = planted(tmp_path, model, lambda: model.generate(**inputs, **given), tokenizer=TOKENIZER)
    handle.remove()
    return found


def end(by: float) -> Change:
    def change(n: int, row: Tensor) -> Tensor:
        row[:, EOS] = row.max() + by
        return row

    return change


def test_an_answer_that_ends_at_once_is_a_warning(tmp_path: Path) -> None:
    finding = one(generate(tmp_path, end(9.0)), "text.stopped-at-once")
    assert (finding.severity, finding.step) == (Severity.WARNING, 0)
    assert finding.sentence == (
        'The first token chosen is "<eos>" (probability 1): the answer is empty.'
    )


def test_an_end_that_was_nearly_tied_with_another_token_is_a_note(tmp_path: Path) -> None:
    finding = one(generate(tmp_path, end(0.001)), "text.stopped-at-once")
    assert finding.severity is Severity.NOTE


@pytest.mark.parametrize(("n_given", "found"), [(0, ["text.stopped-at-once"]), (2, [])])
def test_a_branch_that_began_with_part_of_an_answer_is_not_empty(
    n_given: int, found: list[str]
) -> None:
    pos = 5 + n_given
    token = TokenRecord(pos, EOS, "<eos>", "", pos, 1, step=n_given, special=True)
    ends = StepRecord(0, n_given, "prefill", pos, 0, pos, 0.0, 1.0, 0.1, tokens=(token,))
    segments = (
        Segment(0, 5, "cue", SegmentKind.CUE, 0),
        Segment(5, 20, "generated", SegmentKind.GENERATED, 1),
    )
    context, rule = RuleContext(), TextRule()
    context.start_generation(GenerationRecord(0, "s", "m", "contiguous", segments, ()))
    rule.on_generation_start(context)
    assert not [*rule.on_step(ends)]
    assert [finding.id for finding in rule.on_generation_end()] == found


def test_an_answer_that_ends_later_is_no_finding(tmp_path: Path) -> None:
    found = generate(tmp_path, lambda n, row: end(9.0)(n, row) if n else row)
    assert of(found, "text.stopped-at-once") == []


# -- ties, and tokens that were not the best -------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_tokens_that_are_equally_good_are_a_near_tie(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    def tie(n: int, row: Tensor) -> Tensor:
        if n == 1:
            row[:, 400:402] = row.max() + 3
        return row

    finding = one(run(tmp_path, tie, model=demo().to(dtype), n=8), "text.near-tie")
    assert (finding.severity, finding.step, finding.evidence["margin"]) == (Severity.NOTE, 1, 0.0)
    assert f"{str(dtype).removeprefix('torch.')} has steps of" in finding.sentence


def test_a_narrow_margin_in_float32_is_none(tmp_path: Path) -> None:
    def close(n: int, row: Tensor) -> Tensor:
        row[:, 400:402] = row.max() + torch.tensor([3.001, 3.0])
        return row

    assert of(run(tmp_path, close, n=8), "text.near-tie") == []


def test_a_token_from_an_older_row_is_not_the_best(tmp_path: Path) -> None:
    def second_at_nine(n: int, row: Tensor) -> Tensor:
        return row.topk(2).indices[:, 1] if n == 9 else row.argmax(-1)

    found = run(tmp_path, model=make_model("llama"), pick=second_at_nine)
    finding = one(found, "text.not-the-best")
    assert (finding.severity, finding.step, finding.evidence["rank"]) == (Severity.NOTE, 9, 1)
    assert "while 23 of 24 chosen tokens are the best" in finding.sentence
    assert "unless a logits processor that was not recorded changed the scores" in finding.sentence


def test_sampling_is_distinguished_from_greedy_decoding(tmp_path: Path) -> None:
    torch.manual_seed(0)

    def drawn(n: int, row: Tensor) -> Tensor:
        return torch.multinomial(row.softmax(-1), 1)[:, 0]

    assert of(run(tmp_path, pick=drawn), "text.not-the-best") == []


# -- from records: what the run's own generation would have to do ----------------------------------


def step(n: int, rank: int = 0, margin: float = 1.0, score: float | None = None) -> StepRecord:
    heights = [9.0, 9.0 - margin, *(8.0 - margin - r for r in range(3))]
    ranked = tuple(
        Candidate(r, 10 + r, f"t{r}", height, -0.5 - r, height, -0.5 - r)
        for r, height in enumerate(heights)
    )
    if score is not None:
        ranked = tuple(replace(one, score=one.logit / score) for one in ranked)
    logits = LogitsRecord(1.0, margin, 10 + rank, rank, -0.5 - rank, 0, 0, 0.0, 9.0, (), ranked)
    call = CallRecord(0, "sdpa", "b", None, 1, 1, 1, 1, 9 + n, 4, "bfloat16", None)
    token = TokenRecord(9 + n, 10 + rank, "w", "w", 9 + n, 0, step=n)
    place = (0, n, "decode", 1, 8 + n, 9 + n, 0.0, 1.0, 0.1)
    return StepRecord(*place, logits=logits, tokens=(token,), calls=(call,))


def look(rule: Rule, steps: Sequence[StepRecord]) -> list[Finding]:
    context = RuleContext()
    context.start_generation(GenerationRecord(0, "s", "m", "contiguous", (), ()))
    rule.on_generation_start(context)
    found: list[Finding] = []
    for record in steps:
        context.add_step(record)
        found += rule.on_step(record)
    return [*found, *rule.on_generation_end()]


@pytest.mark.parametrize("is_known", [True, False])
def test_a_token_that_the_user_chose_for_a_branch_is_no_choice_of_the_decoding(
    is_known: bool,
) -> None:
    forced = forced_tokens(1, 20, {"kind": "token", "token_id": 12})
    assert forced == {(1, 20)}
    runner = RuleRunner([TokenChoiceRule()]).for_branch(1, forced if is_known else ())
    runner.on_generation_start(GenerationRecord(0, "s", "m", "contiguous", (), ()))
    for n in range(40):
        runner.on_step(replace(step(n, rank=2 if n == 20 else 0), branch=1))
    found = [one.id for one in runner.on_generation_end().findings]
    assert found == ([] if is_known else ["text.not-the-best"])


@pytest.mark.parametrize("asked", [{}, {"bad_words_ids": [[10]]}])
def test_a_call_that_asks_for_other_logits_has_no_note_on_a_token_that_is_not_the_best(
    asked: dict[str, Any],
) -> None:
    data = {"options": {}, "passed": [], "has_mask": False, "asked": asked}
    event = EventRecord("generate", "", 0.0, 0, 0, data)
    steps = [without_scores(step(n, rank=2 if n == 20 else 0)) for n in range(40)]
    steps[0] = replace(steps[0], events=(event,))
    found = [one.id for one in look(TokenChoiceRule(), steps)]
    assert found == ([] if asked else ["text.not-the-best"])


def without_scores(record: StepRecord) -> StepRecord:
    assert record.logits is not None
    nan = math.nan
    ranked = tuple(replace(c, score=nan, score_logprob=nan) for c in record.logits.candidates)
    return replace(record, logits=replace(record.logits, candidates=ranked))


def test_several_tokens_of_a_fork_and_no_other_changes_are_the_users() -> None:
    assert forced_tokens(2, 5, {"kind": "token", "token_ids": [7, 8]}) == {(2, 5), (2, 6)}
    assert forced_tokens(2, 5, {"kind": "mask"}) == set()
    assert forced_tokens(0, None, {}) == set()


def test_a_greedy_run_whose_scores_are_known_does_not_take_the_second(tmp_path: Path) -> None:
    steps = [step(n, rank=2 if n == 20 else 0) for n in range(40)]
    (finding,) = look(TokenChoiceRule(), steps)
    assert (finding.id, finding.severity, finding.step) == (
        "text.not-the-best",
        Severity.WARNING,
        20,
    )
    assert 'Step 20 chose "w" (rank 2, probability 0.082) over the best token "t0"' in (
        finding.sentence
    )


def test_a_few_steps_do_not_show_how_tokens_are_chosen() -> None:
    assert look(TokenChoiceRule(), [step(n, rank=int(n == 5)) for n in range(7)]) == []


def test_ties_are_not_reported_where_tokens_are_sampled_at_a_temperature() -> None:
    assert len(look(TokenChoiceRule(), [step(0, margin=0.0)])) == 1
    assert look(TokenChoiceRule(), [step(0, margin=0.0, score=0.7)]) == []


def test_text_rules_report_nothing_for_steps_without_tokens_or_logits() -> None:
    bare = [replace(step(n), logits=None, tokens=(), calls=()) for n in range(30)]
    assert look(TextRule(), bare) == look(TokenChoiceRule(), bare) == []
