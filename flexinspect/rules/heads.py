"""Which head is which: masks that tell heads apart, and keys that were repeated in a wrong order.

Query heads that share a key head are neighbours, and `h` in a rule counts query heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from flexinspect.findings import Finding, Severity
from flexinspect.masks import BoolArray
from flexinspect.records import CallRecord, EventRecord, MaskRecord, StepRecord
from flexinspect.rules.base import FindingKind, Rule
from flexinspect.rules.words import format_layers as in_layers
from flexinspect.rules.words import format_ranges, plural, printable

BY_HEAD = "mask.by-head"
KEYS_TILED = "attention.keys-tiled"

KEYS_TILED_EVENT = "keys-tiled"
_MaskCalls = tuple[MaskRecord, list[CallRecord]]
_MAX_NAMED_HEADS = 8
"""Heads with a mask of their own that a sentence names."""


class HeadsRule(Rule):
    """Names the heads that a mask treats apart, with their key heads, and keys in another order."""

    name: ClassVar[str] = "heads"
    handles_standalone_calls: ClassVar[bool] = True
    findings: ClassVar[Mapping[str, FindingKind]] = {
        BY_HEAD: FindingKind(
            Severity.NOTE,
            "the mask that ran tells heads apart",
            "A rule counts query heads. Whoever counts key heads, or takes the query heads of a "
            "group to lie apart, has given the mask to another head than was meant.",
            "In the mask panel, switch to the named head; its label says which key head it reads.",
            "Nothing if the named heads are the ones that were meant. Else convert: query head h "
            "reads key head h // (query heads / key heads).",
            "SELECT c.layer, c.q_heads, c.kv_heads, m.heads, m.rule, m.rule_source FROM calls c "
            "JOIN masks m ON m.fingerprint = c.mask WHERE c.generation = {generation} AND "
            "c.branch = {branch} AND c.step = {step} ORDER BY c.call",
        ),
        KEYS_TILED: FindingKind(
            Severity.ERROR,
            "keys were repeated as a whole instead of head by head",
            "Query heads of a group are neighbours: repeated as a whole, nearly every query head "
            "reads the keys and values of another group, and the answer is that of no model.",
            "Compare the layer with `enable_gqa=True` on keys that are not repeated: the same to "
            "rounding under repeat_interleave, far off under repeat.",
            "Use `repeat_interleave(n, dim=1)` (transformers' `repeat_kv`), or hand the keys over "
            "as they are with `enable_gqa=True`.",
            "SELECT step, text, data FROM events WHERE kind = 'keys-tiled' AND generation = "
            "{generation} AND step = {step}",
        ),
    }

    def on_step(self, step: StepRecord) -> Sequence[Finding]:
        """Look at the masks that are new, and at what the capture says of the keys."""
        found = [
            self._tiled_finding(step, event)
            for event in step.events
            if event.kind == KEYS_TILED_EVENT
        ]
        alike: dict[tuple[str | None, tuple[int, ...]], _MaskCalls] = {}
        for mask in step.masks:
            if mask.cells is not None and len(mask.cells) > 1:
                calls = [call for call in step.calls if call.mask == mask.fingerprint]
                if calls and (odd := find_odd_heads(mask.cells)):
                    # Layers that build a mask each have one of their own.
                    alike.setdefault((mask.rule, tuple(odd)), (mask, []))[1].extend(calls)
        for (_, odd_ones), (mask, calls) in alike.items():
            found.append(self._by_head_finding(step, mask, calls, odd_ones))
        return found

    def _by_head_finding(
        self, step: StepRecord, mask: MaskRecord, calls: Sequence[CallRecord], odd: Sequence[int]
    ) -> Finding:
        call, which = calls[0], sorted({call.layer for call in calls})
        where = "" if self.context.is_standalone else f" in {_format_call_layers(which, step)}"
        rest = call.q_heads - len(odd)
        one = len(odd) == 1
        sentence = (
            f"The mask of {printable(mask.rule or 'an unnamed rule')} tells heads apart{where}: "
            f"{_format_odd_heads(call, odd)} {'has' if one else 'have'} other cells than the remaining "
            f"{plural(rest, 'query head')}; h counts query heads{_format_kv_groups(call)}."
        )
        evidence = {
            "mask": mask.fingerprint,
            "heads": list(odd),
            "key_heads": sorted({_key_head(call, head) for head in odd}),
            "q_heads": call.q_heads,
            "kv_heads": call.kv_heads,
        }
        layers = () if self.context.is_standalone else which
        series = f"{mask.rule} {list(odd)}"
        about: dict[str, Any] = {"layers": layers, "head": odd[0], "series": series}
        return self.finding(step, BY_HEAD, sentence, evidence=evidence, **about)

    def _tiled_finding(self, step: StepRecord, event: EventRecord) -> Finding:
        which = [int(layer) for layer in event.data["layers"]]
        sentence = (
            f"In {_format_call_layers(which, step)} the keys of {event.data['q_heads']} query heads were "
            "repeated as a whole (repeat), not head by head (repeat_interleave): query head 1 "
            "reads the keys of another group than query head 0, its neighbour."
        )
        about: dict[str, Any] = {"layers": which, "head": 1, "series": "tiled"}
        return self.finding(step, KEYS_TILED, sentence, evidence=event.data, **about)


def find_odd_heads(cells: BoolArray) -> list[int]:
    """Return the heads, of cells (heads, rows, keys), whose cells are not those of most heads."""
    packed = [bits.tobytes() for bits in np.packbits(cells.reshape(len(cells), -1), axis=1)]
    usual = max(dict.fromkeys(packed), key=packed.count)
    return [head for head, bits in enumerate(packed) if bits != usual]


def _format_call_layers(which: Sequence[int], step: StepRecord) -> str:
    return in_layers(which, len({call.layer for call in step.calls}))


def _key_head(call: CallRecord, head: int) -> int:
    return head * call.kv_heads // call.q_heads


def _format_odd_heads(call: CallRecord, odd: Sequence[int]) -> str:
    """Return `query head 3 -> kv head 1`, or the heads alone where each has keys of its own."""
    if len(odd) > _MAX_NAMED_HEADS:
        return f"query heads {format_ranges(odd)}"
    if call.q_heads == call.kv_heads:
        return f"head {odd[0]}" if len(odd) == 1 else f"heads {format_ranges(odd)}"
    return ", ".join(f"query head {head} -> kv head {_key_head(call, head)}" for head in odd)


def _format_kv_groups(call: CallRecord) -> str:
    if call.q_heads == call.kv_heads:
        return ""
    size = call.q_heads // call.kv_heads
    return f", and {size} neighbours each share one of {call.kv_heads} kv heads"
