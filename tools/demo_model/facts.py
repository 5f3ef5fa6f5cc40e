"""The table of world facts, and questions about it."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tools.demo_model.templates import RELATIONS, SENTENCE_STARTS, SENTENCES

FACTS_FILE = Path(__file__).with_name("facts.tsv")


@dataclass(frozen=True, slots=True)
class Fact:
    """One relation of one country; `answers` are all accepted, the first is the one trained.

    `sentence` is the answer in a sentence, with `{a}` in the place of the short one.
    """

    country: str
    relation: str
    answers: tuple[str, ...]
    sentence: str

    @property
    def key(self) -> str:
        """Return a readable, unique id."""
        name = "".join(c if c.isalnum() else "-" for c in self.country.lower())
        return f"{self.relation}/{name}"


def read_facts(path: Path = FACTS_FILE) -> tuple[Fact, ...]:
    """Return every fact of the table, country by country."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    return tuple(
        Fact(row["country"], relation, tuple(row[relation].split("|")), _sentence(row, relation))
        for row in rows
        for relation in RELATIONS
    )


def _sentence(row: Mapping[str, str], relation: str) -> str:
    """Return the answer in a sentence: the country, another fact about it, the place of `{a}`."""
    other = "capital" if relation == "continent" else "continent"
    start = SENTENCE_STARTS[other].format(c=row["country"], other=row[other].split("|")[0])
    return f"{start} {SENTENCES[relation]}"
