"""What the encoder of a model read, and what it gave to the decoder.

`generate` calls the encoder by itself and hands its output to each forward of the whole model, so
what the encoder read is kept when it runs, and found again by its output.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor, nn

from flexinspect_hooks.capture.model_layers import encoder_stack


class EncoderInput(Struct, eq=False):
    """The input of an encoder, and its output `states` (batch, length, width) in the program.

    `ids` and `mask` (batch, length) are what it read, None if that is not known or was not passed.
    `cross_mask` is the mask under which the decoder reads the states. If `ids` is None the states
    are taken as they are.
    """

    ids: Tensor | None
    mask: Tensor | None
    states: Tensor | None
    cross_mask: Tensor | None = None

    def row(self, batch: int) -> EncoderInput:
        """Return the input of one batch row."""
        parts = [None if one is None else _row(one, batch) for one in self._tensors()]
        return EncoderInput(*parts)

    def has_equal_rows(self) -> bool:
        """Whether several rows of the batch have the same input, as beams do."""
        rows = self.states if self.ids is None else self.ids
        return rows is not None and len(torch.unique(rows, dim=0)) < len(rows)

    def with_padding(self, pad: int | None) -> EncoderInput:
        """Return it with the mask that a program means that passed none: without padding.

        Padding are the ids of a pad token at the beginning or at the end, in a batch.
        """
        if self.mask is not None or self.ids is None or pad is None or len(self.ids) < 2:
            return self if self.mask is not None else replace(self, mask=self.cross_mask)
        is_text = self.ids != pad
        mask = is_text.cumsum(1).bool() & is_text.flip(1).cumsum(1).flip(1).bool()
        usual = self.cross_mask if self.cross_mask is not None or bool(mask.all()) else mask
        return replace(self, mask=usual)

    def _tensors(self) -> tuple[Tensor | None, ...]:
        return self.ids, self.mask, self.states, self.cross_mask


def _row(tensor: Tensor, batch: int) -> Tensor:
    return tensor[min(batch, len(tensor) - 1)][None]


class _Encoded(Struct, eq=False):
    states: weakref.ref[Tensor]
    ids: Tensor | None
    mask: Tensor | None


_recent: deque[_Encoded] = deque(maxlen=8)
"""The newest forwards of encoders; their outputs are not kept alive."""
_unread: list[Tensor] = []
"""The newest output, until the decoder reads it: for beams `generate` replaces it by a copy."""


def keep_encoded(arguments: Mapping[str, Any], output: Any) -> None:
    """Keep what an encoder read; `output` is what its forward returned."""
    ids, mask = arguments.get("input_ids"), arguments.get("attention_mask")
    states = states_of(output)
    if states is not None and isinstance(ids, Tensor) and ids.dim() == 2:
        _unread[:] = [states]
        _recent.append(_Encoded(weakref.ref(states), ids.detach().clone(), _table(mask)))


def watch_encoder(model: nn.Module) -> Any:
    """Keep what the encoder of a model reads; return what ends it, None without one."""
    encoder = encoder_stack(model)
    if encoder is None:
        return None

    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            names = dict(zip(("input_ids", "attention_mask"), args, strict=False))
            keep_encoded(names | kwargs, output)

    return encoder.register_forward_hook(hook, with_kwargs=True).remove


def read_encoder(arguments: Mapping[str, Any], known: EncoderInput | None) -> EncoderInput | None:
    """Return the encoder's part of a forward's arguments, None for a model without an encoder.

    `known` is that of the step before: the same output belongs to the same input. Of a forward that
    runs the encoder itself the states are known when it has returned.
    """
    cross_mask = _table(arguments.get("encoder_attention_mask"))
    states = states_of(arguments.get("encoder_outputs"))
    if states is None:
        ids = _table(arguments.get("encoder_input_ids"))
        return None if ids is None else EncoderInput(ids, cross_mask, None, cross_mask)
    if known is not None and known.states is states:
        return replace(known, cross_mask=cross_mask)
    ids, mask = _input_of(states)
    _unread.clear()
    return EncoderInput(ids, mask, states, cross_mask)


def _input_of(states: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return ids and mask that gave these states, which may be repeated for beams."""
    for one in reversed(_recent):
        given = one.states()
        if given is states:
            return one.ids, one.mask
        if given is None or given.shape[1:] != states.shape[1:] or len(states) % len(given):
            continue
        n = len(states) // len(given)
        if one.ids is not None and torch.equal(given.repeat_interleave(n, 0), states):
            mask = None if one.mask is None else one.mask.repeat_interleave(n, 0)
            return one.ids.repeat_interleave(n, 0), mask
    return None, None


def states_of(output: Any) -> Tensor | None:
    """Return the states (batch, length, width) of an encoder's output, None if it has none."""
    first = getattr(output, "last_hidden_state", None)
    if first is None and isinstance(output, tuple | list) and output:
        first = output[0]
    return first if isinstance(first, Tensor) and first.dim() == 3 else None


def _table(mask: Any) -> Tensor | None:
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return None
    return mask.detach().clone()
