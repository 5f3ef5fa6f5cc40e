"""The attention weights of the X-ray's row, recomputed from the stored queries and keys."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from flexinspect.core.text import plural
from flexinspect.masks.attention_row import Floats, LseCheck, worst_check
from flexinspect.panels.attention.attention_data import (
    NO_OPEN_KEY,
    describe_mismatch,
    format_share,
)
from flexinspect.panels.attention.row_recompute import (
    NOT_FINITE,
    RowNotRecordedError,
    StepView,
    load_step_view,
)
from flexinspect.panels.base import TracePlace
from flexinspect.panels.panel_source import Source
from flexinspect.panels.token_window import TokenWindow, load_token_cells
from flexinspect.panels.xray import WEIGHT_SIGNS, WeightsOf

N_HEAVIEST = 10
MAX_MEAN_BYTES = 1 << 30
"""Maximum bytes of keys, as float32, that are read for the mean of all layers."""

ONLY_SEES = "Attention weights are those of the tokens that a token sees."


class RowWeights(Struct, frozen=True):
    """The attention weights of a row, of the heads that `of` names, and how they were checked.

    `by_pos` has those of the window's open tokens, `heaviest` (position, text, weight) the largest
    ones of the whole row, in descending order. `even` is the weight of every token if all had the
    same. Without weights, `reason` is a sentence; `is_mismatch` says that they are not what ran.
    """

    of: str = ""
    check: str = ""
    even: float = 1.0
    by_pos: Mapping[int, float] = {}
    heaviest: Sequence[tuple[int, str, float]] = ()
    reason: str = ""
    is_mismatch: bool = False

    def level(self, pos: int) -> int | None:
        """Return the index of a token's sign in `WEIGHT_SIGNS`, None without a weight."""
        weight, last = self.by_pos.get(pos), len(WEIGHT_SIGNS) - 1
        if weight is None or not self.heaviest:
            return None
        low, high = self.even / 10, self.heaviest[0][2]
        return round(last * math.log(max(weight, low) / low) / math.log(high / low))

    def summary(self) -> str:
        """Return one line: the check, then the heaviest tokens with their weights."""
        if self.reason:
            return f"{self.of}: {self.reason}" if self.of else self.reason
        tokens = ", ".join(f"“{text.strip() or text}” {own:.2g}" for _, text, own in self.heaviest)
        return f"{self.of} ({self.check}): {tokens}"

    def describe(self) -> Iterator[str]:
        """Yield lines of text: the check, then a line for each of the heaviest tokens."""
        if self.reason:
            yield self.summary()
            return
        yield f"Attention of {self.of} ({self.check}), the heaviest tokens:"
        for pos, text, weight in self.heaviest:
            yield f"  {format_share(weight):>8}  {pos:>6} '{text}'"


class _Mean:
    """The mean of the rows of some heads over the keys of a step, and the checks of the heads."""

    def __init__(self, view: StepView, pos: int) -> None:
        self._view, self._pos = view, pos
        self._sum: Floats = np.zeros(view.step_row.kv_after)
        self._checks: list[LseCheck] = []

    def add(self, index: int, head: int) -> RowWeights | None:
        """Add a head of a call. Returns why it has no weights, None if it has."""
        newest_pos = self._view.step_row.kv_after - 1
        newest = self._view.recompute_row(index, head, newest_pos)
        is_newest = self._pos == newest_pos
        row = newest if is_newest else self._view.recompute_row(index, head, self._pos)
        of = f"layer {self._view.calls[index].layer}, head {head}"
        if not np.isfinite((newest.total, row.total)).all():
            return RowWeights(of, reason=NOT_FINITE)
        if newest.lse_check.is_failed:
            return RowWeights(of, reason=describe_mismatch(newest), is_mismatch=True)
        self._sum[row.first_pos : row.first_pos + len(row.weights)] += row.weights
        self._checks.append(newest.lse_check)
        return None

    def weights(self) -> Floats:
        """Return the mean, float64 (keys,)."""
        mean: Floats = self._sum / len(self._checks)
        return mean

    def check(self) -> str:
        """Describe the worst check; only the newest row of a step has one."""
        text = worst_check(self._checks).describe()
        is_newest = self._pos == self._view.step_row.kv_after - 1
        return text if is_newest else f"newest row: {text}"


def load_weights(
    source: Source, place: TracePlace, window: TokenWindow, step: int, pos: int, of: WeightsOf
) -> RowWeights:
    """Return the weights of row `pos`, which step `step` computed. Raises `TraceError`."""
    view = load_step_view(source, replace(place, step=step))
    mean = _Mean(view, pos)
    try:
        name, heads = _choose_heads(view, of)
        for index, head in heads:
            if failure := mean.add(index, head):
                return failure
    except RowNotRecordedError as error:
        return RowWeights(reason=str(error))
    weights = mean.weights()
    if not weights.any():
        return RowWeights(reason=NO_OPEN_KEY)
    heaviest = np.argsort(-weights, kind="stable")[:N_HEAVIEST].tolist()
    cells = load_token_cells(source, place, window.segments, heaviest)
    texts = {at: cells[at].text if at in cells else "?" for at in heaviest}
    own = weights[window.start : window.stop].tolist()
    return RowWeights(
        name,
        mean.check(),
        1 / int(np.count_nonzero(weights)),
        dict(enumerate(own, window.start)),
        [(at, text, float(weights[at])) for at, text in texts.items() if weights[at]],
    )


def _choose_heads(view: StepView, of: WeightsOf) -> tuple[str, list[tuple[int, int]]]:
    """Return the name of the chosen heads, and (index of the call, head) of each."""
    place = view.place
    here = [index for index, call in enumerate(view.calls) if call.layer == place.layer][:1]
    if of == "mean":
        stored = view.stored_layers()
        every = [index for index, call in enumerate(view.calls) if call.layer in stored]
        calls = [view.calls[index] for index in every]
        size = sum(call.kv_heads * call.head_dim for call in calls) * view.step_row.kv_after * 4
        if size > MAX_MEAN_BYTES:
            raise RowNotRecordedError(
                f"The mean of {len(every)} layers needs {size >> 20} MiB of keys, more than the "
                f"limit of {MAX_MEAN_BYTES >> 20} MiB; that of one layer needs less."
            )
        here = every or here  # without stored layers, this one gives the reason
    heads = [(index, head) for index in here for head in range(view.calls[index].q_heads)]
    if not heads:
        raise RowNotRecordedError(f"Step {view.step_row.step} has no call of layer {place.layer}.")
    if of == "head":
        head = min(max(place.head, 0), len(heads) - 1)
        return f"layer {place.layer}, head {head}", heads[head : head + 1]
    layers = f"layer {place.layer}" if of == "layer" else plural(len(here), "layer")
    return f"{layers}, mean of {len(heads)} heads", heads
