"""Datasets of questions with paraphrases: built-in sets, files and classes of the user. No torch.

`load` accepts:

* `demo`: the questions that ship with the demo model;
* `FILE.jsonl`: questions of the user, one JSON object per line (fields below);
* `webqa` and `myriadlama`: from the hub, through the extra `flexinspect[datasets]`;
* `webqa:PATH` and `myriadlama:PATH`: the same from a local .jsonl, .json or .csv file, or from a
  folder written by `Dataset.save_to_disk` (needs the extra);
* a name registered with `register_dataset`, or in the group `ENTRY_POINTS` of entry points;
* `package.module:Class`: the user's own class, see `user_datasets.ParaphraseDataset`.

Files of the user hold one object per row: `paraphrases` (a list of texts), `question` (a text) or
both (the question is paraphrase 0); optional `answers` or `answer` (texts or a text) and `id` or
`uuid` (default: the row number). All other fields go to `meta`.

In a CSV file a list is written as JSON (`["a", "b"]`) or separated by bars (`a|b`).
"""

from __future__ import annotations

import csv
import importlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct

from flexinspect.core import plugins
from flexinspect.core.environment import PACKAGE_DATA, offline_if_unreachable, require_library
from flexinspect.core.errors import DatasetError, FlexInspectError, UsageError, summarize_error
from flexinspect.core.parsing import parse_json
from flexinspect.core.text import did_you_mean
from flexinspect.inputs.samples import Sample, check_object, check_texts, sample_from
from flexinspect.inputs.user_datasets import user_samples

DEMO = PACKAGE_DATA / "demo" / "questions.jsonl"
ENTRY_POINTS = "flexinspect.inputs.datasets"
_BUILT_IN = ("demo", "webqa", "myriadlama")
_CLASS_SPEC = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_registered: dict[str, Callable[[], Any]] = {}


def register_dataset(name: str, dataset: Callable[[], Any]) -> None:
    """Make `--dataset name` mean `dataset()`, a class or function without arguments.

    Its result has a method `load_dataset()`. Raises `UsageError` for a built-in name.
    """
    if name in _BUILT_IN or ":" in name:
        what = "is built in or has a colon; choose another name."
        raise UsageError(f"The dataset name {name!r} {what}")
    _registered[name] = dataset


def names() -> tuple[str, ...]:
    """Return all names that `load` accepts: built in, registered, and from entry points."""
    points = (point.name for point in plugins.registered(ENTRY_POINTS))
    return tuple(dict.fromkeys((*_BUILT_IN, *_registered, *points)))


def load(spec: str, *, max_samples: int | None = None) -> list[Sample]:
    """Return the samples of the dataset `spec`, at most `max_samples`, in their original order.

    Raises `DatasetError` if it cannot be loaded, with file and line or with what to do.
    """
    if max_samples is not None and max_samples < 1:
        raise UsageError(f"--max-samples {max_samples} is not possible; use 1 or more.")
    samples = list(islice(_samples(spec.strip(), max_samples), max_samples))
    if not samples:
        hint = "Use a dataset with at least one question."
        raise DatasetError(f"The dataset {spec} is empty.", hint=hint)
    return samples


def _samples(spec: str, limit: int | None) -> Iterator[Sample]:
    name, _, path = spec.partition(":")
    if name in PUBLIC_DATASETS:
        rows = local_rows(Path(path)) if path else hub_rows(name)
        return PUBLIC_DATASETS[name].samples(rows, limit)
    if spec in _registered:
        return _user_samples(spec, _registered[spec])
    point = next((p for p in plugins.registered(ENTRY_POINTS) if p.name == spec), None)
    if point is not None and spec != "demo":
        return _user_samples(spec, lambda: point.load()())
    if _CLASS_SPEC.fullmatch(spec) and not Path(spec).exists():
        return _user_samples(spec, lambda: _import(spec)())
    if spec == "demo" or Path(spec).suffix or Path(spec).exists():
        rows = local_rows(DEMO if spec == "demo" else Path(spec))
        return (sample_from(row.fields, row.where, str(row.number)) for row in rows)
    known = f"Give {', '.join(names())}, a FILE.jsonl, or package.module:Class."
    hint = f"{did_you_mean(spec, names())} {known}".lstrip()
    raise DatasetError(f"The dataset {spec!r} is unknown.", hint=hint)


def _import(spec: str) -> Any:
    module_name, _, attribute = spec.partition(":")
    # A console script does not have the current folder, with the user's module, on its path.
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # last: a file here must not replace an installed module
    module = importlib.import_module(module_name)
    try:
        return getattr(module, attribute)
    except AttributeError:
        what = f"The module {module_name} ({module.__file__}) has no {attribute}."
        raise DatasetError(what, hint="Check the name after the colon.") from None


def _user_samples(spec: str, make: Callable[[], Any]) -> Iterator[Sample]:
    """Yield the samples of a user's dataset, whose code may fail in any way."""
    try:
        yield from user_samples(spec, make())
    except FlexInspectError:
        raise
    except (Exception, SystemExit) as error:  # its module may be a script that calls sys.exit()
        hint = "It needs a constructor without arguments and a load_dataset() with samples."
        what = f"The dataset {spec} failed: {summarize_error(error)}."
        raise DatasetError(what, hint=hint) from error


