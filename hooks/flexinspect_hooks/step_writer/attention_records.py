"""Makes records of a step's attention calls, their masks, and the attention of its newest row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from flexinspect.records.step import Array, ArrayRecord, BuildRecord, CallRecord
from flexinspect_hooks.step_writer.call_check_records import (
    CallFields,
    record_batch_rows,
    record_paged_keys,
    record_user_call_checks,
)
from flexinspect_hooks.step_writer.mask_records import SOURCE_EVENT, MaskFacts, MaskRecords
from flexinspect_hooks.step_writer.step_draft import StepDraft, StepFacts
from flexinspect_hooks.step_writer.values import Values, with_prefix

KEYS_CHANGED = "cache-overwritten"
LATE_BINDING = "late-binding"

ATTENTION_PREFIX = "attention/"
LOST_PREFIX = "attention-lost"
"""Prefix of a value that only reports which rows were lost, because keys were modified before."""


class LayerCode(NamedTuple):
    """Name, file and first line of a function, and the layers whose attention it computes."""

    name: str
    source: str
    layers: tuple[int, ...]


class LateBinding(NamedTuple):
    """A variable that rules of several layers share, its value, and where they were made.

    `of` is "mask_mod", "score_mod" or "forward".
    """

    variable: str
    value: str
    source: str
    layers: tuple[int, ...]
    of: str = "mask_mod"


class AttentionStep(NamedTuple):
    """A step's calls and masks.

    `calls` are fields of call records, shared by the steps of a series; `kv_lens` and `check_kinds`
    are those of this step.
    """

    calls: tuple[dict[str, Any], ...] = ()
    kv_lens: tuple[int, ...] = ()
    check_kinds: tuple[str | None, ...] = ()
    masks: tuple[MaskFacts, ...] = ()
    builds: tuple[BuildRecord, ...] = ()
    codes: tuple[LayerCode, ...] = ()
    late: tuple[LateBinding, ...] = ()


class AttentionRecords:
    """Makes the records of attention calls; masks that are stored stay known."""

    def __init__(self, *, is_standalone: bool) -> None:
        self._is_standalone = is_standalone
        self._masks = MaskRecords()

    def record(
        self, step: StepFacts, kept: AttentionStep | None, values: Values, draft: StepDraft
    ) -> None:
        """Write calls, new masks, segment attention and stored activations."""
        if kept is None:
            return
        draft.builds += kept.builds
        _record_layer_codes(kept.codes, draft)
        _record_late_bindings(kept.late, draft)
        for mask in kept.masks:
            self._masks.record(mask, values, draft)
        # No rule needs equal batch rows of standalone calls.
        is_standalone = self._is_standalone
        record_batch_rows(values, kept.masks, draft, reports_equal=not is_standalone)
        rows = _merge_group_results(values, len(kept.calls))
        errors = rows["lse_error"].tolist() if rows else []
        lost = _report_lost_rows(values, kept.calls, draft)
        if lost:
            draft.are_values_lost = True
        for index, (call, kv_len) in enumerate(zip(kept.calls, kept.kv_lens, strict=True)):
            kind = kept.check_kinds[index]
            is_checked = bool(errors) and index not in lost and kind is not None
            is_checked = is_checked and not _is_rounded(call, values)
            own = {"mask": kept.masks[call["mask"]].fingerprint, "kv_len": kv_len}
            if is_checked:
                own |= {"check_kind": kind, "lse_error": errors[index]}
            draft.calls.append(CallRecord(**call | own))
        for name in ("mass", "lse", "entropy"):
            if name in rows:
                array = np.asarray(rows[name], np.float32)
                draft.arrays.append(ArrayRecord(f"attention.{name}", array))
        record_user_call_checks(values, kept.calls, draft)
        record_paged_keys(values, draft)
        if step.level == "extreme":
            draft.add_activations(values, ("q", "k", "v"))


def _is_rounded(call: dict[str, Any], values: Values) -> bool:
    """Whether the newest row is closed by the lowest float16, to which scores were added.

    Rounding leaves multiples of 32, and -inf below -65520: the row cannot be recomputed.
    """
    averaged = values.get(f"mask.{call['mask']}.averaged")
    return call["dtype"] == "float16" and averaged is not None and bool(averaged[:, -1].any())


def _report_lost_rows(values: Values, calls: CallFields, draft: StepDraft) -> set[int]:
    """Return the calls whose keys were modified before their newest row was recomputed."""
    lost: set[int] = set()
    for members in with_prefix(values, LOST_PREFIX):
        lost |= set(map(int, members[1:].split(","))) if members else set(range(len(calls)))
    if lost:
        layers = sorted({calls[index]["layer"] for index in lost})
        text = (
            f"Keys or values of layers {layers} were modified before their newest row was "
            "recomputed: its segment attention, LSE and LSE check are missing."
        )
        draft.add_event(KEYS_CHANGED, text, {"layers": layers})
    return lost


def _merge_group_results(values: Values, n_calls: int) -> dict[str, Array]:
    """Return the rows of all calls in call order, from the results of the groups."""
    out: dict[str, Array] = {}
    for key, part in with_prefix(values, ATTENTION_PREFIX).items():
        name, _, members = key.partition("/")
        if not members:
            out[name] = part
            continue
        whole = out.setdefault(name, np.full((n_calls, *part.shape[1:]), np.nan, part.dtype))
        whole[[int(member) for member in members.split(",")]] = part
    return out


def _record_layer_codes(codes: Iterable[LayerCode], draft: StepDraft) -> None:
    """Write an event per function, which names its file and line and its layers."""
    for name, source, layers in codes:
        data = {"source": source, "name": name, "layers": [*layers]}
        draft.add_event(SOURCE_EVENT, f"{name} ({source})", data)


def _record_late_bindings(found: Sequence[LateBinding], draft: StepDraft) -> None:
    """Record an event for each variable."""
    for one in found:
        text = f"Rules made in a loop ({one.source}) share its variable {one.variable}."
        draft.add_event(LATE_BINDING, text, {**one._asdict(), "layers": list(one.layers)})
