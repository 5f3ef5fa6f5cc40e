"""Finds the tokenizer of a model among those that a program created."""

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
    """Chooses the tokenizer of a model; each tokenizer's vocabulary is read once."""

    def __init__(self, tracker: TokenizerTracker) -> None:
        self._tracker = tracker
        self._adapters: dict[int, tuple[weakref.ref[Any], TokenizerAdapter]] = {}

    def match(self, model: Any) -> TokenizerAdapter:
        """Return an adapter of the tokenizer that was loaded from the same place as the model.

        Else of the newest tokenizer whose vocabulary is not larger than the model's; else an
        adapter that shows ids.
        """
        name = getattr(model, "name_or_path", "")
        config = getattr(model, "config", None)
        size = getattr(getattr(config, "text_config", None) or config, "vocab_size", None)
        alive = self._tracker.live_tokenizers()
        same_place = [t for t in alive if name and getattr(t, "name_or_path", "") == name]
        fitting = [t for t in alive if not isinstance(size, int) or _vocabulary_size(t) <= size]
        for tokenizer in (*same_place, *fitting):
            adapter = self._adapter_of(tokenizer)
            if adapter is not None:
                return adapter
        return IdAdapter()

    def _adapter_of(self, tokenizer: Any) -> TokenizerAdapter | None:
        known = self._adapters.get(id(tokenizer))
        if known is not None and known[0]() is tokenizer:
            return known[1]
        try:
            adapter = TransformersAdapter(tokenizer)
        except Exception:  # not initialised yet, or without the methods that are needed
            return None
        self._adapters[id(tokenizer)] = (weakref.ref(tokenizer), adapter)
        return adapter


def _vocabulary_size(tokenizer: Any) -> int:
    try:
        return len(tokenizer)
    except Exception:  # not initialised yet
        return 1 << 62


class MatchedTokenizer:
    """An adapter that can be replaced between generations; ids that fail to decode show as ids."""

    def __init__(self) -> None:
        self._adapter: TokenizerAdapter = IdAdapter()

    def use(self, adapter: TokenizerAdapter) -> None:
        """Use this adapter from now on."""
        self._adapter = adapter

    @property
    def has_text(self) -> bool:
        """Whether texts can be searched."""
        return self._adapter.has_text

    @property
    def special(self) -> frozenset[int]:
        """The ids of special tokens."""
        return self._adapter.special

    @property
    def facts(self) -> TokenizerFacts:
        """The tokenizer's facts about special tokens."""
        return self._adapter.facts

    def encode(self, text: str) -> Sequence[int]:
        """Return the ids of a text, none if it cannot be encoded."""
        try:
            return self._adapter.encode(text)
        except Exception:
            return ()

    def text_of(self, token_id: int) -> str:
        """Return the decoded text of an id."""
        return self._text_or_id(self._adapter.text_of, token_id)

    def token_of(self, token_id: int) -> str:
        """Return the vocabulary's own string of an id."""
        return self._text_or_id(self._adapter.token_of, token_id)

    def make_text_stream(self) -> Callable[[int], str]:
        """Return a function that returns the text that each next id adds."""
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
