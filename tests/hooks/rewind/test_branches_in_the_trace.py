"""Branches in the trace; the base generation is never changed."""

from __future__ import annotations

import hashlib
import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from support.paths import DOCS

from flexinspect.analysis import branch_comparison
from flexinspect.analysis.offline_rules import review
from flexinspect.breakpoints.store import BreakpointStore
from flexinspect.control.messages import EditMask, Fork, MaskEdit, QueuedRewind, Restore, StepRef
from flexinspect.core.errors import FlexInspectError, MaskError, UsageError
from flexinspect.inputs import datasets, model_names, samples
from flexinspect.inputs.config import load_config
from flexinspect.records.job import Job, SamplingOptions
from flexinspect.records.step import EventRecord
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.reader import TraceReader
from flexinspect_hooks.breakpoints.actions import PauseAction
from flexinspect_hooks.breakpoints.observations import BreakpointEvaluator
from flexinspect_hooks.control.control_protocols import SessionLevels
from flexinspect_hooks.control.step_barrier import StepBarrier
from flexinspect_hooks.ensemble.ensemble_run import EnsembleRunner
from flexinspect_hooks.loading.model_loader import LoadedModel, load
from flexinspect_hooks.rewind.branching_decoder import CONFIRM_ABOVE_S
from flexinspect_hooks.sessions.capture_session import CaptureSession

NEW = 8


@pytest.fixture(scope="module")
def demo() -> LoadedModel:
    return load(
        model_names.resolve("demo", load_config()),
        device="cpu",
        dtype="auto",
        weights="pretrained",
        seed=0,
        trust_remote_code=False,
        report=lambda phase, data: None,
    )


class ScriptedBarrier:
    """A step barrier that returns its commands one after the other once the base has ended."""

    def __init__(self, *commands: Any, then: Callable[[], object] = lambda: None) -> None:
        self._commands, self._then = list(commands), then
        self.results: list[tuple[str, StepRef | FlexInspectError, str]] = []
        self.steps: list[StepRef] = []

    def between_steps(self, step_ref: StepRef, *, ends_branch: bool = False) -> QueuedRewind | None:
        self.steps.append(step_ref)
        return None

    def hold(self, step_ref: StepRef) -> QueuedRewind | None:
        self._then()
        return QueuedRewind(1, self._commands.pop(0)) if self._commands else None

    def report_result(
        self, order: QueuedRewind, result: StepRef | FlexInspectError, message: str = ""
    ) -> None:
        self.results.append((order.command.kind, result, message))


class Run:
    """One generation of the demo model into a trace, with a scripted step barrier."""

    def __init__(self, loaded: LoadedModel, path: Path, *, level: str = "advanced") -> None:
        sampling = SamplingOptions(do_sample=True, temperature=1.5, top_k=50)
        job = Job(out=str(path), sampling=sampling, max_new_tokens=NEW, stop="length", seed=3)
        self.path = path
        self.ensemble = EnsembleRunner(loaded, job, compiled=False)
        self.ensemble.eos_ids = ()
        self.writer = TraceWriter.create(path, {"model": {"name": "demo"}})
        vocabulary = self.ensemble.vocabulary
        self.session = CaptureSession(
            loaded.model,
            self.writer,
            level=level,
            text_of=vocabulary.text_of,
            copy_logits=False,
        )
        (sample,) = datasets.load("demo", max_samples=1)
        self.plan = self.ensemble.plan(samples.choose_paraphrases(sample, 3, None))

    def go(self, barrier: ScriptedBarrier) -> TraceReader:
        self.session.barrier = barrier  # type: ignore[assignment]
        state = "failed"
        try:
            with self.session:
                self.ensemble.run(0, self.plan, self.session, holds=True)
            state = "finished"
        except KeyboardInterrupt:
            state = "interrupted"
        finally:
            self.writer.close(state)
        assert self.session.recorder.writer.refused == []
        assert self.session.recorder.failure is None
        return TraceReader(self.path)


