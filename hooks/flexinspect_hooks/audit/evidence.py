"""What a program's own steps gave: the inputs of each forward, and rows of every layer.

A hook keeps references during a forward. Decode steps are small and all kept; of a long prompt only
some rows are. Everything is bounded by `MAX_BYTES` per model; what was not kept is not judged, and
the audit says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from msgspec import Struct, field
from msgspec.structs import replace
from torch import Tensor, nn

from flexinspect.core.errors import FlexInspectError
from flexinspect_hooks.audit.beams import newest_keys
from flexinspect_hooks.audit.forward_run import (
    ATTENTION,
    EMBEDDING,
    HEADS,
    HIDDEN,
    KEY,
    LOGITS,
    QUERY,
    VALUE,
    Point,
    output_projection,
)
from flexinspect_hooks.audit.weights import Snapshot, snapshot
from flexinspect_hooks.capture.buffer import StepBuffer
from flexinspect_hooks.capture.hook import CaptureContext, Hook, Remove
from flexinspect_hooks.capture.step_clock import StepContext
from flexinspect_hooks.loading.placement import free_memory
from flexinspect_hooks.observers.inputs_hook import input_ids_of, is_packed

MAX_BYTES = 128 << 20
"""The rows that are kept of one model."""
MAX_PROMPT_ROWS = 512
"""Rows of a forward that are kept; of a longer one the first and the last half as many."""
MAX_BATCH = 4
"""Batch rows that are kept."""
DETAILED_STEPS = 2
"""Steps of a generation whose queries, keys and values are kept, too."""
MAX_HELD_SHARE = 0.25
"""Weights that take more than this share of the free memory are not kept alive."""


class StepEvidence(Struct):
    """One forward of the program.

    `ids` (batch, q_len), `positions` and `padding` are the arguments, None if not passed. `rows`
    are the input rows whose `values` (batch, rows, …) are kept. Queries, keys and values are
    (batch, rows, heads, size); logits are those of batch row 0's newest row, (1, 1, vocabulary).
    `cache` is the identity of the cache that the forward received or made, 0 for none.
    `is_quantised` says that it keeps keys and values in a smaller dtype. Of a batch, `keys_before`
    and `keys_after` are the newest keys in the cache at the beginning and the end, see `beams`.
    """

    generation: int
    step: int
    q_len: int
    kv_before: int
    ids: Tensor | None
    positions: Tensor | None
    padding: Tensor | None
    has_dense_mask: bool
    is_training: bool
    has_gradients: bool
    rows: Tensor | None = None
    values: dict[Point, Tensor] = field(default_factory=dict)
    score_mods: dict[int, Any] = field(default_factory=dict)
    paths: dict[int, str] = field(default_factory=dict)
    cache: int = 0
    is_quantised: bool = False
    keys_before: Tensor | None = None
    keys_after: Tensor | None = None


class EvidenceStore:
    """The evidence of one model's steps, by generation, and a snapshot of its weights."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.steps: dict[int, list[StepEvidence]] = {}
        self.skipped: dict[int, str] = {}
        """Why a generation, or its steps from some step on, were not kept."""
        self.snapshot: Snapshot | None = None
        self.problem = ""
        """Why no step of this model can be judged."""
        self._max_bytes, self.n_bytes = max_bytes, 0
        self.is_busy = False
        self.find_model: Callable[[], nn.Module | None] = lambda: None
        """Returns the model if it is alive, for weights that are too large to be held."""
        self._versions = 0

    def keep(self, evidence: StepEvidence, model: nn.Module) -> None:
        """Keep a step, unless the limit is reached."""
        size = sum(tensor.nbytes for tensor in evidence.values.values())
        generation = evidence.generation
        if self.n_bytes + size > self._max_bytes or generation in self.skipped:
            text = f"from step {evidence.step} on: the steps before fill {self._max_bytes >> 20} MB"
            self.skipped.setdefault(generation, text)
            return
        if not self.steps:
            self._hold(model)
        self.n_bytes += size
        self.steps.setdefault(generation, []).append(evidence)

    def with_earlier_steps(self, generation: int) -> list[StepEvidence]:
        """Return the steps of a generation after those of earlier ones that filled its cache."""
        steps = self.steps[generation]
        first = steps[0]
        if not first.kv_before or not first.cache:
            return steps
        earlier = [n for n, those in self.steps.items() if n < generation and those]
        for number in reversed(earlier):
            if self.steps[number][-1].cache == first.cache:
                return [*self.with_earlier_steps(number), *steps]
        return steps

    def _hold(self, model: nn.Module) -> None:
        """Hold the weights, unless they take so much memory that the program may miss it."""
        held = snapshot(model)
        self._versions = held.versions
        if held.n_bytes <= MAX_HELD_SHARE * free_bytes(held.parameters[0].device):
            self.snapshot = held

    def take_snapshot(self) -> Snapshot | None:
        """Return the weights as of the steps.

        Raises `FlexInspectError` if they were modified since, or if the model, whose weights were
        too large to be held, is gone.
        """
        found = self.snapshot
        if found is None and self.steps:
            model = self.find_model()
            if model is None:
                raise FlexInspectError(
                    "The program deleted the model, whose weights are too large to be kept for it."
                )
            found = replace(snapshot(model), versions=self._versions)
        if found is not None and not found.is_unchanged:
            raise FlexInspectError("The weights were modified after the steps ran.")
        return found

    def clear(self) -> None:
        """Drop everything that was kept."""
        self.steps.clear()
        self.snapshot, self.n_bytes = None, 0


