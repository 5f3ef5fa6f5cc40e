"""Where the cells of a call lie, which positions count, and what is kept of a difference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from flexinspect.findings import Severity
from flexinspect.masks import BoolArray
from flexinspect.pieces import declared_tokenizer
from flexinspect.prompts import SegmentKind
from flexinspect.records import CallRecord, StepRecord
from flexinspect.rules.maskdiff import WINDOW, CellFrame, SegmentParts
from flexinspect.rules.maskwords import MASK_LOST, NO_MASK, LayerGroup, MaskCase, case_finding_id
from flexinspect.rules.scene import RuleContext


def call_frame(step: StepRecord, call: CallRecord) -> CellFrame:
    """Return where the cells of a call lie. A sliding cache has dropped the keys before them."""
    kv_offset = max(step.kv_after - call.kv_len, 0)
    return CellFrame(step.kv_before, kv_offset, min(call.kv_len, step.kv_after), call.window)


def add_group(groups: list[LayerGroup], new: LayerGroup) -> None:
    """Add a group, or its layers to one that executed the same.

    Layers that build a mask each have a mask each, however much these are one.
    """
    for number, known in enumerate(groups):
        if _ran_same_mask(known, new):
            both = tuple(sorted({*known.layers, *new.layers}))
            groups[number] = replace(known, layers=both)
            return
    groups.append(new)


def merge_cases(cases: Sequence[MaskCase]) -> list[MaskCase]:
    """Return cases with those made one that are the same trouble in layers of two kinds."""
    found: dict[tuple[object, ...], MaskCase] = {}
    for case in cases:
        group = case.group
        received = (group.mask.kind, group.call.path, group.call.swallowed)
        key = (case_finding_id(case), case.assumed, case.pattern, case.heads, *received)
        known = found.setdefault(key, case)
        if known is case:
            continue
        counts = [one.difference.leaked + one.difference.lost for one in (known, case)]
        more = known if counts[0] >= counts[1] else case
        layers = tuple(sorted({*known.group.layers, *group.layers}))
        varies = known.varies or counts[0] != counts[1]
        found[key] = replace(more, group=replace(more.group, layers=layers), varies=varies)
    return list(found.values())


def _ran_same_mask(a: LayerGroup, b: LayerGroup) -> bool:
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


def add_usual_paths(groups: list[LayerGroup]) -> list[LayerGroup]:
    """Return groups that know the path of most other layers, where it is not theirs."""
    paths = Counter[str]()
    for group in groups:
        paths[group.call.path] += len(group.layers)
    flex = [path for path in paths if path.startswith("flex")]
    most = max(paths, key=lambda path: (paths[path], path in flex))
    if len(paths) == 1:
        return groups
    return [replace(g, usual_path=most if g.call.path != most else "") for g in groups]


def slice_flags(flags: BoolArray, start: int, n: int, *, fill: bool = True) -> BoolArray:
    """Return the flags of n positions, `beyond` for those after the prompt."""
    some = flags[start : start + n]
    if len(some) == n:
        return some
    return np.concatenate((some, np.full(n - len(some), fill)))


def unpadded_flags(context: RuleContext) -> BoolArray | None:
    """Return which positions of the prompt are no padding, None where none is."""
    first = context.segments[0] if context.segments else None
    is_said = first is not None and first.label == "padding"
    n_pads = first.stop if first is not None and is_said else count_pads_by_id(context)
    return np.arange(context.n_prompt) >= n_pads if n_pads else None


def count_pads_by_id(context: RuleContext) -> int:
    """Return how many padding tokens a prompt begins with, as their ids say.

    A single one may be what a model begins every text with.
    """
    words = declared_tokenizer(context.generation.declared)
    if words.pad is None or words.pad in (words.bos, *words.eos):
        return 0
    n = 0
    while (token := context.token(n)) is not None and token.token_id == words.pad:
        n += 1
    return n if 1 < n < context.n_prompt else 0


def non_bos_flags(context: RuleContext) -> BoolArray | None:
    """Return which positions of the prompt are not the BOS at its beginning, None without one."""
    first = context.segments[0] if context.segments else None
    at = first.stop if first is not None and first.label == "padding" else 0
    token, bos = context.token(at), declared_tokenizer(context.generation.declared).bos
    segment = context.segment_at(at)
    is_named = segment is not None and segment.kind is SegmentKind.BOS
    if not is_named and (token is None or bos is None or token.token_id != bos):
        return None
    others: BoolArray = np.arange(max(context.n_prompt, at + 1)) != at
    return others


def segment_parts(context: RuleContext) -> SegmentParts:
    """Return the segments; paraphrases are to be apart."""
    segments = context.segments
    starts = np.array([segment.start for segment in segments] or [0])
    apart = [segment.kind is SegmentKind.PARAPHRASE for segment in segments] or [False]
    return SegmentParts(starts, np.array(apart))


def paraphrase_flags(context: RuleContext) -> BoolArray:
    """Return which positions of the prompt belong to paraphrases."""
    flags = np.zeros(context.n_prompt, np.bool_)
    for segment in context.segments:
        if segment.kind is SegmentKind.PARAPHRASE:
            flags[segment.start : segment.stop] = True
    return flags


def case_severity(case: MaskCase, finding_id: str) -> Severity:
    """Return how bad a difference is; where no mask was declared, a warning at most."""
    found = case.difference
    if case.assumed:
        return Severity.WARNING
    is_row_0 = finding_id == MASK_LOST and case.step.q_len == 1 and found.n_open == 1
    if is_row_0 and case.pattern != WINDOW and found.last_keys == [0]:
        return Severity.NOTE  # a row that takes itself for row 0: the decode rules say so
    return Severity.ERROR


def case_evidence(case: MaskCase) -> dict[str, Any]:
    """Return the numbers of a difference."""
    found, mask, call = case.difference, case.group.mask, case.group.call
    facts: dict[str, Any] = {
        "mask": mask.fingerprint,
        "kind": mask.kind,
        "rule": mask.rule,
        "path": call.path,
        "backend": call.backend,
        "meant": case.expected,
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
    extra = {
        "amount": case.amount or None,
        "earlier": case.earlier_generation,
        "swallowed": call.swallowed,
    }
    if case.segments > 1:
        extra |= {"pieces": case.pieces, "segments": case.segments}
    return facts | {name: fact for name, fact in extra.items() if fact is not None}
