"""Ranks tell each other their norms without waiting, and the first step that differs is named."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from flexinspect.records.training_step import TrainingStepRecord
from flexinspect_hooks.python_internals import torch_private
from flexinspect_hooks.training import live_ranks
from flexinspect_hooks.training.live_ranks import LiveRanks


class Store(dict[str, bytes]):
    """The part of a store of torch that is used."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        return self.keys() >= {*keys}


LOSSES = count(1.0)  # of batches that differ
GROUPS = ("embed", "layers.0")
Ranks = Callable[..., list[LiveRanks]]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    store = Store()
    now = {"rank": 0}
    monkeypatch.setattr(torch_private, "default_store", lambda: store)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: now["rank"])

    def make(*, is_replicated: bool = True) -> list[LiveRanks]:
        monkeypatch.setattr(
            live_ranks, "_wrapper_of", lambda model: model if is_replicated else None
        )
        monkeypatch.setattr(live_ranks, "_is_of_all_ranks", lambda wrapper: True)
        made = []
        for now["rank"] in range(2):
            made.append(LiveRanks(nn.Linear(1, 1), 0, lambda: GROUPS))
        return made

    return make


def step(norm: float, **fields: Any) -> TrainingStepRecord:
    facts = {"learning_rates": (0.1,), "total_norm": norm, "loss": next(LOSSES), **fields}
    return TrainingStepRecord(loss_source="output", **facts)


def test_equal_norms_are_no_finding_and_no_rank_waits(ranks: Ranks) -> None:
    first, second = ranks()
    assert [first.compare(n, step(1.0 + n)) for n in range(3)] == [None] * 3
    assert [second.compare(n, step(1.0 + n + 1e-6)) for n in range(3)] == [None] * 3
    assert first.finish() is None


def test_the_first_step_that_differs_is_named_on_both_ranks(ranks: Ranks) -> None:
    first, second = ranks()
    for n in range(3):
        assert first.compare(n, step(1.0)) is None
    assert second.compare(0, step(1.0)) is None
    found = second.compare(1, step(2.0))
    assert found is not None
    text, facts = found
    assert text == "The ranks part in step 1: the gradient norm is 2 on rank 1 and 1 on rank 0"
    assert facts["first_step"] == 1
    assert second.compare(2, step(3.0)) is None  # later steps only follow
    last = first.finish()
    assert last is not None
    assert last[1]["ranks"] == [0, 1]


def test_clipping_and_rates_of_one_rank_are_named(ranks: Ranks) -> None:
    first, second = ranks()
    first.compare(0, step(1.0, norm_before_clip=3.0))
    found = second.compare(0, step(3.0))
    assert found is not None
    assert found[0].endswith("is none on rank 1 and 3 on rank 0: only one of them clips")
    first, second = ranks()
    first.compare(1, step(1.0))
    found = second.compare(1, step(1.0, learning_rates=(0.2,)))
    assert found is not None
    assert "the learning rate is 0.2 on rank 1" in found[0]


def test_ranks_that_never_agreed_are_not_replicas(ranks: Ranks) -> None:
    first, second = ranks(is_replicated=False)
    for n in range(6):
        assert first.compare(n, step(1.0)) is None
        assert second.compare(n, step(2.0)) is None
    for n in range(6, 9):
        first.compare(n, step(1.0))
        assert second.compare(n, step(1.0)) is None


def test_weights_that_are_no_longer_the_same_are_named_although_the_norms_agree(
    ranks: Ranks,
) -> None:
    first, second = ranks()
    for n, weights in ((0, [7, 8]), (40, [7, 9]), (43, [1, 1]), (50, [7, 10])):
        assert first.compare(n, step(1.0), weights) is None
    assert second.compare(0, step(1.0), [7, 8]) is None
    assert second.compare(40, step(1.0), [7, 9]) is None
    found = second.compare(50, step(1.0), [7, 11])
    assert found is not None
    assert found[0].startswith("The ranks parted between steps 41 and 50: the weights of layers.0")
    assert (found[1]["check"], found[1]["first_step"]) == ("ranks-differ", 41)


def test_ranks_that_parted_in_a_known_step_are_said_to_have_parted_in_it(ranks: Ranks) -> None:
    first, second = ranks()
    for n, weights in ((0, [7, 8]), (1, [7, 10])):
        first.compare(n, step(1.0), weights)
    second.compare(0, step(1.0), [7, 8])
    found = second.compare(1, step(1.0), [7, 11])
    assert found is not None
    assert found[0].startswith("The ranks parted in step 1: the weights of layers.0")


def test_a_rank_that_was_first_reads_what_the_other_wrote_at_its_next_step(ranks: Ranks) -> None:
    first, second = ranks()
    assert first.compare(40, step(1.0)) is None
    assert second.compare(40, step(2.0)) is not None
    found = first.compare(41, step(1.0))
    assert found is not None
    assert found[1]["first_step"] == 40


def test_weights_that_never_were_the_same_are_meant(ranks: Ranks) -> None:
    first, second = ranks()
    for n in range(3):
        assert first.compare(n, step(1.0), [n, 1]) is None
        assert second.compare(n, step(1.0), [n, 2]) is None


def test_equal_losses_of_two_steps_are_the_same_data(ranks: Ranks) -> None:
    first, second = ranks()
    for n, loss in enumerate((2.0, 1.5)):
        assert first.compare(n, step(1.0, loss=loss)) is None
    assert second.compare(0, step(1.0, loss=2.0)) is None
    found = second.compare(1, step(1.0, loss=1.5))
    assert found is not None
    assert found[0].startswith("Rank 1 and rank 0 have the same loss to the last bit in steps 0 to")
    assert (found[1]["check"], found[1]["first_step"]) == ("same-data", 0)
    first.compare(2, step(1.0, loss=1.2))
    assert second.compare(2, step(1.0, loss=1.2)) is None  # said once


@pytest.mark.parametrize(
    ("source", "losses"),
    [("output", (1.0, 1.0)), ("reported", (2.0, 1.5)), ("output", (float("nan"),) * 2)],
)
def test_constant_averaged_or_unknown_losses_say_nothing_of_the_data(
    ranks: Ranks, source: str, losses: tuple[float, ...]
) -> None:
    first, second = ranks()
    for n, loss in enumerate(losses):
        record = TrainingStepRecord(loss, source, (0.1,), total_norm=1.0)
        assert first.compare(n, record) is None
        assert second.compare(n, record) is None