class EvidenceHook(Hook):
    """Keeps the rows of every layer for the audit, if the session has a store for them."""

    name = "audit"
    own_code_only = True

    def install(self, context: CaptureContext) -> Iterable[Remove]:
        """Put hooks on the embedding, the decoder layers and their attention."""
        self._context = context
        self._values: dict[Point, tuple[Tensor, int | None]] = {}
        self._pending: StepEvidence | None = None
        self._rows: dict[int, Tensor] = {}
        self._cache: Any = None
        if context.evidence is None:
            return
        context.keep_calls = self.add_calls
        embedding = _input_embedding(context.model)
        if embedding is not None:
            yield context.on_output(embedding, self._keeper(EMBEDDING, None))
        for layer, (_, block) in context.blocks.items():
            yield context.on_output(block, self._keeper(HIDDEN, layer))
        for module in context.model.modules():
            number = context.layer_of.get(id(module))
            if number is not None:
                yield context.on_output(module, self._keeper(ATTENTION, number))
                projection = output_projection(module)
                if projection is not None:
                    yield self._on_input(projection, self._keeper(HEADS, number))

    def _keeper(self, quantity: str, layer: int | None) -> Callable[[Any], None]:
        def keep(output: Any) -> None:
            rows = output[0] if isinstance(output, tuple) else output
            if isinstance(rows, Tensor) and rows.dim() == 3:
                # One row is not worth the check, which costs more than all else here.
                version = _version(rows) if rows.shape[1] > 1 else None
                self._values[quantity, layer] = (rows, version)

        return keep

    def _on_input(self, module: nn.Module, keep: Callable[[Any], None]) -> Remove:
        watched, context = id(module), self._context

        # As in `CaptureContext.on_output`: a copy of the model must not copy this object.
        def hook(module: nn.Module, args: Any) -> None:
            if not torch.compiler.is_compiling() and id(module) == watched and context.is_open:
                keep(args[0] if args else None)

        return module.register_forward_pre_hook(hook).remove

    def open(self, step: StepContext) -> None:
        """Keep the arguments, which the program may change later."""
        self._values.clear()
        self._pending = None
        if self._context.evidence is None:
            return
        arguments = step.arguments
        if is_packed(arguments):
            why = "continuous batching packs rows of several requests into one forward"
            self._context.evidence.skipped[step.generation] = why
            return
        ids, mask = input_ids_of(arguments), arguments.get("attention_mask")
        positions = arguments.get("position_ids")
        is_table = isinstance(mask, Tensor) and mask.dim() == 2
        padding = _copy(mask) if is_table else real_tokens(mask, step.q_len, step.kv_before)
        self._pending = StepEvidence(
            step.generation,
            step.step,
            step.q_len,
            step.kv_before,
            _copy(ids),
            _copy(positions) if isinstance(positions, Tensor) and positions.dim() == 2 else None,
            padding,
            has_dense_mask=mask is not None and not is_table,
            is_training=bool(self._context.model.training),
            has_gradients=torch.is_grad_enabled(),
        )
        cache = arguments.get("past_key_values")
        self._cache, self._pending.cache = cache, _identity(cache)
        self._pending.is_quantised = _is_quantised(cache)
        if ids is not None and len(ids) > 1:
            self._pending.keys_before = newest_keys(cache, step.kv_before)

    def add_calls(self, calls: Sequence[Any]) -> None:
        """Keep the queries, keys and values of a step's attention calls."""
        pending = self._pending
        if pending is None:
            return
        for call in calls:
            pending.paths[call.layer] = call.path
            arguments = getattr(call.kernel, "arguments", None) or {}
            score_mod = arguments.get("score_mod")
            if score_mod is not None:
                pending.score_mods[call.layer] = score_mod
            if pending.step < DETAILED_STEPS and call.query.shape[2] == pending.q_len:
                for name, tensor in ((QUERY, call.query), (KEY, call.key), (VALUE, call.value)):
                    # A copy: a decode row is a part of all keys.
                    newest = tensor[:, :, -pending.q_len :].transpose(1, 2).detach().clone()
                    self._values[name, call.layer] = (newest, None)

    def reduce(self, step: StepContext, buffer: StepBuffer) -> None:
        """Keep the step; its tensors are copied, except those of decode steps."""
        pending, self._pending = self._pending, None
        store, values = self._context.evidence, dict(self._values)
        self._values.clear()
        if pending is None or store is None or store.is_busy or pending.ids is None:
            return
        cache = getattr(step.output, "past_key_values", None)
        cache = self._cache if cache is None else cache
        self._cache = None
        pending.cache = pending.cache or _identity(cache)
        pending.keys_after = newest_keys(cache, step.kv_after)
        if pending.q_len not in self._rows:
            self._rows[pending.q_len] = _kept_rows(pending.q_len, pending.ids.device)
        pending.rows = self._rows[pending.q_len]
        for point, (tensor, version) in values.items():
            if version is not None and _version(tensor) != version:
                continue  # modified in place after the module returned it
            if pending.q_len == 1 and tensor.shape[1] == 1:
                # Small, and no part of a larger tensor: a reference is enough.
                few = tensor.shape[0] <= MAX_BATCH
                pending.values[point] = (tensor if few else tensor[:MAX_BATCH]).detach()
            elif tensor.shape[1] == pending.q_len:
                pending.values[point] = tensor[:MAX_BATCH].index_select(1, pending.rows)
        if step.logits is not None:
            pending.values[LOGITS, None] = step.logits.detach().clone()[None, None]
        store.keep(pending, self._context.model)


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a device in bytes, a guess of 16 GB where it cannot be read."""
    return free_memory(str(device)) or 1 << 34


def real_tokens(mask: Any, n_rows: int, n_before: int) -> Tensor | None:
    """Return which new tokens a dense mask lets attend to themselves, (batch, rows).

    The others are padding. `mask` is (batch, 1 or heads, rows, keys), bool or added to the scores,
    or such masks by kind of layer. None for one row, or without padding.
    """
    if isinstance(mask, dict):
        mask = mask.get("full_attention", next(iter(mask.values()), None))
    if n_rows < 2 or not isinstance(mask, Tensor) or mask.dim() != 4:
        return None
    if mask.shape[2] != n_rows or mask.shape[3] < n_before + n_rows:
        return None
    own = mask[:, 0, :, n_before : n_before + n_rows].diagonal(dim1=1, dim2=2)
    is_real = own if own.dtype == torch.bool else own > -1
    return None if bool(is_real.all()) else is_real.clone()


def _is_quantised(cache: Any) -> bool:
    layers = getattr(cache, "layers", None)
    return any("Quantized" in one.__name__ for one in type(layers[0]).__mro__) if layers else False


def _identity(cache: Any) -> int:
    return 0 if cache is None else id(cache)


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _kept_rows(n: int, device: torch.device) -> Tensor:
    rows = torch.arange(n, device=device)
    half = MAX_PROMPT_ROWS // 2
    return rows if n <= MAX_PROMPT_ROWS else torch.cat((rows[:half], rows[-half:]))


def _input_embedding(model: nn.Module) -> nn.Module | None:
    getter = getattr(model, "get_input_embeddings", None)
    try:
        found = getter() if getter is not None else None
    except (NotImplementedError, AttributeError):
        return None
    return found if isinstance(found, nn.Module) else None
