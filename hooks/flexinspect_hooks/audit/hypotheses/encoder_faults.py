"""Hypotheses about models with an encoder: its mask, cross attention, and relative positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from msgspec.structs import replace
from torch import Tensor

from flexinspect_hooks.audit.forward.encoder_inputs import EncoderInput
from flexinspect_hooks.audit.forward.forward_edits import AttentionInput, ForwardEdit
from flexinspect_hooks.audit.hypotheses.probe import FaultProbe

Edits = Iterator[ForwardEdit]
BIAS = "position_bias"
"""The argument of T5's attention that is added to its scores."""


def padding_read(probe: FaultProbe) -> Edits:
    """The padding of the encoder's input is read by the cross attention, the encoder, or both."""
    encoder = probe.encoder
    if encoder is None or encoder.mask is None or bool(encoder.mask.all()):
        return

    def everything(call: AttentionInput) -> AttentionInput:
        return replace(call, allowed=torch.ones_like(call.allowed))

    def unmasked(given: EncoderInput) -> EncoderInput:
        return replace(given, mask=None)

    name, mask = "cross.padding", encoder.mask

    def hidden(call: AttentionInput) -> AttentionInput:
        allowed = call.allowed & mask.bool().to(call.allowed.device)
        return replace(call, allowed=allowed)

    sentence = "whose cross attention reads the padding of the encoder's input"
    yield ForwardEdit(name=name, sentence=sentence, cross=everything)
    if not probe.is_decode:
        sentence = "whose encoder and cross attention read the padding of the encoder's input"
        yield ForwardEdit(name=name, sentence=sentence, encoder=unmasked, whole_model=True)
        sentence = "whose encoder reads the padding of its input"
        yield ForwardEdit(
            name=name, sentence=sentence, encoder=unmasked, cross=hidden, whole_model=True
        )


def cross_changed(probe: FaultProbe) -> Edits:
    """The cross attention gives zeros, is causal, or misses the beginning or end of the input."""
    if probe.encoder is None:
        return

    def nothing(call: AttentionInput) -> Tensor:
        rows = call.query.transpose(1, 2)
        return torch.zeros(*rows.shape[:-1], call.value.shape[-1]).to(rows)

    def causal(call: AttentionInput) -> AttentionInput:
        rows, keys = (torch.arange(n, device=call.key.device) for n in call.allowed.shape[-2:])
        return replace(call, allowed=call.allowed & (keys[None] <= rows[:, None]))

    def edge(call: AttentionInput, column: int) -> AttentionInput:
        allowed = call.allowed.clone()
        allowed[..., column] = False
        return replace(call, allowed=allowed)

    def unscaled(call: AttentionInput) -> AttentionInput:
        size = call.query.shape[-1]
        return replace(call, scaling=1.0 if call.scaling != 1.0 else size**-0.5)

    options: dict[str, Callable[[AttentionInput], AttentionInput]] = {
        "whose cross attention gives zeros": lambda call: replace(call, output=nothing),
        "whose cross attention has a causal mask": causal,
        "whose cross attention does not read the first row of the encoder": lambda c: edge(c, 0),
        "whose cross attention does not read the last row of the encoder": lambda c: edge(c, -1),
        "whose cross attention has another scale (1, or 1/root of the head size)": unscaled,
    }
    for sentence, change in options.items():
        yield ForwardEdit(name="cross.changed", sentence=sentence, cross=change)


def relative_bias(probe: FaultProbe) -> Edits:
    """The relative position bias is missing, or that of row 0 or of other rows."""
    if not any("relative_attention_bias" in n for n, _ in probe.reference.model.named_modules()):
        return

    def changed(change: Callable[[Tensor], Tensor]) -> Callable[[AttentionInput], AttentionInput]:
        def attention(call: AttentionInput) -> AttentionInput:
            bias = call.options.get(BIAS)
            if bias is None:
                return call
            return replace(call, options={**call.options, BIAS: change(bias)})

        return attention

    def row_0(bias: Tensor) -> Tensor:
        return bias[:, :, :1].expand_as(bias)

    def head_0(bias: Tensor) -> Tensor:
        return bias[:, :1].expand_as(bias)

    def next_row(bias: Tensor) -> Tensor:
        return bias[:, :, [*range(1, bias.shape[2]), -1]]

    def row_before(bias: Tensor) -> Tensor:
        return bias[:, :, [0, *range(bias.shape[2] - 1)]]

    rows = "decode rows" if probe.is_decode else "rows"
    options: dict[str, Callable[[Tensor], Tensor]] = {
        f"whose {rows} have no relative position bias": torch.zeros_like,
        f"whose {rows} have the relative position bias of row 0 (no offset)": row_0,
        f"whose {rows} have the relative position bias of the row before": row_before,
        f"whose {rows} have the relative position bias of the row after": next_row,
        "in which all heads have the relative position bias of head 0": head_0,
    }
    for sentence, change in options.items():
        yield ForwardEdit(name="relative-bias", sentence=sentence, attention=changed(change))


HYPOTHESES = (padding_read, cross_changed, relative_bias)
