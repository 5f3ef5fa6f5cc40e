"""Names with wildcards: of modules, whose names have parts, and of findings."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from functools import lru_cache

_GLOB_PARTS = re.compile(r"\*{2,}|\*|\?|\[!?[^\[\]]+\]|.", re.DOTALL)
_WILDCARDS = {"*": r"[^.]*", "?": r"[^.]"}


def matches_module(pattern: str, name: str) -> bool:
    """Say whether a module is meant: by its whole name, or by the last parts of it.

    `*` stands for one part (`layers.*.self_attn`) or a piece of one, `**` for any number of parts,
    `[0-3]` for one of these characters.
    """
    return _compile_glob(pattern).fullmatch(name) is not None


def count_wildcards(pattern: str) -> int:
    """Return how many pieces of a module's pattern stand for more than themselves."""
    return sum(len(piece) > 1 or piece in _WILDCARDS for piece in _GLOB_PARTS.findall(pattern))


def matches_finding(pattern: str, finding_id: str) -> bool:
    """Say whether a finding is meant; `*` stands for any text."""
    return fnmatchcase(finding_id, pattern)


@lru_cache(maxsize=256)
def _compile_glob(pattern: str) -> re.Pattern[str]:
    body = "".join(map(_glob_part_regex, _GLOB_PARTS.findall(pattern)))
    try:
        return re.compile(rf"(?:.*\.)?(?:{body})", re.DOTALL)
    except re.error:  # such as [z-a]: then it means itself
        return re.compile(rf"(?:.*\.)?{re.escape(pattern)}", re.DOTALL)


def _glob_part_regex(piece: str) -> str:
    if piece.startswith("**"):
        return ".*"
    if piece in _WILDCARDS:
        return _WILDCARDS[piece]
    if len(piece) > 1:
        inside = piece[1:-1].replace("\\", "\\\\")
        return f"[^{inside[1:]}]" if inside.startswith("!") else f"[{inside}]"
    return re.escape(piece)
