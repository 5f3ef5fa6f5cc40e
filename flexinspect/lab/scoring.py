"""Whether an answer is right: exact match, and match of lemmas.

* Exact: the answer equals an accepted one, up to case, spaces and a period at the end.
* Lemma: the lemmas of an accepted answer occur in those of the answer, in a row. The lemmas come
  from spaCy (`en_core_web_lg`, else `en_core_web_sm`), or from rules; `Lemmatizer.name` says which.
  Punctuation and articles do not count.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec

from flexinspect.core.errors import UsageError, summarize_error

SPACY_MODELS = ("en_core_web_lg", "en_core_web_sm")
RULES = "rules"
LEMMATIZERS = (*SPACY_MODELS, RULES)

Lemmas = tuple[str, ...]


def normalized(text: str) -> str:
    """Return a text for comparison: NFC, one case, single spaces, no period at the end."""
    folded = unicodedata.normalize("NFC", text).casefold()
    return " ".join(folded.split()).rstrip(" .")


def is_exact_match(answer: str, expected: Iterable[str]) -> bool:
    """Return whether an answer equals an expected one, both `normalized`."""
    given = normalized(answer)
    return bool(given) and any(given == normalized(one) for one in expected)


class Lemmatizer:
    """Returns the lemmas of texts; `name` is the spaCy model, or "rules"."""

    def __init__(self, name: str, lemmas: Callable[[str], Lemmas]) -> None:
        self.name = name
        self.lemmas = cache(lemmas)

    def is_match(self, answer: str, expected: Iterable[str]) -> bool:
        """Return whether the lemmas of an expected answer occur in a row in those of `answer`."""
        given = self.lemmas(answer)
        return any(_contains(given, self.lemmas(one)) for one in expected)


def load_lemmatizer(name: str = "auto") -> Lemmatizer:
    """Return a lemmatizer: one of `LEMMATIZERS`, or with "auto" the first that is installed.

    Raises `UsageError` for a spaCy model that was named and cannot be loaded.
    """
    wanted = LEMMATIZERS if name == "auto" else (name,)
    for one in wanted:
        if one == RULES:
            return Lemmatizer(RULES, rule_lemmas)
        if find_spec("spacy") is None or find_spec(one) is None:
            continue
        try:
            return Lemmatizer(one, _spacy_lemmas(one))
        except Exception as error:  # a model of another version of spaCy fails in any way
            if name != "auto":
                raise UsageError(
                    f"The spaCy model {one} cannot be loaded: {summarize_error(error)}.",
                    hint=f"python -m spacy download {one}, or --lemmatizer rules",
                ) from error
    what = f"The lemmatizer {name} is not installed."
    raise UsageError(what, hint=f"pip install spacy && python -m spacy download {name}")


def _spacy_lemmas(name: str) -> Callable[[str], Lemmas]:
    pipeline = import_module("spacy").load(name, exclude=["parser", "ner"])

    def lemmas(text: str) -> Lemmas:
        tokens = pipeline(unicodedata.normalize("NFC", text))
        counted = (one for one in tokens if not (one.is_punct or one.is_space))
        return tuple(
            lemma for lemma in (one.lemma_.casefold() for one in counted) if lemma not in _ARTICLES
        )

    return lemmas


# -- rules -----------------------------------------------------------------------------------------

_ARTICLES = frozenset({"a", "an", "the"})
_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)?")
_IRREGULAR = {
    form: lemma
    for lemma, forms in {
        "be": "am is are was were been being",
        "have": "has had having",
        "do": "does did done doing",
        "go": "goes went gone",
        "say": "said",
        "make": "made",
        "take": "took taken",
        "give": "gave given",
        "write": "wrote written",
        "speak": "spoke spoken",
        "see": "saw seen",
        "find": "found",
        "win": "won",
        "lead": "led",
        "hold": "held",
        "begin": "began begun",
        "become": "became",
        "good": "better best",
        "bad": "worse worst",
        "man": "men",
        "woman": "women",
        "child": "children",
        "person": "people",
        "foot": "feet",
        "tooth": "teeth",
        "mouse": "mice",
        "goose": "geese",
        "life": "lives",
        "wife": "wives",
        "leaf": "leaves",
        "wolf": "wolves",
    }.items()
    for form in forms.split()
}
_ENDINGS = (
    (re.compile(r"(..+)'s$"), r"\1"),
    (re.compile(r"(..+)ies$"), r"\1y"),
    (re.compile(r"(.+(?:s|x|z|ch|sh))es$"), r"\1"),
    (re.compile(r"(..+[^su])s$"), r"\1"),
    (re.compile(r"(.*[aeiouy].*?)([bdfgmnprt])\2(?:ed|ing)$"), r"\1\2"),
    (re.compile(r"(.*[aeiouy].*?[^e])(?:ed|ing)$"), r"\1"),
)
"""Ending → what replaces it; the first that fits. Both sides of a comparison are treated alike."""


def rule_lemmas(text: str) -> Lemmas:
    """Return lemmas by rules for English endings and a table of irregular forms.

    The stem that is left need not be a word ("danc" of "danced" and "dancing").
    """
    words = _WORD.findall(unicodedata.normalize("NFC", text).casefold().replace("’", "'"))
    return tuple(_rule_lemma(word) for word in words if word not in _ARTICLES)


def _rule_lemma(word: str) -> str:
    if word in _IRREGULAR or not word.isascii() or len(word) < 4:
        return _IRREGULAR.get(word, word)
    for ending, replacement in _ENDINGS:
        if ending.match(word):
            return ending.sub(replacement, word).removesuffix("e")
    return word.removesuffix("e")


def _contains(given: Sequence[str], wanted: Sequence[str]) -> bool:
    n = len(wanted)
    return n > 0 and any(tuple(given[at : at + n]) == tuple(wanted) for at in range(len(given)))
