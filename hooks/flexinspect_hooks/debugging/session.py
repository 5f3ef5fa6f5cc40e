"""The debugger of one captured run: from its first word to its last.

Most runs have none, and load nothing for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from flexinspect import protocol
from flexinspect.debugger import DebuggerOptions, listening_sentence
from flexinspect_hooks.debugging import rules


class Say(Protocol):
    """Sends a line to whoever started the process."""

    def __call__(self, kind: str, **facts: Any) -> None:
        """Send it."""


class Debugging:
    """What was asked for, begun before there is a trace so that a taken port leaves none.

    A debugger that was here before us, because VSCode launched the whole run under it, counts as
    asked for. `say` sends a line to whoever started the process.

    Raises `UsageError` when debugpy cannot listen.
    """

    def __init__(self, options: DebuggerOptions, say: Say) -> None:
        self.options = options
        self._say = say
        self._address: tuple[str, int] | None = None
        is_here = "pydevd" in sys.modules
        self.is_on = is_here or options.is_asked_for
        if is_here:
            from flexinspect_hooks.debugging.listening import show_our_types

            show_our_types()
        elif options.port is not None:
            from flexinspect_hooks.debugging.listening import listen

            self._address = listen(options)
        elif options.pdb and options.tty is not None:
            from flexinspect_hooks.debugging import terminal

            terminal.use(options.tty, lambda wanted: say(protocol.TERMINAL, wanted=wanted))

    def begin(self, trace: Path, event: Callable[[str, str], None]) -> None:
        """The trace is open: say where debugpy listens, and wait for a client if that was asked.

        `event` records an event of a kind and a text.
        """
        if not self.is_on:
            return
        from flexinspect_hooks.debugging.holding import tell_of_stops

        tell_of_stops(trace)
        if self._address is None:
            return
        host, port = self._address
        waiting = self.options.wait
        self._say(protocol.DEBUGGER, host=host, port=port, waiting=waiting)
        event("debugger", listening_sentence(host, port, waiting=waiting))
        if waiting:
            event("phase", f"waiting for a debugger on {host}:{port}")
            from flexinspect_hooks.debugging.listening import wait_for_client

            wait_for_client()
            event("debugger", "a client has attached")

    def on_flex(self, event: Callable[[str, str], None]) -> None:
        """FlexAttention is loaded: let its rules run as Python, and tell where they cannot."""
        if self.is_on:
            rules.run_rules()
            rules.tell_when_compiled(lambda: event("debugger", rules.COMPILED))

    def granted(self) -> None:
        """Whoever has the terminal lets pdb have it."""
        if self.options.pdb:
            from flexinspect_hooks.debugging import terminal

            terminal.granted()

    def post_mortem(self, error: BaseException) -> None:
        """Let the user look at what the run failed with, if pdb was asked for."""
        if self.options.pdb:
            from flexinspect_hooks.debugging import terminal

            terminal.post_mortem(error)

    def end(self) -> None:
        """The trace is about to be closed."""
        if self.is_on:
            from flexinspect_hooks.debugging.holding import tell_no_more

            tell_no_more()
