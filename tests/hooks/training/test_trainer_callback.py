"""A real `transformers.Trainer` with our callback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import VOCAB, make_model

import flexinspect
from flexinspect.core.errors import UsageError
from flexinspect_hooks.training.watch_training import TrainerCallback

pytest.importorskip("accelerate")


class Sentences(torch.utils.data.Dataset[dict[str, Any]]):
    """The same few ids, shifted."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = torch.arange(3, 19) + index
        return {"input_ids": ids % VOCAB, "labels": ids % VOCAB}


def trained(tmp_path: Path, callback: Any, data: Sentences | None = None, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    model = make_model("llama", initializer_range=0.02).train().requires_grad_(True)
    args = TrainingArguments(
        output_dir=str(tmp_path / "out"),
        max_steps=4,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    trainer = Trainer(
        model=model, args=args, train_dataset=data or Sentences(), callbacks=[callback]
    )
    trainer.train()
    return trainer


def test_a_trainer_is_recorded_by_three_lines(tmp_path: Path) -> None:
    callback = TrainerCallback(tmp_path / "a.flextrace")
    trainer = trained(tmp_path, callback, gradient_accumulation_steps=2)
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert callback.watch is not None
    with callback.watch.reader() as reader:
        steps = reader.training_steps(0)
        assert reader.state == "finished"
        assert reader.findings() == []
    assert list(steps) == [0, 1, 2, 3]
    for step, entry in zip(steps.values(), logged, strict=True):
        assert step.loss == pytest.approx(entry["loss"], abs=2e-3)
        assert step.learning_rates[0] == pytest.approx(entry["learning_rate"], abs=3e-4)
        assert (step.n_backward, step.loss_source, step.max_norm) == (2, "output", 1.0)
        assert step.norm_before_clip == pytest.approx(entry["grad_norm"], rel=1e-3)


def test_training_is_bit_equal_with_the_callback(tmp_path: Path) -> None:
    from transformers import TrainerCallback as Plain

    watched = trained(tmp_path, TrainerCallback(tmp_path / "a.flextrace", level="advanced"))
    plain = trained(tmp_path, Plain())
    for one, other in zip(watched.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_callback_is_a_public_name() -> None:
    assert flexinspect.TrainerCallback is TrainerCallback
    assert "watch_training" in flexinspect.__all__


def test_a_training_that_was_interrupted_ends_as_failed_when_the_next_begins(
    tmp_path: Path,
) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, second = (TrainerCallback(tmp_path / f"{name}.flextrace") for name in "ab")
    first.on_train_begin(None, None, None, model=model, optimizer=optimizer)
    second.on_train_begin(None, None, None, model=model, optimizer=optimizer)
    second.on_train_end(None, None, None)
    assert first.watch is not None
    assert second.watch is not None
    with first.watch.reader() as reader:
        assert reader.state == "failed"
    with second.watch.reader() as reader:
        assert reader.state == "finished"
    assert not model._forward_hooks


class FailsOnce(Sentences):
    """Does not fit into memory the first time."""

    def __init__(self) -> None:
        self.has_failed = False

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not self.has_failed:
            self.has_failed = True
            raise RuntimeError("CPU out of memory.")
        return super().__getitem__(index)


def test_a_training_that_tries_a_smaller_batch_gets_a_numbered_trace(tmp_path: Path) -> None:
    callback = TrainerCallback(tmp_path / "a.flextrace")
    trained(tmp_path, callback, data=FailsOnce(), auto_find_batch_size=True)
    assert callback.watch is not None
    assert callback.watch.path == tmp_path / "a-2.flextrace"
    with callback.watch.reader() as reader:
        assert (reader.state, len(reader.training_steps(0))) == ("finished", 4)
    with flexinspect.open_trace(tmp_path / "a.flextrace") as reader:
        assert reader.state == "failed"


def test_invalid_arguments_are_refused_before_the_training_begins() -> None:
    with pytest.raises(UsageError, match="level huge is unknown"):
        TrainerCallback(level="huge")
    with pytest.raises(UsageError, match=r"band is 0\.9"):
        TrainerCallback(band=0.9)
