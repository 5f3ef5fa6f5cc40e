"""Isolation, proved by experiment: change a segment's tokens, run again, and see which rows move.

The proof does not read any mask, so no patch, cache or fallback can hide a leak; only the declared
mask says which tokens may attend to which. A row that moves although it must not attend to the
changed segment is a leak. It enters in the first layer in which such a row moves.

A mask may declare that paraphrases attend to each other, as a causal one does. Then the proof can
only show that the declaration holds; whether paraphrases read each other is judged besides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from flexinspect.analysis.proof_results import (
    AS_DECLARED,
    ISOLATED,
    MIXED,
    UNREAD,
    Proof,
    format_amount,
    proof_finding,
)
from flexinspect.core.errors import UsageError
from flexinspect.core.text import join_labels, plural, printable
from flexinspect.masks.mask_presets import BoolArray
from flexinspect.records.finding import Finding
from flexinspect.records.prompt import Segment, SegmentKind
from flexinspect_hooks.proofs import leak_path
from flexinspect_hooks.proofs.hidden_states import HiddenStates
from flexinspect_hooks.proofs.leak_path import ChangedSegment
from flexinspect_hooks.proofs.proof_subject import Subject

_MAX_NAMES = 4


def check_isolation(subject: Subject, *, seed: int = 0) -> Proof:
    """Change each segment's tokens in turn, and compare all rows that must not attend to it.

    `seed` is for the choice of the replacement tokens. Raises `UsageError` if nothing is declared
    that could be proved, or if the run does not use the ids that it receives.
    """
    sources = _provable_segments(subject)
    subject.report("running the prompt twice", None)
    states = HiddenStates(subject)
    changes = []
    for number, segment in enumerate(sources):
        subject.report(f"changing {printable(segment.label)}", number / len(sources))
        changes.append(_change_segment(states, segment, seed))
    subject.report("finding where leaks enter", 1.0)
    is_mixed = any(leak_path.is_rounding(one, states) for one in changes if one.has_leak)
    if is_mixed:
        states.noise = np.maximum(states.noise, leak_path.rounding_noise(states, changes))
        changes = [replace(one, moved=states.above_noise(one.moved)) for one in changes]
    findings = leak_path.explain_leaks([one for one in changes if one.has_leak], states)
    findings += _unread_findings(subject, changes)
    if states.noise.any():
        findings.append(leak_path.unstable_finding(states, is_mixed=is_mixed))
    read = _paraphrases_read(subject, changes)
    mixed = _paraphrases_read(subject, changes, allowed=True)
    if mixed:
        findings.append(_mixed_finding(subject, mixed))
    if not any(one.has_leak for one in changes):
        findings.append(_holds_finding(states, changes, mixed))
    facts = {
        "layers": [point.layer for point in states.points[1:]],
        "rows": subject.n_rows,
        "noise": states.noise.tolist(),
        "changed": [_change_facts(one) for one in changes],
        "paraphrases_read": {name: list(names) for name, names in read.items()},
    }
    lines = (*_isolation_lines(states, changes), *_paraphrase_lines(subject, read))
    return Proof("isolation", lines, tuple(findings), facts)


# -- what is changed -------------------------------------------------------------------------------


def _provable_segments(subject: Subject) -> list[Segment]:
    """The segments that some row must not attend to, and paraphrases that others might read.

    Raises `UsageError` if there is none.
    """
    if subject.context.declared_mask is None:
        raise UsageError(
            "Nothing declares which segments are isolated.",
            hint="Name at least two segments=, or declare a mask=.",
        )
    paraphrases = _paraphrases(subject)
    compared = paraphrases if len(paraphrases) > 1 else ()
    segments = [
        segment
        for segment in _closed_segments(subject)
        if len(segment)
        and (segment in compared or _isolated_rows(subject, segment).any())
        and _replaceable_positions(subject, segment)
    ]
    if not segments:
        raise UsageError(
            "The declared mask lets every row attend to every segment: there is nothing to prove."
        )
    return segments


def _closed_segments(subject: Subject) -> list[Segment]:
    """The segments; the last one, which is open, ends with the ids."""
    *inner, last = subject.context.segments
    return [*inner, replace(last, stop=max(subject.n_rows, last.start))]


def _paraphrases(subject: Subject) -> list[Segment]:
    return [one for one in _closed_segments(subject) if one.kind is SegmentKind.PARAPHRASE]


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
    n, declared = subject.n_rows, subject.context.declared_mask
    assert declared is not None
    if not declared.assumed:
        attends: BoolArray = np.any(declared.spec.dense(n)[:, segment.start : segment.stop], axis=1)
        return attends
    allowed = np.arange(n) >= segment.start
    if segment.kind is SegmentKind.PARAPHRASE:
        for other in _paraphrases(subject):
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


def _change_segment(states: HiddenStates, segment: Segment, seed: int) -> ChangedSegment:
    subject = states.subject
    positions = _replaceable_positions(subject, segment)
    ids = replace_ids(subject, positions, seed)
    moved = states.compare(ids)
    if not moved[0, 0, positions].any():
        raise UsageError(
            f"The run received other ids for {printable(segment.label)}, but the input of the "
            "layers did not change.",
            hint="run(ids) must run the model on the ids that it receives.",
        )
    isolated = _isolated_rows(subject, segment)
    readers = np.zeros_like(isolated)
    readers[0] = subject.real[0] & ~isolated[0]
    readers[0, segment.start : segment.stop] = False
    moved = states.above_noise(moved)
    return ChangedSegment(segment, ids, len(positions), isolated, readers, moved)


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
    position = subject.context.format_position(newest)
    sentence = (
        f"The row that chooses the next token ({position}) does not read {join_labels(names)}, "
        "which it may attend to: its states do not change in any layer."
    )
    positions = tuple(one.segment.start for one in unread)
    return [proof_finding(UNREAD, sentence, positions=positions, evidence={"unread": names})]


def _paraphrases_read(
    subject: Subject, changes: Sequence[ChangedSegment], *, allowed: bool = False
) -> dict[str, tuple[str, ...]]:
    """The labels of the paraphrases that each one reads; with `allowed`, as the mask declares."""
    paraphrases = _paraphrases(subject)
    read: dict[str, list[str]] = {}
    for one in changes:
        if one.segment not in paraphrases:
            continue
        moved = one.reader_rows & one.moved_rows if allowed else one.moved_rows
        for other in paraphrases:
            if other != one.segment and moved[0, other.start : other.stop].any():
                read.setdefault(printable(other.label), []).append(printable(one.segment.label))
    return {name: tuple(names) for name, names in read.items()}


def _mixed_finding(subject: Subject, mixed: dict[str, tuple[str, ...]]) -> Finding:
    declared = subject.context.declared_mask
    assert declared is not None
    reads = [f"{name} reads {_shorten_names(names)}" for name, names in mixed.items()]
    more = f"; {len(reads) - _MAX_NAMES} more" if len(reads) > _MAX_NAMES else ""
    sentence = (
        "The paraphrases are not isolated from each other, as the declared mask "
        f"{declared.spec.name} allows: {'; '.join(reads[:_MAX_NAMES])}{more}."
    )
    return proof_finding(MIXED, sentence, evidence={"reads": mixed})


def _holds_finding(
    states: HiddenStates, changes: Sequence[ChangedSegment], mixed: dict[str, tuple[str, ...]]
) -> Finding:
    """The finding that the declared mask holds; only isolated paraphrases are called isolated."""
    declared = states.subject.context.declared_mask
    assert declared is not None
    rows, noise = sum(int(one.isolated_rows.sum()) for one in changes), float(states.noise.max())
    stayed = f"within the noise of the run ({format_amount(noise)})" if noise else "bit-equal"
    verdict = f"As the mask {declared.spec.name} declares" if mixed else "Isolated"
    sentence = (
        f"{verdict}: {plural(len(changes), 'segment')} changed one after the other, and the rows "
        f"that must not attend to them ({plural(rows, 'row')} compared) stayed {stayed} in all "
        f"{len(states.points) - 1} layers."
    )
    if not mixed and len(_paraphrases(states.subject)) > 1:
        sentence += " No paraphrase reads another."
    evidence = {"rows": rows, "segments": len(changes), "noise": noise}
    return proof_finding(AS_DECLARED if mixed else ISOLATED, sentence, evidence=evidence)


def _isolation_lines(states: HiddenStates, changes: Sequence[ChangedSegment]) -> Iterator[str]:
    mask, noise = states.subject.context.declared_mask, float(states.noise.max())
    assert mask is not None
    declared = "assumed, as no mask was declared" if mask.assumed else "declared"
    same = f"{format_amount(noise)} apart" if noise else "bit-equal"
    yield (
        f"isolation under {mask.spec.name} ({declared}): {len(states.points) - 1} layers, "
        f"{states.subject.n_rows} rows; the same ids twice: {same}"
    )
    yield "  rows that must not attend to the changed segment are the same (kept) or not (MOVED):"
    for one in changes:
        facts = _change_facts(one)
        reads, reads_not = _readers(states.subject, one)
        rows = plural(facts["rows_kept"], "row")
        result = f"{facts['rows_moved']} of {rows} MOVED" if one.has_leak else f"{rows} kept"
        parts = [f"  {printable(one.segment.label)} ({plural(one.n_changed, 'token')}): {result}"]
        parts += [f"read by {_shorten_names(reads)}"] if reads else []
        parts += [f"not read by {_shorten_names(reads_not)}"] if reads_not else []
        yield "; ".join(parts)


def _paraphrase_lines(subject: Subject, read: dict[str, tuple[str, ...]]) -> Iterator[str]:
    """Which paraphrases read each other; nothing for fewer than two."""
    if len(_paraphrases(subject)) < 2:
        return
    if not read:
        yield "  paraphrases against each other: none reads another"
    for name, names in read.items():
        yield f"  paraphrases against each other: {name} reads {_shorten_names(names)}"


def _change_facts(one: ChangedSegment) -> dict[str, Any]:
    return {
        "label": one.segment.label,
        "start": one.segment.start,
        "stop": one.segment.stop,
        "rows_kept": int(one.isolated_rows.sum()),
        "rows_moved": int(one.leaking_rows.any(axis=0).sum()),
        "largest": float(np.where(one.isolated_rows, one.moved, 0).max()),
        "readers": int(one.reader_rows.sum()),
        "readers_moved": int((one.reader_rows & one.moved_rows).sum()),
    }


def _shorten_names(names: Sequence[str]) -> str:
    """Names separated by commas; of many names the first few and the last."""
    if len(names) <= _MAX_NAMES:
        return ", ".join(names)
    hidden = len(names) - _MAX_NAMES
    return f"{', '.join(names[: _MAX_NAMES - 1])}, {hidden} more, {names[-1]}"
