"""A recording that lacks something of our own doing says so, and is not taken for a whole one."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from flexinspect import protocol
from flexinspect.job import Job
from flexinspect.trace.reader import open_trace

CHILD = """
import sys
from flexinspect.errors import TraceWriteError
from flexinspect.trace.writer import TraceWriter
from flexinspect_hooks.process import main
planted, whole = {error}, TraceWriter.write_steps
def write_steps(self, records):
    if records[-1].step >= 2:
        raise planted
    whole(self, records)
TraceWriter.write_steps = write_steps
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("ValueError('planted')", "internal error: ValueError: planted"),
        ("TraceWriteError('planted')", "The trace is not whole: planted"),
    ],
)
def test_a_run_whose_records_are_lost_fails_with_the_reason(
    tmp_path: Path, error: str, said: str
) -> None:
    path = tmp_path / "run.flextrace"
    job = Job(out=str(path), model="demo", max_samples=1, max_new_tokens=6, control=False)
    process = subprocess.Popen(
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
        told = [facts for line in process.stdout if (facts := protocol.parse(line))]
        assert process.wait(30) == 1
    (message,) = [str(one["message"]) for one in told if one["kind"] == protocol.ERROR]
    assert said in message
    with open_trace(path) as reader:
        assert reader.state == "failed"
        assert reader.run()["reason"] == message
        assert [row.event.text for row in reader.events() if row.event.kind == "error"] == [message]
