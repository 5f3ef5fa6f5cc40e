"""Suggestions for words that are not known."""

from __future__ import annotations

import pytest

from flexinspect.core.text import did_you_mean

KNOWN = ("decode-row-of-the-prompt", "decode-without-offset", "spans-without-bos")


@pytest.mark.parametrize(
    ("word", "suggestion"),
    [
        ("spans-wihtout-bos", "Did you mean spans-without-bos?"),
        ("decode", "Did you mean decode-row-of-the-prompt or decode-without-offset?"),
        ("spans", "Did you mean spans-without-bos?"),
        ("de", "none is near"),
        ("xyz", "none is near"),
    ],
)
def test_a_misspelled_word_and_a_part_of_one_are_suggested(word: str, suggestion: str) -> None:
    assert did_you_mean(word, KNOWN, "none is near") == suggestion
