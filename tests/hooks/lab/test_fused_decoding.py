"""Fused decoding of many rules at once, against a plain loop for each without a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support.tiny import VOCAB, ids, make_pieces
from torch import Tensor

from flexinspect.records.prompt import Prompt, PromptTokenIds, compose_prompt
from flexinspect_hooks.generation.decoding import StopCriteria
from flexinspect_hooks.lab.fused_decoding import (
    ForcedRule,
    FusedDecoder,
    FusingRule,
    FusionRule,
    fuse,
)
from flexinspect_hooks.loading.tokenizers import IdTokenizer, Vocabulary

N_NEW = 5
N = 4
WEIGHTS = torch.tensor([0.1, 0.5, 0.3, 0.1])


def prompts() -> list[Prompt]:
    """Prompts of four lengths."""
    pieces = make_pieces(paraphrases=(ids(9, 1), ids(3, 2), ids(14, 3), ids(6, 4)))
    return [
        compose_prompt(
            PromptTokenIds(pieces.bos, pieces.shared, (one,), pieces.separator, pieces.cue),
            max_new_tokens=N_NEW,
        )
        for one in pieces.paraphrases
    ]


def own_logits(model: Any, token_ids: Sequence[int]) -> list[Tensor]:
    """The logits (V,) after each prompt and these tokens, each by a forward of its own."""
    inputs = (torch.tensor([[*prompt.ids, *token_ids]]) for prompt in prompts())
    with torch.no_grad():
        return [model(input_ids=one, use_cache=False).logits[0, -1].float() for one in inputs]


_known: dict[tuple[Any, tuple[int, ...]], list[Tensor]] = {}


def plain(model: Any, choose: Callable[[list[Tensor]], int]) -> list[int]:
    """Choose token by token; equal beginnings are computed once."""
    token_ids: list[int] = []
    while len(token_ids) < N_NEW:
        key = (model, tuple(token_ids))
        if key not in _known:
            _known[key] = own_logits(model, token_ids)
        token_ids.append(choose(_known[key]))
    return token_ids


def references() -> dict[tuple[str, int], Callable[[list[Tensor]], int]]:
    """What each method chooses, written out; the keys are method and number of prompts."""

    def weights(k: int) -> Tensor:
        return WEIGHTS[:k] / WEIGHTS[:k].sum()

    def mean(k: int) -> Callable[[list[Tensor]], int]:
        return lambda logits: int(sum(logits[1:k], logits[0]).argmax())

    def highest(k: int) -> Callable[[list[Tensor]], int]:
        return lambda logits: int(max((p.max(), int(p.argmax())) for p in map(soft, logits[:k]))[1])

    def weighted(k: int) -> Callable[[list[Tensor]], int]:
        return lambda logits: int(
            torch.stack([w * one for w, one in zip(weights(k), logits, strict=False)])
            .sum(0)
            .argmax()
        )

    def leader(k: int) -> Callable[[list[Tensor]], int]:
        return lambda logits: int(logits[int(WEIGHTS[:k].argmax())].argmax())

    made = {"avg": mean, "max": highest, "weighted_avg": weighted, "weighted_max": leader}
    return {(name, k): make(k) for name, make in made.items() for k in (2, N)}


def soft(logits: Tensor) -> Tensor:
    return logits.softmax(-1)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_every_rule_chooses_as_a_loop_of_its_own(
    family: str, family_model: Callable[[str], Any]
) -> None:
    model = family_model(family)
    decoder = FusedDecoder(model, prompts(), StopCriteria(N_NEW))
    alone = [FusionRule("alone", (row,)) for row in range(N)]
    cases = references()
    rules = {key: FusingRule(key[0], range(key[1]), WEIGHTS[: key[1]]) for key in cases}
    later = [key for key in cases if key[0].startswith("weighted")]
    decoder.decode(
        [*alone, *(rule for key, rule in rules.items() if key not in later)], is_last=False
    )
    decoder.decode([rules[key] for key in later])
    for row, rule in enumerate(alone):
        assert rule.token_ids == plain(model, lambda logits, row=row: int(logits[row].argmax()))
    for key, choose in cases.items():
        assert rules[key].token_ids == plain(model, choose), key
    # The random model's paraphrases disagree, so that rules have parted and rows were copied.
    assert len({tuple(rule.token_ids) for rule in (*alone, *rules.values())}) > 4


def test_an_answer_made_elsewhere_is_judged_by_each_prompt(llama: Any) -> None:
    answer = [(7, 0.5), (11, 0.25), (13, 0.125)]
    rule = ForcedRule("flex", range(N), answer)
    FusedDecoder(llama, prompts(), StopCriteria(3)).decode([rule])
    votes = rule.votes(Vocabulary(IdTokenizer(VOCAB)))
    assert [(one.token_id, one.probability, one.text) for one in votes] == [
        (7, 0.5, "⟨7⟩"),
        (11, 0.25, "⟨11⟩"),
        (13, 0.125, "⟨13⟩"),
    ]
    for step, vote in enumerate(votes):
        own = [soft(one) for one in own_logits(llama, [7, 11, 13][:step])]
        for mine, expected in zip(vote.own, own, strict=True):
            assert mine.probability == pytest.approx(float(expected[vote.token_id]), rel=1e-3)
            assert mine.best == f"⟨{int(expected.argmax())}⟩"
            assert mine.best_probability == pytest.approx(float(expected.max()), rel=1e-3)
        assert vote.winner == max(range(N), key=lambda row: float(own[row][vote.token_id]))


def test_the_probability_of_an_answer_is_the_product_over_its_tokens(llama: Any) -> None:
    rule = FusionRule("alone", (2,))
    FusedDecoder(llama, prompts(), StopCriteria(N_NEW)).decode([rule])
    expected = 0.0
    for step, token_id in enumerate(rule.token_ids):
        logits = own_logits(llama, rule.token_ids[:step])[2]
        expected += float(logits.log_softmax(-1)[token_id])
    assert rule.log_probability == pytest.approx(expected, rel=1e-4)


def test_a_rule_that_has_ended_leaves_the_others_to_go_on(llama: Any) -> None:
    first = plain(llama, lambda logits: int(logits[0].argmax()))
    criteria = StopCriteria(N_NEW, eos_ids=(first[2],))
    rules = [FusionRule("alone", (row,)) for row in range(N)]
    FusedDecoder(llama, prompts(), criteria).decode(rules)
    assert (rules[0].token_ids, rules[0].ended) == (first[: first.index(first[2]) + 1], "eos")
    for row, rule in enumerate(rules[1:], start=1):
        whole = plain(llama, lambda logits, row=row: int(logits[row].argmax()))
        stop = whole.index(first[2]) + 1 if first[2] in whole else N_NEW
        assert rule.token_ids == whole[:stop]


def test_fused_distributions_are_distributions() -> None:
    logits = torch.randn(N, 50, generator=torch.Generator().manual_seed(0))
    for method in ("avg", "max", "weighted_avg", "weighted_max"):
        assert float(fuse(method, logits, WEIGHTS).sum()) == pytest.approx(1.0, abs=1e-5)
    # The mean of logits is the normalized geometric mean of the probabilities.
    geometric = logits.softmax(-1).log().mean(0).exp()
    torch.testing.assert_close(fuse("avg", logits), geometric / geometric.sum())
