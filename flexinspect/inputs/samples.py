"""Samples: a question with its paraphrases and answers, read from plain data and chosen from."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from flexinspect.core.errors import DatasetError, UsageError
from flexinspect.core.text import plural


class Sample(Struct, frozen=True):
    """One question: its paraphrases, the correct answers, and further fields in `meta`."""

    id: str
    paraphrases: tuple[str, ...]
    answers: tuple[str, ...] = ()
    meta: Mapping[str, Any] = field(default_factory=dict)


def from_prompts(prompts: Sequence[str]) -> Sample:
    """Return the sample of repeated `--prompt TEXT` flags, one per paraphrase, without answers.

    Raises `DatasetError` if there is no prompt, or an empty one.
    """
    if not prompts or not all(prompt.strip() for prompt in prompts):
        hint = "Give --prompt TEXT, once per paraphrase, each with text."
        raise DatasetError("A prompt is empty.", hint=hint)
    return Sample("prompt", tuple(prompts), (), {"source": "--prompt"})


def sample_from(fields: Any, where: str, default_id: str) -> Sample:
    """Convert one object of a user's file to a sample. Raises `DatasetError`."""
    fields = dict(fields) if isinstance(fields, Mapping) else check_object(fields, where)
    used = ("id", "uuid", "question", "paraphrases", "answers", "answer")
    question, paraphrases = fields.get("question"), fields.get("paraphrases")
    if question is None and paraphrases is None:
        hint = f"The fields are {', '.join(fields) or 'none'}."
        raise DatasetError(f"{where}: there is neither `question` nor `paraphrases`.", hint=hint)
    texts = check_texts(paraphrases, where, "paraphrases") if paraphrases is not None else ()
    if question is not None:
        first = check_texts(question, where, "question")
        texts = (*first, *(text for text in texts if text not in first))
    if not texts:
        raise DatasetError(f"{where}: `paraphrases` is empty.")
    answers = fields.get("answers", fields.get("answer"))
    identity = fields.get("id", fields.get("uuid"))
    return Sample(
        id=default_id if identity in (None, "") else str(identity),
        paraphrases=texts,
        answers=() if answers is None else check_texts(answers, where, "answers"),
        meta={key: value for key, value in fields.items() if key not in used},
    )


def check_object(fields: Any, where: str) -> Mapping[str, Any]:
    """Return a row as it is. Raises `DatasetError` unless it is an object with fields."""
    if not isinstance(fields, dict):
        raise DatasetError(f"{where}: expected an object, not {type(fields).__name__}.")
    return fields


def check_texts(value: Any, where: str, name: str) -> tuple[str, ...]:
    """Return one text, or a list of texts, as a tuple. Raises `DatasetError` for an empty text."""
    value, what = [value] if isinstance(value, str) else value, f"{where}: `{name}`"
    if not isinstance(value, list | tuple):
        raise DatasetError(f"{what} must be a text or a list of texts, not {type(value).__name__}.")
    for index, text in enumerate(value):
        if not isinstance(text, str) or not text.strip():
            raise DatasetError(f"{what} number {index} must be a non-empty text, not {text!r}.")
    return tuple(value)


def choose_paraphrases(
    sample: Sample, num_paraphrases: int | None = None, indices: str | None = None
) -> Sample:
    """Return the sample with a selection of its paraphrases.

    `indices` selects by number from 0, in the given order: "0,2,1", "0-2" (inclusive), or both.
    `num_paraphrases` then keeps the first ones. Raises `DatasetError` if the sample has fewer, and
    `UsageError` if `indices` is not a list of numbers.
    """
    available = len(sample.paraphrases)
    chosen = list(range(available)) if indices is None else _parse_indices(indices)
    has = f"The sample {sample.id} has"
    beyond = next((index for index in chosen if index >= available), None)
    if beyond is not None:
        what = f"{has} {plural(available, 'paraphrase')}, counted from 0, and none with index "
        what += f"{beyond}."
        raise DatasetError(what, hint=f"Use --indices between 0 and {available - 1}.")
    if num_paraphrases is not None and num_paraphrases < 1:
        raise UsageError(f"--num-paraphrases {num_paraphrases} is not possible; use 1 or more.")
    if num_paraphrases is not None and num_paraphrases > len(chosen):
        what = f"{has} {plural(len(chosen), 'paraphrase')} to choose from, not {num_paraphrases}."
        hint = f"Use --num-paraphrases {len(chosen)} or less, or "
        if sample.meta.get("source") == "--prompt":
            hint += "more --prompt flags."
        else:
            hint += "add --paraphrases templates, or --paraphrases FILE.jsonl with prepared ones "
            hint += "(docs/generation.md#paraphrases)."
        raise DatasetError(what, hint=hint)
    paraphrases = tuple(sample.paraphrases[index] for index in chosen[:num_paraphrases])
    return replace(sample, paraphrases=paraphrases)


def _parse_indices(text: str) -> list[int]:
    chosen: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", part)
        if match is None or (match[2] and int(match[2]) < int(match[1])):
            hint = "Write numbers from 0 with commas, or ranges: 0,1,2 or 0-2."
            raise UsageError(f"--indices {text!r} is not a list of paraphrases.", hint=hint)
        first, last = int(match[1]), int(match[2] or match[1])
        chosen.extend(range(first, min(last, first + 10_000) + 1))
    return chosen


def judge_answer(state: str, answer: str, expected: Sequence[str]) -> bool | None:
    """Whether an answer is one of the expected ones, by the state of its branch.

    None if no answer is expected, or the answer is not finished.
    """
    return is_correct_answer(answer, expected) if expected and state == "finished" else None


def is_correct_answer(answer: str, expected: Iterable[str]) -> bool:
    """Return whether an answer contains an expected one as whole words, up to case and spaces.

    A model may answer in a sentence. This is the measure of Mallen et al., "When Not to Trust
    Language Models" (2023), but for the borders of words.
    """
    texts = (unicodedata.normalize("NFC", text).casefold() for text in (answer, *expected))
    given, *others = (" ".join(text.split()) for text in texts)
    names = filter(None, (text.rstrip(" .") for text in others))
    return any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", given) for name in names)