class DatasetRow(Struct, frozen=True):
    """One stored object, and its location ("file:line") for messages."""

    where: str
    number: int
    fields: Mapping[str, Any]


def local_rows(path: Path) -> Iterator[DatasetRow]:
    """Iterate over the rows of a .jsonl, .json or .csv file, or of a `save_to_disk` folder.

    Raises `DatasetError` with file and line.
    """
    path = path.expanduser()
    if path.is_dir():
        yield from _library_rows(str(path), lambda library: library.load_from_disk(str(path)))
        return
    reader = {".jsonl": _jsonl, ".json": _json, ".csv": _csv}.get(path.suffix.lower())
    if not path.is_file():
        raise DatasetError(f"There is no dataset file {path}.", hint="Check the path.")
    if reader is None:
        what = f"The dataset file {path} has an unknown format {path.suffix!r}."
        raise DatasetError(what, hint="Use .jsonl, .json or .csv.")
    try:
        for row in reader(path):
            check_object(row.fields, row.where)
            yield row
    except UnicodeDecodeError as error:
        raise DatasetError(f"The dataset file {path} is not UTF-8 text.") from error
    except (OSError, csv.Error) as error:
        raise DatasetError(f"The dataset file {path} cannot be read: {error}.") from error


def _jsonl(path: Path) -> Iterator[DatasetRow]:
    example = '{"question": "...", "paraphrases": ["..."], "answers": ["..."]}'
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            where, hint = f"{path}:{number}", f"Each line is one object, such as {example}."
            if line.strip():
                yield DatasetRow(where, number, _parse_json(line, f"{where}: this line", hint))


def _parse_json(text: str | bytes, what: str, hint: str | None = None) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise DatasetError(f"{what} is not valid JSON ({error}).", hint=hint) from error


def _json(path: Path) -> Iterator[DatasetRow]:
    data = _parse_json(path.read_bytes(), f"{path}: this")
    if isinstance(data, dict):
        data = next((value for value in data.values() if isinstance(value, list)), None)
    if not isinstance(data, list):
        raise DatasetError(f"{path}: expected a list of objects, or an object that contains one.")
    for number, fields in enumerate(data, start=1):
        yield DatasetRow(f"{path}, entry {number}", number, fields)


def _csv(path: Path) -> Iterator[DatasetRow]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        for number, fields in enumerate(reader, start=1):
            row = {
                key: _parse_list_cell(value) if key in _LIST_COLUMNS else value
                for key, value in fields.items()
                if key and value
            }
            yield DatasetRow(f"{path}:{reader.line_num}", number, row)


_LIST_COLUMNS = (
    *("paraphrases", "answers", "templates", "obj_aliases", "object_aliases", "obj_ents"),
    *("manual_paraphrases", "auto_paraphrases"),
)
_QUOTED = re.compile(r"'((?:[^'\\]|\\.)*)'" + r'|"((?:[^"\\]|\\.)*)"')
_DESCRIPTION = re.compile(r'\(description (?:"((?:[^"\\]|\\.)*)"|([^()]*))\)')


def _parse_list_cell(text: str) -> Any:
    if not text.lstrip().startswith("["):
        return [part.strip() for part in text.split("|")]
    try:
        return parse_json(text)
    except ValueError:
        # pandas writes the repr of a list, or of an array, which has no commas.
        return [_unescape(single or double) for single, double in _QUOTED.findall(text)]


def _unescape(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text)


def webqa_samples(rows: Iterable[DatasetRow], _limit: int | None = None) -> Iterator[Sample]:
    """Convert rows of WebQuestions ("webqa") to samples.

    Accepted are the hub's fields `url`, `question`, `answers`, also with paraphrases as
    `paraphrase0`, `paraphrase1`, ... (written by the self-ensemble project) or as a list
    `paraphrases`; and the dataset's own JSON files with `utterance` and `targetValue`.
    """
    for row in rows:
        fields = dict(row.fields)
        if "utterance" in fields:
            fields["question"] = fields.pop("utterance")
            targets = _DESCRIPTION.findall(str(fields.pop("targetValue", "")))
            fields["answers"] = [_unescape(quoted) or bare.strip() for quoted, bare in targets]
        numbered = [key for key in fields if re.fullmatch(r"paraphrase\d+", key)]
        numbered.sort(key=lambda key: int(key.removeprefix("paraphrase")))
        if numbered:
            # Generated paraphrases can be empty; the others are still valid.
            fields["paraphrases"] = [*filter(None, map(fields.pop, numbered))]
        yield sample_from(fields, row.where, f"webqa-{row.number}")


