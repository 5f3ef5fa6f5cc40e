"""Writes docs/glossary.md from the terms of the glossary: python -m tools.glossary_page."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from flexinspect.core.glossary_terms import TOPICS, read_glossary

PAGE = Path(__file__).parents[1] / "docs" / "glossary.md"
_HEAD = """# Glossary

The words that the interface shows. `flexinspect glossary` prints them, `G` opens them in the
interface. [vocabulary.md](vocabulary.md) has further terms of the documentation and the code.
"""


def page() -> str:
    """Return the text of the page."""
    parts = [_HEAD]
    for topic, terms in groupby(read_glossary(), lambda term: term.topic):
        parts.append(f"## {TOPICS[topic]}\n")
        for term in terms:
            also = f" ({', '.join(term.also)})" if term.also else ""
            parts.append(f"**{term.name}**{also}: {term.text}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
