"""Tracks the tokenizers that a program creates, without importing torch.

A program may use tokenizers and never import torch.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

from flexinspect_hooks.loading.tokenizers import IdAdapter, TokenizerAdapter, Vocabulary
from flexinspect_hooks.python_internals.patching import patch


class TokenizerTracker:
    """Tracks every transformers tokenizer that is created; keeps none alive.

    `end` stops tracking and restores the tokenizers' base class.
    """

    def __init__(self) -> None:
        self._refs: list[weakref.ref[Any]] = []
        self._adapters: dict[int, tuple[weakref.ref[Any], TokenizerAdapter]] = {}
        self.end: Callable[[], None] = lambda: None

    def watch(self) -> None:
        """Track new tokenizers from now on; the module of their base class must be loaded."""
        base: Any = sys.modules["transformers.tokenization_utils_base"].PreTrainedTokenizerBase
        original = base.__init__

        @functools.wraps(original)
        def init(tokenizer: Any, /, *args: Any, **kwargs: Any) -> None:
            original(tokenizer, *args, **kwargs)
            self._refs.append(weakref.ref(tokenizer))

        self.end = patch(base, "__init__", init)

    def live_tokenizers(self) -> list[Any]:
        """Return the tokenizers that are still alive, the newest first."""
        tokenizers = (ref() for ref in reversed(self._refs))
        return [tokenizer for tokenizer in tokenizers if tokenizer is not None]

    def match(self, model: Any) -> TokenizerAdapter:
        """Return an adapter of the tokenizer that was loaded from the same place as the model.

        Else of the newest tokenizer whose vocabulary is not larger than the model's; else an
        adapter that shows ids.
        """
        name = getattr(model, "name_or_path", "")
        config = getattr(model, "config", None)
        size = getattr(getattr(config, "text_config", None) or config, "vocab_size", None)
        alive = self.live_tokenizers()
        same_place = [t for t in alive if name and getattr(t, "name_or_path", "") == name]
        fitting = [t for t in alive if not isinstance(size, int) or _vocabulary_size(t) <= size]
        adapters = (self._adapter_of(tokenizer) for tokenizer in (*same_place, *fitting))
        return next((adapter for adapter in adapters if adapter is not None), IdAdapter())

    def _adapter_of(self, tokenizer: Any) -> TokenizerAdapter | None:
        """Return the adapter, of which each tokenizer has one because it reads the vocabulary."""
        known = self._adapters.get(id(tokenizer))
        if known is not None and known[0]() is tokenizer:
            return known[1]
        try:
            adapter = Vocabulary(tokenizer)
        except Exception:  # not initialised yet, or without the methods that are needed
            return None
        self._adapters[id(tokenizer)] = (weakref.ref(tokenizer), adapter)
        return adapter


def _vocabulary_size(tokenizer: Any) -> int:
    try:
        return len(tokenizer)
    except Exception:  # not initialised yet
        return 1 << 62
