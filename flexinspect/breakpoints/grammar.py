"""The grammar of breakpoint expressions: names, syntax tree, tokenizer and parser.

    expression  = either, { "or", either } ;
    either      = condition, { "and", condition } ;
    condition   = "not", condition | "(", expression, ")" | observation | finding | comparison ;

The whole grammar is in docs/breakpoints.md. Invalid text raises `ExpressionError`, which points at
the place; the text never runs as Python. `parse(to_text(tree)) == tree` for every tree that `parse`
returns.
"""

from __future__ import annotations

import codecs
import math
import re
from collections.abc import Callable, Collection, Iterator
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Literal, NamedTuple, NoReturn
from unicodedata import east_asian_width

from msgspec import Struct

from flexinspect.core.errors import UsageError
from flexinspect.core.text import did_you_mean, escape_unprintable
from flexinspect.records.finding import Severity
from flexinspect.records.step import PATHS

MAX_EXPRESSION_LENGTH = 2000  # length of the longest expression, in characters
MAX_DEPTH = 50  # largest nesting of parentheses and "not"s
MAX_WILDCARDS = 8  # in a module name: the cost of a match grows exponentially with them
_MAX_EXACT_DIGITS = 15  # digits that a float holds exactly

# -- names -----------------------------------------------------------------------------------------


class ValueKind(StrEnum):
    """Kind of a name or a constant; the values are used in error messages."""

    NUMBER = "a number"
    BYTES = "an amount of memory"
    TEXT = "a text"


class ValueName(Struct, frozen=True):
    """A name with a value. `choices` lists all values of a text; it is empty for a free text."""

    name: str
    kind: ValueKind
    help: str
    choices: tuple[str, ...] = ()


_NUMBER, _BYTES, _TEXT = ValueKind
_VALUE_NAMES = (
    ValueName("entropy", _NUMBER, "entropy of the newest row's distribution, in nats"),
    ValueName("margin", _NUMBER, "logit of the best token minus the second"),
    ValueName("prob", _NUMBER, "probability of the chosen token, before processors"),
    ValueName("logprob", _NUMBER, "its natural logarithm"),
    ValueName("rank", _NUMBER, "rank of the chosen token; 0 is the best"),
    ValueName("token", _TEXT, "the text that the chosen token adds"),
    ValueName("token_id", _NUMBER, "the id of the chosen token"),
    ValueName("step", _NUMBER, "the step; 0 is the prompt"),
    ValueName("phase", _TEXT, "prefill or decode", ("prefill", "decode")),
    ValueName("generation", _NUMBER, "the generation, from 0"),
    ValueName("branch", _NUMBER, "the branch, 0 for the base"),
    ValueName("q_len", _NUMBER, "rows that the step, or the layer's attention call, computes"),
    ValueName("kv_len", _NUMBER, "keys that these rows may attend to, including themselves"),
    ValueName("wall_ms", _NUMBER, "duration of the step, in milliseconds"),
    ValueName("rss", _BYTES, "memory of the process"),
    ValueName("kv_cache", _BYTES, "memory of the KV cache"),
    ValueName("cuda_allocated", _BYTES, "GPU memory in use"),
    ValueName("cuda_reserved", _BYTES, "GPU memory reserved by torch"),
    ValueName("cuda_peak", _BYTES, "peak of GPU memory in use"),
    ValueName("layer", _NUMBER, "the layer, from 0"),
    ValueName("path", _TEXT, "how the layer's attention ran", PATHS),
    ValueName("lse_error", _NUMBER, "distance of the attention sum from 1 (LSE check)"),
    ValueName("norm", _NUMBER, "norm of the layer's output"),
    ValueName("std", _NUMBER, "standard deviation of the layer's output"),
    ValueName("mean", _NUMBER, "mean of the layer's output"),
    ValueName("min", _NUMBER, "smallest value of the layer's output"),
    ValueName("max", _NUMBER, "largest value of the layer's output"),
)
VALUE_NAMES = {word.name: word for word in _VALUE_NAMES}

