"""`run --check-every N`: a step with a cache compared with a recompute of the whole sequence.

The recompute has no cached keys, the same mask, and attention by the dense reference instead of the
kernel. The newest row of every layer is compared, relative to its norm. The prefill is compared
too: its rows read no cache, so their differences are the noise of the other kernel. Where a step
differs by more, the kernel itself runs once without the cache, which tells the cache from the
kernel.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from flexinspect.core.errors import FlexInspectError, summarize_error
from flexinspect.core.text import plural
from flexinspect.records.prompt import Prompt
from flexinspect.records.step import EventRecord
from flexinspect.rules.numerics.recompute_checks import CHECK_EVENT, CHECK_FAILED_EVENT
from flexinspect_hooks.capture.layer_rows import (
    CACHE_LIMITS,
    CACHE_NOISE_FACTOR,
    Floats,
    capture_points,
    capture_rows,
    relative_differences,
)
from flexinspect_hooks.generation.decoding import Decoder
from flexinspect_hooks.generation.flex_patch import FlexPatch
from flexinspect_hooks.generation.mask_source import MaskSource
from flexinspect_hooks.gradients.after_generation import DENSE_REFERENCE, GradientPatch
from flexinspect_hooks.rewind.branching_decoder import BranchingDecoder
from flexinspect_hooks.sessions.capture_session import CaptureSession

KERNEL_FACTOR = 4
"""Rows of the prefill may differ by this many times the lowest limit of a cached step."""


class CheckCost(Struct):
    """The number of recomputes, and the time that they took in the model's thread."""

    n: int = 0
    seconds: float = 0.0


class RecomputeCheck:
    """Checks every N-th step of one generation, and the prefill; keeps the cost in `cost`.

    It keeps the rows that each layer gave in the newest forward. A recompute that fails becomes an
    event, and the generation continues without checks.
    """

    def __init__(
        self,
        model: Any,
        prompt: Prompt,
        session: CaptureSession,
        place: tuple[int, int],
        *,
        compiled: bool,
        cost: CheckCost,
    ) -> None:
        self._model, self._prompt, self._session = model, prompt, session
        self._generation, self._every = place
        self._compiled, self._cost = compiled, cost
        self._points = capture_points(model)[1:]
        self._layers = [one.layer for one in self._points]
        self._rows: list[Tensor | None] = [None] * len(self._points)
        self._is_busy = self._is_off = False
        self._limits: Floats | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Keep the newest rows of each layer in the body."""

        def keep(index: int, module: Any, args: Any, output: Any) -> None:
            if not self._is_busy and not torch.compiler.is_compiling():
                rows = output[0] if isinstance(output, tuple) else output
                self._rows[index] = rows.detach()

        with ExitStack() as stack:
            for index, point in enumerate(self._points):
                stack.enter_context(point.module.register_forward_hook(partial(keep, index)))
            yield
        self._rows = [None] * len(self._points)

    def on_step(self, decoder: BranchingDecoder) -> None:
        """Check the step that has just finished, if it is one of every N."""
        step, branch = decoder.step, decoder.current_branch
        is_first = self._limits is None
        if self._is_off or not (is_first or step % self._every == 0):
            return
        started = time.perf_counter()
        token_ids, source = branch.token_ids(step + 1)[:step], decoder.patch.source
        try:
            with self._session.no_capture(), torch.no_grad():
                data = self._check(token_ids, source)
        except (FlexInspectError, RuntimeError, MemoryError) as error:
            self._is_off = True
            text = f"Steps are not recomputed from step {step} on: {summarize_error(error)}"
            self._event(CHECK_FAILED_EVENT, text, step, {"branch": branch.number})
            return
        finally:
            self._is_busy, self._rows = False, [None] * len(self._points)
            seconds = time.perf_counter() - started
            self._cost.n, self._cost.seconds = self._cost.n + 1, self._cost.seconds + seconds
        data |= {"branch": branch.number, "ms": round(1e3 * seconds, 3)}
        self._event(CHECK_EVENT, _describe(step, data), step, data)

    def _check(self, token_ids: Sequence[int], source: MaskSource) -> dict[str, Any]:
        """Compare the kept rows with a recompute; return the data of the event."""
        self._is_busy = True
        dense = self._recompute(
            token_ids, GradientPatch(self._model, source, **self._dense_options())
        )
        kept = [rows for rows in self._rows if rows is not None]
        if len(kept) < len(self._rows):
            raise FlexInspectError("Not every layer ran in the newest forward.")
        errors = _differences(kept, dense)
        if self._limits is None:
            lowest, highest = CACHE_LIMITS.get(kept[0].dtype, CACHE_LIMITS[torch.float32])
            self._limits = np.clip(CACHE_NOISE_FACTOR * errors, lowest, highest)
            limits = np.full_like(errors, KERNEL_FACTOR * lowest)
        else:
            limits = self._limits
        data: dict[str, Any] = {
            "layers": self._layers,
            "errors": errors.tolist(),
            "limits": limits.tolist(),
            "kernel": DENSE_REFERENCE,
            "of": "flex compiled" if self._compiled else "flex uncompiled",
            "rows": kept[0].shape[1],
        }
        if (errors > limits).any() and kept[0].shape[1] == 1:
            again = self._recompute(
                token_ids, FlexPatch(self._model, source, compiled=self._compiled)
            )
            data["without_cache"] = _differences([rows[:, -1:] for rows in again], dense).tolist()
        return data

    def _dense_options(self) -> dict[str, bool]:
        return {"compiled": self._compiled, "use_flex": False, "keeps_weights": True}

    def _recompute(self, token_ids: Sequence[int], patch: FlexPatch) -> list[Tensor]:
        """Return each layer's rows (1, rows, width) of one forward over the whole sequence."""
        decoder = Decoder(self._model, self._prompt)
        decoder.token_ids += token_ids
        with patch:
            # `forward` itself, as the model's own hooks belong to recorded steps.
            return capture_rows(self._points, lambda: decoder.run(self._model.forward))

    def _event(self, kind: str, text: str, step: int, data: dict[str, Any]) -> None:
        place = (self._generation, step)
        self._session.recorder.put(EventRecord(kind, text, time.time(), *place, data))


def _differences(kept: Sequence[Tensor], full: Sequence[Tensor]) -> Floats:
    """The largest relative difference of each layer's rows with the last rows of a recompute."""
    pairs = ((one, other[:, -one.shape[1] :]) for one, other in zip(kept, full, strict=True))
    return np.array([relative_differences(*pair, None).max() for pair in pairs])


def _describe(step: int, data: dict[str, Any]) -> str:
    errors, limits = np.array(data["errors"]), np.array(data["limits"])
    worst = int(np.argmax(errors / limits))
    rows = plural(data["rows"], "row")
    return (
        f"Step {step} ({rows}) recomputed without a cache by the {data['kernel']}: at most "
        f"{errors[worst]:.2g} of a row's norm (layer {data['layers'][worst]}), limit "
        f"{limits[worst]:.2g}, in {data['ms']:.0f} ms."
    )
