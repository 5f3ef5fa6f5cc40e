"""An editor attaches to a running program: it stops where it should, and the run survives it all.

One program serves all tests of this file, in their order; it runs until the last one ends it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.dap import DapClient, DapError
from support.debugged import Debugged, breakpoints, eventually, line_of, plain_output

from flexinspect.trace.file.side_files import read_stop
from flexinspect.trace.reader import open_trace

FORWARD, MASK_MOD = "# in the patched forward", "# in the mask_mod"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Debugged]:
    with Debugged(tmp_path_factory.mktemp("dap")) as debugged:
        eventually(debugged.count)  # every client comes late: the model runs
        yield debugged


@pytest.fixture
def client(run: Debugged) -> Iterator[DapClient]:
    with DapClient("127.0.0.1", run.port()) as one:
        yield one
        one.leave()
    run.goes_on()  # even if the test failed


def test_nothing_is_traced_before_a_client_comes(run: Debugged) -> None:
    assert not run.is_traced()


def test_a_breakpoint_in_the_patched_forward_is_hit(run: Debugged, client: DapClient) -> None:
    assert client.begin(run.attach(), breakpoints(run.program, FORWARD)) == [True]
    thread, stack = client.stopped()
    assert (stack[0]["name"], stack[0]["line"]) == ("attend", line_of(FORWARD))
    assert Path(stack[0]["source"]["path"]) == run.program
    seen = client.variables(stack[0])
    assert seen["q"]["value"].startswith("1×4×12×8 float32 cpu  min ")
    assert "mask_mod __main__.mask_mod" in seen["block_mask"]["value"]
    assert seen["self"]["value"].startswith("LlamaAttention of layer ")
    children = {
        each["name"]: each["value"]
        for each in client.children(seen["block_mask"]["variablesReference"])
    }
    assert children["mask_mod cells 01"] == "'██··········'"
    assert children["blocks 00"] == "'▒'"
    assert client.evaluate("tuple(hidden_states.shape)", stack[0]) == "(1, 12, 32)"

    client.request("setBreakpoints", source={"path": str(run.program)}, breakpoints=[])
    client.request("next", threadId=thread)
    _, stepped = client.stopped()
    assert (stepped[0]["name"], stepped[0]["line"]) == ("attend", line_of(FORWARD) + 1)
    assert "10000000 float32 cpu" in client.variables(stepped[0])["big"]["value"]
    client.request("continue", threadId=thread)
    run.goes_on()


def test_a_breakpoint_in_the_mask_mod_of_an_uncompiled_mask_is_hit(
    run: Debugged, client: DapClient
) -> None:
    client.begin(run.attach(), breakpoints(run.program, MASK_MOD))
    callers: set[str] = set()
    for _ in range(4):  # once while the mask is made, then in each layer's flex_attention
        thread, stack = client.stopped()
        assert (stack[0]["name"], stack[0]["line"]) == ("mask_mod", line_of(MASK_MOD))
        callers |= {frame["name"] for frame in stack} & {"create_block_mask", "flex_attention"}
        row = client.variables(stack[0])["q_idx"]["value"]
        assert "0-dim int64 cpu, one of 12 under vmap" in row
        client.request("continue", threadId=thread)
    assert callers == {"create_block_mask", "flex_attention"}


def cpu_s(run: Debugged) -> float:
    """The seconds of CPU of the program so far: a busy machine does not change them much."""
    spent = psutil.Process(run.process.pid).cpu_times()
    return spent.user + spent.system


def test_a_large_tensor_is_shown_in_a_second_of_cpu_and_ten_kilobytes(
    run: Debugged, client: DapClient
) -> None:
    client.begin(run.attach(), {run.program: [line_of(FORWARD) + 1]})
    thread, stack = client.stopped()
    started = cpu_s(run)
    seen = client.variables(stack[0])
    assert cpu_s(run) - started < 1.0
    assert client.n_bytes["variables"] < 10_000
    assert "10000000 float32 cpu" in seen["big"]["value"]
    started = cpu_s(run)
    children = client.children(seen["big"]["variablesReference"])
    assert cpu_s(run) - started < 1.0
    assert client.n_bytes["variables"] < 10_000
    assert [each["value"] for each in children if each["name"] == "[19]"] == [
        "0-dim float32 cpu  0.0"
    ]
    client.request("setBreakpoints", source={"path": str(run.program)}, breakpoints=[])
    client.request("continue", threadId=thread)


def test_viewers_receive_the_place_where_the_debugger_holds_the_run(
    run: Debugged, client: DapClient
) -> None:
    assert read_stop(run.trace) is None
    client.begin(run.attach(), breakpoints(run.program, FORWARD))
    thread, _ = client.stopped()
    held = eventually(lambda: read_stop(run.trace))
    assert (held.debugger, held.function, held.line) == ("debugpy", "attend", line_of(FORWARD))
    assert held.sentence().startswith(f"held by debugpy in attend (program.py:{held.line}) for ")
    client.request("setBreakpoints", source={"path": str(run.program)}, breakpoints=[])
    client.request("continue", threadId=thread)
    eventually(lambda: read_stop(run.trace) is None)


def test_a_model_event_stops_in_the_users_frame_and_says_why(
    run: Debugged, client: DapClient
) -> None:
    client.begin(run.attach(), {})
    (run.folder / "event").touch()
    thread, stack = client.stopped()
    assert stack[0]["name"] == "attend"
    assert Path(stack[0]["source"]["path"]) == run.program
    assert "o_proj" in run.program.read_text("utf-8").splitlines()[stack[0]["line"] - 1]
    assert "entropy > 3" in client.variables(stack[0])["flexinspect"]["value"]
    expression = "(flexinspect.step, flexinspect.layer, flexinspect.facts['module'])"
    assert client.evaluate(expression, stack[0]) == "(7, 1, 'o_proj')"
    held = eventually(lambda: read_stop(run.trace))
    assert (held.reason, held.function) == ("entropy > 3", "attend")

    client.request("next", threadId=thread)
    _, stepped = client.stopped()
    assert "flexinspect" not in client.variables(stepped[0])
    client.request("continue", threadId=thread)
    assert eventually((run.folder / "answer").read_text) == "True"


def test_a_second_client_next_to_the_first_changes_nothing(
    run: Debugged, client: DapClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.begin(run.attach(), {})
    with DapClient("127.0.0.1", run.port()) as second:
        monkeypatch.setattr("support.dap.TIMEOUT_S", 6.0)
        with pytest.raises(DapError) as refusal:
            second.begin(run.attach(), {})
    assert "debugpyWaitingForServer" in str(refusal.value)  # it waits for its turn
    run.goes_on()
    assert client.request("threads")["threads"]


def test_a_client_that_is_killed_at_a_stop_lets_the_run_continue(run: Debugged) -> None:
    with DapClient("127.0.0.1", run.port()) as client:
        client.begin(run.attach(), breakpoints(run.program, FORWARD))
        client.stopped()
    assert run.goes_on()
    assert read_stop(run.trace) is None


def test_without_a_client_a_model_event_does_not_stop(run: Debugged) -> None:
    (run.folder / "answer").unlink()
    (run.folder / "event").touch()
    eventually(lambda: (run.folder / "answer").exists())
    assert eventually((run.folder / "answer").read_text) == "False"
    assert not run.is_traced()


def test_in_the_end_the_trace_is_whole_and_the_output_that_of_a_plain_run(run: Debugged) -> None:
    output, code = run.finish()
    assert (output, code) == (plain_output(run.program), 0)
    with open_trace(run.trace) as reader:
        facts = reader.run()
        events = [row.event for row in reader.events()]
    assert facts["state"] == "finished"
    assert json.dumps(facts["exit_code"]) == "0"
    assert [each.text for each in events if each.kind == "debugger"] == [
        f"debugpy listens on 127.0.0.1:{run.port()}"
    ]
    bad = ("error", "hook-disabled", "step-not-recorded")
    assert not [each.text for each in events if each.kind in bad]
    assert not list(run.folder.glob("*-debugger-stop*"))
