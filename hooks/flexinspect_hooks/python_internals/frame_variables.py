"""Reads the variables of functions that run, and keeps none of their values alive."""

from __future__ import annotations

import inspect
import sys
from types import FrameType
from typing import Any


def variables_of(frame: FrameType) -> list[tuple[str, Any]]:
    """Return the variables of a frame that runs, by name.

    Before Python 3.13 (PEP 667) a frame keeps the dict that `f_locals` returned until it ends, and
    with it what the function drops afterwards, such as a cache. So the dict is emptied, unless the
    program has it, too: `locals()` of the function returns the same one.
    """
    variables: Any = frame.f_locals
    found = list(variables.items())
    is_copy = type(variables) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED
    if is_copy and sys.getrefcount(variables) <= _OWN_REFERENCES:
        variables.clear()
    return found


_OWN_REFERENCES = 3
"""Those of the frame, of the variable above, and of the argument of `getrefcount`."""
