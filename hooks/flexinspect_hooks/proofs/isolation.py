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

from flexinspect.errors import UsageError
from flexinspect.findings import Finding
from flexinspect.masks import BoolArray, MaskRule
from flexinspect.prompts import Segment, SegmentKind
from flexinspect.proofs import ISOLATED, UNREAD, Proof, amount, found
from flexinspect.rules.words import counted, printable
from flexinspect_hooks.proofs.leaks import Leak, explained
from flexinspect_hooks.proofs.noise import above, is_mixing, mixing_noise, own_noise, unstable
from flexinspect_hooks.proofs.rows import Moved, States, points_of
from flexinspect_hooks.proofs.subject import Report, RunIds, Subject, subject_of
from flexinspect_hooks.spans import Wish

_MOST_NAMES = 4


@dataclass(frozen=True, slots=True)
class Changed:
    """One segment changed: who had to stay, who may have moved, and who did.

    `ids` (batch, rows) were run. `kept` and `readers` are bool (batch, rows); `moved` is as
    `rows.Moved`, 0 up to the noise.
    """

    segment: Segment
    ids: Tensor
    n_changed: int
    kept: BoolArray
    readers: BoolArray
    moved: Moved

    @property
    def leaking(self) -> BoolArray:
        """Which rows moved that had to stay, bool (points, batch, rows)."""
        rows: BoolArray = (self.moved > 0) & self.kept
        return rows

    @property
    def ever(self) -> BoolArray:
        """Which rows moved anywhere, bool (batch, rows)."""
        rows: BoolArray = np.any(self.moved > 0, axis=0)
        return rows


