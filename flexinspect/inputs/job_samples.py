"""The samples of a job: of its dataset or its prompts, with the paraphrases that it selects."""

from __future__ import annotations

from flexinspect.inputs import datasets, paraphrases, samples
from flexinspect.inputs.samples import Sample
from flexinspect.records.job import Job

DEFAULT_PARAPHRASES = 5


def load_samples(job: Job) -> list[Sample]:
    """The samples of a job with the chosen paraphrases. Raises `DatasetError`."""
    if job.prompts:
        loaded = [samples.from_prompts(job.prompts)]
    else:
        loaded = datasets.load(job.dataset, max_samples=job.max_samples)
        if job.paraphrases is not None:
            loaded = paraphrases.add_paraphrases(loaded, job.paraphrases)
    # By default 5 of a dataset's sample, and all of the user's prompt.
    is_chosen = bool(job.num_paraphrases or job.indices or job.prompts)
    chosen = []
    for one in loaded:
        count = job.num_paraphrases if is_chosen else min(DEFAULT_PARAPHRASES, len(one.paraphrases))
        chosen.append(samples.choose_paraphrases(one, count, job.indices))
    return chosen
