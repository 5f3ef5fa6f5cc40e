"""An EOS that a tokenizer added to each piece, and pieces in another order than declared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from support.paths import DEMO
from support.planting import of, one, planted
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from flexinspect.records.finding import Finding, Severity

QUESTIONS = ["What is the capital of Kenya?", "Name the capital of Kenya.", "Kenya's capital?"]
CUE = "Answer:"
Look = Callable[..., list[Finding]]


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(DEMO).eval().requires_grad_(False)


@pytest.fixture
def tokenizer() -> Any:
    """Return a tokenizer that puts a BOS before every text and an EOS after it."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)]
    )
    return tokenizer


@pytest.fixture
def look(model: Any, tokenizer: Any, tmp_path: Path) -> Look:
    """Return what is found in one forward of ids."""
    numbers = count()

    def look(input_ids: Sequence[int], segments: Sequence[Any] | None) -> list[Finding]:
        run = lambda: model(torch.tensor([list(input_ids)]))  # noqa: E731
        options = {"tokenizer": tokenizer, "segments": segments}
        return planted(tmp_path, model, run, name=f"look{next(numbers)}", **options)

    return look


def joined(tokenizer: Any, texts: Sequence[str], **options: Any) -> list[int]:
    return [n for text in texts for n in tokenizer.encode(text, **options)]


def test_an_eos_after_each_piece_is_found_where_the_tokenizer_adds_it(
    look: Look, tokenizer: Any
) -> None:
    cue = tokenizer.encode(CUE, add_special_tokens=False)
    input_ids = [*joined(tokenizer, QUESTIONS), *cue]
    ends = tuple(at for at, n in enumerate(input_ids) if n == 2)
    finding = one(look(input_ids, QUESTIONS), "segments.eos-inside")
    assert (finding.severity, finding.positions, len(ends)) == (Severity.WARNING, ends, 3)
    assert finding.sentence.startswith(
        "The prompt contains 3 EOS tokens (id 2) at the end of a declared piece, first at position "
        f'{ends[0]} "<eos>": the tokenizer adds one to every text'
    )
    starts = [0, *(end + 1 for end in ends)]
    spans = [(a + 1, b + 1, f"question {n}") for n, (a, b) in enumerate(zip(starts, ends))]  # noqa: B905
    assert one(look(input_ids, spans), "segments.eos-inside").positions == ends
    plain = [1, *joined(tokenizer, QUESTIONS, add_special_tokens=False), *cue]
    assert of(look(plain, QUESTIONS), "segments.eos-inside") == []


def test_an_eos_that_may_be_meant_is_a_note(look: Look, tokenizer: Any) -> None:
    input_ids = joined(tokenizer, QUESTIONS)
    assert one(look(input_ids, QUESTIONS), "segments.eos-inside").severity is Severity.NOTE
    assert one(look(input_ids, None), "segments.eos-inside").severity is Severity.NOTE
    padded = [2, 2, 2, *tokenizer.encode(QUESTIONS[0]), 2, 2]
    assert of(look(padded, QUESTIONS[:1]), "segments.eos-inside") == []


@pytest.mark.parametrize("template", ["{{ content }}{{ eos_token }}", "{{ content }}<eos>"])
def test_an_eos_that_ends_turns_of_a_template_is_not_reported(
    template: str, look: Look, tokenizer: Any
) -> None:
    tokenizer.chat_template = template
    input_ids = [*joined(tokenizer, QUESTIONS), *tokenizer.encode(CUE, add_special_tokens=False)]
    assert of(look(input_ids, QUESTIONS), "segments.eos-inside") == []


def test_an_eos_of_a_tokenizer_that_adds_none_is_not_reported(
    model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    input_ids = torch.tensor([[*joined(tokenizer, QUESTIONS), 10, 11]])
    options = {"tokenizer": AutoTokenizer.from_pretrained(DEMO), "segments": QUESTIONS}
    found = planted(tmp_path, model, lambda: model(input_ids), **options)
    assert of(found, "segments.eos-inside") == []


def test_pieces_in_another_order_are_named_in_prompt_order(look: Look, tokenizer: Any) -> None:
    first, second, third = QUESTIONS
    input_ids = [1, *tokenizer.encode("\n".join([second, first, third, CUE]))[1:-1]]
    finding = one(look(input_ids, QUESTIONS), "segments.reordered")
    assert finding.severity is Severity.WARNING
    assert finding.positions[0] == 1
    assert finding.sentence == (
        "3 declared texts are in another order in the prompt than declared: 'Name the capital "
        "of Ken…', 'What is the capital of …' and 'Kenya's capital?'."
    )
    numbered = [(text, f"paraphrase {n}") for n, text in enumerate(QUESTIONS, 1)]
    finding = one(look(input_ids, numbered), "segments.reordered")
    assert finding.severity is Severity.WARNING
    assert finding.evidence["received"] == ["paraphrase 2", "paraphrase 1", "paraphrase 3"]
    assert finding.evidence["declared"] == ["paraphrase 1", "paraphrase 2", "paraphrase 3"]
    named = [(first, "question"), (second, "wording"), (third, "short")]
    assert one(look(input_ids, named), "segments.reordered").severity is Severity.NOTE


def test_pieces_in_their_order_or_in_several_places_have_no_other_order(
    look: Look, tokenizer: Any
) -> None:
    first, second, _ = QUESTIONS
    for texts in (QUESTIONS, [second, first, first]):
        input_ids = [1, *tokenizer.encode("\n".join([*texts, CUE]))[1:-1]]
        declared = [first, second] if len({*texts}) == 2 else texts
        assert of(look(input_ids, declared), "segments.reordered") == []
