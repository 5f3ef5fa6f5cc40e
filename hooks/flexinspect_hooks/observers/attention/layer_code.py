"""The user's code that computes the attention of a layer: a patched forward, or a function."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from types import CodeType
from typing import Any

from flexinspect_hooks.debugger.frames import is_user_file
from flexinspect_hooks.observers.attention.call_references import AttentionCall
from flexinspect_hooks.step_writer.attention_records import LayerCode


class LayerCodes:
    """Finds the functions of the user that compute attention, each with its layers only once."""

    def __init__(self) -> None:
        # By identity: hashing a code object reads all of it, and this runs at each step.
        self._seen: dict[tuple[int, int], CodeType] = {}

    def find_new(self, calls: Iterable[AttentionCall]) -> tuple[LayerCode, ...]:
        """Return the functions that computed these calls, without those that are known."""
        layers: dict[CodeType, list[int]] = {}
        for call in calls:
            code = _user_code(call)
            if code is not None and (call.layer, id(code)) not in self._seen:
                self._seen[call.layer, id(code)] = code
                layers.setdefault(code, []).append(call.layer)
        return tuple(
            LayerCode(code.co_qualname, f"{code.co_filename}:{code.co_firstlineno}", tuple(own))
            for code, own in layers.items()
        )


def _user_code(call: AttentionCall) -> CodeType | None:
    """Return the user's code of the layer: its forward, else its attention function."""
    outer = call.layer_call or call
    for function in (getattr(call.module, "forward", None), outer.function):
        code = _code_of(function)
        if code is not None and is_user_file(code.co_filename):
            return code
    return None


def _code_of(function: Any) -> CodeType | None:
    while isinstance(function, partial):
        function = function.func
    code = getattr(function, "__code__", None)
    return code if isinstance(code, CodeType) else None
