"""What may come next in an expression that is being typed."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from flexinspect.breakpoints.names import (
    COMPARISONS,
    FINDING,
    FINDING_HELP,
    OBSERVATIONS,
    OPTION_HELP,
    SEVERITIES,
    UNITS,
    VALUE_NAMES,
    ValueKind,
)
from flexinspect.breakpoints.syntax_tree import quote

_COMPLETION_TOKENS = re.compile(
    r"""\s+|"(?:\\.|[^"\\])*"?|'(?:\\.|[^'\\])*'?|==|!=|<=|>=|[<>@(),\[\]]|[^\s()"',@<>=\[\]!]+|.""",
    re.DOTALL,
)
_VALUE_START = re.compile(r"[+-]?[\d.]|[\"']")
_MODULE_PATTERNS = ("layers.*", "layers.*.self_attn", "layers.*.mlp", "lm_head")
_CONNECTIVES = {"and": "both must hold", "or": "one must hold"}


@dataclass(frozen=True, slots=True)
class Completion:
    """A text that may stand from `start` to `stop`, and what it means."""

    text: str
    start: int
    stop: int
    help: str = ""


def complete(
    text: str,
    cursor: int,
    *,
    modules: Collection[str] = _MODULE_PATTERNS,
    finding_ids: Collection[str] = (),
) -> list[Completion]:
    """Return what may stand at the cursor, in place of the word that it is in or at the end of."""
    pieces = [(piece[0], piece.start()) for piece in _COMPLETION_TOKENS.finditer(text[:cursor])]
    start = cursor
    if pieces and not pieces[-1][0].isspace() and _is_word(pieces[-1][0]):
        start = pieces.pop()[1]
    typed = text[start:cursor]
    before = [piece for piece, _ in pieces if not piece.isspace()]
    rest = re.match(r"[\w.*-]*", text[cursor:])
    stop = cursor + (rest.end() if rest and typed else 0)
    found = _suggestions(before, modules, finding_ids)
    return [
        Completion(word, start, stop, said) for word, said in found if _matches_typed(word, typed)
    ]


def _is_word(piece: str) -> bool:
    return piece not in (*COMPARISONS, *"@(),[]")


def _matches_typed(word: str, typed: str) -> bool:
    plain = typed.strip("\"'").lower()
    return word.strip('"').lower().startswith(plain) and word != typed


Suggestions = Iterable[tuple[str, str]]


def _suggestions(
    before: list[str], modules: Collection[str], finding_ids: Collection[str]
) -> Suggestions:
    """Return what may follow these pieces, each with its meaning."""
    last = before[-1] if before else ""
    name = before[-2] if len(before) > 1 else ""
    if _is_in_options(before):
        return OPTION_HELP.items()
    if last == "@":
        return [(one, "modules of this name") for one in modules]
    if last == FINDING:
        return _finding_suggestions(finding_ids)
    if last in COMPARISONS:
        return _value_suggestions(before, name)
    if last in VALUE_NAMES:
        return _operator_suggestions(last)
    if last in OBSERVATIONS:
        return [("@", "at modules of a name"), *_CONNECTIVES.items()]
    if name == FINDING:
        return [(op, "a severity") for op in ("==", ">=")] + list(_CONNECTIVES.items())
    if _VALUE_START.match(last) or last == ")" or name in ("@", *COMPARISONS):
        return [*_unit_suggestions(before), *_CONNECTIVES.items()]
    return _condition_starts()


def _is_in_options(before: list[str]) -> bool:
    opened = [piece for piece in before if piece in "[]"]
    return bool(opened) and opened[-1] == "["


def _condition_starts() -> Suggestions:
    words = [(word.name, word.help) for word in VALUE_NAMES.values()]
    return [*words, *OBSERVATIONS.items(), (FINDING, FINDING_HELP), ("not", "what must not hold")]


def _operator_suggestions(name: str) -> Suggestions:
    is_text = VALUE_NAMES[name].kind is ValueKind.TEXT
    return [(op, "") for op in (COMPARISONS[:2] if is_text else COMPARISONS)] + [("in", "a list")]


def _value_suggestions(before: list[str], name: str) -> Suggestions:
    """Return what a name may be compared with."""
    if name == FINDING or (len(before) > 2 and before[-3] == FINDING):
        return [(one, "a severity") for one in SEVERITIES]
    word = VALUE_NAMES.get(name)
    if word is None:
        return [(one.name, one.help) for one in VALUE_NAMES.values()]
    return [(quote(choice), "") for choice in word.choices]


def _finding_suggestions(finding_ids: Collection[str]) -> Suggestions:
    families = dict.fromkeys(f"{one.partition('.')[0]}.*" for one in finding_ids)
    return [("*", "any"), *((one, "") for one in (*families, *finding_ids))]


def _unit_suggestions(before: list[str]) -> Suggestions:
    """Return units of memory after a number that memory is compared with."""
    is_memory = len(before) > 2 and before[-3] in VALUE_NAMES
    if (
        not is_memory
        or VALUE_NAMES[before[-3]].kind is not ValueKind.BYTES
        or not before[-1][:1].isdigit()
    ):
        return []
    return [(unit, "") for unit in UNITS if unit.endswith("iB")]
