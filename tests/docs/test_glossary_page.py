"""The page of the glossary is what the terms say, and no other page defines them again."""

from __future__ import annotations

import re

from support.paths import DOCS

from flexinspect.core.glossary_terms import read_glossary
from tools.glossary_page import PAGE, page


def test_the_page_says_what_the_glossary_says() -> None:
    assert PAGE.read_text("utf-8") == page(), "run: python -m tools.glossary_page"


def test_the_vocabulary_defines_no_term_of_the_glossary() -> None:
    text = (DOCS / "vocabulary.md").read_text("utf-8")
    defined = {cell.strip() for cell in re.findall(r"^\| ([^|]+) \|", text, re.M)}
    assert len(defined) > 5
    assert not defined & {term.name for term in read_glossary()}
