"""The evidence of a recorded generation: the digests of its steps, and the tokens that were fed.

It is what `EvidenceHook` keeps during a run, as far as a trace has it: digests in place of hidden
states, the logits of the candidates in place of all, and no queries, keys or values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from msgspec import Struct, field
from torch import Tensor

from flexinspect.records.step import StepRecord
from flexinspect.rules.numerics.audit_findings import SCORE_MOD_EVENT, TRAINING_EVENT
from flexinspect.trace.reader import TraceReader, load_steps
from flexinspect.trace.replay import replay_steps
from flexinspect_hooks.audit.evidence.step_evidence import StepEvidence
from flexinspect_hooks.audit.forward.forward_run import HIDDEN, LOGITS
from flexinspect_hooks.observers.hidden_digests import MODIFIED_EVENT, digest_rows
from flexinspect_hooks.step_writer.layer_records import DIGEST_STREAM

STREAMS = (DIGEST_STREAM, "inputs.ids", "inputs.positions", "inputs.mask")
_NO_MASK = ("none", "none, causal")


class RecordedSteps(Struct):
    """The steps of a generation that can be judged, and why others cannot."""

    steps: list[StepEvidence] = field(default_factory=list)
    problem: str = ""
    has_digests: bool = False


def read_recorded_steps(reader: TraceReader, generation: int) -> RecordedSteps:
    """Return the evidence of a generation's first branch. Raises `TraceError` for damage."""
    found = RecordedSteps()
    tokens = {one.pos: (one.token_id, one.position_id) for one in reader.tokens(generation)}
    facts, filled = reader.model(generation), 0
    for record in replay_steps(reader, generation, 0, STREAMS, mask_arrays=False):
        kinds = {event.kind: event for event in record.events}
        if SCORE_MOD_EVENT in kinds:
            found.problem = _from(record, "a score_mod ran, which a trace does not hold")
        elif record.kv_before and record.kv_before < filled and "inputs.ids" not in _arrays(record):
            found.problem = _from(
                record, "the cache had become shorter, and a trace has the tokens of its end only"
            )
        evidence = None if found.problem else _evidence(reader, record, tokens, facts)
        if evidence is None:
            found.problem = found.problem or _from(record, "the trace lacks tokens that were fed")
            return found
        if MODIFIED_EVENT in kinds and not found.problem:
            found.problem = kinds[MODIFIED_EVENT].text.rstrip(".")
        found.has_digests |= any(name == HIDDEN for name, _ in evidence.values)
        filled = record.kv_after
        if evidence.values:
            found.steps.append(evidence)
    return found


def fill_from_trace(reader: TraceReader | None, steps: Sequence[StepEvidence]) -> None:
    """Give steps of which only the inputs were kept the digests of the trace, as far as it has any.

    Raises `TraceError` for damage.
    """
    for evidence in steps if reader is not None else ():
        if evidence.values or reader is None:
            continue
        place = (evidence.generation, 0, evidence.step, evidence.step + 1)
        for record in load_steps(reader, *place, streams=(DIGEST_STREAM,), mask_arrays=False):
            evidence.dtype = _dtype(record, reader.model(evidence.generation))
            _add_values(evidence, record, _arrays(record).get(DIGEST_STREAM))


def _from(record: StepRecord, reason: str) -> str:
    return f"from step {record.step} on: {reason}"


def _arrays(record: StepRecord) -> dict[str, Any]:
    return {one.stream: one.array for one in record.arrays}


def _evidence(
    reader: TraceReader,
    record: StepRecord,
    tokens: Mapping[int, tuple[int, int]],
    facts: Mapping[str, Any],
) -> StepEvidence | None:
    """Return the evidence of a step, None if the trace does not have its tokens."""
    arrays = _arrays(record)
    columns = range(record.kv_before, record.kv_before + record.q_len)
    ids = arrays.get("inputs.ids")
    if ids is None:
        if any(column not in tokens for column in columns):
            return None
        ids = [[tokens[column][0] for column in columns]]
    table = _tensor(ids).long()
    if table.shape[1] != record.q_len:
        return None
    padding = arrays.get("inputs.mask")
    evidence = StepEvidence(
        record.generation,
        record.step,
        record.q_len,
        record.kv_before,
        table,
        _positions(record, arrays, [tokens[c][1] for c in columns if c in tokens]),
        None if padding is None else _tensor(padding),
        has_dense_mask=padding is None and _has_dense_mask(reader, record),
        is_training=any(event.kind == TRAINING_EVENT for event in record.events),
        has_gradients=False,
        paths={call.layer: call.path for call in record.calls},
        dtype=_dtype(record, facts),
    )
    _add_values(evidence, record, arrays.get(DIGEST_STREAM))
    return evidence


def _add_values(evidence: StepEvidence, record: StepRecord, digests: Any) -> None:
    rows = [record.q_len - 1]
    layers = [one.layer for one in record.layer_stats]
    if digests is not None and digests.shape[2] == len(layers):
        rows, values = digest_rows(record.q_len), _tensor(digests)
        if values.shape[1] == len(rows):
            evidence.values = {
                (HIDDEN, layer): values[:, :, number] for number, layer in enumerate(layers)
            }
    evidence.rows = torch.tensor(rows)
    candidates = record.logits.candidates if record.logits is not None else ()
    if candidates:
        evidence.logit_ids = torch.tensor([one.token_id for one in candidates])
        logits = torch.tensor([one.logit for one in candidates], dtype=torch.float32)
        evidence.values[LOGITS, None] = logits[None, None]


def _positions(
    record: StepRecord, arrays: Mapping[str, Any], of_tokens: Sequence[int]
) -> Tensor | None:
    """Return the position ids (batch or 1, rows); None for those that a model makes by default."""
    found = arrays.get("inputs.positions")
    if found is None:
        # Without a record of the inputs they are those of flexinspect's own loop.
        runs = of_tokens if record.inputs is None else record.inputs.position_ids
        found = [list(runs)]
    table = _tensor(found).long()
    default = torch.arange(record.kv_before, record.kv_before + record.q_len)
    if table.shape[1] != record.q_len or bool((table == default).all()):
        return None
    return table


def _has_dense_mask(reader: TraceReader, record: StepRecord) -> bool:
    """Whether the first layer received a mask of cells or blocks, which may close padding."""
    fingerprint = record.calls[0].mask if record.calls else None
    mask = reader.mask_summary(fingerprint) if fingerprint is not None else None
    return mask is not None and mask.kind not in _NO_MASK


def _dtype(record: StepRecord, facts: Mapping[str, Any]) -> torch.dtype:
    name = record.calls[0].dtype if record.calls else str(facts.get("dtype", ""))
    dtype = getattr(torch, name, None)
    is_float = isinstance(dtype, torch.dtype) and dtype.is_floating_point
    return dtype if is_float else torch.float32  # type: ignore[return-value]


def _tensor(values: Any) -> Tensor:
    return torch.tensor(values)
