"""The prompt of `flexinspect run --interactive`, which reads commands wherever the model pauses."""

from __future__ import annotations

import argparse
import os
import select
import shlex
import sys
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Final

from flexinspect.cli.ctl import add_verbs, response_lines
from flexinspect.control.client import ControlClient, wait_for_effect
from flexinspect.control.discovery import find_capture
from flexinspect.control.messages import CommandResponse, StatusResponse
from flexinspect.core.errors import ControlError, FlexInspectError, UsageError
from flexinspect.core.text import escape_unprintable

if TYPE_CHECKING:
    from rich.console import Console

PROMPT: Final = "(flexinspect) "
_ALIASES = dict.fromkeys(("n", "s", "next"), "step")
_ALIASES |= dict.fromkeys(("q", "quit", "exit"), "stop") | dict.fromkeys(("h", "?"), "help")
_ALIASES |= {"c": "continue", "until": "run-to", "b": "break"}
_HELP: Final = """\
  Enter, n, s     run one step; "step 3" runs three
  c               continue to the end, or to the next breakpoint
  run-to N        run until step N has finished
  q               end the run; its trace is valid
  status          where the model is
  level, layers   record more or less from the next step on
  break           "break add 'entropy > 3'", "break list", "break remove 1"
  restore, fork, edit   rebuild a step, or continue from it with another token or mask
  NAME --help     the arguments of a command"""

_WAITING: Final = ("paused", "holding")
_POLL_S = 0.1
_STATUS_TIMEOUT_S = 0.5
"""A process that a debugger has stopped does not respond."""

_Line = str | None
"""A line of input; None at its end."""


class StepPrompt:
    """Reads commands from standard input while the model of a process is paused.

    At the end of the input the run ends, or with `waits` stays paused for `flexinspect ctl`.
    """

    def __init__(self, pid: int, console: Console, *, waits: bool = False) -> None:
        self._pid, self._console, self._waits = pid, console, waits
        self._client: ControlClient | None = None
        self._parser = argparse.ArgumentParser("", add_help=False)
        add_verbs(self._parser)
        self._unread, self._is_closed, self._has_helped = b"", False, False

    def paused_status(self) -> StatusResponse | None:
        """Return the status of a model that waits for a command, None of any other."""
        if self._is_closed:
            return None
        try:
            if self._client is None:
                address = find_capture(self._pid).address
                self._client = ControlClient(address, timeout_s=_STATUS_TIMEOUT_S)
            status = self._client.status()
        except (ControlError, UsageError):  # it starts, it ends, or a debugger has stopped it
            return None
        return status if status.state in _WAITING else None

    def read_commands(self, status: StatusResponse) -> None:
        """Read and send commands until the model of `status` continues or ends."""
        reason = f" ({status.reason})" if status.reason else ""
        self._print(f"{status.description}{reason}")
        if not self._has_helped:
            self._has_helped = True
            self._print("Enter runs one step, c continues, q ends the run, h lists the commands.")
        while self.paused_status() is not None:
            self._console.print(PROMPT, end="")
            try:
                line = self._read_line()
            except InterruptedError:
                self._print("\nAnother client has continued the run.")
                return
            if line is None:
                self._end_input()
                return
            if self._execute(line):
                return  # it may have paused again by now, after a step that is to be printed

    def _print(self, text: str) -> None:
        for line in text.splitlines():
            self._console.print(escape_unprintable(line), soft_wrap=True)

    def _read_line(self) -> _Line:
        """Return the next line. Raises `InterruptedError` when the model is not paused any more.

        Reads the file descriptor: a buffered read could not be left when the run goes on.
        """
        while b"\n" not in self._unread:
            if select.select([sys.stdin], [], [], _POLL_S)[0]:
                if not (piece := os.read(sys.stdin.fileno(), 4096)):
                    line, self._unread = self._unread, b""
                    return line.decode(errors="replace") if line else None
                self._unread += piece
            elif self.paused_status() is None:
                raise InterruptedError
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode(errors="replace")

    def _end_input(self) -> None:
        self._is_closed = True
        if self._waits:
            command = f"flexinspect ctl step --pid {self._pid}"
            self._print(f"\nThe input has ended; the run waits for commands: {command}")
        elif self._client is not None:
            self._print("\nThe input has ended, and the run with it.")
            self._client.stop()

    def _execute(self, line: str) -> bool:
        """Execute a command and print its response; return whether the model went on."""
        assert self._client is not None
        went_on = False
        try:
            words = shlex.split(line) or ["step"]
            words[0] = _ALIASES.get(words[0], words[0])
            if words == ["help"]:
                self._print(_HELP)
                return False
            with redirect_stdout(sys.stderr):  # stdout has the result of the run
                args = self._parser.parse_args(words)
            response = args.do(self._client, args)
            if isinstance(response, CommandResponse):
                is_rewind = response.rewind_number is not None
                went_on = is_rewind or response.status.state not in _WAITING
                if is_rewind:
                    response = wait_for_effect(self._client, response) or response
        except ValueError as error:  # an open quotation
            self._print(f"{error}.")
        except FlexInspectError as error:
            self._print(error.sentence())
        except SystemExit:
            pass  # argparse has printed the help or an error
        else:
            for text in response_lines(response) if args.verb != "step" else ():
                self._print(text)
        return went_on
