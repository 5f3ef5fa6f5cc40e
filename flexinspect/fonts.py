"""Monospace fonts of this machine, for pictures that are made of pixels."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple


class Font(NamedTuple):
    """A family and the files of its styles."""

    family: str
    files: tuple[str, ...]


_FONTS = dict(
    pair.strip().split(" = ")
    for pair in """dejavusansmono = DejaVu Sans Mono
        menlo = Menlo
        consola = Consolas
        cascadiamono = Cascadia Mono
        firacode-regular = Fira Code
        hack-regular = Hack
        jetbrainsmono-regular = JetBrains Mono
        liberationmono-regular = Liberation Mono
        notosansmono-regular = Noto Sans Mono
        ubuntumono-r = Ubuntu Mono
        freemono = FreeMono
        monaco = Monaco
        lucon = Lucida Console
        cour = Courier New""".splitlines()
)
"""Files of monospace fonts (lower case, without ending) and their families, best first."""


@lru_cache(maxsize=1)
def find_monospace() -> Font | None:
    """Return the best known monospace font of this machine, None when there is none.

    Drawing with a family that is not there would leave out all text without a word.
    """
    found: dict[str, Path] = {}
    for folder in _font_folders():
        for file in folder.rglob("*"):
            if file.suffix.lower() in (".ttf", ".otf", ".ttc"):
                found.setdefault(file.stem.lower(), file)
    for stem, family in _FONTS.items():
        if stem in found:
            first = found[stem]
            begin = first.stem.split("-")[0]
            return Font(family, tuple(sorted(map(str, first.parent.glob(f"{begin}*")))))
    return None


def _font_folders() -> Iterator[Path]:
    """Yield the folders of fonts of Linux, macOS and Windows, and of Python packages last."""
    with suppress(RuntimeError):  # without a home folder there are no fonts of the user
        home = Path.home()
        yield from (home / ".local/share/fonts", home / ".fonts", home / "Library/Fonts")
    for name in ("/usr/share/fonts", "/usr/local/share/fonts"):
        yield Path(name)
    yield from (Path("/System/Library/Fonts"), Path("/Library/Fonts"))
    for variable, inside in (("WINDIR", "Fonts"), ("LOCALAPPDATA", "Microsoft/Windows/Fonts")):
        if os.environ.get(variable):
            yield Path(os.environ[variable]) / inside
    yield Path(sys.prefix) / "fonts"
    package = importlib.util.find_spec("matplotlib")
    if package is not None and package.origin:
        yield Path(package.origin).parent / "mpl-data/fonts/ttf"
