"""Mask and score rules that run as plain Python, so that a debugger stops in them.

Uncompiled `flex_attention` hands its rule to dynamo, which takes it in without running it. torch
has a switch that runs it instead; the values stay the same, and so do the gradients of q, k and v.
Gradients of tensors that a score rule captured are lost with it, so there it stays off. Compiled
calls run no rule at all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_told: list[Callable[[str], None]] = []
"""Who is to be told where rules do not run, once for each reason; empty when nobody debugs."""

_said: set[str] = set()

_lock = threading.Lock()
_inside = [0, False]
"""How many calls have the switch on now, and how it stood before the first."""

COMPILED = (
    "FlexAttention is compiled here, so breakpoints in a mask_mod or score_mod are not hit: "
    "the kernel does not run them as Python."
)
WITH_GRADIENTS = (
    "Breakpoints in the rules of a call with a score_mod are not hit where gradients are computed: "
    "run as Python, a score_mod would lose those of the tensors that it captures."
)


def run_rules(tell: Callable[[str], None]) -> None:
    """Let uncompiled FlexAttention run its rules as Python; `tell` hears where it cannot."""
    # What a stop will need is loaded here: it must answer at once.
    from flexinspect_hooks.debugging import pictures  # noqa: F401

    _told[:] = [tell]
    _said.clear()


def run_rules_no_more() -> None:
    """The run is over."""
    _told.clear()


def are_debugged() -> bool:
    """Say whether a debugger may stop in a rule that runs as Python."""
    return bool(_told)


def saw_compiled() -> None:
    """A compiled call of FlexAttention was seen; costs nothing when nobody debugs."""
    if _told:
        _tell(COMPILED)


def plainly(own: Callable[..., Any], score_mod: Any) -> Callable[..., Any]:
    """Return what calls uncompiled `flex_attention`: `own` itself when nobody debugs.

    `score_mod` is that of the call, None for none.
    """
    if not _told:
        return own
    import torch

    if score_mod is not None and torch.is_grad_enabled():
        _tell(WITH_GRADIENTS)
        return own

    def call(*args: Any, **kwargs: Any) -> Any:
        with _switched():
            return own(*args, **kwargs)

    return call


@contextmanager
def _switched() -> Iterator[None]:
    import torch.nn.attention.flex_attention as flex_module

    with _lock:
        if not _inside[0]:
            _inside[1] = flex_module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG
        _inside[0] += 1
        flex_module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    try:
        yield
    finally:
        with _lock:
            _inside[0] -= 1
            if not _inside[0]:
                flex_module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = bool(_inside[1])


def _tell(text: str) -> None:
    if text not in _said:
        _said.add(text)
        for tell in _told:
            tell(text)