PER_LAYER_NAMES = ("layer", "path", "lse_error", "norm", "std", "mean", "min", "max")
"""Names of which each layer has its own value."""

NAN, INF, EMPTY_ROW, FALLBACK = "nan", "inf", "empty-row", "fallback"
OBSERVATIONS = {
    NAN: "a NaN in a layer's output or the logits, or @ modules whose name matches",
    INF: "an infinity, in the same places",
    EMPTY_ROW: "a row that attends to no key",
    FALLBACK: "an attention call that fell back from FlexAttention",
}
"""Conditions without a comparison: something was observed, anywhere or @ modules of a name."""

FINDING = "finding"
FINDING_HELP = "a finding that is new in this step: finding mask.*, finding * >= warning"
SEVERITIES = tuple(severity.value for severity in Severity)

COMPARISONS = ("==", "!=", "<", "<=", ">", ">=")
KEYWORDS = ("and", "or", "not", "in")
ALL_NAMES = (*VALUE_NAMES, *OBSERVATIONS, FINDING)

_DECIMAL_UNITS = {"B": 1, "kB": 1000, "KB": 1000, "MB": 1000**2, "GB": 1000**3}
UNITS = {**_DECIMAL_UNITS, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}

OPTION_HELP = {
    "hits=": "stop from this hit on, for example hits=3",
    "ignore=": "ignore this many hits first, for example ignore=10",
    "once": "stop once, then disable it",
    "log": "record an event instead of stopping",
    "off": "add it disabled",
}


# -- syntax tree -----------------------------------------------------------------------------------


class ExpressionError(UsageError):
    """An invalid expression; the message underlines `text[start:stop]`.

    `reason` is the message without the underlined text, as an input field shows it.
    """

    def __init__(
        self, reason: str, text: str, start: int, stop: int, *, hint: str | None = None
    ) -> None:
        underline = " " * _count_cells(text[:start]) + "^" * max(_count_cells(text[start:stop]), 1)
        super().__init__(f"{reason}\n  {_printable(text)}\n  {underline}", hint=hint)
        self.reason, self.text, self.start, self.stop = reason, text, start, stop

    def with_location(self, where: str) -> ExpressionError:
        """Return the same error with the location of the expression, such as "file:line"."""
        reason = f"{where}: {self.reason}"
        return ExpressionError(reason, self.text, self.start, self.stop, hint=self.hint)


def _printable(text: str) -> str:
    """Return the text in one line of as many characters, with unprintable ones replaced."""
    return "".join(c if c.isprintable() else " " if c.isspace() else "\N{MIDDLE DOT}" for c in text)


def _count_cells(text: str) -> int:
    return sum(2 if east_asian_width(character) in "WF" else 1 for character in text)


class Number(Struct, frozen=True):
    """A number; with a unit it is an amount of memory."""

    value: float
    unit: str = ""


class Text(Struct, frozen=True):
    """A text in quotes."""

    value: str


class Name(Struct, frozen=True):
    """A name of `VALUE_NAMES`."""

    name: str


Operand = Number | Text | Name


class Compare(Struct, frozen=True):
    """A comparison of two operands; `in` has a list, or a name that is a text, on its right."""

    left: Operand
    op: str
    right: Operand | tuple[Number | Text, ...]


class ObservationCondition(Struct, frozen=True):
    """One of `OBSERVATIONS`, anywhere or at modules whose names match."""

    kind: str
    module_pattern: str | None = None

    @property
    def is_checked_by_name(self) -> bool:
        """Whether the numbers of modules are checked, which a step's record does not have."""
        return self.module_pattern is not None and self.kind in (NAN, INF)


class FindingCondition(Struct, frozen=True):
    """A new finding whose id matches `pattern`, and whose severity satisfies `op`."""

    pattern: str
    op: str | None = None
    severity: str | None = None


class Not(Struct, frozen=True):
    """Negation."""

    inner: Expression


