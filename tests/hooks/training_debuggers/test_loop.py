"""`TrainingLoop`: it trains, validates, stops, and accepts the usual kinds of batches."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from flexinspect import DebugSwitches, EarlyStopping, TrainingLoop
from flexinspect.core.errors import UsageError


def loop_of(model: nn.Module, loss_fn: Callable[..., Any] | None, **options: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return TrainingLoop(model, optimizer, loss_fn, switches=DebugSwitches(), **options)


def pairs(n: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(n):
        inputs = torch.randn(8, 4, generator=generator)
        found.append((inputs, (inputs[:, 0] > 0).long()))
    return found


def test_it_learns_and_says_loss_and_accuracy(classifier: nn.Module) -> None:
    loop = loop_of(classifier, nn.functional.cross_entropy)
    epochs = [loop.train_epoch(pairs(), pairs(2)) for _ in range(40)]
    assert (epochs[0].batches, epochs[0].samples) == (4, 32)
    assert epochs[-1].loss < 0.5 * epochs[0].loss
    assert epochs[-1].validation.accuracy >= 0.9
    assert (epochs[-1].validation.batches, epochs[-1].validation.samples) == (2, 16)
    assert loop.debugger.get_training_summary().total_steps == 160


def test_it_trains_as_a_plain_loop_does_bit_by_bit(classifier: nn.Module) -> None:
    twin = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    for one, other in zip(twin.parameters(), classifier.parameters(), strict=True):
        one.data = other.data.clone()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for inputs, labels in pairs():
        optimizer.zero_grad()
        nn.functional.cross_entropy(twin(inputs), labels).backward()
        optimizer.step()
    loop_of(classifier, nn.functional.cross_entropy, level="extreme").train_epoch(pairs())
    for one, other in zip(twin.parameters(), classifier.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_dict_with_labels_goes_with_a_loss_function() -> None:
    class ByName(nn.Linear):
        def forward(self, inputs: Any) -> Any:
            return super().forward(inputs)

    loop = loop_of(ByName(4, 2), nn.functional.cross_entropy)
    batches = [{"inputs": inputs, "labels": labels} for inputs, labels in pairs()]
    assert loop.train_epoch(batches).samples == 32


class WithLoss(nn.Linear):
    """Returns a dict with its loss and logits, as many models outside of transformers do."""

    def forward(self, inputs: Any, labels: Any = None) -> Any:
        logits = super().forward(inputs)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


def test_a_model_may_return_a_dict_with_its_loss() -> None:
    torch.manual_seed(0)
    loop = loop_of(WithLoss(4, 2), None)
    batches = [{"inputs": inputs, "labels": labels} for inputs, labels in pairs()]
    epochs = [loop.train_epoch(batches, batches[:2]) for _ in range(40)]
    assert epochs[-1].loss < 0.7 * epochs[0].loss
    assert epochs[-1].validation.accuracy >= 0.9
    loop = loop_of(WithLoss(4, 2), nn.functional.cross_entropy)  # the function gets the logits
    assert loop.train_epoch(pairs()).samples == 32


def test_a_model_without_a_loss_is_refused_with_what_it_may_return() -> None:
    loop = loop_of(WithLoss(4, 2), None)
    with pytest.raises(UsageError, match=r'neither \.loss nor \["loss"\], nor a single number'):
        loop.train_epoch([{"inputs": pairs()[0][0]}])


def test_a_corrupted_batch_is_an_anomaly_of_the_epoch(classifier: nn.Module) -> None:
    loop = loop_of(classifier, nn.functional.mse_loss)
    good, bad = (torch.ones(2, 4), torch.zeros(2, 2)), (torch.ones(2, 4), torch.full((2, 2), 1e9))
    assert loop.train_epoch([good, good]).anomaly_steps == 0
    assert loop.train_epoch([good, bad]).anomaly_steps == 1


def test_validation_leaves_mode_weights_and_gradients(classifier: nn.Module) -> None:
    loop = loop_of(classifier, nn.functional.cross_entropy)
    classifier.train()
    info = loop.evaluate_model(pairs(1))
    assert classifier.training
    assert all(one.grad is None for one in classifier.parameters())
    expected = nn.functional.cross_entropy(classifier(pairs(1)[0][0]), pairs(1)[0][1])
    assert info.loss == pytest.approx(expected.item())


def test_early_stopping_waits_for_a_better_value() -> None:
    stopping = EarlyStopping(patience=2, min_delta=0.1)
    assert [stopping.step(value) for value in (1.0, 0.95, 0.8, 0.79, 0.75)] == [
        False,
        False,
        False,
        False,
        True,
    ]
    assert stopping.best == 0.8


def test_a_scheduler_steps_per_epoch_or_per_batch(classifier: nn.Module) -> None:
    for each, rate in (("epoch", 0.05), ("batch", 0.1 / 16)):
        optimizer = torch.optim.SGD(classifier.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        loop = TrainingLoop(
            classifier,
            optimizer,
            nn.functional.cross_entropy,
            scheduler=scheduler,
            scheduler_each=each,
            switches=DebugSwitches(),
        )
        loop.train_epoch(pairs())
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)


def test_a_dataset_is_split_once_each_and_the_same_for_a_seed(classifier: nn.Module) -> None:
    def tokenizer(texts: list[str], **options: Any) -> dict[str, Any]:
        return {"inputs": torch.tensor([[float(text)] for text in texts])}

    loop = loop_of(classifier, None, tokenizer=tokenizer)
    texts = [str(number) for number in range(30)]
    first, second = (
        loop.create_training_dataset(texts, list(range(30)), "numbers", seed=4) for _ in range(2)
    )
    assert first.sizes() == {"train": 24, "validation": 3, "test": 3}
    parts = (first.train, first.validation, first.test)
    samples = [part[index] for part in parts for index in range(len(part))]
    assert sorted(int(sample["labels"]) for sample in samples) == list(range(30))
    assert all(int(sample["labels"]) == int(sample["inputs"]) for sample in samples)
    assert [int(second.train[i]["labels"]) for i in range(24)] == [
        int(first.train[i]["labels"]) for i in range(24)
    ]


def test_invalid_arguments_are_refused(classifier: nn.Module) -> None:
    loop = loop_of(classifier, None, tokenizer=lambda texts, **options: {})
    with pytest.raises(UsageError, match=r"returned neither \.loss"):
        loop.train_epoch([torch.ones(1, 4)])
    with pytest.raises(UsageError, match="2 texts and 1 labels"):
        loop.create_training_dataset(["a", "b"], [1])
    with pytest.raises(UsageError, match="must add up to 1"):
        loop.create_training_dataset(["a"], [1], ratios=(0.5, 0.1, 0.1))
    with pytest.raises(UsageError, match="needs TrainingLoop"):
        loop_of(classifier, None).create_training_dataset(["a"], [1])
    with pytest.raises(UsageError, match='"epoch" or "batch"'):
        loop_of(classifier, None, scheduler_each="week")
    with pytest.raises(UsageError, match="pair"):
        loop_of(classifier, nn.functional.mse_loss).train_epoch([torch.ones(1, 4)])


def test_evaluation_leaves_each_module_in_its_own_mode() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    model.train()
    model[1].eval()
    loop = loop_of(model, nn.functional.mse_loss)
    loop.evaluate_model([(torch.ones(4, 2), torch.ones(4, 2))])
    assert model[0].training
    assert not model[1].training


def test_a_condition_that_raises_turns_its_switch_off_and_training_continues() -> None:
    loop = loop_of(nn.Linear(2, 2), nn.functional.mse_loss)
    loop.enable_debugging("forward_pass", when=lambda step: 1 // step > 0)
    info = loop.train_epoch([(torch.ones(4, 2), torch.ones(4, 2))])
    assert info.batches == 1
    assert not any(loop.get_debugging_status().values())


@pytest.mark.parametrize("each", ["batch", "epoch"])
def test_all_conditions_get_the_number_of_the_step_in_the_run(each: str) -> None:
    model = nn.Linear(2, 2)
    loop = loop_of(model, nn.functional.mse_loss, scheduler_each=each)
    loop._scheduler = torch.optim.lr_scheduler.StepLR(loop.optimizer, step_size=1)
    requested: dict[str, list[int]] = {}

    def asks(switch: str) -> Callable[[int], bool]:
        return lambda step: bool(requested.setdefault(switch, []).append(step))

    switches = ["data_loading", "forward_pass", "gradient_norms", "lr_scheduling"]
    for switch in switches:
        loop.enable_debugging(switch, when=asks(switch))
    for _ in range(2):
        loop.train_epoch([(torch.ones(4, 2), torch.ones(4, 2))] * 3)
    steps = list(range(6))
    assert requested == dict.fromkeys(switches[:3], steps) | {
        "lr_scheduling": steps if each == "batch" else [2, 5]
    }


@pytest.mark.parametrize("is_said", [False, True])
def test_a_learning_rate_that_the_optimizer_does_not_report_stops_no_training(
    is_said: bool,
) -> None:
    class Relative(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            pass

    model, scheduled = nn.Linear(2, 2), []
    optimizer = Relative(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = None
    scheduler = SimpleNamespace(step=lambda: scheduled.append(1), optimizer=optimizer)
    loop = TrainingLoop(
        model,
        optimizer,
        nn.functional.mse_loss,
        scheduler=scheduler,
        scheduler_each="batch",
        switches=DebugSwitches(debug_lr_scheduling=is_said),
    )
    assert loop.train_epoch([(torch.ones(4, 2), torch.ones(4, 2))] * 2).batches == 2
    assert len(scheduled) == 2


def test_an_exception_ends_the_profile_that_a_switch_began() -> None:
    def batches() -> Any:
        yield torch.ones(4, 2), torch.ones(4, 2)
        raise RuntimeError("bad batch")

    loop = loop_of(nn.Linear(2, 2), nn.functional.mse_loss)
    loop.enable_debugging("autograd_profiler")
    with pytest.raises(RuntimeError, match="bad batch"):
        loop.train_epoch(batches())
    assert not torch.autograd._profiler_enabled()
