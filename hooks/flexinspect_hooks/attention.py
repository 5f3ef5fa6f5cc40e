"""The attention call of every layer: path, lengths, mask received and executed, mass of the row.

One spot sees every backend: models ask `ALL_ATTENTION_FUNCTIONS.get_interface(name, default)` for
the function to call, at every call. While installed, that look-up returns a function that makes
the same call and keeps references to what went in and out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flexinspect.records import ArrayRecord, CallRecord
from flexinspect_hooks.buffer import StepBuffer, Values
from flexinspect_hooks.clock import StepContext
from flexinspect_hooks.hook import CaptureContext, Remove, StepDraft
from flexinspect_hooks.mass import MassReducer
from flexinspect_hooks.patching import BACKEND, LAST_CALL
from flexinspect_hooks.received import MaskBook, ReceivedMask
from flexinspect_hooks.store import put_activation, record_activations

_PATHS = {"sdpa": "sdpa", "eager": "eager"}


@dataclass(slots=True)
class CallRef:
    """References to one attention call: q, k, v (B, heads, rows, D), output (B, rows, heads, D)."""

    layer: int
    backend: str
    path: str
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Any
    scale: float | None
    softcap: float | None
    output: Tensor
    lse: Tensor | None
    is_causal: bool


@dataclass(frozen=True, slots=True)
class CallShape:
    """A call without its tensors: `q` is (B, heads, rows, D), `k` (B, kv heads, keys, D)."""

    layer: int
    path: str
    backend: str
    q: tuple[int, ...]
    k: tuple[int, ...]
    dtype: torch.dtype
    scale: float | None

    def record(self, mask: str | None, gate: float | None, gate_kind: str | None) -> CallRecord:
        """Return the call's record."""
        batch, q_heads, q_len, head_dim = self.q
        return CallRecord(
            layer=self.layer,
            path=self.path,
            backend=self.backend,
            mask=mask,
            batch=batch,
            q_heads=q_heads,
            kv_heads=self.k[1],
            q_len=q_len,
            kv_len=self.k[2],
            head_dim=head_dim,
            dtype=str(self.dtype).removeprefix("torch."),
            scale=self.scale,
            gate=gate,
            gate_kind=gate_kind,
        )


@dataclass(frozen=True, slots=True)
class _Kept:
    """What goes to the writer thread about a step's calls: no tensors."""

    calls: tuple[CallShape, ...]
    masks: tuple[ReceivedMask, ...]
    mask_of_call: tuple[int, ...]
    gate_kinds: tuple[str, ...]