class And(Struct, frozen=True):
    """Conjunction; no part is an `And`."""

    parts: tuple[Expression, ...]


class Or(Struct, frozen=True):
    """Disjunction; no part is an `Or`."""

    parts: tuple[Expression, ...]


Expression = Compare | ObservationCondition | FindingCondition | Not | And | Or
Leaf = Compare | ObservationCondition | FindingCondition


def to_text(tree: Expression) -> str:
    """Return an expression as text, without redundant parentheses."""
    if isinstance(tree, Or):
        return " or ".join(map(to_text, tree.parts))
    if isinstance(tree, And):
        return " and ".join(_parenthesized(part, Or) for part in tree.parts)
    if isinstance(tree, Not):
        return f"not {_parenthesized(tree.inner, Or, And)}"
    if isinstance(tree, Compare):
        return f"{operand_text(tree.left)} {tree.op} {operand_text(tree.right)}"
    if isinstance(tree, ObservationCondition):
        return tree.kind if tree.module_pattern is None else f"{tree.kind} @ {tree.module_pattern}"
    return f"finding {tree.pattern}" + (f" {tree.op} {tree.severity}" if tree.op else "")


def _parenthesized(tree: Expression, *looser_types: type) -> str:
    return f"({to_text(tree)})" if isinstance(tree, looser_types) else to_text(tree)


def operand_text(operand: Operand | tuple[Number | Text, ...]) -> str:
    """Return an operand as text."""
    if isinstance(operand, tuple):
        return f"({', '.join(map(operand_text, operand))})"
    if isinstance(operand, Name):
        return operand.name
    if isinstance(operand, Text):
        return quote(operand.value)
    return f"{operand.value!r} {operand.unit}" if operand.unit else repr(operand.value)


def quote(text: str) -> str:
    """Return a text in double quotes, with escapes for unprintable characters."""
    escaped = escape_unprintable(text).replace('"', r"\"")
    return f'"{escaped}"'


def leaves(tree: Expression) -> Iterator[Leaf]:
    """Yield the conditions of an expression, from left to right."""
    if isinstance(tree, And | Or):
        for part in tree.parts:
            yield from leaves(part)
    elif isinstance(tree, Not):
        yield from leaves(tree.inner)
    else:
        yield tree


def value_names_in(tree: Expression) -> tuple[str, ...]:
    """Return the value names in an expression, each once."""
    sides = (getattr(leaf, side, None) for leaf in leaves(tree) for side in ("left", "right"))
    return tuple(dict.fromkeys(side.name for side in sides if isinstance(side, Name)))


def is_per_layer(tree: Expression) -> bool:
    """Return whether an expression is evaluated per layer: it has a name with a value per layer."""
    return not set(PER_LAYER_NAMES).isdisjoint(value_names_in(tree))


def observations_in(tree: Expression) -> tuple[ObservationCondition, ...]:
    """Return the observations in an expression, each once."""
    observations = (leaf for leaf in leaves(tree) if isinstance(leaf, ObservationCondition))
    return tuple(dict.fromkeys(observations))


def has_finding(tree: Expression) -> bool:
    """Return whether an expression has a `finding` condition."""
    return any(isinstance(leaf, FindingCondition) for leaf in leaves(tree))


def needs_calls(tree: Expression) -> bool:
    """Return whether an expression is evaluated at each attention call while the model runs."""
    return is_per_layer(tree) or any(s.kind in (EMPTY_ROW, FALLBACK) for s in observations_in(tree))


_GLOB_PARTS = re.compile(r"\*{2,}|\*|\?|\[!?[^\[\]]+\]|.", re.DOTALL)
_WILDCARDS = {"*": r"[^.]*", "?": r"[^.]"}


def matches_module(pattern: str, name: str) -> bool:
    """Return whether a pattern matches a module's name, or the last parts of it.

    `*` matches one part (`layers.*.self_attn`) or a piece of one, `**` any number of parts, `[0-3]`
    one of these characters.
    """
    return _compile_glob(pattern).fullmatch(name) is not None


