"""Fonts for the characters of a figure, so that no character is drawn as an empty box."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from flexinspect.core.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.font_manager import FontEntry

BASE_FAMILY = "DejaVu Sans"
"""matplotlib brings it along. It is wider than most fonts of its kind, so that text which was
measured in it fits where a viewer replaces it."""

CJK_FAMILIES = (
    *("Noto Sans CJK SC", "Noto Sans SC", "Source Han Sans SC", "Source Han Sans CN"),
    *("WenQuanYi Micro Hei", "WenQuanYi Zen Hei", "PingFang SC", "Hiragino Sans GB"),
    *("Microsoft YaHei", "SimHei", "Noto Sans CJK JP", "Noto Sans CJK TC", "Noto Sans CJK KR"),
    *("Arial Unicode MS", "Droid Sans Fallback"),
)
"""Families with Chinese characters, the preferred ones first."""

_CJK_PACKAGES = (
    "Install one: apt-get install fonts-noto-cjk or fonts-wqy-microhei (Debian, Ubuntu), "
    "dnf install google-noto-sans-cjk-fonts (Fedora), brew install font-noto-sans-cjk (macOS)."
)
_CJK_NAMES = ("CJK", "HIRAGANA", "KATAKANA", "HANGUL", "BOPOMOFO", "IDEOGRAPHIC", "FULLWIDTH")
_NO_TEXT_FONTS = ("Last Resort", "STIX", "cm", "DejaVu Math", "DejaVu Sans Display")
"""Beginnings of the names of fonts for formulas or for boxes, not for text."""


class Fonts(Struct, frozen=True):
    """The families that a figure needs, in the order of their use.

    `others` are the characters that the first one lacks, `missing` those that no font has.
    """

    families: tuple[str, ...]
    others: frozenset[str] = frozenset()
    missing: frozenset[str] = frozenset()

    def face(self, text: str, *, bold: bool) -> tuple[tuple[str, ...], bool]:
        """Return the families for text, and whether it can be bold.

        Most fonts for Chinese have no bold face, and matplotlib warns of it.
        """
        is_plain = self.others.isdisjoint(text)
        return self.families[:1] if is_plain else self.families, bold and is_plain

    def safe(self, text: str) -> str:
        """Return text for the figure; a missing character is written as its code, `<U+1F5FC>`."""
        if self.missing.isdisjoint(text):
            return text
        return "".join(f"<U+{ord(c):04X}>" if c in self.missing else c for c in text)


def find_fonts(texts: Iterable[str]) -> Fonts:
    """Return the fonts for these texts.

    Raises `UsageError` with the package to install if there are Chinese, Japanese or Korean
    characters and no font has them.
    """
    needed = frozenset(c for text in texts for c in text if not c.isspace())
    others = left = needed - _covered(BASE_FAMILY, needed)
    families = [BASE_FAMILY]
    for name in _other_families() if left else ():
        found = _covered(name, left)
        if found:
            families.append(name)
            left -= found
        if not left:
            break
    cjk = sorted(c for c in left if unicodedata.name(c, "").startswith(_CJK_NAMES))
    if cjk:
        shown = "".join(cjk[:8])
        what = f"No font on this machine has the characters '{shown}' of the figure."
        raise UsageError(what, hint=_CJK_PACKAGES)
    return Fonts(tuple(families), others, left)


def _other_families() -> list[str]:
    names = {entry.name for entry in _entries()}
    others = (name for name in sorted(names) if not name.startswith((*_NO_TEXT_FONTS, BASE_FAMILY)))
    return list(dict.fromkeys((*(name for name in CJK_FAMILIES if name in names), *others)))


def _covered(family: str, characters: frozenset[str]) -> frozenset[str]:
    """Return the characters that the regular face of a family has."""
    entries = [entry for entry in _entries() if entry.name == family]
    if not entries:
        return frozenset()
    regular = min(entries, key=lambda e: (e.style != "normal", abs(_weight(e.weight) - 400)))
    face = _face(regular.fname, getattr(regular, "index", 0))
    return frozenset(c for c in characters if face.get_char_index(ord(c)))


def _weight(weight: str | int) -> int:
    return weight if isinstance(weight, int) else {"bold": 700, "light": 300}.get(weight, 400)


@cache
def _face(file: str, index: int) -> Any:
    from matplotlib.ft2font import FT2Font

    # matplotlib before 3.11 knows only the first face of a collection.
    return FT2Font(file, face_index=index) if index else FT2Font(file)


@cache
def _entries() -> Sequence[FontEntry]:
    """Return matplotlib's fonts, with those that were installed after it cached its list."""
    from matplotlib.font_manager import findSystemFonts, fontManager

    known = {entry.fname for entry in fontManager.ttflist}
    for file in findSystemFonts():
        if file not in known:
            try:
                fontManager.addfont(file)
            except Exception:  # a damaged font file, for which FreeType has many errors
                continue
    return tuple(fontManager.ttflist)
