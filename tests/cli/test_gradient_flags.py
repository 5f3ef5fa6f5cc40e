"""`flexinspect run --grads`: the same answer, gradients with it, and findings that are stored."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from support.differentiated import preset_source
from support.warm_python import run_command

from flexinspect.analysis.offline_rules import review
from flexinspect.cli.main import build_parser
from flexinspect.cli.run import checked_job
from flexinspect.core.errors import UsageError
from flexinspect.inputs import model_names
from flexinspect.inputs.config import load_config
from flexinspect.inputs.datasets import load as load_samples
from flexinspect.masks import edits
from flexinspect.records.job import Job, parse_steps
from flexinspect.records.prompt import Prompt
from flexinspect.rules.training.token_gradient_rule import GradientsRule
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.reader import TraceReader, open_trace, steps_with_gradients
from flexinspect_hooks.control.step_barrier import StepBarrier
from flexinspect_hooks.ensemble.ensemble_run import EnsembleRunner
from flexinspect_hooks.gradients import after_generation
from flexinspect_hooks.loading.model_loader import load
from flexinspect_hooks.sessions.capture_session import CaptureSession


@pytest.fixture
def demo() -> Any:
    return load(model_names.resolve("demo", load_config()), device="cpu", dtype="auto")


def run(loaded: Any, out: Path, **options: Any) -> TraceReader:
    """Run two samples as the capture process does."""
    job = Job(out=str(out), max_samples=2, max_new_tokens=12, **options)
    ensemble = EnsembleRunner(loaded, job, compiled=False)
    with TraceWriter.create(out, {}) as writer:
        with CaptureSession(loaded.model, writer, level="basic", copy_logits=False) as session:
            for number, sample in enumerate(load_samples("demo", max_samples=2)):
                ensemble.run(number, ensemble.plan(sample), session)
    return open_trace(out)


def event_texts(reader: TraceReader, kind: str) -> list[str]:
    return [row.event.text for row in reader.events() if row.event.kind == kind]


def steps_of(path: Path) -> list[tuple[Any, ...]]:
    """Return the logits and tokens of all steps of a trace, bit for bit."""
    sql = (
        "SELECT c.generation, c.step, c.rank, c.token_id, c.logit, c.logprob, s.entropy, s.margin, "
        "s.histogram FROM candidates c JOIN steps s USING (generation, branch, step) "
        "ORDER BY c.generation, c.step, c.rank"
    )
    with closing(sqlite3.connect(path)) as db:
        return db.execute(sql).fetchall()


def test_the_run_is_bit_for_bit_the_same_with_gradients(demo: Any, tmp_path: Path) -> None:
    plain, with_grads = tmp_path / "plain.flextrace", tmp_path / "grads.flextrace"
    run(demo, plain).close()
    run(demo, with_grads, grads="logprob").close()
    assert steps_of(plain) == steps_of(with_grads)
    assert len(steps_of(plain)) > 40


def test_every_token_of_the_demo_has_gradients_and_no_finding(demo: Any, tmp_path: Path) -> None:
    with run(demo, tmp_path / "t.flextrace", grads="logprob", detect_anomaly=True) as reader:
        for row in reader.generations():
            n_steps = reader.n_steps(row.generation)
            assert steps_with_gradients(reader, row.generation) == list(range(n_steps))
            for step in range(n_steps):
                found = reader.gradients(row.generation, step)
                logits = reader.logits(row.generation, step)
                assert found is not None
                assert logits is not None
                assert found.matches_recorded
                assert found.token_id == logits.chosen_id
                assert found.value == pytest.approx(logits.chosen_logprob, abs=1e-5)
                assert found.tokens is not None
                assert found.layers is not None
                n_before = len(reader.tokens(row.generation)) - n_steps + step
                assert found.tokens.shape == (2, n_before)
                assert found.layers.shape == (5,)
                assert found.anomaly is None
        assert review(reader).note == ""
        assert reader.findings() == []
        (text, _) = event_texts(reader, after_generation.COST_EVENT)
        assert text.startswith("Gradients of 3 of 3 tokens took ")
        phases = dict.fromkeys(
            row.event.text for row in reader.events() if row.event.kind != "source"
        )
        assert list(phases)[:2] == [after_generation.GRADIENTS_PHASE, text]
        assert text.endswith(
            "by the dense reference; 3 of 3 forward passes gave the recorded logits."
        )


def test_only_the_steps_that_were_asked_for(demo: Any, tmp_path: Path) -> None:
    with run(demo, tmp_path / "a.flextrace", grads="margin", grads_steps="1,9-12") as reader:
        assert steps_with_gradients(reader, 0) == [1]
        found = reader.gradients(0, 1)
        assert found is not None
        assert found.target == "margin"
        assert found.runner_up_id == reader.candidates(0, 1)[1].token_id
    with run(demo, tmp_path / "b.flextrace", grads="logprob", grads_steps="40-50") as reader:
        assert steps_with_gradients(reader, 0) == []
        assert (
            event_texts(reader, after_generation.COST_EVENT)[0]
            == "--grads-steps 40-50 names none of the 3 steps."
        )


def test_without_the_flag_there_are_none(demo: Any, tmp_path: Path) -> None:
    with run(demo, tmp_path / "t.flextrace") as reader:
        assert steps_with_gradients(reader, 0) == []
        assert event_texts(reader, after_generation.COST_EVENT) == []


def test_a_nonfinite_layer_is_a_finding_of_the_trace(demo: Any, tmp_path: Path) -> None:
    demo.model.model.layers[2].mlp.up_proj.weight.data.zero_()
    with run(demo, tmp_path / "t.flextrace", grads="logprob") as reader:
        found = [f for f in reader.findings() if f.id == "gradient.dead"]
        # Once per generation, and every token that shows it is counted.
        assert [(f.generation, f.step, f.layer) for f in found] == [(0, 0, 2), (1, 0, 2)]
        n_steps = [reader.n_steps(generation) for generation in range(2)]
        assert [f.times for f in found] == n_steps
        assert [f.last_step for f in found] == [n - 1 for n in n_steps]
        assert "gate_proj" in found[0].sentence
        query = found[0].query
    with closing(sqlite3.connect(tmp_path / "t.flextrace")) as db:
        rows = db.execute(query).fetchall()
    assert {row[0] for row in rows if row[1] == "mlp" and row[3] == 0} == {2}


def test_a_review_says_the_same_afterwards(
    demo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    demo.model.model.layers[2].mlp.up_proj.weight.data.zero_()
    with run(demo, tmp_path / "t.flextrace", grads="logprob") as reader:
        live = [f for f in reader.findings() if f.id == "gradient.dead"]
        monkeypatch.setattr(GradientsRule, "name", "one that has not looked yet")
        done = review(reader, [GradientsRule()], store=False)
        again = [finding for one in done.unstored for finding in one.findings]
        assert again == live


def test_a_failure_is_an_event_and_keeps_the_answer(
    demo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("no room for 12 GiB")

    monkeypatch.setattr(after_generation.TokenGradients, "compute_step", fail)
    with run(demo, tmp_path / "t.flextrace", grads="logprob") as reader:
        assert [row.state for row in reader.generations()] == ["finished", "finished"]
        assert reader.generation(0).answer == "Paris"
        assert event_texts(reader, "gradients-failed")[0] == (
            "Gradients were not computed from step 0 on: OutOfMemoryError: no room for 12 GiB"
        )
        assert event_texts(reader, after_generation.COST_EVENT)[0] == "No gradients were computed."


def test_without_a_backward_of_flex_the_reference_is_used(
    demo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(after_generation, "flex_has_backward", lambda device: True)
    with run(demo, tmp_path / "t.flextrace", grads="logprob") as reader:
        records = [reader.gradients(0, step) for step in range(3)]
        assert [record and record.path for record in records] == ["dense reference"] * 3
        assert all(record and record.matches_recorded for record in records)
        (text,) = event_texts(reader, "gradients-dense-fallback")
        assert text.startswith(
            "FlexAttention's own backward failed, so the dense reference is used instead: "
            "AttentionCallError: FlexAttention failed in layer 0"
        )


class Changing:
    """Isolates segments in the prompt, and shows rows that come after it nothing of that."""

    name = "changing"

    def __init__(self, prompt: Prompt) -> None:
        self._of = [preset_source(prompt, mask) for mask in ("segment-isolation", "document")]

    def block_mask(self, window: Any, overlay: Any) -> Any:
        return self._of[window.q_len == 1].block_mask(window, overlay)


def test_a_mask_that_changed_during_the_run_fails_the_check(demo: Any, tmp_path: Path) -> None:
    out = tmp_path / "t.flextrace"
    ensemble = EnsembleRunner(
        demo, Job(out=str(out), max_new_tokens=3, grads="logprob"), compiled=False
    )
    plan = ensemble.plan(load_samples("demo", max_samples=1)[0])
    plan = replace(plan, source=Changing(plan.prompt))
    with TraceWriter.create(out, {}) as writer:
        with CaptureSession(demo.model, writer, level="basic", copy_logits=False) as session:
            ensemble.run(0, plan, session)
    with open_trace(out) as reader:
        first, second = reader.gradients(0, 0), reader.gradients(0, 1)
        assert first is not None
        assert second is not None
        assert (first.matches_recorded, second.matches_recorded) == (True, False)
        assert (second.stats, second.tokens, second.layers) == ((), None, None)
        (finding,) = (f for f in reader.findings() if f.id == "gradient.check-failed")
        assert finding.step == 1
        assert (
            event_texts(reader, after_generation.COST_EVENT)[0].split("; ")[1].startswith("1 of ")
        )


@pytest.mark.parametrize("options", [{"separators": "isolated"}, {"positions": "reset"}])
def test_rows_without_keys_and_restarting_positions_agree(
    demo: Any, tmp_path: Path, options: dict[str, Any]
) -> None:
    with run(demo, tmp_path / "t.flextrace", grads="logprob", grads_steps="0", **options) as reader:
        found = reader.gradients(0, 0)
        assert found is not None
        assert found.matches_recorded
        assert found.tokens is not None
        assert np.isfinite(found.tokens).all()


# -- flags -----------------------------------------------------------------------------------------


def job_of(*args: str) -> Job:
    job = checked_job(build_parser("run").parse_args(["run", *args]))
    assert isinstance(job, Job)
    return job


def test_the_flags_say_what_is_differentiated() -> None:
    assert job_of().grads is None
    assert job_of("--grads").grads == "logprob"
    job = job_of("--grads", "margin", "--grads-steps", "0,5-7", "--detect-anomaly")
    assert (job.grads, job.grads_steps, job.detect_anomaly) == ("margin", "0,5-7", True)
    assert Job.from_json(job.to_json()).grads_steps == "0,5-7"
    assert parse_steps("0,5-7") == {0, 5, 6, 7}
    assert parse_steps("all") is None


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("--grads-steps", "1"), "--grads-steps needs gradients, and --grads is missing."),
        (("--detect-anomaly",), "--detect-anomaly needs gradients, and --grads is missing."),
        (
            ("--grads", "--grads-steps", "1,x"),
            "--grads-steps 1,x is not a list of steps: 'x' is not a number or range.",
        ),
        (
            ("--grads", "--grads-steps", "-1"),
            "--grads-steps -1 is not a list of steps: '-1' is not a number or range.",
        ),
        (("--grads", "--grads-steps", "7-5"), "--grads-steps 7-5 names no step."),
    ],
)
def test_invalid_flags_are_refused_with_one_message(args: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        job_of(*args)
    assert refused.value.message == sentence


def test_a_program_of_the_users_takes_no_gradient_flags(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print()")
    with pytest.raises(UsageError, match="--grads"):
        checked_job(build_parser("run").parse_args(["run", "--grads", "margin", str(script)]))


# -- together with control -------------------------------------------------------------------------


def test_a_stopped_run_keeps_its_finished_gradients(demo: Any, tmp_path: Path) -> None:
    out, done = tmp_path / "t.flextrace", []
    with TraceWriter.create(out, {}) as writer:
        with CaptureSession(demo.model, writer, level="basic", copy_logits=False) as session:
            session.barrier = StepBarrier()
            ensemble = EnsembleRunner(demo, Job(out=str(out), grads="logprob"), compiled=False)
            one = ensemble._gradients.compute_step  # type: ignore[union-attr]

            def then_stop(*args: Any) -> Any:
                done.append(args)
                session.barrier.stop()  # type: ignore[union-attr]
                return one(*args)

            ensemble._gradients.compute_step = then_stop  # type: ignore[method-assign, union-attr]
            with pytest.raises(KeyboardInterrupt):
                ensemble.run(0, ensemble.plan(load_samples("demo", max_samples=1)[0]), session)
    with open_trace(out) as reader:
        assert len(done) == 1
        assert steps_with_gradients(reader, 0) == [0]
        assert (reader.generation(0).state, reader.n_steps(0)) == ("finished", 3)


def test_forwards_that_are_differentiated_are_no_steps_and_pass_no_barrier(
    demo: Any, tmp_path: Path
) -> None:
    with run(demo, tmp_path / "t.flextrace", grads="logprob") as reader:
        assert reader.n_steps(0) == 3
        assert len(reader.steps(0)) == 3
        assert [row.q_len for row in reader.steps(0)][1:] == [1, 1]


# -- as a user runs it -----------------------------------------------------------------------------


def test_the_command_says_what_it_took_and_shows_the_panel(tmp_path: Path) -> None:
    def flexinspect(*args: str) -> str:
        done = run_command(*args, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    flags = ("--grads", "margin", "--grads-steps", "0", "--json", "--out", "t.flextrace")
    found = json.loads(flexinspect("run", *flags))
    assert found["generations"][0]["answer"] == "Paris"
    assert any(note.startswith("Gradients of 1 of 3 tokens took ") for note in found["notes"])
    shown = flexinspect("show", "t.flextrace", "--panel", "gradients")
    assert shown.startswith("Gradient of the margin ")
    assert 'of " Par" to ' in shown


# -- in branches -----------------------------------------------------------------------------------


@pytest.mark.parametrize("edit", ["preset causal", ""])
def test_a_branch_has_gradients_of_its_own_steps_under_its_own_mask(
    demo: Any, tmp_path: Path, edit: str
) -> None:
    out = tmp_path / "t.flextrace"
    job = Job(out=str(out), grads="logprob", max_new_tokens=5, stop="eos")
    ensemble = EnsembleRunner(demo, job, compiled=False)
    plan = ensemble.plan(load_samples("demo", max_samples=1)[0])
    with TraceWriter.create(out, {}) as writer:
        with CaptureSession(demo.model, writer, level="basic", copy_logits=False) as session:
            begun = ensemble.record_of(0, plan)
            session.begin_generation(begun)
            journey = ensemble._make_decoder(plan, session, begun)
            with journey.patch:
                while not journey.is_over:
                    journey.advance()
                if edit:
                    journey.edit_mask(0, 1, [edits.parse_edit(edit)])
                else:
                    journey.fork(0, 1, [journey.branches[0].checkpoint(0).token_id])
                while not journey.is_over:
                    journey.advance()
            journey.close("finished", "")
    with open_trace(out) as reader:
        assert steps_with_gradients(reader, 0, 0) == list(range(reader.n_steps(0)))
        own = steps_with_gradients(reader, 0, 1)
        assert own[0] == 1
        assert own[-1] == reader.last_step(0, 1)
        for step in own:
            found, token = reader.gradients(0, step, 1), reader.step_tokens(0, step, 1)
            assert found is not None
            assert found.matches_recorded, found.logits_error
            assert found.token_id == token[0].token_id
        assert review(reader).note == ""
        assert [f for f in reader.findings(0, branch=1) if f.id.startswith("gradient.")] == []
