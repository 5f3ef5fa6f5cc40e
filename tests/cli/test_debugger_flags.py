"""The flags that let a debugger attach to a run: what is refused, and what is reported."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from support.dap import DapClient
from support.debugged import Debugged, configuration, eventually

from flexinspect.cli.main import main
from flexinspect.core.addresses import is_loopback, parse_address
from flexinspect.records.job import DebuggerOptions, Job, ScriptJob
from flexinspect.trace.reader import open_trace

Said = pytest.CaptureFixture[str]


def refused(args: list[str], capsys: Said) -> str:
    assert main(["run", "--no-ui", *args]) == 2
    first, _, rest = capsys.readouterr().err.partition("\n")
    assert "Traceback" not in rest
    return first


@pytest.mark.parametrize("args", [["--model", "demo"], ["program.py"]])
def test_a_port_in_use_is_an_error_message_and_starts_nothing(
    args: list[str], capsys: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("program.py").write_text("print('ran')", "utf-8")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = refused(["--debugpy", str(port), *args], capsys)
    assert message == (
        f"flexinspect: --debugpy cannot listen on 127.0.0.1:{port}: Address already in use."
    )
    assert not list(tmp_path.glob("*.flextrace*"))


def test_another_address_needs_to_be_insisted_on(capsys: Said) -> None:
    message = refused(["--debugpy", "0.0.0.0:0"], capsys)
    assert "would let other machines attach" in message


def test_a_wait_needs_a_port_and_pdb_a_terminal_of_its_own(capsys: Said) -> None:
    assert "--debugpy is not given" in refused(["--wait-for-client"], capsys)
    assert "exclude each other" in refused(["--pdb", "--debugpy", "0"], capsys)
    assert "--pdb needs a terminal" in refused(["--pdb"], capsys)


def test_a_run_that_stops_at_each_step_needs_someone_to_continue_it(
    capsys: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("program.py").write_text("print('ran')", "utf-8")
    message = refused(["--interactive", "program.py"], capsys)
    assert "the standard input belongs to the program" in message
    assert "--no-control accepts none" in refused(["--interactive", "--no-control"], capsys)


@pytest.mark.parametrize("text", ["", "host:", "70000", "5678x", "127.0.0.1"])
def test_an_address_that_is_none_is_refused_with_the_usage(text: str, capsys: Said) -> None:
    with pytest.raises(SystemExit) as end:
        main(["run", "--debugpy", text])
    assert end.value.code == 2
    assert "is not [HOST:]PORT" in capsys.readouterr().err


def test_addresses_are_read_as_they_are_written_elsewhere() -> None:
    assert parse_address("5678") == ("127.0.0.1", 5678)
    assert parse_address("localhost:0") == ("localhost", 0)
    assert parse_address("[::1]:80") == ("::1", 80)
    assert [is_loopback(host) for host in ("localhost", "::1", "127.9.9.9")] == [True] * 3
    assert not is_loopback("192.0.2.1")


def test_a_job_takes_its_debugger_along() -> None:
    options = DebuggerOptions("localhost", 5678, wait=True)
    assert Job.from_json(Job(out="t", debugger=options).to_json()).debugger == options
    script = ScriptJob(out="t", program="p", debugger=options)
    assert ScriptJob.from_json(script.to_json()).debugger == options


def test_our_own_generation_waits_for_a_client_and_stops_in_a_user_mask_mod(
    tmp_path: Path,
) -> None:
    rules = tmp_path / "my_rules.py"
    rules.write_text("def window(b, h, q_idx, kv_idx):\n    return q_idx >= kv_idx\n", "utf-8")
    args = ("--mask", "my_rules:window", "--prompt", "One?", "--max-new-tokens", "2")
    args += ("--break", "step == 0", "--break", "entropy > -1 and step == 0")
    flags = ("--debugpy", "0", "--wait-for-client")
    with Debugged(tmp_path, *args, flags=flags, fresh=True) as run:
        port = run.port()
        assert "nothing runs before a client has attached" in run.stderr_text()
        eventually(lambda: f"waiting for a debugger on 127.0.0.1:{port}" in run.stderr_text())
        assert "importing torch" not in run.stderr_text()
        where = {"host": "127.0.0.1", "port": port}
        with DapClient(**where) as client:
            client.begin(configuration("attach to a run", connect=where), {rules: [2]})
            thread, stack = client.stopped()
            assert (stack[0]["name"], stack[0]["line"]) == ("window", 2)
            client.request("setBreakpoints", source={"path": str(rules)}, breakpoints=[])
            for reason in ("step == 0", "entropy > -1 and step == 0"):
                client.request("continue", threadId=thread)
                thread, stack = client.stopped()
                # Before a forward there is no frame of the user's, nor of a layer.
                assert Path(stack[0]["source"]["path"]).name in ("decoding.py", "ensemble_run.py")
                reason_text = client.evaluate("(flexinspect.step, flexinspect.reason)", stack[0])
                assert reason_text.startswith("(0, ")
                assert f", {reason}: step 0 (prefill)" in reason_text
            client.request("disconnect", terminateDebuggee=False)
        _, code = run.finish()
        assert code == 0
        assert "held by debugpy in window (my_rules.py:2) for 0 s" in run.stderr_text()
    with open_trace(run.trace) as reader:
        texts = [row.event.text for row in reader.events() if row.event.kind == "debugger"]
        assert reader.run()["state"] == "finished"
    assert texts[-1] == "a client has attached"
