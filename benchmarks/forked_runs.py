"""Runs programs as `flexinspect run` does, in children of a process that has imported torch."""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable

from flexinspect.records import protocol
from flexinspect.records.job import ScriptJob


def fork_capture(job: ScriptJob, *, errors: int | None = None) -> int:
    """Start a child that runs a program under capture; return its process number.

    What it prints is dropped; with `errors`, a descriptor, its stderr goes there.
    """
    return _fork(lambda: _capture(job), errors)


def fork_plainly(job: ScriptJob, *, errors: int | None = None) -> int:
    """Start a child that runs the same program alone; it exits with 1 if the program raises."""
    return _fork(lambda: _run(job), errors)


def wait(child: int, seconds: float) -> int | None:
    """Wait for a child and return its exit code; end one that hangs, and return None."""
    deadline = time.monotonic() + seconds
    while True:
        process, status = os.waitpid(child, os.WNOHANG)
        if process:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(0.02)


def _fork(work: Callable[[], None], errors: int | None) -> int:
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 0
    try:
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        if "DEBUG" not in os.environ:
            os.dup2(silent if errors is None else errors, 2)
        work()
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    finally:
        atexit._run_exitfuncs()
        os._exit(code)


def _run(job: ScriptJob) -> None:
    sys.argv = [job.program, *job.args]
    runpy.run_path(job.program, run_name="__main__")


def _capture(job: ScriptJob) -> None:
    parent, end = socket.socketpair()
    parent.sendall((job.to_json() + "\n").encode())
    threading.Thread(target=_answer, args=(parent,), daemon=True).start()
    from flexinspect_hooks.user_code.script.script_run import main

    main(end.detach())


def _answer(parent: socket.socket) -> None:
    """Confirm that printed output was read, as the process that starts a run does."""
    with parent.makefile("r", encoding="utf-8") as lines:
        for line in lines:
            facts = protocol.parse_message(line)
            if facts is not None and facts["kind"] == protocol.DRAIN:
                parent.sendall((protocol.format_message(protocol.DRAINED) + "\n").encode())
