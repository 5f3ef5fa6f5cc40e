"""Where the newest row looked: attention mass by segment, layer and head, with its gate.

The weights of one row are recomputed from the q and k that the kernel got, under the mask that was
executed, and normalised with the kernel's own row LSE. Their sum is 1 exactly when the mask drawn
is the mask that ran; where a kernel gives no LSE, the row's output is recomputed instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from flexinspect.prompts import Segment
from flexinspect.records import Array
from flexinspect_hooks.buffer import StepBuffer, Values
from flexinspect_hooks.received import ReceivedMask

if TYPE_CHECKING:
    from flexinspect_hooks.callrefs import CallRef


class MassReducer:
    """Reduces the newest rows of all layers of a step together."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.begin(())

    def begin(self, segments: Sequence[Segment]) -> None:
        """Take a generation's segments; the last one is open, as generation may go on."""
        borders = [segment.start for segment in segments] or [0]
        self._borders = torch.tensor([*borders, 1 << 40], device=self._device)

    def reduce(
        self,
        refs: Sequence[CallRef],
        numbers: Sequence[int],
        masks: Sequence[ReceivedMask],
        kv_after: int,
        buffer: StepBuffer,
    ) -> tuple[str, ...]:
        """Put mass (layers, heads, segments), lse and entropy (layers, heads), gate (layers).

        Returns how each call was gated: "lse", "output", or "" when its row cannot be recomputed.
        """
        kinds = [_gate_kind(ref, masks[number]) for ref, number in zip(refs, numbers, strict=True)]
        if not any(kinds):
            return ()
        groups: dict[tuple[Any, ...], list[int]] = {}
        for index, ref in enumerate(refs):
            shape = (*ref.key.shape[1:], ref.query.shape[1])
            key = (numbers[index], *shape, ref.lse is not None, ref.scale)
            if kinds[index]:
                groups.setdefault(key, []).append(index)
        for key, members in groups.items():
            cells = masks[key[0]].cells
            assert cells is not None
            _reduce_group(
                [refs[i] for i in members],
                cells[:, -1],
                masks[key[0]].bias,
                # A static cache has more keys than the sequence, a sliding one fewer.
                self._borders - max(kv_after - key[2], 0),
                members if len(members) < len(refs) else None,
                buffer,
            )
        return tuple(kinds)


def _lifted(scores: Tensor, closed: Tensor) -> Tensor:
    """Return scores with rows that lie at the lowest float moved to 0, where exp tells them apart.

    Softmax gives the same for them; a row without any open key stays as it is.
    """
    top = scores.masked_fill(closed, -torch.inf).amax(-1, keepdim=True)
    is_low = (top < torch.finfo(scores.dtype).min / 2) & (top > -torch.inf)
    return torch.where(is_low, scores - top, scores)


def _gate_kind(ref: CallRef, mask: ReceivedMask) -> str:
    if mask.cells is None or ref.unknown_scores:
        return ""
    if ref.kwargs.get("dropout") or ref.kwargs.get("s_aux") is not None:
        return ""  # weights that are drawn by lot, or shared with a sink, are not repeated here
    return "output" if ref.lse is None else "lse"


def gathered(values: Values, n_calls: int) -> dict[str, Array]:
    """Return mass, lse, entropy and gate of all calls in their order, from the groups' results."""
    out: dict[str, Array] = {}
    for key, part in values.items():
        if not key.startswith(_PREFIX):
            continue
        name, _, members = key.removeprefix(_PREFIX).partition("/")
        if not members:
            out[name] = part
            continue
        whole = out.setdefault(name, np.full((n_calls, *part.shape[1:]), np.nan, part.dtype))
        whole[[int(member) for member in members.split(",")]] = part
    return out


_PREFIX = "attention/"


def _reduce_group(
    refs: Sequence[CallRef],
    newest: Tensor,
    bias: Tensor | None,
    borders: Tensor,
    members: Sequence[int] | None,
    buffer: StepBuffer,
) -> None:
    """Reduce the newest rows of layers that share a mask and a shape; the keys are not kept."""
    scores = _scores(refs)
    closed = ~(newest if newest.shape[0] in (1, scores.shape[1]) else newest[:1])
    if bias is not None:
        scores = _lifted(scores + bias, closed)
    suffix = "" if members is None else "/" + ",".join(map(str, members))
    if refs[0].lse is not None:
        lse = torch.cat([ref.lse for ref in refs if ref.lse is not None])[..., -1].float()
        lse = lse[:: refs[0].query.shape[0]]  # batch 0 of each layer
        buffer.later(partial(_mass, suffix), scores, lse, closed, borders)
        return
    seen = scores.masked_fill(closed, -torch.inf)
    # A row that sees nothing gives NaN here, and 0 in every kernel.
    weights = torch.softmax(seen, -1).nan_to_num()
    buffer.later(partial(_mass, suffix), scores, torch.logsumexp(seen, -1), closed, borders)
    output = torch.stack([ref.output[0, -1] for ref in refs]).float()
    buffer.later(partial(_output_gate, suffix), _outputs(refs, weights), output)


