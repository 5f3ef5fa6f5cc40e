"""The masks of a generation as its trace has them: declared, and executed by each layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from msgspec import Struct, field
from torch import Tensor

from flexinspect.masks import algebra
from flexinspect.trace.reader import TraceReader
from flexinspect_hooks.audit.fed_sequence import FedSequence
from flexinspect_hooks.audit.reference_model import ReferenceModel

MAX_ROWS = 2048
"""Masks of longer sequences are not read."""


class GenerationMasks(Struct):
    """Masks by layer, bool (heads, rows, keys) over the tokens of a sequence.

    `base` is what the reference runs under where it is not the architecture's own mask; `kind` says
    what it is: "own", "declared" or "executed". `executed` are those of the layers, if they differ
    from the base. Without a declared mask they may be what the program means, see `undeclared`.
    """

    kind: str = "own"
    base: dict[int, Tensor] = field(default_factory=dict)
    executed: dict[int, Tensor] = field(default_factory=dict)
    unread: str = ""

    def undeclared(self) -> GenerationMasks | None:
        """Return the executed masks as a base, if none is declared and they are others."""
        if self.kind != "own" or not self.executed:
            return None
        return GenerationMasks("executed", self.executed)


def read_masks(
    reader: TraceReader | None, generation: int, sequence: FedSequence, reference: ReferenceModel
) -> GenerationMasks:
    """Return the masks of a generation: the declared one counts, else the executed one."""
    n = len(sequence.ids)
    if reader is None:
        return GenerationMasks(unread="there is no trace")
    if n > MAX_ROWS:
        return GenerationMasks(unread=f"the sequence has more than {MAX_ROWS} tokens")
    columns = np.asarray(sequence.input_rows)
    declared = _declared(reader, generation, columns)
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
        differing = {n: m for n, m in found.items() if not _same(m, base[n])}
        return GenerationMasks("declared", base, found if differing else {})
    if all(_same(mask, own[layer]) for layer, mask in found.items()):
        return GenerationMasks()
    return GenerationMasks(executed=own | found)


def _same(one: Tensor, other: Tensor) -> bool:
    return bool((one == other).all())


def _declared(reader: TraceReader, generation: int, columns: Any) -> Any:
    facts = reader.generation(generation).declared
    spec = algebra.declared_spec(facts)
    if spec is None:
        return None
    n = int(columns[-1]) + 1
    return spec.dense(n)[np.ix_(columns, columns)]


def _executed(reader: TraceReader, sequence: FedSequence, columns: Any) -> dict[int, Any]:
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
                known[call.mask] = None if record is None else (record.cells, record.kv_offset)
            if known[call.mask] is None or known[call.mask][0] is None:
                continue
            part, offset = known[call.mask]
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
