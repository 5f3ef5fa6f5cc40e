"""Activations that are stored whole: named in the buffer on one side, arrays on the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexinspect.records import ArrayRecord
from flexinspect_hooks.buffer import StepBuffer, Values
from flexinspect_hooks.hook import StepDraft

_ACTIVATION_PREFIX = "store/"
_BFLOAT16 = "bfloat16/"


def put_activation(buffer: StepBuffer, name: str, tensor: Tensor) -> None:
    """Put a tensor in its own precision; `name` is "stream.layer"."""
    mark = _BFLOAT16 if tensor.dtype is torch.bfloat16 else ""
    # A copy, because the model may write to the tensor (or its cache) before it is on disk.
    buffer.put(f"{_ACTIVATION_PREFIX}{mark}{name}", tensor.detach().clone())


def record_activations(values: Values, streams: Sequence[str], draft: StepDraft) -> None:
    """Move the stored tensors of these streams into the draft, stream by stream."""
    found: dict[str, list[ArrayRecord]] = {stream: [] for stream in streams}
    for key, array in values.items():
        if not key.startswith(_ACTIVATION_PREFIX):
            continue
        name = key.removeprefix(_ACTIVATION_PREFIX)
        dtype = "bfloat16" if name.startswith(_BFLOAT16) else None
        stream, _, layer = name.removeprefix(_BFLOAT16).rpartition(".")
        if stream in found:
            found[stream].append(ArrayRecord(stream, array, int(layer), dtype))
    for records in found.values():
        draft.arrays += records