def _mass(suffix: str, xp: Any, scores: Any, lse: Any, closed: Any, borders: Any) -> dict[str, Any]:
    """Return mass (layers, heads, segments), lse and entropy (layers, heads), gate (layers).

    `scores` (layers, q heads, keys), `lse` (layers, q heads) of the kernel, `closed` broadcastable
    to one layer of scores, `borders` (segments + 1) where segments begin among the keys; `xp` is
    torch or numpy. Segments are summed by running sums between borders.
    """
    # A row that sees nothing has LSE -inf and no weights; its mass is 0.
    seen = lse > -math.inf
    shift = xp.where(seen, lse, xp.zeros_like(lse))
    weights = xp.exp(scores - shift[..., None])
    weights = xp.where(closed, xp.zeros_like(weights), weights)
    sums = xp.cumsum(weights, axis=-1)
    places = xp.clip(borders, 0, scores.shape[-1])
    upto = sums[..., xp.clip(places - 1, 0, None)]
    upto = xp.where(places > 0, upto, xp.zeros_like(upto))
    total = sums[..., -1]
    names = ("mass", "lse", "entropy", "gate")
    entropy = shift * total - xp.sum(weights * scores, axis=-1)
    gate = xp.amax(xp.abs(total - xp.where(seen, 1.0, 0.0)), axis=-1)
    values = (upto[..., 1:] - upto[..., :-1], lse, entropy, gate)
    return {f"{_PREFIX}{name}{suffix}": value for name, value in zip(names, values, strict=True)}


def _scores(refs: Sequence[CallRef]) -> Tensor:
    """Return the newest rows' scores, float32 (layers, q heads, keys), scale and cap applied.

    Those of batch 0, as everything that is recorded of an attention call.
    The calls share head counts and lengths. Queries are gathered in one copy; keys are read where
    they are, one batched product per layer, as copying them would cost more than the products.
    """
    first = refs[0]
    kv_heads, kv_len, head_dim = first.key.shape[1:]
    scale = first.scale if first.scale is not None else head_dim**-0.5
    if first.query.shape[2] == first.query.shape[0] == 1:
        queries = torch.cat([ref.query for ref in refs]).float() * scale
    else:
        queries = torch.stack([ref.query[0, :, -1] for ref in refs]).float() * scale
    grouped = queries.view(len(refs), kv_heads, -1, head_dim)
    scores = queries.new_empty(len(refs), kv_heads, grouped.shape[2], kv_len)
    for ref, query, out in zip(refs, grouped.unbind(), scores.unbind(), strict=True):
        key = ref.key[0]
        torch.bmm(query, (key if key.dtype is torch.float32 else key.float()).mT, out=out)
    flat = scores.view(len(refs), -1, kv_len)
    return first.softcap * torch.tanh(flat / first.softcap) if first.softcap else flat


def _outputs(refs: Sequence[CallRef], weights: Tensor) -> Tensor:
    """Return the newest rows' outputs from their weights, float32 (layers, q heads, head width)."""
    n_layers, n_heads, kv_len = weights.shape
    kv_heads, width = refs[0].value.shape[1], refs[0].value.shape[3]
    grouped = weights.view(n_layers, kv_heads, -1, kv_len)
    outputs = grouped.new_empty(n_layers, kv_heads, grouped.shape[2], width)
    for ref, mine, out in zip(refs, grouped.unbind(), outputs.unbind(), strict=True):
        value = ref.value[0]
        torch.bmm(mine, value if value.dtype is torch.float32 else value.float(), out=out)
    return outputs.view(n_layers, n_heads, width)


def _output_gate(suffix: str, xp: Any, mine: Any, output: Any) -> dict[str, Any]:
    """Return the gate (layers): the largest error of a row's output, relative to its largest."""
    shape = (len(mine), -1)
    largest = xp.amax(xp.abs(output).reshape(shape), -1)
    error = xp.amax(xp.abs(mine - output.reshape(mine.shape)).reshape(shape), -1)
    return {f"{_PREFIX}gate{suffix}": error / xp.clip(largest, 1e-6, None)}
