"""The debugger of one captured run: from its first word to its last.

Most runs have none, and load nothing for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from flexinspect import protocol
from flexinspect.debugger import DebuggerOptions, listening_sentence
from flexinspect_hooks.arrivals import Arrivals
from flexinspect_hooks.debugging import rules

Event = Callable[[str, str], None]
"""Records an event of a kind and a text."""


class Say(Protocol):
    """Sends a line to whoever started the process."""

    def __call__(self, kind: str, **facts: Any) -> None:
        """Send it."""


class Debugging:
    """What was asked for, begun before there is a trace so that a taken port leaves none.

    A debugger that comes by itself, because VSCode launched the whole run under it or attached to
    the process, counts as asked for from then on.

    Raises `UsageError` when debugpy cannot listen.
    """

    def __init__(self, options: DebuggerOptions, say: Say) -> None:
        self.options = options
        self._say = say
        self._address: tuple[str, int] | None = None
        self._flex_event: Event | None = None
        self._is_on = options.is_asked_for
        self._trace: Path | None = None
        if options.port is not None:
            from flexinspect_hooks.debugging.listening import listen

            self._address = listen(options)
        elif options.pdb and options.tty is not None:
            from flexinspect_hooks.debugging import terminal

            terminal.use(options.tty, lambda wanted: say(protocol.TERMINAL, wanted=wanted))

    def begin(self, trace: Path, event: Event) -> None:
        """The trace is open: say where debugpy listens, and wait for a client if that was asked."""
        self._trace = trace
        self._arrivals = Arrivals(
            {"pydevd": self._on_pydevd},
            coming=lambda name: None,
            failed=lambda name, error: event("debugger", f"not prepared for it: {error!r}"),
        )
        self._arrivals.install()
        if self.options.pdb:
            from flexinspect_hooks.debugging.holding import tell_of_stops

            tell_of_stops(trace)
        if self._address is not None:
            self._listening(*self._address, event)

    def _listening(self, host: str, port: int, event: Event) -> None:
        waiting = self.options.wait
        self._tell(listening_sentence(host, port, waiting=waiting), event)
        if waiting:
            event("phase", f"waiting for a debugger on {host}:{port}")
            from flexinspect_hooks.debugging.listening import wait_for_client

            wait_for_client()
            event("debugger", "a client has attached")

    def _on_pydevd(self) -> None:
        """debugpy is loaded in this process, whoever asked for it."""
        from flexinspect_hooks.debugging import holding, pydevd_plugin
        from flexinspect_hooks.debugging.tracing import trace_no_more_without_client

        pydevd_plugin.register()
        trace_no_more_without_client()
        holding.watch_pydevd()
        if self._trace is not None:
            holding.tell_of_stops(self._trace)
        self._is_on = True
        if self._flex_event is not None:
            self.on_flex(self._flex_event)

    def on_flex(self, event: Event, *, compiled: bool = False) -> None:
        """FlexAttention is loaded: let its rules run as Python, and tell where they cannot.

        `compiled` says that it is known to be compiled; else the first call that is tells.
        """
        self._flex_event = event
        if not self._is_on:
            return
        rules.run_rules(lambda text: self._tell(text, event))
        if compiled:
            rules.saw_compiled()

    def _tell(self, text: str, event: Event) -> None:
        """Tell of a breakpoint that cannot be hit, while somebody waits for it."""
        self._say(protocol.DEBUGGER, text=text)
        event("debugger", text)

    def stop_between(self, reason: str, facts: Mapping[str, Any]) -> bool:
        """Stop between two forwards, in the user's loop; False when no debugger could."""
        if not self._is_on:
            return False
        from flexinspect_hooks.debugging.stopping import stop_in

        return stop_in(sys._getframe(1), reason, facts)

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
        self._arrivals.remove()
        rules.run_rules_no_more()
        if self._is_on:
            from flexinspect_hooks.debugging.holding import tell_no_more

            tell_no_more()
