"""Tracks the tokenizers that a program creates, without importing torch.

A program may use tokenizers and never import torch.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

from flexinspect_hooks.python_internals.patching import patch


class TokenizerTracker:
    """Tracks every transformers tokenizer that is created; keeps none alive."""

    def __init__(self) -> None:
        self._refs: list[weakref.ref[Any]] = []
        self._restore: Callable[[], None] = lambda: None

    def watch(self) -> None:
        """Track new tokenizers from now on; the module of their base class must be loaded."""
        base: Any = sys.modules["transformers.tokenization_utils_base"].PreTrainedTokenizerBase
        original = base.__init__

        @functools.wraps(original)
        def init(tokenizer: Any, /, *args: Any, **kwargs: Any) -> None:
            original(tokenizer, *args, **kwargs)
            self._refs.append(weakref.ref(tokenizer))

        self._restore = patch(base, "__init__", init)

    def end(self) -> None:
        """Stop tracking and restore the base class."""
        self._restore()

    def live_tokenizers(self) -> list[Any]:
        """Return the tokenizers that are still alive, the newest first."""
        tokenizers = (ref() for ref in reversed(self._refs))
        return [tokenizer for tokenizer in tokenizers if tokenizer is not None]
