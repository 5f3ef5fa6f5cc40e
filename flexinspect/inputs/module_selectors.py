"""Selectors of `--select`: modules whose outputs level extreme stores, by name, class and dtype."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from msgspec import Struct

from flexinspect.breakpoints.grammar import matches_module
from flexinspect.core.errors import UsageError
from flexinspect.core.text import did_you_mean, escape_unprintable

KEYS = ("module", "op", "dtype")
DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *("int64", "int32", "int16", "int8", "uint8", "bool", "complex64"),
)
_SHORT = {"fp32": "float32", "float": "float32", "half": "float16", "fp16": "float16"}
_SHORT |= {"bf16": "bfloat16", "double": "float64", "fp64": "float64", "long": "int64"}
_HINT = "Write for instance --select 'module=mlp.* op=Linear dtype=bfloat16'."


class ModuleSelector(Struct, frozen=True):
    """A selector: a module must match each of its parts.

    `module` is a pattern of its name as breakpoints have it, `op` one of the name of its class,
    `dtype` that of its output; an empty dtype matches any.
    """

    text: str
    module: str = "**"
    op: str = "*"
    dtype: str = ""

    def matches(self, name: str, class_name: str) -> bool:
        """Tell whether a module of this name and class is selected."""
        return matches_module(self.module, name) and fnmatchcase(class_name, self.op)

    def matches_dtype(self, dtype: str) -> bool:
        """Tell whether an output of this dtype, such as "torch.float32", is selected."""
        return not self.dtype or dtype.removeprefix("torch.") == self.dtype


def parse_selector(text: str) -> ModuleSelector:
    """Parse "module=mlp.* op=Linear dtype=bfloat16"; a part without "=" is a module.

    Raises `UsageError` for an unknown key or dtype, a key that occurs twice, and an empty text.
    """
    found: dict[str, str] = {}
    shown = f"--select '{escape_unprintable(text)}'"
    for part in text.split():
        key, equals, value = part.partition("=")
        key, value = (key, value) if equals else ("module", part)
        if key not in KEYS:
            known = did_you_mean(key, KEYS, f"The keys are {', '.join(KEYS)}.")
            raise UsageError(f"{shown}: there is no key '{escape_unprintable(key)}'.", hint=known)
        if key in found or not value:
            problem = "occurs twice" if key in found else "has no value"
            raise UsageError(f"{shown}: {key} {problem}.", hint=_HINT)
        found[key] = _checked_dtype(value, shown) if key == "dtype" else value
    if not found:
        raise UsageError("--select selects nothing.", hint=_HINT)
    return ModuleSelector(text, **found)


def parse_selectors(texts: Iterable[str]) -> tuple[ModuleSelector, ...]:
    """Parse several selectors, of which a module must match one. Raises `UsageError`."""
    return tuple(map(parse_selector, texts))


def _checked_dtype(value: str, shown: str) -> str:
    name = value.lower().removeprefix("torch.")
    name = _SHORT.get(name, name)
    if name not in DTYPES:
        known = did_you_mean(name, DTYPES, f"Known are {', '.join(DTYPES)}.")
        what = f"{shown}: '{escape_unprintable(value)}' is not a dtype."
        raise UsageError(what, hint=known)
    return name
