"""The contents of a report are what the trace holds, and say what it does not hold."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from support import mask_trace
from support.attention_trace import N_PROMPT, SyntheticGeneration, write
from support.dumps import described_folder, unpack_dump
from support.earlier_traces import unpack
from support.mask_trace import RIGHT, WRONG
from support.traces import ANSWER, HEADS, LAYERS, SEGMENTS, sample_trace

from flexinspect.cli.main import main
from flexinspect.core.errors import UsageError
from flexinspect.exports.report.contents import (
    NO_NUMBER,
    SHARE_ONE,
    BranchContents,
    ReportContents,
)
from flexinspect.exports.report.trace_contents import ReportRequest, collect_contents
from flexinspect.exports.report.training_columns import BAD_LOSS
from flexinspect.masks.viewport import CLOSED, LEAKED, LOST, OPEN
from flexinspect.panels.panel_source import Source
from flexinspect.trace.reader import TraceReader, open_trace

Collect = Callable[..., ReportContents]


def collect(path: Path, **request: int) -> ReportContents:
    with open_trace(path) as reader:
        return collect_contents(Source(reader), ReportRequest(**request), lambda *_: None)


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> ReportContents:
    return collect(sample_trace(tmp_path_factory.mktemp("report") / "sample.flextrace"))


@pytest.fixture(scope="module")
def branch(sample: ReportContents) -> BranchContents:
    return sample.branches[0, 0]


def test_the_error_comes_first_with_its_place(sample: ReportContents) -> None:
    first = sample.findings[0].findings[0]
    assert (first.id, first.step, first.layer) == ("numbers.nan", 3, 2)
    assert sample.verdict == "1 error"
    assert not sample.verified


def test_a_trace_without_findings_says_what_was_checked(tmp_path: Path) -> None:
    contents = collect(sample_trace(tmp_path / "good.flextrace", nan_at=None))
    assert contents.findings == ()
    assert ("No findings are recorded in this trace.", False) in contents.verified


def test_tokens_have_their_steps_and_no_control_characters(branch: BranchContents) -> None:
    tokens = branch.tokens
    assert tokens.pos.tolist() == list(range(13 + len(ANSWER)))
    assert tokens.step.tolist() == [-1] * 13 + list(range(len(ANSWER)))
    assert tokens.text[1:4] == ["Who", " wrote", " Emma"]
    assert tokens.kind[0] == 1
    assert all(text.isprintable() for text in tokens.text)


def test_segments_have_colours_of_which_separators_have_none(branch: BranchContents) -> None:
    assert [(one.label, one.color) for one in branch.segments[:4]] == [
        ("bos", 0),
        ("paraphrase 1", 1),
        ("separator 1", -1),
        ("paraphrase 2", 2),
    ]


def test_the_facts_of_steps_are_those_of_the_trace(branch: BranchContents) -> None:
    steps = branch.steps
    assert steps.step.tolist() == list(range(len(ANSWER)))
    assert steps.phase == ["prefill"] + ["decode"] * 5
    np.testing.assert_allclose(steps.entropy, [0.2 + n / 10 for n in range(6)], rtol=1e-6)
    assert steps.pos.tolist() == [13 + n for n in range(6)]


def test_candidates_keep_their_order_and_texts(branch: BranchContents) -> None:
    candidates = branch.candidates
    assert candidates is not None
    assert candidates.id[0].tolist() == [50, 51, 52, 53, 54]
    np.testing.assert_allclose(candidates.logprob[0], [-0.1, -1.1, -2.1, -3.1, -4.1], rtol=1e-6)
    assert candidates.text["51"] == "·Jane"  # the last step's second candidate


def test_a_token_id_that_only_damage_causes_is_unknown(tmp_path: Path) -> None:
    path = sample_trace(tmp_path / "sample.flextrace")
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE candidates SET token_id = ? WHERE step = 0", (-(2**63),))
    candidates = collect(path).branches[0, 0].candidates
    assert candidates is not None
    assert set(candidates.id[0].tolist()) == {NO_NUMBER}
    assert (candidates.id[1] >= 0).any()


def test_a_layer_on_another_path_is_named(branch: BranchContents) -> None:
    paths = branch.paths
    assert paths is not None
    assert [paths.names[code] for code in paths.path[4]] == ["flex uncompiled"] * 3 + ["sdpa"]
    assert "Layer 3 ran sdpa at step 4" in paths.notes["4"][0]
    assert list(paths.notes) == ["4"]
    np.testing.assert_allclose(paths.check, 3e-6, rtol=1e-6)


def test_memory_is_exact(branch: BranchContents) -> None:
    assert branch.memory is not None
    assert branch.memory.figures["RSS"].tolist() == [400_000_000 + 1000 * n for n in range(6)]
    assert "CUDA allocated" not in branch.memory.figures


def test_attention_by_segment_is_exact_to_four_decimals(branch: BranchContents) -> None:
    attention = branch.attention
    assert attention is not None
    assert attention.share.shape == (6, LAYERS, HEADS, len(SEGMENTS))
    shares = attention.share[2, 1, 0] / SHARE_ONE
    np.testing.assert_allclose(shares, [0.2, 0.5, 0, 0.3, 0, 0, 0], atol=1e-5)
    assert attention.labels[1] == "paraphrase 1"
    np.testing.assert_allclose(attention.entropy[2], 1.7, rtol=1e-6)


def test_what_the_level_does_not_record_is_said(branch: BranchContents) -> None:
    assert branch.token_attention is None
    assert "--level extreme" in branch.missing["token_attention"]


def test_attention_by_token_is_that_of_the_stored_queries_and_keys(tmp_path: Path) -> None:
    synthetic = SyntheticGeneration()
    source = write(tmp_path / "rows.flextrace", synthetic)
    found = collect_contents(source, ReportRequest(), lambda *_: None).branches[0, 0]
    assert found.token_attention is not None
    assert found.token_attention.step.tolist() == list(range(synthetic.n_steps))
    for step, shares in enumerate(found.token_attention.share):
        row = N_PROMPT + step - 1
        for layer, head in np.ndindex(synthetic.layers, synthetic.heads):
            expected = synthetic.weights(layer, head, row)
            np.testing.assert_allclose(shares[layer, head] / SHARE_ONE, expected, atol=2e-5)


def test_attention_whose_check_fails_is_marked(tmp_path: Path) -> None:
    source = write(tmp_path / "bad.flextrace", SyntheticGeneration(lse_error=0.4))
    found = collect_contents(source, ReportRequest(), lambda *_: None).branches[0, 0]
    assert found.attention is not None
    assert found.attention.failed.all()


def test_planes_are_the_executed_and_the_declared_mask(branch: BranchContents) -> None:
    masks = branch.masks
    assert masks is not None
    (views,) = masks.views
    assert views.layers == list(range(LAYERS))
    assert [*views.planes] == ["executed", "received", "declared", "difference"]
    executed, declared = (masks.planes[views.planes[name]] for name in ("executed", "declared"))
    np.testing.assert_array_equal(executed, declared)
    assert executed[2, 1] == OPEN
    assert executed[7, 1] == CLOSED  # another paraphrase
    assert masks.pos.tolist() == list(range(18))
    assert len(masks.planes) < len(views.planes)  # equal planes are stored once


def test_layers_with_other_masks_have_planes_of_their_own(tmp_path: Path) -> None:
    contents = collect(mask_trace.write(tmp_path / "masks.flextrace")).branches[0, 0]
    assert contents.masks is not None
    views = {layer: one for one in contents.masks.views for layer in one.layers if one.head == 0}
    right, wrong = (
        contents.masks.planes[views[layer].planes["difference"]] for layer in (RIGHT, WRONG)
    )
    assert not np.isin(right, (LOST, LEAKED)).any()
    assert np.isin(wrong, (LOST, LEAKED)).any()
    assert "leaked" in views[WRONG].notes[-1]


def test_a_branch_has_only_its_own_steps(tmp_path: Path) -> None:
    contents = collect(unpack("branches", tmp_path))
    (root, *forks) = contents.generations[0].branches
    assert root.parent is None
    fork = forks[0]
    assert fork.fork_step is not None
    own = contents.branches[0, fork.branch].steps.step
    assert own[0] == fork.fork_step
    assert "instead of" in fork.change


def test_a_training_run_has_its_losses_and_norms(tmp_path: Path) -> None:
    path = unpack("training", tmp_path)
    contents = collect(path)
    training = contents.branches[0, 0].training
    assert training is not None
    with open_trace(path) as reader:
        steps = reader.training_steps(0)
    assert training.step.tolist() == [*steps]
    finite = [n for n, step in enumerate(steps.values()) if np.isfinite(step.loss)]
    np.testing.assert_allclose(
        training.loss[finite], [[*steps.values()][n].loss for n in finite], rtol=1e-6
    )
    assert dict(training.facts[0])["loss"]
    assert contents.generations[0].is_training


@pytest.mark.parametrize(("loss", "bad"), [(math.inf, BAD_LOSS), (math.nan, BAD_LOSS), (2.0, 0)])
def test_a_loss_that_is_not_finite_is_marked(loss: float, bad: int, tmp_path: Path) -> None:
    path = unpack("training", tmp_path)
    stored = None if math.isnan(loss) else loss
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE training_steps SET loss = ?, n_sick = 0 WHERE step = 1", (stored,))
    training = collect(path).branches[0, 0].training
    assert training is not None
    assert training.bad[1] == bad


def test_what_an_imported_trace_lacks_is_not_blamed_on_its_level(tmp_path: Path) -> None:
    dump, trace = unpack_dump("sglang-passes", tmp_path / "dump"), tmp_path / "run.flextrace"
    assert main(["import", str(dump), "-o", str(trace)]) == 0
    contents = collect(trace)
    missing = contents.branches[0, 0].missing
    assert missing.keys() == {"paths", "attention", "token_attention", "masks", "memory"}
    assert all("imported from SGLang's tensor dump" in reason for reason in missing.values())
    assert "imported 2" in contents.subtitle


def test_the_kernel_of_an_imported_call_is_unknown(tmp_path: Path) -> None:
    trace = tmp_path / "run.flextrace"
    assert main(["import", str(described_folder(tmp_path / "dump")), "-o", str(trace)]) == 0
    paths = collect(trace).branches[0, 0].paths
    assert paths is not None
    assert {paths.names[code] for code in paths.path.flat} == {"unknown"}


def test_an_interrupted_run_says_so(tmp_path: Path) -> None:
    contents = collect(unpack("interrupted", tmp_path))
    assert contents.notes


def test_a_damaged_part_is_left_out_and_the_rest_is_shown(tmp_path: Path) -> None:
    path = sample_trace(tmp_path / "sample.flextrace")
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE arrays SET checksum = checksum + 1 WHERE stream = 'mask.cells'")
    contents = collect(path)
    branch = contents.branches[0, 0]
    assert branch.masks is None
    assert "damaged" in branch.missing["masks"]
    assert any("a checksum does not match" in sentence for sentence in contents.left_out)
    assert branch.attention is not None


def test_one_generation_can_be_chosen(tmp_path: Path) -> None:
    path = sample_trace(tmp_path / "sample.flextrace")
    contents = collect(path, generation=1)
    assert [one.generation for one in contents.generations] == [1]
    assert [*contents.branches] == [(1, 0)]
    assert contents.findings == ()
    assert contents.verdict == "no findings"
    assert contents.verified
    with pytest.raises(UsageError, match="no generation 7"):
        collect(path, generation=7)


def test_generations_that_do_not_fit_are_left_out(tmp_path: Path) -> None:
    contents = collect(sample_trace(tmp_path / "two.flextrace"), max_bytes=2000)
    assert [one.generation for one in contents.generations] == [0]
    assert "generation 1 is left out" in contents.left_out[-1]


def test_every_step_is_counted_as_progress(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    with TraceReader(sample_trace(tmp_path / "sample.flextrace")) as reader:
        collect_contents(Source(reader), ReportRequest(), lambda *call: calls.append(call))
    assert calls[-1] == (12, 12)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
