"""Helpers for a model that code of the user runs: its `generate`, logits, and installed hooks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from flexinspect_hooks.capture.hook import Remove
from flexinspect_hooks.python_internals.torch_private import is_hook_installed

GenerateCall = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Makes a call of the model's own `generate` (bound) with these arguments."""


def wrap_generate(model: nn.Module, call: GenerateCall) -> Remove | None:
    """Replace `model.generate` by a wrapper that calls `call`.

    Returns a function that restores it, or None if the model has no `generate`.
    """
    original = getattr(model, "generate", None)
    if not callable(original):
        return None
    own = vars(model).get("generate")

    @functools.wraps(getattr(original, "__func__", original))
    def generate(this: Any, *args: Any, **kwargs: Any) -> Any:
        if this is not model:
            return type(this).generate(this, *args, **kwargs)
        return call(original, args, kwargs)

    def remove() -> None:
        vars(model).pop("generate", None)
        if own is not None:
            vars(model)["generate"] = own

    # A bound method, so that a copy of the model calls its own `generate` and not this model's.
    vars(model)["generate"] = MethodType(generate, model)
    return remove


_UNFOLLOWED_ARGUMENTS = ("assistant_model", "prompt_lookup_num_tokens", "penalty_alpha")


def is_followed(model: nn.Module, kwargs: dict[str, Any]) -> bool:
    """Whether a call of `generate` appends to row 0 the token that row 0 chose, one at a time.

    Beam search, assisted generation, prompt look-up and contrastive search do not.
    """
    configs = (kwargs.get("generation_config"), getattr(model, "generation_config", None))

    def option(name: str) -> Any:
        values = [kwargs.get(name), *(getattr(config, name, None) for config in configs)]
        return next((value for value in values if value is not None), None)

    is_single = (option("num_beams") or 1) == 1
    return is_single and not any(option(name) for name in _UNFOLLOWED_ARGUMENTS)


def has_encoder(model: nn.Module) -> bool:
    """Whether the prompt goes to an encoder, and the decoder begins with a token of its own."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def newest_logits_row(output: Any, model: nn.Module, *, copy: bool) -> Tensor | None:
    """Return the newest row of logits (V,) of batch 0, None if the output has none."""
    logits = getattr(output, "logits", None)
    if logits is None:
        size = getattr(getattr(model, "config", None), "vocab_size", None)
        parts = output if isinstance(output, tuple) else (output,)
        tensors = [part for part in parts if isinstance(part, Tensor) and part.dim() == 3]
        logits = next((tensor for tensor in tensors if tensor.shape[2] == size), None)
    if not isinstance(logits, Tensor) or logits.dim() != 3 or not logits.shape[1]:
        return None
    row = logits[0, -1].detach()
    return row.clone() if copy else row


HOOKS_REMOVED = "The program removed hooks of flexinspect from the model"


def are_installed(removes: Iterable[Any]) -> bool:
    """Whether every module hook is still installed whose `RemovableHandle.remove` is given."""
    owners = (getattr(remove, "__self__", None) for remove in removes)
    return all(is_hook_installed(owner) for owner in owners if isinstance(owner, RemovableHandle))
