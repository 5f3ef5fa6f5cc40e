"""The dialog of breakpoints: set one by its condition, enable or disable it, remove it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.suggester import Suggester
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from flexinspect.breakpoints import grammar
from flexinspect.core.errors import FlexInspectError
from flexinspect.core.text import escape_unprintable, plural
from flexinspect.tui.trace_session import CaptureClient

if TYPE_CHECKING:
    from flexinspect.control.client import ControlClient
    from flexinspect.control.messages import BreakpointInfo

EXAMPLE = "entropy > 3 and step > 2"
_KEY_HELP = "enter sets it · tab completes · down: list (enter enables or disables, x removes)"

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
    """An input for a condition, in which tab accepts the completion and down leads to the list."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("tab", "cursor_right_or_next", show=False),
        Binding("down", "screen.focus_list", show=False),
    ]

    async def action_cursor_right_or_next(self) -> None:
        """Accept the completion if there is one, else focus the list."""
        if self._suggestion and self._suggestion != self.value:
            self.value = self._suggestion
            self.cursor_position = len(self.value)
        else:
            await self.run_action("screen.focus_list")


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

    def action_focus_list(self) -> None:
        """Go from the condition to the list, if there is any breakpoint."""
        options = self.query_one(OptionList)
        if self._breakpoints:
            options.focus()
            if options.highlighted is None:
                options.highlighted = 0

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
    hit = f" · hit {plural(one.n_hits, 'time')}" if one.n_hits else ""
    note = f" · {escape_unprintable(one.note)}" if one.note else ""
    mark = "●" if one.is_enabled else "○"
    return f"{mark} {one.id}  {escape_unprintable(one.text)}{options}{hit}{note}"


# -- completion ----------------------------------------------------------------------------------

_COMPLETION_TOKENS = re.compile(
    r"""\s+|"(?:\\.|[^"\\])*"?|'(?:\\.|[^'\\])*'?|==|!=|<=|>=|[<>@(),\[\]]|[^\s()"',@<>=\[\]!]+|.""",
    re.DOTALL,
)
_SIGNS = (*grammar.COMPARISONS, *"@(),[]")
_VALUE_START = re.compile(r"[+-]?[\d.]|[\"']")
_MODULE_PATTERNS = ("layers.*", "layers.*.self_attn", "layers.*.mlp", "lm_head")
_CONNECTIVES = {"and": "both conditions hold", "or": "one condition holds"}

Names = Collection[str]


class Completion(NamedTuple):
    """A suggestion that replaces the text from `start` to `stop`, and its meaning."""

    text: str
    start: int
    stop: int
    help: str = ""


def complete(
    text: str, cursor: int, *, modules: Names = _MODULE_PATTERNS, finding_ids: Names = ()
) -> list[Completion]:
    """Return suggestions for the cursor; they replace the word that it is in or at the end of."""
    pieces = [(piece[0], piece.start()) for piece in _COMPLETION_TOKENS.finditer(text[:cursor])]
    start = cursor
    if pieces and not pieces[-1][0].isspace() and pieces[-1][0] not in _SIGNS:
        start = pieces.pop()[1]
    typed = text[start:cursor]
    before = [piece for piece, _ in pieces if not piece.isspace()]
    rest = re.match(r"[\w.*-]*", text[cursor:])
    stop = cursor + (rest.end() if rest and typed else 0)
    plain = typed.strip("\"'").lower()
    return [
        Completion(word, start, stop, meaning)
        for word, meaning in _suggestions(before, modules, finding_ids)
        if word.strip('"').lower().startswith(plain) and word != typed
    ]


_Suggestions = Iterable[tuple[str, str]]


def _suggestions(before: list[str], modules: Names, finding_ids: Names) -> _Suggestions:
    """Return the possible next words after these pieces, each with its meaning."""
    third, name, last = ["", "", "", *before][-3:]
    opened = [piece for piece in before if piece in "[]"]
    if opened and opened[-1] == "[":
        return grammar.OPTION_HELP.items()
    if last == "@":
        return [(pattern, "modules with this name") for pattern in modules]
    if last == grammar.FINDING:
        families = dict.fromkeys(f"{id_.partition('.')[0]}.*" for id_ in finding_ids)
        return [("*", "any"), *((pattern, "") for pattern in (*families, *finding_ids))]
    if last in grammar.COMPARISONS:
        return _value_suggestions(name, third)
    if last in grammar.VALUE_NAMES:
        is_text = grammar.VALUE_NAMES[last].kind is grammar.ValueKind.TEXT
        operators = grammar.COMPARISONS[:2] if is_text else grammar.COMPARISONS
        return [*((op, "") for op in operators), ("in", "a list")]
    if last in grammar.OBSERVATIONS:
        return [("@", "at modules whose name matches"), *_CONNECTIVES.items()]
    if name == grammar.FINDING:
        return [(op, "a severity") for op in ("==", ">=")] + list(_CONNECTIVES.items())
    if _VALUE_START.match(last) or last == ")" or name in ("@", *grammar.COMPARISONS):
        return [*_unit_suggestions(third, last), *_CONNECTIVES.items()]
    words = [(word.name, word.help) for word in grammar.VALUE_NAMES.values()]
    finding = (grammar.FINDING, grammar.FINDING_HELP)
    negation = ("not", "a condition that does not hold")
    return [*words, *grammar.OBSERVATIONS.items(), finding, negation]


def _value_suggestions(name: str, before_name: str) -> _Suggestions:
    if grammar.FINDING in (name, before_name):
        return [(severity, "a severity") for severity in grammar.SEVERITIES]
    word = grammar.VALUE_NAMES.get(name)
    if word is None:
        return [(value.name, value.help) for value in grammar.VALUE_NAMES.values()]
    return [(grammar.quote(choice), "") for choice in word.choices]


def _unit_suggestions(name: str, number: str) -> _Suggestions:
    """Return units of memory after a number that a memory value is compared with."""
    word = grammar.VALUE_NAMES.get(name)
    is_memory = word is not None and word.kind is grammar.ValueKind.BYTES and number[:1].isdigit()
    return [(unit, "") for unit in grammar.UNITS if is_memory and unit.endswith("iB")]
