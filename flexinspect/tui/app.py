"""The Textual application: opens a screen, keeps the theme, and applies the user's keys."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from msgspec.structs import replace
from rich.color import Color, ColorParseError
from textual.app import App, SystemCommand
from textual.binding import BindingType
from textual.driver import Driver
from textual.filter import LineFilter
from textual.keys import format_key
from textual.screen import Screen

from flexinspect.core.errors import TraceError, UsageError
from flexinspect.core.keyboard import all_keys
from flexinspect.core.text import ensure_printable
from flexinspect.drawing.text_lines import Canvas
from flexinspect.drawing.theme import NoColorFilter, readable
from flexinspect.panels.base import TracePlace
from flexinspect.trace.file.salvage import is_repaired_copy
from flexinspect.tui import saved_state
from flexinspect.tui.lost_terminal import ignore_failed_writes
from flexinspect.tui.panel_layout import start_gc
from flexinspect.tui.panel_view import forget_theme
from flexinspect.tui.screens.trace_screen import TraceScreen
from flexinspect.tui.terminal_output import TerminalCells
from flexinspect.tui.trace_session import TraceSession

# What opening a trace does not show is imported on first use.
if TYPE_CHECKING:
    from rich.console import RenderableType
    from textual.notifications import SeverityLevel

    from flexinspect.analysis.ranks.rank_comparison import RankComparison
    from flexinspect.analysis.run_diff.generations import GenerationDifference
    from flexinspect.analysis.run_diff.traces import Comparison
    from flexinspect.records.job import Job, ScriptJob
    from flexinspect.tui.screens.start_screen import JobFactory

MAX_MESSAGES = 200
_NO_COLOR_FILTER = NoColorFilter()


class InspectorApp(App[None]):
    """The interface: opens a trace, runs and follows a job, or shows the start screen.

    `keymap` maps ids of `flexinspect.core.keyboard` to keys, separated by commas; `make_job`
    returns the job of a command line of the start screen. With `has_tour` a guided tour leads
    through the trace. `compare` are two traces and the generation of which both are shown side by
    side, `ranks` those of a distributed run.
    """

    CSS_PATH = "app.tcss"
    TITLE = "flexinspect"
    ENABLE_COMMAND_PALETTE = True
    COMMAND_PALETTE_BINDING = "ctrl+p"
    BINDINGS: ClassVar[list[BindingType]] = []

    def __init__(
        self,
        trace: Path | None = None,
        job: Job | ScriptJob | None = None,
        *,
        place: TracePlace | None = None,
        keymap: Mapping[str, str] | None = None,
        make_job: JobFactory | None = None,
        has_tour: bool = False,
        compare: tuple[Path, Path, int] | None = None,
        ranks: RankComparison | None = None,
    ) -> None:
        super().__init__()
        # Sixteen colours are the terminal's own, so no pair of them is surely readable.
        self.no_color |= self.console.color_system in (None, "standard", "windows")
        self._make_job = make_job or _refuse_job
        self._trace, self._job, self._place = trace, job, place
        self._keymap_overrides = dict(keymap or {})
        self._has_tour = has_tour
        self._compare, self._ranks = compare, ranks
        self.session: TraceSession | None = None
        self.trace_error: TraceError | None = None
        self._messages: deque[tuple[str, str]] = deque(maxlen=MAX_MESSAGES)
        self._terminal_cells = TerminalCells()
        self.animation_level = "none"  # animating a view of data only costs repaints

    def get_driver_class(self) -> type[Driver]:
        """Return the driver of this platform, which survives a terminal that is closed."""
        return ignore_failed_writes(super().get_driver_class())

    def on_mount(self) -> None:
        """Restore the theme and open the job, the trace or the start screen."""
        theme = saved_state.load_state().theme
        if theme in self.available_themes:
            self.theme = theme
        self.theme_changed_signal.subscribe(self, self._repaint_all)
        self.set_keymap(self._keymap_overrides)
        self._install_signal_handlers()
        if self._job is not None:
            self.inspect_run(self._job)
        elif self._compare is not None:
            self._compare_traces(*self._compare)
        elif self._ranks is not None:
            self._show_ranks(self._ranks)
        elif self._trace is not None:
            self.inspect_trace(self._trace, self._place)
        else:
            from flexinspect.tui.screens.start_screen import StartScreen

            self.push_screen(StartScreen(self._open_target, self._make_job))
            self.call_after_refresh(start_gc)

    def on_unmount(self) -> None:
        if self.session is not None:
            self.session.close()

    def inspect_run(self, job: Job | ScriptJob) -> None:
        """Start a job and follow its trace."""
        from flexinspect.launch import child_process  # not to open a finished trace

        self.session = TraceSession(process=child_process.start_capture(job))
        if job.debugger.pdb:
            self.set_interval(child_process.POLL_INTERVAL_S, self._hand_over_terminal)
        self.push_screen(TraceScreen(self.session))

    def _hand_over_terminal(self) -> None:
        """Suspend the interface while pdb in the run uses the terminal."""
        process = self.session.process if self.session is not None else None
        if process is not None and process.state.wants_terminal:
            from flexinspect.launch.child_process import hand_over_terminal

            with self.suspend():
                hand_over_terminal(process)

    def inspect_trace(self, path: Path, place: TracePlace | None = None) -> None:
        """Open a trace, or a screen with the reason when it could not be read."""
        try:
            session = TraceSession(path)
        except TraceError as error:
            from flexinspect.tui.screens.start_screen import UnreadableTraceScreen

            self.trace_error = error
            self.push_screen(UnreadableTraceScreen(path, error, self._open_target))
            self.call_after_refresh(start_gc)
            return
        self.trace_error = None
        if not is_repaired_copy(path):
            saved_state.add_recent_trace(path)
        if self.session is None or self.session.process is None:
            self.session = session  # a run that was started is concluded by the command
        self.push_screen(TraceScreen(session, place, has_tour=self._has_tour))

    def open_instead(self, screen: TraceScreen, path: Path) -> None:
        """Open another trace in place of a screen and of the dialogs over it."""
        while screen in self.screen_stack:
            self.pop_screen()
        self._open_target(path)

    def leave_trace(self) -> None:
        """Close the screen of a trace: go back to the runs that it is one of, or quit."""
        if self._ranks is None and self._compare is None:
            self.exit()
            return
        self.pop_screen()
        if self.session is not None:
            self.session.close()
            self.session = None

    def _show_ranks(self, found: RankComparison) -> None:
        """Show the ranks of a distributed run, and open their traces from there."""
        from flexinspect.trace.reader import TraceReader
        from flexinspect.tui.screens.ranks_screen import RanksScreen

        paths = {one.rank: one.path for one in found.run.traces}

        def open_rank(rank: int, place: TracePlace) -> None:
            self.inspect_trace(paths[rank], place)

        def compare(rank: int, place: TracePlace) -> None:
            pair = found.pairs[rank]
            part = next(one for one in pair.generations if one.generation == place.generation)
            names = (f"rank {found.reference_of(rank)}", f"rank {rank}")
            if part.first is not None and part.first.step == place.step:
                place = replace(place, layer=part.first.layer or 0)
            self._push_comparison(pair, part, names, place)

        readers = tuple(TraceReader(path) for path in paths.values())
        self.push_screen(RanksScreen(found, readers, open_rank, compare))
        self.call_after_refresh(start_gc)

    def _compare_traces(self, one: Path, other: Path, generation: int) -> None:
        """Show a generation of two traces side by side, from its first difference on."""
        from flexinspect.analysis.run_diff.traces import compare_traces
        from flexinspect.trace.reader import open_trace

        with open_trace(one) as a, open_trace(other) as b:
            comparison = compare_traces(a, b, generation=generation)
        found = comparison.generations[0]
        names = (f"A {one.stem}", f"B {other.stem}")
        places = (found.first, found.divergence, found.first_difference)
        step = next((each.step for each in places if each is not None), 0)
        layer = (found.first and found.first.layer) or 0
        place = TracePlace(generation, step=step, layer=layer)
        self._push_comparison(comparison, found, names, place)
        self.call_after_refresh(start_gc)

    def _push_comparison(
        self,
        comparison: Comparison,
        found: GenerationDifference,
        names: tuple[str, str],
        place: TracePlace,
    ) -> None:
        """Show a generation of two traces side by side at a place."""
        from flexinspect.analysis.run_diff.difference_text import short_place_text, verdict_text
        from flexinspect.panels.panel_source import Source
        from flexinspect.trace.reader import TraceReader
        from flexinspect.tui.comparison_data import Side
        from flexinspect.tui.screens.compare_screen import CompareScreen

        readers = TraceReader(comparison.a), TraceReader(comparison.b)
        partner, layers = found.partner, dict(found.layers.pairs)
        sides = (
            Side(Source(readers[0]), 0, names[0]),
            Side(Source(readers[1]), 0, names[1], partner, layers),
        )
        verdict = verdict_text(comparison)
        if found.first is not None:
            verdict += f" First: {short_place_text(found.first)}"
        is_over_ranks = self._ranks is not None
        open_place = None if is_over_ranks else partial(self.inspect_trace, Path(comparison.a))
        self.push_screen(CompareScreen(sides, verdict, place, open_place, found))

    def _open_target(
        self,
        target: Path | Job | ScriptJob,
        place: TracePlace | None = None,
        *,
        has_tour: bool = False,
    ) -> None:
        self._has_tour = has_tour
        if not isinstance(target, Path):
            self.inspect_run(target)
        else:
            self.inspect_trace(target, place)

    def on_resize(self) -> None:
        """Repaint the whole terminal: it is resized, or shown again after a suspension."""
        self._terminal_cells.forget()

    def _display(self, screen: Screen[Any], renderable: RenderableType | None) -> None:
        """Write an update of the screen, without the cells that did not change."""
        super()._display(screen, self._terminal_cells.limit(renderable))

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """Return none of Textual's own commands: the table of keys has all commands."""
        return ()

    def get_css_variables(self) -> dict[str, str]:
        """Return the colours of the theme, with an accent that is readable as text in a window."""
        variables = super().get_css_variables()
        with suppress(ColorParseError):  # the colours of the terminal itself are not known
            accent, surface = (Color.parse(variables[name]) for name in ("accent", "surface"))
            variables["text-accent"] = readable(accent, surface).get_truecolor().hex
        return variables

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Remove all colours under `NO_COLOR`."""
        return (_NO_COLOR_FILTER,) if self.no_color else super().get_line_filters()

    def notify(
        self,
        message: str,
        *,
        title: str = "",
        severity: SeverityLevel = "information",
        timeout: float | None = None,
        markup: bool = False,
    ) -> None:
        """Show a message in place of the last one; `messages` returns all.

        Its text is never markup or a control code: it may contain text of a model.
        """
        message = "\n".join(map(ensure_printable, message.split("\n")))
        self._messages.append((time.strftime("%H:%M:%S"), message))
        self.clear_notifications()
        super().notify(message, title=title, severity=severity, timeout=timeout, markup=False)

    def messages(self) -> list[tuple[str, str]]:
        """Return (time of day, text) of the messages so far, the newest first."""
        return list(reversed(self._messages)) or [("", "There was no message yet.")]

    def keys_of(self, name: str) -> str:
        """Return the configured keys of an action, as the help displays them."""
        default = next((key.keys for key in all_keys() if key.id == name), ())
        override = self._keymap_overrides.get(name)
        names: Sequence[str] = override.split(",") if override else default
        return " ".join("+".join(map(format_key, key.strip().split("+"))) for key in names)

    def _repaint_all(self, theme: object) -> None:
        saved_state.save_state(theme=self.theme)
        forget_theme(self)
        for screen in self.screen_stack:
            for view in screen.query(Canvas):
                view.repaint()

    def _install_signal_handlers(self) -> None:
        """On SIGTERM and SIGHUP, restore the terminal and let a run finish its trace."""
        loop = asyncio.get_running_loop()
        for name in ("SIGTERM", "SIGHUP"):
            if hasattr(signal, name):
                with suppress(NotImplementedError, RuntimeError, ValueError):
                    number = getattr(signal, name)
                    loop.add_signal_handler(number, self._handle_signal, number)

    def _handle_signal(self, number: int) -> None:
        if self.session is not None and not self.session.is_detached:
            self.session.interrupt()
        self.exit(return_code=128 + number)


def _refuse_job(argv: Sequence[str]) -> Job | ScriptJob:
    raise UsageError("No run can be started from here.", hint=f"Type: flexinspect {argv[0]} …")
