"""The tokenizers that a program loads, and the one that a model found in it most likely speaks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from flexinspect.pieces import WordFacts
from flexinspect_hooks.madetokenizers import MadeTokenizers
from flexinspect_hooks.story import IdWords, TokenizerWords, Words


class Tokenizers:
    """Chooses among the tokenizers that were made; each is asked for its words once."""

    def __init__(self, made: MadeTokenizers) -> None:
        self._made = made
        self._words: dict[int, tuple[weakref.ref[Any], Words]] = {}

    def words_of(self, model: Any) -> Words:
        """Return the words of the tokenizer that was loaded from where the model was.

        Else of the newest one whose vocabulary the model's can hold; else ids alone.
        """
        name = getattr(model, "name_or_path", "")
        config = getattr(model, "config", None)
        size = getattr(getattr(config, "text_config", None) or config, "vocab_size", None)
        alive = self._made.newest_first()
        same = [one for one in alive if name and getattr(one, "name_or_path", "") == name]
        fitting = [one for one in alive if not isinstance(size, int) or _size(one) <= size]
        for tokenizer in (*same, *fitting):
            words = self._words_of(tokenizer)
            if words is not None:
                return words
        return IdWords()

    def _words_of(self, tokenizer: Any) -> Words | None:
        known = self._words.get(id(tokenizer))
        if known is not None and known[0]() is tokenizer:
            return known[1]
        try:
            words = TokenizerWords(tokenizer)
        except Exception:  # not finished yet, or not one that can be asked
            return None
        self._words[id(tokenizer)] = (weakref.ref(tokenizer), words)
        return words


def _size(tokenizer: Any) -> int:
    try:
        return len(tokenizer)
    except Exception:  # not finished yet
        return 1 << 62


class FoundWords:
    """Words that may become others from one generation to the next; an id that fails is a text."""

    def __init__(self) -> None:
        self._words: Words = IdWords()

    def become(self, words: Words) -> None:
        """Speak as these words from here on."""
        self._words = words

    @property
    def has_text(self) -> bool:
        """Whether texts can be looked for."""
        return self._words.has_text

    @property
    def special(self) -> frozenset[int]:
        """The special ids."""
        return self._words.special

    @property
    def facts(self) -> WordFacts:
        """What is known of special tokens."""
        return self._words.facts

    def encode(self, text: str) -> Sequence[int]:
        """Return the ids of a text, none for one that has none."""
        try:
            return self._words.encode(text)
        except Exception:
            return ()

    def text_of(self, token_id: int) -> str:
        """Return one id's text."""
        return self._safe(self._words.text_of, token_id)

    def token_of(self, token_id: int) -> str:
        """Return the vocabulary's own string of an id."""
        return self._safe(self._words.token_of, token_id)

    def adder(self) -> Callable[[int], str]:
        """Return a function that tells what each next id adds to one text."""
        add = self._words.adder()
        return lambda token_id: self._safe(add, token_id)

    def answer(self, token_ids: Sequence[int]) -> str:
        """Return the text of generated ids."""
        try:
            return self._words.answer(token_ids)
        except Exception:
            return " ".join(map(str, token_ids))

    def _safe(self, say: Callable[[int], str], token_id: int) -> str:
        try:
            return say(token_id)
        except Exception:
            return str(token_id)
