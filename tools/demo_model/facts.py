"""The table of world facts, and questions about it."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from tools.demo_model.templates import RELATIONS

FACTS_FILE = Path(__file__).with_name("facts.tsv")


@dataclass(frozen=True, slots=True)
class Fact:
    """One relation of one country; `answers` are all accepted, the first is the one trained."""

    country: str
    relation: str
    answers: tuple[str, ...]

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
        Fact(row["country"], relation, tuple(row[relation].split("|")))
        for row in rows
        for relation in RELATIONS
    )
