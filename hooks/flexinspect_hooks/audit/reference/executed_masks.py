"""The masks of a generation as its trace has them: declared, and executed by each layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from msgspec import Struct, field
from torch import Tensor

from flexinspect.masks import mask_presets
from flexinspect.records.step import OWN_FUNCTION
from flexinspect.rules.masks.mask_findings import find_empty_rows
from flexinspect.trace.reader import TraceReader
from flexinspect_hooks.audit.evidence.audited_sequence import AuditedSequence
from flexinspect_hooks.audit.reference.reference_model import ReferenceModel
from flexinspect_hooks.audit.reference.slot_layout import SlotLayout, read_layout

MAX_ROWS = 2048
"""Masks of longer sequences are not read."""


class GenerationMasks(Struct):
    """Masks by layer, bool (heads, rows, keys) over the tokens of a sequence.

    `base` is what the reference runs under where it is not the architecture's own mask; `kind` says
    what it is: "own", "declared" or "executed". `executed` are those of the layers, if they differ
    from the base. Without a declared mask they may be what the program means, see `undeclared`.
    `slots` are those of a paged cache.
    """

    kind: str = "own"
    base: dict[int, Tensor] = field(default_factory=dict)
    executed: dict[int, Tensor] = field(default_factory=dict)
    unread: str = ""
    slots: SlotLayout | None = None

    def undeclared(self) -> GenerationMasks | None:
        """Return the executed masks as a base, if none is declared and they are others."""
        if self.kind != "own" or not self.executed:
            return None
        return GenerationMasks("executed", self.executed, slots=self.slots)


def read_masks(
    reader: TraceReader | None,
    generation: int,
    sequence: AuditedSequence,
    reference: ReferenceModel,
    slot_of: Tensor | None = None,
) -> GenerationMasks:
    """Return the masks of a generation: the declared one counts, else the executed one.

    `slot_of` is as in `find_slots`.
    """
    n = len(sequence.ids)
    if sequence.encoder is not None:  # calls do not say which of a layer's two attentions they are
        return GenerationMasks()
    if reader is None:
        return GenerationMasks(unread="there is no trace")
    if n > MAX_ROWS:
        return GenerationMasks(unread=f"the sequence has more than {MAX_ROWS} tokens")
    columns = np.asarray(sequence.input_rows)
    declared = _declared(reader, generation, columns)
    if slot_of is not None:
        return _paged_masks(reader, generation, sequence, reference, slot_of)
    executed = _executed(reader, sequence, columns)
    device = reference.device
    own = {layer: reference.own_mask(layer, n) for layer in reference.blocks}
    found = {
        layer: torch.from_numpy(cells).to(device)
        for layer, cells in executed.items()
        if layer in own
    }
    if declared is not None:
        mask = torch.from_numpy(declared).to(device)[None]
        base = {layer: mask & own[layer] for layer in own}
        keys = _free_keys(reader, generation, columns)
        if sequence.ids[0] == getattr(reference.config, "bos_token_id", None):
            keys[0] = True
        free = torch.from_numpy(keys).to(device)
        for layer, ran in found.items():  # about these keys conventions differ
            if ran.shape[-2:] == base[layer].shape[-2:]:
                base[layer] = torch.where(free, ran & own[layer], base[layer])
        differing = {n: m for n, m in found.items() if not _same(m, base[n])}
        return GenerationMasks("declared", base, found if differing else {})
    if all(_same(mask, own[layer]) for layer, mask in found.items()):
        return GenerationMasks()
    return GenerationMasks(executed=own | found)


def _paged_masks(
    reader: TraceReader,
    generation: int,
    sequence: AuditedSequence,
    reference: ReferenceModel,
    slot_of: Tensor,
) -> GenerationMasks:
    """Return the masks of a paged cache: a mask that opens later positions is not meant so."""
    n, layout = len(sequence.ids), read_layout(reader, sequence, slot_of)
    own = {layer: reference.own_mask(layer, n) for layer in reference.blocks}
    declared = _declared(reader, generation, np.asarray(sequence.input_rows))
    executed: dict[int, Tensor] = {}
    if layout is not None:
        found = {layer: cells for layer, cells in layout.by_position().items() if layer in own}
        is_causal = all(not (cells & ~own[layer]).any() for layer, cells in found.items())
        executed = own | found if is_causal else {}
    if declared is None:
        return GenerationMasks(executed=executed, slots=layout)
    mask = torch.from_numpy(declared).to(reference.device)[None]
    base = {layer: mask & own[layer] for layer in own}
    return GenerationMasks("declared", base, executed, slots=layout)


def _same(one: Tensor, other: Tensor) -> bool:
    return bool((one == other).all())


def _declared(reader: TraceReader, generation: int, columns: Any) -> Any:
    facts = reader.generation(generation).declared
    spec = mask_presets.declared_spec(facts)
    if spec is None:
        return None
    n = int(columns[-1]) + 1
    return spec.dense(n)[np.ix_(columns, columns)]


def _free_keys(reader: TraceReader, generation: int, columns: Any) -> Any:
    """Return which keys the program may open or close: of rows that are declared to be empty."""
    spec = mask_presets.declared_spec(reader.generation(generation).declared)
    assert spec is not None
    return find_empty_rows(spec, int(columns[-1]) + 1)[columns]


def _executed(reader: TraceReader, sequence: AuditedSequence, columns: Any) -> dict[int, Any]:
    """Return the executed cells of each layer; rows whose cells are not recorded are causal."""
    n_columns = int(columns[-1]) + 1
    cells: dict[int, Any] = {}
    known: dict[str, Any] = {}
    for step in sequence.steps:
        evidence = step.evidence
        rows = slice(evidence.kv_before, evidence.kv_before + evidence.q_len)
        for call in reader.calls(evidence.generation, evidence.step):
            if call.mask is None or call.q_len != evidence.q_len:
                continue
            if call.mask not in known:
                record = reader.mask(call.mask)
                known[call.mask] = None if record is None else (record.cells, record.kv_len)
                if (
                    record is not None
                    and record.kind.startswith("none")
                    and call.path == OWN_FUNCTION
                ):
                    known[call.mask] = None  # the function may mask by itself
            if known[call.mask] is None or known[call.mask][0] is None:
                continue
            part, kv_len = known[call.mask]
            # Not the mask's own offset: equal masks of later steps share one record.
            offset = max(rows.stop - kv_len, 0)
            _write(cells, call.layer, part, rows, offset, n_columns)
    return {layer: table[:, columns][:, :, columns] for layer, table in cells.items()}


def _write(cells: dict[int, Any], layer: int, part: Any, rows: slice, offset: int, n: int) -> None:
    table = cells.get(layer)
    heads = part.shape[0]
    if table is None:
        table = cells[layer] = np.tril(np.ones((heads, n, n), np.bool_))
    if table.shape[0] < heads:
        table = cells[layer] = np.repeat(table, heads, 0)
    stop = min(rows.stop, n)
    if stop <= rows.start:
        return
    width = min(part.shape[2], n - offset)
    table[:, rows.start : stop] = False
    table[:, rows.start : stop, offset : offset + width] = part[
        :, part.shape[1] - (rows.stop - rows.start) :, :width
    ][:, : stop - rows.start]


def segment_starts(reader: TraceReader | None, generation: int) -> tuple[int, ...]:
    """Return where the declared segments begin."""
    if reader is None:
        return ()
    return tuple(segment.start for segment in reader.segments(generation))
