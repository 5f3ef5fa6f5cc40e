"""The reference: an untouched copy of the model's architecture that shares the model's weights.

It runs in eager mode, without a cache, in eval mode. Its masks are made here and passed to every
layer, and its attention function, rotary embedding and modules can be edited; see `forward_edits`.
"""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import torch
from msgspec import Struct, field
from torch import Tensor, nn

from flexinspect.core.errors import FlexInspectError
from flexinspect_hooks.audit.clean_classes import clean_class
from flexinspect_hooks.audit.forward_edits import AttentionInput, Edit, Rotation, Scope
from flexinspect_hooks.capture.model_layers import attention_layers, decoder_blocks
from flexinspect_hooks.python_internals.torch_private import init_weights

Point = tuple[str, int | None]
"""What is compared, and its layer: see `QUANTITIES`."""

EMBEDDING, LOGITS = "embedding", "logits"
QUERY, KEY, VALUE = "query", "key", "value"
HEADS, ATTENTION, HIDDEN = "attention of the heads", "attention output", "hidden state"
QUANTITIES = (QUERY, KEY, VALUE, HEADS, ATTENTION, HIDDEN)
"""The quantities of a layer, in the order of the forward. Queries and keys are rotated."""

OUTPUT_PROJECTIONS = ("o_proj", "c_proj", "dense", "out_proj", "wo")
"""Names of the module that takes the attention of the heads."""


class Snapshot(Struct):
    """A model's class, configuration and weights, shared and not copied, as of one moment.

    `grafts` are leaf modules of another library (adapters, quantised matrices), which the reference
    uses as they are. `versions` is the sum of the weights' in-place modifications.
    """

    model_class: type
    config: Any
    tensors: dict[str, Tensor]
    grafts: dict[str, nn.Module]
    parameters: list[Tensor]
    versions: int

    @property
    def n_bytes(self) -> int:
        """The bytes of the weights."""
        return sum(one.nbytes for one in self.parameters)

    @property
    def is_unchanged(self) -> bool:
        """Whether the weights were not modified in place since."""
        return self.versions == _versions(self.parameters)


def snapshot(model: nn.Module) -> Snapshot:
    """Return the weights of a model, without copying them."""
    parameters = list(model.parameters())
    tensors = {name: one for name, one in model.state_dict(keep_vars=True).items()}
    grafts = {
        name: module
        for name, module in model.named_modules()
        if name and _is_foreign_leaf(module)
    }
    config = copy.deepcopy(getattr(model, "config", None))
    return Snapshot(model.__class__, config, tensors, grafts, parameters, _versions(parameters))


def _versions(tensors: Sequence[Tensor]) -> int:
    return sum(0 if one.is_inference() else one._version for one in tensors)


_FOREIGN = ("peft.", "bitsandbytes.", "quanto.", "optimum.", "torchao.", "hqq.", "gptqmodel.")


def _is_foreign_leaf(module: nn.Module) -> bool:
    name = f"{type(module).__module__}."
    return name.startswith(_FOREIGN) and not hasattr(module, "config")


# -- the run of a reference -------------------------------------------------------------------------


class Run(Struct):
    """One forward of the reference.

    `masks` maps a layer to the keys that each row may attend to, bool (1 or heads, rows, keys); a
    layer without one has the architecture's own mask. `ends` (rows,) is how many keys there were
    when the program computed each row: no mask opens later ones. `noise` is the relative size of
    random changes at every point. `stop_after` ends the forward after a layer.
    """

    positions: Tensor
    ends: Tensor | None = None
    masks: Mapping[int, Tensor] = field(default_factory=dict)
    biases: Mapping[int, Tensor] = field(default_factory=dict)
    edits: Sequence[tuple[Edit, Scope]] = ()
    noise: float = 0.0
    stop_after: int | None = None
    generator: torch.Generator | None = None
    values: dict[Point, Tensor] = field(default_factory=dict)
    layer: int = -1
    layer_input: Tensor | None = None

    def perturb(self, tensor: Tensor) -> Tensor:
        """Return a tensor with relative changes of the size of `noise`."""
        if not self.noise or not tensor.is_floating_point():
            return tensor
        random = torch.rand(tensor.shape, generator=self.generator, dtype=torch.float32)
        scale = (2 * random - 1).to(tensor.device, tensor.dtype) * self.noise
        return tensor * (1 + scale)


class _StopForwardError(Exception):
    """Ends a forward of the reference after the last layer that is needed."""


