"""Counts how often the initializers of torch draw the values of each parameter."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, MutableMapping
from contextlib import ExitStack
from typing import Any

from torch import nn
from torch.nn import init
from torch.utils.weak import WeakIdKeyDictionary

from flexinspect_hooks.python_internals.patching import patch

INITIALIZERS = (
    *("uniform_", "normal_", "trunc_normal_", "xavier_uniform_", "xavier_normal_"),
    *("kaiming_uniform_", "kaiming_normal_", "orthogonal_", "sparse_"),
)
"""Functions of `torch.nn.init` that draw random values."""

CONSTRUCTORS = "torch.nn.modules."
"""Where the modules of torch initialize themselves. Those calls do not count: a model is right to
draw the values of a new layer once more, and by the same function."""

_counts: MutableMapping[nn.Parameter, Counter[str]] = WeakIdKeyDictionary()


def count_initializations() -> Callable[[], None]:
    """Count from now on; returns a function that ends it."""
    stack = ExitStack()
    for name in INITIALIZERS:
        original = getattr(init, name, None)
        if original is not None:
            stack.callback(patch(init, name, _counted(name, original)))
    stack.callback(_counts.clear)
    return stack.close


def _counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        tensor = args[0] if args else kwargs.get("tensor")
        caller = str(sys._getframe(1).f_globals.get("__name__", ""))
        if isinstance(tensor, nn.Parameter) and not caller.startswith(CONSTRUCTORS):
            counts = _counts.get(tensor)
            if counts is None:
                counts = _counts[tensor] = Counter()
            counts[name] += 1
        return result

    return initialize


def initializations_of(parameter: nn.Parameter) -> Counter[str]:
    """How often each function initialized a parameter so far."""
    return _counts.get(parameter, Counter())


def forget_initializations() -> None:
    """Count from 0 again."""
    _counts.clear()
