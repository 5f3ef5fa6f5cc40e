"""The dialog of breakpoints: set one by its condition, enable or disable it, remove it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, TypeVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.suggester import Suggester
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from flexinspect.breakpoints.completion import complete
from flexinspect.core.errors import FlexInspectError
from flexinspect.core.text import escape_unprintable, plural
from flexinspect.tui.trace_session import CaptureClient

if TYPE_CHECKING:
    from flexinspect.control.client import ControlClient
    from flexinspect.control.messages import BreakpointInfo

EXAMPLE = "entropy > 3 and step > 2"
_KEY_HELP = "enter sets it · tab completes · down to the list: enter switches off and on, x removes"

T = TypeVar("T")


class ConditionSuggester(Suggester):
    """Completes names in a condition."""

    def __init__(self) -> None:
        super().__init__(use_cache=False, case_sensitive=True)

    async def get_suggestion(self, value: str) -> str | None:
        """Return the line with its last word completed."""
        if not value or value[-1].isspace():
            return None
        completions = complete(value, len(value))
        return value[: completions[0].start] + completions[0].text if completions else None


class ConditionInput(Input):
    """An input for a condition, in which tab accepts the completion."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("tab", "cursor_right_or_next", show=False)]

    def action_cursor_right_or_next(self) -> None:
        """Accept the completion if there is one, else focus the list."""
        if self._suggestion and self._suggestion != self.value:
            self.value = self._suggestion
            self.cursor_position = len(self.value)
        else:
            self.screen.focus_next()


class BreakpointsScreen(ModalScreen[None]):
    """Dialog with all breakpoints of the capture; Escape closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", "close"),
        Binding("x,delete", "remove", "remove"),
    ]

    def __init__(self, capture: CaptureClient, breakpoints: Sequence[BreakpointInfo]) -> None:
        super().__init__()
        self._capture = capture
        self._breakpoints = list(breakpoints)

    def compose(self) -> ComposeResult:
        with Vertical(classes="window"):
            yield Static(Content("Stop when"), markup=False)
            yield ConditionInput(placeholder=EXAMPLE, suggester=ConditionSuggester())
            yield Static("", markup=False, id="wrong")
            yield OptionList()
            yield Static(Content(_KEY_HELP), markup=False, classes="muted")

    def on_mount(self) -> None:
        self.query_one("#wrong").display = False
        self._fill()

    def _fill(self) -> None:
        options = self.query_one(OptionList)
        at = options.highlighted
        options.clear_options()
        options.add_options(
            Option(Content(format_breakpoint(one)), id=str(one.id)) for one in self._breakpoints
        )
        options.display = bool(self._breakpoints)
        if at is not None and self._breakpoints:
            options.highlighted = min(at, len(self._breakpoints) - 1)

    async def _call_capture(self, command: Callable[[ControlClient], T]) -> T | None:
        message = self.query_one("#wrong", Static)
        try:
            response = await asyncio.to_thread(lambda: self._capture.call(command))
        except FlexInspectError as error:
            message.update(Content(error.sentence()))
            message.display = True
            return None
        message.display = False
        return response

    async def on_input_submitted(self, event: Input.Submitted) -> None:
        """Set a breakpoint, or show the error of its condition with a caret."""
        text = event.value.strip()
        if not text:
            return
        if await self._call_capture(lambda client: client.add_breakpoint(text)) is not None:
            event.input.value = ""
            await self._reload()

    async def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        one = self._breakpoints[event.option_index]
        switch = not one.is_enabled
        await self._call_capture(lambda client: client.enable_breakpoint(one.id, switch))
        await self._reload()

    async def action_remove(self) -> None:
        at = self.query_one(OptionList).highlighted
        if at is not None and self._breakpoints:
            number = self._breakpoints[at].id
            await self._call_capture(lambda client: client.remove_breakpoint(number))
            await self._reload()

    async def _reload(self) -> None:
        breakpoints = await self._call_capture(lambda client: client.breakpoints())
        if breakpoints is not None:
            self._breakpoints = list(breakpoints)
            self._fill()


def format_breakpoint(one: BreakpointInfo) -> str:
    """Return the line of a breakpoint."""
    options_set = [f"hits={one.hits}"] if one.hits > 1 else []
    options_set += [word for word, on in (("once", one.once), ("log", one.log_only)) if on]
    options = f" [{' '.join(options_set)}]" if options_set else ""
    met = f" · met {plural(one.n_hits, 'time')}" if one.n_hits else ""
    note = f" · {escape_unprintable(one.note)}" if one.note else ""
    mark = "●" if one.is_enabled else "○"
    return f"{mark} {one.id}  {escape_unprintable(one.text)}{options}{met}{note}"