_active = threading.local()


def _active_run() -> tuple[Reference, Run] | None:
    return getattr(_active, "run", None)


class _Interface:
    """Stands for transformers' registry of attention functions: it has only the eager one."""

    def get_interface(self, attn_implementation: str, default: Callable[..., Any]) -> Any:
        """Return the architecture's own function."""
        return default

    def __getitem__(self, name: str) -> Any:
        raise KeyError(name)


class Reference:
    """An untouched model with the weights of a snapshot, in float32 or another dtype.

    Raises `FlexInspectError` if the architecture is not one of transformers, or its weights do not
    fit, or it has an encoder.
    """

    def __init__(self, source: Snapshot, dtype: torch.dtype = torch.float32) -> None:
        if getattr(source.config, "is_encoder_decoder", False):
            raise FlexInspectError("Models with an encoder are not audited.")
        cls, self.namespace = clean_class(source.model_class)
        _prepare(self.namespace)
        self.dtype = dtype
        config = copy.deepcopy(source.config)
        config._attn_implementation = "eager"
        with torch.device("meta"):
            self.model: Any = cls(config)
        self.model.eval()
        self.config = self.model.config
        self.notes: list[str] = []
        self._assign(source)
        layer_of = attention_layers(self.model)
        self.blocks = decoder_blocks(self.model, layer_of)
        if not self.blocks:
            raise FlexInspectError(f"No attention layers were found in {cls.__name__}.")
        self._install(layer_of)
        self.device = next(iter(source.parameters)).device

    # -- building --------------------------------------------------------------------------------

    def _assign(self, source: Snapshot) -> None:
        """Let the reference use the weights; tables that are not stored are made again, first.

        The order matters: the architecture's initialisation writes to parameters too, which are on
        the meta device then, and never to the weights of the program.
        """
        device = source.parameters[0].device
        self._make_tables(device)
        for name, module in source.grafts.items():
            parent, _, last = name.rpartition(".")
            if self._has_module(name):
                setattr(self.model.get_submodule(parent), last, module)
        if source.grafts:
            kinds = sorted({type(one).__name__ for one in source.grafts.values()})
            self.notes.append(f"modules of other libraries are used as they are: {kinds}")
        for name, tensor in list(self.model.named_parameters(remove_duplicate=False)):
            if tensor.is_meta:
                held = source.tensors.get(name)
                if held is None or held.shape != tensor.shape:
                    held = self._usual_value(name, tensor, device)
                self._set(name, nn.Parameter(self._convert(held), requires_grad=False))
        for name, buffer in list(self.model.named_buffers(remove_duplicate=False)):
            if buffer.is_meta:
                if name not in source.tensors:
                    raise FlexInspectError(f"The table {name} of the architecture cannot be made.")
                self._set(name, self._convert(source.tensors[name]), is_buffer=True)

    def _make_tables(self, device: torch.device) -> None:
        """Make the buffers that no checkpoint has, such as rotary frequencies."""
        for module in self.model.modules():
            own = module._non_persistent_buffers_set
            for name in own:
                old = module._buffers[name]
                if old is not None:
                    is_float = old.is_floating_point()
                    fresh = torch.full(old.shape, torch.nan if is_float else 0, device=device)
                    module._buffers[name] = fresh.to(old.dtype)
            if own:
                with torch.no_grad():
                    init_weights(self.model, module)
        for name, buffer in self.model.named_buffers():
            if not buffer.is_meta and buffer.is_floating_point() and bool(buffer.isnan().any()):
                raise FlexInspectError(f"The table {name} of the architecture cannot be made.")

    def _usual_value(self, name: str, like: Tensor, device: torch.device) -> Tensor:
        """Return the initial value of a norm's weight or of a bias that the model does not have."""
        module = self.model.get_submodule(name.rpartition(".")[0])
        if "norm" not in type(module).__name__.lower() and not name.endswith(".bias"):
            raise FlexInspectError(f"The model has no weights {name} of the expected shape.")
        self.notes.append(f"the model has no {name}; the reference has its initial value")
        value = 0.0 if name.endswith("bias") or "gemma" in type(module).__name__.lower() else 1.0
        return torch.full(like.shape, value, device=device)

    def _convert(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self.dtype) if tensor.is_floating_point() else tensor.detach()

    def _has_module(self, name: str) -> bool:
        return name in dict(self.model.named_modules())

    def _set(self, name: str, tensor: Tensor, *, is_buffer: bool = False) -> None:
        parent, _, last = name.rpartition(".")
        module = self.model.get_submodule(parent)
        table = module._buffers if is_buffer else module._parameters
        table[last] = tensor

    def _install(self, layer_of: Mapping[int, int]) -> None:
        """Put hooks on the reference's own modules."""
        embedding = self.model.get_input_embeddings()
        embedding.register_forward_hook(self._on_embedding)
        prefixes = {f"{name}.": layer for layer, (name, _) in self.blocks.items()}
        for layer, (_, block) in self.blocks.items():
            block.register_forward_pre_hook(self._before_block(layer), with_kwargs=True)
            block.register_forward_hook(self._after_block(layer))
        for name, module in self.model.named_modules():
            layer = next((n for p, n in prefixes.items() if name.startswith(p)), None)
            if id(module) in layer_of:
                number = layer_of[id(module)]
                module.register_forward_hook(self._after_attention(number))
                projection = output_projection(module)
                if projection is not None:
                    projection.register_forward_pre_hook(self._before_projection(number))
            if name and not any(True for _ in module.children()):
                module.register_forward_hook(self._after_leaf(name.rpartition(".")[2], layer))
            elif id(module) in layer_of or name.rpartition(".")[2] in ("mlp", "feed_forward"):
                module.register_forward_hook(self._after_leaf(name.rpartition(".")[2], layer))

    def _on_embedding(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        run = self._run_of()
        if run is None:
            return None
        run.values[EMBEDDING, None] = output.detach()
        return run.perturb(output)

    def _run_of(self) -> Run | None:
        active = _active_run()
        return active[1] if active is not None and active[0] is self else None

    def _before_block(self, layer: int) -> Callable[..., Any]:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            run = self._run_of()
            if run is not None:
                run.layer = layer
                run.layer_input = args[0] if args else kwargs.get("hidden_states")

        return before

    def _after_block(self, layer: int) -> Callable[..., Any]:
        def after(module: nn.Module, args: Any, output: Any) -> Any:
            run = self._run_of()
            if run is None:
                return None
            rows = output[0] if isinstance(output, tuple) else output
            run.values[HIDDEN, layer] = rows.detach()
            if run.stop_after == layer:
                raise _StopForwardError
            if not run.noise:
                return None
            noisy = run.perturb(rows)
            return (noisy, *output[1:]) if isinstance(output, tuple) else noisy

        return after

    def _after_attention(self, layer: int) -> Callable[..., Any]:
        def after(module: nn.Module, args: Any, output: Any) -> None:
            run = self._run_of()
            if run is not None:
                rows = output[0] if isinstance(output, tuple) else output
                run.values[ATTENTION, layer] = rows.detach()

        return after

    def _before_projection(self, layer: int) -> Callable[..., Any]:
        def before(module: nn.Module, args: Any) -> Any:
            run = self._run_of()
            if run is None:
                return None
            run.values[HEADS, layer] = args[0].detach()
            return (run.perturb(args[0]), *args[1:]) if run.noise else None

        return before

    def _after_leaf(self, last: str, layer: int | None) -> Callable[..., Any]:
        def after(module: nn.Module, args: Any, output: Any) -> Any:
            run = self._run_of()
            for edit, scope in run.edits if run is not None else ():
                change = edit.modules.get(last)
                if change is None or not scope.has(layer) or run is None:
                    continue
                rows = output[0] if isinstance(output, tuple) else output
                inputs = args[0] if args else run.layer_input
                before = run.layer_input if run.layer_input is not None else rows
                edited = mix_rows(rows, change(module, inputs, rows, before), scope.first_row, 1)
                output = (edited, *output[1:]) if isinstance(output, tuple) else edited
            return output

        return after

    # -- running ---------------------------------------------------------------------------------

    def run(self, ids: Sequence[int], run: Run, logit_rows: Sequence[int] = ()) -> dict[Point, Tensor]:
        """Return the values of one forward over `ids`: (1, rows, …) per point.

        The logits are those of `logit_rows`, (1, rows, vocabulary).
        """
        run.values = {}
        arguments: dict[str, Any] = {"use_cache": False, "position_ids": run.positions}
        if "logits_to_keep" in type(self.model).forward.__code__.co_varnames:
            keep = torch.tensor(list(logit_rows) or [len(ids) - 1], device=self.device)
            arguments["logits_to_keep"] = keep
        for edit, scope in run.edits:
            if edit.positions is not None:
                changed = edit.positions(run.positions)
                arguments["position_ids"] = mix_rows(run.positions, changed, scope.first_row, 1)
        run.positions = arguments["position_ids"]
        table = torch.tensor([list(ids)], device=self.device)
        with self._active(run), torch.no_grad():
            try:
                # `forward` itself: the root's own call may be watched.
                output = self.model.forward(input_ids=table, **arguments)
            except _StopForwardError:
                return run.values
        logits = output.logits
        if logits.shape[1] == len(ids) and len(logit_rows) != len(ids):
            logits = logits[:, list(logit_rows) or [len(ids) - 1]]
        run.values[LOGITS, None] = logits.detach()
        return run.values

    @contextmanager
    def _active(self, run: Run) -> Iterator[None]:
        before = getattr(_active, "run", None)
        _active.run = (self, run)
        with ExitStack() as stack:
            for edit, _ in run.edits:
                for name, value in edit.config.items():
                    stack.callback(setattr, self.config, name, getattr(self.config, name, None))
                    setattr(self.config, name, value)
            try:
                yield
            finally:
                _active.run = before

    def layer_window(self, layer: int) -> int | None:
        """Return the sliding window of a layer, None without one."""
        kinds = getattr(self.config, "layer_types", None)
        window = getattr(self.config, "sliding_window", None)
        if kinds is not None and layer < len(kinds):
            return window if kinds[layer] == "sliding_attention" else None
        uses = getattr(self.config, "use_sliding_window", True)
        return window if "create_sliding_window_causal_mask" in vars(self.namespace) and uses else None

    def own_mask(self, layer: int, n: int) -> Tensor:
        """Return the architecture's own mask of a layer, bool (1, rows, keys)."""
        return window_mask(n, self.layer_window(layer), self.device)[None]

    def attend(self, original: Callable[..., Any], call: AttentionInput) -> Tensor:
        """Compute an attention by the architecture's own function; rows without a key give 0."""
        if call.output is not None:
            return call.output(call)
        closed = torch.finfo(call.query.dtype).min
        mask = torch.zeros(call.allowed.shape, dtype=call.query.dtype, device=call.query.device)
        mask = mask.masked_fill(~call.allowed, closed)
        if call.bias is not None:
            mask = mask + call.bias.to(mask.dtype)
        options = dict(call.options)
        if call.scaling is not None:
            options["scaling"] = call.scaling
        output = original(call.module, call.query, call.key, call.value, mask, **options)[0]
        is_empty = ~call.allowed.any(-1)  # (1, heads, rows)
        if bool(is_empty.any()):
            output = output.masked_fill(is_empty.transpose(1, 2)[..., None], 0)
        return output


def output_projection(attention: nn.Module) -> nn.Module | None:
    """Return the module that takes the attention of the heads, None if it is not recognised."""
    return next((m for n, m in attention.named_children() if n in OUTPUT_PROJECTIONS), None)


def window_mask(n: int, window: int | None, device: torch.device | str) -> Tensor:
    """Return the causal mask, bool (n, n), with a sliding window of keys if there is one."""
    rows = torch.arange(n, device=device)[:, None]
    keys = torch.arange(n, device=device)[None]
    mask = keys <= rows
    return mask if window is None else mask & (keys > rows - window)


def mix_rows(plain: Tensor, edited: Tensor, first_row: int, dim: int) -> Tensor:
    """Return `plain` with the rows from `first_row` on of `edited`."""
    if first_row <= 0:
        return edited
    length = plain.shape[dim] - first_row
    if length <= 0:
        return plain
    rest = edited.narrow(dim, first_row, length)
    return torch.cat((plain.narrow(dim, 0, first_row), rest), dim)


# -- the functions of the copied module ------------------------------------------------------------


def _prepare(namespace: ModuleType) -> None:
    """Replace masks, attention and rotary embedding in the copied module, once."""
    if hasattr(namespace, "_flexinspect_prepared"):
        return
    names = vars(namespace)
    names["_flexinspect_prepared"] = True
    for name in [name for name in names if re.fullmatch(r"create_(\w+_)?causal_mask", name)]:
        setattr(namespace, name, _mask_function(name, names[name]))
    if "ALL_ATTENTION_FUNCTIONS" in names:
        namespace.ALL_ATTENTION_FUNCTIONS = _Interface()  # type: ignore[attr-defined]
    if "eager_attention_forward" in names:
        original = names["eager_attention_forward"]
        namespace.eager_attention_forward = _attention_function(original)  # type: ignore[attr-defined]
    if "apply_rotary_pos_emb" in names:
        rotate = names["apply_rotary_pos_emb"]
        namespace.apply_rotary_pos_emb = _rope_function(rotate)  # type: ignore[attr-defined]


def _mask_function(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def mask(*args: Any, **kwargs: Any) -> Any:
        active = _active_run()
        if active is None:
            return original(*args, **kwargs)
        reference, run = active
        n = run.positions.shape[1]
        config = kwargs.get("config", args[0] if args else reference.config)
        window = getattr(config, "sliding_window", None) if "sliding" in name else None
        allowed = window_mask(n, window, reference.device)
        if "chunked" in name:
            size = config.attention_chunk_size
            chunks = torch.arange(n, device=reference.device) // size
            allowed = allowed & (chunks[:, None] == chunks[None])
        if run.masks.get(-1) is not None:  # for architectures whose attention cannot be edited
            allowed = run.masks[-1][0]
        closed = torch.finfo(reference.dtype).min
        dense = torch.zeros(n, n, dtype=reference.dtype, device=reference.device)
        return dense.masked_fill(~allowed, closed)[None, None]

    return mask


def _attention_function(original: Callable[..., Any]) -> Callable[..., Any]:
    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> Any:
        active = _active_run()
        if active is None:
            options = kwargs if scaling is None else {"scaling": scaling, **kwargs}
            return original(module, query, key, value, attention_mask, **options)
        reference, run = active
        layer, n = run.layer, query.shape[2]
        rows = {QUERY: query, KEY: key, VALUE: value}
        run.values |= {(name, layer): tensor.detach() for name, tensor in rows.items()}
        if run.noise:
            query, key, value = (run.perturb(one) for one in (query, key, value))
        allowed = run.masks.get(layer)
        if allowed is None and attention_mask is None:
            allowed = reference.own_mask(layer, n)
        if allowed is None and attention_mask is not None:
            allowed = attention_mask[0] > torch.finfo(query.dtype).min / 2
        assert allowed is not None
        plain = AttentionInput(
            module, layer, query, key, value, allowed[None], run.biases.get(layer), scaling, kwargs
        )
        output = reference.attend(original, plain)
        for edit, scope in run.edits:
            if edit.attention is not None and scope.has(layer):
                changed = edit.attention(copy.copy(plain))
                if run.ends is not None:
                    keys = torch.arange(changed.allowed.shape[-1], device=run.ends.device)
                    changed.allowed = changed.allowed & (keys[None] < run.ends[:, None])
                edited = reference.attend(original, changed)
                output = mix_rows(output, edited, scope.first_row, 1)
        return output, None

    return attention


def _rope_function(rotate: Callable[..., Any]) -> Callable[..., Any]:
    def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        def plain(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
            turned: tuple[Tensor, Tensor] = rotate(query, key, cos, sin, *args, **kwargs)
            return turned

        result = plain(q, k, cos, sin)
        active = _active_run()
        if active is None:
            return result
        reference, run = active
        for edit, scope in run.edits:
            if edit.rope is None or not scope.has(run.layer):
                continue
            turn = Rotation(plain, q, k, cos, sin, run.positions, _tables_of(reference, cos))
            query, key = edit.rope(turn)
            result = (
                mix_rows(result[0], query, scope.first_row, q.dim() - 2),
                mix_rows(result[1], key, scope.first_row, k.dim() - 2),
            )
        return result

    return rope


def _tables_of(reference: Reference, like: Tensor) -> Callable[..., tuple[Tensor, Tensor]]:
    def tables(positions: Tensor, theta: float | None = None) -> tuple[Tensor, Tensor]:
        module = next(
            (m for m in reference.model.modules() if hasattr(m, "inv_freq")), None
        )
        frequencies = module.inv_freq.float() if module is not None else None
        scale = float(getattr(module, "attention_scaling", 1.0))
        if theta is not None or frequencies is None:
            size = like.shape[-1]
            steps = torch.arange(0, size, 2, device=like.device).float() / size
            frequencies, scale = 1.0 / ((theta or 10000.0) ** steps), 1.0
        angles = positions[..., None].float() * frequencies.to(like.device)
        both = torch.cat((angles, angles), -1)
        if like.shape[-1] == angles.shape[-1]:  # tables of half the size
            both = angles
        return (both.cos() * scale).to(like.dtype), (both.sin() * scale).to(like.dtype)

    return tables
