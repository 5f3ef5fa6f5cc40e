"""Logits processors that judge a row of a batch by another row are found; others are not."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from support.planting import of, planted
from support.tiny import ids, make_model
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from flexinspect_hooks.generate_calls.processor_trials import ProcessorRows

BATCH = torch.tensor([ids(7, 1), (5, 9, 5, 9, 6, 5, 9), (8, 4, 8, 7, 8, 4, 8)])
SEEN: list[int] = []


class Bigrams(LogitsProcessor):
    """Forbids what followed the last token before, in row `row` or in each row itself."""

    def __init__(self, row: int | None) -> None:
        self.row = row

    def table(self, tokens: list[int]) -> dict[int, set[int]]:
        found = defaultdict(set)
        for left, right in itertools.pairwise(tokens):
            found[left].add(right)
        return found

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        rows = input_ids.tolist()
        for number, tokens in enumerate(rows):
            of_row = tokens if self.row is None else rows[self.row]
            scores[number, list(self.table(of_row)[tokens[-1]])] = -math.inf
        return scores


def ban_tokens_of_the_first_row(input_ids: Tensor, scores: Tensor) -> Tensor:
    scores = scores.clone()
    scores[:, input_ids[0]] = -math.inf
    return scores


def ban_own_tokens(input_ids: Tensor, scores: Tensor) -> Tensor:
    return scores.scatter(1, input_ids, -math.inf)


def ban_tokens_of_all_rows(input_ids: Tensor, scores: Tensor) -> Tensor:
    scores = scores.clone()
    scores[:, input_ids.flatten()] = -math.inf
    return scores


def add_noise(input_ids: Tensor, scores: Tensor) -> Tensor:
    return scores + torch.randn_like(scores)


def count_in_a_global(input_ids: Tensor, scores: Tensor) -> Tensor:
    SEEN.append(len(input_ids))
    return ban_tokens_of_the_first_row(input_ids, scores)


def printing(input_ids: Tensor, scores: Tensor) -> Tensor:
    print(len(input_ids))
    return ban_tokens_of_the_first_row(input_ids, scores)


class TableByRow(LogitsProcessor):
    """Bans a token of its own in each row of the batch."""

    def __init__(self) -> None:
        self.banned = [3, 4, 5]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        for row in range(len(scores)):
            scores[row, self.banned[row]] = -math.inf
        return scores


class WithState(LogitsProcessor):
    """Remembers the prompt of the first call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        return ban_tokens_of_the_first_row(input_ids, scores)


def found(processor: Any, n: int = 1) -> list[dict[str, Any]]:
    """Return what is found in calls of a list with one processor."""
    rows, listed = ProcessorRows([processor]), LogitsProcessorList([processor])
    generator = torch.Generator().manual_seed(0)
    with rows.watch():
        for _ in range(n):
            listed(BATCH, torch.randn(3, 300, generator=generator))
    return list(rows.found.values())


@pytest.mark.parametrize(
    ("processor", "source", "rows"),
    [
        (Bigrams(0), 0, [1, 2]),
        (Bigrams(-1), 2, [1]),
        (ban_tokens_of_the_first_row, 0, [1, 2]),
        (lambda i, s: s.index_fill(1, i[0], -math.inf), 0, [1, 2]),
    ],
    ids=["a table of row 0", "a table of the last row", "tokens of row 0", "a lambda"],
)
def test_a_processor_that_reads_another_row_is_found(
    processor: Any, source: int, rows: list[int]
) -> None:
    (one,) = found(processor)
    assert one["source"] == source
    assert set(one["rows"]) <= set(rows)
    assert one["rows"]
    assert "test_processor_trials.py:" in one["place"]


@pytest.mark.parametrize(
    "processor",
    [Bigrams(None), ban_own_tokens, ban_tokens_of_all_rows, add_noise, TableByRow()],
    ids=["a table of each row", "own tokens", "tokens of all rows", "noise", "a table by row"],
)
def test_processors_that_judge_rows_as_they_should_are_left_alone(processor: Any) -> None:
    assert not found(processor, 3)


def test_of_a_processor_with_a_state_a_copy_is_called() -> None:
    processor = WithState()
    (one,) = found(processor, 3)
    assert (one["source"], one["rows"]) == (0, [1, 2])
    assert processor.calls == 3


class MinP(LogitsProcessor):
    """Drops what is less probable than a part of the best token, and counts what stays."""

    def __init__(self, *, by_row: bool) -> None:
        self.by_row = by_row
        self.kept: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        probabilities = scores.softmax(-1)
        best = probabilities.amax(-1, keepdim=True) if self.by_row else probabilities.max()
        drop = probabilities < 0.3 * best
        self.kept.append((~drop).sum(-1))
        return scores.masked_fill(drop, -math.inf)


def test_a_threshold_over_the_whole_batch_is_found() -> None:
    processor = MinP(by_row=False)
    (one,) = found(processor, 2)
    assert one["source"] is None
    assert 0 < len(one["rows"]) < 3  # the row that has the maximum is right
    assert one["kept"] < one["kept_alone"]
    assert len(processor.kept) == 2


def guided(input_ids: Tensor, scores: Tensor) -> Tensor:
    """Moves scores away from those of another row, as guidance does."""
    return scores + 0.5 * (scores - scores.roll(1, 0))


@pytest.mark.parametrize("processor", [MinP(by_row=True), guided], ids=["by row", "guidance"])
def test_a_threshold_of_each_row_and_guidance_are_left_alone(processor: Any) -> None:
    assert not found(processor, 2)


def test_a_function_that_changes_a_global_is_called_once_only() -> None:
    SEEN.clear()
    assert not found(count_in_a_global, 2)
    assert SEEN == [3, 3]


def test_a_function_that_prints_is_called_once_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert not found(printing, 2)
    assert capsys.readouterr().out == "3\n3\n"


def test_random_numbers_are_those_of_a_run_without_the_check() -> None:
    listed, scores = LogitsProcessorList([add_noise]), torch.zeros(3, 300)
    torch.manual_seed(0)
    plain = [listed(BATCH, scores) for _ in range(3)]
    torch.manual_seed(0)
    with ProcessorRows([add_noise]).watch():
        assert all(torch.equal(listed(BATCH, scores), one) for one in plain)


def test_the_list_of_transformers_is_left_as_it_was() -> None:
    before = LogitsProcessorList.__call__
    found(ban_own_tokens)
    assert LogitsProcessorList.__call__ is before


@pytest.mark.parametrize("row", [0, None])
def test_generate_reports_a_processor_that_reads_the_first_row(
    tmp_path: Path, row: int | None
) -> None:
    model = make_model("llama", vocab_size=12)
    batch = BATCH % 12
    processors = LogitsProcessorList([Bigrams(row)])
    run = lambda: model.generate(  # noqa: E731
        batch, max_new_tokens=8, do_sample=False, logits_processor=processors
    )
    findings = of(planted(tmp_path, model, run), "generate.processor-rows")
    if row is None:
        assert not findings
        return
    (one,) = findings
    assert "Bigrams" in one.sentence
    assert "by the ids of batch row 0" in one.sentence
