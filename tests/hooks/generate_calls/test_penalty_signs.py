"""Logits processors that scale scores whatever their sign are found; others are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.planting import of, planted
from support.tiny import ids, make_model
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from flexinspect_hooks.generate_calls.penalty_signs import scaled_whatever_sign

Processor = Callable[[Tensor, Tensor], Tensor]
TEXT = torch.tensor([[3, 5, 7, 9, 11, 13, 3]])
SCORES = torch.linspace(-4.0, 4.0, 24)[
    torch.randperm(24, generator=torch.Generator().manual_seed(1))
]


def divided(tokens: Tensor, scores: Tensor) -> Tensor:
    return scores.scatter(1, tokens, scores.gather(1, tokens) / 1.3)


def divided_logarithms(tokens: Tensor, scores: Tensor) -> Tensor:
    return divided(tokens, scores.log_softmax(-1))


def multiplied(tokens: Tensor, scores: Tensor) -> Tensor:
    return scores.scatter(1, tokens, scores.gather(1, tokens) * 1.2)


def divided_by_count(tokens: Tensor, scores: Tensor) -> Tensor:
    scores = scores.clone()
    for row, one in enumerate(tokens):
        found, counts = one.unique(return_counts=True)
        scores[row, found] /= 1.2**counts
    return scores


@pytest.mark.parametrize(
    ("processor", "factor"),
    [
        (divided, 1 / 1.3),
        (divided_logarithms, 1 / 1.3),
        (multiplied, 1.2),
        (divided_by_count, 1 / 1.2),
    ],
)
def test_scores_that_are_scaled_whatever_their_sign_are_found(
    processor: Processor, factor: float
) -> None:
    found = scaled_whatever_sign(TEXT, SCORES[None], processor(TEXT, SCORES[None]))
    assert found is not None
    assert found.factor == pytest.approx(factor, rel=1e-3)
    assert found.n_negative + found.n_positive == 6
    assert found.n_negative > 0


def by_sign(tokens: Tensor, scores: Tensor) -> Tensor:
    return RepetitionPenaltyLogitsProcessor(1.3)(tokens, scores)


def by_sign_of_logarithms(tokens: Tensor, scores: Tensor) -> Tensor:
    return by_sign(tokens, scores.log_softmax(-1))


def subtracted(tokens: Tensor, scores: Tensor) -> Tensor:
    return scores.scatter_add(1, tokens, torch.full_like(tokens, -0.8, dtype=scores.dtype))


def banned(tokens: Tensor, scores: Tensor) -> Tensor:
    return scores.scatter(1, tokens, float("-inf"))


def colder(tokens: Tensor, scores: Tensor) -> Tensor:
    return scores / 1.3


def only_the_positive(tokens: Tensor, scores: Tensor) -> Tensor:
    return divided(tokens, scores.clamp_min(0.1))


def nothing(tokens: Tensor, scores: Tensor) -> Tensor:
    return scores


@pytest.mark.parametrize(
    "processor",
    [by_sign, by_sign_of_logarithms, subtracted, banned, colder, only_the_positive, nothing],
)
def test_other_changes_of_scores_are_not(processor: Processor) -> None:
    assert scaled_whatever_sign(TEXT, SCORES[None], processor(TEXT, SCORES[None])) is None


def test_positive_scores_alone_show_nothing() -> None:
    scores = SCORES[None] + 10
    assert scaled_whatever_sign(TEXT, scores, divided(TEXT, scores)) is None


def test_a_row_of_a_batch_is_named() -> None:
    tokens, scores = torch.cat([TEXT + 1, TEXT]), torch.cat([SCORES[None], SCORES[None]])
    result = torch.cat([scores[:1], divided(TEXT, scores[1:])])
    found = scaled_whatever_sign(tokens, scores, result)
    assert found is not None
    assert found.row == 1


def test_the_finding_names_the_processor_and_what_became_more_likely(tmp_path: Path) -> None:
    model = make_model("llama")
    prompt = torch.tensor([ids(9, 1)])

    def run() -> None:
        processors = LogitsProcessorList([divided_logarithms])
        model.generate(prompt, max_new_tokens=4, do_sample=False, logits_processor=processors)

    (found,) = of(planted(tmp_path, model, run), "generate.penalty-sign")
    assert "The logits processor divided_logarithms (" in found.sentence
    assert "divides the scores of tokens of the text by 1.3 whatever their sign" in found.sentence
    assert "in batch row 0 of step 0" in found.sentence
    assert found.sentence.endswith("tokens became more likely.")


def test_processors_of_transformers_have_no_finding(tmp_path: Path) -> None:
    model = make_model("llama")
    prompt = torch.tensor([ids(9, 1)])

    def run() -> None:
        bias = SequenceBiasLogitsProcessor([[[5], -2.0]])
        processors = LogitsProcessorList([by_sign, bias])
        model.generate(prompt, max_new_tokens=4, do_sample=False, logits_processor=processors)

    assert not of(planted(tmp_path, model, run), "generate.penalty-sign")
