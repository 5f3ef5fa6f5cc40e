"""A wrapper around one model's `generate`, in the model itself."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from flexinspect_hooks.capture.hook import Remove

GenerateCall = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Makes a call of the model's own `generate` (bound) with these arguments."""


def wrap_generate(model: nn.Module, call: GenerateCall) -> Remove | None:
    """Let `call` make the calls of `generate`; return what ends that, None where there is none."""
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

    # A method, so that a copy of the model calls itself and not this one.
    vars(model)["generate"] = MethodType(generate, model)
    return remove


_UNFOLLOWED_ARGUMENTS = ("assistant_model", "prompt_lookup_num_tokens", "penalty_alpha")


def is_followed(model: nn.Module, kwargs: dict[str, Any]) -> bool:
    """Say whether a call of generate feeds row 0 what row 0 chose, one token at a time."""
    configs = (kwargs.get("generation_config"), getattr(model, "generation_config", None))

    def asked(name: str) -> Any:
        values = [kwargs.get(name), *(getattr(config, name, None) for config in configs)]
        return next((value for value in values if value is not None), None)

    return (asked("num_beams") or 1) == 1 and not any(asked(name) for name in _UNFOLLOWED_ARGUMENTS)


def has_encoder(model: nn.Module) -> bool:
    """Say whether the prompt goes to an encoder, and the decoder begins with a token of its own."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def newest_logits_row(output: Any, model: nn.Module, *, copy: bool) -> Tensor | None:
    """Return the newest row of logits (V,) of batch 0, None when there are none."""
    logits = getattr(output, "logits", None)
    if logits is None:
        size = getattr(getattr(model, "config", None), "vocab_size", None)
        parts = output if isinstance(output, tuple) else (output,)
        whole = [part for part in parts if isinstance(part, Tensor) and part.dim() == 3]
        logits = next((part for part in whole if part.shape[2] == size), None)
    if not isinstance(logits, Tensor) or logits.dim() != 3 or not logits.shape[1]:
        return None
    row = logits[0, -1].detach()
    return row.clone() if copy else row


HOOKS_REMOVED = "The program took hooks of the capture out of the model"


def are_installed(removes: Iterable[Any]) -> bool:
    """Say whether each hook is in place that one of these would take out of a module."""
    handles = (getattr(remove, "__self__", None) for remove in removes)
    return all(_is_installed(one) for one in handles if isinstance(one, RemovableHandle))


def _is_installed(handle: RemovableHandle) -> bool:
    hooks = handle.hooks_dict_ref()
    return hooks is not None and handle.id in hooks
