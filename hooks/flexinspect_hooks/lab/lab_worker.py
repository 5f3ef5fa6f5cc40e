"""The laboratory's worker: one loaded model that answers samples by every method."""

from __future__ import annotations

from flexinspect.lab.lab_result import LabResult
from flexinspect.lab.sample_jobs import SampleJob
from flexinspect.lab.settings import LabSettings


class LabWorker:
    """Loads the model of the settings once, and runs all their methods on each sample."""

    def __init__(self, settings: LabSettings) -> None:
        self._settings = settings

    def run(self, job: SampleJob) -> LabResult:
        """Answer a sample by every method."""
        raise NotImplementedError
