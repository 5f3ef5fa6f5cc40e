"""Which slot of a paged cache holds which position, found from the keys themselves.

A kernel of such a cache gets a pool of slots, and its mask has a column per slot. The keys of the
first layer do not depend on masks: the slot of a position is the one with the reference's key.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from msgspec import Struct
from torch import Tensor

from flexinspect.trace.reader import TraceReader
from flexinspect_hooks.audit.evidence.audited_sequence import AuditedSequence
from flexinspect_hooks.audit.forward.forward_edits import AttentionInput
from flexinspect_hooks.audit.forward.forward_run import KEY, VALUE, Run
from flexinspect_hooks.audit.reference.reference_model import ReferenceModel

MAX_DISTANCE = 0.02
"""A key is the reference's if it differs by less than this part of its norm."""
MAX_SLOTS = 4096


class SlotLayout(Struct):
    """`slot_of` (rows,) is the slot of each position, of `n_slots`.

    `cells` are the executed masks by layer, bool (heads, rows, slots). `ends` (rows,) is how many
    positions were filled when the row was computed.
    """

    slot_of: Tensor
    n_slots: int
    cells: Mapping[int, Tensor]
    ends: Tensor

    @property
    def moved(self) -> int:
        """The first position that is not in the slot of its own number."""
        own = torch.arange(len(self.slot_of), device=self.slot_of.device)
        return int((self.slot_of != own).nonzero()[0])

    def by_position(self) -> dict[int, Tensor]:
        """Return the executed masks with a column per position, bool (heads, rows, rows)."""
        return {layer: cells[:, :, self.slot_of] for layer, cells in self.cells.items()}

    def attend(self, call: AttentionInput) -> Tensor:
        """Compute attention over the slots that the mask opens, as a kernel does: empty ones too.

        Empty slots hold zeros. Returns (1, rows, heads, size).
        """
        groups = call.query.shape[1] // call.key.shape[1]
        shape = (*call.query.shape[:2], self.n_slots, call.key.shape[-1])
        pools = []
        for states in (call.key, call.value):
            pool = states.new_zeros((*shape[:3], states.shape[-1]))
            pool[:, :, self.slot_of] = states.repeat_interleave(groups, 1)
            pools.append(pool)
        position = torch.full((self.n_slots,), 1 << 30, device=self.slot_of.device)
        position[self.slot_of] = torch.arange(len(self.slot_of), device=self.slot_of.device)
        is_filled = position[None] < self.ends[:, None]  # (rows, slots)
        scale = call.query.shape[-1] ** -0.5 if call.scaling is None else call.scaling
        scores = (call.query @ pools[0].mT * scale).masked_fill(~is_filled, 0)
        scores = scores.masked_fill(~self.cells[call.layer][None], -torch.inf)
        weights = scores.softmax(-1).nan_to_num(0).masked_fill(~is_filled, 0)
        return (weights @ pools[1]).transpose(1, 2)


def find_slots(
    reference: ReferenceModel, sequence: AuditedSequence, pool: Tensor | None
) -> Tensor | None:
    """Return the slot of each position (rows,); None if they are in order, or not found.

    `pool` is what the first layer's last kernel call got as keys, (batch, heads, slots, size).
    """
    layer, b = min(reference.blocks), sequence.batch
    if pool is None or pool.shape[2] > MAX_SLOTS or b >= len(pool):
        return None
    run = Run(torch.arange(len(sequence.ids), device=reference.device)[None], stop_after=layer)
    key = reference.run(sequence.ids, run).get((KEY, layer))
    if key is None or key.shape[1] != pool.shape[1] or key.shape[3] != pool.shape[3]:
        return None
    keys, slots = (states.transpose(0, 1).flatten(1).float() for states in (key[0], pool[b]))
    distance, slot_of = torch.cdist(keys, slots).min(-1)
    in_order = torch.equal(slot_of, torch.arange(len(slot_of), device=slot_of.device))
    is_found = bool((distance <= MAX_DISTANCE * keys.norm(dim=-1)).all())
    if in_order or not is_found or len(set(slot_of.tolist())) < len(slot_of):
        return None
    return slot_of


def read_layout(
    reader: TraceReader, sequence: AuditedSequence, slot_of: Tensor
) -> SlotLayout | None:
    """Return the layout with the executed masks of a sequence; None if one is not recorded.

    The keys and values of the steps are no longer compared: which rows they are is not known.
    """
    device, n = slot_of.device, len(sequence.ids)
    cells: dict[int, Tensor] = {}
    n_slots = 0
    for step in sequence.steps:
        evidence = step.evidence
        for point in [point for point in evidence.values if point[0] in (KEY, VALUE)]:
            del evidence.values[point]
        for call in reader.calls(evidence.generation, evidence.step):
            record = reader.mask(call.mask) if call.mask is not None else None
            if record is None or record.cells is None or record.cells.shape[1] != evidence.q_len:
                return None
            n_slots = max(n_slots, record.kv_len)
            heads = record.cells.shape[0]
            if call.layer not in cells:
                cells[call.layer] = torch.zeros(
                    (heads, n, n_slots), dtype=torch.bool, device=device
                )
            table = cells[call.layer]
            if table.shape[0] != heads or table.shape[2] != record.kv_len:
                return None
            rows = torch.as_tensor(evidence.rows)[step.kept].to(device)
            part = torch.from_numpy(record.cells).to(device)
            table[:, step.positions.to(device)] = part[:, rows]
    if not cells or int(slot_of.max()) >= n_slots:
        return None
    return SlotLayout(slot_of, n_slots, cells, sequence.ends().to(device))
