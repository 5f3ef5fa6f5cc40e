"""A dataset of texts and labels, tokenised and split into training, validation and test."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from flexinspect.errors import UsageError


class TokenizedDataset(Dataset[dict[str, Tensor]]):
    """Samples as dicts: what the tokenizer gave, and "labels"."""

    def __init__(self, columns: Mapping[str, Tensor]) -> None:
        self._columns = dict(columns)

    def __len__(self) -> int:
        """Return how many samples there are."""
        return len(self._columns["labels"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return one sample."""
        return {name: column[index] for name, column in self._columns.items()}

    def subset(self, indices: Sequence[int]) -> TokenizedDataset:
        """Return the samples of these numbers."""
        where = torch.tensor(list(indices), dtype=torch.long)
        return TokenizedDataset({name: column[where] for name, column in self._columns.items()})


@dataclass(frozen=True, slots=True)
class DatasetSplits:
    """The three parts of a dataset; `length` is the tokens of each padded sample."""

    name: str
    train: TokenizedDataset
    validation: TokenizedDataset
    test: TokenizedDataset
    length: int

    def sizes(self) -> dict[str, int]:
        """Return how many samples each part has."""
        parts = {"train": self.train, "validation": self.validation, "test": self.test}
        return {name: len(part) for name, part in parts.items()}


def make_splits(
    tokenizer: Callable[..., Mapping[str, Any]],
    texts: Sequence[str],
    labels: Sequence[int],
    name: str,
    *,
    ratios: tuple[float, float, float],
    seed: int,
) -> DatasetSplits:
    """Tokenise and split; the order is drawn from `seed`.

    Raises `UsageError` for no texts, for lengths that differ, and for ratios that are no split.
    """
    if not texts or len(texts) != len(labels):
        raise UsageError(
            f"The dataset {name} has {len(texts)} texts and {len(labels)} labels; it needs as many "
            "of each, and one at least."
        )
    if min(ratios) < 0 or abs(sum(ratios) - 1) > 1e-6:
        raise UsageError(f"The split ratios of {name} must add up to 1, and are {ratios}.")
    coded = tokenizer(list(texts), padding=True, truncation=True, return_tensors="pt")
    columns = {key: value for key, value in coded.items() if isinstance(value, Tensor)}
    whole = TokenizedDataset({**columns, "labels": torch.as_tensor(list(labels))})
    order = random.Random(seed).sample(range(len(texts)), len(texts))
    train, validation = (round(ratio * len(order)) for ratio in ratios[:2])
    length = max((column.shape[-1] for column in columns.values() if column.dim() == 2), default=0)
    return DatasetSplits(
        name,
        whole.subset(order[:train]),
        whole.subset(order[train : train + validation]),
        whole.subset(order[train + validation :]),
        length,
    )
