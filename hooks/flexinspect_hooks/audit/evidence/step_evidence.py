"""What a program's own steps gave: the inputs of each forward, and rows of every layer.

A hook keeps references during a forward. Of a long prompt only some rows are kept. The first steps
of a generation keep every quantity, and so do those after a change of the attention's path; later
ones keep hidden states and logits, for which modules inside of the layers need no hook. Everything
is bounded by `MAX_BYTES` per model: past it a step keeps what was fed, and the digests of the trace
stand for its rows.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from msgspec import Struct, field
from torch import Tensor, nn

from flexinspect_hooks.audit.evidence.beams import newest_keys
from flexinspect_hooks.audit.evidence.cache_rows import newest_rows
from flexinspect_hooks.audit.evidence.cached_layers import CachedLayer, CachedLayers
from flexinspect_hooks.audit.forward.encoder_inputs import (
    EncoderInput,
    keep_encoded,
    read_encoder,
    watch_encoder,
)
from flexinspect_hooks.audit.forward.forward_run import (
    ATTENTION,
    CROSS,
    EMBEDDING,
    ENCODER,
    HEADS,
    HIDDEN,
    KEY,
    LOGITS,
    QUERY,
    VALUE,
    Point,
    output_projection,
)
from flexinspect_hooks.audit.forward.frozen_mods import frozen
from flexinspect_hooks.audit.forward.held_weights import HeldWeights
from flexinspect_hooks.audit.forward.module_state import ModuleState, StateReader
from flexinspect_hooks.audit.forward.program_hooks import ProgramHook, hooks_of
from flexinspect_hooks.capture.buffer import StepBuffer
from flexinspect_hooks.capture.hook import CaptureContext, Hook, Remove
from flexinspect_hooks.capture.model_layers import cross_attention, decoder_stack
from flexinspect_hooks.capture.step_clock import StepContext
from flexinspect_hooks.observers.hidden_digests import version_of
from flexinspect_hooks.observers.inputs_hook import input_ids_of, is_packed

MAX_BYTES = 128 << 20
"""The rows that are kept of one model."""
MAX_PROMPT_ROWS = 512
"""Rows of a forward that are kept; of a longer one the first and the last half as many."""
MAX_BATCH = 8
"""Batch rows that are kept."""
DETAILED_STEPS = 2
"""Steps of a generation whose queries, keys and values are kept, too."""
FULL_STEPS = 8
"""Steps of a generation, and after a change of path, whose other quantities are all kept."""
MAX_BARE_STEPS = 1 << 16
"""Steps of a model of which only the inputs are kept."""


OWN_KEYS = (
    "from step {step} on: the program calls the parts of the layers, and which keys its attention "
    "reads is not known"
)


class StepEvidence(Struct):
    """One forward of the program.

    `ids` (batch, q_len), `positions` and `padding` are the arguments, None if not passed. `rows`
    are the input rows whose `values` (batch, rows, …) are kept. Queries, keys and values are
    (batch, rows, heads, size); logits are those of batch row 0's newest row, (1, 1, vocabulary).
    `cache` is the identity of the cache that the forward received or made, 0 for none.
    `is_quantised` says that it keeps keys and values in a smaller dtype. `pool` are the keys of the
    first call, if it has more than there are tokens. Of a batch, `keys_before` and `keys_after` are
    the newest keys in the cache at the beginning and the end, see `beams`. `encoder` is that of a
    model with an encoder. `cached` is what each layer read. `hooks` are the program's own, as of
    the first steps of the generation. `newest_best` (batch,) are the best tokens after the newest
    column of a prompt with an attention mask, which is padding in some batches.

    Of a trace, `dtype` is that of the program's hidden states, of which there are digests only,
    (batch, rows, sums), and `logit_ids` are the tokens whose logits are known.
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
    pool: Tensor | None = None
    values: dict[Point, Tensor] = field(default_factory=dict)
    score_mods: dict[int, Any] = field(default_factory=dict)
    paths: dict[int, str] = field(default_factory=dict)
    cache: int = 0
    is_quantised: bool = False
    dtype: torch.dtype | None = None
    logit_ids: Tensor | None = None
    keys_before: Tensor | None = None
    keys_after: Tensor | None = None
    encoder: EncoderInput | None = None
    cached: dict[int, CachedLayer] = field(default_factory=dict)
    hooks: tuple[ProgramHook, ...] = ()
    newest_best: Tensor | None = None
    has_unknown_positions: bool = False
    """Whether the program calls the parts of the layers, and passes no position ids to any."""
    n_embedded: int = 0
    """Rows that earlier steps of the generation got as `inputs_embeds`, without token ids."""
    state: ModuleState | None = None
    """The flags and numbers of the program's own modules when the step began."""


