"""Isolation, proved by experiment: change a segment's tokens, run again, and see which rows move.

The proof does not read any mask, so no patch, cache or fallback can hide a leak; only the declared
mask says which tokens may attend to which. A row that moves although it must not attend to the
changed segment is a leak. It enters in the first layer in which such a row moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flexinspect.analysis.proof_results import ISOLATED, UNREAD, Proof, format_amount, proof_finding
from flexinspect.core.errors import UsageError
from flexinspect.core.text import plural, printable
from flexinspect.masks.algebra import BoolArray, MaskSpec
from flexinspect.records.finding import Finding
from flexinspect.records.prompt import Segment, SegmentKind
from flexinspect_hooks.proofs.hidden_states import HiddenStates, RowChanges, capture_points
from flexinspect_hooks.proofs.leak_path import (
    IsolationLeak,
    above_noise,
    explain_leaks,
    is_rounding,
    rounding_noise,
    run_noise,
    unstable_finding,
)
from flexinspect_hooks.proofs.proof_subject import OnProgress, RunIds, Subject, subject_of
from flexinspect_hooks.user_code.declared_segments import SegmentArgument

_MAX_NAMES = 4


@dataclass(frozen=True, slots=True)
class ChangedSegment:
    """One changed segment: which rows must not move, which may, and which did.

    `ids` (batch, rows) are the changed ids. `isolated_rows` must not attend to the segment,
    `reader_rows` may; both are bool (batch, rows). `moved` is 0 within the noise.
    """

    segment: Segment
    ids: Tensor
    n_changed: int
    isolated_rows: BoolArray
    reader_rows: BoolArray
    moved: RowChanges

    @property
    def leaking_rows(self) -> BoolArray:
        """Isolated rows that moved, bool (points, batch, rows)."""
        rows: BoolArray = (self.moved > 0) & self.isolated_rows
        return rows

    @property
    def moved_rows(self) -> BoolArray:
        """Rows that moved at any point, bool (batch, rows)."""
        rows: BoolArray = np.any(self.moved > 0, axis=0)
        return rows


def prove_isolation(
    model: nn.Module,
    ids: Tensor | Sequence[int] | str,
    *,
    segments: Iterable[SegmentArgument] | None = None,
    tokenizer: Any = None,
    mask: str | MaskSpec | None = None,
    run: RunIds | None = None,
    attention_mask: Any = None,
    position_ids: Any = None,
    seed: int = 0,
    report: OnProgress | None = None,
) -> Proof:
    """Change each segment's tokens in turn, and compare all rows that must not attend to it.

    Args:
        model: the model, of which all decoder layers are compared.
        ids: the prompt, (rows,) or (batch, rows), or a text for `tokenizer`.
        segments: as for `flexinspect.watch`: spans (start, stop, label), texts, or (text, label),
            in batch row 0.
        mask: which tokens may attend to which, the name of a preset or a `MaskSpec`. Without it,
            the segments count as isolated, and what follows the last one may attend to all.
        run: `run(ids)` runs the model on `ids` as your code does. Without it, the model is called
            with the ids, `attention_mask` (any kind that the model takes) and `position_ids`.
        attention_mask: with `run`, a 2-D tensor that says which ids are padding.
        seed: for the choice of the replacement tokens.
        report: called with what is being done, and the finished part of it, from 0 to 1.

    Raises `UsageError` if nothing is declared that could be proved, or if the run does not use the
    ids that it receives.
    """
    subject = subject_of(
        model,
        ids,
        run=run,
        segments=segments,
        tokenizer=tokenizer,
        mask=mask,
        attention_mask=attention_mask,
        position_ids=position_ids,
    )
    return check_isolation(subject, seed=seed, report=report)


def check_isolation(subject: Subject, *, seed: int = 0, report: OnProgress | None = None) -> Proof:
    """Prove the isolation of a subject that declares which tokens may attend to which."""
    report = report or (lambda text, fraction: None)
    sources = _provable_segments(subject)
    states = HiddenStates(capture_points(subject.model), subject.n_rows)
    report("running the prompt twice", None)
    states.store_reference(subject.forward)
    noise = run_noise(states, subject)
    results: list[ChangedSegment] = []
    for number, segment in enumerate(sources):
        report(f"changing {printable(segment.label)}", number / len(sources))
        results.append(_change_segment(subject, states, segment, noise, seed))
    report("finding where leaks enter", 1.0)
    rounding = _rounding_noise(subject, states, results)
    if rounding is not None:
        noise = np.maximum(noise, rounding)
        results = [replace(one, moved=above_noise(one.moved, noise)) for one in results]
    leaks = [_first_leak(one) for one in results if one.leaking_rows.any()]
    findings = explain_leaks(leaks, subject, states, noise)
    findings += _unread_findings(subject, results)
    if noise.any():
        findings.append(unstable_finding(subject, states, noise, is_mixed=rounding is not None))
    if not leaks:
        findings.append(_isolated_finding(states, results, noise))
    lines = _isolation_lines(subject, states, results, noise)
    return Proof(
        "isolation", tuple(lines), tuple(findings), _isolation_facts(states, results, noise)
    )


# -- what is changed -------------------------------------------------------------------------------


def _provable_segments(subject: Subject) -> list[Segment]:
    """The segments that some row must not attend to. Raises `UsageError` if there is none."""
    if subject.scene.declared_mask is None:
        raise UsageError(
            "Nothing declares which segments are isolated.",
            hint="Name at least two segments=, or declare a mask=.",
        )
    segments = [
        segment
        for segment in _closed_segments(subject)
        if len(segment)
        and _isolated_rows(subject, segment).any()
        and _replaceable_positions(subject, segment)
    ]
    if not segments:
        raise UsageError(
            "The declared mask lets every row attend to every segment: there is nothing to prove."
        )
    return segments


def _closed_segments(subject: Subject) -> list[Segment]:
    """The segments; the last one, which is open, ends with the ids."""
    *inner, last = subject.scene.segments
    return [*inner, replace(last, stop=max(subject.n_rows, last.start))]


def _isolated_rows(subject: Subject, segment: Segment) -> BoolArray:
    """Rows outside a segment that must not attend to it, bool (batch, rows), without padding.

    No row may attend to padding, or to another sequence of the batch.
    """
    isolated = np.ones(subject.real.shape, np.bool_)
    isolated[0] = subject.real[0]
    isolated[0, segment.start : segment.stop] = False
    if subject.real[0, segment.start : segment.stop].any():
        isolated[0] &= ~_rows_allowed_to_attend(subject, segment)
    return isolated


def _rows_allowed_to_attend(subject: Subject, segment: Segment) -> BoolArray:
    """Rows that may attend to a segment, bool (rows,).

    Without a declared mask, these are all rows after it except those of other paraphrases.
    """
    n, declared = subject.n_rows, subject.scene.declared_mask
    assert declared is not None
    if not declared.assumed:
        attends: BoolArray = np.any(declared.spec.dense(n)[:, segment.start : segment.stop], axis=1)
        return attends
    allowed = np.arange(n) >= segment.start
    if segment.kind is SegmentKind.PARAPHRASE:
        for other in _closed_segments(subject):
            if other.kind is SegmentKind.PARAPHRASE:
                allowed[other.start : other.stop] = False
    return allowed


def _replaceable_positions(subject: Subject, segment: Segment) -> list[int]:
    """The positions of a segment that hold text, or padding."""
    token_ids = subject.ids[0].tolist()
    return [
        pos
        for pos in range(segment.start, segment.stop)
        if token_ids[pos] not in subject.special or not subject.real[0, pos]
    ]


def replace_ids(subject: Subject, positions: Sequence[int], seed: int) -> Tensor:
    """The subject's ids with other ids at some positions of batch row 0.

    The other ids are not special and do not occur in the prompt, so that a mask that is computed
    from the ids stays the same.
    """
    embedding: Any = getattr(subject.model, "get_input_embeddings", lambda: None)()
    config = getattr(subject.model, "config", None)
    n_ids = getattr(embedding, "num_embeddings", None) or getattr(config, "vocab_size", None)
    if not n_ids:
        n_ids = int(subject.ids.max()) + 1
    taken = subject.special | set(subject.ids.flatten().tolist())
    free = [token_id for token_id in range(int(n_ids)) if token_id not in taken]
    if not free:
        raise UsageError("The prompt uses every token of the vocabulary: no other token is left.")
    chosen = np.random.default_rng((seed, *positions)).choice(free, len(positions))
    ids = subject.ids.clone()
    ids[0, list(positions)] = torch.from_numpy(chosen).to(ids)
    return ids


# -- running it ------------------------------------------------------------------------------------


def _change_segment(
    subject: Subject, states: HiddenStates, segment: Segment, noise: RowChanges, seed: int
) -> ChangedSegment:
    positions = _replaceable_positions(subject, segment)
    ids = replace_ids(subject, positions, seed)
    moved = states.compare(lambda: subject.forward(ids))
    if not moved[0, 0, positions].any():
        raise UsageError(
            f"The run received other ids for {printable(segment.label)}, but the input of the "
            "layers did not change.",
            hint="run(ids) must run the model on the ids that it receives.",
        )
    moved = above_noise(moved, noise)
    isolated = _isolated_rows(subject, segment)
    readers = np.zeros_like(isolated)
    readers[0] = subject.real[0] & ~isolated[0]
    readers[0, segment.start : segment.stop] = False
    return ChangedSegment(segment, ids, len(positions), isolated, readers, moved)


def _rounding_noise(
    subject: Subject, states: HiddenStates, results: Sequence[ChangedSegment]
) -> RowChanges | None:
    """How far rounding alone moves rows at each point, None if no leak is due to rounding."""
    leaks = [_first_leak(one) for one in results if one.leaking_rows.any()]
    if not any(is_rounding(leak, subject, states) for leak in leaks):
        return None
    return rounding_noise(states, [np.where(one.isolated_rows, one.moved, 0) for one in results])


def _first_leak(result: ChangedSegment) -> IsolationLeak:
    """The leak of one changed segment: the first point where an isolated row moves."""
    leaking = result.leaking_rows
    point = int(leaking.any(axis=(1, 2)).argmax())
    return IsolationLeak(result.segment, point, leaking[point], result.moved, result.ids)


# -- report ----------------------------------------------------------------------------------------


def _readers(subject: Subject, result: ChangedSegment) -> tuple[list[str], list[str]]:
    """The segments that read the changed one, and those that may but do not."""
    reads: list[str] = []
    reads_not: list[str] = []
    for segment in _closed_segments(subject):
        rows = slice(segment.start, segment.stop)
        may = result.reader_rows[0, rows]
        if may.any():
            moves = bool((result.moved_rows[0, rows] & may).any())
            (reads if moves else reads_not).append(printable(segment.label))
    return reads, reads_not


def _unread_findings(subject: Subject, results: Sequence[ChangedSegment]) -> list[Finding]:
    """A finding on the paraphrases that the newest row may attend to but does not read."""
    newest = int(np.flatnonzero(subject.real[0])[-1])
    unread = [
        one
        for one in results
        if one.segment.kind is SegmentKind.PARAPHRASE
        and one.reader_rows[0, newest]
        and not one.moved_rows[0, newest]
    ]
    if not unread:
        return []
    names = [printable(one.segment.label) for one in unread]
    position = subject.scene.format_position(newest)
    sentence = (
        f"The row that chooses the next token ({position}) does not read {_join_names(names)}, "
        "which it may attend to: its states do not change in any layer."
    )
    positions = tuple(one.segment.start for one in unread)
    return [proof_finding(UNREAD, sentence, positions=positions, evidence={"unread": names})]


def _isolated_finding(
    states: HiddenStates, results: Sequence[ChangedSegment], noise: RowChanges
) -> Finding:
    rows = sum(int(one.isolated_rows.sum()) for one in results)
    n_layers = len(states.points) - 1
    stayed = (
        f"within the noise of the run ({format_amount(float(noise.max()))})"
        if noise.any()
        else "bit-equal"
    )
    sentence = (
        f"Isolated: {plural(len(results), 'segment')} changed one after the other, and the rows "
        f"that must not attend to them ({plural(rows, 'row')} compared) stayed {stayed} in all "
        f"{n_layers} layers."
    )
    evidence = {"rows": rows, "segments": len(results), "noise": float(noise.max())}
    return proof_finding(ISOLATED, sentence, evidence=evidence)


def _isolation_lines(
    subject: Subject, states: HiddenStates, results: Sequence[ChangedSegment], noise: RowChanges
) -> list[str]:
    mask = subject.scene.declared_mask
    assert mask is not None
    declared = "assumed, as no mask was declared" if mask.assumed else "declared"
    same = "bit-equal" if not noise.any() else f"{format_amount(float(noise.max()))} apart"
    head = (
        f"isolation under {mask.spec.name} ({declared}): {len(states.points) - 1} layers, "
        f"{subject.n_rows} rows; the same ids twice: {same}"
    )
    lines = [head]
    for one in results:
        reads, reads_not = _readers(subject, one)
        leaks = int(one.leaking_rows.any(axis=0).sum())
        rows = plural(int(one.isolated_rows.sum()), "row")
        result = f"{leaks} of {rows} MOVED" if leaks else f"{rows} kept"
        parts = [f"  {printable(one.segment.label)} ({plural(one.n_changed, 'token')}): {result}"]
        parts += [f"read by {_shorten_names(reads)}"] if reads else []
        parts += [f"not read by {_shorten_names(reads_not)}"] if reads_not else []
        lines.append("; ".join(parts))
    return lines


def _isolation_facts(
    states: HiddenStates, results: Sequence[ChangedSegment], noise: RowChanges
) -> dict[str, Any]:
    return {
        "layers": [point.layer for point in states.points[1:]],
        "rows": states.n_rows,
        "noise": [float(value) for value in noise],
        "changed": [
            {
                "label": one.segment.label,
                "start": one.segment.start,
                "stop": one.segment.stop,
                "rows_kept": int(one.isolated_rows.sum()),
                "rows_moved": int(one.leaking_rows.any(axis=0).sum()),
                "largest": float(np.where(one.isolated_rows, one.moved, 0).max()),
                "readers": int(one.reader_rows.sum()),
                "readers_moved": int((one.reader_rows & one.moved_rows).sum()),
            }
            for one in results
        ],
    }


def _shorten_names(names: Sequence[str]) -> str:
    """Names separated by commas; of many names the first few and the last."""
    if len(names) <= _MAX_NAMES:
        return ", ".join(names)
    hidden = len(names) - _MAX_NAMES
    return f"{', '.join(names[: _MAX_NAMES - 1])}, {hidden} more, {names[-1]}"


def _join_names(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
