"""The labels of figures and reports, in several languages."""

from __future__ import annotations

import string
from typing import Any

import pytest

from flexinspect.core.errors import UsageError
from flexinspect.core.languages import languages, load_labels


def fields(text: str) -> set[Any]:
    return {name for _, name, _, _ in string.Formatter().parse(text) if name}


def test_every_language_has_the_same_labels_with_the_same_fields() -> None:
    english = load_labels("en").texts
    for code in languages():
        texts = load_labels(code).texts
        assert texts.keys() == english.keys(), code
        assert {k: fields(t) for k, t in texts.items()} == {
            k: fields(t) for k, t in english.items()
        }


def test_the_language_comes_from_the_argument_then_the_environment_then_english(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("FLEXINSPECT_LANG", raising=False)
    assert load_labels().language == "en"
    monkeypatch.setenv("FLEXINSPECT_LANG", "zh_CN.UTF-8")
    assert load_labels().language == "zh"
    assert load_labels("en").language == "en"


def test_an_unknown_language_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="There are no labels in 'xx'") as error:
        load_labels("xx")
    assert "en" in (error.value.hint or "")
