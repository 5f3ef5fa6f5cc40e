"""The Ray executor: who runs what, lost workers, errors and interrupts, and what stays behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from support.paths import TESTS
from support.ray_workers import MakeScripted, Ran

from flexinspect.core.errors import FlexInspectError, UsageError
from flexinspect.core.signals import SignalInterrupt
from flexinspect.inputs.samples import Sample
from flexinspect.lab.ray_cluster import (
    Connection,
    Interrupts,
    RayOptions,
    WorkerSlots,
    connected,
    slots_of,
)
from flexinspect.lab.ray_executor import PoolStatus, RayExecutor, RemoteWorker, WorkerPool
from flexinspect.lab.sample_jobs import SampleJob, jobs_of

pytestmark = pytest.mark.slow


def jobs(*acts: str) -> list[SampleJob]:
    return jobs_of([Sample(f"s{number}", (act,)) for number, act in enumerate(acts)])


@pytest.fixture(scope="module")
def ray() -> Iterator[Connection]:
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install 'flexinspect[ray]'")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(TESTS))
        with connected(RayOptions(workers=2)) as connection:
            yield connection


class Pool:
    """A pool of two workers in the cluster of this module, and what it has reported."""

    def __init__(self, ray: Connection, folder: Path, *acts: str, fault: str = "") -> None:
        self.results: list[Ran] = []
        self.states: list[PoolStatus] = []
        make = MakeScripted(str(folder), fault)
        self.pool = WorkerPool(ray, WorkerSlots(2, 1, 0.0), jobs(*acts), make, self.results.append)
        self.pool.on_status = self.states.append

    def run(self) -> list[Ran]:
        try:
            self.pool.run()
        finally:
            self.pool.close(lambda _worker, _error: None)
        return sorted(self.results, key=lambda result: result.index)

    @property
    def notes(self) -> list[str]:
        return [state.note for state in self.states if state.note]


def test_two_workers_run_at_the_same_time_and_each_sample_once(
    ray: Connection, tmp_path: Path
) -> None:
    pool = Pool(ray, tmp_path, "meet", "meet", *["run"] * 6)
    results = pool.run()
    assert [result.index for result in results] == [*range(8)]
    assert len({result.pid for result in results}) == 2
    assert {result.worker for result in results} == {1, 2}
    last = pool.states[-1]
    assert (last.n_done, last.n_jobs, last.n_lost) == (8, 8, 0)
    assert last.samples_per_s > 0


def test_the_sample_of_a_lost_worker_runs_again_in_another_process(
    ray: Connection, tmp_path: Path
) -> None:
    pool = Pool(ray, tmp_path, "meet", "meet", "die once", *["run"] * 3)
    results = pool.run()
    assert [result.index for result in results] == [*range(6)]
    assert pool.states[-1].n_lost == 1
    lost = next(note for note in pool.notes if "was lost" in note)
    assert "sample s2 runs again" in lost
    assert results[2].pid != int(lost.partition("(process ")[2].split()[0])


def test_a_sample_that_ends_every_worker_is_left_out_and_named(
    ray: Connection, tmp_path: Path
) -> None:
    pool = Pool(ray, tmp_path, "die", "run", "run")
    with pytest.raises(FlexInspectError, match=r"1 sample did not run.*s0"):
        pool.run()
    assert sorted(result.index for result in pool.results) == [1, 2]
    assert pool.states[-1].n_lost == 3


def test_what_a_worker_raises_names_worker_and_sample(ray: Connection, tmp_path: Path) -> None:
    pool = Pool(ray, tmp_path, "fail")
    with pytest.raises(FlexInspectError, match=r"Worker \d failed at sample s0: ValueError: no lu"):
        pool.run()


def test_an_error_of_ours_at_the_start_keeps_its_hint(ray: Connection, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^There is no model\.$") as caught:
        Pool(ray, tmp_path, "run", fault="There is no model.").run()
    assert caught.value.hint == "Ask again."


def test_workers_that_cannot_start_end_the_run(ray: Connection, tmp_path: Path) -> None:
    with pytest.raises(FlexInspectError, match="3 workers in turn ended before they could run"):
        Pool(ray, tmp_path, *["run"] * 9, fault="die").run()


def test_an_interrupt_lets_the_running_samples_end_and_starts_no_other(
    ray: Connection, tmp_path: Path
) -> None:
    pool = Pool(ray, tmp_path, "meet", "meet", *["run"] * 20)
    results = pool.results

    def interrupt(result: Ran) -> None:
        results.append(result)
        if len(results) == 1:
            raise KeyboardInterrupt

    pool.pool._on_result = interrupt
    with pytest.raises(KeyboardInterrupt):
        pool.run()
    assert {result.index for result in results} == {0, 1}
    assert any(note.startswith("stopping after the running samples") for note in pool.notes)


def test_closing_reaches_the_idle_workers(ray: Connection, tmp_path: Path) -> None:
    pool = Pool(ray, tmp_path, "meet", "meet")
    pool.pool.run()
    answers = []

    def close(worker: RemoteWorker, _error: BaseException | None) -> None:
        answers.append(worker.call("close", worker.number))

    pool.pool.close(close)
    assert sorted(answers) == [(1,), (2,)]


def connections_of(process: psutil.Process) -> list[Any]:
    try:
        return process.net_connections("inet")
    except psutil.NoSuchProcess:  # a worker that has just ended
        return []


def test_a_local_cluster_listens_on_the_loopback_interface_only(
    ray: Connection, tmp_path: Path
) -> None:
    Pool(ray, tmp_path, "run").run()
    family = psutil.Process().children(recursive=True)
    assert any("raylet" in process.name() for process in family)
    listening = [
        connection.laddr.ip.removeprefix("::ffff:")
        for process in [psutil.Process(), *family]
        for connection in connections_of(process)
        if connection.status == psutil.CONN_LISTEN
    ]
    assert listening
    assert {*listening} == {"127.0.0.1"}


def test_a_second_connection_of_a_process_is_refused(ray: Connection) -> None:
    with pytest.raises(UsageError, match="connected to a Ray cluster already"):
        RayExecutor(RayOptions()).run(jobs("run"), MakeScripted("."), print)


def cluster(**resources: float) -> Any:
    return SimpleNamespace(cluster_resources=lambda: resources)


@pytest.mark.parametrize(
    ("resources", "options", "n_jobs", "expected"),
    [
        ({"CPU": 8}, RayOptions(), 100, WorkerSlots(8, 1, 0.0)),
        ({"CPU": 8}, RayOptions(threads=3), 100, WorkerSlots(2, 3, 0.0)),
        ({"CPU": 8}, RayOptions(workers=2), 100, WorkerSlots(2, 1, 0.0)),
        ({"CPU": 8}, RayOptions(), 3, WorkerSlots(3, 1, 0.0)),
        ({"CPU": 1}, RayOptions(threads=2), 3, WorkerSlots(1, 2, 0.0)),
        ({"CPU": 8, "GPU": 4}, RayOptions(), 100, WorkerSlots(4, 1, 1.0)),
        ({"CPU": 8, "GPU": 4}, RayOptions(device="cpu"), 100, WorkerSlots(8, 1, 0.0)),
        ({"CPU": 8, "GPU": 1}, RayOptions(workers=3), 100, WorkerSlots(3, 1, 0.3333)),
        ({"CPU": 8, "GPU": 2}, RayOptions(workers=3, device="cuda"), 9, WorkerSlots(3, 1, 0.5)),
    ],
)
def test_one_worker_for_each_gpu_or_for_the_cores_that_it_needs(
    resources: dict[str, float], options: RayOptions, n_jobs: int, expected: WorkerSlots
) -> None:
    assert slots_of(cluster(**resources), options, n_jobs) == expected


def test_a_gpu_that_the_cluster_lacks_is_refused() -> None:
    with pytest.raises(UsageError, match="the Ray cluster has no GPU"):
        slots_of(cluster(CPU=4), RayOptions(device="cuda"), 1)


class Signalling:
    """Gets Ctrl-C while it is destroyed, where Python drops what the handler raises."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_python_drops_is_raised_at_the_next_look() -> None:
    interrupts = Interrupts()
    with interrupts.handled():
        interrupts.check()
        Signalling()
        with pytest.raises(SignalInterrupt):
            interrupts.check()
        interrupts.check()
