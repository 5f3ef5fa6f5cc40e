"""The tokenizers that a program loads, and the one that a model found in it most likely speaks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from flexinspect.records.prompt import TokenizerFacts
from flexinspect_hooks.user_code.generation_builder import (
    IdAdapter,
    TokenizerAdapter,
    TransformersAdapter,
)
from flexinspect_hooks.user_code.tokenizer_tracking import TokenizerTracker


class TokenizerMatcher:
    """Chooses among the tokenizers that were made; each is asked for its words once."""

    def __init__(self, tracker: TokenizerTracker) -> None:
        self._tracker = tracker
        self._adapters: dict[int, tuple[weakref.ref[Any], TokenizerAdapter]] = {}

    def match(self, model: Any) -> TokenizerAdapter:
        """Return the words of the tokenizer that was loaded from where the model was.

        Else of the newest one whose vocabulary the model's can hold; else ids alone.
        """
        name = getattr(model, "name_or_path", "")
        config = getattr(model, "config", None)
        size = getattr(getattr(config, "text_config", None) or config, "vocab_size", None)
        alive = self._tracker.live_tokenizers()
        same = [one for one in alive if name and getattr(one, "name_or_path", "") == name]
        fitting = [
            one for one in alive if not isinstance(size, int) or _vocabulary_size(one) <= size
        ]
        for tokenizer in (*same, *fitting):
            words = self._adapter_of(tokenizer)
            if words is not None:
                return words
        return IdAdapter()

    def _adapter_of(self, tokenizer: Any) -> TokenizerAdapter | None:
        known = self._adapters.get(id(tokenizer))
        if known is not None and known[0]() is tokenizer:
            return known[1]
        try:
            words = TransformersAdapter(tokenizer)
        except Exception:  # not finished yet, or not one that can be asked
            return None
        self._adapters[id(tokenizer)] = (weakref.ref(tokenizer), words)
        return words


def _vocabulary_size(tokenizer: Any) -> int:
    try:
        return len(tokenizer)
    except Exception:  # not finished yet
        return 1 << 62


class MatchedTokenizer:
    """Words that may become others from one generation to the next; an id that fails is a text."""

    def __init__(self) -> None:
        self._adapter: TokenizerAdapter = IdAdapter()

    def use(self, adapter: TokenizerAdapter) -> None:
        """Speak as these words from here on."""
        self._adapter = adapter

    @property
    def has_text(self) -> bool:
        """Whether texts can be looked for."""
        return self._adapter.has_text

    @property
    def special(self) -> frozenset[int]:
        """The special ids."""
        return self._adapter.special

    @property
    def facts(self) -> TokenizerFacts:
        """What is known of special tokens."""
        return self._adapter.facts

    def encode(self, text: str) -> Sequence[int]:
        """Return the ids of a text, none for one that has none."""
        try:
            return self._adapter.encode(text)
        except Exception:
            return ()

    def text_of(self, token_id: int) -> str:
        """Return one id's text."""
        return self._text_or_id(self._adapter.text_of, token_id)

    def token_of(self, token_id: int) -> str:
        """Return the vocabulary's own string of an id."""
        return self._text_or_id(self._adapter.token_of, token_id)

    def make_text_stream(self) -> Callable[[int], str]:
        """Return a function that tells what each next id adds to one text."""
        add = self._adapter.make_text_stream()
        return lambda token_id: self._text_or_id(add, token_id)

    def decode_generated(self, token_ids: Sequence[int]) -> str:
        """Return the text of generated ids."""
        try:
            return self._adapter.decode_generated(token_ids)
        except Exception:
            return " ".join(map(str, token_ids))

    def _text_or_id(self, to_text: Callable[[int], str], token_id: int) -> str:
        try:
            return to_text(token_id)
        except Exception:
            return str(token_id)