def prove_isolation(
    model: nn.Module,
    ids: Tensor | Sequence[int] | str,
    *,
    segments: Iterable[Wish] | None = None,
    tokenizer: Any = None,
    mask: str | MaskRule | None = None,
    run: RunIds | None = None,
    attention_mask: Any = None,
    position_ids: Any = None,
    seed: int = 0,
    report: Report | None = None,
) -> Proof:
    """Change each segment's tokens in turn, and compare all rows that must not see it.

    `ids` (rows,) or (batch, rows), or a text for `tokenizer`. `segments` as `flexinspect.watch`
    takes them: spans (start, stop, label), texts, or (text, label); they lie in batch row 0. `mask`
    declares who may see what, a preset's name or a `MaskRule`; without it segments are taken to be
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
    return isolation_of(subject, seed=seed, report=report)


def isolation_of(subject: Subject, *, seed: int = 0, report: Report | None = None) -> Proof:
    """Prove the isolation of a subject whose scene declares who may see what."""
    say = report or (lambda text, fraction: None)
    sources = _sources(subject)
    states = States(points_of(subject.model), subject.n_rows)
    say("running the prompt twice", None)
    states.keep(subject.forward)
    noise = own_noise(states, subject)
    results: list[Changed] = []
    for number, segment in enumerate(sources):
        say(f"changing {printable(segment.label)}", number / len(sources))
        results.append(_changed(subject, states, segment, noise, seed))
    say("looking where leaks enter", 1.0)
    mixed = _mixed(subject, states, results)
    if mixed is not None:
        noise = np.maximum(noise, mixed)
        results = [replace(one, moved=above(one.moved, noise)) for one in results]
    leaks = [_leak(one) for one in results if one.leaking.any()]
    findings = [
        *explained(leaks, subject, states, noise),
        *_unread(subject, results),
        *([unstable(subject, states, noise, is_mixed=mixed is not None)] if noise.any() else []),
        *([] if leaks else [_isolated(states, results, noise)]),
    ]
    lines = _lines(subject, states, results, noise)
    return Proof("isolation", tuple(lines), tuple(findings), _facts(states, results, noise))


# -- what is changed -------------------------------------------------------------------------------


def _sources(subject: Subject) -> list[Segment]:
    """Return the segments of which some row must not see anything. Raises `UsageError`."""
    if subject.scene.intent is None:
        raise UsageError(
            "Nothing says what is isolated from what.",
            hint="Name at least two segments=, or declare a mask=.",
        )
    found_ones = [
        segment
        for segment in _closed(subject)
        if len(segment) and _kept(subject, segment).any() and _changeable(subject, segment)
    ]
    if not found_ones:
        raise UsageError("The declared mask lets every row see every segment: nothing to prove.")
    return found_ones


def _closed(subject: Subject) -> list[Segment]:
    """Return the segments, the last one ended where the ids end."""
    *inner, last = subject.scene.segments
    n = subject.n_rows
    ends = Segment(last.start, max(n, last.start), last.label, last.kind, last.owner)
    return [*inner, ends]


def _kept(subject: Subject, segment: Segment) -> BoolArray:
    """Return which rows must not see a segment, bool (batch, rows): real ones, outside of it.

    Nobody sees padding, and no sequence of a batch sees another.
    """
    kept = np.ones(subject.real.shape, np.bool_)
    kept[0] = subject.real[0]
    kept[0, segment.start : segment.stop] = False
    if subject.real[0, segment.start : segment.stop].any():
        kept[0] &= ~_may_see(subject, segment)
    return kept


def _may_see(subject: Subject, segment: Segment) -> BoolArray:
    """Return which rows may see a segment, bool (rows,).

    Without a declared mask these are all that come after it but for the other paraphrases.
    """
    n, intent = subject.n_rows, subject.scene.intent
    assert intent is not None
    if not intent.assumed:
        seen: BoolArray = np.any(intent.rule.dense(n)[:, segment.start : segment.stop], axis=1)
        return seen
    may = np.arange(n) >= segment.start
    if segment.kind is SegmentKind.PARAPHRASE:
        for other in _closed(subject):
            if other.kind is SegmentKind.PARAPHRASE:
                may[other.start : other.stop] = False
    return may


def _changeable(subject: Subject, segment: Segment) -> list[int]:
    """Return the positions of a segment that hold text, or padding."""
    token_ids = subject.ids[0].tolist()
    return [
        pos
        for pos in range(segment.start, segment.stop)
        if token_ids[pos] not in subject.special or not subject.real[0, pos]
    ]


def other_ids(subject: Subject, positions: Sequence[int], seed: int) -> Tensor:
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


def _changed(
    subject: Subject, states: States, segment: Segment, noise: Moved, seed: int
) -> Changed:
    positions = _changeable(subject, segment)
    ids = other_ids(subject, positions, seed)
    moved = states.moved(lambda: subject.forward(ids))
    if not moved[0, 0, positions].any():
        raise UsageError(
            f"The run was given other ids for {printable(segment.label)}, and what feeds the "
            "layers did not change.",
            hint="run(ids) must feed the ids that it is given.",
        )
    moved = above(moved, noise)
    kept = _kept(subject, segment)
    readers = np.zeros_like(kept)
    readers[0] = subject.real[0] & ~kept[0]
    readers[0, segment.start : segment.stop] = False
    return Changed(segment, ids, len(positions), kept, readers, moved)


def _mixed(subject: Subject, states: States, results: Sequence[Changed]) -> Moved | None:
    """Return how far rounding alone moves rows at each point, None where nothing tells of any."""
    leaks = [_leak(one) for one in results if one.leaking.any()]
    if not any(is_mixing(leak, subject, states) for leak in leaks):
        return None
    return mixing_noise(states, [np.where(one.kept, one.moved, 0) for one in results])


def _leak(result: Changed) -> Leak:
    """Return the leak of one changed segment: the first point where a row moves that must not."""
    leaking = result.leaking
    point = int(leaking.any(axis=(1, 2)).argmax())
    return Leak(result.segment, point, leaking[point], result.moved, result.ids)


# -- what it says ----------------------------------------------------------------------------------


def _read_by(subject: Subject, result: Changed) -> tuple[list[str], list[str]]:
    """Return which segments read the changed one and which do not, of those that may."""
    reads: list[str] = []
    reads_not: list[str] = []
    for segment in _closed(subject):
        rows = slice(segment.start, segment.stop)
        may = result.readers[0, rows]
        if may.any():
            moves = bool((result.ever[0, rows] & may).any())
            (reads if moves else reads_not).append(printable(segment.label))
    return reads, reads_not


def _unread(subject: Subject, results: Sequence[Changed]) -> list[Finding]:
    """Say which paraphrases the newest row may see and does not."""
    newest = int(np.flatnonzero(subject.real[0])[-1])
    unread = [
        one
        for one in results
        if one.segment.kind is SegmentKind.PARAPHRASE
        and one.readers[0, newest]
        and not one.ever[0, newest]
    ]
    if not unread:
        return []
    names = [printable(one.segment.label) for one in unread]
    sentence = (
        f"The row that chooses the next token ({subject.scene.position(newest)}) does not read "
        f"{_and(names)}, which it may see: its states stay as they are in every layer."
    )
    positions = tuple(one.segment.start for one in unread)
    return [found(UNREAD, sentence, positions=positions, evidence={"unread": names})]


def _isolated(states: States, results: Sequence[Changed], noise: Moved) -> Finding:
    rows = sum(int(one.kept.sum()) for one in results)
    n_layers = len(states.points) - 1
    stayed = (
        f"within the noise of the run ({amount(float(noise.max()))})"
        if noise.any()
        else "bit by bit as it was"
    )
    sentence = (
        f"Isolated: {counted(len(results), 'segment')} changed one after the other, and what must "
        f"not see them ({counted(rows, 'row')} compared) stayed {stayed} in all {n_layers} layers."
    )
    evidence = {"rows": rows, "segments": len(results), "noise": float(noise.max())}
    return found(ISOLATED, sentence, evidence=evidence)


def _lines(subject: Subject, states: States, results: Sequence[Changed], noise: Moved) -> list[str]:
    intent = subject.scene.intent
    assert intent is not None
    declared = "assumed, as no mask was declared" if intent.assumed else "declared"
    same = "bit-equal" if not noise.any() else f"{amount(float(noise.max()))} apart"
    head = (
        f"isolation under {intent.rule.name} ({declared}): {len(states.points) - 1} layers, "
        f"{subject.n_rows} rows; the same ids twice: {same}"
    )
    out = [head]
    for one in results:
        reads, reads_not = _read_by(subject, one)
        leaks = int(one.leaking.any(axis=0).sum())
        kept = int(one.kept.sum())
        how = (
            f"{leaks} of {counted(kept, 'row')} MOVED" if leaks else f"{counted(kept, 'row')} kept"
        )
        said = [f"  {printable(one.segment.label)} ({counted(one.n_changed, 'token')}): {how}"]
        said += [f"read by {_few(reads)}"] if reads else []
        said += [f"not read by {_few(reads_not)}"] if reads_not else []
        out.append("; ".join(said))
    return out


def _facts(states: States, results: Sequence[Changed], noise: Moved) -> dict[str, Any]:
    return {
        "layers": [point.layer for point in states.points[1:]],
        "rows": states.n_rows,
        "noise": [float(value) for value in noise],
        "changed": [
            {
                "label": one.segment.label,
                "start": one.segment.start,
                "stop": one.segment.stop,
                "rows_kept": int(one.kept.sum()),
                "rows_moved": int(one.leaking.any(axis=0).sum()),
                "largest": float(np.where(one.kept, one.moved, 0).max()),
                "readers": int(one.readers.sum()),
                "readers_moved": int((one.readers & one.ever).sum()),
            }
            for one in results
        ],
    }


def _few(names: Sequence[str]) -> str:
    """Return names with commas, the last and the first few of many."""
    if len(names) <= _MOST_NAMES:
        return ", ".join(names)
    hidden = len(names) - _MOST_NAMES
    return f"{', '.join(names[: _MOST_NAMES - 1])}, {hidden} more, {names[-1]}"


def _and(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
