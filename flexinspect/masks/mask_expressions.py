"""Masks as text: `segment-isolation and not sliding-window(8)`, `per-head(causal, dilated(2))`.

The text is parsed as a Python expression (with `_` for hyphens) and interpreted here: names and
calls of masks, `and`, `or`, `not`, whole numbers. Nothing is executed.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct

from flexinspect.core.errors import MaskError
from flexinspect.core.text import did_you_mean, printable, truncate
from flexinspect.masks.cell_mask import CellMask
from flexinspect.masks.known_masks import (
    ELEMENTARY,
    CombinedMask,
    NegatedMask,
    PerHeadMask,
    ShiftedMask,
    preset_mask,
)
from flexinspect.masks.mask_presets import PRESETS, UNREACHABLE, Segments

_MAX_LENGTH = 2000
_PRESETS = {
    "segment-isolation": "Each segment attends to itself; the cue and generated text to all.",
    "shared-prefix": "As segment-isolation; all segments attend to the shared text too.",
    "anchor-first": "As shared-prefix; all segments attend to the first paraphrase too.",
    "document": "Each paraphrase attends to itself; generated text continues the last one.",
}
_COMPOSITIONS = {
    "shift": "shift(MASK, keys, rows=0)",
    "per-head": "per-head(MASK, MASK, ...)",
}


def mask_names() -> tuple[str, ...]:
    """Return the names that an expression may use."""
    return tuple(dict.fromkeys((*PRESETS, *ELEMENTARY, *_COMPOSITIONS)))


def mask_usages() -> Iterator[tuple[str, str]]:
    """Yield how each elementary mask and composition is written, and what it is."""
    for name in PRESETS:
        if name not in ELEMENTARY:
            yield name, _PRESETS.get(name, "A preset of flexinspect run --mask.")
    for name, make in ELEMENTARY.items():
        yield _usage(name), (inspect.getdoc(make) or "").splitlines()[0]
    yield _COMPOSITIONS["shift"], "The mask moved by so many keys to the right and rows down."
    yield _COMPOSITIONS["per-head"], "A mask of its own for each head."


def parse_mask(text: str, segments: Segments = ()) -> CellMask:
    """Return the mask of an expression over these segments.

    Raises `MaskError` with one sentence: an unknown name with the nearest one, a wrong number of
    arguments with the form of the mask, anything that is not part of the language.
    """
    if len(text) > _MAX_LENGTH:
        raise MaskError(f"The mask is longer than {_MAX_LENGTH} characters.")
    normalized = re.sub(r"(?<=[A-Za-z0-9])-(?=[A-Za-z])", "_", " ".join(text.split()))
    try:
        tree = ast.parse(normalized, mode="eval")
        return _Interpreter(text, segments).mask(tree.body)
    except SyntaxError as error:
        at = f" at character {error.offset}" if error.offset else ""
        hint = "For instance: segment-isolation and not sliding-window(8)."
        raise MaskError(f"'{_shown(text)}' is not a mask{at}.", hint=hint) from None
    except (ValueError, RecursionError, MemoryError):
        raise MaskError(f"'{_shown(text)}' is not a mask.") from None


def _shown(text: str) -> str:
    return printable(truncate(text, 80))


def _usage(name: str) -> str:
    """Return `sliding-window(size)`, without parentheses if the mask takes no numbers."""
    parts = []
    for parameter in list(inspect.signature(ELEMENTARY[name]).parameters.values())[1:]:
        is_optional = parameter.default is not parameter.empty
        listed = f"{parameter.name}, ..." if parameter.kind is parameter.VAR_POSITIONAL else ""
        parts.append(listed or (f"[{parameter.name}]" if is_optional else parameter.name))
    return f"{name}({', '.join(parts)})" if parts else name


class _Interpreter(Struct, frozen=True):
    """Interprets the nodes of one expression."""

    text: str
    segments: Segments

    def mask(self, node: ast.expr) -> CellMask:
        """Return the mask of a node. Raises `MaskError`."""
        match node:
            case ast.BoolOp(op=ast.And(), values=parts):
                return CombinedMask("and", tuple(map(self.mask, parts)))
            case ast.BoolOp(op=ast.Or(), values=parts):
                return CombinedMask("or", tuple(map(self.mask, parts)))
            case ast.BinOp(op=ast.BitAnd(), left=left, right=right):
                return CombinedMask("and", (self.mask(left), self.mask(right)))
            case ast.BinOp(op=ast.BitOr(), left=left, right=right):
                return CombinedMask("or", (self.mask(left), self.mask(right)))
            case ast.UnaryOp(op=ast.Not() | ast.Invert(), operand=part):
                return NegatedMask(self.mask(part))
            case ast.Name(id=name):
                return self._named(name.replace("_", "-"), ())
            case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
                return self._named(name.replace("_", "-"), arguments)
        raise self._error(f"'{_source(node)}' is not part of a mask")

    def _named(self, name: str, arguments: Sequence[ast.expr]) -> CellMask:
        if name == "per-head" and arguments:
            return PerHeadMask(tuple(map(self.mask, arguments)))
        if name == "shift" and len(arguments) in (2, 3):
            return ShiftedMask(self.mask(arguments[0]), *map(self._number, arguments[1:]))
        if name in ELEMENTARY:
            return self._elementary(ELEMENTARY[name], name, list(map(self._number, arguments)))
        if name in PRESETS and not arguments:
            return preset_mask(name, self.segments)
        if name in mask_names():
            raise self._error(f"{name} is written {_COMPOSITIONS.get(name, name)}")
        known = did_you_mean(name, mask_names(), f"The masks are {', '.join(mask_names())}.")
        raise self._error(f"there is no mask '{name}'", known)

    def _elementary(
        self, make: Callable[..., CellMask], name: str, numbers: Sequence[int]
    ) -> CellMask:
        try:
            bound = inspect.signature(make).bind(self.segments, *numbers)
        except TypeError:
            raise self._error(f"{name} is written {_usage(name)}") from None
        for parameter, value in bound.arguments.items():
            values = value if isinstance(value, tuple) else (value,)
            least = 0 if parameter in ("start", "prefix") else 1
            if parameter != "segments" and min(values, default=1) < least:
                raise self._error(f"{name} takes numbers from {least} on, not {min(values)}")
        return make(self.segments, *numbers)

    def _number(self, node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int(value)) if type(value) is int and value < UNREACHABLE:
                return value
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant()):
                return -self._number(node.operand)
        raise self._error(f"'{_source(node)}' is not a whole number")

    def _error(self, reason: str, hint: str | None = None) -> MaskError:
        return MaskError(f"The mask '{_shown(self.text)}' cannot be read: {reason}.", hint=hint)


def _source(node: ast.expr) -> str:
    return _shown(ast.unparse(node).replace("_", "-"))
