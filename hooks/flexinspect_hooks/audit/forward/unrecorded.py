"""Forwards of the audit, whose kernel calls are no part of the program's run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

_KERNEL_CALLS = "flexinspect_hooks.observers.attention.kernel_calls"


@contextmanager
def unrecorded() -> Iterator[None]:
    """While entered, kernel calls of this thread are not recorded.

    The module that records them imports torch's compiler, which takes seconds: where nothing has
    imported it, as in the audit of a trace, nothing is recorded.
    """
    module = sys.modules.get(_KERNEL_CALLS)
    if module is None:
        yield
        return
    module.set_unrecorded(is_unrecorded=True)
    try:
        yield
    finally:
        module.set_unrecorded(is_unrecorded=False)
