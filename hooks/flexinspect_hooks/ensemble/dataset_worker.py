"""The worker of `run --dataset --ray`: one loaded model and one trace for many samples."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from flexinspect.lab.dataset_run import (
    ClosedTrace,
    DatasetWorkerSettings,
    RecordedSample,
    trace_name,
)
from flexinspect.lab.ray_executor import WORKER_VARIABLE
from flexinspect.lab.sample_jobs import SampleJob
from flexinspect_hooks.ensemble.capture_process import CaptureRun


class DatasetWorker:
    """Loads the model, and records each sample as a generation of the worker's trace.

    The trace is in the folder of the run if this process sees it, else in a temporary one. Raises
    `FlexInspectError` if the model cannot be loaded or the trace not be written.
    """

    def __init__(self, settings: DatasetWorkerSettings) -> None:
        self._is_in_folder = Path(settings.seen).exists()
        self._stack = ExitStack()
        folder = settings.folder
        if not self._is_in_folder:
            folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="flexinspect-"))
        self._path = Path(folder, trace_name(int(os.environ[WORKER_VARIABLE])))
        job = replace(settings.job, out=str(self._path))
        self._run = CaptureRun(job, samples=(), send=_ignore)
        self._session = ExitStack()
        try:
            prepared = self._session.enter_context(self._run.prepared())
            self._ensemble, self._capture = prepared
        except Exception as error:
            self._run.record_failure(error)
            self._run.close("failed")
            self._stack.close()
            raise

    def run(self, job: SampleJob) -> RecordedSample:
        """Run one sample, and return when its generation is in the trace.

        Raises `DatasetError` for a prompt that the model cannot read, and `TraceWriteError` if the
        trace is not complete.
        """
        started = time.perf_counter()
        try:
            outcome = self._run.run_sample(job.sample, self._ensemble, self._capture)
        except Exception as error:
            self._run.record_failure(error)
            raise
        self._capture.recorder.drain()
        if self._capture.recorder.failure is not None:
            raise self._capture.recorder.failure
        return RecordedSample(
            index=job.index,
            sample_id=job.sample.id,
            digest=job.digest,
            trace=self._path.name,
            generation=self._run.generation,
            answer=outcome.answer,
            expected=job.sample.answers,
            n_tokens=outcome.n_tokens,
            seconds=round(time.perf_counter() - started, 6),
            host=socket.gethostname(),
            pid=os.getpid(),
        )

    def close(self, state: str) -> ClosedTrace | None:
        """End the trace in a state; None if no sample has run, which leaves no trace."""
        self._session.close()
        path = self._run.close(state)
        if path is None:
            self.release()
            return None
        return ClosedTrace(path, Path(path).stat().st_size, self._is_in_folder)

    def read(self, offset: int, n_bytes: int) -> bytes:
        """Return a part of the closed trace."""
        with self._path.open("rb") as file:
            file.seek(offset)
            return file.read(n_bytes)

    def release(self) -> None:
        """Remove the temporary folder, if there is one, when its trace has been read."""
        self._stack.close()


def _ignore(_kind: str, **_facts: Any) -> None:
    """Send no messages: no process reads the output of this one."""
