"""A cached document that is continued by several questions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.planting import of, planted
from support.tiny import ids, make_model
from transformers import DynamicCache

from flexinspect.records.finding import Finding

DOCUMENT = ids(12, 1)
QUESTIONS = [ids(4, seed) for seed in (5, 6, 7, 8)]


def ask(folder: Path, lengths: list[int], *, feeds_again: bool = False) -> list[Finding]:
    """Return the findings of questions behind the first `lengths` keys of a document."""
    model = make_model("llama")

    def run() -> None:
        cache = DynamicCache(config=model.config)
        model(torch.tensor([DOCUMENT]), past_key_values=cache)
        for question, length in zip(QUESTIONS, lengths, strict=True):
            if cache.get_seq_length() > length:
                cache.crop(length - cache.get_seq_length())
            rows = [*DOCUMENT[length:], *question] if feeds_again else list(question)
            rows_now = torch.tensor([rows])
            for _ in range(3):
                logits = model(rows_now, past_key_values=cache).logits
                rows_now = logits[:, -1:].argmax(-1)

    with torch.no_grad():
        return of(planted(folder, model, run), "cache.prefix-shrinks")


@pytest.mark.parametrize("loss", [1, 2])
def test_a_prefix_that_loses_keys_each_time_is_reported(tmp_path: Path, loss: int) -> None:
    (finding,) = ask(tmp_path, [12 - loss * n for n in range(4)])
    assert finding.evidence["loss"] == loss
    assert finding.evidence["lengths"] == [12, 12 - loss, 12 - 2 * loss]
    assert "A cached prefix gets shorter by" in finding.sentence


@pytest.mark.parametrize("lengths", [[12, 12, 12, 12], [12, 11, 11, 11], [12, 9, 7, 2]])
def test_prefixes_that_stay_or_are_cut_at_other_places_are_clean(
    tmp_path: Path, lengths: list[int]
) -> None:
    assert ask(tmp_path, lengths) == []


def test_tokens_that_are_fed_again_are_not_lost(tmp_path: Path) -> None:
    assert ask(tmp_path, [12, 11, 10, 9], feeds_again=True) == []
