"""Processors and criteria that begin a call with what an earlier one left are found."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.planting import of, planted
from support.tiny import make_model
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria

from flexinspect.records.finding import Finding, Severity

KEPT = "generate.kept-state"
PROMPTS = (torch.tensor([[1, 3, 5]]), torch.tensor([[1, 9, 2, 8, 4]]), torch.tensor([[1, 7]]))
N_NEW = 6


class Budget(LogitsProcessor):
    """Keeps a token away until `budget` tokens are there."""

    def __init__(self, budget: int = 3) -> None:
        self.budget, self.emitted = budget, 0

    def reset(self) -> None:
        self.emitted = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.emitted < self.budget:
            scores[:, 9] = -math.inf
        self.emitted += 1
        return scores


class AfterPrompt(LogitsProcessor):
    """Bans a token at the second place after the prompt, whose length it finds by itself."""

    def __init__(self) -> None:
        self.n_prompt: int | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.n_prompt is None:
            self.n_prompt = input_ids.shape[1]
        if input_ids.shape[1] == self.n_prompt + 1:
            scores[:, 9] = -math.inf
        return scores


class Grammar(LogitsProcessor):
    """Lets even and odd tokens take turns; `state` is a small automaton of its own."""

    def __init__(self) -> None:
        self.state = {"next": "even", "n": 0}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        is_even = self.state["next"] == "even"
        self.state["next"] = "odd" if is_even and self.state["n"] < 2 else "even"
        self.state["n"] += 1
        return scores.index_fill(1, torch.arange(is_even, 12, 2), -math.inf)


class BanSeen(LogitsProcessor):
    """Bans tokens that it has seen last."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.seen.add(int(input_ids[0, -1]))
        return scores.index_fill(1, torch.tensor(sorted(self.seen)), -math.inf)


def closure() -> Callable[[Tensor, Tensor], Tensor]:
    n = 0

    def forbid(input_ids: Tensor, scores: Tensor) -> Tensor:
        nonlocal n
        n += 1
        return scores.index_fill(1, torch.tensor([9]), -math.inf) if n < 3 else scores

    return forbid


class ResetByItself(Budget):
    """Begins anew where the text is shorter than it was."""

    length = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] != self.length + 1:
            self.emitted = 0
        self.length = input_ids.shape[1]
        return super().__call__(input_ids, scores)


class Statistics(LogitsProcessor):
    def __init__(self) -> None:
        self.n, self.entropy, self.cache = 0, [0.0], dict[tuple[int, ...], Tensor]()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.n += 1
        self.entropy.append(float(scores.logsumexp(1)[0]))
        key = tuple(input_ids[0].tolist())
        if key not in self.cache:
            self.cache[key] = scores - 1
        return self.cache[key].clone()


class Noise(LogitsProcessor):
    """Adds noise that is another one in each step."""

    def __init__(self) -> None:
        self.n = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.n += 1
        return scores + torch.randn(12, generator=torch.Generator().manual_seed(self.n))


class NoiseOfGenerator(LogitsProcessor):
    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + torch.randn(12, generator=self.generator)


class StopAfter(StoppingCriteria):
    """Ends after three tokens."""

    def __init__(self) -> None:
        self.n = 0

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> bool:
        self.n += 1
        return self.n >= 3


class StopOnce(StoppingCriteria):
    """Ends rows for good, in a tensor that it makes in its first call."""

    def __init__(self) -> None:
        self.done: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        if self.done is None:
            self.done = torch.zeros(len(input_ids), dtype=torch.bool)
        self.done |= torch.tensor(input_ids.shape[1] >= 8)
        return self.done


class StopOnText(StoppingCriteria):
    """Has a list of what it has seen, and does not use it."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.seen.append(int(input_ids[0, -1]))
        return input_ids[:, -1] == 4


def found(
    tmp_path: Path, called: Any, between: Callable[[Tensor], Tensor | None] = lambda _: None
) -> list[Finding]:
    """Return the findings of calls with one processor or criterion.

    `between` gets the text of a call, and may return the next prompt.
    """
    model = make_model("llama", vocab_size=12)
    is_stop = isinstance(called, StoppingCriteria)
    options = {"stopping_criteria" if is_stop else "logits_processor": [called]}

    def run() -> None:
        following: Tensor | None = None
        for prompt in PROMPTS:
            given = prompt if following is None else following
            text = model.generate(given, max_new_tokens=N_NEW, do_sample=False, **options)
            following = between(text)

    return of(planted(tmp_path, model, run), KEPT)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (Budget, "emitted is 6, and was 0"),
        (AfterPrompt, "n_prompt is 3, and was None"),
        (Grammar, "state is {'next': 'even', 'n': 6}, and was {'next': 'even', 'n': 0}"),
        (closure, "n is 6, and was 0"),
        (StopAfter, "n is 3, and was 0"),
        (StopOnce, "done is [True], and was None"),
    ],
)
def test_state_that_an_earlier_call_left_is_reported(
    tmp_path: Path, make: Callable[[], Any], text: str
) -> None:
    (one,) = found(tmp_path, make())
    assert text in one.sentence
    assert "begins call 2 of generate" in one.sentence
    assert "test_state_between_calls.py:" in one.sentence
    assert one.severity is Severity.WARNING


@pytest.mark.parametrize(
    "make", [ResetByItself, Statistics, NoiseOfGenerator, StopOnText, lambda: Budget(0)]
)
def test_state_that_changes_nothing_is_left_alone(tmp_path: Path, make: Callable[[], Any]) -> None:
    assert not found(tmp_path, make())


def test_a_processor_that_is_reset_between_calls_is_left_alone(tmp_path: Path) -> None:
    budget = Budget()
    assert not found(tmp_path, budget, lambda _: budget.reset())


@pytest.mark.parametrize("make", [BanSeen, Noise], ids=["a memory", "noise of a counter"])
def test_state_that_may_be_meant_is_a_note(tmp_path: Path, make: Callable[[], Any]) -> None:
    (one,) = found(tmp_path, make())
    assert one.severity is Severity.NOTE


def test_a_text_that_goes_on_in_the_next_call_is_a_note(tmp_path: Path) -> None:
    (one,) = found(tmp_path, Budget(), lambda text: text)
    assert one.severity is Severity.NOTE
    assert "The prompt has what that call generated" in one.sentence


def test_the_program_has_the_state_and_the_text_of_a_run_without_the_check(tmp_path: Path) -> None:
    model, texts = make_model("llama", vocab_size=12), list[list[int]]()

    def run() -> int:
        budget = Budget()
        for prompt in PROMPTS:
            text = model.generate(
                prompt, max_new_tokens=N_NEW, do_sample=False, logits_processor=[budget]
            )
            texts.append(text[0].tolist())
        return budget.emitted

    emitted = run()
    states = list[int]()
    planted(tmp_path, model, lambda: states.append(run()))
    assert states == [emitted]
    assert texts[:3] == texts[3:]
