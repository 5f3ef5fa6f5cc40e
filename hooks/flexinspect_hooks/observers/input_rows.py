"""The inputs of a forward for batch row 0: token ids, position ids, padding.

The tensors are copied when the forward starts, because loops may write to them, and read on
demand. On CUDA a `StepBuffer` copies them on a side stream, so that reading waits for work that was
queued before the forward, never for the forward itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flexinspect_hooks.capture.buffer import StepBuffer


class InputRows:
    """Row 0 of the ids, positions and padding mask of one forward; each None if not passed.

    `ids` (rows,) stays on its device. The methods may be called from any thread.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        n_rows: int,
        *,
        with_mask: bool,
        buffer: StepBuffer | None = None,
    ) -> None:
        self.batch = batch_size_of(arguments)
        self.ids = _first_row(input_ids_of(arguments), n_rows)
        positions, mask = arguments.get("position_ids"), arguments.get("attention_mask")
        parts = {"ids": self.ids, "positions": _first_row(positions, n_rows)}
        parts["mask"] = _first_row(mask, n_rows) if with_mask else None
        self._buffer = buffer or StepBuffer(torch.device("cpu"))
        for name, part in parts.items():
            if part is not None:
                self._buffer.put(name, part)
        self._buffer.start_copy()
        self._lists: dict[str, list[int]] | None = None

    def token_ids(self) -> list[int] | None:
        """Return the token ids, None if the forward was called with embeddings."""
        return self._read().get("ids")

    def position_ids(self) -> list[int] | None:
        """Return the position ids, None if the model computes them itself."""
        return self._read().get("positions")

    def n_pads(self) -> int:
        """Return the number of padding rows at the beginning."""
        mask = self._read().get("mask", [])
        return next((n for n, is_real in enumerate(mask) if is_real), 0)

    def _read(self) -> dict[str, list[int]]:
        if self._lists is None:
            values = self._buffer.values()
            self._lists = {name: array.tolist() for name, array in values.items()}
        return self._lists


_DECODER_ARGUMENTS = ("input_ids", "inputs_embeds", "attention_mask")


class ArgumentNames:
    """Gives the positional arguments of a module's forward their names.

    Of an encoder-decoder model, the decoder's inputs get the names of a decoder-only model's.
    """

    def __init__(self, model: nn.Module) -> None:
        try:
            self._names = tuple(inspect.signature(model.forward).parameters)
        except (TypeError, ValueError):
            self._names = ()

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments by name; positional ones without a known name are left out."""
        named = {**dict(zip(self._names, args, strict=False)), **kwargs}
        if named.get("decoder_input_ids") is None and named.get("decoder_inputs_embeds") is None:
            return named
        return named | {name: named.get(f"decoder_{name}") for name in _DECODER_ARGUMENTS}


def input_ids_of(arguments: Mapping[str, Any]) -> Tensor | None:
    """Return the token ids (batch, rows): by name, else the first argument that looks like them."""
    first = next(iter(arguments.values()), None)
    return _as_id_table(arguments.get("input_ids", first))


def _as_id_table(value: Any) -> Tensor | None:
    if not isinstance(value, Tensor) or value.dim() != 2 or value.is_floating_point():
        return None
    return value


def _first_row(value: Any, n_rows: int) -> Tensor | None:
    """Return a copy of row 0 of a table (batch or 1, rows) of whole numbers, None for any other."""
    table = _as_id_table(value)
    if table is None or not len(table) or table.shape[1] != n_rows or not n_rows:
        return None
    return table[0].detach().clone()


def batch_size_of(arguments: Mapping[str, Any]) -> int:
    """Return the batch size of a forward with these arguments, 1 if they do not show it."""
    first = next(iter(arguments.values()), None)
    for value in (arguments.get("input_ids"), arguments.get("inputs_embeds"), first):
        if isinstance(value, Tensor) and value.dim() >= 2:
            return int(value.shape[0])
    return 1
