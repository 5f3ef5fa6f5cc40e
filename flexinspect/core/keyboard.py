"""The table of keys: for each action its id, default keys and description.

Users remap an action by its id under `[keys]` in the settings file, for instance
`"step.next" = "n"` or `"step.next" = ["n", "right"]`. Panels never name a key; they handle actions.

The capture process reads the settings too, so this module has Textual's names of keys without
importing Textual.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence

from msgspec import Struct

GROUPS = ("Move", "Find", "View", "Panels", "Run", "Fork", "Save", "App")
"""The groups of actions, in the order of the help and of the palette."""
_GROUPS = {
    **dict.fromkeys(("step", "place", "generation", "layer", "head"), "Move"),
    **dict.fromkeys(("tokens", "finding", "exhibit"), "Find"),
    **dict.fromkeys(("zoom", "view", "cursor", "code"), "View"),
    **dict.fromkeys(("travel", "branch"), "Fork"),
    **dict.fromkeys(("screen", "mask", "panel.export"), "Save"),
    **dict.fromkeys(("panel", "layout", "rail"), "Panels"),
    "run": "Run",
    "app": "App",
}


class Key(Struct, frozen=True):
    """An action: `id` (group.name), default keys by Textual's names, and a description.

    `label` is its name in the line of keys, where the description is too long. An action that the
    trace screen does not handle goes to the focused panel, or else to the first panel that handles
    it.
    """

    id: str
    keys: tuple[str, ...]
    text: str
    label: str = ""

    @property
    def group(self) -> str:
        """The group of the action, one of `GROUPS`."""
        return _GROUPS.get(self.id) or _GROUPS[self.id.partition(".")[0]]


KEYS: tuple[Key, ...] = (
    Key("step.next", ("right", "l"), "next token", label="token"),
    Key("step.previous", ("left", "h"), "previous token"),
    Key("step.first", ("home",), "first step, the prefill"),
    Key("step.last", ("end",), "last step"),
    Key("step.ten_forward", ("pagedown",), "ten tokens forward"),
    Key("step.ten_back", ("pageup",), "ten tokens back"),
    Key("step.goto", ("g",), "go to a step, by number or word", label="go"),
    Key("step.replay", ("P",), "replay: one token after the other, or stop"),
    Key("place.back", ("backspace",), "back to where you were before the last jump"),
    Key("step.follow", ("f",), "follow the newest step", label="live"),
    Key("tokens.search", ("slash",), "search the tokens", label="find"),
    Key("tokens.next", ("semicolon",), "next token of the text, also of the prompt"),
    Key("tokens.previous", ("comma",), "previous token of the text"),
    Key("tokens.xray", ("a",), "X-ray: what this token sees, what sees it, off", label="X-ray"),
    Key("tokens.weights", ("W",), "X-ray: weigh by attention of a head, layer, all", label="weigh"),
    Key("tokens.match", ("asterisk",), "next match of the search"),
    Key("finding.next", ("n",), "next finding", label="finding"),
    Key("finding.read", ("i",), "read all of the finding", label="read it"),
    Key("finding.previous", ("N",), "previous finding"),
    Key(
        "mask.declare",
        ("D",),
        "declare the segments of the executed mask",
        label="declare",
    ),
    Key("exhibit.answer", ("A",), "museum: name the fault of this exhibit", label="answer"),
    Key("generation.next", ("greater_than_sign",), "next generation"),
    Key("generation.previous", ("less_than_sign",), "previous generation"),
    Key("layer.next", ("down", "j"), "next layer"),
    Key("layer.previous", ("up", "k"), "previous layer"),
    Key("head.next", ("right_square_bracket",), "next head"),
    Key("head.previous", ("left_square_bracket",), "previous head"),
    Key("panel.next", ("tab",), "next panel", label="panel"),
    Key("panel.previous", ("shift+tab",), "previous panel"),
    Key("panel.choose", ("c",), "choose what the panel shows"),
    Key("panel.maximize", ("x",), "only this panel, or all again", label="max"),
    Key("panel.more", ("plus",), "one panel more"),
    Key("panel.fewer", ("minus",), "one panel fewer"),
    Key("panel.reset", ("equals_sign",), "reset the layout"),
    Key("layout.understand", ("f1",), "layout: mask, candidates, text and attention"),
    Key("layout.token", ("f2",), "layout: why this token"),
    Key("layout.health", ("f3",), "layout: layers, paths, memory, run"),
    Key("layout.training", ("f4",), "layout: training"),
    Key("layout.compare", ("f5",), "layout: branches"),
    Key("rail.toggle", ("o", "ctrl+b"), "contents: answers, branches, other traces; or hide them"),
    Key("zoom.in", ("z",), "zoom in", label="zoom"),
    Key("zoom.out", ("Z",), "zoom out"),
    Key("view.flip", ("m",), "next view of the mask: ran, intended …", label="view"),
    Key("view.blocks", ("B",), "show or hide the blocks", label="blocks"),
    Key("view.measure", ("v",), "next measure", label="measure"),
    Key("cursor.left", ("shift+left", "H"), "move the cursor in the panel"),
    Key("cursor.right", ("shift+right", "L"), "move the cursor in the panel"),
    Key("cursor.up", ("shift+up", "K"), "move the cursor in the panel"),
    Key("cursor.down", ("shift+down", "J"), "move the cursor in the panel"),
    Key("cursor.enter", ("enter",), "go to the item under the cursor", label="go there"),
    Key(
        "run.pause",
        ("space",),
        "pause after this step, or continue",
        label="pause/continue",
    ),
    Key("run.step", ("full_stop",), "generate one token", label="one token"),
    Key("run.breakpoints", ("b",), "breakpoints: pause on a condition", label="breakpoints"),
    Key("travel.restore", ("R",), "take the model back to this step", label="go back here"),
    Key(
        "travel.fork",
        ("F",),
        "try another token here",
        label="other token",
    ),
    Key(
        "travel.mask",
        ("E",),
        "change the mask, re-run from here",
        label="other mask",
    ),
    Key("branch.compare", ("C",), "compare this branch with its parent, side by side"),
    Key(
        "code.open",
        ("e",),
        "open the code of the mask, or the layer, in an editor",
        label="code",
    ),
    Key("code.show", ("y",), "why a cell is open or closed: the code with its values", label="why"),
    Key("branch.choose", ("t",), "choose a branch", label="branch"),
    Key(
        "run.stop",
        ("ctrl+c",),
        "stop, keep the trace (again: kill now)",
        label="stop",
    ),
    Key("screen.shot", ("s",), "save a picture of the screen"),
    Key("panel.export", ("S",), "save a picture of the panel"),
    Key("app.palette", ("p", "ctrl+p"), "all commands", label="menu"),
    Key("app.messages", ("M",), "the messages so far"),
    Key("app.help", ("question_mark",), "help", label="help"),
    Key("app.glossary", ("G",), "glossary: what the words mean"),
    Key("app.theme", ("T",), "choose a theme"),
    Key("app.quit", ("q",), "quit", label="quit"),
)

N_DIGITS = 10


def all_keys() -> tuple[Key, ...]:
    """Return the table with the digit keys, which show a panel by its number (0: panel 10)."""
    digits = tuple(
        Key(f"panel.show-{n}", (str(n % 10),), f"show panel {n} here")
        for n in range(1, N_DIGITS + 1)
    )
    return KEYS + digits


_NAMES = (
    *("up", "down", "left", "right", "home", "end", "pageup", "pagedown"),
    *("enter", "tab", "space", "escape", "backspace", "delete", "insert"),
)
NAMED_KEYS = (*_NAMES, *(f"f{n}" for n in range(1, 25)))
KEY_SYNTAX = (
    f'A key is a character ("w", "?", "7"), or one of {", ".join(_NAMES)}, f1 to f24; '
    "ctrl+, alt+ and shift+ may precede it."
)
FIXED_KEYS = {"app.palette": "ctrl+p", "app.quit": "ctrl+q"}
"""Keys that Textual itself binds to an action, in addition to the user's."""

