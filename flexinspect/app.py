"""The application: which screen, which theme, which keys. Everything else is the screens'."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from textual.app import App, SystemCommand
from textual.binding import BindingType
from textual.filter import LineFilter
from textual.screen import Screen

from flexinspect import state
from flexinspect.errors import TraceError, UsageError
from flexinspect.feed import Feed
from flexinspect.job import Job, ScriptJob
from flexinspect.keys import all_keys
from flexinspect.lending import LOOK_EVERY_S, lend
from flexinspect.panels.base import Place
from flexinspect.screens.broken import BrokenScreen
from flexinspect.screens.start import JobOf, StartScreen
from flexinspect.screens.trace import TraceScreen
from flexinspect.trace.salvage import is_copy
from flexinspect.widgets.canvas import Canvas
from flexinspect.widgets.nocolor import WithoutColors

_WITHOUT_COLORS = WithoutColors()


class InspectorApp(App[None]):
    """The inspector. It opens a trace, follows a job, or asks what to do.

    `keymap` maps ids of `flexinspect.keys` to keys, separated by commas; `job_of` makes the jobs
    that the start screen offers.
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
        place: Place | None = None,
        keymap: Mapping[str, str] | None = None,
        job_of: JobOf | None = None,
    ) -> None:
        super().__init__()
        self._job_of = job_of or _no_jobs
        self._trace, self._job, self._place = trace, job, place
        self._keymap_given = dict(keymap or {})
        self.feed: Feed | None = None
        self.trouble: TraceError | None = None
        self.animation_level = "none"  # a data view that moves by itself is repainted for nothing

    def on_mount(self) -> None:
        """Open what was asked for."""
        theme = state.recall().theme
        if theme in self.available_themes:
            self.theme = theme
        self.theme_changed_signal.subscribe(self, self._repaint_all)
        self.set_keymap(self._keymap_given)
        self._end_on_signals()
        self.call_after_refresh(_spare_the_collector)
        if self._job is not None:
            self.inspect_run(self._job)
        elif self._trace is not None:
            self.inspect_trace(self._trace, self._place)
        else:
            self.push_screen(StartScreen(self._begin, self._job_of))

    def on_unmount(self) -> None:
        """Let go of the trace."""
        if self.feed is not None:
            self.feed.close()

    def inspect_run(self, job: Job | ScriptJob) -> None:
        """Start a job and follow it."""
        self.feed = Feed.run(job)
        if job.debugger.pdb:
            self.set_interval(LOOK_EVERY_S, self._lend_terminal)
        self.push_screen(TraceScreen(self.feed))

    def _lend_terminal(self) -> None:
        """Step aside while pdb in the run has the terminal."""
        process = self.feed.process if self.feed is not None else None
        if process is not None and process.state.wants_terminal:
            with self.suspend():
                lend(process)

    def inspect_trace(self, path: Path, place: Place | None = None) -> None:
        """Open a trace; one that cannot be read gets a screen that says why."""
        try:
            self.feed = Feed(path)
        except TraceError as error:
            self.trouble = error
            self.push_screen(BrokenScreen(path, error, self._begin))
            return
        self.trouble = None
        if not is_copy(path):
            state.opened(path)
        self.push_screen(TraceScreen(self.feed, place))

    def _begin(self, what: Path | Job | ScriptJob) -> None:
        if not isinstance(what, Path):
            self.inspect_run(what)
        else:
            self.inspect_trace(what)

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """Offer none of Textual's own commands: our table has them all, once and with its care."""
        return ()

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Let no colour reach the terminal under `NO_COLOR`."""
        return (_WITHOUT_COLORS,) if self.no_color else super().get_line_filters()

    def keys_of(self, name: str) -> str:
        """Return the keys of an action as the user has them, for help."""
        default = next((key.keys for key in all_keys() if key.id == name), ())
        given = self._keymap_given.get(name)
        names: Sequence[str] = given.split(",") if given else default
        return " ".join(self.get_key_display_of(key) for key in names)

    def get_key_display_of(self, key: str) -> str:
        """Return a key as it stands on a keyboard."""
        from textual.keys import format_key

        return "+".join(format_key(part) for part in key.strip().split("+"))

    def _repaint_all(self, theme: object) -> None:
        state.remember(theme=self.theme)
        for screen in self.screen_stack:
            for view in screen.query(Canvas):
                view.repaint()

    def _end_on_signals(self) -> None:
        """Leave the terminal as it was when we are ended, and let a run end its trace."""
        loop = asyncio.get_running_loop()
        for name in ("SIGTERM", "SIGHUP"):
            if hasattr(signal, name):
                with suppress(NotImplementedError, RuntimeError, ValueError):
                    number = getattr(signal, name)
                    loop.add_signal_handler(number, self._ended, number)

    def _ended(self, number: int) -> None:
        if self.feed is not None:
            self.feed.interrupt()
        self.exit(return_code=128 + number)


def _spare_the_collector() -> None:
    """Keep the collector from walking through all modules and styles while somebody steps.

    A full collection takes 20 to 40 ms here, several frames; what is loaded by now stays anyway.
    """
    gc.collect()
    gc.freeze()


def _no_jobs(words: Sequence[str]) -> Job | ScriptJob:
    raise UsageError("No run can be started from here.", hint=f"Type: flexinspect {words[0]} …")
