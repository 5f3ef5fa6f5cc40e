"""Whether the paraphrases of a step are isolated from each other in the masks that ran."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from flexinspect.core.text import join_labels, plural, printable
from flexinspect.records.prompt import Segment, SegmentKind
from flexinspect.records.step import MaskRecord
from flexinspect.trace.reader import TraceReader

MAX_CELLS = 1 << 27
"""Cells of a mask that are unpacked at most; those of a longer prompt are not judged."""
_MAX_NAMED = 3


class IsolationVerdict(Struct, frozen=True):
    """The verdict as a sentence; `passed` is None if it cannot be judged."""

    passed: bool | None
    sentence: str

    @property
    def label(self) -> str:
        """PASS, FAIL or SKIP."""
        return {True: "PASS", False: "FAIL", None: "SKIP"}[self.passed]


def judge_isolation(
    reader: TraceReader, generation: int, step: int = 0, branch: int = 0
) -> IsolationVerdict:
    """Judge the executed masks of all layers of a step; the declared mask plays no part.

    The newest row, which chooses the token, must attend to every paraphrase.
    """
    segments = reader.segments(generation, branch)
    paraphrases = [
        replace(one, stop=_owned_stop(index, segments))
        for index, one in enumerate(segments)
        if one.kind is SegmentKind.PARAPHRASE and len(one)
    ]
    if not paraphrases:
        what = "no paraphrases are declared (--declare FILE names those of a program)"
        return IsolationVerdict(None, what)
    if len(paraphrases) < 2:
        return IsolationVerdict(None, "the prompt has only one paraphrase")
    layers: dict[str, list[int]] = {}
    for call in reader.calls(generation, step, branch):
        layers.setdefault(call.mask or "", []).append(call.layer)
    if not layers:
        return IsolationVerdict(None, "no attention call is recorded")
    leaks: list[str] = []
    unread: set[str] = set()
    for fingerprint, own in layers.items():
        mask = _small_mask(reader, fingerprint)
        if mask is None:
            what = f"no cells of the mask of layer {own[0]} are recorded (level basic), or too many"
            return IsolationVerdict(None, what)
        named = "" if len(layers) == 1 else f" in layer {own[0]}"
        leaks += (f"{text}{named}" for text in _leaks(mask, paraphrases))
        unread.update(_unread(mask, paraphrases))
    if leaks:
        more = f"; {len(leaks) - _MAX_NAMED} more" if len(leaks) > _MAX_NAMED else ""
        return IsolationVerdict(False, "; ".join(leaks[:_MAX_NAMED]) + more)
    if unread:
        what = f"the newest row does not attend to {join_labels(sorted(unread))}"
        return IsolationVerdict(False, what)
    n_layers = plural(sum(map(len, layers.values())), "layer")
    what = f"none of {len(paraphrases)} paraphrases attends to another in {n_layers}, and the "
    return IsolationVerdict(True, f"{what}newest row attends to all of them")


def _owned_stop(index: int, segments: Sequence[Segment]) -> int:
    """Return where a paraphrase ends with its separator, through which others could read it."""
    following = segments[index + 1 : index + 2]
    owned = [one.stop for one in following if one.owner == segments[index].owner]
    return max([segments[index].stop, *owned])


def _small_mask(reader: TraceReader, fingerprint: str) -> MaskRecord | None:
    summary = reader.mask_summary(fingerprint)
    if summary is None or summary.q_len * summary.kv_len * max(summary.heads, 1) > MAX_CELLS:
        return None
    mask = reader.mask(fingerprint)
    return mask if mask is not None and mask.cells is not None else None


def _leaks(mask: MaskRecord, paraphrases: Sequence[Segment]) -> Iterator[str]:
    """Yield what attends to which other paraphrase, of the rows that the mask has."""
    assert mask.cells is not None
    cells = np.any(mask.cells, axis=0)
    for row in paraphrases:
        for key in paraphrases:
            part = cells[_slice(row, mask.q_offset), _slice(key, mask.kv_offset)]
            if row != key and (n := int(part.sum())):
                labels = printable(row.label), printable(key.label)
                yield f"{labels[0]} attends to {labels[1]} ({plural(n, 'cell')})"


def _unread(mask: MaskRecord, paraphrases: Iterable[Segment]) -> Iterator[str]:
    assert mask.cells is not None
    newest = np.any(mask.cells[:, -1:], axis=(0, 1))
    for one in paraphrases:
        if not newest[_slice(one, mask.kv_offset)].any():
            yield printable(one.label)


def _slice(segment: Segment, offset: int) -> slice:
    return slice(max(segment.start - offset, 0), max(segment.stop - offset, 0))
