"""Records the inputs of each step: batch size, position ids, and the cached keys of every layer.

Position ids are those that the first decoder layer receives, whether the program or the model made
them. Lengths are read from the cache, because a layer may receive a cache and not write to it.
`InputRows` are the token ids, position ids and padding of batch row 0.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from msgspec import Struct, field
from torch import Tensor, nn

from flexinspect_hooks.capture.buffer import StepBuffer
from flexinspect_hooks.capture.hook import CaptureContext, Hook, Remove
from flexinspect_hooks.capture.step_clock import StepContext
from flexinspect_hooks.observers.attention.score_mod_cells import CLOSED_SCORE
from flexinspect_hooks.step_writer.input_records import InputRecords, KeptInputs, Lengths

CACHE_OFF = "cache-disabled"
PACKED_REQUESTS = "packed-requests"
LEARNED_POSITIONS = "learned-positions"

_MAX_CELLS = 1 << 22
"""Larger masks of a batch are not reduced: so many cells take 5 ms on a CPU, once for a prompt."""
SMALL_TABLE = 64
"""Ids in a table on a CPU that is read as a list, which costs less than one operation of torch."""


class _PendingInputs(Struct):
    """The inputs of a step until it is reduced. The cache is referenced weakly."""

    batch: int = 1
    positions: Any = None
    cache: weakref.ref[Any] | None = None
    before: tuple[Lengths, Tensor | None] = ([], None)
    tables: dict[str, Tensor] = field(default_factory=dict)


class InputsHook(Hook):
    """Keeps the arguments of the root forward and of the first decoder layer."""

    name = "inputs"
    own_code_only = True

    def install(self, context: CaptureContext) -> Iterable[Remove]:
        """Put a hook on the model's first decoder layer."""
        first = next((block for _, block in context.blocks.values()), None)
        self._pending, self.records = _PendingInputs(), InputRecords()
        self._position_embedding = _position_embedding_name(context.model)
        first_id, is_dynamo_compiling = id(first), torch.compiler.is_dynamo_compiling

        # A function, because a copy of the model would copy a bound method, and this hook with it.
        # It compares ids: a reference to the module would keep it alive.
        def keep_positions(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            if id(module) == first_id and not is_dynamo_compiling() and context.is_open:
                self._pending.positions = kwargs.get("position_ids", self._pending.positions)

        if first is not None:
            yield first.register_forward_pre_hook(keep_positions, with_kwargs=True).remove

    def open(self, step: StepContext) -> None:
        """Keep what the forward may change: the lengths, and tensors that a loop may write to."""
        arguments = step.arguments
        cache, ids = arguments.get("past_key_values"), input_ids_of(arguments)
        pending = self._pending = _PendingInputs(batch_size_of(arguments))
        pending.positions = arguments.get("position_ids")
        pending.cache, pending.before = _weak_cache(cache), _cached_lengths(cache)
        if is_packed(arguments):
            text = "Continuous batching: one forward has rows of several requests."
            step.events.append((PACKED_REQUESTS, text))
        elif step.step == 0 and arguments.get("use_cache") is False:
            step.events.append((CACHE_OFF, "use_cache=False was given: no cache is kept."))
        if ids is not None and pending.batch > 1:
            pending.tables["inputs.ids"] = ids.to(torch.int32, copy=True)
        mask = arguments.get("attention_mask")
        if pending.batch > 1 and (seen := _seen_keys(mask, pending.batch, step)) is not None:
            pending.tables["inputs.seen"] = seen
        if not step.kv_before and isinstance(mask, Tensor) and mask.dim() == 2:
            dtype = torch.float32 if mask.is_floating_point() else mask.dtype
            pending.tables["inputs.mask"] = mask.to(dtype, copy=True)
            if self._position_embedding and step.step == 0:
                text = f"Position ids are looked up in {self._position_embedding}."
                step.events.append((LEARNED_POSITIONS, text))

    def reduce(self, step: StepContext, buffer: StepBuffer) -> KeptInputs:
        """Put tables, and lengths that are tensors; nothing waits for the device."""
        pending, self._pending = self._pending, _PendingInputs()
        if pending.cache is None:
            pending.cache = _weak_cache(getattr(step.output, "past_key_values", None))
        after = _cached_lengths(pending.cache() if pending.cache is not None else None)
        positions, small = pending.positions, None
        if isinstance(positions, Tensor) and positions.dim() == 2:
            if positions is step.read_positions[0] and pending.batch == len(positions) == 1:
                small = [step.read_positions[1]]
            elif positions.device.type == "cpu" and positions.numel() <= SMALL_TABLE:
                small = positions.tolist()
            else:
                pending.tables["inputs.positions"] = positions.to(torch.int32, copy=True)
        lengths = {"inputs.before": pending.before[1], "inputs.after": after[1]}
        for name, table in (pending.tables | lengths).items():
            if table is not None:
                buffer.put(name, table)
        return KeptInputs(pending.batch, pending.before[0], after[0], small)


def _seen_keys(mask: Any, batch: int, step: StepContext) -> Tensor | None:
    """Which keys any row sees, bool (batch, keys), by a mask (batch, heads, rows, keys).

    A mask (batch, keys) of a decode step counts where it closes the newest token of a sequence. On
    a GPU, which is not waited for, that of the first of these steps is kept.
    """
    if not isinstance(mask, Tensor) or len(mask) != batch:
        return None
    if mask.dim() == 2 and step.kv_before:
        is_kept = bool((mask[:, -1] == 0).any()) if mask.is_cpu else step.step == 1
        return mask != 0 if is_kept else None
    if mask.dim() != 4:
        return None
    if mask.numel() > _MAX_CELLS:
        return None
    is_open = mask if mask.dtype is torch.bool else mask > CLOSED_SCORE
    return is_open.flatten(1, 2).any(1)


def _position_embedding_name(model: nn.Module) -> str:
    for name, module in model.named_modules():
        last = str(name).rpartition(".")[2]
        if isinstance(module, nn.Embedding) and ("position" in last or last == "wpe"):
            return str(name)
    return ""


def _weak_cache(cache: Any) -> weakref.ref[Any] | None:
    """Return a weak reference to a cache, None for an object without a list of layers."""
    if not isinstance(getattr(cache, "layers", None), list):
        return None
    with suppress(TypeError):  # a class with slots may allow no such reference
        return weakref.ref(cache)
    return None


def _cached_lengths(cache: Any) -> tuple[Lengths, Tensor | None]:
    """Return the cached keys per layer; lengths of static layers are tensors, and are copied."""
    layers = getattr(cache, "layers", None)
    if not isinstance(layers, list):
        return [], None
    try:
        read = [layer.get_seq_length() for layer in layers]
    except AttributeError:  # linear attention has a state of fixed size and does not count keys
        getters = [getattr(layer, "get_seq_length", None) for layer in layers]
        read = [-1 if get is None else get() for get in getters]
    if {*map(type, read)} == {int}:
        return read, None
    tensors = [length for length in read if isinstance(length, Tensor)]
    lengths = [None if isinstance(length, Tensor) else int(length) for length in read]
    return lengths, torch.stack(tensors) if tensors else None


# -- the rows of one forward -----------------------------------------------------------------------


class InputRows:
    """Row 0 of the ids, positions and padding mask of one forward; each None if not passed.

    The tensors are copied when the forward starts, because loops may write to them, and read on
    demand; small ones on a CPU are read at once. On CUDA a `StepBuffer` copies them on a side
    stream, so that reading waits for work that was queued before the forward, never for the forward
    itself. The methods may be called from any thread.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        n_rows: int,
        *,
        with_mask: bool,
        buffer: StepBuffer | None = None,
    ) -> None:
        self.batch = batch_size_of(arguments)
        self._buffer = buffer or StepBuffer(torch.device("cpu"))
        names = ("position_ids", "attention_mask") if with_mask else ("position_ids",)
        tables = {name: _id_table(arguments.get(name), n_rows) for name in names}
        tables["ids"] = _id_table(input_ids_of(arguments), n_rows)
        found = {name: table for name, table in tables.items() if table is not None}
        self.has_ids = "ids" in found
        self._ids: Tensor | None = None  # not of small tables on a CPU
        self._lists: dict[str, list[int]] | None = None
        self.read_positions: tuple[Tensor | None, list[int]] = (None, [])
        """A table of position ids of one row, and its ids, if it is on a CPU and small."""
        if all(t.numel() <= SMALL_TABLE and t.device.type == "cpu" for t in found.values()):
            self._lists = {name: table.tolist()[0] for name, table in found.items()}
            if "position_ids" in found:
                self.read_positions = found["position_ids"], self._lists["position_ids"]
            return
        rows = {name: table[0].detach().clone() for name, table in found.items()}
        for name, row in rows.items():
            self._buffer.put(name, row)
        self._buffer.start_copy()
        self._ids = rows.get("ids")

    def newest_id(self) -> Tensor:
        """Return the last token id (1,), on the device of the ids; only if there are any."""
        if self._ids is not None:
            return self._ids[-1:]
        return torch.tensor(self._read()["ids"][-1:], device="cpu")

    def token_ids(self) -> list[int] | None:
        """Return the token ids, None if the forward was called with embeddings."""
        return self._read().get("ids")

    def position_ids(self) -> list[int] | None:
        """Return the position ids, None if the model computes them itself."""
        return self._read().get("position_ids")

    def newest_position(self) -> int | None:
        """Return the position id of the newest row, None if the model computes it itself."""
        positions = self.position_ids()
        return positions[-1] if positions else None

    def n_pads(self) -> int:
        """Return the number of padding rows at the beginning."""
        mask = self._read().get("attention_mask", [])
        return next((n for n, is_real in enumerate(mask) if is_real), 0)

    def _read(self) -> dict[str, list[int]]:
        if self._lists is None:
            self._lists = {name: array.tolist() for name, array in self._buffer.values().items()}
        return self._lists


_DECODER_ARGUMENTS = ("input_ids", "inputs_embeds", "attention_mask")


class ArgumentNames:
    """Names the positional arguments of a forward.

    Of a model with an encoder, `input_ids` and the like are those of the decoder; those of the
    encoder have names such as `encoder_input_ids`.
    """

    def __init__(self, model: nn.Module) -> None:
        try:
            self._names = tuple(inspect.signature(model.forward).parameters)
        except (TypeError, ValueError):
            self._names = ()

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments by name; positional ones without a known name are left out."""
        named = {**dict(zip(self._names, args, strict=False)), **kwargs}
        if named.get("decoder_input_ids") is None and named.get("decoder_inputs_embeds") is None:
            return named
        decoder = {name: named.get(f"decoder_{name}") for name in _DECODER_ARGUMENTS}
        encoder = {f"encoder_{name}": named.get(name) for name in _DECODER_ARGUMENTS}
        return named | encoder | decoder


def is_packed(arguments: Mapping[str, Any]) -> bool:
    """Whether a forward packs requests of continuous batching, whose keys are in pages."""
    return "read_index" in arguments and "write_index" in arguments


def input_ids_of(arguments: Mapping[str, Any]) -> Tensor | None:
    """Return the token ids (batch, rows): by name, else the first argument that looks like them."""
    return _as_id_table(arguments.get("input_ids", next(iter(arguments.values()), None)))


def _as_id_table(value: Any) -> Tensor | None:
    if not isinstance(value, Tensor) or value.dim() != 2 or value.is_floating_point():
        return None
    return value


def _id_table(value: Any, n_rows: int) -> Tensor | None:
    """Return a table (batch or 1, rows) of whole numbers with `n_rows` rows, None for any other."""
    table = _as_id_table(value)
    return table if table is not None and len(table) and table.shape[1] == n_rows > 0 else None


def batch_size_of(arguments: Mapping[str, Any]) -> int:
    """Return the batch size of a forward with these arguments, 1 if they do not show it."""
    first = next(iter(arguments.values()), None)
    for value in (arguments.get("input_ids"), arguments.get("inputs_embeds"), first):
        if isinstance(value, Tensor) and value.dim() >= 2:
            return int(value.shape[0])
    return 1
