"""The rule by which a loop chooses its tokens is read from logits and tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from support.audits import Audit
from support.tiny import ids, make_model
from torch import Tensor

from flexinspect.records.finding import Severity
from flexinspect_hooks.audit.explanations.token_choice import ChosenToken, rule_of

Choose = Callable[[int, Tensor, Tensor], Tensor]
"""Takes step, logits (1, rows, vocabulary) and the text (1, tokens); returns ids (1, 1)."""


def loop(choose: Choose, n: int = 12) -> Callable[[], object]:
    model = make_model("llama")

    def run() -> None:
        rows, past = torch.tensor([ids(10, 3)]), None
        text = rows
        for step in range(n):
            output = model(rows, past_key_values=past, use_cache=True)
            past, rows = output.past_key_values, choose(step, output.logits, text)
            text = torch.cat((text, rows), 1)

    run.model = model  # type: ignore[attr-defined]
    return run


def best(logits: Tensor) -> Tensor:
    return logits[:, -1].argmax(-1, keepdim=True)


def _penalised(step: int, logits: Tensor, text: Tensor) -> Tensor:
    in_text = torch.zeros_like(logits[:, -1]).scatter(1, text, 1.0)
    return (logits[:, -1] + 5 * in_text).argmax(-1, keepdim=True)


_kept: list[Tensor] = []


def _late(step: int, logits: Tensor, text: Tensor) -> Tensor:
    _kept.append(logits)
    return best(_kept[-2] if len(_kept) > 1 else logits)


def _rare(step: int, logits: Tensor, text: Tensor) -> Tensor:
    return logits[:, -1].topk(20, largest=False).indices[:, step % 7][:, None]


CHOICES: dict[str, tuple[Choose, str, Severity]] = {
    "a row too early": (
        lambda step, logits, text: best(logits[:, :-1] if step == 0 else logits),
        "(as logits[:, -2])",
        Severity.WARNING,
    ),
    "one step late": (_late, "logits that are one step old", Severity.WARNING),
    "second best": (
        lambda step, logits, text: logits[:, -1].topk(2).indices[:, 1:],
        "Each of 11 tokens is the second best one",
        Severity.WARNING,
    ),
    "argmin": (
        lambda step, logits, text: logits[:, -1].argmin(-1, keepdim=True),
        "the least likely one",
        Severity.WARNING,
    ),
    "least likely": (_rare, "keeps the wrong end", Severity.WARNING),
    "text preferred": (_penalised, "are preferred", Severity.WARNING),
}


@pytest.mark.parametrize("name", CHOICES)
def test_the_rule_of_the_choices_is_named(audit: Audit, name: str) -> None:
    choose, words, severity = CHOICES[name]
    _kept.clear()
    program = loop(choose)
    _, findings, _ = audit(program.model, program)  # type: ignore[attr-defined]
    assert [(words in one.sentence, one.severity) for one in findings] == [(True, severity)]


def test_few_tokens_that_are_the_second_best_ones_are_a_note_because_samples_may_be(
    audit: Audit,
) -> None:
    program = loop(lambda step, logits, text: logits[:, -1].topk(2).indices[:, 1:], 6)
    _, findings, _ = audit(program.model, program)  # type: ignore[attr-defined]
    assert [one.severity for one in findings] == [Severity.NOTE]
    assert "Each of 5 tokens is the second best one of its step" in findings[0].sentence


@pytest.mark.parametrize("n_kept", [2, 5, 300])
@pytest.mark.parametrize("n", [4, 7])
def test_no_short_sample_is_taken_for_a_rule_that_is_a_fault(n_kept: int, n: int) -> None:
    random = torch.Generator().manual_seed(0)
    found = {str(rule_of(*samples(n, n_kept, random)).get("pattern")) for _ in range(300)}
    assert found <= {"None", "steps", "banned", "avoids-text", "maybe-rank"}


def samples(
    n: int, n_kept: int, random: torch.Generator
) -> tuple[list[ChosenToken], dict[int, set[int]]]:
    """Return n samples of a text that repeats itself, each of the `n_kept` best tokens."""
    topic, text = torch.randn(300, generator=random), list(range(0, 300, 5))
    choices, texts = list[ChosenToken](), dict[int, set[int]]()
    for step in range(n):
        logits = 2 * topic + torch.randn(300, generator=random)
        best = logits.topk(n_kept)
        index = int(torch.multinomial(best.values.softmax(-1), 1, generator=random))
        choices.append(ChosenToken(0, step, len(text) - 1, logits, int(best.indices[index])))
        texts[step] = set(text)
        text.append(choices[-1].token)
    return choices, texts


def test_greedy_choices_are_not_reported(audit: Audit) -> None:
    program = loop(lambda step, logits, text: best(logits))
    _, findings, _ = audit(program.model, program)  # type: ignore[attr-defined]
    assert findings == []


def test_samples_are_a_note_with_their_temperature(audit: Audit) -> None:
    torch.manual_seed(0)

    def sample(step: int, logits: Tensor, text: Tensor) -> Tensor:
        return torch.multinomial((logits[:, -1] / 0.7).softmax(-1), 1)

    program = loop(sample, 40)
    _, findings, _ = audit(program.model, program)  # type: ignore[attr-defined]
    assert [one.severity for one in findings] == [Severity.NOTE]
    assert "like samples with temperature" in findings[0].sentence


def test_a_prompt_end_that_is_fed_again_is_named(audit: Audit) -> None:
    model = make_model("llama")

    def program() -> None:
        text = torch.tensor([ids(10, 3)])
        past = model(text, use_cache=True).past_key_values
        more = torch.cat((text[:, -2:], torch.tensor([ids(3, 8)])), 1)
        model(more, past_key_values=past, use_cache=True)

    _, findings, _ = audit(model, program)
    assert ["begins with the last 2 tokens" in one.sentence for one in findings] == [True]


def test_cache_rows_in_another_order_than_the_tokens_are_named(audit: Audit) -> None:
    model = make_model("llama")

    def program() -> None:
        text = torch.tensor([ids(10, 3), ids(10, 4)])
        output = model(text, use_cache=True)
        chosen = output.logits[:, -1].topk(2).indices.flatten()[:, None]  # of rows 0, 0, 1, 1
        for layer in output.past_key_values.layers:
            layer.keys, layer.values = (
                layer.keys.repeat(2, 1, 1, 1),
                layer.values.repeat(2, 1, 1, 1),
            )
        for _ in range(2):
            output = model(chosen, past_key_values=output.past_key_values, use_cache=True)
            chosen = output.logits[:, -1].argmax(-1, keepdim=True)

    _, findings, _ = audit(model, program)
    assert len(findings) == 1
    assert "row 1 a token of row 0, row 2 a token of row 1" in findings[0].sentence


@pytest.mark.parametrize(
    ("columns", "rank", "is_wrong"),
    [
        ((6, 6), 0, False),
        ((6, 6), 1, False),  # a sample of the right logits
        ((9, 9), 0, True),
        ((9, 6), 0, False),  # a sample: the other row has the right column
    ],
)
def test_the_first_token_of_a_row_that_is_padded_on_the_right_is_judged(
    audit: Audit, columns: tuple[int, int], rank: int, is_wrong: bool
) -> None:
    model = make_model("llama")

    def program() -> None:
        text, mask = torch.tensor([ids(10, n) for n in (3, 4, 5)]), torch.ones(3, 10).long()
        text[1:, 7:], mask[1:, 7:] = 0, 0
        output = model(text, attention_mask=mask, use_cache=True)
        ranked = output.logits[[0, 1, 2], [9, *columns]].argsort(-1, descending=True)
        chosen = ranked[[0, 1, 2], [0, rank, 0]][:, None]
        mask = torch.cat((mask, torch.ones(3, 1, dtype=torch.long)), 1)
        places = torch.tensor([[10], [7], [7]])
        cache = output.past_key_values
        model(chosen, attention_mask=mask, position_ids=places, past_key_values=cache)

    _, findings, _ = audit(model, program)
    assert all("3 columns of padding follow" in one.sentence for one in findings)
    assert [one.severity for one in findings] == ([Severity.WARNING] if is_wrong else [])


def test_one_of_the_best_tokens_that_is_also_the_best_one_after_the_padding_is_a_note(
    audit: Audit,
) -> None:
    model = make_model("llama")
    texts, mask = torch.tensor([ids(10, n) for n in range(1000)]), torch.ones(1000, 10).long()
    texts[:, 7:], mask[:, 7:] = 0, 0
    with torch.no_grad():
        logits = model(texts, attention_mask=mask).logits
    best = logits[:, -1].argmax(-1, keepdim=True)
    rank = (logits[:, 6] > logits[:, 6].gather(1, best)).sum(1)
    row = int((rank == 1).nonzero()[0])

    def program() -> None:
        output = model(texts[[row]], attention_mask=mask[:1], use_cache=True)
        longer = torch.cat((mask[:1], torch.ones(1, 1).long()), 1)
        places, cache = torch.tensor([[7]]), output.past_key_values
        model(best[[row]], attention_mask=longer, position_ids=places, past_key_values=cache)

    _, findings, _ = audit(model, program)
    assert [one.severity for one in findings] == [Severity.NOTE]
    assert "It may be a sample; a greedy loop uses the wrong column" in findings[0].sentence


@pytest.mark.parametrize("is_broken", [True, False])
def test_a_correction_from_the_row_of_a_rejected_proposal_is_named(
    audit: Audit, *, is_broken: bool
) -> None:
    model = make_model("llama")
    draft = copy.deepcopy(model)

    def program() -> None:
        text = torch.tensor([ids(10, 3)])
        past = model(text[:, :-1], use_cache=True).past_key_values
        for turn in range(6):
            fed = text
            for at in range(3):
                ranked = draft(fed).logits[:, -1].topk(2).indices
                fed = torch.cat((fed, ranked[:, [int(at == turn % 3)]]), 1)
            rows = fed[:, text.shape[1] - 1 :]
            chosen = model(rows, past_key_values=past, use_cache=True).logits.argmax(-1)
            n_kept = turn % 3  # of the proposals, the next one is the second best
            past.crop(n_kept - 3)
            newest = chosen[:, -1:] if is_broken else chosen[:, n_kept : n_kept + 1]
            text = torch.cat((text, rows[:, 1 : n_kept + 1], newest), 1)

    _, findings, _ = audit(model, program)
    assert [one.severity for one in findings] == ([Severity.WARNING] if is_broken else [])
    for one in findings:
        assert one.id == "audit.choice"
        assert "the best one of the last row of the forward" in one.sentence


@pytest.mark.parametrize(
    ("sharpness", "severity"), [(1.0, Severity.NOTE), (300.0, Severity.WARNING)]
)
def test_kept_proposals_are_a_warning_only_where_a_sample_would_not_be_as_improbable(
    audit: Audit, sharpness: float, severity: Severity
) -> None:
    model = make_model("llama")
    with torch.no_grad():
        model.lm_head.weight *= sharpness
    draft = copy.deepcopy(model)

    def program() -> None:
        text = torch.tensor([ids(10, 3)])
        output = model(text, use_cache=True)
        past, newest = output.past_key_values, best(output.logits)
        for turn in range(6):
            text, n_kept = torch.cat((text, newest), 1), 3 - turn % 2
            fed = text
            for at in range(3):
                ranked = draft(fed).logits[:, -1].topk(3).indices
                is_second = (turn, at) == (2, 0)  # a proposal that is kept, and not the best one
                is_rejected = at == n_kept
                fed = torch.cat((fed, ranked[:, [2 if is_rejected else int(is_second)]]), 1)
            rows = fed[:, -4:]
            output = model(rows, past_key_values=past, use_cache=True)
            text, newest = fed[:, : len(fed[0]) - 3 + n_kept], output.logits[:, [n_kept]].argmax(-1)
            if n_kept < 3:
                past.crop(n_kept - 3)

    _, findings, _ = audit(model, program)
    assert [one.severity for one in findings] == [severity]
    assert "Proposals of a draft were kept" in findings[0].sentence
    assert ("speculative sampling" in findings[0].sentence) is (severity is Severity.NOTE)
