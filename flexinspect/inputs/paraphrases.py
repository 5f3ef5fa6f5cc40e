"""`--paraphrases`: more wordings of a dataset's questions, from a file or from templates.

Public sets such as WebQuestions have one question a row. Their paraphrases come from

* `templates`: the frames of `TEMPLATES` around the question;
* `FILE.txt`: the user's own frames, one per line, each with `{question}`;
* `FILE.jsonl`, `.json` or `.csv`, or a folder of `save_to_disk`: prepared paraphrases, found by
  `id` (or `uuid`), otherwise by the question. Rows have `paraphrases`, or `paraphrase0`,
  `paraphrase1`, ... as the self-ensemble project writes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from flexinspect.core.errors import DatasetError
from flexinspect.inputs.datasets import local_rows, webqa_samples
from flexinspect.inputs.samples import Sample

TEMPLATES = (
    "Please answer this question: {question}",
    "I would like to know: {question}",
    "Can you tell me? {question}",
    "Here is a question. {question}",
    "Question: {question}",
    "Give a short answer: {question}",
    "A friend asked me: {question}",
)
"""Frames that keep the meaning of any question in English; the bare question comes before them."""

_FIELD = "{question}"


def add_paraphrases(samples: Iterable[Sample], source: str) -> list[Sample]:
    """Return the samples with the paraphrases of `source` after their own.

    Raises `DatasetError` for a file that cannot be read, and for a sample that it does not have.
    """
    if source == "templates":
        return [_framed(sample, TEMPLATES) for sample in samples]
    path = Path(source).expanduser()
    if path.suffix.lower() == ".txt":
        templates = _own_templates(path)
        return [_framed(sample, templates) for sample in samples]
    prepared = _prepared(path)
    return [_with_prepared(sample, prepared, source) for sample in samples]


def _framed(sample: Sample, templates: Sequence[str]) -> Sample:
    question = sample.paraphrases[0]
    return _extended(sample, [template.replace(_FIELD, question) for template in templates])


def _extended(sample: Sample, more: Iterable[str]) -> Sample:
    return replace(sample, paraphrases=tuple(dict.fromkeys((*sample.paraphrases, *more))))


def _own_templates(path: Path) -> list[str]:
    try:
        lines = path.read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        hint = "Give a text file with one template per line, or the word templates."
        raise DatasetError(f"The templates {path} cannot be read: {error}.", hint=hint) from error
    for number, line in enumerate(lines, start=1):
        if line.strip() and _FIELD not in line:
            what = f"{path}:{number}: this template has no {_FIELD}."
            raise DatasetError(what, hint=f"For instance: Please tell me: {_FIELD}")
    templates = [line for line in lines if line.strip()]
    if not templates:
        raise DatasetError(f"The templates {path} are empty.", hint=f"Write one with {_FIELD}.")
    return templates


def _prepared(path: Path) -> Mapping[tuple[str, str], Sample]:
    """Return the prepared samples, each by its id, if it has one, and by its question."""
    found: dict[tuple[str, str], Sample] = {}
    for row in local_rows(path):
        (sample,) = webqa_samples([row])
        if any(row.fields.get(name) not in (None, "") for name in ("id", "uuid")):
            found.setdefault(("id", sample.id), sample)
        found.setdefault(("question", _normalized(sample.paraphrases[0])), sample)
    return found


def _with_prepared(
    sample: Sample, prepared: Mapping[tuple[str, str], Sample], source: str
) -> Sample:
    question = sample.paraphrases[0]
    keys = (("id", sample.id), ("question", _normalized(question)))
    one = next((prepared[key] for key in keys if key in prepared), None)
    if one is None:
        what = f"{source} has no paraphrases of the sample {sample.id}, {question!r}."
        hint = "Its rows are found by id (or uuid), otherwise by question."
        raise DatasetError(what, hint=hint)
    return _extended(sample, one.paraphrases)


def _normalized(question: str) -> str:
    return " ".join(question.casefold().split()).rstrip(" ?.")
