"""What may come next in an expression that is being typed."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from flexinspect.breaks.tree import quoted
from flexinspect.breaks.words import (
    COMPARISONS,
    FINDING,
    FINDING_HELP,
    OPTIONS,
    SEVERITIES,
    SIGHTS,
    UNITS,
    WORDS,
    Kind,
)

_PIECES = re.compile(
    r"""\s+|"(?:\\.|[^"\\])*"?|'(?:\\.|[^'\\])*'?|==|!=|<=|>=|[<>@(),\[\]]|[^\s()"',@<>=\[\]!]+|.""",
    re.DOTALL,
)
_VALUE = re.compile(r"[+-]?[\d.]|[\"']")
_MODULES = ("layers.*", "layers.*.self_attn", "layers.*.mlp", "lm_head")
_JOINS = {"and": "both must hold", "or": "one must hold"}


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
    modules: Collection[str] = _MODULES,
    finding_ids: Collection[str] = (),
) -> list[Completion]:
    """Return what may stand at the cursor, in place of the word that it is in or at the end of."""
    pieces = [(piece[0], piece.start()) for piece in _PIECES.finditer(text[:cursor])]
    start = cursor
    if pieces and not pieces[-1][0].isspace() and _is_growing(pieces[-1][0]):
        start = pieces.pop()[1]
    typed = text[start:cursor]
    before = [piece for piece, _ in pieces if not piece.isspace()]
    rest = re.match(r"[\w.*-]*", text[cursor:])
    stop = cursor + (rest.end() if rest and typed else 0)
    found = _expected(before, modules, finding_ids)
    return [Completion(word, start, stop, said) for word, said in found if _fits(word, typed)]


def _is_growing(piece: str) -> bool:
    return piece not in (*COMPARISONS, *"@(),[]")


def _fits(word: str, typed: str) -> bool:
    plain = typed.strip("\"'").lower()
    return word.strip('"').lower().startswith(plain) and word != typed


Words = Iterable[tuple[str, str]]


def _expected(before: list[str], modules: Collection[str], finding_ids: Collection[str]) -> Words:
    """Return what may follow these pieces, each with its meaning."""
    last = before[-1] if before else ""
    name = before[-2] if len(before) > 1 else ""
    if _in_options(before):
        return OPTIONS.items()
    if last == "@":
        return [(one, "modules of this name") for one in modules]
    if last == FINDING:
        return _findings(finding_ids)
    if last in COMPARISONS:
        return _right_side(before, name)
    if last in WORDS:
        return _after_name(last)
    if last in SIGHTS:
        return [("@", "at modules of a name"), *_JOINS.items()]
    if name == FINDING:
        return [(op, "a severity") for op in ("==", ">=")] + list(_JOINS.items())
    if _VALUE.match(last) or last == ")" or name in ("@", *COMPARISONS):
        return [*_units(before), *_JOINS.items()]
    return _beginning()


def _in_options(before: list[str]) -> bool:
    opened = [piece for piece in before if piece in "[]"]
    return bool(opened) and opened[-1] == "["


def _beginning() -> Words:
    words = [(word.name, word.help) for word in WORDS.values()]
    return [*words, *SIGHTS.items(), (FINDING, FINDING_HELP), ("not", "what must not hold")]


def _after_name(name: str) -> Words:
    is_text = WORDS[name].kind is Kind.TEXT
    return [(op, "") for op in (COMPARISONS[:2] if is_text else COMPARISONS)] + [("in", "a list")]


def _right_side(before: list[str], name: str) -> Words:
    """Return what a name may be compared with."""
    if name == FINDING or (len(before) > 2 and before[-3] == FINDING):
        return [(one, "a severity") for one in SEVERITIES]
    word = WORDS.get(name)
    if word is None:
        return [(one.name, one.help) for one in WORDS.values()]
    return [(quoted(choice), "") for choice in word.choices]


def _findings(finding_ids: Collection[str]) -> Words:
    families = dict.fromkeys(f"{one.partition('.')[0]}.*" for one in finding_ids)
    return [("*", "any"), *((one, "") for one in (*families, *finding_ids))]


def _units(before: list[str]) -> Words:
    """Return units of memory after a number that memory is compared with."""
    is_memory = len(before) > 2 and before[-3] in WORDS
    if not is_memory or WORDS[before[-3]].kind is not Kind.BYTES or not before[-1][:1].isdigit():
        return []
    return [(unit, "") for unit in UNITS if unit.endswith("iB")]
