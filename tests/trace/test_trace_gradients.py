"""Gradients in a trace: written after their step, read back complete, printed by the dump."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support.trace_samples import INF, NAN, generation, step, write

from flexinspect.core.errors import TraceError
from flexinspect.records.step import GradientRecord, GradientStat
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.reader import open_trace, steps_with_gradients
from flexinspect.trace.replay import replay
from flexinspect.trace.trace_dump import DumpSelection, dump_json, dump_text


def gradients(**changes: Any) -> GradientRecord:
    made = GradientRecord(
        *(1, 2, 5, "margin", 0.25, 1.5, "dense reference", 2e-7, 1e-3, 12.5),
        runner_up_id=6,
        n_unreached=2,
        anomaly="Function 'SqrtBackward0' returned nan values\nat line 3",
        stats=(
            GradientStat("head.weight", 2.0, 1.0, 0, 0),
            GradientStat("layers.0.q.weight", INF, INF, 0, 3, 0, "q"),
            GradientStat("layers.1.k.weight", NAN, NAN, 4, 0, 1, "k"),
        ),
        tokens=np.arange(10, dtype=np.float32).reshape(2, 5),
        layers=np.array([1.0, NAN], np.float32),
    )
    return replace(made, **changes)


def written(path: Path) -> Path:
    """Write four steps, then gradients of step 2, and a failed check of step 3."""
    with TraceWriter.create(path, {}) as writer:
        writer.begin_generation(generation(1))
        for number in range(4):
            writer.write_step(step(number, 1))
        writer.write_gradients(gradients())
        writer.write_gradients(
            gradients(step=3, logits_error=NAN, stats=(), tokens=None, layers=None)
        )
    return path


def test_gradients_come_back_as_they_were_written_after_their_step(tmp_path: Path) -> None:
    with open_trace(written(tmp_path / "t.flextrace")) as reader:
        found, red = reader.gradients(1, 2), reader.gradients(1, 3)
        assert reader.gradients(1, 1) is None
        assert steps_with_gradients(reader, 1) == [2, 3]
        assert reader.array(1, 2, "grads.layers") is not None
        assert reader.array(1, 2, "q", 0) is not None
    assert found is not None
    assert red is not None
    assert found.matches_recorded
    assert (red.matches_recorded, red.stats, red.tokens) == (False, (), None)
    wide = {"stats": (), "tokens": None, "layers": None}
    assert replace(found, **wide) == replace(gradients(), **wide)
    assert repr(found.stats) == repr(gradients().stats)
    for name in ("tokens", "layers"):
        np.testing.assert_array_equal(getattr(found, name), getattr(gradients(), name))


def test_a_trace_without_the_tables_of_gradients_has_none(tmp_path: Path) -> None:
    finished = write(tmp_path / "old.flextrace", n_generations=2, n_steps=3)
    with closing(sqlite3.connect(finished)) as db:
        db.execute("DROP TABLE gradients")
        db.commit()
    with open_trace(finished) as reader:
        assert reader.gradients(1, 2) is None
        assert steps_with_gradients(reader, 1) == []
        assert reader.record(1, 2) is not None


def test_gradients_are_read_without_the_other_arrays_of_their_step(tmp_path: Path) -> None:
    path = written(tmp_path / "t.flextrace")
    with closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE arrays SET checksum = checksum + 1 WHERE stream NOT LIKE 'grads.%'")
        db.commit()
    with open_trace(path) as reader:
        with pytest.raises(TraceError, match="damaged"):
            reader.array_records(1, 2)
        found = reader.gradients(1, 2)
    assert found is not None
    assert found.tokens is not None


def test_a_replay_yields_gradients_after_all_steps(tmp_path: Path) -> None:
    with open_trace(written(tmp_path / "t.flextrace")) as reader:
        kinds = [(type(one).__name__, getattr(one, "step", None)) for one in replay(reader, 1)]
    mine = [kind for kind in kinds if kind[0] in ("StepRecord", "GradientRecord")]
    steps = [("StepRecord", number) for number in range(4)]
    assert mine == [*steps, ("GradientRecord", 2), ("GradientRecord", 3)]


def test_the_dump_has_gradients(tmp_path: Path) -> None:
    with open_trace(written(tmp_path / "t.flextrace")) as reader:
        text = "".join(dump_text(DumpSelection(reader, 1, 2)))
        (found,) = json.loads("".join(dump_json(DumpSelection(reader, 1, 2))))["steps"]
        (without,) = json.loads("".join(dump_json(DumpSelection(reader, 1, 1))))["steps"]
    assert "gradients  of the margin of 5 to 6, 0.25  dense reference  error 2e-07 of 0.001" in text
    assert "layers.1.k.weight" in text
    assert found["gradients"]["runner_up_id"] == 6
    assert found["gradients"]["parameters"][2]["norm"] == "NaN"
    assert without["gradients"] is None