def count_wildcards(pattern: str) -> int:
    """Return the number of wildcards in a module pattern."""
    return sum(len(piece) > 1 or piece in _WILDCARDS for piece in _GLOB_PARTS.findall(pattern))


@lru_cache(maxsize=256)
def _compile_glob(pattern: str) -> re.Pattern[str]:
    body = "".join(map(_glob_part_regex, _GLOB_PARTS.findall(pattern)))
    try:
        return re.compile(rf"(?:.*\.)?(?:{body})", re.DOTALL)
    except re.error:  # an invalid range such as [z-a]: match it literally
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


def parse(text: str, *, finding_ids: Collection[str] | None = None) -> Expression:
    """Parse an expression. Raises `ExpressionError`.

    With `finding_ids`, a `finding` pattern that matches none of them is refused.
    """
    return _Parser(text, finding_ids).parse()


# -- tokens ----------------------------------------------------------------------------------------


class _Token(NamedTuple):
    """A token, from `start` to `stop` in the text.

    A glob is a name with wildcards, which follows `@` or `finding`.
    """

    kind: Literal["word", "number", "text", "op", "glob", "end"]
    value: str
    start: int
    stop: int


_GLOB = re.compile(r"(?:(?!!=)[^\s()\"',@<>=])+")
_TOKEN = re.compile(
    r"""(?P<word>[^\W\d]\w*(?:-[^\W\d]\w*)*)
    |(?P<number>[+-]?(?:\d+(?:_\d+)*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)
    |(?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
    |(?P<op>==|!=|<=|>=|<|>|@|\(|\)|\[|\]|,)""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(
    r"\\(?:[ntr0\\\"']|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|(.|$))", re.S
)
_OPERATOR_HINTS = {
    "=": "A comparison is written with two signs: ==.",
    "&": "Conditions are joined with the word and.",
    "|": "Conditions are joined with the word or.",
    "!": "Negation is written with the word not.",
}


def _tokenize(text: str) -> list[_Token]:
    """Return the tokens of an expression, the last of which is its end."""
    if len(text) > MAX_EXPRESSION_LENGTH:
        reason = f"A breakpoint has at most {MAX_EXPRESSION_LENGTH} characters, and this one has "
        raise ExpressionError(f"{reason}{len(text)}.", f"{text[:60]}…", 60, 61)
    if surrogate := re.search("[\ud800-\udfff]", text):
        raise ExpressionError("This character is not valid UTF-8.", text, *surrogate.span())
    tokens: list[_Token] = []
    at, end = 0, len(text.rstrip())
    while at < end:
        if text[at].isspace():
            at += 1
            continue
        tokens.append(_next_token(text, at, tokens[-1].value if tokens else ""))
        at = tokens[-1].stop
    return [*tokens, _Token("end", "", end, end)]


def _next_token(text: str, at: int, before: str) -> _Token:
    if before in ("@", FINDING) and (glob := _GLOB.match(text, at)):
        return _Token("glob", glob[0], at, glob.end())
    match = _TOKEN.match(text, at)
    if match is None:
        raise _unexpected_character(text, at)
    kind, value = match.lastgroup, match[0]
    if kind == "text":
        value = _ESCAPE.sub(lambda escape: _unescape(text, at + 1, escape), value[1:-1])
    return _Token(kind, value, at, match.end())  # type: ignore[arg-type]  # a group of _TOKEN


def _unexpected_character(text: str, at: int) -> ExpressionError:
    sign, stop = text[at], at + 1
    reason = _OPERATOR_HINTS.get(sign, "This character has no meaning here.")
    if sign in "\"'":
        reason, stop = f"This text has no end: the closing {sign} is missing.", len(text)
    elif sign in _OPERATOR_HINTS and text.startswith(sign * 2, at):
        stop += 1
    return ExpressionError(reason, text, at, stop)


def _unescape(text: str, start: int, escape: re.Match[str]) -> str:
    """Return the character of an escape in the text in quotes that begins at `start`."""
    place = start + escape.start(), start + escape.end()
    if escape[1] is not None:
        hint = r"The escapes are \n \t \r \0 \\ \" \' \xHH \uHHHH \UHHHHHHHH."
        raise ExpressionError("This escape is unknown.", text, *place, hint=hint)
    try:
        character = codecs.decode(escape[0], "unicode_escape")
        character.encode()  # fails for half of a surrogate pair
    except UnicodeError:
        raise ExpressionError("This character does not exist.", text, *place) from None
    return character


# -- the parser ------------------------------------------------------------------------------------


class _Placed(NamedTuple):
    """An operand and its first token."""

    token: _Token
    operand: Operand


class _Parser:
    """Recursive-descent parser of one expression; each method consumes the tokens that it reads."""

    def __init__(self, text: str, finding_ids: Collection[str] | None) -> None:
        self._text, self._finding_ids = text, finding_ids
        self._tokens, self._at, self._depth = _tokenize(text), 0, 0

    def parse(self) -> Expression:
        if self._is_at_end():
            hint = 'For example entropy > 3 and step > 2, or token == "\\n".'
            self._refuse("There is no condition here.", hint=hint)
        tree = self._expression()
        if not self._is_at_end():
            self._refuse_rest()
        return tree

    def _expression(self) -> Expression:
        return self._chain("or", Or, lambda: self._chain("and", And, self._condition))

    def _chain(
        self, word: str, kind: type[And] | type[Or], read: Callable[[], Expression]
    ) -> Expression:
        """Parse conditions joined with a word; a part of the same kind is merged into the chain."""
        parts = [read()]
        while self._accept(word):
            parts.append(read())
        if len(parts) == 1:
            return parts[0]
        nested = (part.parts if isinstance(part, kind) else (part,) for part in parts)
        return kind(tuple(condition for conditions in nested for condition in conditions))

    def _condition(self) -> Expression:
        opening = self._current
        if self._accept("not"):
            return Not(self._nested(self._condition))
        if self._accept("("):
            inner = self._nested(self._expression)
            self._close(opening, self._refuse_rest)
            return inner
        if opening.kind == "word" and opening.value in OBSERVATIONS:
            return self._observation()
        return self._finding() if self._accept(FINDING) else self._comparison()

    def _nested(self, read: Callable[[], Expression]) -> Expression:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            opening = self._tokens[self._at - 1]
            self._refuse(f"More than {MAX_DEPTH} nested parentheses and nots.", opening)
        inner = read()
        self._depth -= 1
        return inner

    def _close(self, opening: _Token, refuse: Callable[[], NoReturn]) -> None:
        """Parse a closing parenthesis; call `refuse` for anything else but the end."""
        if self._accept(")"):
            return
        if self._is_at_end():
            self._refuse("This parenthesis is not closed.", opening)
        refuse()

    def _observation(self) -> ObservationCondition:
        token = self._advance()
        if self._is_operator():
            self._refuse(f"{token.value} is a complete condition and cannot be compared.", token)
        if not self._accept("@"):
            return ObservationCondition(token.value)
        if self._current.kind != "glob":
            reason = "A module name is expected after @; * matches one part of it."
            self._refuse(reason, hint=f"For example {token.value} @ layers.*.self_attn")
        if count_wildcards(self._current.value) > MAX_WILDCARDS:
            self._refuse(f"A module name has at most {MAX_WILDCARDS} wildcards.")
        return ObservationCondition(token.value, self._advance().value)

    def _finding(self) -> FindingCondition:
        pattern, ids = "*", self._finding_ids
        if self._current.kind == "glob":
            pattern = self._current.value
            if ids is not None and not any(fnmatchcase(id_, pattern) for id_ in ids):
                other = "flexinspect findings --help lists all ids."
                hint = did_you_mean(pattern, sorted(ids), other)
                self._refuse("No finding id matches this.", hint=hint)
            self._advance()
        elif not self._is_operator():
            reason = "The id of a finding is expected after finding; * matches any text."
            self._refuse(reason, hint="For example finding mask.*, or finding * >= warning")
        if not self._is_operator():
            return FindingCondition(pattern)
        op, severity = self._advance().value, self._current
        if severity.kind not in ("word", "text") or severity.value not in SEVERITIES:
            reason = f"A finding is compared with a severity: {', '.join(SEVERITIES)}."
            self._refuse(reason, hint=did_you_mean(severity.value, SEVERITIES))
        return FindingCondition(pattern, op, self._advance().value)

    def _comparison(self) -> Expression:
        left = first = self._operand()
        is_negated = self._accept("not")
        if self._accept("in"):
            inner = self._membership(left)
            return Not(inner) if is_negated else inner
        if is_negated:
            self._refuse("in is expected after a value and not.")
        parts: list[Compare] = []
        while self._is_operator():
            op, right = self._advance().value, self._operand()
            self._check_comparison(left, op, right)
            parts.append(Compare(left.operand, op, right.operand))
            left = right
        if not parts:
            # A text may hold line breaks, and the message marks its place anyway.
            what = "This" if first.token.kind == "text" else first.token.value
            reason = f"{what} is a value, not a condition."
            self._refuse(reason, first.token, hint="Compare it, for example entropy > 3.")
        return parts[0] if len(parts) == 1 else And(tuple(parts))

    def _membership(self, first: _Placed) -> Compare:
        """Parse the right side of "in": a name, or constants in parentheses."""
        opening = self._current
        if not self._accept("("):
            whole = self._operand()
            if isinstance(whole.operand, Name):
                if not isinstance(first.operand, Text) or _kind(whole.operand) is not _TEXT:
                    reason = f"in {whole.operand.name} needs a text in quotes before it, and a name"
                    self._refuse(f"{reason} that is a text.", first.token, whole.token)
                return Compare(first.operand, "in", whole.operand)
            members = [whole]
        else:
            members = [self._constant()]
            while self._accept(",") and not self._is(")"):
                members.append(self._constant())
            reason = "The values of a list are separated by commas."
            self._close(opening, lambda: self._refuse(reason))
        name, values = first.operand, [member.operand for member in members]
        if not isinstance(name, Name):
            self._refuse("A name is expected before in, and a list after it.", first.token)
        for member in members:
            if not _are_comparable(name, member.operand):
                self._refuse(_describe_kinds(name, member.operand), member.token)
            self._check_choice(name, member)
        return Compare(name, "in", tuple(one for one in values if not isinstance(one, Name)))

    def _check_comparison(self, left: _Placed, op: str, right: _Placed) -> None:
        one, other, reason = left.operand, right.operand, ""
        if not isinstance(one, Name) and not isinstance(other, Name):
            reason = "Neither side of this comparison is a name."
        elif not _are_comparable(one, other):
            reason = _describe_kinds(one, other)
        elif _kind(one) is ValueKind.TEXT and op not in ("==", "!="):
            reason = "Texts can only be compared with == and !=."
        if reason:
            self._refuse(reason, left.token, right.token)
        self._check_choice(one, right)
        self._check_choice(other, left)

    def _check_choice(self, name: Operand, value: _Placed) -> None:
        if not isinstance(name, Name) or not isinstance(value.operand, Text):
            return
        choices, written = VALUE_NAMES[name.name].choices, value.operand.value
        if choices and written not in choices:
            quoted = [f'"{choice}"' for choice in choices]
            reason = f"{name.name} is never this; it is one of {', '.join(quoted)}."
            self._refuse(reason, value.token, hint=did_you_mean(f'"{written}"', quoted))

    def _operand(self) -> _Placed:
        token = self._current
        if token.kind != "word":
            return self._constant()
        if token.value not in VALUE_NAMES:
            self._refuse_name(token.value)
        return _Placed(self._advance(), Name(token.value))

    def _constant(self) -> _Placed:
        token = self._current
        if token.kind == "text":
            return _Placed(self._advance(), Text(token.value))
        if self._is_at_end():
            self._refuse("The expression ends where a name or a value is expected.")
        if token.kind != "number":
            self._refuse("A name or a value is expected here.")
        self._advance()
        written = token.value.replace("_", "")
        digits, number = written.lstrip("+-"), float(written)
        if digits.isdecimal() and len(digits) <= _MAX_EXACT_DIGITS:
            number = int(written)
        elif math.isinf(number):
            self._refuse("This is not a number.", token)
        unit = self._current
        if unit.kind != "word" or unit.value in (*KEYWORDS, *VALUE_NAMES, *OBSERVATIONS):
            return _Placed(token, Number(number))
        if unit.value not in UNITS:
            hint = did_you_mean(unit.value, UNITS, f"The units are {', '.join(UNITS)}.")
            self._refuse(f"{unit.value} is not a unit of memory.", hint=hint)
        return _Placed(token, Number(number, self._advance().value))

    @property
    def _current(self) -> _Token:
        return self._tokens[self._at]

    def _is_at_end(self) -> bool:
        return self._current.kind == "end"

    def _advance(self) -> _Token:
        self._at += 1
        return self._tokens[self._at - 1]

    def _is(self, value: str) -> bool:
        return self._current.kind in ("word", "op") and self._current.value == value

    def _is_operator(self) -> bool:
        return self._current.kind == "op" and self._current.value in COMPARISONS

    def _accept(self, value: str) -> bool:
        is_next = self._is(value)
        self._at += is_next
        return is_next

    def _refuse(
        self, reason: str, first: _Token | None = None, last: _Token | None = None, hint: str = ""
    ) -> NoReturn:
        """Raise an error that underlines the tokens from `first` (default: this one) to `last`."""
        first = first or self._current
        stop = (last or first).stop
        raise ExpressionError(reason, self._text, first.start, stop, hint=hint)

    def _refuse_rest(self) -> NoReturn:
        """Refuse the token after a complete condition."""
        if self._is("@"):
            self._refuse(f"Only {', '.join(OBSERVATIONS)} can be followed by @.")
        if self._is(")"):
            self._refuse("This parenthesis was never opened.")
        reason = "The condition before this is complete: and, or, or the end is expected here."
        self._refuse(reason, hint=did_you_mean(self._current.value, ("and", "or")))

    def _refuse_name(self, word: str) -> NoReturn:
        if word in (*KEYWORDS, *OBSERVATIONS, FINDING):
            self._refuse(f"A name or a value is expected here, not {word}.")
        hint = f'Did you mean "{word}", in quotes?'
        if not any(word in name.choices for name in VALUE_NAMES.values()):
            known = f"The names are {', '.join(ALL_NAMES)}."
            dashed = word.lower().replace("_", "-")
            hint = did_you_mean(dashed, ALL_NAMES, did_you_mean(word.lower(), ALL_NAMES, known))
        self._refuse(f"{word} is not a known name.", hint=hint)


def _kind(operand: Operand) -> ValueKind:
    if isinstance(operand, Name):
        return VALUE_NAMES[operand.name].kind
    if isinstance(operand, Text):
        return ValueKind.TEXT
    return ValueKind.BYTES if operand.unit else ValueKind.NUMBER


def _are_comparable(left: Operand, right: Operand) -> bool:
    """Return whether two operands can be compared; a number without unit may be bytes."""
    kinds = {_kind(left), _kind(right)}
    has_plain_number = any(isinstance(side, Number) and not side.unit for side in (left, right))
    return len(kinds) == 1 or (kinds == {ValueKind.NUMBER, ValueKind.BYTES} and has_plain_number)


def _describe_kinds(*operands: Operand) -> str:
    return f"{', and '.join(f'{operand_text(one)} is {_kind(one)}' for one in operands)}."
