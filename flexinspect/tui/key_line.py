"""The line of keys at the bottom: what can be done now, in this state and in the focused panel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from rich.cells import cell_len
from textual import events

from flexinspect.core.keyboard import all_keys
from flexinspect.drawing.text_lines import Canvas, NamedSpan, Pen
from flexinspect.panels.base import Panel
from flexinspect.tui.panel_view import theme_of
from flexinspect.tui.trace_session import CaptureStatus, RunStatus

LAST_ACTIONS = ("app.palette", "app.help", "app.quit")
"""Shown at the right end in every state."""
PANEL_ACTIONS = ("view.flip", "view.measure", "zoom.in")
"""Actions of the focused panel that are shown where they have an effect."""
_MOVES = (
    *("step.next", "finding.next", "finding.read", "tokens.xray", "tokens.search"),
    *("panel.next", "panel.maximize"),
)
_PAUSED = ("run.pause", "run.step")
_REWINDS = ("travel.fork", "travel.mask", "travel.restore")
_RUNNING = ("run.pause", "run.step", "run.breakpoints", "step.follow")


def actions_to_show(
    status: RunStatus,
    capture_status: CaptureStatus,
    panel: Panel[object, object],
    *,
    generation: int,
    following: bool,
    has_finding: bool = True,
    has_effect: Callable[[str], bool] = lambda _: True,
) -> Iterator[str]:
    """Yield the ids of the actions that help most now, the most helpful first.

    `has_finding` is whether the trace has a finding, and `has_effect` tells whether an action of
    the panel changes what it shows now.
    """
    follow = () if following else ("step.follow",)
    rewinds = _REWINDS if capture_status.can_rewind(generation) else follow
    if status.live and status.last_step is not None:
        if capture_status.state in ("paused", "pausing"):
            yield from (*_PAUSED, *rewinds)
        elif capture_status.state == "holding":
            yield from rewinds
        elif capture_status.status is not None:
            yield from _RUNNING
        else:
            yield from follow
    elif status.live and capture_status.state == "paused":  # before the first step
        yield from _PAUSED
    yield from (one for one in PANEL_ACTIONS if one in panel.actions and has_effect(one))
    left_out = []
    if status.run.get("watch_training") or status.last_step is None:
        left_out.append("tokens.")
    if status.last_step is None:
        left_out.append("step.")
    if not has_finding:
        left_out.append("finding.")
    yield from (action for action in _MOVES if not action.startswith(tuple(left_out)))


def lay_out_keys(
    actions: Iterable[str],
    keys_of: Callable[[str], str],
    width: int,
    last_actions: Sequence[str] = LAST_ACTIONS,
    own_labels: Mapping[str, str] | None = None,
) -> list[tuple[int, str, str, str]]:
    """Return (column, action, key, label) of the actions that fit; the last ones are at the end.

    `own_labels` replace those of the table of keys.
    """
    labels = {key.id: key.label or key.text for key in all_keys()} | dict(own_labels or {})

    def entry(action: str) -> tuple[str, str, str]:
        return action, keys_of(action).split(" ")[0], labels[action]

    def length(action: str, key: str, label: str) -> int:
        return cell_len(key) + cell_len(label) + 3

    last = [entry(action) for action in last_actions]
    room = width - sum(length(*one) for one in last)
    column, placed = 0, []
    for one in map(entry, dict.fromkeys(actions)):
        if column + length(*one) <= room:
            placed.append((column, *one))
            column += length(*one)
    column = max(room, 0)
    for one in last:
        if column + length(*one) <= width + 1:
            placed.append((column, *one))
            column += length(*one)
    return placed


class KeyLine(Canvas):
    """Shows keys with what they do; a click does it."""

    DEFAULT_CSS = "KeyLine { height: 1; }"

    def __init__(
        self,
        act: Callable[[str], object],
        list_actions: Callable[[], Iterable[str]],
        last_actions: Sequence[str] = LAST_ACTIONS,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(id="keys")
        self._last_actions, self._labels = last_actions, labels
        self._act, self._list_actions = act, list_actions
        self._placed: Sequence[tuple[int, str, str, str]] = ()
        self._shown: tuple[object, ...] = ()

    def on_resize(self, event: events.Resize) -> None:
        self.repaint()

    def repaint(self) -> None:
        """Draw the keys of the actions; costs nothing while they are the same."""
        theme, actions = theme_of(self.app), tuple(self._list_actions())
        if not self.size.width or self._shown == (theme, actions, self.size.width):
            return
        self._shown = (theme, actions, self.size.width)
        keys_of: Callable[[str], str] = self.app.keys_of  # type: ignore[attr-defined]
        self._placed = lay_out_keys(
            actions, keys_of, self.size.width, self._last_actions, self._labels
        )
        self.show([Pen(theme, self.size.width).line(*self._spans())])

    def _spans(self) -> Iterator[NamedSpan]:
        at = 0
        for column, _, key, label in self._placed:
            yield " " * (column - at), "text"
            yield key, "chosen"
            yield f" {label}", "text"
            at = column + cell_len(key) + cell_len(label) + 1

    def on_click(self, event: events.Click) -> None:
        """Run the action that was clicked."""
        for column, action, key, label in self._placed:
            if column <= event.x < column + cell_len(key) + cell_len(label) + 1:
                self._act(action)
