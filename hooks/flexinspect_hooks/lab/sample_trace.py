"""The trace of one sample of the laboratory, as `flexinspect run` records it."""

from __future__ import annotations

import time
from pathlib import Path

from msgspec.structs import asdict, replace

from flexinspect.inputs.samples import Sample
from flexinspect.records.job import Job
from flexinspect_hooks.capture.new_trace import create_trace
from flexinspect_hooks.ensemble.capture_process import NOT_IN_MANIFEST
from flexinspect_hooks.ensemble.ensemble_run import EnsembleRunner
from flexinspect_hooks.loading.model_loader import LoadedModel
from flexinspect_hooks.sessions.capture_session import CaptureSession


def record_sample(
    file: Path, loaded: LoadedModel, job: Job, ensemble: EnsembleRunner, sample: Sample
) -> None:
    """Run the ensemble generation of a sample again, and record it in a new trace.

    Raises `FlexInspectError` if the trace cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    job = replace(job, max_samples=1, num_paraphrases=len(sample.paraphrases))
    facts = {
        "job": {name: value for name, value in asdict(job).items() if name not in NOT_IN_MANIFEST},
        "model": loaded.facts(),
        "seed": job.seed,
        "compiled": ensemble.compiled,
    }
    writer = create_trace(file, job.argv, job.level, None, overwrite=True, **facts)
    state = "failed"
    try:
        session = CaptureSession(
            loaded.model,
            writer,
            level=job.level,
            text_of=ensemble.vocabulary.text_of,
            copy_logits=False,
        )
        with session:
            ensemble.run(0, ensemble.plan(sample), session)
        writer.update_run(cost=session.cost(), ended_at=time.time())
        state = "finished"
    finally:
        writer.close(state)
