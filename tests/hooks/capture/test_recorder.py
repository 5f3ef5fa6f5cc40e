"""What the writer thread passes to the rules of a branch."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.traces import sample_generation

from flexinspect.records.step import BranchRecord
from flexinspect.rules.engine import RuleRunner
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.reader import open_trace
from flexinspect_hooks.capture.recorder import Recorder
from flexinspect_hooks.step_writer import step_writer


@pytest.mark.parametrize("recomputed", [False, True])
def test_the_rules_of_a_branch_see_its_parents_unless_it_begins_with_the_whole_sequence(
    recomputed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replayed: list[tuple[int, int]] = []

    def replay(path: Path, generation: int, branch: int, rules: RuleRunner) -> list[object]:
        replayed.append((generation, branch))
        return []

    monkeypatch.setattr(step_writer, "replay_parents_from_path", replay)
    record = BranchRecord(0, 1, 0, 1, {"kind": "mask"}, recomputed=recomputed)
    with TraceWriter.create(tmp_path / "t.flextrace", {}) as writer:
        recorder = Recorder(writer)
        recorder.start()
        recorder.begin_generation(sample_generation(0))
        recorder.begin_rules(sample_generation(0), RuleRunner([]))
        recorder.begin_branch(record, sample_generation(0), RuleRunner([]))
        recorder.drain()
        recorder.stop()
    assert replayed == ([] if recomputed else [(0, 1)])


def test_the_writer_goes_on_after_a_call_that_fails_while_it_is_idle(tmp_path: Path) -> None:
    def fail() -> None:
        raise UnicodeDecodeError("utf-8", b"caf\xe9", 3, 4, "unexpected end of data")

    with TraceWriter.create(tmp_path / "t.flextrace", {}) as writer:
        recorder = Recorder(writer)
        recorder.start()
        recorder.when_idle(fail)
        recorder.drain()
        recorder.begin_generation(sample_generation(0))
        recorder.stop()
        assert recorder.failure is None
    with open_trace(tmp_path / "t.flextrace") as reader:
        assert [row.generation for row in reader.generations()] == [0]
