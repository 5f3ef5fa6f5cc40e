"""Training steps in a trace: round trip, replay and dump."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from support.trace_samples import INF, NAN, generation, same, step

from flexinspect.cli.main import main
from flexinspect.records.step import StepRecord
from flexinspect.records.training_step import AnomalyOrigin, ParameterGradient, TrainingStepRecord
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.reader import open_trace
from flexinspect.trace.replay import replay


def trained(number: int) -> TrainingStepRecord:
    gradients = (
        ParameterGradient("0.bias", NAN, NAN, 2, 1, "0"),
        ParameterGradient("0.weight", 1.5, None, group="0"),
        ParameterGradient("1.weight", INF, INF, 0, 3, "1"),
    )
    return TrainingStepRecord(
        *(NAN, "reported", (0.5, 1e-3), NAN, INF, 1.0),
        n_parameters=3,
        n_exploding=1,
        n_vanishing=2,
        n_dead=3,
        n_nonfinite=2,
        group_norms=(1.5, NAN),
        group_ratios=(1e-3, INF),
        gradients=gradients,
        anomaly_origin=AnomalyOrigin("module", "1", 2, "float16"),
        n_backward=4,
        forward_ms=1.5,
        backward_ms=2.5,
        optimizer_ms=0.5,
        data_ms=0.25,
        other_ms=0.125,
        scale=65536.0,
        is_skipped=True,
        device="cpu",
        autocast="float16",
        detail="basic",
    )


def plain(number: int) -> TrainingStepRecord:
    return TrainingStepRecord(float(number), "output", (0.1,))


def train_step(number: int, training: TrainingStepRecord) -> StepRecord:
    nothing = {"q_len": 0, "kv_before": 0, "kv_after": 0, "phase": "train", "logits": None}
    empty = {"tokens": (), "inputs": None, "calls": (), "builds": (), "layer_stats": ()}
    return small_step(number, **nothing, **empty, training=training)


def small_step(number: int, **changes: object) -> StepRecord:
    return step(number, masks=(), arrays=(), findings=(), events=(), **changes)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "a.flextrace"
    with TraceWriter.create(path, {}) as writer:
        writer.begin_generation(generation(segments=(), tokens=()))
        writer.write_step(train_step(0, trained(0)))
        writer.write_steps([train_step(n, plain(n)) for n in (1, 2)])
    return path


def test_a_training_step_comes_back_as_it_was(path: Path) -> None:
    with open_trace(path) as reader:
        assert same(reader.record(0, 0), train_step(0, trained(0)))
        assert same(reader.record(0, 2), train_step(2, plain(2)))
        assert reader.training_step(0, 3) is None


def test_many_steps_are_listed_without_their_gradients(path: Path) -> None:
    with open_trace(path) as reader:
        found = reader.training_steps(0)
        assert list(found) == [0, 1, 2]
        assert found[0].gradients == ()
        assert math.isnan(found[0].loss)
        assert list(reader.training_steps(0, start=1, stop=2)) == [1]


def test_offline_rules_see_the_training_step_that_they_saw_live(path: Path) -> None:
    with open_trace(path) as reader:
        first, *_ = replay(reader, 0)
        assert isinstance(first, StepRecord)
        assert same(first.training, trained(0))


def test_a_step_of_generation_has_no_training(tmp_path: Path) -> None:
    with TraceWriter.create(tmp_path / "b.flextrace", {}) as writer:
        writer.begin_generation(generation())
        writer.write_step(step(0))
    with open_trace(tmp_path / "b.flextrace") as reader:
        record = reader.record(0, 0)
        assert record is not None
        assert record.training is None


def test_both_dumps_have_the_training_step(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for args in ([str(path)], [str(path), "--json"]):
        assert main(["dump", *args]) == 0
    text, _, json_text = capsys.readouterr().out.partition("\n{")
    assert "training loss nan (reported)  lr 0.5 0.001  detail basic" in text
    assert "origin   module 1  affected 2" in text
    steps = json.loads("{" + json_text)["steps"]
    assert steps[0]["training"]["gradients"][1]["norm"] == 1.5
