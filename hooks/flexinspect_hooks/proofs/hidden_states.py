"""The hidden states of a run at chosen points of a model, and how far they move in another run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from flexinspect.core.errors import UsageError
from flexinspect_hooks.capture.model_layers import attention_layers, decoder_blocks

NOISE_FACTOR = 4
"""A row has moved when it is this many times further off than a run is from itself."""

RowChanges = npt.NDArray[np.float32]
"""How far each row moved: (points, batch, rows), the largest of a row's values; 0 is bit-equal."""

RunModel = Callable[[], object]
OnRows = Callable[[int, int, Tensor], None]
"""Told of a point, the first row, and the rows (batch, rows, width) that pass there."""


@dataclass(frozen=True, slots=True)
class CapturePoint:
    """Where rows are looked at: what goes into a module, or what comes out of it.

    `layer` is None before the first layer.
    """

    layer: int | None
    module: nn.Module
    is_input: bool = False


def capture_points(model: nn.Module) -> tuple[CapturePoint, ...]:
    """Return what feeds the first decoder layer, and the output of each. Raises `UsageError`."""
    blocks = decoder_layers(model)
    if not blocks:
        raise UsageError(
            f"No decoder layers were found in {type(model).__name__}.",
            hint="They are the parents of modules with a layer_idx, or the longest ModuleList.",
        )
    first = next(iter(blocks.values()))
    outputs = (CapturePoint(layer, module) for layer, module in blocks.items())
    return (CapturePoint(None, first, is_input=True), *outputs)


def decoder_layers(model: nn.Module) -> dict[int, nn.Module]:
    """Return layer index to decoder layer, in order; of models of your own the longest list."""
    found = decoder_blocks(model, attention_layers(model))
    if found:
        return {layer: module for layer, (_, module) in found.items()}
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    longest = max(lists, key=lambda one: len(one), default=nn.ModuleList())
    return dict(enumerate(longest))


@contextmanager
def capture_rows(
    points: Sequence[CapturePoint], n_rows: int, on_rows: OnRows
) -> Iterator[list[int]]:
    """Show `see` the first `n_rows` rows that pass each point, however many forwards bring them.

    Yields how many rows passed each point so far.
    """
    passed = [0] * len(points)

    def show(index: int, hidden: Any) -> None:
        if not isinstance(hidden, Tensor) or hidden.dim() != 3:
            return
        start, passed[index] = passed[index], passed[index] + hidden.shape[1]
        if start < n_rows:
            on_rows(index, start, hidden[:, : n_rows - start].detach())

    with ExitStack() as stack:
        for index, point in enumerate(points):
            stack.callback(_register_hook(point, index, show).remove)
        yield passed


def _register_hook(point: CapturePoint, index: int, show: Callable[[int, Any], None]) -> Any:
    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        show(index, args[0] if args else kwargs.get("hidden_states"))

    def after(module: nn.Module, args: Any, output: Any) -> None:
        show(index, output[0] if isinstance(output, tuple) else output)

    if point.is_input:
        return point.module.register_forward_pre_hook(before, with_kwargs=True)
    return point.module.register_forward_hook(after)


@contextmanager
def patch_rows(module: nn.Module, rows: Sequence[int], states: Tensor) -> Iterator[None]:
    """While entered, rows of batch row 0 that go into a module are those of `states` (B, n, D)."""
    passed = 0

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal passed
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        start, passed = passed, passed + hidden.shape[1]
        here = [row for row in rows if start <= row < passed]
        if not here:
            return None
        hidden = hidden.clone()
        hidden[0, [row - start for row in here]] = states[0, here].to(hidden.dtype)
        if args:
            return (hidden, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": hidden}

    handle = module.register_forward_pre_hook(before, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


class HiddenStates:
    """The rows of one run at some points, to which those of other runs are compared."""

    def __init__(self, points: Sequence[CapturePoint], n_rows: int) -> None:
        self.points = tuple(points)
        self.n_rows = n_rows
        self.reference: list[Tensor] = []
        """Per point (batch, rows, width), on the model's device."""

    def store_reference(self, run: RunModel) -> None:
        """Run, and keep the rows."""
        parts: list[list[Tensor]] = [[] for _ in self.points]

        def see(index: int, start: int, rows: Tensor) -> None:
            parts[index].append(rows.clone())

        self._run(run, see)
        self.reference = [torch.cat(part, 1) for part in parts]

    def compare(self, run: RunModel) -> RowChanges:
        """Run again, and return how far each row is from the one that was kept."""
        parts: list[list[Tensor]] = [[] for _ in self.points]

        def see(index: int, start: int, rows: Tensor) -> None:
            before = self.reference[index][:, start : start + rows.shape[1]]
            if before.shape != rows.shape:
                raise UsageError(
                    f"Two runs of as many ids gave states of other shapes: {tuple(before.shape)} "
                    f"and {tuple(rows.shape)}.",
                    hint="A run must not carry anything, such as a cache, on to the next one.",
                )
            parts[index].append(row_distance(before, rows))

        self._run(run, see)
        return torch.stack([torch.cat(part, 1) for part in parts]).float().cpu().numpy()

    def largest_value(self, point: int, row: int, batch: int = 0) -> float:
        """Return the largest value of a row that was kept."""
        return float(self.reference[point][batch, row].float().abs().max())

    def _run(self, run: RunModel, on_rows: OnRows) -> None:
        with capture_rows(self.points, self.n_rows, on_rows) as passed:
            run()
        least = min(passed)
        if least < self.n_rows:
            where = self.points[passed.index(least)].layer
            name = "what feeds the layers" if where is None else f"layer {where}"
            raise UsageError(
                f"The run showed {least} rows of {name}, and {self.n_rows} ids were given.",
                hint="The run must feed all the ids that it is given, to this model, without "
                "torch.compile around its layers.",
            )


def row_distance(one: Tensor, other: Tensor) -> Tensor:
    """Return the largest difference of each row (batch, rows); 0 only where all is equal.

    Two NaN are equal, and so are two infinities of one sign; NaN and a number differ by infinity.
    """
    kind = torch.promote_types(one.dtype, torch.float32)
    same = (one == other) | (one.isnan() & other.isnan())
    apart = (one.to(kind) - other.to(kind)).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    return apart.masked_fill(same, 0).amax(-1)
