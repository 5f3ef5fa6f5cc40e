"""The debugger of one captured run, from its start to its end.

Most runs have no debugger, and load nothing for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexinspect.core.addresses import format_address
from flexinspect.records import protocol
from flexinspect.records.job import DebuggerOptions, listening_message
from flexinspect_hooks.debugger import python_mods
from flexinspect_hooks.python_internals.post_import_hooks import PostImportHooks

if TYPE_CHECKING:
    from flexinspect_hooks.debugger.pdb_terminal import Terminal

RecordDebugEvent = Callable[[str, str], None]
"""Records an event with a kind and a text."""

SendMessage = Callable[..., None]
"""Sends a message, given by its kind and its facts, to the process that started this one."""


class DebuggerSession:
    """The debugger of a run. It starts before the trace exists, so that a port in use leaves none.

    A debugger that was not requested, as when VS Code launched the run under it or attached to the
    process, counts as requested from then on. Raises `UsageError` when debugpy cannot listen.
    """

    def __init__(self, options: DebuggerOptions, send: SendMessage) -> None:
        self.options = options
        self._send = send
        self._address: tuple[str, int] | None = None
        self._flex_event: RecordDebugEvent | None = None
        self._is_enabled = options.is_requested
        self._trace: Path | None = None
        self._terminal: Terminal | None = None
        if options.port is not None:
            from flexinspect_hooks.debugger.debugpy_server import listen

            self._address = listen(options)
        elif options.pdb and options.tty is not None:
            from flexinspect_hooks.debugger import pdb_terminal

            self._terminal = pdb_terminal.use_terminal(
                options.tty, lambda wanted: send(protocol.TERMINAL, wanted=wanted)
            )

    def begin(self, trace: Path, event: RecordDebugEvent) -> None:
        """Report where debugpy listens, and wait for a client if requested."""
        self._trace = trace
        self._import_hooks = PostImportHooks(
            {"pydevd": self._on_pydevd},
            on_import_begin=lambda name: None,
            on_error=lambda name, error: event("debugger", f"could not be set up: {error!r}"),
        )
        self._import_hooks.install()
        if self.options.pdb:
            from flexinspect_hooks.debugger.stops import announce_stops

            announce_stops(trace)
        if self._address is not None:
            self._report(listening_message(*self._address, waiting=self.options.wait), event)
            if self.options.wait:
                from flexinspect_hooks.debugger.debugpy_server import wait_for_client

                event("phase", f"waiting for a debugger on {format_address(*self._address)}")
                wait_for_client()
                event("debugger", "a client has attached")

    def _on_pydevd(self) -> None:
        """Prepare for debugpy, which something has loaded in this process."""
        from flexinspect_hooks.debugger import pydevd_plugin, stops
        from flexinspect_hooks.debugger.debugpy_server import stop_tracing_on_detach

        pydevd_plugin.register()
        stop_tracing_on_detach()
        stops.announce_pydevd_stops()
        if self._trace is not None:
            stops.announce_stops(self._trace)
        self._is_enabled = True
        if self._flex_event is not None:
            self.on_flex_attention(self._flex_event)

    def on_flex_attention(self, event: RecordDebugEvent, *, compiled: bool = False) -> None:
        """Run the mask_mods and score_mods of FlexAttention, now loaded, as Python where possible.

        Reports where that is not possible. `compiled`: FlexAttention is known to be compiled;
        otherwise the first compiled call reports it.
        """
        self._flex_event = event
        if not self._is_enabled:
            return
        python_mods.run_mods_as_python(lambda text: self._report(text, event))
        if compiled:
            python_mods.on_compiled_call()

    def _report(self, text: str, event: RecordDebugEvent) -> None:
        """Send a message about the debugger, and record it in the trace."""
        self._send(protocol.DEBUGGER, text=text)
        event("debugger", text)

    def stop_between_steps(self, reason: str, facts: Mapping[str, Any]) -> bool:
        """Stop between two forwards, in the user's loop. Returns False without a debugger."""
        if not self._is_enabled:
            return False
        from flexinspect_hooks.debugger.pdb_terminal import stop_in

        return stop_in(sys._getframe(1), reason, facts)

    def on_terminal_granted(self) -> None:
        """Handle the grant of the terminal to pdb."""
        if self._terminal is not None:
            self._terminal.granted.set()

    def post_mortem(self, error: BaseException) -> None:
        """Open pdb at the exception that ended the run, if pdb was requested."""
        if self._terminal is not None:
            self._terminal.pdb().post_mortem(error)

    def end(self) -> None:
        """Remove all hooks before the trace is closed."""
        self._import_hooks.remove()
        python_mods.stop_running_mods()
        if self._is_enabled:
            from flexinspect_hooks.debugger.stops import end_announcements

            end_announcements()
