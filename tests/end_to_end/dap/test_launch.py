"""An editor launches a run as `launch.json` says, and its capture process is debugged."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from support.adapters import adapter, connected
from support.dap import DapClient
from support.debugged import (
    PROGRAM,
    WATCHER,
    breakpoints,
    configuration,
    line_of,
)

from flexinspect.trace.reader import open_trace

MASK_MOD = "# in the mask_mod"


def test_a_launched_run_is_debugged_in_its_capture_process(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, "utf-8")
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "watcher.py").write_text(WATCHER, "utf-8")
    launch = configuration("run this file", cwd=str(tmp_path))
    launch["args"] = [word.replace("${file}", str(program)) for word in launch["args"]]
    started: list[subprocess.Popen[str]] = []

    def in_terminal(request: dict[str, Any]) -> dict[str, Any]:
        """Run what the editor's terminal would run; without one, there is no interface."""
        given = request["arguments"]
        out, err = (tmp_path / "out").open("w"), (tmp_path / "err").open("w")
        started.append(subprocess.Popen(given["args"], cwd=given["cwd"], stdout=out, stderr=err))
        return {}

    with adapter() as port, connected(port) as viewer:
        viewer.on_request = in_terminal
        viewer.begin(launch, {})
        attach = viewer.event("debugpyAttach", timeout=60)
        with DapClient(attach["connect"]["host"], attach["connect"]["port"]) as client:
            client.begin(attach, breakpoints(program, MASK_MOD))
            thread, stack = client.stopped()
            assert (stack[0]["name"], stack[0]["line"]) == ("mask_mod", line_of(MASK_MOD))
            # Outside of the program's own frames there are none: ours are hidden.
            assert [frame["name"] for frame in stack][-2:] == ["main", "<module>"]
            assert "under vmap" in client.variables(stack[0])["q_idx"]["value"]
            client.request("setBreakpoints", source={"path": str(program)}, breakpoints=[])
            client.request("continue", threadId=thread)
            client.event("terminated", timeout=60)
        viewer.event("terminated", timeout=60)
    started[0].wait(60)
    assert (tmp_path / "out").read_text("utf-8").startswith("[3, 1, 4, 1, 5, 9, 2, 6, ")
    (trace,) = tmp_path.glob("*.flextrace")
    with open_trace(trace) as reader:
        assert reader.run()["state"] == "finished"
