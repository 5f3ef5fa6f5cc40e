"""Comparison of branches of a synthetic trace, with numbers that can be checked."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from support.traces import N_PROMPT, RUN, SEGMENTS, sample_generation, sample_step

from flexinspect.analysis import branch_comparison
from flexinspect.records.step import Candidate, GenerationEnd, MaskRecord, StepRecord
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.queries import find_text, last_pos, read_tokens, token_ranges
from flexinspect.trace.reader import TraceReader


def forked(path: Path) -> TraceReader:
    """Return a base of 6 steps, a fork of it at step 2, and a fork of that at step 4."""
    with TraceWriter.create(path, RUN) as writer:
        writer.begin_generation(sample_generation(0))
        for step in range(6):
            writer.write_step(sample_step(step))
        change = {"kind": "token", "token_id": 77, "text": " Rome", "instead_text": " Jane"}
        writer.begin_branch(0, 1, 0, 2, change, SEGMENTS)
        for step in (2, 3, 4):
            writer.write_step(own(step, 1, 77 if step == 2 else 70 + step))
        edit = {"kind": "mask", "edits": ["preset causal", "cell 3 1"], "recomputed": True}
        writer.begin_branch(0, 2, 1, 4, edit, SEGMENTS)
        writer.write_step(own(4, 2, 90))
        end = GenerationEnd(0, "finished", "x", SEGMENTS, "eos", 1010.0)
        for branch in (0, 1, 2):
            writer.end_generation(replace(end, branch=branch))
    return TraceReader(path)


def own(step: int, branch: int, token_id: int) -> StepRecord:
    record = sample_step(step)
    assert record.logits is not None
    (token,) = record.tokens
    logits = replace(record.logits, chosen_id=token_id)
    name = f" t{token_id}"
    made = replace(token, token_id=token_id, token=name, text=name)
    return replace(record, branch=branch, tokens=(made,), logits=logits, findings=(), masks=())


@pytest.fixture
def reader(tmp_path: Path) -> TraceReader:
    return forked(tmp_path / "run.flextrace")


def test_the_tree_follows_parents_and_describes_changes(reader: TraceReader) -> None:
    nodes = branch_comparison.branch_tree(reader, 0)
    assert [(n.row.branch, n.depth, n.children, n.n_steps) for n in nodes] == [
        *((0, 0, (1,), 6), (1, 1, (2,), 3), (2, 2, (), 1))
    ]
    assert [node.change_text for node in nodes] == [
        *("", "' Rome' instead of ' Jane'"),
        "preset causal; cell 3 1, all keys recomputed",
    ]


def test_a_branch_has_its_parents_tokens_before_the_fork(reader: TraceReader) -> None:
    assert [*token_ranges(reader, 0, 2)] == [
        (0, 0, N_PROMPT + 2),
        (1, N_PROMPT + 2, N_PROMPT + 4),
        (2, N_PROMPT + 4, None),
    ]
    base, mine = read_tokens(reader, 0), read_tokens(reader, 0, 2)
    assert mine[: N_PROMPT + 2] == base[: N_PROMPT + 2]
    assert [token.token_id for token in mine[N_PROMPT + 2 :]] == [77, 73, 90]
    assert [token.pos for token in mine] == list(range(N_PROMPT + 5))
    assert (
        read_tokens(reader, 0, 2, N_PROMPT + 1, N_PROMPT + 4) == mine[N_PROMPT + 1 : N_PROMPT + 4]
    )
    assert read_tokens(reader, 0, 2, limit=3) == mine[:3]
    assert last_pos(reader, 0, 2) == N_PROMPT + 4
    assert last_pos(reader, 0) == N_PROMPT + 5


def test_a_search_in_a_branch_finds_parents_tokens_before_the_fork_only(
    reader: TraceReader,
) -> None:
    assert find_text(reader, "wrote", 0, 2) == (2, None)
    assert find_text(reader, "t73", 0, 2) == (N_PROMPT + 3, 3)
    assert find_text(reader, "Aus", 0, 2) == (N_PROMPT + 1, 1)
    assert find_text(reader, "ten", 0, 0) == (N_PROMPT + 2, 2)
    assert find_text(reader, "ten", 0, 2) is None
    assert find_text(reader, "wrote", 0, 2, after=5) is None


def test_tokens_are_paired_by_position(reader: TraceReader) -> None:
    pairs = branch_comparison.token_pairs(reader, 0, 0, 2, N_PROMPT)
    assert [pair.is_same for pair in pairs] == [True, True, False, False, False, False]
    assert pairs[-1].other is None
    assert pairs[2].other is not None
    assert pairs[2].other.token_id == 77


def test_the_first_difference_is_the_fork_or_where_one_ends(reader: TraceReader) -> None:
    assert branch_comparison.first_difference(reader, 0, 0, 1) == 2
    assert branch_comparison.first_difference(reader, 0, 2, 0) == 2
    assert branch_comparison.first_difference(reader, 0, 1, 2) == 4
    assert branch_comparison.first_difference(reader, 0, 1, 1) is None
    assert branch_comparison.common_steps(reader, 0, 1, 2) == 4


def test_the_same_candidates_have_no_divergence(reader: TraceReader) -> None:
    change = branch_comparison.step_change(reader, 0, 3, 0, 1)
    assert change is not None
    assert (change.basis, change.kl, change.largest) == ("candidates", 0.0, 0.0)
    assert branch_comparison.step_change(reader, 0, 5, 0, 1) is None  # branch 1 has no step 5


def test_candidates_give_a_lower_bound_of_the_divergence() -> None:
    p, q = np.array([0.5, 0.3, 0.1, 0.1]), np.array([0.2, 0.6, 0.15, 0.05])
    whole = float((p * np.log(p / q)).sum())
    one, other = ([candidate(i, math.log(row[i])) for i in range(2)] for row in (p, q))
    change = branch_comparison._change_from_candidates(0, one, other)
    merged = [0.5, 0.3, 0.2], [0.2, 0.6, 0.2]
    expected = sum(a * math.log(a / b) for a, b in zip(*merged, strict=True))
    assert change.kl == pytest.approx(expected)
    assert change.kl < whole
    assert change.changes[0][0] == 0
    assert change.largest == pytest.approx(math.log(0.5 / 0.2))


def candidate(token_id: int, logprob: float) -> Candidate:
    return Candidate(token_id, token_id, f"t{token_id}", logprob, logprob, logprob, logprob)


def test_all_logits_are_used_where_both_steps_have_them() -> None:
    p, q = np.array([0.5, 0.3, 0.1, 0.1]), np.array([0.2, 0.6, 0.15, 0.05])
    listed = [candidate(1, math.log(0.3))]
    change = branch_comparison._change_from_logits(4, np.log(p) + 3, np.log(q) - 1, listed)
    assert change.basis == "all logits"
    assert change.kl == pytest.approx(float((p * np.log(p / q)).sum()))
    assert change.changes == (
        (1, "t1", pytest.approx(math.log(0.3) + 3), pytest.approx(math.log(0.6) - 1)),
    )


def test_masks_are_compared_row_by_row_where_both_are_known(tmp_path: Path) -> None:
    reader = forked(tmp_path / "run.flextrace")
    same = branch_comparison.mask_change(reader, 0, 3, 0, 1)
    assert same is not None
    assert (same.n_opened, same.n_closed) == (0, 0)
    assert same.n_rows > 0


def test_equal_masks_of_later_steps_have_the_offsets_of_their_steps(tmp_path: Path) -> None:
    window = MaskRecord("window", "block", 1, 1, 1, 4, N_PROMPT, N_PROMPT - 3, 128, 128)
    window = replace(window, cells=np.array([[[False, True, True, True]]]))
    with TraceWriter.create(tmp_path / "run.flextrace", RUN) as writer:
        writer.begin_generation(sample_generation(0))
        writer.write_step(sample_step(0))
        for number in (1, 2, 3):  # the same mask, which is stored with the first of them
            step = sample_step(number)
            calls = tuple(replace(call, mask="window", kv_len=4) for call in step.calls)
            writer.write_step(replace(step, calls=calls, masks=(window,) if number == 1 else ()))
    reader = TraceReader(tmp_path / "run.flextrace")
    rows = branch_comparison.mask_rows(
        reader,
        0,
        3,
        0,
        lambda owner, at: branch_comparison.step_mask(reader, 0, at, owner, None, 0),
    )
    assert rows is not None
    assert rows.known.all()
    for row in range(N_PROMPT, N_PROMPT + 3):
        assert np.flatnonzero(rows.cells[row]).tolist() == [row - 2, row - 1, row]


def test_a_replayed_branch_is_described() -> None:
    text = branch_comparison.describe_change({"kind": "replay", "why": ["x"]})
    assert text == "the replayed step differed from the recorded one"
    assert branch_comparison.describe_change({"kind": "token", "token_id": 5, "instead_id": 6}) == (
        "token 5 instead of token 6"
    )


def test_candidates_that_the_other_does_not_list_raise_the_bound() -> None:
    p, q = np.array([0.9, 0.05, 0.03, 0.02]), np.array([0.02, 0.08, 0.7, 0.2])
    whole = float((p * np.log(p / q)).sum())
    one = [candidate(0, math.log(p[0]))]
    other = [
        Candidate(rank, token, f"t{token}", *[math.log(q[token])] * 4)
        for rank, token in enumerate((2, 3))
    ]
    change = branch_comparison._change_from_candidates(0, one, other)
    assert 1.0 < change.kl < whole
