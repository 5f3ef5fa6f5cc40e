"""Workers without a model, for tests of the Ray executor: actors import this module by its name."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from msgspec import Struct

from flexinspect.core.errors import UsageError
from flexinspect.lab.ray_executor import WORKER_VARIABLE
from flexinspect.lab.sample_jobs import SampleJob, SampleResult

WAIT_S = 60.0


class Ran(SampleResult, frozen=True, kw_only=True, tag="ran"):
    """Which worker and process ran a sample."""

    worker: int
    pid: int


class ScriptedWorker:
    """Does what the first text of a sample says: `run`, `meet`, `die`, `die once`, or `fail`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def run(self, job: SampleJob) -> Ran:
        act = job.sample.paraphrases[0]
        if act == "meet":
            self._meet(job.index)
        elif act == "die" or (act == "die once" and self._is_first(job.index)):
            os.kill(os.getpid(), signal.SIGKILL)
        elif act == "fail":
            raise ValueError("no luck\nat all")
        number = int(os.environ[WORKER_VARIABLE])
        return Ran(index=job.index, sample_id=job.sample.id, worker=number, pid=os.getpid())

    def close(self, *arguments: int) -> tuple[int, ...]:
        """Return the arguments."""
        return arguments

    def _meet(self, index: int) -> None:
        """Wait until another worker waits too: both run at the same time."""
        (self._folder / f"meets-{index}").touch()
        deadline = time.monotonic() + WAIT_S
        while len([*self._folder.glob("meets-*")]) < 2:
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(0.01)

    def _is_first(self, index: int) -> bool:
        try:
            (self._folder / f"dies-{index}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


class MakeScripted(Struct, frozen=True):
    """Makes a `ScriptedWorker`; with `fault` it raises an error or ends its process instead."""

    folder: str
    fault: str = ""

    def __call__(self) -> ScriptedWorker:
        if self.fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault:
            raise UsageError(self.fault, hint="Ask again.")
        return ScriptedWorker(Path(self.folder))