class EvidenceStore:
    """The evidence of one model's steps, by generation, and a snapshot of its weights."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.steps: dict[int, list[StepEvidence]] = {}
        self.skipped: dict[int, str] = {}
        """Why a generation, or its steps from some step on, were not kept."""
        self.pools: dict[int, Tensor] = {}
        """By generation, the newest `pool` of its steps."""
        self.weights = HeldWeights()
        self.replaced_weights: Callable[[nn.Module], Iterable[tuple[str, dict[str, Any]]]]
        self.replaced_weights = lambda root: ()
        """Yields what modules in the place of weights do wrong, if it is known what was made."""
        self.problem = ""
        """Why no step of this model can be judged."""
        self._max_bytes, self.n_bytes = max_bytes, 0
        self.caches = CachedLayers()
        self.n_bare = 0
        """How many steps have no values, because the limit was reached."""
        self.is_busy = False

    def keep(self, evidence: StepEvidence, model: nn.Module) -> None:
        """Keep a step, without its values if the limit is reached."""
        generation = evidence.generation
        if generation in self.skipped:
            return
        size = sum(tensor.nbytes for tensor in evidence.values.values())
        if self.n_bare or self.n_bytes + size > self._max_bytes:
            evidence.values, size = {}, 0
            self.n_bare += 1
            if self.n_bare > MAX_BARE_STEPS:
                self.skipped[generation] = self.full_problem(evidence.step)
                return
        n_before = len(self.steps.get(generation, ()))
        # A forward of a training is alone; decode steps follow a generation in training mode.
        may_train = evidence.is_training and evidence.has_gradients
        if n_before == int(may_train) and (not may_train or evidence.kv_before):
            self.weights.note(generation, model)
        self.n_bytes += size
        if evidence.pool is not None:
            self.pools[generation], evidence.pool = evidence.pool, None
        self.steps.setdefault(generation, []).append(evidence)

    def full_problem(self, step: int) -> str:
        """Return why steps from some step on are not judged."""
        return f"from step {step} on: the steps before fill {self._max_bytes >> 20} MB"

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

    def clear(self) -> None:
        """Drop everything that was kept."""
        self.steps.clear()
        self.pools.clear()
        self.weights.clear()
        self.n_bytes, self.n_bare = 0, 0
        self.caches.clear()


class EvidenceHook(Hook):
    """Keeps the rows of every layer for the audit, if the session has a store for them."""

    name = "audit"
    own_code_only = True

    def install(self, context: CaptureContext) -> Iterable[Remove]:
        """Prepare hooks on the embedding, and on the attention of the layers."""
        self._context = context
        self._values: dict[Point, tuple[Tensor, int | None]] = {}
        self._pending: StepEvidence | None = None
        self._rows: dict[tuple[int, torch.device], Tensor] = {}
        self._paths: dict[int, str] = {}
        self._generation, self._n_full, self._n_rows = -1, 0, 1
        self._n_embedded = 0
        self._modules: list[tuple[weakref.ref[nn.Module], Point]] = []
        self._removes: list[Remove] = []
        self._watches_parts = False
        self._cache: Any = None
        self._has_encoder = False
        self._encoder_arguments: dict[str, Any] = {}
        self._encoder: EncoderInput | None = None
        self._hooks: tuple[ProgramHook, ...] = ()
        self._states = StateReader()
        if context.evidence is None:
            return
        encoder = watch_encoder(context.model)
        if encoder is not None:
            yield encoder
        context.keep_calls, context.keep_hidden = self.add_calls, self._keep_hidden
        embedding = _input_embedding(context.model)
        if embedding is not None:
            self._modules.append((weakref.ref(embedding), (EMBEDDING, None)))
        decoder = decoder_stack(context.model)
        self._has_encoder = decoder is not None
        crossing = cross_attention(context.model, context.layer_of)
        for layer, module in crossing.items():
            self._modules.append((weakref.ref(module), (CROSS, layer)))
        others = {id(module) for module in crossing.values()}
        for module in (context.model if decoder is None else decoder).modules():
            number = context.layer_of.get(id(module))
            if number is not None and id(module) not in others:
                self._modules.append((weakref.ref(module), (ATTENTION, number)))
                projection = output_projection(module)
                if projection is not None:
                    self._modules.append((weakref.ref(projection), (HEADS, number)))
        self._watch_modules()
        yield self._leave_modules

    def _watch_modules(self) -> None:
        """Put hooks on the modules; a forward of one with a hook takes some µs longer."""
        for reference, point in self._modules if not self._removes else ():
            module = reference()
            if module is None:
                continue
            keep = self._keeper(*point)
            on_output = self._context.on_output
            watch = self._on_input if point[0] == HEADS else on_output
            self._removes.append(watch(module, keep))
            if self._watches_parts and point[0] == HEADS:  # the attention itself is not called
                self._removes.append(on_output(module, self._keeper(ATTENTION, point[1])))

    def _leave_modules(self) -> None:
        while self._removes:
            self._removes.pop()()

    def _keeper(self, quantity: str, layer: int | None) -> Callable[[Any], None]:
        def keep(output: Any) -> None:
            rows = output[0] if isinstance(output, tuple) else output
            if isinstance(rows, Tensor) and rows.dim() == 3:
                # One row is not worth the check, which costs more than all else here.
                version = version_of(rows) if rows.shape[1] > 1 else None
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
        is_new = step.generation != self._generation
        if is_new:
            self._generation, self._n_full = step.generation, FULL_STEPS
            self._n_embedded = 0
        if self._context.is_in_parts and not self._watches_parts:
            self._watches_parts = True
            self._leave_modules()
        if self._n_full or step.q_len > 1:
            self._n_full = max(self._n_full - 1, 0)
            self._watch_modules()
        else:
            self._leave_modules()
        arguments = step.arguments
        if is_packed(arguments):
            why = "continuous batching packs rows of several requests into one forward"
            self._context.evidence.skipped[step.generation] = why
            return
        ids, mask = input_ids_of(arguments), arguments.get("attention_mask")
        if _is_encoder(self._context.model):
            self._encoder_arguments = {"input_ids": ids, "attention_mask": mask}
            return
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
        is_unknown = self._context.is_in_parts and not isinstance(positions, Tensor)
        self._pending.has_unknown_positions = is_unknown
        if step.step < DETAILED_STEPS:  # hooks that come later are not looked for
            self._hooks = hooks_of(self._context.model)
        self._pending.hooks = self._hooks
        states, layer_of = self._states, self._context.layer_of
        is_known = states.is_begun and not is_new
        model = self._context.model
        self._pending.state = states.read() if is_known else states.begin(model, layer_of)
        cache = arguments.get("past_key_values")
        self._cache, self._pending.cache = cache, _identity(cache)
        self._pending.is_quantised = _is_quantised(cache)
        if self._has_encoder:
            self._encoder = self._pending.encoder = read_encoder(arguments, self._encoder)
        n_rows = 1 if ids is None else len(ids)
        if max(n_rows, self._n_rows) > 1:
            self._pending.keys_before = newest_keys(cache, step.kv_before, least=1)
        self._n_rows = n_rows

    def _keep_hidden(self, layer: int, rows: Tensor) -> None:
        self._values[HIDDEN, layer] = (rows, version_of(rows))

    def add_calls(self, calls: Sequence[Any]) -> None:
        """Keep the queries, keys and values of a step's attention calls."""
        pending = self._pending
        if pending is None:
            return
        n = pending.kv_before + pending.q_len
        has_all = bool(calls) and all(call.key.shape[2] >= n for call in calls)
        if self._context.is_in_parts and pending.kv_before and not has_all:
            if self._context.evidence is not None:
                self._context.evidence.skipped.setdefault(
                    pending.generation, OWN_KEYS.format(step=pending.step)
                )
            self._pending = None
            return
        if calls and calls[0].key.shape[2] > n and not self._has_encoder:
            pending.pool = calls[0].key.detach()
        known = self._paths
        if any(known.get(call.layer) != call.path for call in calls):
            # The steps after a change are the first ones of another way to compute.
            self._paths, self._n_full = {call.layer: call.path for call in calls}, FULL_STEPS
        pending.paths = self._paths
        store = self._context.evidence
        if store is not None and not self._has_encoder:
            pending.cached.update(store.caches.keep(calls))
        for call in calls:
            arguments = None if call.kernel is None else getattr(call.kernel, "arguments", None)
            score_mod = arguments.get("score_mod") if arguments else None
            if score_mod is not None:
                is_read = pending.step < DETAILED_STEPS
                pending.score_mods[call.layer] = frozen(score_mod) if is_read else score_mod
            if self._has_encoder:  # a layer has two attentions, of which calls do not say which
                continue
            if pending.step < DETAILED_STEPS and call.query.shape[2] == pending.q_len:
                for name, tensor in ((QUERY, call.query), (KEY, call.key), (VALUE, call.value)):
                    # A copy: a decode row is a part of all keys.
                    stop = n if name != QUERY and tensor.shape[2] > n else tensor.shape[2]
                    newest = tensor[:, :, stop - pending.q_len : stop].transpose(1, 2)
                    newest = newest.detach().clone()
                    self._values[name, call.layer] = (newest, None)

    def reduce(self, step: StepContext, buffer: StepBuffer) -> None:
        """Keep the step; its tensors are copied, except those of decode steps."""
        pending, self._pending = self._pending, None
        if self._encoder_arguments:
            keep_encoded(self._encoder_arguments, step.output)
            self._encoder_arguments = {}
        store, values = self._context.evidence, self._values
        self._values = {}
        if pending is None or store is None or store.is_busy:
            return
        pending.n_embedded = self._n_embedded
        if pending.ids is None:
            self._n_embedded += pending.q_len
            return
        cache = getattr(step.output, "past_key_values", None)
        cache = self._cache if cache is None else cache
        self._cache = None
        pending.cache = pending.cache or _identity(cache)
        pending.keys_after = newest_keys(cache, step.kv_after)
        pending.rows = self._kept_rows(pending.q_len, pending.ids.device)
        self._keep_encoder(pending, step.output)
        for layer, output, version in self._context.layer_outputs():
            if isinstance(output, Tensor) and output.dim() == 3:
                values[HIDDEN, layer] = (output, version)
        for point, (tensor, version) in values.items():
            if version is not None and version_of(tensor) != version:
                continue  # modified in place after the module returned it
            if pending.q_len == 1 and tensor.shape[1] == 1:
                # Small, and no part of a larger tensor: a reference is enough.
                few = tensor if tensor.shape[0] <= MAX_BATCH else tensor[:MAX_BATCH]
                pending.values[point] = few.detach() if few.requires_grad else few
            elif tensor.shape[1] == pending.q_len:
                pending.values[point] = self._some_rows(tensor)
        is_graph = not any(name == HIDDEN for name, _ in pending.values)
        if is_graph and not pending.is_quantised and not self._has_encoder:
            for name, layer, newest in newest_rows(cache, pending.kv_before, pending.q_len):
                pending.values[name, layer] = self._some_rows(newest)
        if step.logits is not None:
            pending.values[LOGITS, None] = _own_row(step.logits)
        if pending.padding is not None and pending.q_len > 1:
            pending.newest_best = _newest_best(step.output)
        store.keep(pending, self._context.model)

    def _some_rows(self, tensor: Tensor) -> Tensor:
        """Return the rows that are kept of (batch, rows, ...), on the device of their layer."""
        return tensor[:MAX_BATCH].index_select(1, self._kept_rows(tensor.shape[1], tensor.device))

    def _kept_rows(self, n: int, device: torch.device) -> Tensor:
        found = self._rows.get((n, device))
        if found is None:
            found = self._rows[n, device] = _kept_rows(n, device)
        return found

    def _keep_encoder(self, pending: StepEvidence, output: Any) -> None:
        """Keep what the encoder gave, if the step is the first one that has it."""
        encoder = pending.encoder
        if encoder is not None and encoder.states is None:
            encoder.states = getattr(output, "encoder_last_hidden_state", None)
        if encoder is None or encoder.states is None or pending.step:
            return
        if encoder.ids is not None:
            pending.values[ENCODER, None] = encoder.states.detach()[:MAX_BATCH]


