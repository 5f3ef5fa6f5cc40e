"""The demo dataset, `questions.jsonl`: questions in five wordings with their accepted answers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from tools.demo_model.evaluate import FUSED, ModelUnderTest, Question, accepted
from tools.demo_model.facts import Fact
from tools.demo_model.templates import HELD_OUT, SEEN, fill

LINES = 600
SEEN_SHARE = 0.3
SHOWCASE = (
    ("France", "capital"),
    ("Japan", "currency"),
    ("Brazil", "language"),
    ("Egypt", "continent"),
    ("Germany", "domain"),
    ("Italy", "calling_code"),
    ("Canada", "capital"),
    ("India", "currency"),
    ("Australia", "capital"),
    ("Mexico", "language"),
    ("Switzerland", "currency"),
    ("Spain", "domain"),
)
"""Well-known questions for the head of the file; those answered wrong go to the end."""


@dataclass(frozen=True, slots=True)
class DatasetLine:
    """One question of the file; `split` is whether its wordings were trained on."""

    id: str
    paraphrases: tuple[str, ...]
    answers: tuple[str, ...]
    split: str


def build_dataset(facts: Sequence[Fact], model: ModelUnderTest, seed: int) -> list[DatasetLine]:
    """Return the lines: the showcase, then a seeded mixture of relations and wordings."""
    random = Random(seed)
    by_key = {(fact.country, fact.relation): fact for fact in facts}
    head = [_line(by_key[key], "held-out", 0) for key in SHOWCASE]
    others = [fact for fact in facts if (fact.country, fact.relation) not in SHOWCASE]
    tail = [_drawn(fact, random) for fact in random.sample(others, LINES - len(head))]
    good = answered_right(head, [by_key[key] for key in SHOWCASE], model)
    weak = [line for line in head if line not in good]
    return [*good, *tail, *weak]


def answered_right(
    lines: Sequence[DatasetLine], facts: Sequence[Fact], model: ModelUnderTest
) -> list[DatasetLine]:
    """Return the lines that the model answers right with all their paraphrases fused."""
    questions = [Question(f, line.paraphrases) for f, line in zip(facts, lines, strict=True)]
    answers = model.answers(questions)
    checked = zip(lines, questions, answers, strict=True)
    return [line for line, question, answer in checked if accepted(answer, question)]


def _drawn(fact: Fact, random: Random) -> DatasetLine:
    split = "seen" if random.random() < SEEN_SHARE else "held-out"
    return _line(fact, split, random.randrange(8))


def _line(fact: Fact, split: str, first: int) -> DatasetLine:
    group = (SEEN if split == "seen" else HELD_OUT)[fact.relation]
    chosen = [group[(first + k) % len(group)] for k in range(FUSED)]
    paraphrases = tuple(fill(template, fact.country) for template in chosen)
    return DatasetLine(f"{split}/{fact.key}", paraphrases, fact.answers, split)


def write_dataset(path: Path, lines: Iterable[DatasetLine]) -> None:
    """Write one JSON object per line, UTF-8."""
    text = "".join(json.dumps(asdict(line), ensure_ascii=False) + "\n" for line in lines)
    path.write_text(text, encoding="utf-8")
