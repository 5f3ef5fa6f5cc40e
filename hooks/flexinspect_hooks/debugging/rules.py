"""Mask and score rules that run as plain Python, so that a debugger stops in them.

Uncompiled `flex_attention` hands its rule to dynamo, which takes it in without running it. torch
has a switch that runs it instead; the values stay the same. Compiled calls run no rule at all.
"""

from __future__ import annotations

from collections.abc import Callable

_told: list[Callable[[], None]] = []
"""Who is to be told once that a compiled call was seen; empty when nobody debugs."""

COMPILED = (
    "FlexAttention is compiled here, so breakpoints in a mask_mod or score_mod are not hit: "
    "the kernel does not run them as Python."
)


def run_rules() -> None:
    """Let uncompiled FlexAttention run its rules as plain Python from now on."""
    import torch.nn.attention.flex_attention as flex_module

    # What a stop will need is loaded here: it must answer at once.
    from flexinspect_hooks.debugging import pictures  # noqa: F401

    flex_module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True


def tell_when_compiled(tell: Callable[[], None]) -> None:
    """Have `tell` called at the first compiled call of FlexAttention that is seen."""
    _told[:] = [tell]


def saw_compiled() -> None:
    """A compiled call of FlexAttention was seen; costs nothing when nobody debugs."""
    while _told:
        _told.pop()()
