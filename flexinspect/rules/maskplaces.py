"""Where the cells of a call lie, which positions count, and what is kept of a difference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from flexinspect.findings import Severity
from flexinspect.masks import BoolArray
from flexinspect.pieces import declared_words
from flexinspect.prompts import SegmentKind
from flexinspect.records import CallRecord, StepRecord
from flexinspect.rules.maskdiff import WINDOW, Frame, Parts
from flexinspect.rules.maskwords import LOST, NO_MASK, Case, Group, id_of
from flexinspect.rules.scene import Scene


def frame_of(step: StepRecord, call: CallRecord) -> Frame:
    """Return where the cells of a call lie. A sliding cache has dropped the keys before them."""
    kv_offset = max(step.kv_after - call.kv_len, 0)
    return Frame(step.kv_before, kv_offset, min(call.kv_len, step.kv_after), call.window)


def join(groups: list[Group], new: Group) -> None:
    """Add a group, or its layers to one that executed the same.

    Layers that build a mask each have a mask each, however much these are one.
    """
    for number, known in enumerate(groups):
        if _executed_the_same(known, new):
            both = tuple(sorted({*known.layers, *new.layers}))
            groups[number] = replace(known, layers=both)
            return
    groups.append(new)


def merged(cases: Sequence[Case]) -> list[Case]:
    """Return cases with those made one that are the same trouble in layers of two kinds."""
    found: dict[tuple[object, ...], Case] = {}
    for case in cases:
        group = case.group
        received = (group.mask.kind, group.call.path, group.call.swallowed)
        key = (id_of(case), case.assumed, case.pattern, case.heads, *received)
        known = found.setdefault(key, case)
        if known is case:
            continue
        counts = [one.found.leaked + one.found.lost for one in (known, case)]
        more = known if counts[0] >= counts[1] else case
        layers = tuple(sorted({*known.group.layers, *group.layers}))
        varies = known.varies or counts[0] != counts[1]
        found[key] = replace(more, group=replace(more.group, layers=layers), varies=varies)
    return list(found.values())


def _executed_the_same(a: Group, b: Group) -> bool:
    one, other = a.call, b.call
    if (one.path, one.window, one.kv_len) != (other.path, other.window, other.kv_len):
        return False
    if a.mask.kind != b.mask.kind or one.swallowed != other.swallowed:
        return False
    if a.mask.cells is None or b.mask.cells is None:
        return a.mask.cells is b.mask.cells and a.mask.kind == NO_MASK
    same = np.array_equal(a.mask.cells, b.mask.cells)
    before, after = a.mask.averaged, b.mask.averaged
    if before is None or after is None:
        return same and before is after
    return same and np.array_equal(before, after)


def with_paths(groups: list[Group]) -> list[Group]:
    """Return groups that know the path of most other layers, where it is not theirs."""
    paths = Counter[str]()
    for group in groups:
        paths[group.call.path] += len(group.layers)
    flex = [path for path in paths if path.startswith("flex")]
    most = max(paths, key=lambda path: (paths[path], path in flex))
    if len(paths) == 1:
        return groups
    return [replace(g, elsewhere=most if g.call.path != most else "") for g in groups]


def flags_of(flags: BoolArray, start: int, n: int, *, beyond: bool = True) -> BoolArray:
    """Return the flags of n positions, `beyond` for those after the prompt."""
    some = flags[start : start + n]
    if len(some) == n:
        return some
    return np.concatenate((some, np.full(n - len(some), beyond)))


def without_padding(scene: Scene) -> BoolArray | None:
    """Return which positions of the prompt are no padding, None where none is."""
    first = scene.segments[0] if scene.segments else None
    is_said = first is not None and first.label == "padding"
    n_pads = first.stop if first is not None and is_said else pads_by_id(scene)
    return np.arange(scene.n_prompt) >= n_pads if n_pads else None


def pads_by_id(scene: Scene) -> int:
    """Return how many padding tokens a prompt begins with, as their ids say.

    A single one may be what a model begins every text with.
    """
    words = declared_words(scene.generation.declared)
    if words.pad is None or words.pad in (words.bos, *words.eos):
        return 0
    n = 0
    while (token := scene.token(n)) is not None and token.token_id == words.pad:
        n += 1
    return n if 1 < n < scene.n_prompt else 0


def without_bos(scene: Scene) -> BoolArray | None:
    """Return which positions of the prompt are not the BOS at its beginning, None without one."""
    first = scene.segments[0] if scene.segments else None
    at = first.stop if first is not None and first.label == "padding" else 0
    token, bos = scene.token(at), declared_words(scene.generation.declared).bos
    segment = scene.segment_at(at)
    is_named = segment is not None and segment.kind is SegmentKind.BOS
    if not is_named and (token is None or bos is None or token.token_id != bos):
        return None
    others: BoolArray = np.arange(max(scene.n_prompt, at + 1)) != at
    return others


def parts_of(scene: Scene) -> Parts:
    """Return the segments; paraphrases are to be apart."""
    segments = scene.segments
    starts = np.array([segment.start for segment in segments] or [0])
    apart = [segment.kind is SegmentKind.PARAPHRASE for segment in segments] or [False]
    return Parts(starts, np.array(apart))


def paraphrases(scene: Scene) -> BoolArray:
    """Return which positions of the prompt belong to paraphrases."""
    flags = np.zeros(scene.n_prompt, np.bool_)
    for segment in scene.segments:
        if segment.kind is SegmentKind.PARAPHRASE:
            flags[segment.start : segment.stop] = True
    return flags


def severity_of(case: Case, finding_id: str) -> Severity:
    """Return how bad a difference is; where no mask was declared, a warning at most."""
    found = case.found
    if case.assumed:
        return Severity.WARNING
    is_row_0 = finding_id == LOST and case.step.q_len == 1 and found.n_open == 1
    if is_row_0 and case.pattern != WINDOW and found.furthest == [0]:
        return Severity.NOTE  # a row that takes itself for row 0: the decode rules say so
    return Severity.ERROR


def evidence_of(case: Case) -> dict[str, Any]:
    """Return the numbers of a difference."""
    found, mask, call = case.found, case.group.mask, case.group.call
    facts: dict[str, Any] = {
        "mask": mask.fingerprint,
        "kind": mask.kind,
        "rule": mask.rule,
        "path": call.path,
        "backend": call.backend,
        "meant": case.name,
        "open": found.n_open,
        "meant_open": found.n_meant,
        "leaked": found.leaked,
        "lost": found.lost,
        "future": found.future,
        "first_leaked": found.first_leaked,
        "first_across": found.first_across,
        "first_lost": found.first_lost,
        "pattern": case.pattern,
        "heads": list(case.heads),
    }
    extra = {"amount": case.amount or None, "earlier": case.earlier, "swallowed": call.swallowed}
    if case.segments > 1:
        extra |= {"pieces": case.pieces, "segments": case.segments}
    return facts | {name: fact for name, fact in extra.items() if fact is not None}
