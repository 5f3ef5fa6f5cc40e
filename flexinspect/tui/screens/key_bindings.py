"""The table of keys in Textual's terms: bindings, and the commands of the palette."""

from __future__ import annotations

from functools import partial
from typing import Any

from textual.binding import Binding, BindingType
from textual.command import DiscoveryHit, Hit, Hits, Provider

from flexinspect.core.keyboard import all_keys
from flexinspect.panels.base import Navigate
from flexinspect.panels.panel_registry import panel_names
from flexinspect.tui.screens.navigation import parse_step_number


def bindings() -> list[BindingType]:
    """Return the table of keys as Textual's bindings."""
    return [
        Binding(
            ",".join(key.keys),
            f"do('{key.id}')",
            key.label or key.text,
            show=bool(key.label),
            id=key.id,
            tooltip=key.text,
        )
        for key in all_keys()
    ]


class KeyCommands(Provider):
    """The actions of the keys as commands of the palette."""

    async def discover(self) -> Hits:
        """List all actions."""
        for key in all_keys():
            yield DiscoveryHit(_capitalize(key.text), partial(self._do, key.id), help=key.id)

    async def search(self, query: str) -> Hits:
        """Match the descriptions of actions and the names of panels; a number is a step."""
        matcher = self.matcher(query)
        if (step := parse_step_number(query)) is not None:
            yield Hit(1.0, f"Go to step {step}", partial(self._navigate, Navigate(step=step)))
        for key in all_keys():
            text = _capitalize(key.text)
            if (score := matcher.match(text)) > 0:
                yield Hit(score, matcher.highlight(text), partial(self._do, key.id), help=key.id)
        for name in panel_names():
            text = f"Show panel {name}"
            if (score := matcher.match(text)) > 0:
                target = partial(self._navigate, Navigate(panel=name))
                yield Hit(score, matcher.highlight(text), target)

    def _do(self, name: str) -> None:
        screen: Any = self.screen
        screen.action_do(name)

    def _navigate(self, target: Navigate) -> None:
        screen: Any = self.screen
        screen.navigate(target)


def _capitalize(text: str) -> str:
    return text[:1].upper() + text[1:]