class AttentionHook:
    """Sees each attention call of the watched model, whatever the backend."""

    name = "attention"

    def install(self, context: CaptureContext) -> Iterable[Remove]:
        """Shadow the look-up of attention functions on transformers' shared registry."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as REGISTRY

        self._context = context
        self._refs: list[CallRef] = []
        self._book = MaskBook(context.device)
        self._mass = MassReducer(context.device)
        self._seconds = 0.0
        before = REGISTRY.__dict__.get("get_interface")
        original = REGISTRY.get_interface
        watched: dict[tuple[str, Any], Callable[..., Any]] = {}

        def get_interface(attn_implementation: str, default: Callable[..., Any]) -> Any:
            function = original(attn_implementation, default)
            key = (attn_implementation, function)
            if key not in watched:
                watched[key] = self._watch(attn_implementation, function)
            return watched[key]

        def remove() -> None:
            if before is None:
                del REGISTRY.get_interface
            else:
                REGISTRY.get_interface = before

        REGISTRY.get_interface = get_interface
        return [remove]

    def _watch(self, backend: str, function: Callable[..., Any]) -> Callable[..., Any]:
        context, layer_of = self._context, self._context.layer_of

        def attention(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
        ) -> Any:
            layer = layer_of.get(id(module)) if context.is_open else None
            if layer is None:
                return function(module, query, key, value, *args, **kwargs)
            LAST_CALL.path, LAST_CALL.lse, LAST_CALL.softcap = "", None, None
            result = function(module, query, key, value, *args, **kwargs)
            self._keep(layer, backend, module, (query, key, value), args, kwargs, result)
            return result

        return attention

    def _keep(
        self,
        layer: int,
        backend: str,
        module: nn.Module,
        qkv: tuple[Tensor, Tensor, Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        started = time.perf_counter()
        path = LAST_CALL.path or _path(backend)
        self._refs.append(
            CallRef(
                layer,
                BACKEND if backend.startswith(BACKEND) else backend,
                path,
                *qkv,
                args[0] if args else kwargs.get("attention_mask"),
                kwargs.get("scaling"),
                kwargs.get("softcap"),
                result[0],
                LAST_CALL.lse,
                bool(getattr(module, "is_causal", True)),
            )
        )
        LAST_CALL.lse = None
        self._seconds += time.perf_counter() - started

    def begin(self, context: CaptureContext) -> None:
        """Take the generation's segments; masks already stored stay known."""
        self._mass.begin(context.segments)

    def open(self, step: StepContext) -> None:
        """Forget what an aborted step may have left."""
        self._refs.clear()

    def reduce(self, step: StepContext, buffer: StepBuffer) -> _Kept | None:
        """Describe the calls, evaluate each distinct mask once, reduce the newest rows."""
        refs = list(self._refs)
        self._refs.clear()
        step.capture_s += self._seconds
        self._seconds = 0.0
        if not refs:
            return None
        masks, numbers = self._book.collect(refs, step, buffer)
        kinds: tuple[str, ...] = ()
        if step.level != "basic":
            kinds = self._mass.reduce(refs, numbers, masks, buffer)
        if step.level == "extreme":
            self._store(refs, buffer)
        calls = tuple(_shape_of(ref) for ref in refs)
        kept_masks = tuple(mask.without_tensors() for mask in masks)
        return _Kept(calls, kept_masks, tuple(numbers), kinds)

    def _store(self, refs: list[CallRef], buffer: StepBuffer) -> None:
        """Store q, k, v of this step's rows: earlier keys are in earlier steps."""
        for ref in refs:
            if ref.layer not in self._context.layers:
                continue
            rows = ref.query.shape[2]
            put_activation(buffer, f"q.{ref.layer}", ref.query[0])
            put_activation(buffer, f"k.{ref.layer}", ref.key[0, :, -rows:])
            put_activation(buffer, f"v.{ref.layer}", ref.value[0, :, -rows:])

    def record(
        self, step: StepContext, kept: _Kept | None, values: Values, draft: StepDraft
    ) -> None:
        """Write calls, new masks, attention mass and stored activations."""
        if kept is None:
            return
        fingerprints = [self._book.record(mask, values, draft) for mask in kept.masks]
        gates = values["attention.gate"].tolist() if kept.gate_kinds else []
        for index, call in enumerate(kept.calls):
            mask = fingerprints[kept.mask_of_call[index]]
            gate = gates[index] if gates else None
            kind = kept.gate_kinds[index] if gates else None
            draft.calls.append(call.record(mask, gate, kind))
        for stream in ("attention.mass", "attention.lse", "attention.entropy"):
            if stream in values:
                draft.arrays.append(ArrayRecord(stream, np.asarray(values[stream], np.float32)))
        for stream in ("q", "k", "v"):
            record_activations(values, stream, draft)


def _path(backend: str) -> str:
    """Name the path of a backend that is not ours, from the name it was dispatched under."""
    if backend == "flex_attention":
        return "flex compiled"
    return _PATHS.get(backend, "other")


def _shape_of(ref: CallRef) -> CallShape:
    return CallShape(
        ref.layer,
        ref.path,
        ref.backend,
        ref.query.shape,
        ref.key.shape,
        ref.query.dtype,
        ref.scale,
    )
