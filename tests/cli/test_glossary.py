"""`flexinspect glossary` explains the words of the interface."""

from __future__ import annotations

import json

import pytest

from flexinspect.cli.main import main
from flexinspect.core.glossary_terms import TOPICS, read_glossary, search_glossary

INTERFACE_TERMS = (
    *("generation", "answer", "step", "token", "prefill", "decode", "branch", "segment"),
    *("executed", "received", "declared", "difference", "lost", "leaked", "block", "partial"),
    *("full", "LSE", "margin", "entropy", "rank", "sink", "fingerprint", "level", "capture cost"),
    *("breakpoint", "path", "head", "KL", "finding", "model still loaded", "#"),
)


@pytest.mark.parametrize("word", INTERFACE_TERMS)
def test_a_word_of_the_interface_is_explained(word: str) -> None:
    (first, *_) = search_glossary(word)
    assert word.lower() in map(str.lower, first.words)


def test_terms_are_unique_and_have_a_topic_and_sentences() -> None:
    names = [term.name for term in read_glossary()]
    assert len(names) == len(set(names))
    for term in read_glossary():
        assert term.topic in TOPICS
        assert term.text.endswith((".", '."'))
        assert "  " not in term.text


def test_ids_are_told_from_ordinals(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["glossary", "ordinal"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert 'Commands, flags, findings and files use ids: "token 2 of 3" is step 1.' in printed


def test_without_a_term_all_are_printed_by_topic(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["glossary"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line in TOPICS.values()] == list(TOPICS.values())
    assert {term.name for term in read_glossary()} <= {line.split("  (")[0] for line in lines}
    assert main(["glossary", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == len(read_glossary())


def test_a_word_that_only_texts_have_finds_them() -> None:
    assert [term.name for term in search_glossary("softmax")] == ["empty row", "logit"]


def test_several_words_are_one_term(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["glossary", "block", "table"]) == 0
    assert capsys.readouterr().out.startswith("block table")


def test_an_unknown_term_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["glossary", "margni"]) == 2
    err = capsys.readouterr().err
    assert "The glossary has no term 'margni'." in err
    assert "Did you mean margin?" in err
