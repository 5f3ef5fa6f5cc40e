"""Programs that do not call a model, but its decoder layers, or the parts of these, themselves.

Such a loop embeds the tokens, calls the layers and the final norm, and then the output embeddings.
Nothing calls the root module, so a step begins with the first decoder layer, or the first of its
parts, and ends with the output embeddings or before the next step.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from flexinspect_hooks.capture.model_layers import (
    attention_layers,
    decoder_blocks,
    decoder_stack,
    output_embeddings,
)

Made = Callable[[], Iterator[nn.Module]]
"""Returns the models that were made and still exist."""


class LayerLoopSession(Protocol):
    """The session of a model, whose steps may begin and end inside of it."""

    def begin_in_layer(self, arguments: dict[str, Any], part: str) -> None:
        """Open a step; `part` is the part of the first layer that was called, "" for all of it."""


class LayerLoops:
    """Finds decoder layers, and parts of the first one, called outside of their model's forward.

    `find` returns the session of a model, `local.root` is the `id` of the model whose forward runs
    in this thread.
    """

    def __init__(
        self,
        made: Made,
        find: Callable[[nn.Module], LayerLoopSession | None],
        local: threading.local,
    ) -> None:
        self._made, self._find, self._local = made, find, local
        self._owners: WeakKeyDictionary[nn.Module, weakref.ref[nn.Module] | None]
        self._owners = WeakKeyDictionary()  # of first layers
        self._thread = threading.local()
        self._removes: list[Callable[[], None]] = []

    def follow(self, model: nn.Module) -> None:
        """Watch the first decoder layer of a model that was made, and its input embeddings."""
        if decoder_stack(model) is not None:
            return  # with an encoder, a step has two stacks of layers
        blocks = decoder_blocks(model, attention_layers(model))
        first = next((block for _, block in blocks.values()), None)
        if first is None or first in self._owners:
            return
        embedding: Any = None
        with suppress(NotImplementedError, AttributeError):
            embedding = model.get_input_embeddings()  # type: ignore[operator]
        if not isinstance(embedding, nn.Module):
            return
        self._owners[first] = None  # the model that will call it may not be complete yet

        # Functions: a copy of the model would copy a bound method, and its object.
        def on_embedding(module: nn.Module, args: tuple[Any, ...]) -> None:
            if not torch.compiler.is_compiling() and not self._is_inside:
                self._thread.ids = args[0] if args else None

        def on_layer(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not torch.compiler.is_compiling() and not self._is_inside:
                self._begin(module, args, kwargs, "")
                self._thread.in_layer = True

        def after_layer(module: nn.Module, args: Any, output: Any) -> None:
            if not torch.compiler.is_compiling():
                self._thread.in_layer = False

        def on_rotary(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not torch.compiler.is_compiling() and not self._is_inside:
                self._thread.positions = kwargs.get("position_ids", next(iter(args[1:2]), None))

        rotary = getattr(getattr(model, "base_model", None), "rotary_emb", None)
        if isinstance(rotary, nn.Module):
            handle = rotary.register_forward_pre_hook(on_rotary, with_kwargs=True)
            self._removes.append(handle.remove)
        self._removes.append(embedding.register_forward_pre_hook(on_embedding).remove)
        self._removes.append(first.register_forward_pre_hook(on_layer, with_kwargs=True).remove)
        self._removes.append(first.register_forward_hook(after_layer, always_call=True).remove)
        for name, part in first.named_children():
            hook = self._part_hook(weakref.ref(first), name)
            self._removes.append(part.register_forward_pre_hook(hook, with_kwargs=True).remove)

    def _part_hook(self, layer: weakref.ref[nn.Module], name: str) -> Callable[..., None]:
        def on_part(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if torch.compiler.is_compiling() or self._is_inside:
                return
            first = layer()
            if first is not None and not getattr(self._thread, "in_layer", False):
                self._begin(first, args, kwargs, name)

        return on_part

    def close(self) -> None:
        """Remove every hook."""
        while self._removes:
            self._removes.pop()()

    @property
    def _is_inside(self) -> bool:
        return bool(getattr(self._local, "root", None))

    def _begin(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], part: str
    ) -> None:
        owner = self._owner_of(layer)
        session = None if owner is None else self._find(owner)
        hidden = args[0] if args else kwargs.get("hidden_states")
        if session is None or not isinstance(hidden, Tensor) or hidden.dim() != 3:
            return
        arguments = {"input_ids": self._ids_of(hidden), "inputs_embeds": hidden}
        for name in ("position_ids", "past_key_values"):
            arguments[name] = kwargs.get(name)
        positions = self._positions_of(hidden)
        if arguments["position_ids"] is None:
            arguments["position_ids"] = positions
        session.begin_in_layer({n: one for n, one in arguments.items() if one is not None}, part)

    def _owner_of(self, layer: nn.Module) -> nn.Module | None:
        """Return the model of a layer: with output embeddings, if there is such a one."""
        known = self._owners.get(layer)
        if known is not None:
            return known()
        owners = [model for model in self._made() if any(one is layer for one in model.modules())]
        found = max(owners, key=lambda model: output_embeddings(model) is not None, default=None)
        if found is not None:
            self._owners[layer] = weakref.ref(found)
        return found

    def _ids_of(self, hidden: Tensor) -> Tensor | None:
        """Return the token ids that were embedded last, (batch, rows), if they fit."""
        ids, self._thread.ids = getattr(self._thread, "ids", None), None
        if not isinstance(ids, Tensor) or ids.is_floating_point():
            return None
        ids = ids[None] if ids.dim() == 1 else ids
        return ids if ids.shape == hidden.shape[:2] else None

    def _positions_of(self, hidden: Tensor) -> Tensor | None:
        """Return the positions for which angles were computed last, (batch, rows), if they fit."""
        known, self._thread.positions = getattr(self._thread, "positions", None), None
        if not isinstance(known, Tensor) or known.is_floating_point() or known.dim() != 2:
            return None
        return known if known.shape[1] == hidden.shape[1] else None


class BaseModels:
    """Finds the model with output embeddings whose base model a program calls itself."""

    def __init__(self, made: Made) -> None:
        self._made = made
        self._owners: WeakKeyDictionary[nn.Module, weakref.ref[nn.Module] | None]
        self._owners = WeakKeyDictionary()

    def owner_of(self, model: nn.Module) -> nn.Module | None:
        """Return the owner of a base model, None for any other model."""
        if model not in self._owners:
            owners = (one for one in self._made() if _is_owner(one, model))
            owner = next(owners, None)
            self._owners[model] = None if owner is None else weakref.ref(owner)
        found = self._owners[model]
        return None if found is None else found()


def _is_owner(owner: Any, model: nn.Module) -> bool:
    is_base = owner is not model and getattr(owner, "base_model", None) is model
    has_encoder = bool(getattr(getattr(owner, "config", None), "is_encoder_decoder", False))
    return is_base and not has_encoder and output_embeddings(owner) is not None


def on_logits(model: nn.Module, end: Callable[[Tensor], None]) -> Callable[[], None] | None:
    """Call `end` with the logits (batch, rows, vocabulary) whenever a model's module computes some.

    Returns a function that stops it, None for a model without such a module. The model is not kept
    alive.
    """
    module = output_embeddings(model)
    if module is None:
        return None
    known = weakref.ref(module)

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or module is not known():
            return
        if isinstance(output, Tensor) and output.dim() in (2, 3):
            end(output if output.dim() == 3 else output[:, None])

    return module.register_forward_hook(hook).remove
