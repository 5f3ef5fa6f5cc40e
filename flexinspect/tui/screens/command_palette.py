"""The actions of the keys by group: for the help, and as the commands of the palette."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from textwrap import wrap
from typing import Any, NamedTuple

from textual.command import DiscoveryHit, Hit, Hits, Provider
from textual.content import Content

from flexinspect.core.conversion import parse_step_number
from flexinspect.core.errors import FlexInspectError
from flexinspect.core.keyboard import GROUPS, N_DIGITS, Key, all_keys
from flexinspect.core.text import capitalize
from flexinspect.panels.base import Navigate
from flexinspect.panels.panel_registry import load_panel, panel_names


def help_rows(
    keys_of: Callable[[str], str], first: str, first_actions: Collection[str]
) -> dict[str, list[tuple[str, str]]]:
    """Return (keys, text) of all actions by heading: those of the panel `first`, then by group."""
    rows: dict[str, list[tuple[str, str]]] = {first: []} if first_actions else {}
    for key in _keys_by_group():
        heading = first if key.id in first_actions else key.group
        if not key.id.startswith("panel.show-"):
            rows.setdefault(heading, []).append((keys_of(key.id), key.text))
        elif key.id == "panel.show-1":
            last = keys_of(f"panel.show-{N_DIGITS}")
            text = f"show panel 1 … {N_DIGITS} here"
            rows.setdefault(heading, []).append((f"{keys_of(key.id)} … {last}", text))
    return rows


def _keys_by_group() -> list[Key]:
    return sorted(all_keys(), key=lambda key: GROUPS.index(key.group))


class _Command(NamedTuple):
    """A line of the palette; `words` are found by a search too."""

    group: str
    keys: str
    text: str
    words: str
    call: Callable[[], Any]

    def score(self, query: str) -> float:
        """Return how well the command matches, from 1 (by its key or its name) to 0 (not at all).

        Every word of the query must occur as it is. Letters of it that are spread over a command
        do not match: Enter would run a command that has nothing to do with the query.
        """
        if query in self.keys.split():
            return 1.0
        query, text = query.lower(), self.text.lower()
        found_in = f"{text} {self.group} {self.words}".lower()
        if not all(word in found_in for word in query.split()):
            return 0.0
        if query in self.words.lower().split():
            return 0.95
        if text.startswith(query):
            return 0.9
        if re.search(rf"\b{re.escape(query)}", text):
            return 0.8
        return 0.7 if query in text else 0.6


class KeyCommands(Provider):
    """The actions of the keys and the panels as commands, with their keys and groups."""

    def _commands(self) -> Iterator[_Command]:
        app: Any = self.app
        screen: Any = self.screen
        for key in _keys_by_group():
            if not key.id.startswith("panel.show-"):
                words = f"{key.id} {key.id.replace('.', '')}"
                call = partial(screen.action_do, key.id)
                yield _Command(key.group, app.keys_of(key.id), capitalize(key.text), words, call)
            elif key.id == "panel.show-1":
                for number, name in enumerate(panel_names(), start=1):
                    call = partial(screen.navigation.navigate, Navigate(panel=name))
                    keys = app.keys_of(f"panel.show-{number}")
                    title = _title(name)
                    yield _Command(key.group, keys, f"Show panel {title}", f"{name} {title}", call)

    def _line(self, command: _Command, query: str = "") -> Content:
        text = Content(command.text)
        for word in query.lower().split():
            at = command.text.lower().find(word)
            if at >= 0 and self.match_style is not None:
                text = text.stylize(self.match_style, at, at + len(word))
        group, keys = f"{command.group:<7}", f"{command.keys:<9}  "
        return Content.assemble((group, "dim not bold"), (keys, "$text-accent"), text)

    async def discover(self) -> Hits:
        """List all actions by group."""
        for command in self._commands():
            yield DiscoveryHit(self._line(command), command.call, text=command.text)

    async def search(self, query: str) -> Hits:
        """Match descriptions, groups, keys and ids; a number is a step."""
        screen: Any = self.screen
        if (step := parse_step_number(query)) is not None:
            call = partial(screen.navigation.navigate, Navigate(step=step))
            yield Hit(2.0, f"Go to step {step}", call)
        for command in self._commands():
            if score := command.score(query):
                line = self._line(command, query)
                yield Hit(score, line, command.call, text=command.text)


def _title(name: str) -> str:
    try:
        return load_panel(name).title
    except FlexInspectError:
        return name


def format_rows(rows: Mapping[str, list[tuple[str, str]]], width: int) -> Content:
    """Return a table of keys under headings, in two columns if `width` allows."""
    n_columns = 2 if len(rows) > 1 and width >= 2 * MIN_COLUMN + GAP else 1
    column = (width - GAP * (n_columns - 1)) // n_columns
    blocks = [_block(heading, block, column) for heading, block in rows.items()]
    if n_columns == 1:
        return Content("\n\n").join(Content("\n").join(block) for block in blocks)
    left: list[Content] = []
    right: list[Content] = []
    half = sum(len(block) + 1 for block in blocks) / 2
    for block in blocks:
        side = left if len(left) + len(block) / 2 <= half and not right else right
        side += [*([Content()] if side else []), *block]
    n_lines = max(len(left), len(right))
    left, right = (side + [Content()] * (n_lines - len(side)) for side in (left, right))
    lines = [
        Content.assemble(one, " " * (column + GAP - one.cell_length), other)
        for one, other in zip(left, right, strict=True)
    ]
    return Content("\n").join(lines)


MIN_COLUMN, GAP = 34, 3
_KEYS_WIDTH = 10


def _block(heading: str, rows: list[tuple[str, str]], width: int) -> list[Content]:
    """Return the lines of a heading and its keys; a long description continues below itself."""
    lines = [Content.styled(heading, "bold underline")]
    for keys, text in rows:
        indent = " " * max(_KEYS_WIDTH, len(keys) + 1)
        room = max(width, len(indent) + 8)
        first, *rest = wrap(text, room, initial_indent=indent, subsequent_indent=" " * _KEYS_WIDTH)
        lines += [Content.assemble((keys, "$text-accent"), first[len(keys) :]), *map(Content, rest)]
    return lines
