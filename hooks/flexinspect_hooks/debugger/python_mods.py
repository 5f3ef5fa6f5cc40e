"""Runs mask_mods and score_mods as plain Python, so that a debugger can stop in them.

Uncompiled `flex_attention` passes them to dynamo, which traces them without running them. A switch
in torch runs them instead; the values and the gradients of q, k and v stay the same. Gradients of
tensors that a score_mod captures would be lost, so the switch stays off there. Compiled calls never
run them as Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flexinspect_hooks.python_internals.patching import patch
from flexinspect_hooks.python_internals.threads import SharedSwitch

_listeners: list[Callable[[str], None]] = []
"""Receivers of the messages, each sent once; empty without a debugger."""

_reported: set[str] = set()

COMPILED = (
    "FlexAttention is compiled here, so breakpoints in a mask_mod or score_mod are not hit: "
    "the kernel does not run them as Python."
)
WITH_GRADIENTS = (
    "Breakpoints in the mods of a call with a score_mod are not hit where gradients are computed: "
    "run as Python, a score_mod would lose the gradients of the tensors that it captures."
)


def run_mods_as_python(report: Callable[[str], None]) -> None:
    """Let uncompiled FlexAttention run its mods as Python; `report` receives where it cannot."""
    # Imported now, as a stop must respond at once.
    from flexinspect_hooks.debugger import value_descriptions  # noqa: F401

    _listeners[:] = [report]
    _reported.clear()


def stop_running_mods() -> None:
    """Stop running mods as Python at the end of the run."""
    _listeners.clear()


def are_mods_debugged() -> bool:
    """Return whether mods run as Python for a debugger."""
    return bool(_listeners)


def on_compiled_call() -> None:
    """Report a compiled call of FlexAttention; costs nothing without a debugger."""
    if _listeners:
        _report_once(COMPILED)


def with_python_mods(flex_attention: Callable[..., Any], score_mod: Any) -> Callable[..., Any]:
    """Wrap uncompiled `flex_attention` to run its mods as Python; unchanged without a debugger.

    `score_mod` is that of the call, or None.
    """
    if not _listeners:
        return flex_attention
    import torch

    if score_mod is not None and torch.is_grad_enabled():
        _report_once(WITH_GRADIENTS)
        return flex_attention
    return flex_as_python(flex_attention)


def flex_as_python(flex_attention: Callable[..., Any]) -> Callable[..., Any]:
    """Return uncompiled `flex_attention` that runs as plain Python, without dynamo."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with _compile_disabled.on():
            return flex_attention(*args, **kwargs)

    return call


def _disable_compile() -> Callable[[], object]:
    import torch.nn.attention.flex_attention as flex_module

    return patch(flex_module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


_compile_disabled = SharedSwitch(_disable_compile)


def _report_once(text: str) -> None:
    if text not in _reported:
        _reported.add(text)
        for report in _listeners:
            report(text)
