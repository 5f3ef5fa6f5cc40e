"""Which call of compiled FlexAttention this process is in, noted for whoever sees it die.

Loaded before torch is: what needs it loads it in a call, when it is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flexinspect.trace.crumb import Crumb

_crumbs: list[Crumb] = []
"""Of the trace that this process records for whoever started it; at most one."""

_words: dict[tuple[Any, Any], str] = {}
"""What a call is, by the code of its rules."""


def leave_crumbs(trace: Path) -> None:
    """Note calls beside this trace from now on."""
    _crumbs[:] = [Crumb(trace)]


def remove_crumbs() -> None:
    """Note nothing any more."""
    while _crumbs:
        _crumbs.pop().remove()


def entered(place: tuple[int | None, int | None, int | None], given: Mapping[str, Any]) -> None:
    """Note that a compiled call begins: generation, step and layer, and its arguments by name."""
    if _crumbs:
        lengths = (int(given["query"].shape[-2]), int(given["key"].shape[-2]))
        _crumbs[0].enter(*place, lengths, _what(given.get("score_mod"), given.get("block_mask")))


def left() -> None:
    """Note that it is over."""
    if _crumbs:
        _crumbs[0].leave()


def _what(score_mod: Any, block_mask: Any) -> str:
    mask_mod = getattr(block_mask, "mask_mod", None)
    key = (getattr(score_mod, "__code__", None), getattr(mask_mod, "__code__", None))
    if key not in _words:
        _words[key] = _describe(score_mod, mask_mod)
    return _words[key]


def _describe(score_mod: Any, mask_mod: Any) -> str:
    from flexinspect_hooks.ruleidentity import rule_name

    parts = ["compiled"]
    if score_mod is not None:
        parts.append(f"score rule{_captured(score_mod)}")
    if mask_mod is not None:
        parts.append(f"mask rule {rule_name(mask_mod)}{_captured(mask_mod)}")
    return f"flex ({', '.join(parts)})"


def _captured(rule: Any) -> str:
    """Return ` with captured tensor` for a rule that reads tensors from around it."""
    from torch import Tensor

    code, around = getattr(rule, "__code__", None), getattr(rule, "__globals__", {})
    cells = [_content(cell) for cell in getattr(rule, "__closure__", None) or ()]
    names = [around.get(name) for name in getattr(code, "co_names", ())]
    n = sum(isinstance(value, Tensor) for value in (*cells, *names))
    return "" if not n else " with captured tensor" if n == 1 else f" with {n} captured tensors"


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is not set yet
        return None
