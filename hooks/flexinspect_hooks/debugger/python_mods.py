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

_listeners: list[Callable[[str], None]] = []
"""Who is to be told where rules do not run, once for each reason; empty when nobody debugs."""

_reported: set[str] = set()

_switch_lock = threading.Lock()
_switch_state = [0, False]
"""How many calls have the switch on now, and how it stood before the first."""

COMPILED = (
    "FlexAttention is compiled here, so breakpoints in a mask_mod or score_mod are not hit: "
    "the kernel does not run them as Python."
)
WITH_GRADIENTS = (
    "Breakpoints in the rules of a call with a score_mod are not hit where gradients are computed: "
    "run as Python, a score_mod would lose those of the tensors that it captures."
)


def run_mods_as_python(report: Callable[[str], None]) -> None:
    """Let uncompiled FlexAttention run its rules as Python; `tell` hears where it cannot."""
    # What a stop will need is loaded here: it must answer at once.
    from flexinspect_hooks.debugger import presentation  # noqa: F401

    _listeners[:] = [report]
    _reported.clear()


def stop_running_mods() -> None:
    """The run is over."""
    _listeners.clear()


def are_mods_debugged() -> bool:
    """Say whether a debugger may stop in a rule that runs as Python."""
    return bool(_listeners)


def on_compiled_call() -> None:
    """A compiled call of FlexAttention was seen; costs nothing when nobody debugs."""
    if _listeners:
        _report_once(COMPILED)


def with_python_mods(flex_attention: Callable[..., Any], score_mod: Any) -> Callable[..., Any]:
    """Return what calls uncompiled `flex_attention`: `own` itself when nobody debugs.

    `score_mod` is that of the call, None for none.
    """
    if not _listeners:
        return flex_attention
    import torch

    if score_mod is not None and torch.is_grad_enabled():
        _report_once(WITH_GRADIENTS)
        return flex_attention

    def call(*args: Any, **kwargs: Any) -> Any:
        with _compile_disabled():
            return flex_attention(*args, **kwargs)

    return call


@contextmanager
def _compile_disabled() -> Iterator[None]:
    import torch.nn.attention.flex_attention as flex_module

    with _switch_lock:
        if not _switch_state[0]:
            _switch_state[1] = flex_module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG
        _switch_state[0] += 1
        flex_module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    try:
        yield
    finally:
        with _switch_lock:
            _switch_state[0] -= 1
            if not _switch_state[0]:
                flex_module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = bool(_switch_state[1])


def _report_once(text: str) -> None:
    if text not in _reported:
        _reported.add(text)
        for tell in _listeners:
            tell(text)
