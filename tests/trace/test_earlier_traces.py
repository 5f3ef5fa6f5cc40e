"""Traces recorded by earlier code: each opens and has the data that the earlier code read."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.earlier_traces import EXPECTED, NAMES, trace_digests, unpack

from flexinspect.analysis.offline_rules import pending_tasks
from flexinspect.analysis.proof_results import PROOF_FINDINGS
from flexinspect.cli.live_run import RunProgress
from flexinspect.core.errors import TraceWriteError
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.training_step import LOSS_REPORTED
from flexinspect.rules.engine import load_rules
from flexinspect.trace.file.earlier_versions import (
    NEW_EVENT_KINDS,
    NEW_NAMES,
    NEW_VALUES,
    OLD_COLUMNS,
)
from flexinspect.trace.file.salvage import is_repairable, repair_copy
from flexinspect.trace.file.writer import RuleReview, append_reviews, review_statements
from flexinspect.trace.queries import finding_groups
from flexinspect.trace.reader import open_trace
from flexinspect.trace.trace_dump import DumpSelection, dump_json

EXPECTED_DIGESTS: dict[str, Any] = json.loads(EXPECTED.read_text("utf-8"))


def test_every_recorded_trace_has_expected_digests() -> None:
    assert {*NAMES} == {*EXPECTED_DIGESTS}


@pytest.mark.parametrize("name", NAMES)
def test_an_earlier_trace_gives_the_same_data(name: str, tmp_path: Path) -> None:
    assert trace_digests(unpack(name, tmp_path)) == EXPECTED_DIGESTS[name]


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("generation", "finished"),
        ("interrupted", "recording"),
        ("program", "failed"),
        ("watch", "interrupted"),
    ],
)
def test_an_earlier_trace_keeps_its_state(name: str, state: str, tmp_path: Path) -> None:
    with open_trace(unpack(name, tmp_path)) as reader:
        assert reader.state == state


def test_json_describes_every_array_of_a_compiled_call(tmp_path: Path) -> None:
    with open_trace(unpack("program", tmp_path)) as reader:
        dump = json.loads("".join(dump_json(DumpSelection(reader))))
        (blocks,) = [
            mask for mask in dump["masks"] if mask["mask_mod_blocks"] and mask["q_len"] == 256
        ]
        record = reader.mask(blocks["fingerprint"])
        assert record is not None
        assert record.mask_mod_blocks is not None
        assert blocks["mask_mod_blocks"] == {
            "shape": [1, 4, 4],
            "open": int((record.mask_mod_blocks > 0).sum()),
        }
        uniform = [mask["uniform_rows"] for mask in dump["masks"] if mask["uniform_rows"]]
        assert [entry["shape"][0] for entry in uniform] == [1]


@pytest.mark.parametrize("name", NAMES)
def test_a_trace_of_version_1_has_only_the_names_of_today(name: str, tmp_path: Path) -> None:
    with open_trace(unpack(name, tmp_path)) as reader:
        assert reader.format_version == 1
        assert not {row.event.kind for row in reader.events()} & {*NEW_EVENT_KINDS}
        streams = {*reader.frame("arrays", library="polars")["stream"]}
        assert not streams & {*NEW_VALUES["arrays", "stream"]}
        for table, names in OLD_COLUMNS.items():
            assert {*names} <= {*reader.frame(table, library="polars").columns}


def test_values_of_version_1_have_the_names_of_today(tmp_path: Path) -> None:
    with open_trace(unpack("training", tmp_path)) as reader:
        steps = reader.training_steps(0)
        assert {step.loss_source for step in steps.values()} >= {LOSS_REPORTED}
        origins = [step.anomaly_origin for step in steps.values() if step.anomaly_origin]
        assert max(origin.n_affected for origin in origins) > 0
    with open_trace(unpack("branches", tmp_path)) as reader:
        assert {*reader.generation(0).declared} >= {"starts", "prefix_stops", "local_starts"}
        changes = [row.change["declared"] for row in reader.branches(0) if "declared" in row.change]
        assert changes == [{"mask_mod": change["mask_mod"]} for change in changes] != []


_END_ONLY = ("caches", "decoding", "failures", "memory")
_END_ONLY_OF_MODELS = (
    *("caches", "choice", "decoding", "failures", "memory"),
    *("prompt", "same_prompt", "text", "training_steps", "unread_keys"),
)
_PENDING: dict[str, dict[int, tuple[str, ...]]] = {
    "interrupted": {0: _END_ONLY_OF_MODELS},
    "program": {
        **dict.fromkeys((16, 17, 31, 32), _END_ONLY),  # standalone calls
        18: _END_ONLY_OF_MODELS,
    },
    "watch": {0: _END_ONLY_OF_MODELS},
}
"""By trace: the rules that have to report the end of a generation that never ended."""


_NEW_RULES = (
    *("audit", "generate_options", "generated_length", "inferred_segments", "invariants"),
    *("kernel_options", "late_binding", "other_prompt", "padding_as_text", "recompute"),
    *("training_checks", "text_as_padding", "logits_changed", "decode_segment", "raw_embeddings"),
    *(
        "changed_weights",
        "choice_pattern",
        "processor_rows",
        "unused_window",
        "decode_window",
        "cut_rows",
    ),
    *("kept_state", "shrinking_prefix", "stopping_rows", "tree_positions", "unmet_configuration"),
    "hidden_keys",
    "penalty_sign",
    "sampled_otherwise",
    "assembled_cache",
    "window_slots",
    "weak_exclusion",
    "repeated_kv_heads",
    *("mask_values", "open_turn", "packed_documents", "stops_at_prompt"),
)
"""Rules that did not exist when the traces were recorded."""


@pytest.mark.parametrize("name", NAMES)
def test_the_rules_that_ran_live_on_an_earlier_trace_do_not_run_again(
    name: str, tmp_path: Path
) -> None:
    with open_trace(unpack(name, tmp_path)) as reader:
        tasks = pending_tasks(reader, load_rules().rules)
        ran_live = {*reader.run()["rules"]}
    assert ran_live | {*_NEW_RULES} == {rule.name for rule in load_rules().rules}
    # A part of the rule "heads" then, so that its findings are in the trace.
    own = {*_NEW_RULES} - {"repeated_kv_heads"}
    assert {rule.name for task in tasks for rule in task.rules} <= own
    pending = {
        task.generation.generation: tuple(rule.name for rule in task.end_only_rules)
        for task in tasks
        if task.end_only_rules
    }
    assert pending == _PENDING.get(name, {})


@pytest.mark.parametrize("name", NAMES)
def test_findings_of_an_earlier_trace_have_the_ids_of_today(name: str, tmp_path: Path) -> None:
    path = unpack(name, tmp_path)
    with closing(sqlite3.connect(path)) as db:
        stored = [id_ for (id_,) in db.execute("SELECT id FROM findings ORDER BY finding")]
    with open_trace(path) as reader:
        ids = [finding.id for finding in reader.findings()]
        assert ids == [NEW_NAMES.get(id_, id_) for id_ in stored]
        assert {*ids} <= {*load_rules().finding_kinds, *PROOF_FINDINGS}
        assert {group.id for group in finding_groups(reader)} == {*ids}


def test_findings_of_version_1_are_shown_but_not_stored(tmp_path: Path) -> None:
    path = unpack("generation", tmp_path)
    before = path.read_bytes()
    found = Finding("own.rule", Severity.NOTE, "Something.")
    review = RuleReview("own", 0, (found,), (), 1.0, 1.0)
    with pytest.raises(TraceWriteError, match="has version 1 of the format, which is only read"):
        append_reviews(path, [review])
    assert path.read_bytes() == before
    with open_trace(path) as reader:
        n_findings = len(reader.findings())
        reader.add_reviews(review_statements([review]))
        assert [each.id for each in reader.findings()][n_findings:] == ["own.rule"]
        assert ("own", 0) in reader.reviews()


def _print_between_reads(progress: RunProgress, text: str) -> None:
    """Print a line: a terminal that blocks must not hold a transaction of the trace open."""
    assert progress.reader is not None
    assert not progress.reader._connections._thread_connection().in_snapshot
    progress.console.print(text)


def test_a_trace_of_version_1_is_followed_while_it_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds: set[str] = set()
    monkeypatch.setattr(RunProgress, "on_event", lambda self, event: kinds.add(event.kind))
    progress = RunProgress(Console(file=(output := StringIO())))
    monkeypatch.setattr(progress, "print_line", partial(_print_between_reads, progress))
    progress.follow(unpack("interrupted", tmp_path))
    assert "generation 0: " in output.getvalue()
    assert kinds
    assert not kinds & {*NEW_EVENT_KINDS}
    progress.stop_following()


def test_a_truncated_trace_of_version_1_is_repaired_unless_its_schema_is_lost(
    tmp_path: Path,
) -> None:
    path = unpack("extreme", tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * 3 // 4])
    copy = repair_copy(path)
    assert copy is not None
    with open_trace(copy) as reader:
        assert reader.generations()
        assert reader.calls(0, 0)[0].lse_error is not None
    path.write_bytes(whole[:8192])
    assert not is_repairable(path)
