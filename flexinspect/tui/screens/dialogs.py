"""Dialogs over a screen: text input, a choice, help, the token of a fork, the edit of a mask."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widget import Widget
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from flexinspect.core.errors import FlexInspectError
from flexinspect.core.text import escape_unprintable
from flexinspect.trace.queries import branch_of_step
from flexinspect.trace.reader import TraceReader

if TYPE_CHECKING:
    from flexinspect.analysis.inferred_declaration import InferredDeclaration, UndeclaredMask
    from flexinspect.control.messages import EditMask, Fork, MaskEdit, StepRef

T = TypeVar("T")


class Dialog(ModalScreen[str | None]):
    """A question above the widget that takes its answer; Escape returns None."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", "cancel")]

    def __init__(self, question: str, widget: Widget) -> None:
        super().__init__()
        self._question, self._widget = question, widget

    def compose(self) -> ComposeResult:
        with Vertical(classes="window"):
            yield Static(Content(self._question), markup=False)
            yield self._widget

    def on_mount(self) -> None:
        """Remove notifications, which could cover the dialog."""
        self.app.clear_notifications()


class TextDialog(Dialog):
    """Asks for a line of text."""

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.dismiss(event.value)


class ChoiceDialog(Dialog):
    """Asks for one of a list of options."""

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option.id)


async def ask_text(
    app: App[Any], question: str, value: str = "", *, placeholder: str = ""
) -> str | None:
    """Ask for a line of text; None when cancelled."""
    line = Input(value, placeholder=placeholder, select_on_focus=True)
    return await app.push_screen_wait(TextDialog(question, line))


async def ask_choice(
    app: App[Any], question: str, options: Sequence[tuple[str, str]]
) -> str | None:
    """Ask for one of a list of (id, line), and return its id; None when cancelled."""
    lines = OptionList(*(Option(Content(text), id=name) for name, text in options))
    return await app.push_screen_wait(ChoiceDialog(question, lines))


async def call_in_thread(app: App[Any], call: Callable[[], T]) -> T | None:
    """Return the result of a call that may block; show its `FlexInspectError` and return None."""
    try:
        return await asyncio.to_thread(call)
    except FlexInspectError as error:
        app.notify(format_error(error), severity="error", timeout=10)
        return None


def format_error(error: FlexInspectError) -> str:
    """Return the message of an error, with its hint on its own line."""
    return "\n".join(map(escape_unprintable, filter(None, (error.message, error.hint))))


