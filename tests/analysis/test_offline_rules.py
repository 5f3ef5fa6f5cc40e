"""Rules that run offline on a trace: what they receive, and that each runs once."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support.rules import Broken, Late, Slow
from support.traces import RUN, SEGMENTS, sample_step, sample_trace

from flexinspect.analysis import offline_rules as reviewing
from flexinspect.analysis.offline_rules import review
from flexinspect.core.errors import TraceWriteError
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.step import (
    STANDALONE_CALLS,
    CallRecord,
    EventRecord,
    GenerationEnd,
    GenerationRecord,
    MaskRecord,
    StepRecord,
)
from flexinspect.rules.masks.block_tables import BlockTablesRule
from flexinspect.trace.file import writer as append
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.reader import STEPS_PER_READ, TraceReader, open_trace
from flexinspect.trace.replay import replay

DEAD = {**RUN, "pid": 2**22 + 7, "started_at": 1000.0}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return sample_trace(tmp_path / "sample.flextrace")


@pytest.fixture
def reader(path: Path) -> Iterator[TraceReader]:
    with open_trace(path) as reader:
        yield reader


def findings_of(path: Path, *ids: str) -> list[Finding]:
    with open_trace(path) as reader:
        return [finding for finding in reader.findings() if finding.id in ids]


def test_a_replayed_step_is_the_record_without_its_findings(tmp_path: Path) -> None:
    path = sample_trace(tmp_path / "long.flextrace", steps=2 * STEPS_PER_READ + 3)
    with open_trace(path) as reader:
        seen = list(replay(reader, 0, ["*"]))
        assert len(seen) == 2 * STEPS_PER_READ + 3
        for number, step in enumerate(seen):
            record = reader.record(0, number)
            assert record is not None
            assert repr(replace(record, findings=())) == repr(step)


def test_arrays_that_no_rule_uses_are_left_out_but_masks_are_loaded(reader: TraceReader) -> None:
    first = next(iter(replay(reader, 0)))
    assert first.arrays == ()  # type: ignore[union-attr]
    assert first.masks[0].cells is not None  # type: ignore[union-attr]


def test_findings_of_an_offline_rule_are_stored_and_series_are_counted(path: Path) -> None:
    with open_trace(path) as reader:
        done = review(reader, [Slow()])
    assert (done.n_rules, done.unstored, done.note) == (1, (), "")
    found = findings_of(path, "slow.long-token")
    assert [(f.generation, f.step, f.positions) for f in found] == [(0, 0, (13,)), (1, 0, (13,))]
    assert [(f.times, f.last_step) for f in found] == [(3, 3), (3, 3)]
    assert found[1].query.endswith("generation = 1 AND step = 0")


def test_no_rule_runs_twice(path: Path) -> None:
    for n_rules in (2, 0):
        with open_trace(path) as reader:
            assert review(reader, [Slow(), Broken()]).n_rules == n_rules
    assert len(findings_of(path, "slow.long-token")) == 2


def test_two_reviews_at_once_store_one(path: Path) -> None:
    with open_trace(path) as first, open_trace(path) as second:
        held = review(first, [Slow()], store=False)
        assert len(held.unstored) == 2
        review(second, [Slow()])
        append.append_reviews(path, held.unstored)
    assert len(findings_of(path, "slow.long-token")) == 2


def test_a_rule_that_fails_is_off_and_the_others_continue(path: Path) -> None:
    with open_trace(path) as reader:
        review(reader, [Broken(), Slow()])
        off = [row.event.text for row in reader.events() if row.event.kind == "rule-disabled"]
    assert off[0].startswith("The rule 'broken' failed at step 2 and is off: ValueError")
    assert len(findings_of(path, "slow.long-token")) == 2


def test_a_rule_that_ran_live_does_not_run_again_but_a_new_one_does(tmp_path: Path) -> None:
    path = tmp_path / "named.flextrace"
    with TraceWriter.create(path, {**RUN, "rules": ["other"]}) as writer:
        writer.begin_generation(GenerationRecord(0, "s", "", "", SEGMENTS, ()))
        writer.write_step(sample_step(0))
        writer.write_event(EventRecord("note", "a word", 1000.5, 0, 0))
        writer.write_step(sample_step(1))
    with open_trace(path) as reader:
        review(reader, [Late()])
        (finding,) = reader.findings()
        assert finding.sentence == "2 steps, heard ['a word after [0]']"
    silent = tmp_path / "live.flextrace"
    with TraceWriter.create(silent, {**RUN, "rules": ["late"]}) as writer:
        writer.begin_generation(GenerationRecord(0, "s", "", "", SEGMENTS, ()))
        writer.write_step(sample_step(0))
        writer.end_generation(GenerationEnd(0, "finished", "", SEGMENTS, "eos", 1001.0))
    with open_trace(silent) as reader:
        assert review(reader, [Late()]).n_rules == 0


def test_live_rules_report_at_the_end_of_a_killed_run(tmp_path: Path) -> None:
    path = tmp_path / "killed.flextrace"
    writer = TraceWriter.create(path, {**DEAD, "rules": ["late", "slow"]})
    writer.begin_generation(GenerationRecord(0, "s", "", "", SEGMENTS, ()))
    writer.write_step(sample_step(0))
    writer._db.close()
    with open_trace(path) as reader:
        assert reader.state == "recording"
        review(reader, [Late(), Slow()])
        assert [f.id for f in reader.findings()] == ["late.end"]
    with open_trace(path) as reader:
        assert review(reader, [Late(), Slow()]).n_rules == 0


def test_live_rules_report_at_the_end_of_a_killed_branch(
    tmp_path: Path,
) -> None:
    path = tmp_path / "forked.flextrace"
    writer = TraceWriter.create(path, {**DEAD, "rules": ["late"]})
    writer.begin_generation(GenerationRecord(0, "s", "", "", SEGMENTS, ()))
    writer.write_step(sample_step(0))
    said_live = Finding("late.end", Severity.NOTE, "1 steps, heard []", generation=0)
    writer.write_findings([said_live])
    writer.end_generation(GenerationEnd(0, "finished", "", SEGMENTS))
    writer.begin_branch(0, 1, 0, 1)
    writer.write_step(replace(sample_step(1), branch=1))
    writer._db.close()
    with open_trace(path) as reader:
        assert review(reader, [Late()]).n_rules == 1
        ends = [(f.branch, f.sentence) for f in reader.findings() if f.id == "late.end"]
    assert ends == [(0, "1 steps, heard []"), (1, "2 steps, heard []")]


def test_finished_generations_of_a_trace_that_is_being_recorded_are_reviewed(
    tmp_path: Path,
) -> None:
    path = tmp_path / "live.flextrace"
    mine = {**RUN, "pid": os.getpid(), "started_at": time.time()}
    with TraceWriter.create(path, mine) as writer:
        writer.begin_generation(GenerationRecord(0, "s", "", "", SEGMENTS, ()))
        writer.write_step(sample_step(0))
        with open_trace(path) as reader:
            assert review(reader, [Slow()]).n_rules == 0
        with pytest.raises(TraceWriteError, match="is recording it"):
            append.append_reviews(path, [])
        writer.end_generation(GenerationEnd(0, "finished", "", SEGMENTS))
        with open_trace(path) as reader:  # the model is held, say
            done = review(reader, [Slow()])
            assert (done.n_rules, done.note) == (1, "")
            reader.add_reviews(append.review_statements(done.unstored))
            assert review(reader, [Slow()]).n_rules == 0
            found = [one.id for one in reader.findings()]
            assert "slow.long-token" in found
            writer.begin_generation(GenerationRecord(1, "t", "", "", SEGMENTS, ()))
            writer.write_step(sample_step(0, 1, nan_at=(0, 0)))
            assert reader.changed()
            assert [one.id for one in reader.findings()] != found, "what comes later is seen, too"
            epoch = reader._connections._epoch
            writer.write_step(sample_step(1, 1))
            assert reader.changed()
            assert reader._connections._epoch == epoch, "a step that says nothing costs no thread"
            assert reader.last_step(1) == 1
    assert findings_of(path, "slow.long-token") == []


def test_a_review_that_another_program_stores_meanwhile_is_returned_once(path: Path) -> None:
    with open_trace(path) as reader:
        held = review(reader, [Slow()], store=False).unstored
        reader.add_reviews(append.review_statements(held))
        reader.add_reviews(append.review_statements(held))  # as a later review of the same run does
        append.append_reviews(path, held[:1])
        assert reader.changed()
        where = [f.generation for f in reader.findings() if f.id == "slow.long-token"]
        assert where == [0, 1]
        assert reader.reviews() == [("slow", 0), ("slow", 1)]
        reader.remove_added_reviews()
        assert reader.reviews() == [("slow", 0)]
        assert review(reader, [Slow()]).n_rules == 1
        assert reader.reviews() == [("slow", 0), ("slow", 1)]


def test_standalone_calls_go_to_rules_that_handle_them(tmp_path: Path) -> None:
    class Standalone(Late):
        name = "standalone"
        handles_standalone_calls = True

    path = tmp_path / "standalone.flextrace"
    with TraceWriter.create(path, {**RUN, "rules": []}) as writer:
        writer.begin_generation(
            GenerationRecord(0, f"{STANDALONE_CALLS}, 1", "not declared", "", SEGMENTS[:1], ())
        )
        writer.write_step(sample_step(0))
    with open_trace(path) as reader:
        assert review(reader, [Late(), Standalone()]).n_rules == 1


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ("SQLITE_FULL", "the disk is full"),
        ("SQLITE_READONLY", "it is read-only"),
        ("SQLITE_BUSY", "it is locked by another program"),
    ],
)
def test_reviews_that_cannot_be_stored_are_returned_with_the_reason(
    path: Path, monkeypatch: pytest.MonkeyPatch, error: str, reason: str
) -> None:
    def refuse(db: sqlite3.Connection, statements: object) -> None:
        failure = sqlite3.OperationalError("no")
        failure.sqlite_errorname = error
        raise failure

    with open_trace(path) as reader:
        n_before = len(reader.findings())
        with monkeypatch.context() as patched:
            patched.setattr(append.connections, "execute_all", refuse)
            done = review(reader, [Slow()])
        assert done.note == f"The findings are not stored in {path}: {reason}."
        reader.add_reviews(append.review_statements(done.unstored))
        assert reader.changed()
        assert len(reader.findings()) == n_before + 2
        assert reader.reviews() == [("slow", 0), ("slow", 1)]
    assert findings_of(path, "slow.long-token") == []


def test_a_trace_that_cannot_grow_is_unchanged(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_trace(path) as reader:
        held = review(reader, [Slow()], store=False).unstored
    many = [replace(held[0], findings=held[0].findings * 5000)]
    connect = sqlite3.connect

    def full(*args: Any, **options: Any) -> sqlite3.Connection:
        db = connect(*args, **options)
        n_pages = db.execute("PRAGMA page_count").fetchone()[0]
        db.execute(f"PRAGMA max_page_count = {n_pages}")
        return db

    with monkeypatch.context() as patched:
        patched.setattr(append.sqlite3, "connect", full)
        with pytest.raises(TraceWriteError, match="the disk is full"):
            append.append_reviews(path, many)
    assert findings_of(path, "slow.long-token") == []
    append.append_reviews(path, held)
    assert len(findings_of(path, "slow.long-token")) == 2


def test_the_separate_process_prints_its_review(path: Path) -> None:
    ran = subprocess.run(
        reviewing.review_command(path), capture_output=True, text=True, timeout=60, check=True
    )
    assert reviewing.review_from_json(ran.stdout).note == ""
    assert ran.stderr == ""


def test_a_review_survives_a_round_trip_through_json(path: Path) -> None:
    with open_trace(path) as reader:
        done = review(reader, [Slow(), Broken()], store=False)
    text = reviewing.to_json(done)
    assert repr(reviewing.review_from_json(text)) == repr(done)
    with pytest.raises(ValueError, match="n_rules"):
        reviewing.review_from_json(json.dumps({"findings": []}))


def test_a_damaged_generation_is_noted_and_the_others_are_reviewed(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE arrays SET data = x'00' WHERE generation = 0 AND owner IS NOT NULL")
        db.commit()
    with open_trace(path) as reader:
        done = review(reader, [Slow()])
    assert "damaged" in done.note
    assert [finding.generation for finding in findings_of(path, "slow.long-token")] == [1]


def test_a_rule_that_runs_offline_sees_the_block_tables_of_a_compiled_call(tmp_path: Path) -> None:
    opens_two_blocks = np.array([[[1, 0], [1, 1]]], np.uint8)
    lists_one_block = np.array([[[True, False], [False, True]]])
    mask = MaskRecord(
        fingerprint="stale",
        kind="block",
        batch=1,
        heads=1,
        q_len=8,
        kv_len=8,
        q_offset=0,
        block_q=4,
        block_kv=4,
        mask_mod="user.masks.causal",
        compiled=True,
        partial=lists_one_block,
        mask_mod_blocks=opens_two_blocks,
    )
    call = CallRecord(
        layer=0,
        path="flex compiled",
        backend="user",
        mask="stale",
        batch=1,
        q_heads=1,
        kv_heads=1,
        q_len=8,
        kv_len=8,
        head_dim=4,
        dtype="float32",
        scale=None,
    )
    path = tmp_path / "compiled.flextrace"
    with TraceWriter.create(path, {**RUN, "rules": []}) as writer:
        writer.begin_generation(GenerationRecord(0, "s", "", "", SEGMENTS, ()))
        writer.write_step(
            StepRecord(0, 0, "prefill", 8, 0, 8, 1000.0, 1.0, 0.1, calls=(call,), masks=(mask,))
        )
    with open_trace(path) as reader:
        review(reader, [BlockTablesRule()])
        (finding,) = reader.findings()
    assert finding.id == "mask.stale-tables"
    assert finding.evidence["missing"] == 1
