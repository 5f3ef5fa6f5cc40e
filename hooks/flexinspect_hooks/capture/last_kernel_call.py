"""Which call of compiled FlexAttention this process is in, noted for whoever sees it die.

Loaded before torch is: what needs it loads it in a call, when it is there.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from flexinspect.trace.file.side_files import CallPlace, LastCallWriter

_call_files: list[LastCallWriter] = []
"""Of the trace that this process records for whoever started it; at most one."""

_descriptions: dict[tuple[Any, Any], str] = {}
"""What a call is, by the code of its rules."""

_last_described: list[Any] = [None, None, ""]
"""The rules of the last call, by id, and what it was: all layers of a step share them."""


def start_recording_calls(trace: Path) -> None:
    """Note calls beside this trace from now on, in this process and in none forked from it."""
    if not _call_files:
        os.register_at_fork(after_in_child=_call_files.clear)
    _call_files[:] = [LastCallWriter(trace)]


def stop_recording_calls() -> None:
    """Note nothing any more."""
    while _call_files:
        _call_files.pop().remove()


def begin_kernel_call(
    place: CallPlace, query: Any, key: Any, score_mod: Any, block_mask: Any
) -> None:
    """Note that a compiled call begins, with its arguments. Costs a microsecond or two."""
    if _call_files:
        if _last_described[0] != id(score_mod) or _last_described[1] != id(block_mask):
            _last_described[:] = (
                id(score_mod),
                id(block_mask),
                _describe_call(score_mod, block_mask),
            )
        _call_files[0].enter(place, query.size(-2), key.size(-2), _last_described[2])


def end_kernel_call() -> None:
    """Note that it is over."""
    if _call_files:
        _call_files[0].leave()


def _describe_call(score_mod: Any, block_mask: Any) -> str:
    mask_mod = getattr(block_mask, "mask_mod", None)
    key = (getattr(score_mod, "__code__", None), getattr(mask_mod, "__code__", None))
    if key not in _descriptions:
        _descriptions[key] = _format_call(score_mod, mask_mod)
    return _descriptions[key]


def _format_call(score_mod: Any, mask_mod: Any) -> str:
    from flexinspect_hooks.interpreter.user_functions import mask_mod_name

    parts = ["compiled"]
    if score_mod is not None:
        parts.append(f"score rule{_captured_tensors_text(score_mod)}")
    if mask_mod is not None:
        parts.append(f"mask rule {mask_mod_name(mask_mod)}{_captured_tensors_text(mask_mod)}")
    return f"flex ({', '.join(parts)})"


def _captured_tensors_text(rule: Any) -> str:
    """Return ` with captured tensor` for a rule that reads tensors from around it."""
    from torch import Tensor

    code, around = getattr(rule, "__code__", None), getattr(rule, "__globals__", {})
    cells = [_cell_contents(cell) for cell in getattr(rule, "__closure__", None) or ()]
    names = [around.get(name) for name in getattr(code, "co_names", ())]
    n = sum(isinstance(value, Tensor) for value in (*cells, *names))
    return "" if not n else " with captured tensor" if n == 1 else f" with {n} captured tensors"


def _cell_contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is not set yet
        return None
