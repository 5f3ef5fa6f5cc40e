"""Exact match and match of lemmas, and which lemmatizer is used."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from flexinspect.core.errors import UsageError
from flexinspect.lab import scoring
from flexinspect.lab.scoring import Lemmatizer, is_exact_match, load_lemmatizer, rule_lemmas


@pytest.mark.parametrize(
    ("answer", "expected", "exact", "lemma"),
    [
        ("Paris", ["Paris"], True, True),
        (" paris. ", ["Paris"], True, True),
        ("It is Paris", ["Paris"], False, True),
        ("Parisian", ["Paris"], False, False),
        ("New", ["New Delhi"], False, False),
        ("the Netherlands", ["Netherlands"], False, True),
        ("dancing", ["danced"], False, True),
        ("two wolves", ["wolf"], False, True),
        ("", ["Paris"], False, False),
        ("Paris", ["Lyon", "paris"], True, True),
        ("Cote d'Ivoire", ["Côte d'Ivoire"], False, False),
        ("Co\u0302te d’Ivoire", ["Côte d'Ivoire"], False, True),
        ("+81", ["+81"], True, True),
    ],
)
def test_matches(answer: str, expected: list[str], exact: bool, lemma: bool) -> None:
    assert is_exact_match(answer, expected) is exact
    assert Lemmatizer("rules", rule_lemmas).is_match(answer, expected) is lemma


def test_an_answer_of_punctuation_matches_nothing() -> None:
    assert not is_exact_match("...", ["."])
    assert not Lemmatizer("rules", rule_lemmas).is_match("...", ["."])


def test_without_spacy_the_rules_are_used_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "find_spec", lambda _name: None)
    assert load_lemmatizer().name == "rules"
    with pytest.raises(UsageError, match="en_core_web_lg is not installed") as caught:
        load_lemmatizer("en_core_web_lg")
    assert "spacy download en_core_web_lg" in str(caught.value.hint)


def _spacy(broken: tuple[str, ...] = ()) -> ModuleType:
    """A stand-in for spaCy, whose models turn a word into its first three letters."""

    def load(name: str, exclude: list[str]) -> Any:
        if name in broken:
            raise OSError(f"[E050] Can't find model {name!r}.")
        return lambda text: [
            SimpleNamespace(lemma_=word[:3], is_punct=word == "!", is_space=False)
            for word in text.split()
        ]

    module = ModuleType("spacy")
    module.load = load  # type: ignore[attr-defined]
    return module


def test_the_large_model_of_spacy_comes_before_the_small_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scoring, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "spacy", _spacy())
    lemmatizer = load_lemmatizer()
    assert lemmatizer.name == "en_core_web_lg"
    assert lemmatizer.lemmas("The Danced !") == ("dan",)
    monkeypatch.setitem(sys.modules, "spacy", _spacy(broken=("en_core_web_lg",)))
    assert load_lemmatizer().name == "en_core_web_sm"
    with pytest.raises(UsageError, match="cannot be loaded"):
        load_lemmatizer("en_core_web_lg")
