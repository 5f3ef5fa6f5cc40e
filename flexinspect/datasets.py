"""Questions with their paraphrases: built-in sets, own files, own classes. No torch.

What `load` accepts:

* `demo`: the questions that ship with the demo model;
* `FILE.jsonl`: own questions, one JSON object per line (fields: `flexinspect.dataset_formats`);
* `webqa` and `myriadlama`: from the hub, through the extra `flexinspect[datasets]`;
* `webqa:PATH` and `myriadlama:PATH`: the same from a local .jsonl, .json or .csv file, or from a
  folder written by `Dataset.save_to_disk` (needs the extra);
* a name registered with `register_dataset` or in the entry-point group `flexinspect.datasets`;
* `package.module:Class`: the user's own class, see `ParaphraseDataset`.
"""

from __future__ import annotations

import difflib
import importlib
import random
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from itertools import islice
from pathlib import Path
from typing import Any

from flexinspect import dataset_formats as formats
from flexinspect.dataset_formats import Sample
from flexinspect.errors import DatasetError, FlexInspectError, UsageError, summarize_error
from flexinspect.processes import PACKAGE_DATA

__all__ = [
    "ParaPharaseDataset",
    "ParaphraseDataset",
    "Sample",
    "choose_paraphrases",
    "from_prompts",
    "load",
    "names",
    "register_dataset",
]

DEMO = PACKAGE_DATA / "demo" / "questions.jsonl"
ENTRY_POINTS = "flexinspect.datasets"
_BUILT_IN = ("demo", "webqa", "myriadlama")
_CLASS_SPEC = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_registered: dict[str, Callable[[], Any]] = {}


class ParaphraseDataset:
    """Base of a user's own dataset: override `load_dataset`.

    Any class with a `load_dataset()` and a constructor without arguments will do; this one adds
    batches. Give it to flexinspect as `--dataset package.module:Class`, by `register_dataset`, or
    as an entry point of the group `flexinspect.datasets`.
    """

    def load_dataset(self) -> Iterable[Sample | Mapping[str, Any]]:
        """Return the samples: `Sample` records or mappings with the fields of a JSONL line."""
        raise NotImplementedError(f"{type(self).__name__} must define load_dataset()")

    def get_dataloader(
        self, batch_size: int = 8, shuffle: bool = False, seed: int = 0
    ) -> Iterator[list[Any]]:
        """Yield batches of at most `batch_size`, in an order drawn from `seed` when shuffled."""
        if batch_size < 1:
            raise UsageError(f"A batch size of {batch_size} is not possible; use 1 or more.")
        samples = list(self.load_dataset())
        if shuffle:
            random.Random(seed).shuffle(samples)
        for start in range(0, len(samples), batch_size):
            yield self.collate_fn(samples[start : start + batch_size])

    def collate_fn(self, batch: Sequence[Any]) -> list[Any]:
        """Return what `get_dataloader` yields for a batch: by default the list of its samples."""
        return list(batch)


# The spelling of the project that inspired this one; classes written for it keep working.
ParaPharaseDataset = ParaphraseDataset


def register_dataset(name: str, dataset: Callable[[], Any]) -> None:
    """Make `--dataset name` mean `dataset()`, a class or function without arguments.

    Its result offers `load_dataset()`. Raises `UsageError` for the name of a built-in one.
    """
    if name in _BUILT_IN or ":" in name:
        raise UsageError(f"The dataset name {name!r} is taken or has a colon; choose another.")
    _registered[name] = dataset


def names() -> tuple[str, ...]:
    """Return every name that `load` knows: built in, registered, from entry points."""
    points = (point.name for point in entry_points(group=ENTRY_POINTS))
    return tuple(dict.fromkeys((*_BUILT_IN, *_registered, *points)))


def load(spec: str, *, max_samples: int | None = None) -> list[Sample]:
    """Return the samples that `spec` means, at most `max_samples` of them, in their own order.

    Raises `DatasetError` with file and line, or with the next step, when they cannot be had.
    """
    if max_samples is not None and max_samples < 1:
        raise UsageError(f"--max-samples {max_samples} is not possible; use 1 or more.")
    samples = list(islice(_samples(spec.strip(), max_samples), max_samples))
    if not samples:
        raise DatasetError(f"The dataset {spec} is empty.", hint="Give one with questions in it.")
    return samples


