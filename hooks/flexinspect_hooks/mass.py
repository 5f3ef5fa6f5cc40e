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
        groups: dict[tuple[int, int, bool], list[int]] = {}
        for index, ref in enumerate(refs):
            key = (numbers[index], ref.query.shape[1], ref.lse is not None)
            groups.setdefault(key, []).append(index)
        parts, order, kinds = [], [], [""] * len(refs)
        for (number, _, with_lse), members in groups.items():
            newest = masks[number].newest
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
        scores = torch.stack([_scores(ref) for ref in refs])
        kv_len = scores.shape[-1]
        kernel_lse = refs[0].lse is not None
        closed = ~newest if newest.shape[0] in (1, scores.shape[1]) else ~newest[:1]
        scores = scores.masked_fill(closed, -torch.inf)
        lse = (
            torch.stack([_newest_lse(ref) for ref in refs])
            if kernel_lse
            else torch.logsumexp(scores, -1)
        )
        # A row that sees nothing has LSE -inf and no weights; its mass is 0 and its gate closed.
        weights = torch.exp(scores - torch.nan_to_num(lse, neginf=0.0)[..., None])
        total = weights.sum(-1)
        gate = (total - (lse > -torch.inf).to(total.dtype)).abs().amax(-1)
        if not kernel_lse:
            gate = torch.stack([_output_gate(r, w) for r, w in zip(refs, weights, strict=True)])
        entropy = lse * total - torch.nan_to_num(weights * scores, nan=0.0).sum(-1)
        return weights @ self._members_of(kv_len), lse, entropy, gate

    def _members_of(self, kv_len: int) -> Tensor:
        if kv_len > self._member.shape[0]:
            self._member = self._membership(2 * kv_len)
        return self._member[:kv_len]


def _scores(ref: CallRef) -> Tensor:
    """Return the newest row's scores, float32 (q heads, keys), soft cap applied."""
    query, key = ref.query[0, :, -1].float(), ref.key[0].float()
    scale = ref.scale if ref.scale is not None else query.shape[-1] ** -0.5
    grouped = (query * scale).view(key.shape[0], -1, query.shape[-1])
    scores = torch.matmul(grouped, key.transpose(-1, -2)).view(query.shape[0], -1)
    return ref.softcap * torch.tanh(scores / ref.softcap) if ref.softcap else scores


def _newest_lse(ref: CallRef) -> Tensor:
    assert ref.lse is not None
    return ref.lse[0, :, -1].float()


def _output_gate(ref: CallRef, weights: Tensor) -> Tensor:
    """Return the largest relative error of the row's output recomputed from `weights`."""
    value, output = ref.value[0].float(), ref.output[0, -1].float()
    grouped = weights.view(value.shape[0], -1, weights.shape[-1])
    mine = torch.matmul(grouped, value).view(output.shape)
    return (mine - output).abs().amax() / torch.clamp(output.abs().amax(), min=1e-6)
