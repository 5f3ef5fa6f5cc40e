"""A program that waits for a client stops in the very first line that it runs afterwards."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.dap import DapClient
from support.debugged import configuration

PROGRAM = """\
import debugpy
from flexinspect.records.job import DebuggerOptions
from flexinspect_hooks.debugger.debugpy_server import listen

print(listen(DebuggerOptions("127.0.0.1", 0, wait=True))[1], flush=True)
debugpy.wait_for_client()
first = "the first line"
print(first)
"""

FIRST = PROGRAM.splitlines().index('first = "the first line"') + 1


def test_the_first_line_after_the_wait_is_traced(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, "utf-8")
    command = (sys.executable, "-Xfrozen_modules=off", str(program))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        where = {"host": "127.0.0.1", "port": int(process.stdout.readline())}
        with DapClient(**where) as client:
            client.begin(configuration("attach to a run", connect=where), {program: [FIRST]})
            thread, stack = client.stopped()
            assert (stack[0]["name"], stack[0]["line"]) == ("<module>", FIRST)
            client.request("continue", threadId=thread)
            assert process.stdout.readline() == "the first line\n"
            client.leave()
    assert process.returncode == 0
