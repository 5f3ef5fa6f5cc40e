"""Keys as users write them in the settings, and which actions would claim the same one.

The settings are read in the capture process, too: Textual's names stand here, not its code.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from flexinspect.keys import all_keys

NAMED_KEYS = (
    *("up", "down", "left", "right", "home", "end", "pageup", "pagedown"),
    *("enter", "tab", "space", "escape", "backspace", "delete", "insert"),
    *(f"f{n}" for n in range(1, 25)),
)
KEY_SYNTAX = (
    'A key is a character ("w", "?", "7"), or one of up, down, left, right, home, end, pageup, '
    "pagedown, enter, tab, space, escape, backspace, delete, insert, f1 to f24; ctrl+, alt+ and "
    "shift+ may stand before it."
)
FIXED_KEYS = {"app.palette": "ctrl+p", "app.quit": "ctrl+q"}
"""Keys that Textual itself gives to an action, whatever else the user gives to it."""

_MODIFIERS = ("alt", "ctrl", "shift")
_EQUIVALENT_KEYS = {"ctrl+i": "tab", "ctrl+m": "enter", "ctrl+left_square_bracket": "escape"}
"""Keys that a terminal cannot tell from another one."""


def parse_key(text: str) -> str | None:
    """Return the key that is meant as Textual names it, None if there is none.

    It is a character, a name, or as the help shows it (`→`, `pgdn`), after any modifiers.
    """
    found = re.fullmatch(r"((?:\w+\+)*)(.+)", text if len(text) == 1 else text.replace(" ", ""))
    base = _parse_base(found[2]) if found else None
    if found is None or base is None:
        return None
    modifiers = found[1].lower().split("+")[:-1]
    if len(set(modifiers)) < len(modifiers) or not set(modifiers) <= set(_MODIFIERS):
        return None
    if modifiers == ["shift"] and len(base) == 1:
        return base.upper() if base.isalpha() else None  # a terminal sends what shift makes of it
    whole = "+".join([*sorted(modifiers), base.lower() if modifiers else base])
    return _EQUIVALENT_KEYS.get(whole, whole)


def _parse_base(text: str) -> str | None:
    name = text.lower()
    if name in NAMED_KEYS or name in _ASCII_NAMES:
        return name
    if name in _DISPLAY_NAMES:
        return _DISPLAY_NAMES[name]
    return _character_name(text) if len(text) == 1 and text.isprintable() else None


def _character_name(character: str) -> str:
    """Return Textual's name of a character: itself, or what Unicode calls it."""
    name = unicodedata.name(character, "").lower().replace("-", "_").replace(" ", "_")
    name = character if character.isalnum() or not name else name
    return _SHORT_NAMES.get(name, name)


_SHORT_NAMES = {
    "solidus": "slash",
    "reverse_solidus": "backslash",
    "commercial_at": "at",
    "hyphen_minus": "minus",
    "plus_sign": "plus",
    "low_line": "underscore",
}
_ASCII_NAMES = {_character_name(chr(code)) for code in range(33, 127) if not chr(code).isalnum()}
_DISPLAY_NAMES = {
    "↑": "up",
    "↓": "down",
    "←": "left",
    "→": "right",
    "⌫": "backspace",
    "esc": "escape",
    "⏎": "enter",
    "pgdn": "pagedown",
    "pgup": "pageup",
    "del": "delete",
}
"""How the help of the interface shows keys."""


class KeyConflict(NamedTuple):
    """Two actions that would claim one key; `given` is the one that the user gave it to."""

    key: str
    action: str
    other: str


def find_key_conflict(overrides: Mapping[str, Sequence[str]]) -> KeyConflict | None:
    """Return the first key that a remapped action would share with another one.

    `given` maps actions to keys by Textual's names; all other actions have their default keys.
    """
    claims: dict[str, list[str]] = {}
    for key in all_keys():
        own = dict.fromkeys(
            [*overrides.get(key.id, key.keys), *filter(None, [FIXED_KEYS.get(key.id)])]
        )
        for name in own:
            claims.setdefault(name, []).append(key.id)
    for action, names in overrides.items():
        for name in names:
            others = [other for other in claims[name] if other != action]
            if others:
                return KeyConflict(name, action, others[0])
    return None
