"""Screens without an open trace: the start screen, and the screen of an unreadable trace."""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Protocol

from textual import events, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Footer, OptionList, Static
from textual.widgets.option_list import Option

from flexinspect.core.errors import FlexInspectError, TraceError
from flexinspect.core.keyboard import KEYS
from flexinspect.core.text import escape_unprintable
from flexinspect.drawing.text_lines import clip_text
from flexinspect.panels.base import TracePlace
from flexinspect.records.job import Job, ScriptJob
from flexinspect.trace.file import salvage
from flexinspect.tui.guided_tour import EXHIBIT
from flexinspect.tui.panel_view import theme_of
from flexinspect.tui.saved_state import known_traces, load_state
from flexinspect.tui.screens.dialogs import HelpScreen, ask_choice, ask_text, call_in_thread
from flexinspect.tui.trace_verdict import TraceVerdict, read_verdict


class OpenTarget(Protocol):
    """Opens a trace, at a place or with a tour, or starts a job."""

    def __call__(
        self,
        target: Path | Job | ScriptJob,
        place: TracePlace | None = None,
        *,
        has_tour: bool = False,
    ) -> None: ...


class JobFactory(Protocol):
    """Returns the job of a command line. Raises `FlexInspectError`."""

    def __call__(self, argv: Sequence[str]) -> Job | ScriptJob: ...


SLOGAN = "See what every token could see, and find the bug in your mask."
DEMO = (
    *("run", "--model", "demo", "--dataset", "demo", "--max-samples", "2"),
    *("--cue", "In a sentence:"),
)
ENTRIES = {
    "tour": ("Take the tour: two minutes, seven keys", "flexinspect tour"),
    "demo": ("Run the demo", f"flexinspect {shlex.join(DEMO)}"),
    "model": ("Run a model …", "flexinspect run --model NAME --prompt TEXT"),
    "script": ("Run your own script …", "flexinspect run SCRIPT.py"),
    "attach": ("Attach to a running capture …", "flexinspect attach"),
    "museum": ("Museum: practise on planted bugs …", "flexinspect museum"),
}
"""By name, what can be started: its title, and the command line that does the same."""

_HELP = """\
flexinspect records a model that generates text under FlexAttention, and shows for each token what \
it attended to, and whether that is what you meant.
To see how it works, run the demo. To practise, open an exhibit of the museum: a small program \
with one planted bug, and a question.
Your own program needs no changes: choose “Run your own script”, or use flexinspect run."""
_VERDICT_WIDTH, _AGE_WIDTH = 14, 14
_OTHER_WIDTH = 18  # padding, gaps between columns, the scroll bar
_MAX_NAME, _MAX_ANSWER = 48, 30
_MIN_HEIGHT = 14
"""The height from which there is room for more than the list."""


