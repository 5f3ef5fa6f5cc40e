"""`flexinspect ctl` and `flexinspect attach` with real runs in other processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from support.controlled import wait_for
from support.paths import DEMO
from support.patience import PATIENCE_S
from support.warm_python import Popen

from flexinspect.cli.main import main
from flexinspect.control import discovery
from flexinspect.control.client import ControlClient, wait_for_effect
from flexinspect.control.messages import Fork, Restore, State, StepRef
from flexinspect.core.errors import ControlError
from flexinspect.trace.reader import TraceReader
from flexinspect.tui.trace_session import CaptureClient, TraceSession

FLEXINSPECT = [sys.executable, "-m", "flexinspect"]

ENDLESS = f"""
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained({str(DEMO)!r})
model = AutoModelForCausalLM.from_pretrained({str(DEMO)!r}).eval()
inputs = tokenizer("What is the capital of France?", return_tensors="pt")
while True:
    model.generate(**inputs, min_new_tokens=8, max_new_tokens=8, do_sample=False)
"""


class Run:
    """A run in the background."""

    def __init__(self, *args: str, cwd: Path) -> None:
        self.trace = cwd / "run.flextrace"
        self.process = Popen(
            [*FLEXINSPECT, "run", "--no-ui", "--out", str(self.trace), *args],
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def client(self) -> ControlClient:
        """Return its client, as soon as the run is registered."""

        def entries() -> list[discovery.CaptureEntry]:
            assert self.process.poll() is None, self.process.communicate()
            return [entry for entry in discovery.running() if Path(entry.trace) == self.trace]

        deadline = time.monotonic() + PATIENCE_S
        while not entries():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return ControlClient(entries()[0].address)

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, out, err


@pytest.fixture
def held(tmp_path: Path) -> Iterator[tuple[Run, ControlClient]]:
    """A run of the demo that was paused before its first step and is held at its end."""
    # Random weights with --stop eos: the generation does not end early.
    flags = ("--weights", "random", "--stop", "eos", "--max-new-tokens", "12")
    run = Run("--hold", *flags, cwd=tmp_path)
    client = run.client()
    client.pause()
    yield run, client
    with suppress(ControlError):
        client.stop()
    run.process.kill()
    run.process.communicate()


def ctl(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str]:
    """Run `flexinspect ctl` in this process; return its exit code and output."""
    capsys.readouterr()
    code = main(["ctl", *args])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_a_run_can_be_stepped_restored_held_and_released(
    held: tuple[Run, ControlClient], capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = held
    assert "paused before the first step" in ctl(capsys, "--wait", "pause")[1]
    assert ctl(capsys, "step") == (0, "pausing after the next step\n")
    ctl(capsys, "--wait", "pause")
    code, output = ctl(capsys, "--wait", "--json", "run-to", "4")
    status = json.loads(output)
    assert (code, status["state"], status["place"]["step"]) == (0, "paused", 4)
    code, output = ctl(capsys, "run-to", "3")
    assert code == 1
    assert "Step 3 of generation 0 has already finished" in output
    assert ctl(capsys, "break", "add", "step == 5 and entropy > 0")[0] == 0
    ctl(capsys, "continue")
    # The run has no terminal, so the breakpoint pauses it.
    stopped = json.loads(ctl(capsys, "--wait", "--json", "pause")[1])
    assert (stopped["state"], stopped["place"]["step"]) == ("paused", 5)
    assert "step == 5 and entropy > 0" in stopped["reason"]
    status = json.loads(ctl(capsys, "--wait", "--json", "restore", "2")[1])
    assert (status["state"], status["place"]["step"]) == ("paused", 2)
    assert (status["last_rewind"]["kind"], status["last_rewind"]["state"]) == ("restore", "done")
    client = run.client()
    ctl(capsys, "continue")
    wait_for(lambda: client.status().state == "paused", PATIENCE_S)
    again = client.status()  # a step that runs again hits its breakpoint again
    assert (again.place.step, again.reason) == (5, stopped["reason"])
    assert [info.n_hits for info in client.breakpoints()] == [2]
    assert ctl(capsys, "level", "extreme") == (0, "level extreme from the next step on\n")
    assert ctl(capsys, "continue")[0] == 0
    wait_for(lambda: client.status().state == "holding", PATIENCE_S)
    with TraceReader(run.trace) as reader:
        recorded = [step.step for step in reader.steps(0)]
        assert recorded == list(range(len(recorded)))
        assert len(recorded) > 5
    assert ctl(capsys, "step")[0] == 1
    assert ctl(capsys, "continue") == (0, "the run ends\n")
    code, _, err = run.end()
    assert (code, discovery.running()) == (0, []), err
    with TraceReader(run.trace) as reader:
        assert reader.state == "finished"
        levels = [row.event for row in reader.events() if row.event.kind == "level"]
        assert [event.step for event in levels] == [6]


def test_a_run_is_restored_forked_and_edited_over_the_socket(
    held: tuple[Run, ControlClient], capsys: pytest.CaptureFixture[str]
) -> None:
    run, client = held
    ctl(capsys, "--wait", "run-to", "3")
    code, output = ctl(capsys, "restore", "1", "--cost")
    assert (code, output.split(";")[0]) == (0, "cost: the cache is cropped")
    output = ctl(capsys, "--wait", "restore", "1")[1]
    assert "Step 1 of branch 0 was restored, its cache cropped." in output
    assert client.status().place.step == 1
    assert "There is no segment '99'." in ctl(capsys, "edit", "1", "--drop", "99")[1]
    ctl(capsys, "continue")
    wait_for(lambda: client.status().state == "holding", PATIENCE_S)
    ctl(capsys, "--wait", "fork", "2", "--token-id", "300")
    wait_for(lambda: client.status().state == "holding", PATIENCE_S)
    output = ctl(capsys, "--wait", "edit", "2", "--preset", "causal")[1]
    assert "leaves branch 1 at step 2 under an edited mask (preset causal)" in output
    wait_for(lambda: client.status().state == "holding", PATIENCE_S)
    assert client.status().place.branch == 2
    ctl(capsys, "continue")
    code, _, err = run.end()
    assert code == 0, err
    with TraceReader(run.trace) as reader:
        base, fork, edited = reader.branches(0)
        assert {row.state for row in (base, fork, edited)} == {"finished"}
        steps = [step.step for step in reader.steps(0)]
        assert steps == list(range(len(steps)))  # no step is written twice
        assert reader.step_tokens(0, 2, 1)[0].token_id == 300
        assert edited.change["recomputed"] is True
        kinds = [row.event.kind for row in reader.events()]
        assert [kinds.count(kind) for kind in ("restored", "forked", "mask-edited")] == [1, 1, 1]


def test_a_paused_run_can_be_forked_again_and_again_in_one_answer(tmp_path: Path) -> None:
    flags = ("--weights", "random", "--stop", "eos", "--max-new-tokens", "6")
    run = Run("--dataset", "demo", "--max-samples", "2", *flags, cwd=tmp_path)
    client = run.client()
    client.pause()
    wait_for_effect(client, client.run_to(3))
    for branch in (1, 2):
        fork = Fork(StepRef(0, 0, 2), token_id=300 + branch)
        status = wait_for_effect(client, client.rewind(fork))
        assert status is not None
        assert (status.state, status.place) == ("paused", StepRef(0, branch, 5))
        assert status.reason == f"branch {branch} is finished"
    status = wait_for_effect(client, client.rewind(Restore(StepRef(0, 0, 3))))
    assert status is not None
    assert (status.state, status.place) == ("paused", StepRef(0, 0, 3))
    client.continue_()
    code, _, err = run.end()
    assert code == 0, err
    with TraceReader(run.trace) as reader:
        lengths = [len(reader.steps(0, row.branch)) for row in reader.branches(0)]
        assert lengths == [6, 4, 4]
        assert len(reader.steps(1)) == 6


def test_waiting_for_a_fork_of_a_held_run_waits_until_it_is_held_again(tmp_path: Path) -> None:
    flags = ("--weights", "random", "--stop", "eos", "--max-new-tokens", "6", "--hold")
    run = Run("--dataset", "demo", "--max-samples", "1", *flags, cwd=tmp_path)
    client = run.client()
    while client.status().state != "holding":
        time.sleep(0.05)
    for branch in (1, 2):
        fork = Fork(StepRef(0, 0, 2), token_id=300 + branch)
        status = wait_for_effect(client, client.rewind(fork))
        assert status is not None
        assert (status.state, status.place) == ("holding", StepRef(0, branch, 5))
    client.continue_()
    assert run.end()[0] == 0


def test_a_stop_at_a_pause_ends_the_run_as_an_interrupt(held: tuple[Run, ControlClient]) -> None:
    run, client = held
    wait_for_effect(client, client.step(2))
    client.stop()
    assert run.end()[0] == 130
    with TraceReader(run.trace) as reader:
        assert reader.state == "interrupted"
        assert [step.step for step in reader.steps(0)] == [0, 1]


def test_a_killed_run_is_no_longer_listed_and_its_trace_is_readable(
    held: tuple[Run, ControlClient], capsys: pytest.CaptureFixture[str], runtime_folder: Path
) -> None:
    run, client = held
    wait_for_effect(client, client.step(3))
    assert main(["attach", "--list"]) == 0
    listed = capsys.readouterr().out
    for word in (str(client.status().pid), "paused after step 2", str(run.trace)):
        assert word in listed
    assert main(["attach"]) == 2
    assert "needs a terminal" in capsys.readouterr().err
    assert main(["attach", "1"]) == 2
    assert "No capture of process 1 is running." in capsys.readouterr().err
    viewer_client = CaptureClient(TraceSession(run.trace))
    assert viewer_client.call(lambda client: client.status()).state == "paused"
    with TraceReader(run.trace) as viewer:  # open while the run is killed
        os.kill(client.status().pid, signal.SIGKILL)
        run.end()
        assert [step.step for step in viewer.steps(0)] == [0, 1, 2]
    with pytest.raises(ControlError, match="has no model to control"):
        viewer_client.call(lambda client: client.pause())  # it had a client before
    hint = "Start one with flexinspect run; flexinspect attach --list shows running captures."
    assert ctl(capsys, "status") == (2, f"flexinspect: No capture is running.\n{hint}\n")
    assert list(runtime_folder.iterdir()) == []


def test_a_held_run_is_reachable_over_tcp_and_ctrl_c_releases_it(tmp_path: Path) -> None:
    run = Run("--hold", "--serve", "127.0.0.1:0", cwd=tmp_path)
    client = run.client()
    wait_for(lambda: client.status().state == "holding", PATIENCE_S)
    (entry,) = discovery.running()
    tcp = ControlClient(discovery.Address(url=entry.address.url, token=entry.address.token))
    assert tcp.status().state == "holding"
    run.process.send_signal(signal.SIGINT)
    code, out, err = run.end()
    assert code == 0, err
    with TraceReader(run.trace) as reader:
        assert (reader.state, reader.generation(0).state) == ("finished", "finished")
    assert entry.address.token in err
    assert entry.address.token not in out
    assert entry.address.token.encode() not in run.trace.read_bytes()


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (("--serve", "0.0.0.0:8421"), "other machines"),
        (("--serve", "nowhere"), "not HOST:PORT"),
        (("--insecure-bind",), "needs --serve"),
        (("--serve", "127.0.0.1:0", "--no-control"), "exclude each other"),
        (("--hold", "script.py"), "--hold applies to generations of flexinspect"),
    ],
)
def test_invalid_control_flags_are_refused(
    args: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--no-ui", *args]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.slow
def test_fast_commands_to_a_program_in_any_order_keep_its_state_correct(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text(ENDLESS)
    run = Run("endless.py", cwd=tmp_path)
    client = run.client()
    wait_for_effect(client, client.pause())

    class Commands(RuleBasedStateMachine):
        """Commands, and the place where the model must be afterwards."""

        @rule(n=st.integers(1, 4))
        def step(self, n: int) -> None:
            wait_for_effect(client, client.pause())
            before = client.status().place
            wait_for_effect(client, client.step(n))
            assert ordinal(client.status().place) - ordinal(before) == n

        @rule(n=st.integers(1, 10))
        def run_to(self, n: int) -> None:
            wait_for_effect(client, client.pause())
            goal = client.status().place.generation + 1
            wait_for_effect(client, client.run_to(n % 8, goal))
            place = client.status().place
            assert (place.generation, place.step) == (goal, n % 8)

        @rule(go=st.booleans())
        def send_quickly(self, go: bool) -> None:
            client.step(2)
            client.pause()
            client.continue_() if go else client.pause()
            status = wait_for_effect(client, client.continue_() if go else client.pause())
            assert status is not None
            assert (status.state == "paused") is not go

        @rule(level=st.sampled_from(["basic", "advanced", "extreme"]))
        def level(self, level: Any) -> None:
            assert client.level(level).status.level == level

        @invariant()
        def responds(self) -> None:
            assert client.status().state in get_args(State)

    def ordinal(place: Any) -> int:
        return place.generation * 8 + place.step  # type: ignore[no-any-return]

    try:
        run_state_machine_as_test(
            Commands, settings=settings(max_examples=2, stateful_step_count=12, deadline=None)
        )
    finally:
        with suppress(ControlError):
            client.stop()
        run.process.kill()
        run.process.communicate()


TRAINS = """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while True:
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_training_program_can_be_paused_stepped_and_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(TRAINS, "utf-8")
    run = Run("train.py", cwd=tmp_path)
    client = run.client()
    wait_for(lambda: client.status().place.step > 2)
    assert client.status().state == "running"
    status = json.loads(ctl(capsys, "--wait", "--json", "pause")[1])
    step = status["place"]["step"]
    assert status["state"] == "paused"
    with TraceReader(run.trace) as reader:  # the step has its loss, which comes after it
        assert list(reader.training_steps(0)) == list(range(step + 1))
    status = json.loads(ctl(capsys, "--wait", "--json", "step", "2")[1])
    assert (status["state"], status["place"]["step"]) == ("paused", step + 2)
    ctl(capsys, "restore", "1")
    assert "cannot rewind the program's own loop" in ctl(capsys, "restore", "1")[1]
    assert ctl(capsys, "stop")[0] == 0
    code, _, err = run.end()
    assert code == 130, err
    assert "KeyboardInterrupt" in err
    assert "flexinspect_hooks" not in err
    with TraceReader(run.trace) as reader:
        assert reader.state == "interrupted"
        assert reader.n_steps(0) == step + 3


