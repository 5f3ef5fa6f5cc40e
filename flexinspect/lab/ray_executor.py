"""An executor on a Ray cluster: jobs go to idle workers, and those of a lost worker run again.

Each worker is an actor (a process of its own) that holds the model and runs one job after the
other. A worker is lost when its process ends, for instance because memory ran out or its machine
went away.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, Generic

from msgspec import Struct

from flexinspect.core import __version__, plugins
from flexinspect.core.errors import FlexInspectError, UsageError, summarize_error
from flexinspect.core.text import plural, truncate
from flexinspect.lab.ray_cluster import (
    LOCAL,
    Connection,
    RayOptions,
    WorkerSlots,
    connected,
    slots_of,
)
from flexinspect.lab.sample_jobs import Result, SampleJob, SampleWorker

WORKER_VARIABLE = "FLEXINSPECT_WORKER"
"""The environment variable that tells `make_worker` the number of its worker."""

MAX_ATTEMPTS = 3
"""A sample that ends its worker this often is left out."""

MAX_LOST_AT_START = 3
"""This many workers in turn that end before they can run a sample end the run."""

REPORT_EVERY_S = 0.25
ANSWER_WITHIN_S = 60.0
"""How long a worker may take to answer or to hand over a result, before it counts as lost."""


class PluginWorker(Struct, frozen=True):
    """Makes the worker that is registered as `name` of the capture side, with its settings.

    The class is imported, and with it torch, only in the process that calls this.
    """

    name: str
    settings: Any

    def __call__(self) -> Any:
        return plugins.load(plugins.CAPTURE, self.name)(self.settings)


class PoolStatus(Struct, frozen=True):
    """How far a run is: samples done and in all, workers alive and starting, workers lost.

    `seconds` is the time since the first worker could run a sample, 0.0 before. `note` is a
    sentence about what has just happened, or "".
    """

    n_done: int
    n_jobs: int
    n_working: int
    n_starting: int
    n_lost: int
    seconds: float
    note: str = ""

    @property
    def samples_per_s(self) -> float:
        """Samples per second since the first worker was ready."""
        return self.n_done / self.seconds if self.seconds else 0.0


class WorkerFacts(Struct, frozen=True):
    """The process of a worker."""

    number: int
    host: str
    pid: int
    version: str


class WorkerProcess:
    """The actor: makes a worker, and runs its jobs. Its constructor does nothing that can fail."""

    _worker: Any = None

    def start(self, number: int, make_worker: Callable[[], Any]) -> WorkerFacts:
        """Make the worker; what it raises is raised in the process that waits for it."""
        os.environ[WORKER_VARIABLE] = str(number)
        self._worker = make_worker()
        return WorkerFacts(number, socket.gethostname(), os.getpid(), __version__)

    def run(self, job: SampleJob) -> Any:
        """Run one job."""
        return self._worker.run(job)

    def call(self, method: str, *arguments: Any) -> Any:
        """Call another method of the worker."""
        return getattr(self._worker, method)(*arguments)


class RemoteWorker:
    """A worker of the cluster as `on_close` sees it: `call` calls its methods and waits."""

    def __init__(self, ray: Any, actor: Any, number: int) -> None:
        self.number, self.actor = number, actor
        self.facts: WorkerFacts | None = None
        self._ray = ray

    def call(self, method: str, *arguments: Any) -> Any:
        """Return what a method of the worker returns.

        Raises `FlexInspectError` if it fails, the worker is gone, or `ANSWER_WITHIN_S` are over.
        """
        try:
            task = self.actor.call.remote(method, *arguments)
            return self._ray.get(task, timeout=ANSWER_WITHIN_S)
        except self._ray.exceptions.RayTaskError as error:
            raise _own_error(error, self, f"in {method}") from error
        except self._ray.exceptions.RayError as error:
            what = f"Worker {self.number} did not answer: {_reason(error)}"
            raise FlexInspectError(what) from error


OnClose = Callable[[RemoteWorker, BaseException | None], None]


class RayExecutor:
    """Runs jobs in a Ray cluster; an `Executor`.

    `on_status` gets the state of the run a few times per second. `on_close` gets each worker that
    is alive when all jobs have run or the run ends by an exception, with that, before its process
    is ended. Workers are numbered from `first_number`, and those that replace lost ones too.
    """

    def __init__(
        self,
        options: RayOptions,
        *,
        on_status: Callable[[PoolStatus], None] = lambda _status: None,
        on_close: OnClose = lambda _worker, _error: None,
        first_number: int = 1,
    ) -> None:
        self._options, self._on_status, self._on_close = options, on_status, on_close
        self._first_number = first_number

    def run(
        self,
        jobs: Sequence[SampleJob],
        make_worker: Callable[[], SampleWorker[Result]],
        on_result: Callable[[Result], None],
    ) -> None:
        """Run every job, and pass each result on as soon as it is there.

        Raises what a worker raises, `UsageError` for a cluster that cannot be used, and
        `FlexInspectError` if workers are lost all the time. After Ctrl-C the running jobs are
        finished, unless it comes twice.
        """
        if not jobs:
            return
        is_local = self._options.address == LOCAL
        note = "starting a local Ray cluster …" if is_local else "connecting to the Ray cluster …"
        self._on_status(PoolStatus(0, len(jobs), 0, 0, 0, 0.0, note))
        with connected(self._options) as connection:
            slots = slots_of(connection.ray, self._options, len(jobs))
            pool = WorkerPool(connection, slots, jobs, make_worker, on_result)
            pool.on_status, pool.next_number = self._on_status, self._first_number
            ended_by: BaseException | None = None
            try:
                pool.run()
            except BaseException as error:
                ended_by = error
                raise
            finally:
                self._first_number = pool.next_number
                pool.close(self._on_close, ended_by)


class WorkerPool(Generic[Result]):
    """The workers of one run, and the jobs that wait for them."""

    def __init__(
        self,
        connection: Connection,
        slots: WorkerSlots,
        jobs: Sequence[SampleJob],
        make_worker: Callable[[], SampleWorker[Result]],
        on_result: Callable[[Result], None],
    ) -> None:
        self._ray, self._interrupts = connection
        self._slots, self._on_result = slots, on_result
        self._make_worker = self._ray.put(make_worker)
        self._waiting, self._n_jobs = deque(jobs), len(jobs)
        self._tasks: dict[Any, tuple[RemoteWorker, SampleJob | None]] = {}
        """What runs: each worker with its job, None while it starts."""
        self._idle: list[RemoteWorker] = []
        self._losses: Counter[int] = Counter()
        self._left_out: list[SampleJob] = []
        self._n_done = self._n_lost = self._n_lost_at_start = 0
        self._ready_at: float | None = None
        self._is_stopping = False
        self.next_number = 1
        self.on_status: Callable[[PoolStatus], None] = lambda _status: None

    def run(self) -> None:
        """Run all jobs; an interrupt is raised when those that run have ended."""
        try:
            for _ in range(self._slots.n_workers):
                self._start_worker()
            while self._waiting or self._has_running_job():
                self._wait()
        except KeyboardInterrupt:
            self._interrupts.take()
            self._finish_running()
            raise
        if self._left_out:
            names = ", ".join(job.sample.id for job in self._left_out[:5])
            n = plural(len(self._left_out), "sample")
            what = f"{n} did not run, because the worker ended each time: {names}."
            hint = "If memory ran out, use fewer --ray-workers or a smaller model; "
            hint += "the same command runs these samples again."
            raise FlexInspectError(what, hint=hint)

    def _finish_running(self) -> None:
        """Wait for the jobs that run, without starting others."""
        self._is_stopping = True
        if self._has_running_job():
            self._report("stopping after the running samples (Ctrl-C again ends them at once)")
        while self._has_running_job():
            self._wait()

    def close(self, on_close: OnClose, error: BaseException | None = None) -> None:
        """Pass the idle workers to `on_close`, then end all."""
        try:
            for worker in self._idle:
                try:
                    on_close(worker, error)
                except FlexInspectError as problem:
                    self._report(problem.sentence())
        finally:
            for worker in (*self._idle, *(worker for worker, _ in self._tasks.values())):
                self._ray.kill(worker.actor)

    def _has_running_job(self) -> bool:
        return any(job is not None for _, job in self._tasks.values())

    def _start_worker(self) -> None:
        slots = self._slots
        actor = self._ray.remote(WorkerProcess).options(
            num_cpus=slots.cpus,
            num_gpus=slots.gpus,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy="SPREAD",
        )
        worker = RemoteWorker(self._ray, actor.remote(), self.next_number)
        self.next_number += 1
        self._tasks[worker.actor.start.remote(worker.number, self._make_worker)] = worker, None

    def _wait(self) -> None:
        """Wait for the next task that ends, and give its worker another job."""
        self._interrupts.check()
        ended, _ = self._ray.wait([*self._tasks], timeout=REPORT_EVERY_S)
        with self._interrupts.deferred():  # a result is stored whole, and no worker is forgotten
            for task in ended:
                self._on_ended(task, *self._tasks.pop(task))
                self._assign()
        self._report()

    def _on_ended(self, task: Any, worker: RemoteWorker, job: SampleJob | None) -> None:
        try:
            value = self._ray.get(task, timeout=ANSWER_WITHIN_S)
        except self._ray.exceptions.RayTaskError as error:
            if job is None:
                self._ray.kill(worker.actor)  # there is nothing in it to close
                where = "while it started"
            else:
                self._idle.append(worker)
                where = f"at sample {job.sample.id}"
            raise _own_error(error, worker, where) from error
        except self._ray.exceptions.RayError as error:
            self._on_lost(worker, job, error)
        else:
            self._idle.append(worker)
            if job is None:
                self._on_started(worker, value)
            else:
                self._n_done += 1
                self._on_result(value)

    def _assign(self) -> None:
        while self._idle and self._waiting and not self._is_stopping:
            worker, job = self._idle.pop(), self._waiting.popleft()
            self._tasks[worker.actor.run.remote(job)] = worker, job

    def _on_started(self, worker: RemoteWorker, facts: WorkerFacts) -> None:
        if facts.version != __version__:
            what = f"Worker {worker.number} on {facts.host} has flexinspect {facts.version}, "
            raise UsageError(f"{what}and this is {__version__}.", hint="Install the same version.")
        worker.facts = facts
        self._n_lost_at_start = 0
        self._ready_at = self._ready_at or time.monotonic()
        self._report(f"worker {worker.number} is ready (process {facts.pid} on {facts.host})")

    def _on_lost(self, worker: RemoteWorker, job: SampleJob | None, error: Exception) -> None:
        """Run the job of a lost worker again, and replace the worker while it is needed."""
        self._ray.kill(worker.actor)  # one that cannot be reached may go on
        self._n_lost += 1
        again = ""
        if job is None:
            self._n_lost_at_start += 1
            if self._n_lost_at_start >= MAX_LOST_AT_START:
                what = f"{self._n_lost_at_start} workers in turn ended before they could run a "
                what += f"sample; the last one: {_reason(error)}"
                hint = "Is flexinspect installed on the cluster's machines, with enough memory?"
                raise FlexInspectError(what, hint=hint) from error
        else:
            self._losses[job.index] += 1
            if self._losses[job.index] < MAX_ATTEMPTS:
                self._waiting.appendleft(job)
                again = f"; sample {job.sample.id} runs again"
            else:
                self._left_out.append(job)
                again = f"; sample {job.sample.id} has ended {MAX_ATTEMPTS} workers and is left out"
        if not self._is_stopping and len(self._waiting) > len(self._idle) + self._n_starting():
            self._start_worker()
        place = f" (process {worker.facts.pid} on {worker.facts.host})" if worker.facts else ""
        self._report(f"worker {worker.number}{place} was lost{again}")

    def _n_starting(self) -> int:
        return sum(job is None for _, job in self._tasks.values())

    def _report(self, note: str = "") -> None:
        n_starting = self._n_starting()
        self.on_status(
            PoolStatus(
                self._n_done,
                self._n_jobs,
                len(self._tasks) - n_starting + len(self._idle),
                n_starting,
                self._n_lost,
                time.monotonic() - self._ready_at if self._ready_at else 0.0,
                note,
            )
        )


def _own_error(error: Any, worker: RemoteWorker, where: str) -> FlexInspectError:
    """Return the error that a worker raised, or one that says where another exception came from."""
    cause = error.cause
    if isinstance(cause, FlexInspectError):
        return cause
    what = f"Worker {worker.number} failed {where}: {summarize_error(cause or error)}"
    return FlexInspectError(what, hint="The results so far are stored.")


def _reason(error: Exception) -> str:
    """Return the sentence of Ray's message that says why an actor ended."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    wanted = (line for line in lines if "because" in line or "Error" in line)
    return truncate(next(wanted, lines[0] if lines else type(error).__name__), 300)
