"""The rows that pass a model's decoder layers, and how far those of two runs are apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from msgspec import Struct
from torch import Tensor, nn

from flexinspect.core.errors import UsageError
from flexinspect_hooks.capture.model_layers import attention_layers, decoder_blocks

Floats = npt.NDArray[np.float64]

CACHE_LIMITS = {
    torch.float32: (1e-4, 1e-2),
    torch.float16: (5e-3, 0.1),
    torch.bfloat16: (0.03, 0.3),
}
"""By dtype: the lowest and the highest limit of a layer, relative to a row's norm."""
CACHE_NOISE_FACTOR = 8
"""A decode row may differ this many times more than the rows of the prompt."""

ReduceRows = Callable[[int, int, Tensor], Tensor]
"""Takes a point's index, the number of the first row, and the rows (batch, rows, width); returns
(batch, rows, ...)."""


class CapturePoint(Struct, frozen=True):
    """Where rows are captured: the input or the output of a module.

    `layer` is None before the first layer.
    """

    layer: int | None
    module: nn.Module
    is_input: bool = False


def capture_points(model: nn.Module) -> tuple[CapturePoint, ...]:
    """The input of the first decoder layer and the output of each layer.

    If no decoder layers are recognised, they are the modules of the longest `ModuleList`. Raises
    `UsageError` if the model has no decoder layers that can be found.
    """
    found = decoder_blocks(model, attention_layers(model))
    blocks = {layer: module for layer, (_, module) in found.items()}
    if not blocks:
        lists = (one for one in model.modules() if isinstance(one, nn.ModuleList))
        longest = max(lists, key=lambda one: len(one), default=nn.ModuleList())
        blocks = dict(enumerate(longest))
    if not blocks:
        raise UsageError(
            f"No decoder layers were found in {type(model).__name__}.",
            hint="They are the parents of modules with a layer_idx, or the longest ModuleList.",
        )
    first = next(iter(blocks.values()))
    outputs = (CapturePoint(layer, module) for layer, module in blocks.items())
    return (CapturePoint(None, first, is_input=True), *outputs)


def clone_rows(index: int, start: int, rows: Tensor) -> Tensor:
    """Keep the rows as they are: the `ReduceRows` of `capture_rows` by default."""
    return rows.clone()


def capture_rows(
    points: Sequence[CapturePoint],
    run: Callable[[], object],
    n_rows: int = 1 << 40,
    reduce: ReduceRows = clone_rows,
) -> list[Tensor]:
    """Run, and return for each point what `reduce` makes of the first `n_rows` rows that pass it.

    The rows of all forward passes are joined; there are fewer if fewer passed.
    """
    parts: list[list[Tensor]] = [[] for _ in points]
    n_passed = [0] * len(points)

    def on_hidden(index: int, hidden: Any) -> None:
        if not isinstance(hidden, Tensor) or hidden.dim() != 3:
            return
        start, n_passed[index] = n_passed[index], n_passed[index] + hidden.shape[1]
        if start < n_rows:
            parts[index].append(reduce(index, start, hidden[:, : n_rows - start].detach()))

    with ExitStack() as stack:
        for index, point in enumerate(points):
            stack.enter_context(_register_hook(point, index, on_hidden))
        run()
    return [torch.cat(part, 1) if part else torch.zeros(0, 0, device="cpu") for part in parts]


def _register_hook(point: CapturePoint, index: int, on_hidden: Callable[[int, Any], None]) -> Any:
    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        on_hidden(index, args[0] if args else kwargs.get("hidden_states"))

    def after(module: nn.Module, args: Any, output: Any) -> None:
        on_hidden(index, output[0] if isinstance(output, tuple) else output)

    if point.is_input:
        return point.module.register_forward_pre_hook(before, with_kwargs=True)
    return point.module.register_forward_hook(after)


def relative_differences(one: Tensor, other: Tensor, padding: Tensor | None) -> Floats:
    """The largest difference of each row (rows,), relative to the row's norm, over the batch.

    Values that are non-finite in both count as equal. `padding` (batch, rows) are rows at the start
    that do not count.
    """
    dtype = torch.promote_types(one.dtype, torch.float32)
    one, other = one.to(dtype), other.to(dtype)
    same = (one == other) | (~one.isfinite() & ~other.isfinite())
    distance = (one - other).masked_fill(same, 0).norm(dim=-1)
    relative = (distance / other.norm(dim=-1).clamp_min(1e-30)).nan_to_num(nan=torch.inf)
    relative = relative.masked_fill(distance == 0, 0)
    if padding is not None:
        relative[:, : padding.shape[1]].masked_fill_(padding, 0)
    largest: Floats = relative.amax(0).double().cpu().numpy()
    return largest
