"""What a journey leaves in the trace: branches beside a base that is never touched."""

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
from flexinspect.breakpoints import BreakpointStore
from flexinspect.control.messages import EditMask, Fork, MaskEdit, QueuedRewind, Restore, StepRef
from flexinspect.core.errors import FlexInspectError, MaskError, UsageError
from flexinspect.inputs import datasets, model_names
from flexinspect.inputs.config import load_config
from flexinspect.records.job import Job, SamplingOptions
from flexinspect.records.step import EventRecord
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.reader import TraceReader
from flexinspect_hooks.breakpoints.actions import PauseAction
from flexinspect_hooks.breakpoints.observations import BreakpointEvaluator
from flexinspect_hooks.control.step_barrier import StepBarrier
from flexinspect_hooks.ensemble.ensemble_run import EnsembleRunner
from flexinspect_hooks.loading.model_loader import LoadedModel, load
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


class Script:
    """A gate that gives its orders one after the other once the base is over."""

    def __init__(self, *wishes: Any, then: Callable[[], object] = lambda: None) -> None:
        self._wishes, self._then = list(wishes), then
        self.results: list[tuple[str, StepRef | FlexInspectError, str]] = []
        self.places: list[StepRef] = []

    def between_steps(self, place: StepRef) -> QueuedRewind | None:
        self.places.append(place)
        return None

    def hold(self, place: StepRef) -> QueuedRewind | None:
        self._then()
        return QueuedRewind(1, self._wishes.pop(0)) if self._wishes else None

    def report_result(
        self, order: QueuedRewind, result: StepRef | FlexInspectError, said: str = ""
    ) -> None:
        self.results.append((order.kind, result, said))


class Run:
    """One generation of the demo model into a trace, its gate driven by a script."""

    def __init__(self, loaded: LoadedModel, path: Path, *, level: str = "advanced") -> None:
        sampling = SamplingOptions(do_sample=True, temperature=1.5, top_k=50)
        job = Job(out=str(path), sampling=sampling, max_new_tokens=NEW, stop="length", seed=3)
        self.path = path
        self.ensemble = EnsembleRunner(loaded, job, compiled=False)
        self.ensemble._eos = ()
        self.writer = TraceWriter.create(path, {"model": {"name": "demo"}})
        words = self.ensemble.vocabulary
        self.session = CaptureSession(
            *(loaded.model, self.writer), level=level, text_of=words.text_of, copy_logits=False
        )
        (sample,) = datasets.load("demo", max_samples=1)
        self.plan = self.ensemble.plan(datasets.choose_paraphrases(sample, 3, None))

    def go(self, gate: Script) -> TraceReader:
        self.session.barrier = gate  # type: ignore[assignment]
        state = "failed"
        try:
            with self.session:
                self.ensemble.run(0, self.plan, self.session, holds=True)
            state = "finished"
        except KeyboardInterrupt:
            state = "interrupted"
        finally:
            self.writer.close(state)
        assert self.session.recorder.refused == []
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
    """Return a hash of every row of branch 0, in every table that has branches."""
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


WISHES = (
    Fork(at(2), token_id=300),
    EditMask(at(3), (MaskEdit("preset", name="causal"),)),
    EditMask(at(3), (MaskEdit("drop", segments=(1,)), MaskEdit("cell", row=45, key=3))),
    EditMask(at(3), (MaskEdit("row", row=0, is_open=False), MaskEdit("preset", name="document"))),
    Restore(at(4, 1)),
    Fork(at(5, 1), text=" Paris"),
)


def test_the_base_is_never_touched(new_run: Callable[..., Run]) -> None:
    run, hashes = new_run(level="extreme"), []

    def look() -> None:
        run.session.recorder.drain()
        hashes.append(hash_of_base(run.path))

    gate = Script(*WISHES, then=look)
    reader = run.go(gate)
    assert [kind for kind, _, _ in gate.results] == [
        *("fork", "edit", "edit", "edit", "restore", "fork")
    ]
    assert all(isinstance(result, StepRef) for _, result, _ in gate.results), gate.results
    assert [row.parent for row in reader.branches(0)] == [None, 0, 0, 0, 0, 1]
    assert len(hashes) == 7
    assert len(set(hashes)) == 1
    assert hash_of_base(run.path) == hashes[0]