class StartScreen(Screen[None]):
    """Lists what can be run or opened; the line below has the command of the highlighted entry.

    The verdicts on the traces are read in a thread, one after the other.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("question_mark", "help", "help", id="app.help"),
        Binding("G", "glossary", "glossary", id="app.glossary"),
        Binding("q", "app.quit", "quit", id="app.quit"),
    ]

    def __init__(self, open_target: OpenTarget, make_job: JobFactory) -> None:
        super().__init__()
        self._open_target, self._make_job = open_target, make_job
        self._traces = known_traces()
        self._verdicts: dict[int, TraceVerdict] = {}

    def compose(self) -> ComposeResult:
        with Vertical(id="start"):
            yield Static(Content.styled("flexinspect", "bold"))
            yield Static(f"{SLOGAN}\n", id="slogan")
            yield OptionList(*self._options())
            yield Static(id="command", classes="muted")
        yield Footer(show_command_palette=False)

    def _options(self) -> list[Option]:
        options = [_heading("Start")]
        options += [Option(f"  {title}", id=name) for name, (title, _) in ENTRIES.items()]
        if self._traces:
            options += [Option("", disabled=True), _heading("Recent traces")]
            options += [Option("", id=_trace_id(n)) for n in range(len(self._traces))]
        return options

    def on_mount(self) -> None:
        """Highlight the newest trace, or else the tour."""
        entries = self.query_one(OptionList)
        entries.highlighted = entries.get_option_index(_trace_id(0) if self._traces else "tour")
        self.app.theme_changed_signal.subscribe(self, self._show_traces)
        self._read_verdicts()

    def on_resize(self, event: events.Resize) -> None:
        """Leave out columns and lines that do not fit."""
        for name in ("#slogan", "#command"):
            self.query_one(name).display = event.size.height >= _MIN_HEIGHT
        self._show_traces()

    @work
    async def _read_verdicts(self) -> None:
        for number, path in enumerate(self._traces):
            self._verdicts[number] = await asyncio.to_thread(read_verdict, path)
            self._show_trace(number)

    def _show_traces(self, *_: object) -> None:
        for number in range(len(self._traces)):
            self._show_trace(number)

    def _show_trace(self, number: int) -> None:
        """Write the line of a trace: verdict, name, answer and age, as far as they fit."""
        path, verdict = self._traces[number], self._verdicts.get(number, TraceVerdict("…"))
        room = max(self.size.width - _VERDICT_WIDTH - _AGE_WIDTH - _OTHER_WIDTH, 10)
        answer_width = min(room // 2, _MAX_ANSWER)
        name_width = min(room - answer_width, _MAX_NAME)
        # No colour is readable on that of the highlighted line.
        entries, theme = self.query_one(OptionList), theme_of(self.app)
        is_plain = theme.no_color or entries.highlighted == entries.get_option_index(
            _trace_id(number)
        )
        color = "" if is_plain else theme.color(verdict.color).name
        answer = f"“{escape_unprintable(verdict.answer)}”" if verdict.answer else ""
        line = Content.assemble(
            "  ",
            (clip_text(verdict.text, _VERDICT_WIDTH), color),
            "  ",
            (clip_text(escape_unprintable(path.name), name_width), "bold"),
            "  ",
            clip_text(answer, answer_width),
            "  ",
            (clip_text(_format_file_age(path), _AGE_WIDTH).rstrip(), "" if is_plain else "dim"),
        )
        entries.replace_option_prompt(_trace_id(number), line)

    def on_option_list_option_highlighted(self, event: OptionList.OptionHighlighted) -> None:
        """Show the command line that does the same as the entry."""
        name = event.option.id or ""
        if name in ENTRIES:
            command = ENTRIES[name][1]
        else:
            command = f"flexinspect open {shlex.quote(str(self._trace_of(name)))}"
        self.query_one("#command", Static).update(Content(f"$ {escape_unprintable(command)}"))
        self._show_traces()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        name = event.option.id or ""
        if name == "tour":
            self._open_exhibit(EXHIBIT, has_tour=True)
        elif name == "demo":
            self._run_command(list(DEMO))
        elif name == "model":
            self._ask_model()
        elif name == "script":
            self._ask_script()
        elif name == "attach":
            self._ask_capture()
        elif name == "museum":
            self._ask_exhibit()
        else:
            self._open_target(self._trace_of(name))

    def _trace_of(self, name: str) -> Path:
        return self._traces[int(name.rpartition("-")[2])]

    @work
    async def _ask_model(self) -> None:
        question = "Which model? (an alias, a folder, a hub id)"
        model = await ask_text(self.app, question, "demo")
        if not model:
            return
        question = "The question in several wordings, separated by |"
        example = "What is the capital of France? | France's capital city?"
        prompts = await ask_text(self.app, question, placeholder=example)
        if not prompts:
            return
        # With "=", so that nothing that was typed is parsed as a flag.
        pieces = [piece.strip() for piece in prompts.split("|") if piece.strip()]
        self._run_command(["run", f"--model={model}", *(f"--prompt={piece}" for piece in pieces)])

    @work
    async def _ask_script(self) -> None:
        question = "Your program and its arguments, as you start them with Python"
        example = "generate.py --prompt hello, or -m package.module"
        typed = await ask_text(self.app, question, placeholder=example)
        try:
            words = _program_arguments(shlex.split(typed or ""))
        except ValueError as error:  # a quotation that has no end
            self.notify(f"The command line cannot be split: {error}.", severity="error")
            return
        if words:
            self._run_command(["run", *words])

    @work
    async def _ask_capture(self) -> None:
        from flexinspect.control.discovery import running

        entries = await call_in_thread(self.app, running)
        if entries is None:
            return
        if not entries:
            self.notify("No capture is running. Start one with flexinspect run.")
            return
        options = []
        for number, entry in enumerate(entries):
            age = _format_age(time.time() - entry.started_at)
            line = f"{entry.title or entry.kind}, process {entry.pid}, {age}\n  {entry.trace}"
            options.append((str(number), "\n".join(map(escape_unprintable, line.split("\n")))))
        answer = await ask_choice(self.app, "Attach to which capture?", options)
        if answer is not None:
            self._open_target(Path(entries[int(answer)].trace))

    @work
    async def _ask_exhibit(self) -> None:
        from flexinspect.inputs.broken_run_catalog import BROKEN_RUNS

        solved = [one.name for one in BROKEN_RUNS if one.name in load_state().solved_exhibits]
        options = [
            (one.name, f"{'✓' if one.name in solved else ' '} {one.title}") for one in BROKEN_RUNS
        ]
        question = f"Which symptom? {len(solved)} of {len(BROKEN_RUNS)} solved"
        name = await ask_choice(self.app, question, options)
        if name is not None:
            self._open_exhibit(name)

    @work
    async def _open_exhibit(self, name: str, *, has_tour: bool = False) -> None:
        from flexinspect.inputs.broken_run_catalog import find_broken_run
        from flexinspect.tui.screens.exhibit_screen import ExhibitScreen

        run = find_broken_run(name)
        trace = await self.app.push_screen_wait(ExhibitScreen(run))
        if trace is None:
            return
        self._open_target(trace, TracePlace(step=run.step), has_tour=has_tour)
        if not has_tour:
            app: Any = self.app
            key = app.keys_of("exhibit.answer")
            app.notify(f"{run.question} Press {key} to answer.", timeout=30)

    def _run_command(self, argv: list[str]) -> None:
        try:
            self._open_target(self._make_job(argv))
        except FlexInspectError as error:
            self.notify(error.sentence(), severity="error", timeout=15)

    def action_help(self) -> None:
        """Show the keys and the first steps."""
        app: Any = self.app
        rows = [("↑ ↓", "choose"), ("⏎", "open or run")]
        named = {key.id: key.text for key in KEYS}
        rows += [(app.keys_of(id_), named[id_]) for id_ in ("app.help", "app.glossary", "app.quit")]
        app.push_screen(HelpScreen("First steps", _HELP.splitlines(), {"Start screen": rows}))

    def action_glossary(self) -> None:
        """Explain the words of the interface."""
        from flexinspect.tui.screens.text_screens import GlossaryScreen

        self.app.push_screen(GlossaryScreen())


def _heading(text: str) -> Option:
    return Option(Content.styled(text, "bold"), disabled=True)


def _trace_id(number: int) -> str:
    return f"trace-{number}"


def _program_arguments(argv: list[str]) -> list[str]:
    """Return the arguments of `flexinspect run` for a program and its own arguments.

    Words that users may type before the program are removed.
    """
    for words in (["flexinspect", "run"], ["python"], ["python3"]):
        if argv[: len(words)] == words:
            argv = argv[len(words) :]
    n_words = 2 if argv[:1] == ["-m"] else 1
    program, arguments = argv[:n_words], argv[n_words:]
    has_own_flags = n_words == 1 and "".join(program).startswith("-")
    if not arguments or arguments[0] == "--" or has_own_flags:
        return argv
    return [*program, "--", *arguments]


def _format_file_age(path: Path) -> str:
    try:
        return _format_age(time.time() - path.stat().st_mtime)
    except OSError:
        return "gone"


def _format_age(seconds: float) -> str:
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} old"
    return "new"


class UnreadableTraceScreen(Screen[None]):
    """Shows what is wrong with a file and which parts are readable, and offers other traces.

    The readable parts are counted, and copied on request, in threads.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "back", "back"),
        Binding("q", "app.quit", "quit", id="app.quit"),
    ]

    def __init__(self, path: Path, error: TraceError, open_target: OpenTarget) -> None:
        super().__init__()
        self._path, self._error, self._open_target = path, error, open_target
        self._offers_copy = salvage.is_repairable(path)
        self._copy: Path | None = None
        self._is_copying = self._is_closed = False
        this = path.absolute()
        self._others = [other for other in known_traces(this.parent) if other != this]

    def compose(self) -> ComposeResult:
        with Vertical(id="broken"):
            yield Static(Content.styled("This trace cannot be opened", "bold $text-error"))
            yield Static(Content(f"\n{escape_unprintable(self._error.message)}"), id="why")
            if self._error.hint:
                yield Static(Content(escape_unprintable(self._error.hint)), id="hint")
            yield Static(Content("\nLooking for what can still be read …\n"), id="left")
            yield Static(id="copying")
            if options := self._options():
                yield OptionList(*options)
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        self.query_one("#copying").display = False
        self._show_readable_parts()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool:
        """Offer the way back only if there is one: to the start screen."""
        return action != "back" or isinstance(self.app.screen_stack[-2], StartScreen)

    def action_back(self) -> None:
        """Return to the start screen; the trace that cannot be read is no error of the command."""
        app: Any = self.app
        app.trace_error = None
        app.pop_screen()

    @work
    async def _show_readable_parts(self) -> None:
        try:
            lines = await asyncio.to_thread(salvage.describe_readable, self._path)
        except Exception:
            lines = ["The readable parts could not be determined."]
        self.query_one("#left", Static).update(Content("\n".join(["", *lines, ""])))

    def _options(self) -> list[Option]:
        options = [
            Option(Content(f"Open {escape_unprintable(str(path))}")) for path in self._others
        ]
        if self._offers_copy:
            options.insert(0, Option(Content(salvage.OFFER), id="copy"))
        return options

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Open a repaired copy, made first if necessary, or another trace."""
        if event.option.id != "copy":
            self._open_target(self._others[event.option_index - self._offers_copy])
        elif not self._is_copying:
            self._open_copy()

    @work
    async def _open_copy(self) -> None:
        if self._copy is None:
            self._is_copying = True
            self._show_message("Copying what is left …\n")
            with suppress(Exception):
                await asyncio.to_thread(self._make_copy)
            self._is_copying = False
        if self._copy is not None:
            self._show_message("")
            self._open_target(self._copy)
        else:
            self._show_message(
                "No copy could be made: is there room in the folder for temporary files?\n"
            )

    def _show_message(self, text: str) -> None:
        message = self.query_one("#copying", Static)
        message.update(Content(text))
        message.display = bool(text)

    def _make_copy(self) -> None:
        """Make the copy, in a thread, and remove it if the screen was closed meanwhile."""
        self._copy = salvage.repair_copy(self._path, lambda: self._is_closed)
        if self._is_closed:
            self._remove_copy()

    def on_unmount(self) -> None:
        """Remove the copy, and cancel one that is being made."""
        self._is_closed = True
        self._remove_copy()

    def _remove_copy(self) -> None:
        if self._copy is not None:
            salvage.delete_repaired_copy(self._copy)
