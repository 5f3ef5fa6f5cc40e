"""Datasets that are classes of the user: their base class, and how their rows and batches are read.

A row is a `Sample`, a mapping with the fields of a JSONL line, or a tuple: (question, answers),
(paraphrases, answers) or (id, paraphrases, answers). Where the class defines `get_dataloader` or
`collate_fn`, samples come from its batches. A batch is

* a list of rows;
* a mapping of columns: `{"question": [...], "answers": [...]}`;
* a tuple of columns: (questions, answers), or (ids, answers, prompts) as the self-ensemble project
  has it, where `prompts[k][i]` is paraphrase k of sample i.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from flexinspect.core.errors import DatasetError, UsageError
from flexinspect.inputs.samples import Sample, sample_from

_COLUMNS = {2: ("question", "answers"), 3: ("id", "answers", "paraphrases")}
"""The columns of a batch that is a tuple, by their number."""


class ParaphraseDataset:
    """Base class of a user's dataset: override `load_dataset`.

    Any class with a `load_dataset()` and a constructor without arguments works; this one adds
    batches. Override `collate_fn` or `get_dataloader` to change what is read, for instance to
    return a `torch.utils.data.DataLoader` over `self.ds`. Pass the class to flexinspect as
    `--dataset package.module:Class`, with `register_dataset`, or as an entry point of the group
    `flexinspect.inputs.datasets`. `dataset` and `model` are names, for classes of the self-ensemble
    project that pass them.
    """

    def __init__(self, dataset: str = "", model: str = "") -> None:
        self.dataset, self.model = dataset, model

    def load_dataset(self) -> Iterable[Any]:
        """Return the rows: see the module's docstring for their forms."""
        raise NotImplementedError(f"{type(self).__name__} must define load_dataset()")

    @cached_property
    def ds(self) -> Sequence[Any]:
        """The rows of `load_dataset`, loaded once, in a form that has a length and an order."""
        rows: Any = self.load_dataset()
        is_indexed = hasattr(rows, "__getitem__") and hasattr(rows, "__len__")
        return rows if is_indexed else list(rows)

    def get_dataloader(
        self, batch_size: int = 8, shuffle: bool = False, seed: int = 0
    ) -> Iterable[Any]:
        """Yield batches of at most `batch_size` rows, shuffled with `seed` if `shuffle`."""
        if batch_size < 1:
            raise UsageError(f"A batch size of {batch_size} is not possible; use 1 or more.")
        return self._batches(batch_size, seed if shuffle else None)

    def _batches(self, batch_size: int, seed: int | None) -> Iterator[Any]:
        order = list(range(len(self.ds)))
        if seed is not None:
            random.Random(seed).shuffle(order)
        for start in range(0, len(order), batch_size):
            yield self.collate_fn([self.ds[row] for row in order[start : start + batch_size]])

    def collate_fn(self, batch: Sequence[Any]) -> Any:
        """Return the batch that `get_dataloader` yields: by default the list of rows."""
        return list(batch)


# The spelling in the self-ensemble project, so that classes written for it keep working.
ParaPharaseDataset = ParaphraseDataset


def user_samples(name: str, dataset: Any) -> Iterator[Sample]:
    """Yield the samples of a user's dataset. Raises `DatasetError` for a row of another form."""
    rows = _batched_rows(name, dataset) if _has_own_batches(dataset) else dataset.load_dataset()
    for number, row in enumerate(rows, start=1):
        where = f"{name}, sample {number}"
        yield row if isinstance(row, Sample) else sample_from(_fields(row), where, str(number))


def _has_own_batches(dataset: Any) -> bool:
    """Whether the class of a dataset defines how it is batched."""
    kind, base = type(dataset), ParaphraseDataset
    own = (getattr(kind, name, None) for name in ("get_dataloader", "collate_fn"))
    return any(own) and (
        not isinstance(dataset, base)
        or kind.get_dataloader is not base.get_dataloader
        or kind.collate_fn is not base.collate_fn
    )


def _batched_rows(name: str, dataset: Any) -> Iterator[Any]:
    if not hasattr(dataset, "get_dataloader"):
        what = f"The dataset {name} has a collate_fn() and no get_dataloader() that calls it."
        raise DatasetError(what, hint="Derive it from flexinspect.ParaPharaseDataset.")
    for number, batch in enumerate(dataset.get_dataloader(), start=1):
        yield from _rows_of_batch(batch, f"{name}, batch {number}")


def _rows_of_batch(batch: Any, where: str) -> Iterable[Any]:
    """Return the rows of a batch. Raises `DatasetError` for columns of different lengths."""
    if isinstance(batch, tuple) and not hasattr(batch, "_fields"):
        if (names := _COLUMNS.get(len(batch))) is None:
            what = f"{where}: a tuple of {len(batch)} columns is neither (questions, answers) nor "
            raise DatasetError(f"{what}(ids, answers, prompts).", hint="Return a list of rows.")
        batch = dict(zip(names, batch, strict=True))
        if "paraphrases" in batch:
            batch["paraphrases"] = _transposed(batch["paraphrases"], len(batch["id"]), where)
    if not isinstance(batch, Mapping):
        return list(batch)
    lengths = {str(name): len(column) for name, column in batch.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise DatasetError(f"{where}: its columns have different lengths: {listed}.")
    values = zip(*batch.values(), strict=True)
    return [dict(zip(batch, row, strict=True)) for row in values]


def _transposed(prompts: Sequence[Sequence[str]], n: int, where: str) -> list[list[str]]:
    """Return the paraphrases of each of `n` samples, from the samples of each paraphrase."""
    wrong = next((k for k, texts in enumerate(prompts) if len(texts) != n), None)
    if wrong is not None:
        what = f"{where}: prompts[{wrong}] has {len(prompts[wrong])} texts for {n} samples."
        raise DatasetError(what, hint="prompts[k][i] is paraphrase k of sample i.")
    return [[texts[i] for texts in prompts if texts[i]] for i in range(n)]


def _fields(row: Any) -> Any:
    """Return the fields of a row that is a tuple; any other row unchanged."""
    if not isinstance(row, tuple):
        return row
    if hasattr(row, "_asdict"):
        return row._asdict()
    names = {1: ("paraphrases",), 2: ("paraphrases", "answers")}
    chosen = names.get(len(row), ("id", "paraphrases", "answers"))
    return dict(zip(chosen, row, strict=True)) if len(row) == len(chosen) else row
