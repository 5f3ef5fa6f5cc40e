"""The glossary: the terms of the interface, for `flexinspect glossary`, its screen and its page."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path

from msgspec import Struct, convert

TOPICS = {
    "run": "A run and its text",
    "mask": "Masks",
    "attention": "Attention",
    "choice": "The choice of a token",
    "recording": "The recording",
}


class Term(Struct, frozen=True):
    """A term with its explanation; `also` are other words for it. `topic` is one of `TOPICS`."""

    name: str
    topic: str
    text: str
    also: tuple[str, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        """The name and the other words."""
        return (self.name, *self.also)


@cache
def read_glossary() -> tuple[Term, ...]:
    """Return all terms, by topic."""
    topics = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
    return tuple(
        convert({"name": name, "topic": topic, **term, "text": term["text"].strip()}, Term)
        for topic, terms in topics.items()
        for name, term in terms.items()
    )


def search_glossary(query: str) -> list[Term]:
    """Return the terms with a query in their name or other words, an equal one first.

    If there are none, return those whose text has it.
    """
    query = query.strip().lower()
    terms = read_glossary()
    named = [term for term in terms if any(query in word.lower() for word in term.words)]
    named.sort(key=lambda term: query not in map(str.lower, term.words))
    return named or [term for term in terms if query in term.text.lower()]
