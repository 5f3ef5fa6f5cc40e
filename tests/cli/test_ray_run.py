"""`flexinspect run --ray`: its flags, its messages, and a run whose worker is killed."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from flexinspect.cli.main import main
from flexinspect.cli.ray_options import status_text
from flexinspect.cli.ray_run import total_cost
from flexinspect.lab import ray_executor
from flexinspect.lab.lab_result import LabResult, MethodAnswer
from flexinspect.lab.ray_cluster import RayOptions
from flexinspect.lab.ray_executor import PluginWorker, PoolStatus

WAIT_S = 120.0


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--ray-workers", "2"], "--ray-workers needs --ray"),
        (["--ray", " "], "--ray is empty"),
        (["--ray", "local", "--hold"], "--hold and --ray exclude each other"),
        (["--ray", "local", "--break", "nan"], "--break and --ray exclude each other"),
        (["--ray", "local", "--debugpy", "0"], "--debugpy and --ray exclude each other"),
        (["--ray", "local", "--prompt", "Why?"], "--prompt is a single sample"),
        (["--ray", "local", "program.py"], "not a program of your own"),
        (["--ray", "local", "--out", "x.flextrace"], "--ray writes one trace per worker"),
        (["--ray", "127.0.0.1:1"], "No Ray cluster can be used at 127.0.0.1:1"),
    ],
)
def test_what_cannot_be_distributed_is_refused(
    flags: list[str],
    expected: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if flags == ["--ray", "127.0.0.1:1"] and find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install 'flexinspect[ray]'")
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--no-ui", *flags]) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("command", [["run"], ["lab", "--max-samples", "1"]])
def test_without_ray_one_sentence_says_what_to_install(
    command: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.chdir(tmp_path)
    assert main([*command, "--ray", "local"]) == 2
    output = capsys.readouterr().err
    assert "--ray needs ray, which cannot be imported" in output
    assert "pip install 'flexinspect[ray]'" in output
    assert "Traceback" not in output


class FakeExecutor:
    """Answers every sample by "Paris", and is interrupted after some."""

    made: Any = None
    stops_after = 100

    def __init__(self, options: RayOptions, **_: Any) -> None:
        self.options = options

    def run(self, jobs: Any, make_worker: PluginWorker, on_result: Callable[..., None]) -> None:
        type(self).made = (self.options, make_worker, len(jobs))
        for job in jobs[: self.stops_after]:
            ids = {"index": job.index, "sample_id": job.sample.id, "digest": job.digest}
            answer = MethodAnswer("flex", 2, "Paris", "eos")
            on_result(LabResult(**ids, expected=job.sample.answers, answers=(answer,)))
        if len(jobs) > self.stops_after:
            raise KeyboardInterrupt


def test_the_laboratory_hands_its_samples_to_ray_and_continues_what_was_interrupted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Executor(FakeExecutor):
        stops_after = 3

    monkeypatch.setattr(ray_executor, "RayExecutor", Executor)
    flags = ["lab", "--methods", "flex", "--num-paraphrases", "2", "--orders", "0"]
    flags += ["--max-samples", "5", "--out", str(tmp_path / "lab"), "--device", "cpu"]
    flags += ["--ray", "local", "--ray-workers", "4", "--threads", "3"]
    assert main(flags) == 130
    assert "3 of 5 samples are stored" in capsys.readouterr().err
    assert main(flags) == 0
    assert "5 samples of demo" in capsys.readouterr().out
    options, make_worker, n_jobs = Executor.made
    assert options == RayOptions(workers=4, threads=3, device="cpu")
    assert n_jobs == 2
    assert (make_worker.name, make_worker.settings.job.threads) == ("lab-worker", 3)
    assert pickle.loads(pickle.dumps(make_worker)) == make_worker


def test_the_status_says_how_long_the_rest_takes() -> None:
    starting = status_text(PoolStatus(0, 100, 0, 2, 0, 0.0))
    assert starting == "0 of 100 samples, 2 workers starting"
    running = status_text(PoolStatus(40, 100, 2, 0, 1, 20.0))
    assert running == "40 of 100 samples, 2 workers, 1 lost, 2.0 samples/s, 30 s left"
    assert status_text(PoolStatus(1, 10**4, 1, 0, 0, 2.0)).endswith(
        "0.5 samples/s, 5 h 33 min left"
    )


def test_the_cost_of_several_traces_is_their_sum() -> None:
    costs = [
        {"steps": 10, "total_s": 1.0, "ratio": 0.02},
        {"steps": 5, "total_s": 3.0, "ratio": 0.06},
    ]
    assert total_cost(costs) == {"steps": 15, "total_s": 4.0, "ratio": 0.05}
    assert total_cost([]) == {}


class RunningCommand:
    """A command whose stderr is read while it runs."""

    def __init__(self, *arguments: str, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "flexinspect", *arguments],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.stderr: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        self.stderr.extend(self.process.stderr or ())

    def wait_for(self, condition: Callable[[], Any]) -> Any:
        """Return what the condition returns, once that is true; fail if the command ends first."""
        deadline = time.monotonic() + WAIT_S
        while not (value := condition()):
            assert self.process.poll() is None, "".join(self.stderr)
            assert time.monotonic() < deadline, "".join(self.stderr)
            time.sleep(0.05)
        return value

    def line_with(self, text: str) -> str | None:
        return next((line for line in [*self.stderr] if text in line), None)


def read_lines(file: Path) -> list[dict[str, Any]]:
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True)[1:] if line.endswith("\n")]


@pytest.mark.slow
def test_a_killed_worker_is_replaced_and_ctrl_c_leaves_results_and_no_process(
    tmp_path: Path,
) -> None:
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install 'flexinspect[ray]'")
    results = tmp_path / "out" / "results.jsonl"
    flags = ["--dataset", "demo", "--max-samples", "500", "--cue", "In a sentence:"]
    command = RunningCommand(
        *("run", *flags, "--level", "basic"),
        *("--ray", "local", "--ray-workers", "2", "--out", "out"),
        folder=tmp_path,
    )
    family: list[psutil.Process] = []
    try:
        command.wait_for(lambda: read_lines(results))
        killed = read_lines(results)[0]["pid"]
        family = psutil.Process(command.process.pid).children(recursive=True)
        os.kill(killed, signal.SIGKILL)
        note = command.wait_for(lambda: command.line_with("was lost; sample "))
        assert f"(process {killed} on" in note
        again = note.partition("; sample ")[2].split()[0]
        command.wait_for(lambda: again in {one["sample_id"] for one in read_lines(results)})
        command.process.send_signal(signal.SIGINT)
        assert command.process.wait(WAIT_S) == 130
        _, alive = psutil.wait_procs(family, timeout=30)
        assert alive == []
    finally:
        for process in (*family, command.process):
            process.kill() if isinstance(process, subprocess.Popen) else _kill(process)
    command._reader.join(WAIT_S)
    _check_results(tmp_path / "out", command, killed)


def _kill(process: psutil.Process) -> None:
    if process.is_running():
        process.kill()


def _check_results(folder: Path, command: RunningCommand, killed: int) -> None:
    """Each stored sample ran once, its trace has it, and the summary counts what is there."""
    stored = read_lines(folder / "results.jsonl")
    indices = [one["index"] for one in stored]
    assert len(indices) == len({*indices})
    assert {one["pid"] for one in stored} >= {killed}
    assert {one["trace"] for one in stored} <= {file.name for file in folder.iterdir()}
    assert command.process.stdout is not None
    printed = command.process.stdout.read()
    assert printed.count("expected:") == len(stored)
    assert "raylet" not in printed
    assert command.line_with(f"{len(stored)} of 500 samples are stored; the same command continues")
