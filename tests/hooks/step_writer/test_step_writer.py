"""Steps are written from plain data: their records, the rules, errors of hooks and of the trace."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support.traces import sample_generation, sample_step

from flexinspect.core.errors import TraceWriteError
from flexinspect.records.step import ArrayRecord, EventRecord, StepRecord
from flexinspect.rules.engine import RuleRunner
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.reader import open_trace
from flexinspect_hooks.step_writer.logits_records import LogitsRecords
from flexinspect_hooks.step_writer.step_draft import StepDraft, StepFacts
from flexinspect_hooks.step_writer.step_writer import ReducedStep, StepWriter
from flexinspect_hooks.step_writer.values import Values


def step_writer_of(sink: TraceWriter, found: list[Any] | None = None) -> StepWriter:
    """Return a writer that keeps what it reports."""
    reports: list[Any] = [] if found is None else found
    return StepWriter(
        sink,
        lambda maker, error, step: reports.append((maker, str(error), step.step)),
        lambda maker: reports.append((maker, "lost")),
    )


class Seen:
    """An evaluator that records which steps it evaluated."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def evaluate(self, record: StepRecord) -> None:
        self.steps.append(record.step)

    def evaluate_findings(self, findings: object, generation: int) -> None: ...


@pytest.mark.parametrize("corrupted", ["an array of objects", "a step written before"])
def test_a_step_that_cannot_be_stored_does_not_affect_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, corrupted: str
) -> None:
    steps = [sample_step(number) for number in range(4)]
    objects = (ArrayRecord("odd", np.array([object()])),)
    steps[2] = replace(steps[2], arrays=objects) if corrupted.endswith("objects") else steps[1]
    with TraceWriter.create(tmp_path / "t.flextrace", {}) as writer:
        writer.begin_generation(sample_generation(0))
        own, seen = step_writer_of(writer), Seen()
        own.evaluator = seen
        monkeypatch.setattr(own, "_records", lambda items: steps)
        with pytest.raises(TraceWriteError):
            own.write_steps([])
    assert (seen.steps, own.n_steps) == ([0, 1, 3], 3)
    with open_trace(tmp_path / "t.flextrace") as reader:
        assert [row.step for row in reader.steps(0)] == [0, 1, 3]


PROGRAM = """
import sys
from pathlib import Path

import numpy as np

from flexinspect.core import plugins
from flexinspect.records.step import GenerationEnd, GenerationRecord, MemoryRecord
from flexinspect.rules.engine import RuleRunner
from flexinspect.trace.file.writer import TraceWriter
from flexinspect_hooks.step_writer.logits_records import LogitsRecords
from flexinspect_hooks.step_writer.memory_records import MemoryRecords
from flexinspect_hooks.step_writer.step_draft import StepFacts
from flexinspect_hooks.step_writer.step_writer import ReducedStep, StepWriter

rules, failed = plugins.load_all(plugins.RULES)
assert not failed
live = [rule() for rule in rules.values() if not rule.offline_only]
with TraceWriter.create(Path(sys.argv[1]), {}) as sink:
    writer = StepWriter(sink, print, print)
    generation = GenerationRecord(0, "one", "", "", (), ())
    writer.begin_generation(generation)
    writer.begin_rules(generation, RuleRunner(live))
    logits, memory = LogitsRecords(str), MemoryRecords()
    row = np.linspace(0, 1, 100, dtype=np.float32)
    row[7] = np.nan
    for number in range(3):
        facts = StepFacts(0, number, "decode", 1, 4 + number, "basic", token_id=99)
        kept = ((logits, True), (memory, MemoryRecord(1000, 10, 0)))
        writer.write_steps([ReducedStep(facts, kept, {"logits.all": row})])
    writer.write(GenerationEnd(0, "finished", "", (), "length", 1.0))
assert writer.failure is None, writer.failure
print(sorted({"torch", "transformers"} & set(sys.modules)))
"""


def test_a_whole_trace_is_written_without_torch(tmp_path: Path) -> None:
    path = tmp_path / "t.flextrace"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path)], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr
    with open_trace(path) as reader:
        assert [row.step for row in reader.steps(0)] == [0, 1, 2]
        assert "numbers.nan" in {finding.id for finding in reader.findings()}


class Failing:
    """Fails at one step."""

    def record(self, step: StepFacts, kept: Any, values: Values, draft: StepDraft) -> None:
        if step.step == 1:
            raise ValueError("a broken hook")
        draft.add_event("seen", "A step was seen.", {})


class Late:
    """Finds its values modified."""

    def record(self, step: StepFacts, kept: Any, values: Values, draft: StepDraft) -> None:
        draft.are_values_lost = kept


def test_a_hook_that_fails_makes_no_further_records_and_others_do(tmp_path: Path) -> None:
    found: list[Any] = []
    failing, logits, late = Failing(), LogitsRecords(str), Late()
    row = np.linspace(0, 1, 100, dtype=np.float32)
    with TraceWriter.create(tmp_path / "t.flextrace", {}) as sink:
        writer = step_writer_of(sink, found)
        generation = sample_generation(0)
        writer.begin_generation(generation)
        writer.begin_rules(generation, RuleRunner([]))
        steps = [
            ReducedStep(
                StepFacts(0, number, "decode", 1, 4, "basic", token_id=5),
                ((failing, None), (logits, True), (late, number == 2)),
                {"logits.all": row},
            )
            for number in range(4)
        ]
        writer.write_steps(steps)
        assert writer.failure is None
    assert found == [(failing, "a broken hook", 1), (late, "lost")]
    with open_trace(tmp_path / "t.flextrace") as reader:
        assert [one.event.step for one in reader.events() if one.event.kind == "seen"] == [0]
        assert [len(reader.candidates(0, step)) for step in range(4)] == [10] * 4


def test_after_a_failure_nothing_is_written(tmp_path: Path) -> None:
    with TraceWriter.create(tmp_path / "t.flextrace", {}) as sink:
        writer = step_writer_of(sink)
        writer.begin_generation(sample_generation(0))

        def fail() -> None:
            raise RuntimeError("a bug")

        writer.guard(fail)
        assert writer.failure is not None
        assert "internal error: RuntimeError: a bug" in writer.failure.message
        called: list[int] = []
        writer.write(lambda: called.append(1))  # type: ignore[func-returns-value]
        writer.write(EventRecord("phase", "Late.", 1.0))
        writer.write_steps([])
    assert called == []
    with open_trace(tmp_path / "t.flextrace") as reader:
        assert [one for one in reader.events() if one.event.text == "Late."] == []
