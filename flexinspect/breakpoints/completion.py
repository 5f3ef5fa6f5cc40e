"""Completion of an expression while it is typed."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import NamedTuple

from flexinspect.breakpoints import grammar

_COMPLETION_TOKENS = re.compile(
    r"""\s+|"(?:\\.|[^"\\])*"?|'(?:\\.|[^'\\])*'?|==|!=|<=|>=|[<>@(),\[\]]|[^\s()"',@<>=\[\]!]+|.""",
    re.DOTALL,
)
_SIGNS = (*grammar.COMPARISONS, *"@(),[]")
_VALUE_START = re.compile(r"[+-]?[\d.]|[\"']")
_MODULE_PATTERNS = ("layers.*", "layers.*.self_attn", "layers.*.mlp", "lm_head")
_CONNECTIVES = {"and": "both conditions hold", "or": "one condition holds"}


Names = Collection[str]


class Completion(NamedTuple):
    """A suggestion that replaces the text from `start` to `stop`, and its meaning."""

    text: str
    start: int
    stop: int
    help: str = ""


def complete(
    text: str, cursor: int, *, modules: Names = _MODULE_PATTERNS, finding_ids: Names = ()
) -> list[Completion]:
    """Return suggestions for the cursor; they replace the word that it is in or at the end of."""
    pieces = [(piece[0], piece.start()) for piece in _COMPLETION_TOKENS.finditer(text[:cursor])]
    start = cursor
    if pieces and not pieces[-1][0].isspace() and pieces[-1][0] not in _SIGNS:
        start = pieces.pop()[1]
    typed = text[start:cursor]
    before = [piece for piece, _ in pieces if not piece.isspace()]
    rest = re.match(r"[\w.*-]*", text[cursor:])
    stop = cursor + (rest.end() if rest and typed else 0)
    plain = typed.strip("\"'").lower()
    return [
        Completion(word, start, stop, meaning)
        for word, meaning in _suggestions(before, modules, finding_ids)
        if word.strip('"').lower().startswith(plain) and word != typed
    ]


_Suggestions = Iterable[tuple[str, str]]


def _suggestions(before: list[str], modules: Names, finding_ids: Names) -> _Suggestions:
    """Return the possible next words after these pieces, each with its meaning."""
    third, name, last = ["", "", "", *before][-3:]
    opened = [piece for piece in before if piece in "[]"]
    if opened and opened[-1] == "[":
        return grammar.OPTION_HELP.items()
    if last == "@":
        return [(pattern, "modules with this name") for pattern in modules]
    if last == grammar.FINDING:
        families = dict.fromkeys(f"{id_.partition('.')[0]}.*" for id_ in finding_ids)
        return [("*", "any"), *((pattern, "") for pattern in (*families, *finding_ids))]
    if last in grammar.COMPARISONS:
        return _value_suggestions(name, third)
    if last in grammar.VALUE_NAMES:
        is_text = grammar.VALUE_NAMES[last].kind is grammar.ValueKind.TEXT
        operators = grammar.COMPARISONS[:2] if is_text else grammar.COMPARISONS
        return [*((op, "") for op in operators), ("in", "a list")]
    if last in grammar.OBSERVATIONS:
        return [("@", "at modules whose name matches"), *_CONNECTIVES.items()]
    if name == grammar.FINDING:
        return [(op, "a severity") for op in ("==", ">=")] + list(_CONNECTIVES.items())
    if _VALUE_START.match(last) or last == ")" or name in ("@", *grammar.COMPARISONS):
        return [*_unit_suggestions(third, last), *_CONNECTIVES.items()]
    words = [(word.name, word.help) for word in grammar.VALUE_NAMES.values()]
    finding = (grammar.FINDING, grammar.FINDING_HELP)
    negation = ("not", "a condition that does not hold")
    return [*words, *grammar.OBSERVATIONS.items(), finding, negation]


def _value_suggestions(name: str, before_name: str) -> _Suggestions:
    if grammar.FINDING in (name, before_name):
        return [(severity, "a severity") for severity in grammar.SEVERITIES]
    word = grammar.VALUE_NAMES.get(name)
    if word is None:
        return [(value.name, value.help) for value in grammar.VALUE_NAMES.values()]
    return [(grammar.quote(choice), "") for choice in word.choices]


def _unit_suggestions(name: str, number: str) -> _Suggestions:
    """Return units of memory after a number that a memory value is compared with."""
    word = grammar.VALUE_NAMES.get(name)
    is_memory = word is not None and word.kind is grammar.ValueKind.BYTES and number[:1].isdigit()
    return [(unit, "") for unit in grammar.UNITS if is_memory and unit.endswith("iB")]
