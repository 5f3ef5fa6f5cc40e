"""Keywords that a layer passes to a registered attention function and that its code never reads.

Layers pass the soft cap, the window and the sinks of their architecture as keywords, which a
function with `**kwargs` accepts without a word. Its code is read, not run.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator, Mapping
from types import CodeType
from typing import Any

_WORDS = {
    "softcap": ("cap",),
    "s_aux": ("aux", "sink"),
    "sliding_window": ("window",),
}
"""Keywords that change the numbers, and parts of names by which a function may know their value."""
_LOADS = ("LOAD_FAST", "LOAD_DEREF", "LOAD_CLOSURE", "LOAD_GLOBAL", "LOAD_ATTR", "LOAD_METHOD")


def unread_keywords(function: Callable[..., Any], passed: Mapping[str, Any]) -> list[str]:
    """Return the names of keywords that have a value and that a function does not read.

    None are returned for a function that hands all of its keywords on to another.
    """
    function = getattr(function, "func", getattr(function, "__wrapped__", function))
    code = getattr(function, "__code__", None)
    if code is None or _hands_on(code):
        return []
    names = set(_read_names(code))
    return [
        name
        for name, words in _WORDS.items()
        if passed.get(name) is not None
        and not any(word in known.lower() for known in names for word in words)
    ]


def _hands_on(code: CodeType) -> bool:
    return any(
        one.opname.startswith(("CALL_FUNCTION_EX", "DICT_MERGE"))
        for one in dis.get_instructions(code)
    )


def _read_names(code: CodeType) -> Iterator[str]:
    """Yield the variables, attributes and texts that a function and those inside of it read."""
    for one in dis.get_instructions(code):
        if one.opname.startswith(_LOADS) and isinstance(one.argval, str):
            yield one.argval
        elif one.opname.startswith(("LOAD_CONST", "KW_NAMES")):
            for value in one.argval if isinstance(one.argval, tuple) else (one.argval,):
                if isinstance(value, str):
                    yield value
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _read_names(value)
