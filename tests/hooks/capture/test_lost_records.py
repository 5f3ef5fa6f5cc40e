"""A recording with missing records is reported as incomplete."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from support.tiny import ids, make_model
from support.traces import sample_generation, sample_step
from support.warm_python import Popen

import flexinspect
from flexinspect.core.errors import TraceWriteError
from flexinspect.records import protocol
from flexinspect.records.job import Job
from flexinspect.records.step import ArrayRecord
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.reader import open_trace
from flexinspect_hooks.capture.recorder import Recorder, recording_error

CHILD = """
import sys
from flexinspect.core.errors import TraceWriteError
from flexinspect.trace.file.writer import TraceWriter
from flexinspect_hooks.ensemble.capture_process import main
planted, whole = {error}, TraceWriter.write_steps
def write_steps(self, records):
    if records[-1].step >= 2:
        raise planted
    whole(self, records)
TraceWriter.write_steps = write_steps
sys.exit(main())
"""


def test_the_error_names_the_first_lost_record_and_counts_all(
    tmp_path: Path,
) -> None:
    objects = (ArrayRecord("odd", np.array([object()])),)
    corrupted = [replace(sample_step(1), arrays=objects), sample_step(0)]
    with TraceWriter.create(tmp_path / "t.flextrace", {}) as writer:
        recorder = Recorder(writer)
        recorder.start()
        recorder.put(lambda: writer.begin_generation(sample_generation(0)))
        recorder.put(lambda: writer.write_steps([sample_step(0), *corrupted]))
        recorder.stop()
        assert recorder.failure is None
        failure = recording_error(recorder, writer)
        assert failure is not None
        assert failure.message.startswith(
            "The trace is incomplete: 2 records could not be stored. The first error: "
            "An array of object cannot be recorded"
        )


def test_a_watch_reports_lost_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(self: TraceWriter, records: object) -> None:
        raise TraceWriteError("planted")

    monkeypatch.setattr(TraceWriter, "write_steps", refuse)
    model = make_model("llama")
    with flexinspect.watch(model, out=tmp_path / "t.flextrace"):
        model(torch.tensor([ids(4, 1)]))
    assert "The trace is incomplete: planted" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("ValueError('planted')", "internal error: ValueError: planted"),
        ("TraceWriteError('planted')", "The trace is incomplete: planted"),
    ],
)
def test_a_run_whose_records_are_lost_fails_with_the_reason(
    tmp_path: Path, error: str, expected: str
) -> None:
    path = tmp_path / "run.flextrace"
    job = Job(out=str(path), model="demo", max_samples=1, max_new_tokens=6, control=False)
    process = Popen(
        [sys.executable, "-c", CHILD.format(error=error)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with closing(process.stdin), closing(process.stdout):
        process.stdin.write(job.to_json() + "\n")
        process.stdin.flush()
        messages = [facts for line in process.stdout if (facts := protocol.parse_message(line))]
        assert process.wait(30) == 1
    (message,) = [str(one["message"]) for one in messages if one["kind"] == protocol.ERROR]
    assert expected in message
    with open_trace(path) as reader:
        assert reader.state == "failed"
        assert reader.run()["reason"] == message
        assert [row.event.text for row in reader.events() if row.event.kind == "error"] == [message]
