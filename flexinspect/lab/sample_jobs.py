"""Samples as jobs: what a worker gets, what it returns, and how an executor runs many of them.

An executor calls `make_worker` once in each process that works, and `on_result` in the process that
called it, in any order of the jobs. `make_worker`, jobs and results can be pickled, so an executor
may run its workers anywhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from flexinspect.inputs.samples import Sample


class SampleJob(Struct, frozen=True):
    """One sample to run; `index` is its position in the dataset, from 0."""

    index: int
    sample: Sample

    @property
    def digest(self) -> str:
        """A checksum of the sample's texts: equal if a later run reads the same sample here."""
        texts = msgspec.json.encode((self.sample.paraphrases, self.sample.answers))
        return hashlib.sha256(texts).hexdigest()[:16]


class SampleResult(Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Base class of what a worker returns for a job: plain data that JSON can hold.

    `error` is why the sample could not be run, "" if it could.
    """

    index: int
    sample_id: str
    digest: str = ""
    error: str = ""


Result = TypeVar("Result", bound=SampleResult)
Result_co = TypeVar("Result_co", bound=SampleResult, covariant=True)


class SampleWorker(Protocol[Result_co]):
    """Runs jobs one after the other, in the process that made it (it may hold a model)."""

    def run(self, job: SampleJob) -> Result_co:
        """Run one sample."""


class Executor(Protocol):
    """Runs jobs by workers, each made once per process."""

    def run(
        self,
        jobs: Sequence[SampleJob],
        make_worker: Callable[[], SampleWorker[Result]],
        on_result: Callable[[Result], None],
    ) -> None:
        """Run every job, and pass each result on as soon as it is there.

        Raises what a worker raises. Results that were passed on before an exception or an
        interrupt are complete.
        """


class SerialExecutor:
    """Runs the jobs one after the other in this process."""

    def run(
        self,
        jobs: Sequence[SampleJob],
        make_worker: Callable[[], SampleWorker[Result]],
        on_result: Callable[[Result], None],
    ) -> None:
        """Run every job in order; without a job no worker is made."""
        if jobs:
            worker = make_worker()
            for job in jobs:
                on_result(worker.run(job))


def jobs_of(samples: Iterable[Sample]) -> list[SampleJob]:
    """Return the jobs of a dataset's samples, without the fields that only describe them."""
    return [SampleJob(index, replace(one, meta={})) for index, one in enumerate(samples)]
