"""The tokenizers that a program makes. Torch-free: a program may tokenize and never load torch."""

from __future__ import annotations

import functools
import sys
import weakref
from typing import Any


class TokenizerTracker:
    """Every transformers tokenizer made while watched; keeps none alive."""

    def __init__(self) -> None:
        self._refs: list[weakref.ref[Any]] = []
        self._base: Any = None

    def watch(self) -> None:
        """Note what is made from now on; call it when their base class is loaded."""
        base: Any = sys.modules["transformers.tokenization_utils_base"]
        self._base = base.PreTrainedTokenizerBase
        original = self._original = self._base.__init__

        @functools.wraps(original)
        def init(tokenizer: Any, /, *args: Any, **kwargs: Any) -> None:
            original(tokenizer, *args, **kwargs)
            self._refs.append(weakref.ref(tokenizer))

        self._base.__init__ = init

    def end(self) -> None:
        """Note nothing more, and put everything back."""
        if self._base is not None:
            self._base.__init__, self._base = self._original, None

    def live_tokenizers(self) -> list[Any]:
        """Return those that are still alive."""
        return [one for one in (ref() for ref in reversed(self._refs)) if one is not None]