class HelpScreen(ModalScreen[None]):
    """Help: the keys by heading, then `lines` about the subject `title`."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,question_mark", "dismiss", "close")]

    def __init__(
        self, title: str, lines: Sequence[str], rows: Mapping[str, list[tuple[str, str]]]
    ) -> None:
        super().__init__()
        self._title, self._lines, self._rows = title, lines, rows

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="window help") as window:
            window.border_title = "Keys"
            window.border_subtitle = "↓ more · esc close"
            yield Static(id="keys")
            yield Static(Content.styled(f"\n{self._title}", "bold underline"))
            for text in self._lines:
                yield Static(Content(text), classes="helpline")

    def on_resize(self) -> None:
        """Write the keys in as many columns as fit."""
        from flexinspect.tui.screens.command_palette import format_rows

        width = self.query_one(VerticalScroll).scrollable_content_region.width
        self.query_one("#keys", Static).update(format_rows(self._rows, width))


def format_branch(row: Any, current: int) -> str:
    """Return the line of a branch: its number, its fork, its state and answer."""
    mark = "▸" if row.branch == current else " "
    if row.parent is None:
        origin = "the original generation"
    else:
        origin = f"from branch {row.parent} at step {row.fork_step}"
    answer = escape_unprintable(row.answer).strip()
    answer_text = f" · {answer[:40]}" if answer else ""
    return f"{mark} {row.branch}  {origin} · {row.state}{answer_text}"


OTHER = "other"


async def ask_fork(app: Any, reader: TraceReader, there: StepRef) -> Fork | None:
    """Let the user choose a candidate of the step or type a text; None when cancelled."""
    from flexinspect.control.messages import Fork

    options = await call_in_thread(app, lambda: _candidate_options(reader, there))
    if options is None:
        return None
    question = f"Try another token at step {there.step}"
    answer = await ask_choice(app, question, [*options, (OTHER, "… type a token or a text")])
    if answer is None:
        return None
    if answer != OTHER:
        return Fork(there, int(answer))
    question = "A text, whose tokens are forced in order, or #ID for one token"
    typed = await ask_text(app, question, placeholder=" Paris")
    return Fork(there, *parse_forced_token(typed)) if typed else None


def parse_forced_token(typed: str) -> tuple[int | None, str | None]:
    """Return the token id of "#123" and None; of anything else None and the text to force."""
    by_id = re.fullmatch(r"\s*#(\d{1,9})\s*", typed)
    return (int(by_id[1]), None) if by_id else (None, typed)


def _candidate_options(reader: TraceReader, there: StepRef) -> list[tuple[str, str]]:
    """Return id and line of each candidate that the step did not choose."""
    from flexinspect.panels.logits_panel import NUMBER_WIDTH, format_probability, token_label

    branch = branch_of_step(reader, there.generation, there.step, there.branch)
    step = (there.generation, there.step, branch)
    chosen = reader.logits(*step)
    options = []
    for one in reader.candidates(*step):
        if chosen is None or one.token_id != chosen.chosen_id:
            chance = format_probability(one.logprob, NUMBER_WIDTH)
            text = f"{token_label(one.text, one.token_id):<24} {chance}"
            options.append((str(one.token_id), f"{one.rank:>3}  {text}"))
    return options


EDIT_KINDS = (
    ("preset", "Use another preset"),
    ("drop", "Drop a segment: no other segment attends to it"),
    ("join", "Join two segments: they attend to each other"),
    ("see", "Let a segment attend to another"),
    ("unsee", "Stop a segment from attending to another"),
    ("open-cell", "Open a cell: a position attends to a key"),
    ("close-cell", "Close a cell"),
    ("open-row", "Open a row: a position attends to all keys up to itself"),
    ("close-row", "Close a row: a position attends only to itself"),
)
_SEGMENT_QUESTIONS = {
    "drop": ("Which segment is dropped?",),
    "join": ("Which segment …", "… is joined with which one?"),
    "see": ("Which segment …", "… attends to which other one?"),
    "unsee": ("Which segment …", "… no longer attends to which one?"),
}


async def ask_edit(app: Any, reader: TraceReader, there: StepRef) -> EditMask | None:
    """Let the user choose an edit of the mask; None when cancelled."""
    from flexinspect.control.messages import EditMask, MaskEdit
    from flexinspect.masks.mask_presets import PRESETS

    question = f"Change the mask and re-run from step {there.step}"
    kind = await ask_choice(app, question, EDIT_KINDS)
    edit: MaskEdit | None = None
    if kind == "preset":
        name = await ask_choice(app, "Which preset?", [(name, name) for name in PRESETS])
        edit = MaskEdit("preset", name=name) if name else None
    elif kind in _SEGMENT_QUESTIONS:
        edit = await _ask_segments(app, kind, reader, there)
    elif kind is not None:
        edit = await _ask_cell(app, kind)
    return EditMask(there, (edit,)) if edit is not None else None


async def _ask_segments(
    app: Any, kind: str, reader: TraceReader, there: StepRef
) -> MaskEdit | None:
    from flexinspect.control.messages import MaskEdit

    segments = await call_in_thread(app, lambda: reader.segments(there.generation, there.branch))
    if segments is None:
        return None
    chosen: list[int] = []
    for question in _SEGMENT_QUESTIONS[kind]:
        options = [
            (str(n), f"{n:>2}  {escape_unprintable(one.label)}  [{one.start}, {one.stop})")
            for n, one in enumerate(segments)
            if n not in chosen and one.stop > one.start
        ]
        answer = await ask_choice(app, question, options)
        if answer is None:
            return None
        chosen.append(int(answer))
    op = "see" if kind == "unsee" else kind
    return MaskEdit(op, segments=tuple(chosen), is_open=kind != "unsee")  # type: ignore[arg-type]


async def _ask_cell(app: Any, kind: str) -> MaskEdit | None:
    from flexinspect.control.messages import MaskEdit

    is_cell, is_open = kind.endswith("cell"), kind.startswith("open")
    question = "Row and key, two positions" if is_cell else "Which row, a position"
    typed = await ask_text(app, question, placeholder="42 7" if is_cell else "42")
    numbers = [int(text) for text in re.findall(r"\d{1,9}", typed or "")]
    if is_cell and len(numbers) == 2:
        return MaskEdit("cell", row=numbers[0], key=numbers[1], is_open=is_open)
    if not is_cell and len(numbers) == 1:
        return MaskEdit("row", row=numbers[0], is_open=is_open)
    if typed:
        app.notify(f"That is not a {'row and a key' if is_cell else 'row'}.", severity="warning")
    return None


MAX_BORDER_MOVE = 4
"""Tokens by which a border can be moved at once."""


async def ask_declaration(app: Any, mask: UndeclaredMask) -> InferredDeclaration | None:
    """Let the user choose the segments that they meant, and move borders; None when cancelled."""
    choices = {str(n): one for n, one in enumerate(mask.choices())}
    question = mask.describe_oddity() or "The executed mask cuts the prompt into segments."
    moved: dict[int, int] = {}
    while True:
        options = [(key, escape_unprintable(one.describe())) for key, one in choices.items()]
        options.append((OTHER, "… move one border"))
        answer = await ask_choice(app, f"{question} What did you mean?", options)
        if answer is None or answer in choices:
            return None if answer is None else choices[answer]
        border = await _ask_border(app, mask, moved)
        if border is not None:
            moved |= border
            try:
                choices = {"moved": mask.declare(moved=moved), **choices}
            except FlexInspectError as error:
                moved = {}
                app.notify(format_error(error), severity="error")


async def _ask_border(
    app: Any, mask: UndeclaredMask, moved: dict[int, int]
) -> dict[int, int] | None:
    """Ask for a border and its new position."""

    def option(key: int, position: int) -> tuple[str, str]:
        return str(key), escape_unprintable(mask.describe_border(position))

    borders = [option(border, moved.get(border, border)) for border in mask.inferred.borders]
    chosen = await ask_choice(app, "Which border?", borders)
    if chosen is None:
        return None
    old = int(chosen)
    near = range(max(old - MAX_BORDER_MOVE, 1), old + MAX_BORDER_MOVE + 1)
    position = await ask_choice(app, "Where is it?", [option(at, at) for at in near])
    return None if position is None else {old: int(position)}
