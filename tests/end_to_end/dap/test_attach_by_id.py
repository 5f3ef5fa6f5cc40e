"""An editor attaches by process id to a run that has no debugger, attaches again, and detaches."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from support.adapters import adapter
from support.dap import DapClient, DapError
from support.debugged import Debugged, breakpoints, configuration, eventually, line_of

from flexinspect.launch.vscode_config import GDB_SYMBOL_FILTER, attach_problems
from flexinspect.trace.file.side_files import read_stop
from flexinspect.trace.reader import open_trace

FORWARD, MASK_MOD = "# in the patched forward", "# in the mask_mod"


@pytest.mark.skipif(bool(attach_problems()), reason=" ".join(attach_problems()))
def test_a_run_without_a_debugger_is_attached_to_twice_and_continues_untraced(
    tmp_path: Path,
) -> None:
    # gdb calls functions in the process wherever it stopped it. If a lock is held there that they
    # need, the call never returns: https://sourceware.org/gdb/current/onlinedocs/gdb.html/Calling.html
    for timeout_s in (30, 40, 100):
        folder = tmp_path / str(timeout_s)
        folder.mkdir()
        try:
            trace = _attach_twice(folder, timeout_s=timeout_s)
        except DapError as error:
            failure = error
        else:
            break
    else:
        raise failure
    with open_trace(trace) as reader:
        assert reader.run()["state"] == "finished"


def _attach_twice(folder: Path, *, timeout_s: int) -> Path:
    """Attach to a run at two places, one after the other, and return its trace."""
    env = dict([GDB_SYMBOL_FILTER]) | {"DEBUGPY_PROCESS_SPAWN_TIMEOUT": str(timeout_s)}
    with Debugged(folder, flags=()) as run:
        eventually(run.count)
        (capture,) = [
            process
            for process in psutil.process_iter(["cwd"])
            if process.info["cwd"] == str(folder) and process.pid != run.process.pid
        ]
        by_id = configuration("attach by process id", processId=capture.pid)
        for place, name in ((MASK_MOD, "mask_mod"), (FORWARD, "attend")):
            with adapter(env) as port, DapClient("127.0.0.1", port) as client:
                assert client.begin(by_id, breakpoints(run.program, place)) == [True]
                thread, stack = client.stopped()
                assert (stack[0]["name"], stack[0]["line"]) == (name, line_of(place))
                seen = client.variables(stack[0])
                if name == "mask_mod":
                    assert "one of 12 under vmap" in seen["q_idx"]["value"]
                else:
                    assert seen["q"]["value"].startswith("1×4×12×8 float32 cpu  min ")
                held = eventually(lambda: read_stop(run.trace))
                assert (held.debugger, held.function) == ("debugpy", name)
                client.request("setBreakpoints", source={"path": str(run.program)}, breakpoints=[])
                client.request("continue", threadId=thread)
                client.request("disconnect", terminateDebuggee=False)
            eventually(lambda: not run.is_traced())
        _, code = run.finish()
        assert code == 0
    return run.trace
