"""The attention call of every layer: path, lengths, mask received and executed, mass of the row.

One spot sees every backend: models ask `ALL_ATTENTION_FUNCTIONS.get_interface(name, default)` for
the function to call, at every call. While installed, that look-up returns a function that makes
the same call and keeps references to what went in and out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from flexinspect.records import ArrayRecord, CallRecord
from flexinspect_hooks.buffer import StepBuffer, Values
from flexinspect_hooks.clock import StepContext
from flexinspect_hooks.hook import CaptureContext, Remove, StepDraft
from flexinspect_hooks.mass import MassReducer, gathered
from flexinspect_hooks.patching import BACKEND, LAST_CALL
from flexinspect_hooks.received import MaskBook, ReceivedMask
from flexinspect_hooks.store import put_activation, record_activations

UNSEEN = "unseen"

_PATHS = {"sdpa": "sdpa", "eager": "eager"}


class CallRef(NamedTuple):
    """References to one attention call: q, k, v (B, heads, rows, D), output (B, rows, heads, D).

    A tuple, because one is made per layer inside the forward.
    """

    layer: int
    backend: str
    default_path: str
    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor
    told_path: str
    lse: Tensor | None
    softcap: float | None

    @property
    def path(self) -> str:
        """The path taken: what our backend told, else what the backend's name means."""
        return self.told_path or self.default_path

    @property
    def mask(self) -> Any:
        """The mask that the layer received."""
        return self.args[0] if self.args else self.kwargs.get("attention_mask")

    @property
    def scale(self) -> float | None:
        """The scale of the scores, None for the default."""
        scale: float | None = self.kwargs.get("scaling")
        return scale

    @property
    def is_causal(self) -> bool:
        """Whether the module is causal when it gets no mask."""
        return bool(getattr(self.module, "is_causal", True))


class CallShape(NamedTuple):
    """A call without its tensors: `q` is (B, heads, rows, D), `k` (B, kv heads, keys, D)."""

    layer: int
    path: str
    backend: str
    q: torch.Size
    k: torch.Size
    dtype: torch.dtype
    scale: float | None
    softcap: float | None

    def record(self, mask: str | None, gate: float | None, gate_kind: str | None) -> CallRecord:
        """Return the call's record."""
        batch, q_heads, q_len, head_dim = self.q
        dtype = _DTYPES[self.dtype]
        return CallRecord(
            self.layer,
            self.path,
            self.backend,
            mask,
            batch,
            q_heads,
            self.k[1],
            q_len,
            self.k[2],
            head_dim,
            dtype,
            self.scale,
            gate,
            gate_kind,
            self.softcap,
        )


class _DTypeNames(dict[torch.dtype, str]):
    """torch.float32 to "float32", each made once."""

    def __missing__(self, dtype: torch.dtype) -> str:
        self[dtype] = str(dtype).removeprefix("torch.")
        return self[dtype]


_DTYPES = _DTypeNames()


class _Kept(NamedTuple):
    """What goes to the writer thread about a step's calls: no tensors."""

    calls: tuple[CallShape, ...]
    masks: tuple[ReceivedMask, ...]
    mask_of_call: tuple[int, ...]
    gate_kinds: tuple[str, ...]