@pytest.fixture
def new_run(demo: LoadedModel, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield lambda **options: Run(demo, tmp_path / "run.flextrace", **options)
    torch.set_num_threads(threads)


def at(step: int, branch: int = 0) -> StepRef:
    return StepRef(0, branch, step)


def hash_of_base(path: Path) -> str:
    """A hash of every row of branch 0, in every table that has branches."""
    digest = hashlib.sha256()
    with closing(sqlite3.connect(path)) as db:
        tables = [name for (name,) in db.execute("SELECT name FROM sqlite_schema WHERE sql <> ''")]
        for table in sorted(tables):
            columns = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
            if "branch" in columns:
                rows = db.execute(f"SELECT * FROM {table} WHERE branch = 0").fetchall()
                digest.update(repr(sorted(map(repr, rows))).encode())
        digest.update(repr(db.execute("SELECT * FROM generations").fetchall()).encode())
    return digest.hexdigest()


COMMANDS = (
    Fork(at(2), token_id=300),
    EditMask(at(3), (MaskEdit("preset", name="causal"),)),
    EditMask(at(3), (MaskEdit("drop", segments=(1,)), MaskEdit("cell", row=45, key=3))),
    EditMask(at(3), (MaskEdit("row", row=0, is_open=False), MaskEdit("preset", name="document"))),
    Restore(at(4, 1)),
    Fork(at(5, 1), text=" Paris"),
)


def test_the_base_is_never_changed(new_run: Callable[..., Run]) -> None:
    run, hashes = new_run(level="extreme"), []

    def look() -> None:
        run.session.recorder.drain()
        hashes.append(hash_of_base(run.path))

    barrier = ScriptedBarrier(*COMMANDS, then=look)
    reader = run.go(barrier)
    assert [kind for kind, _, _ in barrier.results] == [
        *("fork", "edit", "edit", "edit", "restore", "fork")
    ]
    assert all(isinstance(result, StepRef) for _, result, _ in barrier.results), barrier.results
    assert [row.parent for row in reader.branches(0)] == [None, 0, 0, 0, 0, 1]
    assert len(hashes) == 7
    assert len(set(hashes)) == 1
    assert hash_of_base(run.path) == hashes[0]


def test_a_branch_holds_its_own_steps_tokens_segments_end_and_answer(
    new_run: Callable[..., Run],
) -> None:
    reader = new_run().go(ScriptedBarrier(Fork(at(5), text=" Paris")))
    base, branch = reader.branches(0)
    assert (branch.parent, branch.fork_step, branch.state) == (0, 5, "finished")
    assert branch.stop_reason == "length"
    assert [row.step for row in reader.steps(0, 1)] == [5, 6, 7]
    tokens = reader.tokens(0, 1)
    n_prompt = reader.segments(0)[-1].start
    assert [(token.pos, token.step) for token in tokens] == [
        (n_prompt + step, step) for step in (5, 6, 7)
    ]
    assert reader.segments(0, 1) == reader.segments(0)
    assert branch.change["text"] == " Paris"
    assert branch.change["token_id"] == tokens[0].token_id
    assert branch.change["instead_id"] == reader.step_tokens(0, 5)[0].token_id
    own = "".join(token.text for token in tokens if not token.special)
    earlier = [token for token in reader.tokens(0) if token.step in range(5)]
    before = "".join(token.text for token in earlier if not token.special)
    assert branch.answer == (before + own).strip()
    assert branch.answer != base.answer
    logits = reader.logits(0, 5, 1)
    assert logits is not None
    assert logits.chosen_id == tokens[0].token_id
    mine, theirs = logits.candidates, reader.candidates(0, 5)
    assert [c.logit for c in mine] == [c.logit for c in theirs]  # before the choice nothing differs


def test_commands_are_events_of_the_trace(new_run: Callable[..., Run]) -> None:
    run = new_run()
    barrier = ScriptedBarrier(
        Fork(at(1), token_id=300),
        EditMask(at(0), (MaskEdit("see", segments=(5, 1)),)),
        Restore(at(6)),
        then=lambda: len(barrier.results) == 2 and run.session.use_levels(SessionLevels("basic")),
    )
    reader = run.go(barrier)
    events = {row.event.kind: row.event for row in reader.events()}
    assert events["forked"].data["branch"] == 1
    assert events["forked"].step == 1
    assert "paraphrase 3 see paraphrase 1" in events["mask-edited"].text
    assert events["restored"].text == "Step 6 of branch 0 was restored, its cache cropped."
    assert [message for _, _, message in barrier.results] == [
        events[kind].text for kind in ("forked", "mask-edited", "restored")
    ]
    assert barrier.results[-1][1] == at(6)
    # Requested before a step that the trace holds already, and that is not written again.
    assert (events["level"].generation, events["level"].step) == (0, 7)
    assert events["level"].data == {"level": "basic", "before": "advanced"}


def test_an_edited_mask_is_the_mask_that_ran(new_run: Callable[..., Run]) -> None:
    reader = new_run().go(ScriptedBarrier(EditMask(at(2), (MaskEdit("cell", row=20, key=2),))))
    about = reader.step(0, 2, 1)
    assert about is not None
    # Row 20 was computed before, so the branch begins with all rows under the edited mask.
    assert (about.phase, about.kv_before) == ("prefill", 0)
    (name,) = {call.mask for call in reader.calls(0, 2, 1)}
    mask, base = reader.mask(str(name)), reader.mask(str(reader.calls(0, 0)[0].mask))
    assert mask is not None
    assert base is not None
    assert mask.cells is not None
    assert base.cells is not None
    n_prompt = base.cells.shape[-1]
    differs = mask.cells[0, :n_prompt, :n_prompt] != base.cells[0]
    assert [*zip(*differs.nonzero(), strict=True)] == [(20, 2)]


def test_no_rule_reports_a_branch_for_being_a_branch(new_run: Callable[..., Run]) -> None:
    reader = new_run().go(ScriptedBarrier(*COMMANDS))
    base = {finding.id for finding in reader.findings() if finding.branch == 0}
    for finding in reader.findings():
        assert finding.branch == 0 or finding.id in base, (finding.branch, finding.sentence)
    assert not [row for row in reader.events() if row.event.kind == "rule-disabled"]


def test_a_finding_of_a_branch_names_the_branch(new_run: Callable[..., Run]) -> None:
    # A paraphrase that attends to nothing: its rows are empty in the branch only.
    rows = tuple(
        MaskEdit("see", segments=(number, other), is_open=False)
        for number, other in ((1, 0), (1, 1))
    )
    reader = new_run().go(ScriptedBarrier(EditMask(at(3), rows)))
    empty_rows = [f for f in reader.findings() if f.id == "mask.empty-row"]
    assert {(finding.branch, finding.step) for finding in empty_rows} == {(1, 3)}


def test_ctrl_c_in_a_branch_leaves_a_valid_trace(new_run: Callable[..., Run]) -> None:
    run = new_run()

    class Interrupting(ScriptedBarrier):
        def between_steps(
            self, step_ref: StepRef, *, ends_branch: bool = False
        ) -> QueuedRewind | None:
            if step_ref.branch == 1 and step_ref.step == 4:
                raise KeyboardInterrupt
            return None

    reader = run.go(Interrupting(Fork(at(2), token_id=300)))
    assert reader.state == "interrupted"
    base, branch = reader.branches(0)
    assert (base.state, base.stop_reason) == ("finished", "length")
    assert (branch.state, branch.stop_reason) == ("interrupted", "stopped")
    assert [row.step for row in reader.steps(0, 1)] == [2, 3, 4]
    with closing(sqlite3.connect(run.path)) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_invalid_commands_are_answered_and_change_nothing(
    new_run: Callable[..., Run],
) -> None:
    barrier = ScriptedBarrier(
        Restore(StepRef(3, 0, 1)),
        Restore(at(99)),
        Fork(at(2), text=""),
        EditMask(at(2), (MaskEdit("drop", segments=(77,)),)),
        EditMask(at(2), (MaskEdit("cell", row=3, key=9),)),
        EditMask(at(2), (MaskEdit("see", segments=(1, 5)),)),
        EditMask(at(2), (MaskEdit("row"),)),
        EditMask(at(2), (MaskEdit("cell", row=3),)),
        EditMask(at(2), (MaskEdit("join", segments=(1,)),)),
        EditMask(at(2), ()),
    )
    reader = new_run().go(barrier)
    sentences = [str(result) for _, result, _ in barrier.results]
    assert sentences == [
        "Generation 3 is not running any more; the running generation is 0.",
        "Branch 0 has no step 99; its steps go from 0 to 7.",
        "A fork needs a token or a text of at least one token.",
        "There is no segment '77'.",
        "Row 3 comes before key 9, and a row attends to no later key.",
        "paraphrase 1 comes before paraphrase 3, and a row attends to no later key.",
        "'row' needs a row.",
        "'cell' needs a row and a key.",
        "'join' needs 2 segments.",
        "Editing the mask needs at least one edit.",
    ]
    assert len(reader.branches(0)) == 1


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("out of memory\nand more")])
def test_a_command_that_fails_in_the_model_is_answered_and_the_run_continues(
    new_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    run = new_run()

    def fail(order: QueuedRewind) -> None:
        raise error

    monkeypatch.setattr(run.ensemble.rewind_handler, "execute", fail)
    barrier = ScriptedBarrier(Fork(at(2), token_id=300))
    reader = run.go(barrier)
    ((_, result, _),) = barrier.results
    assert isinstance(result, FlexInspectError)
    assert result.message.startswith(f"The fork failed: {type(error).__name__}")
    assert "and more" not in result.message
    assert reader.branches(0)[0].state == "finished"


def test_the_cost_is_estimated_before(new_run: Callable[..., Run]) -> None:
    run, costs = new_run(), []

    def ask() -> None:
        handler = run.ensemble.rewind_handler
        for command in (
            Restore(at(2)),
            Fork(at(2), token_id=300),
            EditMask(at(2), (MaskEdit("preset", name="causal"),)),
            EditMask(at(2), (MaskEdit("row", row=45, is_open=False),)),
        ):
            costs.append(handler.estimate_cost(command))
        with pytest.raises(MaskError, match="does not change"):
            handler.estimate_cost(EditMask(at(2), (MaskEdit("preset", name="segment-isolation"),)))
        with pytest.raises(UsageError, match="no step 50"):
            handler.estimate_cost(Restore(at(50)))

    reader = run.go(ScriptedBarrier(then=ask))
    assert costs[0].sentence.startswith("the cache is cropped; the caches will hold ")
    assert re.match(r"about \d", costs[1].sentence)
    assert "computed rows changed: " in costs[2].sentence
    assert re.match(r"No computed row changes: about \d", costs[3].sentence)
    for cost in costs:  # how long they take depends on what else the machine does
        assert cost.is_expensive == (cost.seconds > CONFIRM_ABOVE_S)
        assert cost.bytes
    assert len(reader.branches(0)) == 1  # asking changes nothing
    with pytest.raises(UsageError, match="No generation is running"):
        run.ensemble.rewind_handler.estimate_cost(Restore(at(2)))


def test_a_review_afterwards_finds_nothing_new_in_branches(new_run: Callable[..., Run]) -> None:
    run = new_run()
    run.go(ScriptedBarrier(*COMMANDS)).close()
    with TraceReader(run.path) as reader:
        before = {finding.id for finding in reader.findings()}
    with TraceReader(run.path) as reader:
        review(reader)
    with TraceReader(run.path) as reader:
        for finding in reader.findings():
            assert finding.branch == 0 or finding.id in before, finding.sentence


def test_branches_of_level_extreme_are_compared_by_all_logits(
    new_run: Callable[..., Run],
) -> None:
    edit = EditMask(at(3), (MaskEdit("preset", name="causal"),))
    with new_run(level="extreme").go(ScriptedBarrier(edit)) as reader:
        change = branch_comparison.step_change(reader, 0, 4, 0, 1)
        listed = branch_comparison._change_from_candidates(
            4, reader.candidates(0, 4), reader.candidates(0, 4, 1)
        )
        assert change is not None
        assert change.basis == "all logits"
        assert change.kl >= listed.kl > 0
        masks = branch_comparison.mask_change(reader, 0, 4, 0, 1)
        assert masks is not None
        segments = reader.segments(0)
        seen = sum(s.start - 1 for s in segments[1:-2] for _ in range(len(s)))
        separators = sum(
            segments[s.owner].start - s.start for s in segments if s.kind == "separator"
        )
        assert (masks.n_opened, masks.n_closed) == (seen + separators, 0)


def test_the_python_example_of_the_page_shows_where_branches_differ(
    new_run: Callable[..., Run], capsys: pytest.CaptureFixture[str]
) -> None:
    run = new_run()
    run.go(ScriptedBarrier(Fork(at(2), token_id=300))).close()
    page = (DOCS / "branches.md").read_text("utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(block.replace('"run.flextrace"', repr(str(run.path))), {})
    parent, fork, first, step, mask = capsys.readouterr().out.splitlines()
    assert parent.startswith(" 0  'Paris")
    assert fork.startswith("   1 ' l' instead of '<eos>' 'Paris l")
    assert first == "2"
    assert step.startswith("StepChange(step=1, basis='candidates', kl=0.0, ")
    assert mask.startswith("MaskChange(step=1, layer=0, n_rows=41, n_opened=0, n_closed=0, ")


def test_a_replayed_step_that_differs_is_evaluated_with_its_observations(
    new_run: Callable[..., Run], demo: LoadedModel
) -> None:
    run, events = new_run(), list[EventRecord]()
    store, head = BreakpointStore(), demo.model.get_output_embeddings()
    before = head.weight.detach().clone()
    store.add("inf @ *self_attn and step == 4")
    breaking = BreakpointEvaluator(
        store, PauseAction(StepBarrier(), lambda _: None, events.append), events.append
    )
    run.session.break_on(breaking)

    def corrupt() -> None:
        run.session.recorder.drain()  # as the step barrier does if there are breakpoints
        with torch.no_grad():
            head.weight.copy_(before * 1.5)

    try:
        reader = run.go(ScriptedBarrier(Restore(at(3)), then=corrupt))
    finally:
        with torch.no_grad():
            head.weight.copy_(before)
    assert [row.fork_step for row in reader.branches(0)] == [None, 4]
    assert events == []
