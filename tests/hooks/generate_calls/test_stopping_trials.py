"""Stopping criteria that end a row for another row's ids are found; others are not."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.planting import of, planted
from support.tiny import make_model
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from flexinspect.records.finding import Severity
from flexinspect_hooks.generate_calls.state_between_calls import ObjectStart
from flexinspect_hooks.generate_calls.stopping_trials import StoppingCalls

N_PROMPT = 3
END = 9
TEXT = torch.tensor([[1, 4, 5, 6, 7, 8, 4], [1, 5, 6, 7, 8, END, 5], [1, 6, 7, 8, 4, 5, END]])
"""Row 1 has its end at step 2, row 2 at step 3, row 0 nowhere."""


def hits(ids: Tensor) -> Tensor:
    return ids[:, -1] == END


class StopOnAny(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full((len(input_ids),), bool(hits(input_ids).any()))


class StopOnSeen(StoppingCriteria):
    """Remembers whether any row has had its end."""

    def __init__(self) -> None:
        self.is_done = False
        self.n_calls = 0

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.n_calls += 1
        self.is_done = self.is_done or bool(hits(input_ids).any())
        return torch.full((len(input_ids),), self.is_done)


class StopRows(StoppingCriteria):
    """Remembers for each row whether it has had its end, in a tensor that it returns."""

    def __init__(self) -> None:
        self.done: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        if self.done is None:
            self.done = torch.zeros(len(input_ids), dtype=torch.bool)
        self.done |= hits(input_ids)
        return self.done


class StopByTable(StoppingCriteria):
    """Has an end for each row."""

    def __init__(self) -> None:
        self.ends = torch.tensor([4, 8, 5])

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids[:, -1] == self.ends


class StopLate(StoppingCriteria):
    def __init__(self) -> None:
        self.until = time.monotonic()

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> bool:
        return time.monotonic() > self.until


def stop_on_row_0(input_ids: Tensor, scores: Any, **kwargs: Any) -> bool:
    return bool(input_ids[0, -1] == 7)


def stop_on_any(input_ids: Tensor, scores: Any, **kwargs: Any) -> bool:
    return bool(hits(input_ids).any())


def stop_on_all(input_ids: Tensor, scores: Any, **kwargs: Any) -> bool:
    return all(END in row[N_PROMPT:] for row in input_ids.tolist())


def stop_rows(input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
    return hits(input_ids)


def stop_at_length(input_ids: Tensor, scores: Any, **kwargs: Any) -> bool:
    return input_ids.shape[1] >= 6


def stop_what_differs(input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
    """Ends rows that no other row agrees with."""
    last = input_ids[:, -1]
    return (last[:, None] == last).sum(1) == 1


def printing(input_ids: Tensor, scores: Any, **kwargs: Any) -> bool:
    print(len(input_ids))
    return stop_on_any(input_ids, scores)


def found(criterion: Any, text: Tensor = TEXT) -> list[dict[str, Any]]:
    """Return what is found where a criterion sees a text step by step."""
    listed = StoppingCriteriaList([criterion])
    calls = StoppingCalls({id(criterion): ObjectStart(criterion)})
    ended = torch.zeros(len(text), dtype=torch.bool)
    with calls.watch():
        for length in range(N_PROMPT + 1, text.shape[1] + 1):
            ended |= listed(text[:, :length], None)
            if ended.all():
                break
    return [one for trials in calls.trials() for one in trials.find()]


@pytest.mark.parametrize(
    ("criterion", "sources", "rows"),
    [
        (StopOnAny(), [1], [0, 2]),
        (StopOnSeen(), [1], [0, 2]),
        (stop_on_any, [1], [0, 2]),
        (stop_on_row_0, [0], [1, 2]),
        (lambda i, s, **k: torch.full((3,), END in i[2]), [2], [0]),
    ],
    ids=["any", "any, remembered", "any, one bool", "row 0", "a lambda of the last row"],
)
def test_rows_that_were_ended_for_another_row_are_found(
    criterion: Any, sources: list[int], rows: list[int]
) -> None:
    (one,) = found(criterion)
    assert (one["sources"], one["rows"], one["is_end"]) == (sources, rows, True)
    assert not one["same_prompt"]
    assert "test_stopping_trials.py:" in one["place"]


def test_rows_that_were_kept_for_another_row_are_found() -> None:
    (one,) = found(stop_on_all)
    assert (one["sources"], one["rows"], one["is_end"]) == ([0, 2], [1, 2], False)


@pytest.mark.parametrize(
    "make",
    [
        *(StopRows, StopByTable, StopLate),
        *(lambda: stop_rows, lambda: stop_at_length, lambda: stop_what_differs),
    ],
    ids=["rows, remembered", "a table by row", "time", "rows", "length", "rows that differ"],
)
def test_criteria_that_judge_rows_as_they_should_are_left_alone(make: Callable[[], Any]) -> None:
    assert not found(make())


def test_a_criterion_of_equal_texts_is_left_alone() -> None:
    # As in an ensemble, whose rows get the same tokens after different prompts.
    text = TEXT.clone()
    text[:, N_PROMPT:] = torch.tensor([4, 5, END, 7])
    assert not found(StopOnAny(), text)
    assert not found(stop_on_row_0, text)


def test_an_end_that_another_criterion_gives_too_is_left_alone() -> None:
    class Both(StoppingCriteriaList):
        pass

    criterion = StopOnAny()
    calls = StoppingCalls({id(criterion): ObjectStart(criterion)})
    listed = Both([criterion, lambda i, s, **k: i.shape[1] >= 6])
    with calls.watch():
        for length in (4, 5, 6):
            listed(TEXT[:, :length], None)
    assert not [one for trials in calls.trials() for one in trials.find()]


def test_the_criterion_of_the_program_is_called_once_a_step_and_keeps_its_state() -> None:
    criterion = StopOnSeen()
    found(criterion)
    assert criterion.n_calls == 3
    assert criterion.is_done


def test_a_criterion_that_prints_is_not_called_again(capsys: pytest.CaptureFixture[str]) -> None:
    listed, calls = StoppingCriteriaList([printing]), StoppingCalls({})
    with calls.watch():
        listed(TEXT[:, :4], None)
    assert not list(calls.trials())
    assert capsys.readouterr().out == "3\n"


def test_the_list_of_transformers_is_left_as_it_was() -> None:
    before = StoppingCriteriaList.__call__
    found(stop_rows)
    assert StoppingCriteriaList.__call__ is before


BATCH = torch.tensor([[1, 3, 5], [1, 9, 2], [1, 7, 7]])


class StopAtTokens(StoppingCriteria):
    def __init__(self, tokens: list[int], *, mixes: bool) -> None:
        self.tokens, self.mixes = torch.tensor(tokens), mixes

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        done = torch.isin(input_ids[:, -1], self.tokens)
        return done.any().expand(len(done)) if self.mixes else done


def generate(tmp_path: Path, batch: Tensor, *, mixes: bool, sample: bool = False) -> Any:
    model = make_model("llama", vocab_size=12)
    free = copy.deepcopy(model)  # the tokens without a criterion
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": sample, "pad_token_id": 0}
    options |= {"temperature": 5.0} if sample else {}
    torch.manual_seed(1)
    text = free.generate(batch, **options)[:, batch.shape[1] :].tolist()
    only = next(t for n, t in enumerate(text[1]) if t not in text[0][: n + 1])
    criteria = StoppingCriteriaList([StopAtTokens([only], mixes=mixes)])

    def run() -> None:
        torch.manual_seed(1)
        model.generate(batch, stopping_criteria=criteria, **options)

    return planted(tmp_path, model, run)


@pytest.mark.parametrize("mixes", [True, False])
def test_generate_reports_a_criterion_that_ends_all_rows(tmp_path: Path, mixes: bool) -> None:
    findings = of(generate(tmp_path, BATCH, mixes=mixes), "generate.stopping-rows")
    assert len(findings) == mixes
    for one in findings:
        assert one.severity is Severity.WARNING
        assert "StopAtTokens" in one.sentence
        assert "because of the ids of batch row 1" in one.sentence


def test_samples_of_one_prompt_that_end_together_are_a_note(tmp_path: Path) -> None:
    findings = generate(tmp_path, BATCH[:1].repeat(3, 1), mixes=True, sample=True)
    (one,) = of(findings, "generate.stopping-rows")
    assert one.severity is Severity.NOTE
