"""Where the newest row looked: attention mass by segment, layer and head, with its gate.

The weights of one row are recomputed from the q and k that the kernel got, under the mask that was
executed, and normalised with the kernel's own row LSE. Their sum is 1 exactly when the mask drawn
is the mask that ran; where a kernel gives no LSE, the row's output is recomputed instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flexinspect.prompts import Segment
from flexinspect_hooks.buffer import StepBuffer
from flexinspect_hooks.received import ReceivedMask

if TYPE_CHECKING:
    from flexinspect_hooks.attention import CallRef


class MassReducer:
    """Reduces the newest rows of all layers of a step together."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._member = torch.zeros(0, 1, device=device)

    def begin(self, segments: Sequence[Segment]) -> None:
        """Prepare membership, float (positions, segments), for a generation's segments."""
        self._segments = tuple(segments)
        length = max((segment.stop for segment in segments), default=0)
        self._member = self._membership(max(length, 1))

    def _membership(self, length: int) -> Tensor:
        member = torch.zeros(length, max(len(self._segments), 1))
        for index, segment in enumerate(self._segments):
            member[segment.start : segment.stop, index] = 1
        # Positions past the last segment belong to it: generation may go on beyond the plan.
        member[max((s.stop for s in self._segments), default=0) :, -1] = 1
        return member.to(self._device)

    def reduce(
        self,
        refs: Sequence[CallRef],
        numbers: Sequence[int],
        masks: Sequence[ReceivedMask],
        buffer: StepBuffer,
    ) -> tuple[str, ...]:
        """Put mass (layers, heads, segments), lse and entropy (layers, heads), gate (layers).

        Returns how each call was gated: "lse", "output", or "" when its mask was not evaluated.
        """
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, ref in enumerate(refs):
            key = (numbers[index], *ref.key.shape[1:], ref.query.shape[1], ref.lse is not None)
            groups.setdefault(key, []).append(index)
        parts, order, kinds = [], [], [""] * len(refs)
        for key, members in groups.items():
            newest, with_lse = masks[key[0]].newest, key[-1]
            if newest is None:
                return ()
            parts.append(self._rows([refs[i] for i in members], newest))
            order += members
            for i in members:
                kinds[i] = "lse" if with_lse else "output"
        self._put(parts, order, buffer)
        return tuple(kinds)

    def _put(
        self,
        parts: list[tuple[Tensor, Tensor, Tensor, Tensor]],
        order: list[int],
        buffer: StepBuffer,
    ) -> None:
        names = ("attention.mass", "attention.lse", "attention.entropy", "attention.gate")
        for name, tensors in zip(names, zip(*parts, strict=True), strict=True):
            joined = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
            if order != sorted(order):
                joined = joined[torch.tensor(order, device=joined.device).argsort()]
            buffer.put(name, joined)

    def _rows(
        self, refs: Sequence[CallRef], newest: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        scores = _scores(refs)
        kernel_lse = refs[0].lse is not None
        closed = ~(newest if newest.shape[0] in (1, scores.shape[1]) else newest[:1])
        if kernel_lse:
            lse = torch.cat([ref.lse for ref in refs if ref.lse is not None])[..., -1].float()
        else:
            lse = torch.logsumexp(scores.masked_fill(closed, -torch.inf), -1)
        # A row that sees nothing has LSE -inf and no weights; its mass is 0.
        seen = lse > -torch.inf
        weights = torch.exp(scores - lse.masked_fill(~seen, 0.0)[..., None])
        weights.masked_fill_(closed, 0.0)
        mass = weights @ self._members_of(scores.shape[-1])
        total = mass.sum(-1)
        if kernel_lse:
            gate = (total - seen.to(total.dtype)).abs().amax(-1)
        else:
            gate = torch.stack([_output_gate(r, w) for r, w in zip(refs, weights, strict=True)])
        entropy = lse * total - (weights * scores).sum(-1)
        return mass, lse, entropy, gate

    def _members_of(self, kv_len: int) -> Tensor:
        if kv_len > self._member.shape[0]:
            self._member = self._membership(2 * kv_len)
        return self._member[:kv_len]


def _scores(refs: Sequence[CallRef]) -> Tensor:
    """Return the newest rows' scores, float32 (layers, q heads, keys), scale and cap applied.

    The calls share head counts and lengths. Queries are gathered in one copy; keys are read where
    they are, one batched product per layer, as copying them would cost more than the products.
    """
    first = refs[0]
    kv_heads, kv_len, head_dim = first.key.shape[1:]
    scale = first.scale if first.scale is not None else head_dim**-0.5
    queries = torch.stack([ref.query[0, :, -1] for ref in refs]).float() * scale
    grouped = queries.view(len(refs), kv_heads, -1, head_dim)
    scores = queries.new_empty(len(refs), kv_heads, grouped.shape[2], kv_len)
    for ref, query, out in zip(refs, grouped.unbind(), scores.unbind(), strict=True):
        torch.bmm(query, ref.key[0].float().mT, out=out)
    flat = scores.view(len(refs), -1, kv_len)
    return first.softcap * torch.tanh(flat / first.softcap) if first.softcap else flat


def _output_gate(ref: CallRef, weights: Tensor) -> Tensor:
    """Return the largest relative error of the row's output recomputed from `weights`."""
    value, output = ref.value[0].float(), ref.output[0, -1].float()
    grouped = weights.view(value.shape[0], -1, weights.shape[-1])
    mine = torch.matmul(grouped, value).view(output.shape)
    return (mine - output).abs().amax() / torch.clamp(output.abs().amax(), min=1e-6)
