"""`--break` with a debugger attached: the model's event stops in the user's own frame."""

from __future__ import annotations

from pathlib import Path

from support.dap import DapClient
from support.debugged import Debugged, configuration

from flexinspect.trace.reader import open_trace

FLAGS = ("--debugpy", "0", "--wait-for-client")
LAYER, CHOICE = "layer == 1 and path == 'flex uncompiled' [once]", "entropy > 0 [hits=2 once]"


def test_events_stop_inside_the_forward_or_before_the_next_one(tmp_path: Path) -> None:
    args = ("--break", LAYER, "--break", CHOICE)
    with Debugged(tmp_path, flags=(*FLAGS, *args)) as run:
        with DapClient("127.0.0.1", run.port()) as client:
            where = {"host": "127.0.0.1", "port": run.port()}
            client.begin(configuration("attach to a run", connect=where), {})
            thread, stack = client.stopped()
            assert stack[0]["name"] == "attend"
            assert Path(stack[0]["source"]["path"]) == run.program
            assert "flex_attention(q" in run.program.read_text().splitlines()[stack[0]["line"] - 1]
            why = client.variables(stack[0])["flexinspect"]["value"]
            assert "Breakpoint 1, layer == 1 and path == " in why
            assert client.evaluate("(flexinspect.step, flexinspect.layer)", stack[0]) == "(0, 1)"
            client.request("continue", threadId=thread)

            thread, stack = client.stopped()
            assert stack[0]["name"] == "step"
            assert "return model(" in run.program.read_text().splitlines()[stack[0]["line"] - 1]
            assert "entropy > 0" in client.variables(stack[0])["flexinspect"]["value"]
            client.request("continue", threadId=thread)
            run.goes_on()
            client.request("disconnect", terminateDebuggee=False)
        _, code = run.finish()
        assert code == 0
    with open_trace(tmp_path / "t.flextrace") as reader:
        events = [row.event for row in reader.events() if row.event.kind == "breakpoint"]
    assert [event.data["breakpoint"] for event in events] == [1, 2]
