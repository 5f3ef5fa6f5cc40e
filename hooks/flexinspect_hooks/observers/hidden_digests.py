"""Digests of hidden states: eight signed sums per row and layer, and samples of the weights.

With them `flexinspect audit TRACE` judges steps without their tensors. Sum j of a row is that of
its elements j, j + 8, j + 16 …, each with a fixed sign: the count sketch of Charikar, Chen and
Farach-Colton (2002) with one hash table. The expected squared norm of the digest of a difference is
that of the difference itself, so that digests tell by how much two rows differ without the rows.
The signs depend on nothing but the index of the element, and sums are exact up to rounding in any
dtype, which products with a dense random matrix are not where matrix products run in TF32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from flexinspect.rules.numerics.audit_findings import TRAINING_EVENT
from flexinspect_hooks.capture.buffer import (
    Reduction,
    StepBuffer,
    stack_layers,
)
from flexinspect_hooks.capture.step_clock import StepContext
from flexinspect_hooks.step_writer.layer_records import DIGEST_STREAM, WEIGHTS_STREAM

N_SUMS = 8
"""Signed sums per row and layer."""
MAX_ROWS = 8
"""Rows of a prompt whose digests are kept: evenly spaced, with the first and the last one."""
MAX_BATCH = 4
"""Batch rows whose digests are kept."""
N_SAMPLES = 8
"""Values of each parameter that are kept."""
MODIFIED_EVENT = "digests-off"

_GAMMA = 0x9E3779B97F4A7C15


@cache
def signs(n: int) -> npt.NDArray[np.float32]:
    """Return the signs (n,) of a row's elements: bit 63 of SplitMix64 of the index.

    Generator: https://prng.di.unimi.it/splitmix64.c, whose i-th output from seed 0 this is.
    """
    z = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(_GAMMA)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return np.where(z >> np.uint64(63), np.float32(-1), np.float32(1))


@cache
def _signs_on(n: int, device: torch.device) -> Tensor:
    return torch.from_numpy(signs(n)).to(device)


def signed_sums(rows: Any, sign: Any) -> Any:
    """Return (…, `N_SUMS`) of float32 rows (…, n), of numpy or torch, with `sign` (n,)."""
    signed = rows * sign
    n = signed.shape[-1]
    if n % N_SUMS == 0:
        return signed.reshape(*signed.shape[:-1], n // N_SUMS, N_SUMS).sum(-2)
    parts = [signed[..., first::N_SUMS].sum(-1) for first in range(N_SUMS)]
    return torch.stack(parts, -1) if isinstance(signed, Tensor) else np.stack(parts, -1)


def digest(rows: Tensor) -> Tensor:
    """Return the digests (…, `N_SUMS`) of hidden states (…, n), in float32."""
    return torch.as_tensor(signed_sums(rows.float(), _signs_on(rows.shape[-1], rows.device)))


def digest_rows(n: int) -> list[int]:
    """Return which of `n` input rows have digests, in order."""
    if n <= MAX_ROWS:
        return list(range(n))
    return [round(number * (n - 1) / (MAX_ROWS - 1)) for number in range(MAX_ROWS)]


@lru_cache(64)
def _row_index(n: int, device: torch.device) -> Tensor:
    return torch.tensor(digest_rows(n), device=device)


def _some_rows(outputs: Sequence[Tensor]) -> Tensor:
    """Return the rows that have digests, (layers, sequences, rows, hidden)."""
    n = outputs[0].shape[1]
    if n > 1:
        outputs = [one.index_select(1, _row_index(n, one.device)) for one in outputs]
    return stack_layers(outputs)


class HiddenDigests:
    """Puts the digests of each step's hidden states into its buffer."""

    def __init__(self) -> None:
        self._is_off = False
        self._versions: int | None = None

    def reduce(
        self,
        kept: Sequence[tuple[int, Tensor, int | None]],
        stack: Sequence[Tensor] | Tensor | None,
        model: nn.Module,
        step: StepContext,
        buffer: StepBuffer,
        guard: Callable[[Reduction], Reduction] | None = None,
    ) -> None:
        """Reduce the outputs of all layers: (layer, (batch, rows, hidden), version when returned).

        `stack` (layers, hidden) are the newest rows, where they have been stacked already, or the
        outputs themselves, where the writer thread stacks them; `guard` checks that they are not
        modified before. An output that was modified in
        place afterwards is not what the layer returned: a model that does so has no digests.
        """
        if step.step == 0:
            self._put_weights(model, buffer)
            if model.training:
                text = "The model was in training mode: dropout, if any, was active."
                step.events.append((TRAINING_EVENT, text))
        if self._is_off or not _have_one_shape(kept):
            return
        if any(v is not None and v != version_of(output) for _, output, v in kept):
            self._is_off = True
            text = "A layer's output is modified in place, so that hidden states have no digests."
            step.events.append((MODIFIED_EVENT, text))
            return
        first = kept[0][1]
        n_batch = min(len(first), MAX_BATCH)
        if stack is not None and n_batch == 1:
            rows = stack
        else:
            rows = _some_rows([output.detach()[:n_batch] for _, output, _ in kept]).float()
        on_cpu = first.device.type == "cpu"
        n = first.shape[-1]
        sign = signs(n) if on_cpu else _signs_on(n, first.device)
        sums: Reduction = partial(_sums, n_batch, sign)
        if guard is not None and isinstance(rows, list):
            sums = guard(sums)
        buffer.defer(sums, rows=rows)

    def _put_weights(self, model: nn.Module, buffer: StepBuffer) -> None:
        """Put samples of the weights, unless they are those of an earlier generation."""
        parameters = list(model.parameters())
        versions = sum(version_of(one) or 0 for one in parameters)
        if versions == self._versions:
            return
        self._versions = versions
        found = sample_weights(parameters)
        if found is not None:
            buffer.put(WEIGHTS_STREAM, found)