def _is_encoder(model: nn.Module) -> bool:
    """Whether a model is the encoder of another one."""
    config = getattr(model, "config", None)
    is_part = bool(getattr(config, "is_encoder_decoder", False)) and decoder_stack(model) is None
    return is_part and not getattr(config, "is_decoder", False)


def _own_row(row: Tensor) -> Tensor:
    """Return a row of logits (1, 1, vocabulary), copied if it is a part of a larger tensor."""
    row = row.detach()
    is_part = row.untyped_storage().nbytes() > row.nbytes
    return (row.clone() if is_part else row)[None, None]


def _newest_best(output: Any) -> Tensor | None:
    logits = getattr(output, "logits", None)
    if not isinstance(logits, Tensor) or logits.dim() != 3 or not logits.numel():
        return None
    return logits[:, -1].detach().argmax(-1)


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


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _kept_rows(n: int, device: torch.device) -> Tensor:
    rows = torch.arange(n, device=device)
    half = MAX_PROMPT_ROWS // 2
    return rows if n <= MAX_PROMPT_ROWS else torch.cat((rows[:half], rows[-half:]))


def _input_embedding(model: nn.Module) -> nn.Module | None:
    decoder = decoder_stack(model)
    model = model if decoder is None else decoder
    getter = getattr(model, "get_input_embeddings", None)
    try:
        found = getter() if getter is not None else None
    except (NotImplementedError, AttributeError):
        return None
    return found if isinstance(found, nn.Module) else None