def myriadlama_samples(rows: Iterable[DatasetRow], limit: int | None = None) -> Iterator[Sample]:
    """Convert rows of MyriadLAMA to samples: one per fact (subject and relation).

    Accepted are the hub's one row per fact and template (`uuid`, `rel_uri`, `sub_ent`,
    `obj_aliases`, `template` with [X] and [Y], `is_manual`); one row per fact with a list
    `templates`; and rows of the self-ensemble project with `manual_paraphrases`, `auto_paraphrases`
    and `answers`. [X] becomes the subject and [Y] becomes [MASK]; hand-written templates come
    first.
    """
    facts: dict[str, tuple[DatasetRow, list[str], list[str]]] = {}
    for row in rows:
        subject, relation = _subject_and_relation(row.fields)
        key = str(row.fields.get("uuid") or f"{subject}|{relation}")
        if key in facts or limit is None or len(facts) < limit:
            _, manual, automatic = facts.setdefault(key, (row, [], []))
            _add_paraphrases(row, subject, manual, automatic)
    for key, (row, manual, automatic) in facts.items():
        if not (manual or automatic):
            raise DatasetError(f"{row.where}: there is no template.")
        names = ("answers", "obj_aliases", "object_aliases", "obj_ents", "object", "obj_label")
        answers = _flatten(_first_field(row.fields, *names))
        if answers is None:
            what = f"{row.where}: there is neither `obj_aliases` nor another object field."
            raise DatasetError(what)
        subject, relation = _subject_and_relation(row.fields)
        yield Sample(
            id=key,
            paraphrases=tuple(dict.fromkeys((*manual, *automatic))),
            answers=tuple(dict.fromkeys(check_texts(answers, row.where, "answers"))),
            meta={"relation": relation, "subject": subject, "manual": len({*manual})},
        )


def _subject_and_relation(fields: Mapping[str, Any]) -> tuple[Any, Any]:
    subject = _first_field(fields, "sub_ent", "subject", "sub_label", "sub_uri")
    return subject, _first_field(fields, "rel_uri", "rel", "relation", "predicate_id")


def _add_paraphrases(
    row: DatasetRow, subject: Any, manual: list[str], automatic: list[str]
) -> None:
    """Add the prepared paraphrases of a row, or its templates filled with the subject."""
    fields, where = row.fields, row.where
    prepared = {"manual_paraphrases": manual, "auto_paraphrases": automatic}
    if not prepared.keys().isdisjoint(fields):
        for name, texts in prepared.items():
            texts += check_texts(fields.get(name) or [], where, name)
        return
    templates = _first_field(fields, "templates", "template")
    if templates is None or not isinstance(subject, str):
        what = f"{where}: `template` and `sub_ent` (or `subject`) are needed."
        raise DatasetError(what, hint=f"The fields are {', '.join(fields) or 'none'}.")
    texts = manual if str(fields.get("is_manual", True)).lower() in ("true", "1") else automatic
    for template in check_texts(templates, where, "template"):
        texts.append(template.replace("[X]", subject).replace("[Y]", "[MASK]"))


def _first_field(fields: Mapping[str, Any], *keys: str) -> Any:
    return next((fields[key] for key in keys if fields.get(key) not in (None, "")), None)


def _flatten(value: Any) -> Any:
    """Flatten a list of lists (one list of aliases per object)."""
    if isinstance(value, list | tuple) and any(isinstance(item, list | tuple) for item in value):
        return [text for item in value for text in ([item] if isinstance(item, str) else item)]
    return value


class PublicDataset(NamedTuple):
    """A public dataset: its hub id and split, and the conversion of its rows to samples."""

    repo_id: str
    split: str
    samples: Callable[[Iterable[DatasetRow], int | None], Iterator[Sample]]


PUBLIC_DATASETS: Mapping[str, PublicDataset] = {
    "webqa": PublicDataset("stanfordnlp/web_questions", "test", webqa_samples),
    "myriadlama": PublicDataset("iszhaoxin/MyriadLAMA", "train", myriadlama_samples),
}


def hub_rows(name: str) -> Iterator[DatasetRow]:
    """Iterate over the rows of a public dataset with the `datasets` library and its cache.

    Code of the dataset's repository is not run. Raises `DatasetError` without the library, and
    without network if the dataset is not cached.
    """
    repo_id, split, _ = PUBLIC_DATASETS[name]
    hint = (
        "Check the network (HF_ENDPOINT sets a mirror, HTTPS_PROXY a proxy), or download "
        f"the data elsewhere and use --dataset {name}:FILE.jsonl."
    )
    with offline_if_unreachable():
        return _library_rows(repo_id, lambda lib: lib.load_dataset(repo_id, split=split), hint)


def _library_rows(
    source: str, read: Callable[[Any], Iterable[Any]], hint: str | None = None
) -> Iterator[DatasetRow]:
    library = require_library("datasets", "datasets", f"The dataset {source}", DatasetError)
    try:
        items = read(library)
    except Exception as error:
        reason = f"The dataset {source} cannot be loaded: {summarize_error(error)}"
        raise DatasetError(reason, hint=hint) from error
    return (
        DatasetRow(f"{source}, row {number}", number, dict(fields))
        for number, fields in enumerate(items, start=1)
    )