def _samples(spec: str, limit: int | None) -> Iterator[Sample]:
    name, _, path = spec.partition(":")
    if spec == "demo":
        return _demo()
    if name in formats.PUBLIC_DATASETS:
        rows = formats.local_rows(Path(path)) if path else formats.hub_rows(name)
        return formats.PUBLIC_DATASETS[name].samples(rows, limit)
    if spec in _registered:
        return _user_samples(spec, _registered[spec])
    point = next((p for p in entry_points(group=ENTRY_POINTS) if p.name == spec), None)
    if point is not None:
        return _user_samples(spec, lambda: point.load()())
    if _CLASS_SPEC.fullmatch(spec) and not Path(spec).exists():
        return _user_samples(spec, lambda: _import(spec)())
    if Path(spec).suffix or Path(spec).exists():
        return formats.plain_samples(formats.local_rows(Path(spec)))
    near = difflib.get_close_matches(spec, names(), n=2)
    ask = f"Did you mean {' or '.join(near)}? " if near else ""
    raise DatasetError(
        f"The dataset {spec!r} is unknown.",
        hint=f"{ask}Give {', '.join(names())}, a FILE.jsonl, or package.module:Class.",
    )


def _demo() -> Iterator[Sample]:
    if not DEMO.is_file():
        raise DatasetError(
            "The demo questions are missing from this installation.", hint="Reinstall flexinspect."
        )
    return formats.plain_samples(formats.local_rows(DEMO))


def _import(spec: str) -> Any:
    module_name, _, attribute = spec.partition(":")
    # A console script has no current folder on its path; the user's module usually lies there.
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # last: a file here must not replace an installed module
    module = importlib.import_module(module_name)
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise DatasetError(
            f"The module {module_name} ({module.__file__}) has no {attribute}.",
            hint="Check the name after the colon.",
        ) from None


def _user_samples(spec: str, make: Callable[[], Any]) -> Iterator[Sample]:
    # The user's code may fail in any way; the sentence says so, the cause keeps the traceback.
    try:
        dataset = make()
        items = iter(dataset.load_dataset())
    except FlexInspectError:
        raise
    except (Exception, SystemExit) as error:  # its module may be a script that ends itself
        raise _user_dataset_error(spec, error) from error
    return _iterate_user_samples(spec, items)


def _iterate_user_samples(spec: str, items: Iterator[Any]) -> Iterator[Sample]:
    number = 0
    while True:
        try:
            item = next(items)
        except StopIteration:
            return
        except Exception as error:
            raise _user_dataset_error(spec, error) from error
        number += 1
        if isinstance(item, Sample):
            yield item
        else:
            yield formats.sample_from(item, f"{spec}, sample {number}", f"{number}")


def _user_dataset_error(spec: str, error: BaseException) -> DatasetError:
    return DatasetError(
        f"The dataset {spec} failed: {summarize_error(error)}.",
        hint="It needs a constructor without arguments and load_dataset() that returns samples.",
    )


def choose_paraphrases(
    sample: Sample, num_paraphrases: int | None = None, indices: str | None = None
) -> Sample:
    """Return the sample with some of its paraphrases only.

    `indices` counts from 0 and keeps the order given: "0,2,1", "0-2" (both ends), or a mixture;
    `num_paraphrases` then keeps the first so many. Raises `DatasetError` when there are fewer, and
    `UsageError` for something that is no list of indices.
    """
    available = len(sample.paraphrases)
    chosen = list(range(available)) if indices is None else _parse_indices(indices)
    beyond = next((index for index in chosen if index >= available), None)
    if beyond is not None:
        raise DatasetError(
            f"The sample {sample.id} has {available} paraphrases, counted from 0: there is no "
            f"number {beyond}.",
            hint=f"Use --indices between 0 and {available - 1}.",
        )
    if num_paraphrases is not None and num_paraphrases < 1:
        raise UsageError(f"--num-paraphrases {num_paraphrases} is not possible; use 1 or more.")
    if num_paraphrases is not None and num_paraphrases > len(chosen):
        raise DatasetError(
            f"The sample {sample.id} has {len(chosen)} paraphrases to choose from, not "
            f"{num_paraphrases}.",
            hint=f"Use --num-paraphrases {len(chosen)} or less, or a dataset with more.",
        )
    paraphrases = tuple(sample.paraphrases[index] for index in chosen[:num_paraphrases])
    return Sample(sample.id, paraphrases, sample.answers, sample.meta)


def _parse_indices(text: str) -> list[int]:
    chosen: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", part)
        if match is None or (match[2] and int(match[2]) < int(match[1])):
            raise UsageError(
                f"--indices {text!r} is no list of paraphrases.",
                hint="Write numbers from 0 with commas, or ranges: 0,1,2 or 0-2.",
            )
        first, last = int(match[1]), int(match[2] or match[1])
        chosen.extend(range(first, min(last, first + 10_000) + 1))
    return chosen


def from_prompts(prompts: Sequence[str]) -> Sample:
    """Return the sample of `--prompt TEXT` given once per paraphrase; no answer is expected.

    Raises `DatasetError` when there is none, or an empty one.
    """
    if not prompts or not all(prompt.strip() for prompt in prompts):
        raise DatasetError(
            "A prompt is empty.", hint="Give --prompt TEXT, once per paraphrase, each with text."
        )
    return Sample("prompt", tuple(prompts), (), {"source": "--prompt"})