_MODIFIERS = ("alt", "ctrl", "shift")
_EQUIVALENT_KEYS = {"ctrl+i": "tab", "ctrl+m": "enter", "ctrl+left_square_bracket": "escape"}
"""Keys for which a terminal sends the same code as for another key."""


def parse_key(text: str) -> str | None:
    """Return Textual's name of a key, None for text that is not a key.

    `text` is a character, a name, or the form that the help shows (`→`, `pgdn`), after any
    modifiers (`ctrl+`, `alt+`, `shift+`).
    """
    match = re.fullmatch(r"((?:\w+\+)*)(.+)", text if len(text) == 1 else text.replace(" ", ""))
    base = _parse_base(match[2]) if match else None
    if match is None or base is None:
        return None
    modifiers = match[1].lower().split("+")[:-1]
    if len(set(modifiers)) < len(modifiers) or not set(modifiers) <= set(_MODIFIERS):
        return None
    if modifiers == ["shift"] and len(base) == 1:
        return base.upper() if base.isalpha() else None  # a terminal sends the shifted character
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
    """Return Textual's name of a character: a letter or digit itself, else its Unicode name."""
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
"""Keys as the help of the interface shows them."""


def find_key_conflict(overrides: Mapping[str, Sequence[str]]) -> tuple[str, str, str] | None:
    """Return the first key that a remapped action would share, this action and the other one.

    `overrides` maps actions to keys by Textual's names; other actions have their default keys.
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
                return name, action, others[0]
    return None