ALTERNATES = """
import torch
critic, maker = torch.nn.Linear(4, 1), torch.nn.Linear(4, 4)
optimizers = [torch.optim.SGD(one.parameters(), lr=0.01) for one in (critic, maker)]
with open("steps.txt", "w", buffering=1) as steps:
    while True:
        for optimizer in optimizers:
            critic(maker(torch.ones(2, 4))).mean().backward()
            optimizer.step()
            print(file=steps)
"""


def test_a_step_of_two_models_that_train_in_turns_is_one_optimizer_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(ALTERNATES, "utf-8")
    run = Run("train.py", cwd=tmp_path)
    client = run.client()
    wait_for(lambda: client.status().place.step > 2)
    counts = []
    for command in (["pause"], *[["step", "1"]] * 4):
        ctl(capsys, "--wait", *command)
        counts.append((tmp_path / "steps.txt").read_text().count("\n"))
    ctl(capsys, "stop")
    assert run.end()[0] == 130
    assert [b - a for a, b in pairwise(counts)] == [1] * 4


def test_a_model_that_still_loads_is_said_to_load(
    held: tuple[Run, ControlClient], capsys: pytest.CaptureFixture[str]
) -> None:
    assert "the model is still loading" in ctl(capsys, "restore", "1", "--cost")[1]


@pytest.mark.parametrize("program", [(), ("nothing.py",)])
def test_a_port_in_use_is_an_error_and_leaves_no_trace(
    program: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "nothing.py").touch()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        run = Run("--serve", f"127.0.0.1:{port}", *program, cwd=tmp_path)
        code, _, err = run.end()
    assert code == 2
    assert f"--serve 127.0.0.1:{port} is not available" in err
    assert "cannot be read" not in err
    assert not run.trace.exists()