def test_a_branch_holds_its_own_steps_tokens_segments_end_and_answer(
    new_run: Callable[..., Run],
) -> None:
    reader = new_run().go(Script(Fork(at(5), text=" Paris")))
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


def test_orders_are_events_of_the_trace(new_run: Callable[..., Run]) -> None:
    run = new_run()
    gate = Script(
        Fork(at(1), token_id=300),
        EditMask(at(0), (MaskEdit("see", segments=(5, 1)),)),
        Restore(at(6)),
        then=lambda: len(gate.results) == 2 and run.session.switch(level="basic"),
    )
    reader = run.go(gate)
    told = {row.event.kind: row.event for row in reader.events()}
    assert told["forked"].data["branch"] == 1
    assert told["forked"].step == 1
    assert "paraphrase 3 see paraphrase 1" in told["mask-edited"].text
    assert told["restored"].text == "Step 6 of branch 0 was restored, its cache cropped."
    assert [said for _, _, said in gate.results] == [
        told[kind].text for kind in ("forked", "mask-edited", "restored")
    ]
    assert gate.results[-1][1] == at(6)
    # Asked for before a step that the trace holds already, and that is not written again.
    assert (told["level"].generation, told["level"].step) == (0, 7)
    assert told["level"].data == {"level": "basic", "before": "advanced"}


def test_a_mask_that_was_edited_is_the_mask_that_ran(new_run: Callable[..., Run]) -> None:
    reader = new_run().go(Script(EditMask(at(2), (MaskEdit("cell", row=20, key=2),))))
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


def test_no_rule_blames_a_branch_for_being_one(new_run: Callable[..., Run]) -> None:
    reader = new_run().go(Script(*WISHES))
    base = {finding.id for finding in reader.findings() if finding.branch == 0}
    for finding in reader.findings():
        assert finding.branch == 0 or finding.id in base, (finding.branch, finding.sentence)
    assert not [row for row in reader.events() if row.event.kind == "rule-off"]


def test_a_finding_of_a_branch_says_so(new_run: Callable[..., Run]) -> None:
    # Paraphrases that see nothing at all: their rows are empty in the branch alone.
    rows = tuple(
        MaskEdit("see", segments=(number, other), is_open=False)
        for number, other in ((1, 0), (1, 1))
    )
    reader = new_run().go(Script(EditMask(at(3), rows)))
    found = [f for f in reader.findings() if f.id == "mask.empty-row"]
    assert {(finding.branch, finding.step) for finding in found} == {(1, 3)}


def test_ctrl_c_in_a_branch_leaves_a_valid_trace(new_run: Callable[..., Run]) -> None:
    run = new_run()

    class Interrupting(Script):
        def between_steps(self, place: StepRef) -> QueuedRewind | None:
            if place.branch == 1 and place.step == 4:
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


