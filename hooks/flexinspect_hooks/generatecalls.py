"""A wrapper around one model's `generate`, in the model itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

from flexinspect_hooks.hook import Remove

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
