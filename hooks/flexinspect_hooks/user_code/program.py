"""Runs a user's program as Python itself would; tracks its child processes and tokenizers.

This module is imported before the program, so it does not import torch.
"""

from __future__ import annotations

import functools
import io
import os
import runpy
import sys
import threading
import weakref
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from flexinspect_hooks.loading.tokenizers import IdAdapter, TokenizerAdapter, Vocabulary
from flexinspect_hooks.python_internals.patching import patch


def run_program(program: str, args: tuple[str, ...], *, is_module: bool) -> None:
    """Run `python FILE ARGS` or `python -m MODULE ARGS` to the last line; raises what it raises."""
    sys.orig_argv[1:] = ["-m", program, *args] if is_module else [program, *args]
    main = sys.modules["__main__"] = ModuleType("__main__")
    vars(main).update(__builtins__=sys.modules["builtins"], __annotations__={})
    if is_module:
        sys.argv[:] = ["-m", *args]
        _put_first(str(Path.cwd()))
        # The function behind `python -m`: the same frames, error messages and `__spec__`.
        runpy._run_module_as_main(program)  # type: ignore[attr-defined]
        return
    sys.argv[:] = [program, *args]
    _put_first(os.path.dirname(os.path.realpath(program)))  # noqa: PTH120
    path = os.path.abspath(program)  # noqa: PTH100 (a symbolic link keeps its name)
    vars(main).update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
    with io.open_code(path) as file:
        source = file.read()
    exec(compile(source, path, "exec", dont_inherit=True), vars(main))


def _put_first(folder: str) -> None:
    if not sys.flags.safe_path:
        sys.path.insert(0, folder)


def program_exit_code(error: BaseException | None) -> int:
    """Return the exit code of a program that ends with this exception."""
    if error is None:
        return 0
    if isinstance(error, SystemExit):
        code = error.code
        return 0 if code is None else code & 0xFF if isinstance(code, int) else 1
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def end_state(error: BaseException | None) -> str:
    """Return the end state of a trace: "finished", "interrupted" or "failed"."""
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return "finished"
    return "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"


class ChildProcessCounter:
    """Counts child processes except commands (few run models) in `n`; calls `on_fork` in forks."""

    def __init__(self, on_fork: Callable[[], None]) -> None:
        self.n = 0
        self._is_over = False
        self._local = threading.local()
        self._on_fork = on_fork
        self._restore: Callable[[], None] = lambda: None
        if hasattr(os, "register_at_fork"):
            # These functions cannot be unregistered, so they do nothing after `end`.
            os.register_at_fork(
                after_in_parent=self._after_fork_in_parent, after_in_child=self._after_fork_in_child
            )

    def _after_fork_in_parent(self) -> None:
        if not self._is_over and not getattr(self._local, "starting", False):
            self.n += 1

    def _after_fork_in_child(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._on_fork()

    def watch_multiprocessing(self) -> None:
        """Count processes of `multiprocessing`, for any start method; its module must be loaded."""
        cls: Any = sys.modules["multiprocessing.process"].BaseProcess
        original = cls.start

        @functools.wraps(original)
        def start(process: Any, /) -> None:
            self._local.starting = True
            try:
                original(process)
            finally:
                self._local.starting = False
            self.n += 1

        self._restore = patch(cls, "start", start)

    def end(self) -> None:
        """Stop counting and restore `multiprocessing`."""
        self._is_over = True
        self._restore()


class TokenizerTracker:
    """Tracks every transformers tokenizer that is created, until `end`; keeps none alive."""

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