def _sums(n_batch: int, sign: Any, _xp: Any, rows: Any) -> dict[str, Any]:
    """Return (sequences, rows, layers, sums) of rows (layers, [sequences, rows,] hidden).

    `rows` may also be a sequence of one row per layer.
    """
    if isinstance(rows, list):
        rows = np.stack([row.reshape(-1) for row in rows])
    sums = signed_sums(rows, sign)
    sums = sums.reshape(sums.shape[0], n_batch, -1, N_SUMS)
    order = (1, 2, 0, 3)
    if isinstance(sums, Tensor):
        return {DIGEST_STREAM: sums.permute(order)}
    return {DIGEST_STREAM: np.ascontiguousarray(sums.transpose(order))}


def _have_one_shape(kept: Sequence[tuple[int, Tensor, int | None]]) -> bool:
    shape = kept[0][1].shape
    return len(shape) == 3 and all(output.shape == shape for _, output, _ in kept)


def version_of(tensor: Tensor) -> int | None:
    """Return how often a tensor was modified in place, None where torch does not count it."""
    return None if tensor.is_inference() else tensor._version


def sample_weights(parameters: Sequence[Tensor]) -> Tensor | None:
    """Return evenly spaced values of each parameter, float32 (parameters, `N_SAMPLES`).

    None where they cannot be read in place: weights that are offloaded, sharded or quantised.
    """
    parts = []
    for one in parameters:
        is_plain = type(one) in (nn.Parameter, Tensor) and one.is_floating_point()
        if not is_plain or one.is_meta or not one.is_contiguous() or not one.numel():
            return None
        flat = one.detach().view(-1)
        spaced = flat[:: len(flat) // N_SAMPLES or 1]
        parts.append((spaced if len(spaced) >= N_SAMPLES else flat.repeat(N_SAMPLES))[:N_SAMPLES])
    if not parts or len({part.device for part in parts}) > 1:
        return None
    return torch.cat(parts).float().view(-1, N_SAMPLES)
