"""Isolation, proved by doing: change a segment's tokens, run again, and see which rows move.

Nothing is asked of the masks, so no patch, cache or fallback can hide a leak; only what may see
what has to be declared. Whatever moves a row that must not move is a leak, and where it enters is
told by the first layer in which a row moves.
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
from flexinspect_hooks.user_code.declared_prompt import SegmentArgument

_MAX_NAMES = 4


@dataclass(frozen=True, slots=True)
class ChangedSegment:
    """One segment changed: who had to stay, who may have moved, and who did.

    `ids` (batch, rows) were run. `kept` and `readers` are bool (batch, rows); `moved` is as
    `rows.Moved`, 0 up to the noise.
    """

    segment: Segment
    ids: Tensor
    n_changed: int
    isolated_rows: BoolArray
    reader_rows: BoolArray
    moved: RowChanges

    @property
    def leaking_rows(self) -> BoolArray:
        """Which rows moved that had to stay, bool (points, batch, rows)."""
        rows: BoolArray = (self.moved > 0) & self.isolated_rows
        return rows

    @property
    def moved_rows(self) -> BoolArray:
        """Which rows moved anywhere, bool (batch, rows)."""
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
    """Change each segment's tokens in turn, and compare all rows that must not see it.

    `ids` (rows,) or (batch, rows), or a text for `tokenizer`. `segments` as `flexinspect.watch`
    takes them: spans (start, stop, label), texts, or (text, label); they lie in batch row 0. `mask`
    declares who may see what, a preset's name or a `MaskSpec`; without it segments are taken to be
    isolated, and what follows the last one to read them all. `run(ids)` runs the model on given
    ids, however your code does that; without it the model is called with the ids,
    `attention_mask` (any kind that the model takes) and `position_ids`. With `run`, a 2-D
    `attention_mask` tells which ids are padding. `seed` chooses the tokens that take their place.

    Raises `UsageError` when nothing is declared that could be proved, or the run does not feed
    what it is given.
    """
    subject = subject_of(
        *(model, ids),
        run=run,
        segments=segments,
        tokenizer=tokenizer,
        mask=mask,
        attention_mask=attention_mask,
        position_ids=position_ids,
    )
    return check_isolation(subject, seed=seed, report=report)


def check_isolation(subject: Subject, *, seed: int = 0, report: OnProgress | None = None) -> Proof:
    """Prove the isolation of a subject whose scene declares who may see what."""
    say = report or (lambda text, fraction: None)
    sources = _provable_segments(subject)
    states = HiddenStates(capture_points(subject.model), subject.n_rows)
    say("running the prompt twice", None)
    states.store_reference(subject.forward)
    noise = run_noise(states, subject)
    results: list[ChangedSegment] = []
    for number, segment in enumerate(sources):
        say(f"changing {printable(segment.label)}", number / len(sources))
        results.append(_change_segment(subject, states, segment, noise, seed))
    say("looking where leaks enter", 1.0)
    mixed = _rounding_noise(subject, states, results)
    if mixed is not None:
        noise = np.maximum(noise, mixed)
        results = [replace(one, moved=above_noise(one.moved, noise)) for one in results]
    leaks = [_first_leak(one) for one in results if one.leaking_rows.any()]
    findings = [
        *explain_leaks(leaks, subject, states, noise),
        *_unread_findings(subject, results),
        *(
            [unstable_finding(subject, states, noise, is_mixed=mixed is not None)]
            if noise.any()
            else []
        ),
        *([] if leaks else [_isolated_finding(states, results, noise)]),
    ]
    lines = _isolation_lines(subject, states, results, noise)
    return Proof(
        "isolation", tuple(lines), tuple(findings), _isolation_facts(states, results, noise)
    )


# -- what is changed -------------------------------------------------------------------------------


def _provable_segments(subject: Subject) -> list[Segment]:
    """Return the segments of which some row must not see anything. Raises `UsageError`."""
    if subject.scene.declared_mask is None:
        raise UsageError(
            "Nothing says what is isolated from what.",
            hint="Name at least two segments=, or declare a mask=.",
        )
    found_ones = [
        segment
        for segment in _closed_segments(subject)
        if len(segment)
        and _isolated_rows(subject, segment).any()
        and _replaceable_positions(subject, segment)
    ]
    if not found_ones:
        raise UsageError("The declared mask lets every row see every segment: nothing to prove.")
    return found_ones


def _closed_segments(subject: Subject) -> list[Segment]:
    """Return the segments, the last one ended where the ids end."""
    *inner, last = subject.scene.segments
    n = subject.n_rows
    ends = Segment(last.start, max(n, last.start), last.label, last.kind, last.owner)
    return [*inner, ends]


def _isolated_rows(subject: Subject, segment: Segment) -> BoolArray:
    """Return which rows must not see a segment, bool (batch, rows): real ones, outside of it.

    Nobody sees padding, and no sequence of a batch sees another.
    """
    kept = np.ones(subject.real.shape, np.bool_)
    kept[0] = subject.real[0]
    kept[0, segment.start : segment.stop] = False
    if subject.real[0, segment.start : segment.stop].any():
        kept[0] &= ~_rows_allowed_to_attend(subject, segment)
    return kept


def _rows_allowed_to_attend(subject: Subject, segment: Segment) -> BoolArray:
    """Return which rows may see a segment, bool (rows,).

    Without a declared mask these are all that come after it but for the other paraphrases.
    """
    n, intent = subject.n_rows, subject.scene.declared_mask
    assert intent is not None
    if not intent.assumed:
        seen: BoolArray = np.any(intent.spec.dense(n)[:, segment.start : segment.stop], axis=1)
        return seen
    may = np.arange(n) >= segment.start
    if segment.kind is SegmentKind.PARAPHRASE:
        for other in _closed_segments(subject):
            if other.kind is SegmentKind.PARAPHRASE:
                may[other.start : other.stop] = False
    return may


def _replaceable_positions(subject: Subject, segment: Segment) -> list[int]:
    """Return the positions of a segment that hold text, or padding."""
    token_ids = subject.ids[0].tolist()
    return [
        pos
        for pos in range(segment.start, segment.stop)
        if token_ids[pos] not in subject.special or not subject.real[0, pos]
    ]


def replace_ids(subject: Subject, positions: Sequence[int], seed: int) -> Tensor:
    """Return the subject's ids with others at some positions of batch row 0.

    They are ordinary ones that occur nowhere in the prompt, so that a mask made from the ids
    themselves stays as it is.
    """
    embedding: Any = getattr(subject.model, "get_input_embeddings", lambda: None)()
    config = getattr(subject.model, "config", None)
    n_ids = getattr(embedding, "num_embeddings", None) or getattr(config, "vocab_size", None)
    if not n_ids:
        n_ids = int(subject.ids.max()) + 1
    taken = subject.special | set(subject.ids.flatten().tolist())
    free = [token_id for token_id in range(int(n_ids)) if token_id not in taken]
    if not free:
        raise UsageError("The prompt uses every token of the vocabulary: none is left to put in.")
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
            f"The run was given other ids for {printable(segment.label)}, and what feeds the "
            "layers did not change.",
            hint="run(ids) must feed the ids that it is given.",
        )
    moved = above_noise(moved, noise)
    kept = _isolated_rows(subject, segment)
    readers = np.zeros_like(kept)
    readers[0] = subject.real[0] & ~kept[0]
    readers[0, segment.start : segment.stop] = False
    return ChangedSegment(segment, ids, len(positions), kept, readers, moved)


def _rounding_noise(
    subject: Subject, states: HiddenStates, results: Sequence[ChangedSegment]
) -> RowChanges | None:
    """Return how far rounding alone moves rows at each point, None where nothing tells of any."""
    leaks = [_first_leak(one) for one in results if one.leaking_rows.any()]
    if not any(is_rounding(leak, subject, states) for leak in leaks):
        return None
    return rounding_noise(states, [np.where(one.isolated_rows, one.moved, 0) for one in results])


def _first_leak(result: ChangedSegment) -> IsolationLeak:
    """Return the leak of one changed segment: the first point where a row moves that must not."""
    leaking = result.leaking_rows
    point = int(leaking.any(axis=(1, 2)).argmax())
    return IsolationLeak(result.segment, point, leaking[point], result.moved, result.ids)


# -- what it says ----------------------------------------------------------------------------------


def _readers(subject: Subject, result: ChangedSegment) -> tuple[list[str], list[str]]:
    """Return which segments read the changed one and which do not, of those that may."""
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
    """Say which paraphrases the newest row may see and does not."""
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
    sentence = (
        f"The row that chooses the next token ({subject.scene.format_position(newest)}) does not read "
        f"{_join_names(names)}, which it may see: its states stay as they are in every layer."
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
        else "bit by bit as it was"
    )
    sentence = (
        f"Isolated: {plural(len(results), 'segment')} changed one after the other, and what must "
        f"not see them ({plural(rows, 'row')} compared) stayed {stayed} in all {n_layers} layers."
    )
    evidence = {"rows": rows, "segments": len(results), "noise": float(noise.max())}
    return proof_finding(ISOLATED, sentence, evidence=evidence)


def _isolation_lines(
    subject: Subject, states: HiddenStates, results: Sequence[ChangedSegment], noise: RowChanges
) -> list[str]:
    intent = subject.scene.declared_mask
    assert intent is not None
    declared = "assumed, as no mask was declared" if intent.assumed else "declared"
    same = "bit-equal" if not noise.any() else f"{format_amount(float(noise.max()))} apart"
    head = (
        f"isolation under {intent.spec.name} ({declared}): {len(states.points) - 1} layers, "
        f"{subject.n_rows} rows; the same ids twice: {same}"
    )
    out = [head]
    for one in results:
        reads, reads_not = _readers(subject, one)
        leaks = int(one.leaking_rows.any(axis=0).sum())
        kept = int(one.isolated_rows.sum())
        how = f"{leaks} of {plural(kept, 'row')} MOVED" if leaks else f"{plural(kept, 'row')} kept"
        said = [f"  {printable(one.segment.label)} ({plural(one.n_changed, 'token')}): {how}"]
        said += [f"read by {_shorten_names(reads)}"] if reads else []
        said += [f"not read by {_shorten_names(reads_not)}"] if reads_not else []
        out.append("; ".join(said))
    return out


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
    """Return names with commas, the last and the first few of many."""
    if len(names) <= _MAX_NAMES:
        return ", ".join(names)
    hidden = len(names) - _MAX_NAMES
    return f"{', '.join(names[: _MAX_NAMES - 1])}, {hidden} more, {names[-1]}"


def _join_names(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
