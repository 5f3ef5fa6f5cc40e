"""The modules of a model that are watched, and models that are compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

Remove = Callable[[], None]


def is_compiled(model: nn.Module) -> bool:
    """Tell whether a model is what `torch.compile` returned. Asks without loading the compiler."""
    return type(model).__name__ == "OptimizedModule"


def is_compiled_in_place(model: nn.Module) -> bool:
    """Tell whether `model.compile()` was called: then its hooks would be compiled with it."""
    return getattr(model, "_compiled_call_impl", None) is not None


def wrap_compiled(model: nn.Module, begin: Callable[..., None], end: Callable[..., None]) -> Remove:
    """Call `begin` and `end` around what `model.compile()` made; returns what ends it."""
    compiled: Any = model._compiled_call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        begin(model, args, kwargs)
        output = None
        try:
            output = compiled(*args, **kwargs)
        finally:
            end(model, args, output)
        return output

    def restore() -> None:
        if model._compiled_call_impl is call:
            model._compiled_call_impl = compiled

    model._compiled_call_impl = call
    return restore


def leaves_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules that hold no others, in the model's order."""
    return [(name, one) for name, one in model.named_modules() if not any(one.children())]


def blocks_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the layers: members of module lists, and whatever stands beside them.

    Goes down where a module holds a list somewhere, and takes it whole where it does not.
    """
    return list(_blocks("", model))


def _blocks(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        lists = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
        if isinstance(child, lists):
            yield from ((f"{path}.{key}", one) for key, one in child.named_children())
        elif any(isinstance(one, lists) for one in child.modules()):
            yield from _blocks(path, child)
        else:
            yield path, child