class AttentionHook:
    """Sees each attention call of the watched model, whatever the backend."""

    name = "attention"
    _watched: dict[tuple[str, Any], Callable[..., Any]]

    def install(self, context: CaptureContext) -> Iterable[Remove]:
        """Shadow the look-up of attention functions on transformers' shared registry."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as REGISTRY

        self._context = context
        self._refs: list[CallRef] = []
        self._n_seen = 0
        self._book = MaskBook(context.device)
        self._mass = MassReducer(context.device)
        before = REGISTRY.__dict__.get("get_interface")
        original = REGISTRY.get_interface
        watched = self._watched = {}

        def get_interface(attn_implementation: str, default: Callable[..., Any]) -> Any:
            function = original(attn_implementation, default)
            if torch.compiler.is_compiling():  # a graph must not hold anything of ours
                return function
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
        context, layer_of, keep = self._context, self._context.layer_of, self._refs.append
        name = BACKEND if backend.startswith(BACKEND) else backend
        path = _path(backend)
        note = LAST_CALL

        def attention(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
        ) -> Any:
            layer = layer_of.get(id(module)) if context.is_open else None
            if layer is None:
                return function(module, query, key, value, *args, **kwargs)
            note.path, note.lse, note.softcap = "", None, None
            out = function(module, query, key, value, *args, **kwargs)
            # fmt: off
            keep(CallRef(layer, name, path, module, query, key, value, args, kwargs, out[0],
                         note.path, note.lse, note.softcap or kwargs.get("softcap")))
            # fmt: on
            note.lse = None
            return out

        return attention

    def begin(self, context: CaptureContext) -> None:
        """Take the generation's segments; masks already stored stay known.

        Each patch brings a function of its own, so those of ended generations are let go.
        """
        self._watched.clear()
        self._n_seen = len(set(context.layer_of.values()))
        self._mass.begin(context.segments)

    def open(self, step: StepContext) -> None:
        """Forget what an aborted step may have left."""
        self._refs.clear()

    def reduce(self, step: StepContext, buffer: StepBuffer) -> _Kept | None:
        """Describe the calls, evaluate each distinct mask once, reduce the newest rows."""
        refs = list(self._refs)
        self._refs.clear()
        self._count(len({ref.layer for ref in refs}), step)
        if not refs:
            return None
        masks, numbers = self._book.collect(refs, step, buffer)
        kinds: tuple[str, ...] = ()
        if step.level != "basic":
            kinds = self._mass.reduce(refs, numbers, masks, step.kv_after, buffer)
        if step.level == "extreme":
            self._store(refs, buffer)
        for mask in masks:
            mask.cells = mask.bias = None
        return _Kept(tuple(map(_shape_of, refs)), tuple(masks), tuple(numbers), kinds)

    def _count(self, n_seen: int, step: StepContext) -> None:
        """Say when fewer layers were seen than there are, each time that the number changes."""
        if n_seen == self._n_seen:
            return
        self._n_seen, n_layers = n_seen, len(set(self._context.layer_of.values()))
        if n_seen < n_layers:
            step.events.append((UNSEEN, _unseen(n_seen, n_layers)))

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
        rows = gathered(values, len(kept.calls)) if kept.gate_kinds else {}
        gates = rows["gate"].tolist() if rows else []
        for index, call in enumerate(kept.calls):
            mask = fingerprints[kept.mask_of_call[index]]
            gate = gates[index] if gates else None
            kind = kept.gate_kinds[index] if gates else None
            draft.calls.append(call.record(mask, gate, kind))
        for name in ("mass", "lse", "entropy"):
            if name in rows:
                array = np.asarray(rows[name], np.float32)
                draft.arrays.append(ArrayRecord(f"attention.{name}", array))
        for stream in ("q", "k", "v"):
            record_activations(values, stream, draft)


def _unseen(n_seen: int, n_layers: int) -> str:
    return (
        f"Attention was seen in {n_seen} of {n_layers} layers: the others did not ask transformers "
        "for their attention function (a replaced forward, a direct call, or a compiled model)."
    )


def _path(backend: str) -> str:
    """Name the path of a backend that is not ours, from the name it was dispatched under."""
    if backend == "flex_attention":
        return "flex compiled"
    return _PATHS.get(backend, "other")


def _shape_of(ref: CallRef) -> CallShape:
    query = ref.query
    path = ref.told_path or ref.default_path
    scale = ref.kwargs.get("scaling")
    cap = float(ref.softcap) if ref.softcap else None
    shapes = (query.shape, ref.key.shape)
    return CallShape(ref.layer, path, ref.backend, *shapes, query.dtype, scale, cap)