def test_orders_that_cannot_be_obeyed_are_answered_and_change_nothing(
    new_run: Callable[..., Run],
) -> None:
    gate = Script(
        Restore(StepRef(3, 0, 1)),
        Restore(at(99)),
        Fork(at(2), text=""),
        EditMask(at(2), (MaskEdit("drop", segments=(77,)),)),
        EditMask(at(2), (MaskEdit("cell", row=3, key=9),)),
        EditMask(at(2), (MaskEdit("see", segments=(1, 5)),)),
        EditMask(at(2), (MaskEdit("row"),)),
        EditMask(at(2), ()),
    )
    reader = new_run().go(gate)
    sentences = [str(result) for _, result, _ in gate.results]
    assert sentences == [
        "Generation 3 is not the one that runs, which is 0: its live state is gone.",
        "Branch 0 has no step 99; its steps go from 0 to 7.",
        "A fork needs a token or a text of at least one token.",
        "There is no segment '77'.",
        "Row 3 comes before key 9, and a row attends to no later key.",
        "paraphrase 1 comes before paraphrase 3, and a row attends to no later key.",
        "'row' needs a row.",
        "An edit of the mask needs something to edit.",
    ]
    assert len(reader.branches(0)) == 1


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("out of memory\nand more")])
def test_an_order_that_the_model_fails_on_is_answered_and_the_run_goes_on(
    new_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    run = new_run()

    def fail(order: QueuedRewind) -> None:
        raise error

    monkeypatch.setattr(run.ensemble.rewind_handler, "execute", fail)
    gate = Script(Fork(at(2), token_id=300))
    reader = run.go(gate)
    ((_, result, _),) = gate.results
    assert isinstance(result, FlexInspectError)
    assert result.message.startswith(f"The fork failed: {type(error).__name__}: ")
    assert "and more" not in result.message
    assert reader.branches(0)[0].state == "finished"


def test_the_cost_is_said_before(new_run: Callable[..., Run]) -> None:
    run, said = new_run(), []

    def ask() -> None:
        orders = run.ensemble.rewind_handler
        for wish in (
            Restore(at(2)),
            Fork(at(2), token_id=300),
            EditMask(at(2), (MaskEdit("preset", name="causal"),)),
            EditMask(at(2), (MaskEdit("row", row=45, is_open=False),)),
        ):
            said.append(orders.estimate_cost(QueuedRewind(0, wish)))
        with pytest.raises(MaskError, match="changes nothing"):
            orders.estimate_cost(
                QueuedRewind(0, EditMask(at(2), (MaskEdit("preset", name="segment-isolation"),)))
            )
        with pytest.raises(UsageError, match="no step 50"):
            orders.estimate_cost(QueuedRewind(0, Restore(at(50))))

    reader = run.go(Script(then=ask))
    assert said[0].sentence.startswith("the cache is cropped; the caches hold ")
    assert said[1].sentence.startswith("1 row in 1 forward, about 0.")
    assert "rows computed already changed: " in said[2].sentence
    assert said[3].sentence.startswith("No row computed already is touched: 1 row in 1 forward")
    assert all(not cost.is_expensive and cost.bytes for cost in said)
    assert len(reader.branches(0)) == 1  # asking changes nothing
    with pytest.raises(UsageError, match="No generation runs"):
        run.ensemble.rewind_handler.estimate_cost(QueuedRewind(0, Restore(at(2))))


def test_a_review_afterwards_finds_nothing_new_in_branches(new_run: Callable[..., Run]) -> None:
    run = new_run()
    run.go(Script(*WISHES)).close()
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
    with new_run(level="extreme").go(Script(edit)) as reader:
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


def test_the_python_of_the_page_says_where_the_branches_part(
    new_run: Callable[..., Run], capsys: pytest.CaptureFixture[str]
) -> None:
    run = new_run()
    run.go(Script(Fork(at(2), token_id=300))).close()
    page = (DOCS / "branches.md").read_text("utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(block.replace('"run.flextrace"', repr(str(run.path))), {})
    parent, fork, first, step, mask = capsys.readouterr().out.splitlines()
    assert parent.startswith(" 0  'Paris")
    assert fork.startswith("   1 ' l' instead of '<eos>' 'Paris l")
    assert first == "2"
    assert step.startswith("StepChange(step=1, basis='candidates', kl=0.0, ")
    assert mask.startswith("MaskChange(step=1, layer=0, n_rows=41, n_opened=0, n_closed=0, ")


def test_a_replayed_step_that_differs_is_judged_with_what_was_seen_of_it(
    new_run: Callable[..., Run], demo: LoadedModel
) -> None:
    run, told = new_run(), list[EventRecord]()
    book, head = BreakpointStore(), demo.model.get_output_embeddings()
    before = head.weight.detach().clone()
    book.add("inf @ *self_attn and step == 4")
    breaking = BreakpointEvaluator(
        book, PauseAction(StepBarrier(), lambda _: None, told.append), told.append
    )
    run.session.break_on(breaking)

    def spoil() -> None:
        run.session.recorder.drain()  # as the gate does where there are breakpoints
        with torch.no_grad():
            head.weight.copy_(before * 1.5)

    try:
        reader = run.go(Script(Restore(at(3)), then=spoil))
    finally:
        with torch.no_grad():
            head.weight.copy_(before)
    assert [row.fork_step for row in reader.branches(0)] == [None, 4]
    assert told == []
