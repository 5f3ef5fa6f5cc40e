"""The reference: an untouched copy of the model's architecture that shares the model's weights.

It runs in eager mode, without a cache, in eval mode. Its masks are made here and passed to every
layer, and its attention function, rotary embedding and modules can be edited; see `forward_edits`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flexinspect.core.errors import FlexInspectError
from flexinspect_hooks.audit.evidence.expert_routing import is_router, routed
from flexinspect_hooks.audit.forward.forward_edits import AttentionInput
from flexinspect_hooks.audit.forward.forward_run import (
    ATTENTION,
    CROSS,
    EMBEDDING,
    HEADS,
    HIDDEN,
    LOGITS,
    Point,
    Run,
    StopForwardError,
    active_run,
    mix_rows,
    output_projection,
    set_active_run,
    window_mask,
)
from flexinspect_hooks.audit.forward.module_state import RowStates
from flexinspect_hooks.audit.forward.program_modules import own_tensors, program_module, width_of
from flexinspect_hooks.audit.forward.weights import Snapshot, is_pure
from flexinspect_hooks.audit.reference.clean_classes import clean_class
from flexinspect_hooks.audit.reference.copied_functions import prepare
from flexinspect_hooks.audit.reference.encoder_runner import encoder_runner
from flexinspect_hooks.capture.model_layers import (
    attention_layers,
    cross_attention,
    decoder_blocks,
    decoder_stack,
)
from flexinspect_hooks.capture.rank_facts import is_split
from flexinspect_hooks.python_internals.torch_private import init_weights

BLOCKS = ("mlp", "feed_forward")
"""Names of modules with children that an edit may change, besides the attention."""
_MAX_NAMED = 4
"""How many modules of the program a note names."""


class ReferenceModel:
    """An untouched model with the weights of a snapshot, in float32 or another dtype.

    A model with an encoder takes what the encoder read from the run; its layers are the decoder's.
    Raises `FlexInspectError` if the architecture is not one of transformers, or its weights do not
    fit.
    """

    def __init__(self, source: Snapshot, dtype: torch.dtype = torch.float32) -> None:
        if any(is_split(one) for one in source.parameters):
            raise FlexInspectError(
                "The weights are split over ranks, and the audit needs whole ones."
            )
        cls, self.namespace = clean_class(source.model_class)
        prepare(self.namespace)
        self.dtype = dtype
        config = copy.deepcopy(source.config)
        config._attn_implementation = "eager"
        with torch.device("meta"):
            self.model: Any = cls(config)
        self.model.eval()
        self.config = self.model.config
        self.notes: list[str] = []
        self.taken: dict[str, nn.Module] = {}
        """The modules of the program that are used as they are, by name."""
        self.taken_widths: dict[str, int] = {}
        """How many inputs each of these has."""
        self.row_states: RowStates | None = None
        """The states that these had in the steps that are judged, if they are others now."""
        self._assign(source)
        layer_of = attention_layers(self.model)
        self.blocks = decoder_blocks(self.model, layer_of)
        if not self.blocks:
            raise FlexInspectError(f"No attention layers were found in {cls.__name__}.")
        self.encoder_runner = encoder_runner(self.model, self.dtype)
        self.cross_attention = {id(m) for m in cross_attention(self.model, layer_of).values()}
        self._install(layer_of)
        self.device = next(iter(source.parameters)).device
        self.program_attributes = source.attributes

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
                self._take(name, module)
                setattr(self.model.get_submodule(parent), last, module)
        if source.grafts:
            kinds = sorted({type(one).__name__ for one in source.grafts.values()})
            self.notes.append(f"modules of other libraries are used as they are: {kinds}")
        self._use_low_rank(source)
        self._use_program_modules(source)
        for name, tensor in list(self.model.named_parameters(remove_duplicate=False)):
            if tensor.is_meta:
                held = source.tensors.get(name)
                if held is None or held.shape != tensor.shape or not held.is_floating_point():
                    held = self._usual_value(name, tensor, device, source.classes)
                self._set(name, nn.Parameter(self._convert(held), requires_grad=False))
        for name, buffer in list(self.model.named_buffers(remove_duplicate=False)):
            if buffer.is_meta:
                if name not in source.tensors:
                    raise FlexInspectError(f"The table {name} of the architecture cannot be made.")
                self._set(name, self._convert(source.tensors[name]), is_buffer=True)

    def _use_low_rank(self, source: Snapshot) -> None:
        """Use adapters that the program made by hand in the place of linear layers."""
        used = set[str]()
        for name, module in source.low_rank.items():
            own = self.model.get_submodule(name) if self._has_module(name) else None
            if _has_other_weights(module, source):
                raise FlexInspectError(
                    f"The program replaced weights of {name} after the steps ran."
                )
            if isinstance(own, nn.Linear) and is_pure(module, own.in_features, own.out_features):
                parent, _, last = name.rpartition(".")
                self._take(name, module)
                setattr(self.model.get_submodule(parent), last, module)
                used.add(type(module).__name__)
        if used:
            self.notes.append(
                f"low-rank adapters of the program are used as they are: {sorted(used)}"
            )

    def _use_program_modules(self, source: Snapshot) -> None:
        """Use modules that the program made, and whose weights are not those of the architecture.

        A norm without a weight of its own has the initial one, and is judged.
        """
        root, used = source.root(), dict[str, str]()
        for name, tensor in list(self.model.named_parameters(remove_duplicate=False)):
            owner, _, last = name.rpartition(".")
            held = source.tensors.get(name)
            is_held = held is not None and held.shape == tensor.shape and held.is_floating_point()
            if not tensor.is_meta or is_held or any(f"{name}.".startswith(one) for one in used):
                continue
            if last != "weight" or (self._is_norm(owner) and not self._has_tensors(root, owner)):
                continue
            if (found := program_module(self.model, root, owner)) is not None:
                place, module = found
                parent, _, leaf = place.rpartition(".")
                self._take(place, module)
                setattr(self.model.get_submodule(parent), leaf, module)
                used[f"{place}."] = f"{place} ({source.classes[place]})"
        if used:
            listed = list(used.values())
            more = f" and {len(listed) - _MAX_NAMED} more" if len(listed) > _MAX_NAMED else ""
            those = f"{', '.join(listed[:_MAX_NAMED])}{more}"
            self.notes.append(f"modules of the program are used as they are: {those}")

    def _take(self, name: str, module: nn.Module) -> None:
        """Note a module of the program before it is put in the place of the reference's."""
        if not self.is_taken(name):
            self.taken[name] = module
            self.taken_widths[name] = width_of(self.model.get_submodule(name))

    def is_taken(self, name: str) -> bool:
        """Whether a module is one of the program's that is used as it is, or in one."""
        return any(f"{name}.".startswith(f"{one}.") for one in self.taken)

    def _is_norm(self, name: str) -> bool:
        return "norm" in type(self.model.get_submodule(name)).__name__.lower()

    def _has_tensors(self, root: nn.Module, name: str) -> bool:
        found = dict(root.named_modules()).get(name)
        return found is not None and any(True for _ in own_tensors(found))

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

    def _usual_value(
        self, name: str, like: Tensor, device: torch.device, classes: Mapping[str, str]
    ) -> Tensor:
        """Return the initial value of a norm's weight or of a bias that the model does not have."""
        owner = name.rpartition(".")[0]
        module = self.model.get_submodule(owner)
        if "norm" not in type(module).__name__.lower() and not name.endswith(".bias"):
            own, theirs = type(module).__name__, classes.get(owner)
            if theirs in (None, own):
                raise FlexInspectError(f"The model has no weights {name} of the expected shape.")
            raise FlexInspectError(
                f"The program replaced {owner} ({own}) by {theirs}, which has other weights, so "
                "there is nothing to compare with."
            )
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
        prefixes = {f"{name}.": layer for layer, (name, _) in self.blocks.items()}
        for number, (_, block) in self.blocks.items():
            block.register_forward_pre_hook(self._before_block(number), with_kwargs=True)
            block.register_forward_hook(self._after_block(number))
        for name, module in self.model.named_modules():
            layer = next((n for p, n in prefixes.items() if name.startswith(p)), None)
            if id(module) in layer_of:
                number, is_cross = layer_of[id(module)], id(module) in self.cross_attention
                quantity = CROSS if is_cross else ATTENTION
                module.register_forward_hook(self._after_attention(number, quantity))
                projection = output_projection(module)
                if projection is not None and not is_cross:
                    projection.register_forward_pre_hook(self._before_projection(number))
            if layer is not None and is_router(module):
                module.register_forward_hook(self._after_router(layer))
            last, is_leaf = name.rpartition(".")[2], not any(True for _ in module.children())
            if name and (is_leaf or id(module) in layer_of or last in BLOCKS):
                module.register_forward_hook(self._after_module(last, layer))
        # The last hook, so that the value that is kept has the edits of the module in it.
        stack: Any = decoder_stack(self.model)
        embedding = (self.model if stack is None else stack).get_input_embeddings()
        embedding.register_forward_hook(self._on_embedding)
        positions = getattr(stack, "embed_positions", None)
        if positions is not None:
            positions.register_forward_pre_hook(self._before_positions, with_kwargs=True)

    def _on_embedding(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        run = self._run_of()
        if run is None:
            return None
        run.values[EMBEDDING, None] = output.detach()
        return run.perturb(output)

    def _before_positions(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Let a decoder that counts its positions by itself look up those of the run."""
        run = self._run_of()
        if run is None or "position_ids" not in kwargs:
            return None
        return args, kwargs | {"position_ids": run.positions[0]}

    def _run_of(self) -> Run | None:
        active = active_run()
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
                raise StopForwardError
            if not run.noise:
                return None
            noisy = run.perturb(rows)
            return (noisy, *output[1:]) if isinstance(output, tuple) else noisy

        return after

    def _after_router(self, layer: int) -> Callable[..., Any]:
        def after(module: nn.Module, args: Any, output: Any) -> Any:
            run = self._run_of()
            return None if run is None else routed(output, run, layer)

        return after

    def _after_attention(self, layer: int, quantity: str) -> Callable[..., Any]:
        def after(module: nn.Module, args: Any, output: Any) -> None:
            run = self._run_of()
            if run is not None:
                rows = output[0] if isinstance(output, tuple) else output
                run.values[quantity, layer] = rows.detach()

        return after

    def _before_projection(self, layer: int) -> Callable[..., Any]:
        def before(module: nn.Module, args: Any) -> Any:
            run = self._run_of()
            if run is None:
                return None
            run.values[HEADS, layer] = args[0].detach()
            return (run.perturb(args[0]), *args[1:]) if run.noise else None

        return before

    def _after_module(self, last: str, layer: int | None) -> Callable[..., Any]:
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

    def run(
        self, ids: Sequence[int], run: Run, logit_rows: Sequence[int] = ()
    ) -> dict[Point, Tensor]:
        """Return the values of one forward over `ids`: (1, rows, …) per point.

        The logits are those of `logit_rows`, (1, rows, vocabulary).
        """
        run.values, run.routes = {}, {}
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
        if self.encoder_runner is not None:
            # Without `position_ids`, which such a model does not take.
            arguments = self.encoder_runner.arguments(run) | {"use_cache": False}
        arguments["input_ids" if self.encoder_runner is None else "decoder_input_ids"] = table
        with self._active(run, logit_rows or [len(ids) - 1]), torch.no_grad():
            try:
                # `forward` itself: the root's own call may be watched.
                output = self.model.forward(**arguments)
            except StopForwardError:
                return run.values
        logits = getattr(output, "logits", None)
        if logits is None:  # a model without a head
            return run.values
        if logits.shape[1] == len(ids) and len(logit_rows) != len(ids):
            logits = logits[:, list(logit_rows) or [len(ids) - 1]]
        run.values[LOGITS, None] = logits.detach()
        return run.values

    @contextmanager
    def _active(self, run: Run, logit_rows: Sequence[int]) -> Iterator[None]:
        before = active_run()
        set_active_run((self, run))
        with ExitStack() as stack:
            if self.row_states is not None:
                n, modules = run.positions.shape[1], self.taken.values()
                stack.enter_context(self.row_states.set_by_rows(modules, n, logit_rows))
            for hooked in run.hooks:
                module = self.model.get_submodule(hooked.hook.name)
                stack.callback(hooked.install(module, run.positions.shape[1], logit_rows))
            for edit, _ in run.edits:
                for name, value in edit.config.items():
                    stack.callback(setattr, self.config, name, getattr(self.config, name, None))
                    setattr(self.config, name, value)
                for name, values in edit.attributes.items():
                    module = self.model.get_submodule(name)
                    for attribute, value in values.items():
                        stack.callback(setattr, module, attribute, getattr(module, attribute))
                        setattr(module, attribute, value)
            try:
                yield
            finally:
                set_active_run(before)

    def layer_window(self, layer: int) -> int | None:
        """Return the sliding window of a layer, None without one."""
        kinds = getattr(self.config, "layer_types", None)
        window = getattr(self.config, "sliding_window", None)
        if kinds is not None and layer < len(kinds):
            return window if kinds[layer] == "sliding_attention" else None
        uses = getattr(self.config, "use_sliding_window", True)
        return (
            window if "create_sliding_window_causal_mask" in vars(self.namespace) and uses else None
        )

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
        args = (call.module, call.query, call.key, call.value, mask)
        output: Tensor = original(*args, **options)[0]
        is_empty = ~call.allowed.any(-1)  # (1, heads, rows)
        if bool(is_empty.any()):
            output = output.masked_fill(is_empty.transpose(1, 2)[..., None], 0)
        return output


def _has_other_weights(module: nn.Module, source: Snapshot) -> bool:
    """Whether a module of the program has parameters that it did not have then."""
    known = {id(one) for one in source.parameters}
    return any(id(one) not in known for one in module.parameters())
