"""Notes which compiled FlexAttention call this process is in, for the report of a crash.

This module is imported before torch, so it imports torch inside functions only.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from flexinspect.trace.file.side_files import CallPlace, LastCallWriter

_call_files: list[LastCallWriter] = []
"""The file beside the trace that this process records; at most one."""

_descriptions: dict[tuple[Any, Any], str] = {}
"""Descriptions of calls, by the code objects of score_mod and mask_mod."""


def start_recording_calls(trace: Path) -> None:
    """Note calls beside this trace from now on, but not in processes forked from this one."""
    if not _call_files:
        os.register_at_fork(after_in_child=_call_files.clear)
    _call_files[:] = [LastCallWriter(trace)]


def stop_recording_calls() -> None:
    """Stop noting calls and remove the file."""
    while _call_files:
        _call_files.pop().remove()


def begin_kernel_call(place: CallPlace, query: Any, key: Any, score_mod: Any, mask: Any) -> None:
    """Note that a compiled call begins. Costs one or two microseconds.

    `query` is (B, H, rows, D) and `key` (B, H, keys, D).
    """
    if _call_files:
        _call_files[0].enter(place, query.size(-2), key.size(-2), _describe_call(score_mod, mask))


def end_kernel_call() -> None:
    """Note that the compiled call returned or raised."""
    if _call_files:
        _call_files[0].leave()


def _describe_call(score_mod: Any, block_mask: Any) -> str:
    mask_mod = getattr(block_mask, "mask_mod", None)
    key = (getattr(score_mod, "__code__", None), getattr(mask_mod, "__code__", None))
    if key not in _descriptions:
        from flexinspect_hooks.python_internals.mask_mod_identity import mask_mod_name

        parts = ["compiled"]
        if score_mod is not None:
            parts.append(f"score_mod{_captured_tensors_text(score_mod)}")
        if mask_mod is not None:
            parts.append(f"mask_mod {mask_mod_name(mask_mod)}{_captured_tensors_text(mask_mod)}")
        _descriptions[key] = f"flex ({', '.join(parts)})"
    return _descriptions[key]


def _captured_tensors_text(mod: Any) -> str:
    """Return " with captured tensor" for a mask_mod or score_mod that captures tensors."""
    from torch import Tensor

    from flexinspect_hooks.python_internals.mask_mod_identity import closure_contents

    code, global_values = getattr(mod, "__code__", None), getattr(mod, "__globals__", {})
    in_globals = [global_values.get(name) for name in getattr(code, "co_names", ())]
    n = sum(isinstance(value, Tensor) for value in (*closure_contents(mod), *in_globals))
    return "" if not n else " with captured tensor" if n == 1 else f" with {n} captured tensors"
