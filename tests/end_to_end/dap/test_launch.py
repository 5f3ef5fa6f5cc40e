"""An editor launches a run as `launch.json` says, and its capture process is debugged.

In compiled FlexAttention no mask_mod is stopped in, and the run says so. Both are checked in one
process, because importing torch under a debugger takes most of the time.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from support.adapters import adapter
from support.dap import DapClient
from support.debugged import (
    PROGRAM,
    WATCHER,
    breakpoints,
    configuration,
    eventually,
    line_of,
)

from flexinspect.trace.reader import open_trace
from flexinspect_hooks.debugger.python_mods import COMPILED

MASK_MOD = "# in the mask_mod"
WITH_COMPILED = f"""{PROGRAM}

def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx  # in the compiled mask_mod


compiled = torch.compile(flex_attention, backend="eager")  # without a C++ compiler's minute
q, k, v = (torch.randn(1, 2, 5, 4) for _ in range(3))
with torch.no_grad():
    mask = create_block_mask(causal, None, None, 5, 5, device="cpu")
    out = compiled(q, k, v, block_mask=mask)  # the compiled call
print(out.shape)  # after the call
"""


def set_breakpoints(client: DapClient, program: Path, *texts: str) -> None:
    """Replace the breakpoints of the program by those on the lines that hold these texts."""
    lines = [{"line": line_of(text, WITH_COMPILED)} for text in texts]
    client.request("setBreakpoints", source={"path": str(program)}, breakpoints=lines)


def test_a_launched_run_is_debugged_in_its_capture_process(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(WITH_COMPILED, "utf-8")
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

    with adapter() as port, DapClient("127.0.0.1", port) as viewer:
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
            set_breakpoints(client, program, "# the compiled call")
            client.request("continue", threadId=thread)
            thread, _ = client.stopped()
            assert COMPILED not in (tmp_path / "err").read_text("utf-8")
            set_breakpoints(client, program, "# in the compiled mask_mod", "# after the call")
            client.request("continue", threadId=thread)
            thread, stack = client.stopped()
            assert stack[0]["line"] == line_of("# after the call", WITH_COMPILED)
            for text in (COMPILED, "held by debugpy in <module> (program.py"):
                eventually(lambda text=text: text in (tmp_path / "err").read_text("utf-8"))
            client.request("continue", threadId=thread)
            client.event("terminated", timeout=60)
        viewer.event("terminated", timeout=60)
    started[0].wait(60)
    assert (tmp_path / "out").read_text("utf-8").startswith("[3, 1, 4, 1, 5, 9, 2, 6, ")
    (trace,) = tmp_path.glob("*.flextrace")
    with open_trace(trace) as reader:
        assert reader.run()["state"] == "finished"
        told = [row.event.text for row in reader.events() if row.event.kind == "debugger"]
    assert told.count(COMPILED) == 1
