"""The labels of figures and reports in several languages: one file each in `data/languages`."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from msgspec import Struct

from flexinspect.core.errors import UsageError

LANGUAGE_VARIABLE = "FLEXINSPECT_LANG"
DEFAULT_LANGUAGE = "en"
_FOLDER = Path(__file__).parents[1] / "data" / "languages"


class Labels(Struct, frozen=True):
    """The labels of one language, by key; calling it formats one with the values of its fields."""

    language: str
    texts: Mapping[str, str]

    def __call__(self, key: str, /, **values: object) -> str:
        return self.texts[key].format(**values)


def languages() -> tuple[str, ...]:
    """Return the codes of all languages, such as "en"."""
    return tuple(sorted(file.stem for file in _FOLDER.glob("*.toml")))


def load_labels(language: str | None = None) -> Labels:
    """Return the labels of a language, by default that of `FLEXINSPECT_LANG`, else English.

    Raises `UsageError` for a language that does not exist.
    """
    chosen = language or os.environ.get(LANGUAGE_VARIABLE) or DEFAULT_LANGUAGE
    code = chosen.lower().replace("-", "_").partition("_")[0].partition(".")[0]
    if code not in languages():
        known = ", ".join(languages())
        source = "--lang" if language else LANGUAGE_VARIABLE
        raise UsageError(f"There are no labels in '{chosen}'.", hint=f"{source} takes {known}.")
    return _read(code)


@cache
def _read(code: str) -> Labels:
    return Labels(code, tomllib.loads((_FOLDER / f"{code}.toml").read_text("utf-8")))
